import pytest
import torch
from head_tensors import SHAPES, dense_of, factors_of, make_heads, make_point
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.factorization import Factors, HeadTensor
from collab_compress.factorization.factors import singular_channels
from collab_compress.factorization.point import (
    Channels,
    LineSearch,
    Point,
    Step,
    positive_minimiser,
    solve_normal_equations,
)


def dense_least_squares(dense, first, second, mode, ridge):
    """Solve one mode by an explicit design matrix with a row per entry of the other two modes."""
    design = torch.einsum("ar,br->abr", first, second).flatten(0, 1)
    unfolded = dense.movedim(mode, 0).flatten(1)
    system = design.T @ design + ridge * torch.eye(design.shape[1])
    return torch.linalg.solve(system, design.T @ unfolded.T).T


@given(SHAPES, st.integers(1, 3), st.integers(0, 99))
def test_an_iteration_is_four_dense_least_squares(shape, rank, seed):
    tensor, ridge = make_heads(*shape, seed=seed), 0.5
    channels = Channels(tensor)
    point, factors = make_point(tensor, rank, seed=seed)
    dense, key = tensor.dense(), factors.key
    mixing = dense_least_squares(dense, factors.query, key, 0, ridge)
    query = dense_least_squares(dense, mixing, key, 1, ridge)
    mixing = dense_least_squares(dense, query, key, 0, ridge)
    key = dense_least_squares(dense, mixing, query, 2, ridge)
    solved = point.solve(channels, ridge)
    ours = factors_of(tensor, solved)
    torch.testing.assert_close(dense_of(ours), dense_of(Factors(query, mixing, key)), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(solved.parts, solved.project_by(channels).parts, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(ours.query.norm(dim=0), ours.mixing.norm(dim=0), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(ours.query.norm(dim=0), ours.key.norm(dim=0), rtol=1e-6, atol=1e-8)


def entry_by_entry(factors, head, reads):
    """Return the products of the components that a head reads, as columns, (Dq·Dk, k)."""
    return torch.stack([torch.outer(factors.query[:, r], factors.key[:, r]).flatten() for r in reads.tolist()], 1)


@given(SHAPES, st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_mixing_weights_of_the_components_read_are_dense_least_squares(shape, rank, count, seed):
    tensor = make_heads(*shape, seed=seed)
    point, factors = make_point(tensor, rank, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    reads = torch.stack([torch.randperm(rank, generator=generator)[:count] for _ in range(tensor.heads)])
    mixing = factors_of(tensor, point.restrict(Channels(tensor), reads)).mixing
    for head, dense in enumerate(tensor.dense()):
        design = entry_by_entry(factors, head, reads[head])
        fit = design @ torch.linalg.lstsq(design, dense.flatten()[:, None], driver="gelsd").solution
        ours = design @ mixing[head, reads[head]]
        torch.testing.assert_close(ours, fit[:, 0], rtol=1e-6, atol=1e-6 * float(dense.norm()))
        assert set(mixing[head].nonzero()[:, 0].tolist()) <= set(reads[head].tolist())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("among", [None, 5])
def test_a_head_goes_on_reading_what_it_would_lose_most_without(among, seed):
    """Against a refit of the other entries of each head without each of its components."""
    tensor = make_heads(3, 7, 6, 3, seed=seed)
    point, factors = make_point(tensor, 7, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    reads = torch.stack([torch.randperm(7, generator=generator)[: among or 7].sort().values for _ in range(3)])
    point = point.restrict(Channels(tensor), reads)

    def lost(head, components):
        design, dense = entry_by_entry(factors, head, components), tensor.dense()[head].flatten()
        return float((dense - design @ torch.linalg.lstsq(design, dense[:, None]).solution[:, 0]).square().sum())

    for count in range(1, reads.shape[1]):
        kept = point.choose_reads(count, None if among is None else reads)
        for head in range(3):
            losses = {int(r): lost(head, reads[head][reads[head] != r]) for r in reads[head]}
            assert sorted(losses, key=losses.get, reverse=True)[:count] == sorted(
                kept[head].tolist(), key=losses.get, reverse=True
            )


def test_least_squares_of_singular_systems_are_finite():
    column = torch.tensor([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0]], dtype=torch.float64) * 1e-8
    right = torch.tensor([[3.0, 1.0]], dtype=torch.float64) @ column
    solution = solve_normal_equations(column.T @ column, right, 0.0)
    assert torch.isfinite(solution).all()
    torch.testing.assert_close(solution @ column.T, torch.tensor([[3.0, 1.0]]).double() @ _projector(column))
    assert solution[0, 2] == 0.0


def test_least_squares_that_fail_are_nan():
    indefinite = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)
    assert solve_normal_equations(indefinite, torch.ones(1, 2).double(), 0.0).isnan().all()
    assert solve_normal_equations(indefinite, torch.ones(1, 2).double(), 0.0, shift=1e16).isfinite().all()


def test_least_squares_of_float32_products_are_solved_in_float64():
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(50, 8, generator=generator, dtype=torch.float64)
    columns[:, 7] = columns[:, 6] + 1e-2 * columns[:, 7]
    right = torch.randn(20, 8, generator=generator, dtype=torch.float64) @ (columns.T @ columns)
    exact = solve_normal_equations(columns.T @ columns, right, 0.0)
    ours = solve_normal_equations((columns.T @ columns).float(), right.float(), 0.0)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, rtol=0.05, atol=0.05)


def _projector(matrix):
    return matrix @ torch.linalg.pinv(matrix)


@given(SHAPES, st.integers(1, 5), st.integers(1, 6), st.integers(0, 99))
def test_what_is_added_is_what_the_dense_residual_lacks(shape, rank, count, seed):
    """Each component lowers the squared error by the square of the residual's part on its singular pair."""
    tensor, values = singular_channels(make_heads(*shape, seed=seed))
    count = min(count, values.numel())
    point, factors = make_point(tensor, rank, seed=seed + 1)
    residual = tensor.dense() - dense_of(factors)
    lacking = [
        (tensor.query[head, :, index] @ residual[head] @ tensor.key[head, :, index] / value).abs().item() ** 2
        for head, row in enumerate(values)
        for index, value in enumerate(row)
    ]
    wide = point.widen(Channels(tensor), count)
    assert wide.query.shape[1] == rank + count
    remainder = (tensor.dense() - dense_of(factors_of(tensor, wide))).square().sum()
    expected = residual.square().sum() - sum(sorted(lacking, reverse=True)[:count])
    torch.testing.assert_close(remainder, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(wide.parts, wide.project_by(Channels(tensor)).parts, rtol=1e-6, atol=1e-8)


def test_the_largest_components_are_kept_and_dead_ones_never():
    tensor = make_heads(3, 9, 8, 4)
    point, factors = make_point(tensor, 6)
    norms = factors.query.norm(dim=0) * factors.mixing.norm(dim=0) * factors.key.norm(dim=0)
    largest = norms.argsort(descending=True)[:4].sort().values
    torch.testing.assert_close(point.narrow(4).mixing, factors.mixing[:, largest])
    sizes = torch.ones(6).double()
    sizes[largest[:2]] = 1e-3
    narrowed = Point.at(Step(*(part * sizes for part in point.parts))).narrow(5)
    assert narrowed.query.shape[1] == 4


def value(tensor, factors, ridge):
    penalty = sum(part.square().sum() for part in (factors.query, factors.mixing, factors.key))
    return ((tensor.dense() - dense_of(factors)).square().sum() + ridge * penalty).item()


@given(SHAPES, st.integers(1, 6), st.sampled_from([0.0, 0.3]), st.floats(-2, 2))
def test_polynomial_matches_the_dense_objective(shape, rank, ridge, step):
    tensor = make_heads(*shape)
    scale = tensor.squared_norm() ** 0.25
    tensor = HeadTensor(tensor.query / scale, tensor.key / scale)
    point, direction = make_point(tensor, rank, seed=2)[0], make_point(tensor, rank, seed=3)[0]
    line = LineSearch.of(Channels(tensor), point, direction, ridge)
    moved = line.at(step)
    for penalty, coefficients in ((0.0, line.squared), (ridge, line.squared + line.penalty)):
        ours = sum(c * step**power for power, c in enumerate(coefficients.tolist()))
        assert ours == pytest.approx(value(tensor, factors_of(tensor, moved), penalty), rel=1e-8, abs=1e-8)
    fresh = Point.at(moved.project_by(Channels(tensor)))
    torch.testing.assert_close(moved.parts, fresh.parts, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(moved.grams, fresh.grams, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(moved.query, point.query + step * direction.query)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=5))
def test_minimiser_beats_a_grid(coefficients):
    coefficients = [*coefficients, 1.0]

    def at(step):
        return sum(c * step ** (k + 1) for k, c in enumerate(coefficients))

    step = positive_minimiser(coefficients)
    lowest = min(at(0.01 * i) for i in range(1001))
    assert step >= 0.0
    assert at(step) <= min(lowest, 0.0) + 1e-6


@pytest.mark.parametrize(
    ("coefficients", "expected"),
    [
        ([-2.0, 1.0, 0.0], 1.0),
        ([1.0, 1.0], 0.0),
        ([0.0, 0.0], 0.0),
        ([-1.0, 0.0], 0.0),
        ([float("nan"), 1.0], 0.0),
        ([-1e6, 1.0], 100.0),
        ([-1e300, 1e-5, 0.0], 0.0),
    ],
)
def test_minimiser_of_simple_polynomials(coefficients, expected):
    assert positive_minimiser(coefficients) == pytest.approx(expected)
