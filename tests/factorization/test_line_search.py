import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.factorization import HeadTensor
from collab_compress.factorization.iterate import Channels, Iterate
from collab_compress.factorization.line_search import Line, positive_minimiser

SHAPES = st.tuples(st.integers(1, 4), st.integers(2, 8), st.integers(2, 8), st.integers(1, 4))


def value(tensor, factors, dense_of, ridge):
    penalty = sum(part.square().sum() for part in (factors.query, factors.mixing, factors.key))
    return ((tensor.dense() - dense_of(factors)).square().sum() + ridge * penalty).item()


@given(SHAPES, st.integers(1, 6), st.sampled_from([0.0, 0.3]), st.floats(-2, 2))
def test_polynomial_matches_the_dense_objective(
    make_heads, make_point, factors_of, dense_of, shape, rank, ridge, step
):
    tensor = make_heads(*shape)
    scale = tensor.squared_norm() ** 0.25
    tensor = HeadTensor(tensor.query / scale, tensor.key / scale)
    point, direction = make_point(tensor, rank, seed=2)[0], make_point(tensor, rank, seed=3)[0]
    line = Line.of(Channels.of(tensor), point, direction, ridge)
    there = line.at(step)
    for penalty, coefficients in ((0.0, line.squared), (ridge, line.squared + line.penalty)):
        ours = sum(c * step**power for power, c in enumerate(coefficients.tolist()))
        assert ours == pytest.approx(value(tensor, factors_of(tensor, there), dense_of, penalty), rel=1e-8, abs=1e-8)
    fresh = Iterate.at(there.seen_by(Channels.of(tensor)))
    torch.testing.assert_close(there.values, fresh.values, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(there.grams, fresh.grams, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(there.values, point.values + step * direction.values)


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
