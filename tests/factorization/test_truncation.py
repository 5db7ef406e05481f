"""Closed forms against explicit decompositions and against every other way to share out the channels."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.factorization import HeadTensor, Moments, SolverOptions, factorize
from collab_compress.factorization.truncation import concatenation, per_head, truncation

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


def compositions(rank, heads, most):
    """Yield every way to give each of `heads` heads 0 to `most` of `rank` channels."""
    return [sizes for sizes in itertools.product(range(most + 1), repeat=heads) if sum(sizes) == rank]


@pytest.mark.parametrize("rank", [1, 4, 7, 11])
def test_no_sizes_and_no_factors_are_better(rank, make_heads, dense_of):
    """Best of every head at every size: truncated singular value decompositions (Eckart and Young)."""
    tensor = make_heads(3, 6, 5, 4)
    solution = per_head(tensor, rank, SolverOptions())
    factors, sizes = solution.factors, solution.sizes
    values = [torch.linalg.svdvals(product) for product in tensor.dense()]
    lost = {
        shares: sum(float(s[share:].square().sum()) for s, share in zip(values, shares, strict=True))
        for shares in compositions(rank, 3, 4)
    }
    best = min(lost, key=lost.get)
    assert sizes == best
    error = float((tensor.dense() - dense_of(factors)).square().sum())
    assert error == pytest.approx(lost[best], rel=1e-9)


def test_channels_lie_head_by_head(make_heads):
    solution = per_head(make_heads(4, 7, 6, 3), 8, SolverOptions())
    factors, sizes = solution.factors, solution.sizes
    assert sum(sizes) == 8
    owners = [head for head, size in enumerate(sizes) for _ in range(size)]
    assert torch.equal(factors.mixing.argmax(0), torch.tensor(owners))
    assert torch.equal(factors.mixing.sum(0), torch.ones(8).double())
    assert torch.equal(factors.mixing.max(0).values, torch.ones(8).double())


def test_a_zero_head_gets_no_channels(make_heads):
    tensor = make_heads(3, 6, 6, 2)
    tensor.query[1] = 0.0
    assert per_head(tensor, 3, SolverOptions()).sizes[1] == 0


def test_minimises_the_error_of_the_scores(make_heads, dense_of):
    """No product of a head's size is nearer to the dense one in the metric of the inputs."""
    tensor = make_heads(3, 6, 6, 3)
    generator = torch.Generator().manual_seed(5)
    inputs = (
        torch.randn(200, 6, generator=generator, dtype=torch.float64)
        @ torch.randn(6, 6, generator=generator, dtype=torch.float64)
        + 1.0
    )
    moments = Moments.of(inputs)
    options = {"query_moments": moments, "key_moments": moments, "damping": 0.0, "centre": True}
    result = factorize(tensor.query, tensor.key, 5, solver="per-head", **options)
    root = torch.linalg.cholesky(moments.covariance()).mT
    lost = total = 0.0
    for product, size in zip(tensor.dense(), result.sizes, strict=True):
        values = torch.linalg.svdvals(root @ product @ root.mT)
        lost, total = lost + float(values[size:].square().sum()), total + float(values.square().sum())
    assert result.data_error == pytest.approx((lost / total) ** 0.5, rel=1e-6)
    residual = tensor.dense() - dense_of(result.factors)
    folded = torch.einsum("hqk,q->hk", residual, moments.mean)
    torch.testing.assert_close(result.factors.content_bias, folded)


def test_shared_channels_are_better(make_heads):
    tensor = make_heads(3, 8, 8, 4)
    shared = factorize(tensor.query, tensor.key, 6)
    apart = factorize(tensor.query, tensor.key, 6, solver="per-head")
    assert shared.sizes is None
    assert shared.weight_error <= apart.weight_error
    assert apart.converged
    assert apart.sweeps == 0


def test_full_rank_is_exact(make_heads):
    tensor = make_heads(3, 8, 8, 2)
    result = factorize(tensor.query, tensor.key, 6, solver="per-head")
    assert result.sizes == (2, 2, 2)
    torch.testing.assert_close(tensor.relative_error(result.factors), 0.0, atol=1e-7, rtol=0)
