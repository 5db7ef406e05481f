import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.factorization import Factors
from collab_compress.factorization.als import Iterate, least_squares

SHAPES = st.tuples(st.integers(1, 4), st.integers(2, 8), st.integers(2, 8), st.integers(1, 4))


def dense_least_squares(dense, first, second, mode, ridge):
    """Solve one mode by an explicit design matrix with a row per entry of the other two modes."""
    design = torch.einsum("ar,br->abr", first, second).flatten(0, 1)
    unfolded = dense.movedim(mode, 0).flatten(1)
    system = design.T @ design + ridge * torch.eye(design.shape[1])
    return torch.linalg.solve(system, design.T @ unfolded.T).T


@given(SHAPES, st.integers(1, 3), st.integers(0, 99))
def test_a_sweep_is_four_dense_least_squares(make_heads, make_factors, dense_of, shape, rank, seed):
    tensor, ridge = make_heads(*shape, seed=seed), 0.5
    factors = make_factors(tensor, rank, seed=seed)
    dense, key = tensor.dense(), factors.key
    mixing = dense_least_squares(dense, factors.query, key, 0, ridge)
    query = dense_least_squares(dense, mixing, key, 1, ridge)
    mixing = dense_least_squares(dense, query, key, 0, ridge)
    key = dense_least_squares(dense, mixing, query, 2, ridge)
    swept = Iterate.of(tensor, factors).swept(tensor, ridge)
    ours = Factors(swept.query, swept.mixing, swept.key)
    torch.testing.assert_close(dense_of(ours), dense_of(Factors(query, mixing, key)), rtol=1e-6, atol=1e-8)
    fresh = Iterate.of(tensor, ours)
    for name in fresh.__dataclass_fields__:
        torch.testing.assert_close(getattr(swept, name), getattr(fresh, name), rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(swept.query.norm(dim=0), swept.mixing.norm(dim=0), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(swept.query.norm(dim=0), swept.key.norm(dim=0), rtol=1e-6, atol=1e-8)


@given(SHAPES, st.integers(1, 6))
def test_free_error_matches_the_dense_error(make_heads, make_factors, dense_of, shape, rank):
    tensor = make_heads(*shape)
    factors = make_factors(tensor, rank)
    error = Iterate.of(tensor, factors).relative_error(tensor, tensor.squared_norm().item())
    expected = ((tensor.dense() - dense_of(factors)).norm() / tensor.dense().norm()).item()
    assert error == pytest.approx(expected, rel=1e-7)


def test_directions_add_and_multiply(make_heads, make_factors):
    tensor = make_heads(2, 3, 4, 2)
    one, two = (Iterate.of(tensor, make_factors(tensor, 3, seed=seed)) for seed in (1, 2))
    moved = one.plus(two, -0.5)
    torch.testing.assert_close(moved.query, one.query - 0.5 * two.query)
    torch.testing.assert_close(moved.projected_key, tensor.project_key(one.key - 0.5 * two.key))
    flat = [torch.cat([x.query.ravel(), x.mixing.ravel(), x.key.ravel()]) for x in (one, two)]
    torch.testing.assert_close(one.dot(two), flat[0] @ flat[1])


def test_least_squares_of_singular_systems_are_finite():
    column = torch.tensor([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0]], dtype=torch.float64) * 1e-8
    right = torch.tensor([[3.0, 1.0]], dtype=torch.float64) @ column
    solution = least_squares(column.T @ column, right, 0.0)
    assert torch.isfinite(solution).all()
    torch.testing.assert_close(solution @ column.T, torch.tensor([[3.0, 1.0]]).double() @ _projector(column))
    assert solution[0, 2] == 0.0


def test_least_squares_that_fail_are_nan():
    indefinite = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)
    assert least_squares(indefinite, torch.ones(1, 2).double(), 0.0).isnan().all()
    assert least_squares(indefinite, torch.ones(1, 2).double(), 0.0, shift=1e16).isfinite().all()


def _projector(matrix):
    return matrix @ torch.linalg.pinv(matrix)
