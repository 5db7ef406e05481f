import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.factorization import Moments


def sample(count, width, seed):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 6))
def test_pooling_equals_the_moments_of_all_samples_together(counts, width):
    samples = [sample(count, width, seed) for seed, count in enumerate(counts)]
    together = torch.cat(samples)
    pooled = Moments.pool(Moments.of(part) for part in samples)
    assert pooled.count == len(together)
    assert pooled.width == width
    torch.testing.assert_close(pooled.mean, sum(row for row in together) / len(together))
    second = sum(torch.outer(row, row) for row in together) / len(together)
    torch.testing.assert_close(pooled.second, second)
    torch.testing.assert_close(pooled.covariance(), torch.cov(together.T, correction=0).reshape(width, width))


def test_moments_of_batches_flatten_leading_positions_to_float64():
    inputs = sample(6, 3, 0).float().view(2, 3, 3)
    moments = Moments.of(inputs)
    assert moments.mean.dtype == moments.second.dtype == torch.float64
    torch.testing.assert_close(moments.mean, inputs.double().view(6, 3).mean(0))
    assert moments.to(dtype=torch.float32).second.dtype == torch.float32
    assert moments.to("cpu").count == 6


def test_covariance_is_symmetric():
    covariance = Moments.of(sample(9, 5, 1)).covariance()
    assert torch.equal(covariance, covariance.T)


def test_bad_moments_are_refused():
    with pytest.raises(ValueError, match=r"moments do not fit together: got mean \(2,\) and second \(3, 3\)"):
        Moments(torch.ones(2), torch.ones(3, 3), 1)
    with pytest.raises(ValueError, match="moments need at least one vector: got count 0, expected > 0"):
        Moments(torch.ones(2), torch.ones(2, 2), 0)
    with pytest.raises(ValueError, match="moments are not finite: got nan or inf"):
        Moments(torch.tensor([1.0, float("nan")]), torch.ones(2, 2), 1)


def test_pooling_refuses_nothing_and_mixed_widths():
    with pytest.raises(ValueError, match=r"cannot pool moments: got widths \[\], expected one common width"):
        Moments.pool([])
    with pytest.raises(ValueError, match=r"cannot pool moments: got widths \[2, 3\]"):
        Moments.pool([Moments.of(torch.ones(4, 2)), Moments.of(torch.ones(4, 3))])
