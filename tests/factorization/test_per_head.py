"""The closed per-head form against explicit decompositions and against every other way to share out the channels."""

import itertools

import pytest
import torch

from collab_compress.factorization import Moments, factorize
from collab_compress.factorization.truncation import per_head, per_head_error


def compositions(rank, heads, most):
    """Every way to give each of `heads` heads 0 to `most` of `rank` channels."""
    return [sizes for sizes in itertools.product(range(most + 1), repeat=heads) if sum(sizes) == rank]


@pytest.mark.parametrize("rank", [1, 4, 7, 11])
def test_no_sizes_and_no_factors_are_better(rank, make_heads, dense_of):
    """Best of every head at every size: truncated singular value decompositions (Eckart and Young)."""
    tensor = make_heads(3, 6, 5, 4)
    found = per_head(tensor, rank)
    factors, sizes = found.factors, found.sizes
    values = [torch.linalg.svdvals(product) for product in tensor.dense()]
    lost = {
        shares: sum(float(s[share:].square().sum()) for s, share in zip(values, shares, strict=True))
        for shares in compositions(rank, 3, 4)
    }
    best = min(lost, key=lost.get)
    assert sizes == best
    error = float((tensor.dense() - dense_of(factors)).square().sum())
    assert error == pytest.approx(lost[best], rel=1e-9)
    assert per_head_error(tensor, rank) == pytest.approx((error / tensor.squared_norm().item()) ** 0.5, rel=1e-9)


def test_channels_lie_head_by_head(make_heads):
    found = per_head(make_heads(4, 7, 6, 3), 8)
    factors, sizes = found.factors, found.sizes
    assert sum(sizes) == 8
    owners = [head for head, size in enumerate(sizes) for _ in range(size)]
    assert torch.equal(factors.mixing.argmax(0), torch.tensor(owners))
    assert torch.equal(factors.mixing.sum(0), torch.ones(8).double())
    assert torch.equal(factors.mixing.max(0).values, torch.ones(8).double())


def test_a_head_that_says_nothing_gets_nothing(make_heads):
    tensor = make_heads(3, 6, 6, 2)
    tensor.query[1] = 0.0
    assert per_head(tensor, 3).sizes[1] == 0


def test_minimises_the_error_of_the_scores(make_heads, dense_of):
    """Weighted: no head's product, at its size, is nearer to the dense one in the inputs' own metric."""
    tensor = make_heads(3, 6, 6, 3)
    generator = torch.Generator().manual_seed(5)
    inputs = (
        torch.randn(200, 6, generator=generator, dtype=torch.float64)
        @ torch.randn(6, 6, generator=generator, dtype=torch.float64)
        + 1.0
    )
    moments = Moments.of(inputs)
    result = factorize(
        tensor.query,
        tensor.key,
        5,
        query_moments=moments,
        key_moments=moments,
        solver="per-head",
        damping=0.0,
        centre=True,
    )
    root = torch.linalg.cholesky(moments.covariance()).mT
    lost = total = 0.0
    for product, size in zip(tensor.dense(), result.sizes, strict=True):
        values = torch.linalg.svdvals(root @ product @ root.mT)
        lost, total = lost + float(values[size:].square().sum()), total + float(values.square().sum())
    assert result.data_error == pytest.approx((lost / total) ** 0.5, rel=1e-6)
    assert result.per_head_error == pytest.approx(result.data_error, rel=1e-6)
    residual = tensor.dense() - dense_of(result.factors)
    folded = torch.einsum("hqk,q->hk", residual, moments.mean)
    torch.testing.assert_close(result.factors.content_bias, folded)


def test_the_shared_form_is_no_worse_and_knows_it(make_heads):
    tensor = make_heads(3, 8, 8, 4)
    shared = factorize(tensor.query, tensor.key, 6)
    apart = factorize(tensor.query, tensor.key, 6, solver="per-head")
    assert shared.sizes is None
    assert shared.weight_error <= apart.weight_error
    assert shared.per_head_error == pytest.approx(apart.weight_error)
    assert apart.converged
    assert apart.sweeps == 0


def test_full_rank_is_exact(make_heads):
    tensor = make_heads(3, 8, 8, 2)
    result = factorize(tensor.query, tensor.key, 6, solver="per-head")
    assert result.exact
    assert result.sizes == (2, 2, 2)
    torch.testing.assert_close(tensor.relative_error(result.factors), 0.0, atol=1e-7, rtol=0)


def test_unknown_solver(make_heads):
    tensor = make_heads(2, 4, 4, 2)
    with pytest.raises(ValueError, match="unknown solver: got 'square', expected one of als, parafac, per-head"):
        factorize(tensor.query, tensor.key, 2, solver="square")
