"""Closed forms against explicit decompositions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.factorization import HeadTensor
from collab_compress.factorization.truncation import concatenation, truncation

SHAPES = st.tuples(st.integers(1, 4), st.integers(2, 8), st.integers(2, 8), st.integers(1, 4))


@given(SHAPES)
def test_concatenation_is_exact_with_blocks_of_ones(make_heads, dense_of, shape):
    tensor = make_heads(*shape)
    factors = concatenation(tensor)
    rank = shape[0] * shape[3]
    assert factors.mixing.shape == (shape[0], rank)
    torch.testing.assert_close(dense_of(factors), tensor.dense())
    for head in range(shape[0]):
        row = [1.0 if r // shape[3] == head else 0.0 for r in range(rank)]
        assert factors.mixing[head].tolist() == row


@given(SHAPES, st.integers(1, 16), st.integers(0, 99))
def test_truncation_keeps_the_largest_triplets_of_all_heads(make_heads, dense_of, shape, rank, seed):
    tensor = make_heads(*shape, seed=seed)
    rank = min(rank, tensor.full_rank)
    factors = truncation(tensor, rank)
    values = torch.cat([torch.linalg.svdvals(matrix) for matrix in tensor.dense()]).sort(descending=True)[0]
    missed = values[rank:].square().sum()
    torch.testing.assert_close((tensor.dense() - dense_of(factors)).square().sum(), missed, atol=1e-9, rtol=1e-7)
    assert factors.mixing.count_nonzero(dim=0).max() == 1
    torch.testing.assert_close(factors.query.norm(dim=0), factors.key.norm(dim=0))


def test_columns_past_the_triplets_are_zero(dense_of):
    generator = torch.Generator().manual_seed(0)
    tensor = HeadTensor(
        torch.randn(2, 2, 3, generator=generator).double(), torch.randn(2, 5, 3, generator=generator).double()
    )
    factors = truncation(tensor, 5)
    assert not factors.query[:, 4].any()
    assert not factors.mixing[:, 4].any()
    torch.testing.assert_close(dense_of(factors), tensor.dense())


def test_zero_heads_give_finite_factors():
    factors = truncation(HeadTensor(torch.zeros(2, 3, 2), torch.zeros(2, 3, 2)), 3)
    assert factors.squared_norm().item() == pytest.approx(0.0)


@pytest.mark.parametrize("rank", [1, 4, 7, 11])
def test_equal_heads_get_their_own_largest_triplets(rank, make_heads, dense_of):
    """As many for each head, or one more for the first (Eckart and Young)."""
    tensor = make_heads(3, 6, 5, 4)
    factors = truncation(tensor, rank, equal=True)
    sizes = [rank // 3 + (head < rank % 3) for head in range(3)]
    assert factors.mixing.count_nonzero(1).tolist() == sizes
    for dense, ours, size in zip(tensor.dense(), dense_of(factors), sizes, strict=True):
        missed = torch.linalg.svdvals(dense)[size:].square().sum()
        torch.testing.assert_close((dense - ours).square().sum(), missed, atol=1e-9, rtol=1e-7)
