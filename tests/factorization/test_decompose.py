import numpy as np
import pytest
import torch
from head_tensors import SHAPES, dense_of, make_heads
from hypothesis import given, settings
from hypothesis import strategies as st

from collab_compress.factorization import HeadTensor, Moments, factorize
from collab_compress.factorization.moments import Weighting
from collab_compress.options import Solver


def sample(count, width, seed):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator, dtype=torch.float64)
    return torch.randn(count, width, generator=generator, dtype=torch.float64) @ mix + 2


def bias_of(tensor, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.heads, tensor.head_width, generator=generator, dtype=torch.float64)


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.booleans(), st.booleans(), st.sampled_from([None, 0, 2]))
def test_full_rank_is_exact(shape, weighted, biased, more):
    tensor = make_heads(*shape)
    bias = bias_of(tensor) if biased else None
    moments = (Moments.of(sample(30, shape[1], 1)), Moments.of(sample(30, shape[2], 2)))
    moments = {"query_moments": moments[0], "key_moments": moments[1]} if weighted else {}
    reads = None if more is None else tensor.head_width + more
    result = factorize(tensor.query, tensor.key, tensor.full_rank, query_bias=bias, reads=reads, **moments)
    assert result.factors.mixing.count_nonzero(1).tolist() == [tensor.head_width] * tensor.heads
    torch.testing.assert_close(dense_of(result.factors), tensor.dense())
    assert result.converged
    assert result.sweeps == 0
    assert result.weight_error == 0.0
    assert result.data_error == (0.0 if weighted else None)
    assert result.factors.key_bias is None
    if bias is None:
        assert result.factors.content_bias is None
    else:
        expected = torch.stack([k @ b for k, b in zip(tensor.key, bias, strict=True)])
        torch.testing.assert_close(result.factors.content_bias, expected)


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.integers(1, 15), st.booleans(), st.sampled_from([None, 1, 2]))
def test_reported_errors_are_the_dense_ones(shape, rank, biased, reads):
    tensor = make_heads(*shape)
    rank = min(rank, tensor.full_rank - 1)
    if rank < 1:
        return
    query_moments, key_moments = Moments.of(sample(30, shape[1], 1)), Moments.of(sample(30, shape[2], 2))
    options = {
        "query_moments": query_moments,
        "key_moments": key_moments,
        "solver": Solver(sweeps=15),
        "reads": reads,
    }
    bias = bias_of(tensor) if biased else None
    result = factorize(tensor.query, tensor.key, rank, query_bias=bias, **options)
    residual = tensor.dense() - dense_of(result.factors)
    assert result.weight_error == pytest.approx((residual.norm() / tensor.dense().norm()).item(), abs=1e-6)
    roots = Weighting.of(query_moments, key_moments, damping=1e-3, centre_query=biased)
    weighted = (roots.query @ residual @ roots.key.T).norm() / (roots.query @ tensor.dense() @ roots.key.T).norm()
    assert result.data_error == pytest.approx(weighted.item(), abs=1e-6)
    assert (result.factors.content_bias is not None) == biased


def test_centred_error_is_the_score_error_up_to_a_constant_per_row():
    """Scores of sampled tokens, pair by pair, each row's mean over the keys taken out."""
    tensor = make_heads(3, 7, 6, 2)
    bias, queries, keys = bias_of(tensor), sample(25, 7, 1), sample(30, 6, 2)
    moments = {"query_moments": Moments.of(queries), "key_moments": Moments.of(keys)}
    result = factorize(tensor.query, tensor.key, 3, query_bias=bias, solver=Solver(damping=0.0), **moments)
    factors, error, centred = result.factors, 0.0, 0.0
    for head in range(3):
        true = (queries @ tensor.query[head] + bias[head]) @ (keys @ tensor.key[head]).T
        ours = (queries @ factors.query * factors.mixing[head]) @ (keys @ factors.key).T
        ours = ours + keys @ factors.content_bias[head]
        difference = true - ours
        error += (difference - difference.mean(1, keepdim=True)).square().mean().item()
        scores = (queries - queries.mean(0)) @ tensor.query[head] @ tensor.key[head].T @ (keys - keys.mean(0)).T
        centred += scores.square().mean().item()
    assert (error / centred) ** 0.5 == pytest.approx(result.data_error, rel=1e-6)


def test_folded_bias_is_the_optimal_one():
    """No other content bias lowers the row-centred score error: least squares over the samples agrees."""
    tensor = make_heads(2, 6, 5, 2)
    bias, queries, keys = bias_of(tensor), sample(40, 6, 1), sample(40, 5, 2)
    moments = {"query_moments": Moments.of(queries), "key_moments": Moments.of(keys)}
    result = factorize(tensor.query, tensor.key, 2, query_bias=bias, **moments)
    centred_keys = keys - keys.mean(0)
    for head in range(2):
        target = (queries @ tensor.query[head] + bias[head]) @ (centred_keys @ tensor.key[head]).T
        target = (
            target
            - (queries @ result.factors.query * result.factors.mixing[head]) @ (centred_keys @ result.factors.key).T
        )
        best = torch.linalg.lstsq(centred_keys, target.mean(0)[:, None]).solution[:, 0]
        torch.testing.assert_close(result.factors.content_bias[head], best, rtol=1e-6, atol=1e-8)


def test_weighting_lowers_the_weighted_error_and_costs_the_unweighted():
    tensor = make_heads(3, 8, 8, 3)
    moments = Moments.of(sample(50, 8, 3))
    plain = factorize(tensor.query, tensor.key, 4)
    biased = {"query_bias": bias_of(tensor), "query_moments": moments, "key_moments": moments}
    aware = factorize(tensor.query, tensor.key, 4, **biased)
    roots = Weighting.of(moments, moments, damping=1e-3, centre_query=True)
    weighted = roots.apply(tensor).relative_error(
        type(plain.factors)(roots.query @ plain.factors.query, plain.factors.mixing, roots.key @ plain.factors.key)
    )
    assert aware.data_error < weighted
    assert plain.weight_error < aware.weight_error
    assert plain.data_error is None
    assert plain.factors.content_bias is None


def test_a_breakdown_is_passed_on(monkeypatch):
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix, **_: (matrix, torch.ones(())))
    tensor = make_heads(3, 8, 8, 3)
    result = factorize(tensor.query, tensor.key, 4)
    assert result.breakdowns == 1
    assert not result.converged
    assert result.sweeps == 0


def test_a_decomposition_that_fails_is_a_value_error(monkeypatch):
    def fail(*_, **__):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "svd", fail)
    tensor = make_heads(3, 8, 8, 3)
    with pytest.raises(ValueError, match="singular value decomposition of the heads failed: did not converge"):
        factorize(tensor.query, tensor.key, 4)


def test_narrow_heads_give_the_same_error_in_their_span():
    tensor = make_heads(2, 40, 30, 3)
    widened = HeadTensor(
        torch.cat([tensor.query, torch.zeros(2, 7, 3).double()], 1),
        torch.cat([tensor.key, torch.zeros(2, 9, 3).double()], 1),
    )
    small = factorize(tensor.query, tensor.key, 4)
    large = factorize(widened.query, widened.key, 4)
    assert large.weight_error == pytest.approx(small.weight_error, rel=1e-3)
    assert large.factors.query.shape == (47, 4)
    assert large.factors.key.shape == (39, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_float_dtype_gives_float64(dtype):
    tensor = make_heads(2, 5, 6, 2)
    query = tensor.query.to(dtype).requires_grad_()
    result = factorize(query, tensor.key.to(dtype), 2, query_bias=bias_of(tensor).to(dtype))
    factors = result.factors
    parts = (factors.query, factors.mixing, factors.key, factors.content_bias)
    assert {part.dtype for part in parts} == {torch.float64}
    assert not any(part.requires_grad for part in parts)


@pytest.mark.parametrize("method", ["als", "parafac"])
def test_solvers_share_the_contract_and_repeat_bitwise(method):
    if method == "parafac":
        pytest.importorskip("tensorly")
    tensor, solver = make_heads(3, 9, 8, 2), Solver(method=method, seed=3, sweeps=12)
    moments = Moments.of(sample(30, 9, 1))
    runs = [factorize(tensor.query, tensor.key, 4, query_moments=moments, solver=solver) for _ in range(2)]
    assert torch.equal(runs[0].factors.query, runs[1].factors.query)
    residual = tensor.dense() - dense_of(runs[0].factors)
    assert runs[0].weight_error == pytest.approx((residual.norm() / tensor.dense().norm()).item(), rel=1e-6)


def refused(message, **changes):
    tensor = make_heads(2, 5, 6, 2)
    arguments = {"query": tensor.query, "key": tensor.key, "rank": 2, **changes}
    with pytest.raises(ValueError, match=message):
        factorize(arguments.pop("query"), arguments.pop("key"), arguments.pop("rank"), **arguments)


def test_bad_arguments_are_refused():
    out = "rank is out of range: got {}, expected 1 to H·d = 2·2 = 4"
    refused(out.format(0), rank=0)
    refused(out.format(5), rank=5)
    refused("key is not finite: got nan or inf", key=torch.full((2, 6, 2), torch.nan))
    refused("query is not finite: got nan or inf", query=torch.full((2, 5, 2), torch.inf))
    refused("query is not floating point: got torch.int64", query=torch.ones(2, 5, 2).long())
    refused("query and key heads do not fit together: got query", key=torch.ones(3, 6, 2))
    refused(r"query_bias do not fit the heads: got \(2, 3\), expected", query_bias=torch.ones(2, 3))
    refused("query_bias is not finite", query_bias=torch.full((2, 2), torch.nan))
    narrow = Moments.of(sample(9, 4, 0))
    refused("query_moments do not fit the heads: got width 4, expected 5", query_moments=narrow)
    refused("key_moments do not fit the heads: got width 4, expected 6", key_moments=narrow)
    refused("key_moments are no moments: got Tensor, expected Moments", key_moments=torch.ones(6, 6))
    refused("query is no tensor: got ndarray, expected torch.Tensor", query=np.ones((2, 5, 2)))
    refused("head_weights is no tensor: got ndarray", head_weights=np.ones(2))
    refused("head_weights do not fit the heads: got", head_weights=torch.ones(3))
    refused("head_weights do not fit the heads: got", head_weights=torch.tensor([1.0, 0.0]))
    refused("on the meta device have no values", query=torch.ones(2, 5, 2, device="meta"))
    refused("on the meta device have no values", solver=Solver(device="meta"))
    refused("cannot work on device nowhere: Expected one of cpu", solver=Solver(device="nowhere"))
    refused("reads is out of range: got 0 with solver 'als', expected 1 or more", reads=0)
    message = "reads is out of range: got 1 with solver 'parafac', .* with 'als'"
    refused(message, reads=1, solver=Solver(method="parafac"))


@pytest.mark.parametrize("reads", [None, 3])
def test_head_weights_weigh_the_squared_errors_of_heads(reads):
    tensor = make_heads(3, 6, 5, 4)
    weights = torch.tensor([0.1, 1.0, 3.0])
    solution = factorize(tensor.query, tensor.key, 6, reads=reads, head_weights=weights)
    plain = factorize(tensor.query, tensor.key, 6, reads=reads)

    def errors(result):
        return (tensor.dense() - dense_of(result.factors)).square().sum((1, 2))

    weighted = (weights.double().square() * errors(solution)).sum()
    assert weighted < (weights.double().square() * errors(plain)).sum()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rank", [4, 12])
def test_the_bias_of_shared_keys_is_that_of_least_squares(rank, weighted):
    tensor = make_heads(3, 9, 7, 4)
    bias, heads = bias_of(tensor), torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    options = {}
    if weighted:
        options = {"query_moments": Moments.of(sample(30, 9, 1)), "head_weights": heads}
    result = factorize(
        tensor.query, tensor.key, rank, query_bias=bias_of(tensor, 1), key_bias=bias, reads=4, **options
    )
    factors = result.factors
    root = torch.eye(9, dtype=torch.float64)
    if weighted:
        root = Weighting.of(options["query_moments"], None, damping=1e-3, centre_query=True).query
    scales = heads if weighted else torch.ones_like(heads)
    rows = [w * root @ (factors.query * mixing) for w, mixing in zip(scales, factors.mixing, strict=True)]
    wanted = [w * root @ query @ b for w, query, b in zip(scales, tensor.query, bias, strict=True)]
    expected = torch.linalg.lstsq(torch.cat(rows), torch.cat(wanted)).solution
    torch.testing.assert_close(factors.key_bias, expected, rtol=1e-6, atol=1e-8)
    if rank == 12:
        torch.testing.assert_close(factors.key_bias, bias.flatten())
    torch.testing.assert_close(
        factors.normalised().key_bias / factors.normalised().key.norm(dim=0),
        factors.key_bias / factors.key.norm(dim=0),
    )
