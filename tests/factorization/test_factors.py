import pytest
import torch
from head_tensors import SHAPES, dense_of, make_factors, make_heads
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.factorization import Factors, HeadTensor


@given(SHAPES, st.integers(1, 9))
def test_norm_and_gauge_match_the_dense_sum(shape, rank):
    factors = make_factors(make_heads(*shape), rank)
    dense = dense_of(factors)
    torch.testing.assert_close(factors.squared_norm(), dense.square().sum())
    normalised = factors.normalised()
    torch.testing.assert_close(dense_of(normalised), dense)
    torch.testing.assert_close(normalised.mixing.norm(dim=0), torch.ones(rank).double())
    torch.testing.assert_close(normalised.query.norm(dim=0), normalised.key.norm(dim=0))


def test_zero_components_stay_zero_and_finite():
    factors = Factors(torch.zeros(3, 2), torch.eye(2), torch.ones(4, 2)).normalised()
    assert not factors.query.any()
    assert not factors.key.any()
    assert torch.isfinite(factors.mixing).all()


def test_mismatched_shapes_are_refused():
    message = r"factors do not fit together: got query \(3, 2\), mixing \(1, 3\), key \(4, 2\)"
    with pytest.raises(ValueError, match=message):
        Factors(torch.ones(3, 2), torch.ones(1, 3), torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"content bias does not fit the factors: got \(1, 3\), expected"):
        Factors(torch.ones(3, 2), torch.ones(1, 2), torch.ones(4, 2), torch.ones(1, 3))


@given(SHAPES, st.integers(1, 9), st.integers(0, 99))
def test_norm_and_error_match_the_dense_tensor(shape, rank, seed):
    tensor = make_heads(*shape, seed=seed)
    factors = make_factors(tensor, rank, seed=seed + 1)
    dense, approximation = tensor.dense(), dense_of(factors)
    torch.testing.assert_close(tensor.squared_norm(), dense.square().sum())
    expected = ((dense - approximation).norm() / dense.norm()).item()
    assert tensor.relative_error(factors) == pytest.approx(expected, rel=1e-7)


def test_error_of_a_zero_tensor():
    tensor = HeadTensor(torch.zeros(2, 3, 1), torch.zeros(2, 3, 1))
    zero = Factors(torch.zeros(3, 1), torch.zeros(2, 1), torch.zeros(3, 1))
    assert tensor.relative_error(zero) == 0.0
    assert tensor.relative_error(Factors(torch.ones(3, 1), torch.ones(2, 1), torch.ones(3, 1))) == float("inf")


@pytest.mark.parametrize(
    ("query", "key"), [((2, 5, 3), (2, 5, 2)), ((2, 5, 3), (3, 5, 3)), ((5, 3), (5, 3)), ((2, 5, 3), (5, 3))]
)
def test_mismatched_heads_are_refused(query, key):
    with pytest.raises(ValueError, match="query and key heads do not fit together: got query"):
        HeadTensor(torch.ones(query), torch.ones(key))
