import pytest
import torch
from head_tensors import SHAPES, dense_of, make_factors, make_heads
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.factorization import Moments
from collab_compress.factorization.moments import Weighting


def sample(count, width, seed):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 1


def test_moments_of_batches_flatten_leading_positions_to_float64():
    inputs = sample(6, 3, 0).float().view(2, 3, 3)
    moments = Moments.of(inputs)
    assert moments.mean.dtype == moments.second.dtype == torch.float64
    torch.testing.assert_close(moments.mean, inputs.double().view(6, 3).mean(0))
    assert moments.count == 6


def test_weights_say_how_often_a_vector_occurs():
    inputs = sample(4, 3, 0)
    weighted = Moments.of(inputs, torch.tensor([1, 0, 3, 2]))
    repeated = Moments.of(inputs[[0, 2, 2, 2, 3, 3]])
    torch.testing.assert_close(weighted.mean, repeated.mean)
    torch.testing.assert_close(weighted.second, repeated.second)
    assert weighted.count == 6


def test_combined_moments_have_the_covariance_of_a_sum_and_the_average_mean():
    one, other = Moments.of(sample(9, 3, 0)), Moments.of(sample(5, 3, 1) + 100)
    both = one.combined(other)
    torch.testing.assert_close(both.mean, (one.mean + other.mean) / 2)
    torch.testing.assert_close(both.covariance(), one.covariance() + other.covariance(), atol=1e-6, rtol=1e-6)
    assert both.count == 9


def test_bad_moments_are_refused():
    with pytest.raises(ValueError, match=r"moments do not fit together: got mean \(2,\) and second \(3, 3\)"):
        Moments(torch.ones(2), torch.ones(3, 3), 1)
    with pytest.raises(ValueError, match="moments need at least one vector: got count 0, expected > 0"):
        Moments(torch.ones(2), torch.ones(2, 2), 0)
    for inputs, shape in ((torch.tensor(1.0), r"\(\)"), (torch.zeros(3, 0), r"\(3, 0\)")):
        with pytest.raises(ValueError, match=rf"moments are of vectors: got shape {shape}, expected"):
            Moments.of(inputs)
    with pytest.raises(ValueError, match="moments are not finite: got nan or inf"):
        Moments(torch.tensor([1.0, float("nan")]), torch.ones(2, 2), 1)


def inputs(width, seed):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator, dtype=torch.float64)
    return torch.randn(40, width, generator=generator, dtype=torch.float64) @ mix + 2


@given(SHAPES, st.integers(1, 6), st.booleans(), st.sampled_from([0.0, 1e-3, 0.5]))
def test_weighted_error_is_the_explicit_score_error(shape, rank, centre, damping):
    tensor = make_heads(*shape)
    factors = make_factors(tensor, rank)
    queries, keys = inputs(shape[1], 1), inputs(shape[2], 2)
    weighting = Weighting.of(Moments.of(queries), Moments.of(keys), damping=damping, centre_query=centre)
    weighted = weighting.apply(tensor)
    roots = []
    for rows, root, centred in ((queries, weighting.query, centre), (keys, weighting.key, True)):
        rows = rows - rows.mean(0) if centred else rows
        moment = sum(torch.outer(row, row) for row in rows) / len(rows)
        moment += damping * moment.diagonal().mean() * torch.eye(len(moment))
        torch.testing.assert_close(root.T @ root, moment)
        roots.append(torch.linalg.cholesky(moment).T)
    explicit = sum(
        (roots[0] @ (slice_ - other) @ roots[1].T).square().sum()
        for slice_, other in zip(tensor.dense(), dense_of(factors), strict=True)
    )
    mapped = type(factors)(roots[0] @ factors.query, factors.mixing, roots[1] @ factors.key)
    expected = (explicit / weighted.dense().square().sum()).sqrt().item()
    assert weighted.relative_error(mapped) == pytest.approx(expected, rel=1e-6)
    undone = weighting.undo(mapped)
    torch.testing.assert_close(undone.query, factors.query, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(undone.key, factors.key, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(undone.mixing, factors.mixing)


def test_one_side_or_none_may_be_weighted():
    tensor = make_heads(2, 4, 5, 2)
    factors = make_factors(tensor, 3)
    nothing = Weighting.of(None, None, damping=1e-3, centre_query=True)
    assert nothing.apply(tensor).query is tensor.query
    assert nothing.undo(factors).key is factors.key
    keys_only = Weighting.of(None, Moments.of(inputs(5, 0)), damping=1e-3, centre_query=True)
    assert keys_only.apply(tensor).query is tensor.query
    assert keys_only.undo(factors).query is factors.query


def test_singular_moments_are_refused():
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    inputs[:, 2] = 1
    varied, constant = Moments.of(inputs), Moments.of(torch.ones(5, 3))
    message = "the covariance of the key inputs is singular: got damping 0.0 over 5 inputs; expected"
    with pytest.raises(ValueError, match=message):
        Weighting.of(None, varied, damping=0.0, centre_query=True)
    with pytest.raises(ValueError, match="the second moment of the query inputs is singular: got damping 0"):
        Weighting.of(constant, None, damping=0.0, centre_query=False)


def test_moments_beyond_float64_are_refused():
    with pytest.raises(ValueError, match="the moments of the key inputs are not finite with damping 1e"):
        Weighting.of(None, Moments.of(inputs(3, 0) * 1e10), damping=1e300, centre_query=True)
