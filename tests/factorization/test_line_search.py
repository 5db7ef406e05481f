import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.factorization.als import Direction, Iterate, Line, positive_minimiser

SHAPES = st.tuples(st.integers(1, 4), st.integers(2, 8), st.integers(2, 8), st.integers(1, 4))


def value(tensor, factors, dense_of, ridge):
    penalty = sum(part.square().sum() for part in (factors.query, factors.mixing, factors.key))
    return ((tensor.dense() - dense_of(factors)).square().sum() + ridge * penalty).item()


@given(SHAPES, st.integers(1, 6), st.sampled_from([0.0, 0.3]), st.floats(-2, 2))
def test_polynomial_matches_the_dense_objective(make_heads, make_factors, dense_of, shape, rank, ridge, step):
    tensor = make_heads(*shape)
    point, other = make_factors(tensor, rank, seed=2), make_factors(tensor, rank, seed=3)
    direction = Direction(
        other.query, other.mixing, other.key, tensor.project_query(other.query), tensor.project_key(other.key)
    )
    line = Line.of(tensor, Iterate.of(tensor, point), direction, ridge)
    moved = type(point)(
        point.query + step * other.query, point.mixing + step * other.mixing, point.key + step * other.key
    )
    change = sum(c * step ** (k + 1) for k, c in enumerate(line.coefficients.tolist()))
    start = value(tensor, point, dense_of, ridge)
    assert start + change == pytest.approx(value(tensor, moved, dense_of, ridge), rel=1e-8, abs=1e-8)
    there, fresh = line.at(step), Iterate.of(tensor, moved)
    for name in fresh.__dataclass_fields__:
        torch.testing.assert_close(getattr(there, name), getattr(fresh, name), rtol=1e-8, atol=1e-8)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=5))
def test_minimiser_beats_a_grid(coefficients):
    coefficients = torch.tensor([*coefficients, 1.0], dtype=torch.float64)

    def at(step):
        return sum(c * step ** (k + 1) for k, c in enumerate(coefficients.tolist()))

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
    assert positive_minimiser(torch.tensor(coefficients, dtype=torch.float64)) == pytest.approx(expected)
