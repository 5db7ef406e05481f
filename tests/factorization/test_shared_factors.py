import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.factorization import Factors

SHAPES = st.tuples(st.integers(1, 4), st.integers(2, 8), st.integers(2, 8), st.integers(1, 4))


@given(SHAPES, st.integers(1, 9))
def test_slices_norm_and_gauge_match_the_dense_sum(make_heads, make_factors, dense_of, shape, rank):
    factors = make_factors(make_heads(*shape), rank)
    dense = dense_of(factors)
    assert (factors.rank, factors.heads) == (rank, shape[0])
    for head in range(shape[0]):
        torch.testing.assert_close(factors.slice(head), dense[head])
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


def test_to_moves_every_part():
    factors = Factors(torch.ones(3, 2), torch.ones(1, 2), torch.ones(4, 2), torch.ones(1, 4))
    moved = factors.to(dtype=torch.float16)
    assert {part.dtype for part in (moved.query, moved.mixing, moved.key)} == {torch.float16}
    assert moved.content_bias is not None
    assert moved.content_bias.dtype == torch.float16
    assert factors.normalised().to("cpu").content_bias is not None


def test_mismatched_shapes_are_refused():
    message = r"factors do not fit together: got query \(3, 2\), mixing \(1, 3\), key \(4, 2\)"
    with pytest.raises(ValueError, match=message):
        Factors(torch.ones(3, 2), torch.ones(1, 3), torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"content bias does not fit the factors: got \(1, 3\), expected"):
        Factors(torch.ones(3, 2), torch.ones(1, 2), torch.ones(4, 2), torch.ones(1, 3))
