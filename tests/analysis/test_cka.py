"""CKA in all its forms, against N×N kernels that are centred one by one."""

import sys

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import rbf_kernel

from collab_compress.analysis import JointCovariance, cka, mean_over_pairs, sample_cka
from collab_compress.errors import HeadError

CKA = sys.modules["collab_compress.analysis.cka"]  # the package has a function of that name


def linear(x):
    return x @ x.T


def biased(k, j):
    """HSIC of two kernels (N, N), equation 4 of the paper."""
    n = len(k)
    centre = np.eye(n) - np.ones((n, n)) / n
    return np.trace(k @ centre @ j @ centre) / (n - 1) ** 2


def unbiased(k, j):
    """HSIC₁, as the sums over distinct indices that it estimates without bias (Song et al., 2012)."""
    n = len(k)
    k, j = k - np.diag(np.diag(k)), j - np.diag(np.diag(j))
    pairs = np.trace(k @ j)
    triples = k.sum(0) @ j.sum(0) - pairs
    quadruples = k.sum() * j.sum() - 4 * triples - 2 * pairs
    return (
        pairs / (n * (n - 1)) - 2 * triples / (n * (n - 1) * (n - 2)) + quadruples / (n * (n - 1) * (n - 2) * (n - 3))
    )


def ratio(kernels, hsic):
    return np.array([[hsic(a, b) / np.sqrt(hsic(a, a) * hsic(b, b)) for b in kernels] for a in kernels])


def radial(x, sigma=None):
    if sigma is None:
        distances = [np.linalg.norm(x[a] - x[b]) for a in range(len(x)) for b in range(a)]
        sigma = np.sort(distances)[(len(distances) - 1) // 2]
    return rbf_kernel(x, gamma=0.5 / sigma**2)


def heads_of(x):
    return [x[:, head].numpy() for head in range(x.shape[1])]


def test_linear_cka_is_that_of_centred_kernels(draw):
    x = draw(tokens=60, heads=4)
    found = cka(JointCovariance.of(list(x.unbind(1))))
    np.testing.assert_allclose(found, ratio([linear(head) for head in heads_of(x)], biased), atol=1e-10)
    np.testing.assert_allclose(sample_cka(x, "linear"), found, atol=1e-10)
    rows = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    assert mean_over_pairs(found) == pytest.approx(np.mean([float(found[i, j]) for i, j in rows]))


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_unbiased_cka_is_that_of_distinct_tokens(draw, kernel):
    x = draw(tokens=40)
    kernels = [linear(head) if kernel == "linear" else radial(head) for head in heads_of(x)]
    np.testing.assert_allclose(sample_cka(x, kernel, unbiased=True), ratio(kernels, unbiased), atol=1e-9)


def test_rbf_cka_is_that_of_centred_kernels(draw):
    x = draw(tokens=40)
    right = ratio([radial(head) for head in heads_of(x)], biased)
    np.testing.assert_allclose(sample_cka(x), right, atol=1e-9)


def test_kernels_that_do_not_fit_into_one_block(draw, monkeypatch):
    x = draw(tokens=50)
    whole = {unbiased: sample_cka(x, unbiased=unbiased) for unbiased in (False, True)}
    monkeypatch.setattr(CKA, "ROWS", 7)
    for unbiased_, right in whole.items():
        torch.testing.assert_close(sample_cka(x, unbiased=unbiased_), right)


def test_two_sides_and_different_widths(draw):
    x, y = draw(tokens=60), draw(tokens=60, width=2, seed=4)
    found = cka(JointCovariance.of([*x.unbind(1), *y.unbind(1)], leading=3))
    everything = ratio([linear(head) for head in heads_of(x) + heads_of(y)], biased)
    np.testing.assert_allclose(found, everything[:3, 3:], atol=1e-10)
    several = [*x.unbind(1), *y.unbind(1)]
    np.testing.assert_allclose(sample_cka(several, "linear"), everything, atol=1e-10)
    right = ratio([radial(each.numpy()) for each in several], biased)
    np.testing.assert_allclose(sample_cka(several), right, atol=1e-9)


@pytest.mark.parametrize(
    "measure",
    [
        lambda x: cka(JointCovariance.of(list(x.unbind(1)))),
        lambda x: sample_cka(x, "linear", unbiased=True),
        lambda x: sample_cka(x, "rbf"),
        lambda x: sample_cka(x, "rbf", unbiased=True),
    ],
)
def test_rotations_scalings_and_shifts_change_nothing(draw, measure):
    x = draw()
    turn = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    moved = x.clone()
    moved[:, 0] = 7 * x[:, 0] @ turn + 3
    torch.testing.assert_close(measure(moved), measure(x))
    torch.testing.assert_close(measure(x).diagonal(), torch.ones(3, dtype=torch.float64))
    moved[:, 1] = x[:, 0]
    assert float(measure(moved)[0, 1]) == pytest.approx(1)


def test_independent_noise_is_near_its_expectation():
    x = torch.randn(2000, 12, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = mean_over_pairs(cka(JointCovariance.of(list(x.unbind(1)))))
    assert found == pytest.approx(20 / 2000, rel=0.1)  # √(d·d)/N
    assert abs(mean_over_pairs(sample_cka(x, "linear", unbiased=True))) < 1e-3
    few = x[:200]
    assert mean_over_pairs(sample_cka(few)) > 0.03  # too high, as documented
    assert abs(mean_over_pairs(sample_cka(few, unbiased=True))) < 5e-3


@pytest.mark.parametrize("unbiased_", [False, True])
@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_a_head_that_never_varies_is_like_nothing(draw, kernel, unbiased_):
    x = draw(dtype=torch.float32)
    x[:, 1] = 0.1
    found = sample_cka(x, kernel, unbiased=unbiased_)
    assert not found[1].any()
    assert not found[:, 1].any()
    assert float(found[0, 2]) > 0
    assert not cka(JointCovariance.of(list(x.unbind(1))))[1].any()


def test_what_cannot_be_measured_is_refused(draw):
    with pytest.raises(HeadError, match="unknown kernel 'cubic'"):
        sample_cka(draw(), "cubic")
    with pytest.raises(HeadError, match="N at least 4"):
        sample_cka(draw(tokens=3))
    with pytest.raises(HeadError, match="not finite"):
        sample_cka(draw() / 0)
    with pytest.raises(HeadError, match="do not fit together"):
        sample_cka([torch.ones(9, 2), torch.ones(8, 2)])
    with pytest.raises(HeadError, match="expected a matrix"):
        mean_over_pairs(torch.ones(2, 3))
