import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.factorization import HeadTensor, SolverOptions
from collab_compress.factorization.als import Continuation, als
from collab_compress.factorization.iterate import Channels, Direction, Iterate
from collab_compress.factorization.spare import narrowed, widened
from collab_compress.factorization.truncation import singular_channels

SHAPES = st.tuples(st.integers(1, 4), st.integers(2, 8), st.integers(2, 8), st.integers(1, 4))


@given(SHAPES, st.integers(1, 5), st.integers(1, 6), st.integers(0, 99))
def test_what_is_added_is_what_the_dense_residual_lacks(
    make_heads, make_point, factors_of, dense_of, shape, rank, count, seed
):
    """Each component lowers the squared error by the square of the residual's part on its singular pair."""
    tensor, values = singular_channels(make_heads(*shape, seed=seed))
    count = min(count, values.numel())
    point, factors = make_point(tensor, rank, seed=seed + 1)
    residual = tensor.dense() - dense_of(factors)
    lacking = [
        (tensor.query[head, :, place] @ residual[head] @ tensor.key[head, :, place] / value).abs().item() ** 2
        for head, row in enumerate(values)
        for place, value in enumerate(row)
    ]
    wide = widened(point, Channels.of(tensor), count)
    assert wide.query.shape[1] == rank + count
    left = (tensor.dense() - dense_of(factors_of(tensor, wide))).square().sum()
    expected = residual.square().sum() - sum(sorted(lacking, reverse=True)[:count])
    torch.testing.assert_close(left, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(wide.values, wide.seen_by(Channels.of(tensor)).values, rtol=1e-6, atol=1e-8)


def test_the_largest_components_are_kept_and_dead_ones_never(make_heads, make_point):
    tensor = make_heads(3, 9, 8, 4)
    point, factors = make_point(tensor, 6)
    norms = factors.query.norm(dim=0) * factors.mixing.norm(dim=0) * factors.key.norm(dim=0)
    kept = norms.argsort(descending=True)[:4].sort().values
    torch.testing.assert_close(narrowed(point, 4).mixing, factors.mixing[:, kept])
    values = point.values.clone()
    values[:, kept[:2]] *= 1e-3
    found = narrowed(Iterate.at(Direction(values, point.heads)), 5)
    assert found.query.shape[1] == 4


def test_spare_components_are_there_for_a_part_of_the_search_only():
    continuation = Continuation(widening=0.1, search=0.25, spare=1.25)
    widths = [continuation.width(sweep, 80, 16, 99) for sweep in range(80)]
    assert [(width, len(list(group))) for width, group in itertools.groupby(widths)] == [(16, 8), (20, 12), (16, 60)]
    assert continuation.width(10, 80, 16, 18) == 18
    assert continuation.width(200, 80, 16, 99) == 16


@pytest.mark.parametrize("first", [0.2, 10.0])
def test_components_that_the_first_ridge_kills_are_replaced(make_heads, monkeypatch, first):
    tensor = make_heads(4, 12, 11, 4)
    usual = als(tensor, 6, SolverOptions()).errors[-1]
    monkeypatch.setattr("collab_compress.factorization.als.Continuation", lambda: Continuation(first=first))
    assert als(tensor, 6, SolverOptions()).errors[-1] == pytest.approx(usual, rel=0.05)


def test_the_end_is_a_fixed_point_of_plain_least_squares(make_heads):
    tensor = make_heads(3, 12, 11, 4)
    solution = als(tensor, 5, SolverOptions(sweeps=2000, tolerance=0.0))
    assert solution.converged
    norm = tensor.squared_norm().item()
    own = HeadTensor(tensor.query / norm**0.25, tensor.key / norm**0.25)
    coefficients = [
        torch.linalg.lstsq(side, factor / norm**0.25).solution
        for side, factor in ((own.flat_query, solution.factors.query), (own.flat_key, solution.factors.key))
    ]
    channels = Channels.of(own)
    point = Iterate.at(Direction.of(channels, coefficients[0], solution.factors.mixing, coefficients[1]))
    after = point
    for _ in range(20):
        after = Iterate.at(after.swept(channels, 0.0))
    assert point.relative_error(channels) == pytest.approx(solution.errors[-1], abs=1e-7)
    assert solution.errors[-1] - 1e-6 <= after.relative_error(channels) <= solution.errors[-1] + 1e-9
