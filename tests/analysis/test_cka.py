"""CKA in all its forms, against N×N kernels that are centred one by one."""

import sys

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import rbf_kernel

from collab_compress.analysis import (
    JointCovariance,
    cka,
    head_covariances,
    head_samples,
    mean_over_pairs,
    minibatch_cka,
    sample_cka,
)
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


@pytest.mark.parametrize("sigma", [None, 0.7, 20.0])
def test_rbf_cka_is_that_of_centred_kernels(draw, sigma):
    x = draw(tokens=40)
    right = ratio([radial(head, sigma) for head in heads_of(x)], biased)
    np.testing.assert_allclose(sample_cka(x, bandwidth=sigma), right, atol=1e-9)


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


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_minibatches_are_averaged_before_the_ratio(either, real_responses, kernel):
    model, batches = either
    sigma = None if kernel == "linear" else 4.0
    found = minibatch_cka(model, batches, kernel, tokens=8, bandwidth=sigma, seed=None)
    for name, uses in real_responses(model, batches).items():
        for number, tokens in enumerate(uses):
            parts = [part.double() for part in tokens.split(8) if len(part) == 8]
            kernels = [
                [linear(head) if kernel == "linear" else radial(head, 4.0) for head in heads_of(part)]
                for part in parts
            ]
            heads = range(tokens.shape[1])
            sums = np.array([[sum(unbiased(k[i], k[j]) for k in kernels) for j in heads] for i in heads])
            right = sums / np.sqrt(np.outer(np.diag(sums), np.diag(sums)))
            key = name if len(uses) == 1 else f"{name}[{number}]"
            np.testing.assert_allclose(found[key], right, atol=1e-6)


def test_minibatches_are_drawn_from_many_sequences(bert):
    """All tokens of a sequence are alike here, so that minibatches in order hold four vectors only."""
    generator = torch.Generator().manual_seed(0)
    bert.embeddings.position_embeddings.weight.data.zero_()
    for layer in bert.encoder.layer:
        layer.attention.self.query.weight.data.zero_()
        layer.attention.self.query.bias.data.zero_()
    batches = [{"input_ids": torch.randint(5, 61, (16, 16), generator=generator)} for _ in range(16)]
    name = "encoder.layer.0.attention.self"
    right = mean_over_pairs(cka(head_covariances(bert, batches)[name]))
    assert mean_over_pairs(minibatch_cka(bert, batches, tokens=64)[name]) == pytest.approx(right, abs=0.05)
    assert mean_over_pairs(minibatch_cka(bert, batches, tokens=64, seed=None)[name]) > right + 0.1


def test_pools_are_used_up(bert, calibration, monkeypatch):
    taken = []
    measure = CKA.hsic_of_pairs
    monkeypatch.setattr(CKA, "hsic_of_pairs", lambda x, *rest, **more: taken.append(x) or measure(x, *rest, **more))
    monkeypatch.setattr(CKA, "POOL", 3)
    name = "encoder.layer.0.attention.self"
    minibatch_cka(bert, calibration, tokens=16, modules=name)
    count = sum(int(batch["attention_mask"].sum()) for batch in calibration)
    assert [x.shape[1] for x in taken] == [16] * (count // 16)
    assert len({float(value) for x in taken for value in x[0, :, 0]}) > 0.9 * 16 * len(taken)  # each token once


def test_one_minibatch_is_a_sample(bert, calibration):
    name = "encoder.layer.0.attention.self"
    sample = head_samples(bert, calibration[:1])[name]
    assert len(sample) < 256
    for kernel in ("linear", "rbf"):
        right = sample_cka(sample, kernel, unbiased=True)
        torch.testing.assert_close(minibatch_cka(bert, calibration[:1], kernel)[name], right)


@pytest.mark.parametrize("call", [sample_cka, lambda x, *a, **k: minibatch_cka(None, [], *a, **k)])
def test_what_cannot_be_measured_is_refused(draw, call):
    with pytest.raises(HeadError, match="unknown kernel 'cubic'"):
        call(draw(), "cubic")
    with pytest.raises(HeadError, match="bandwidth is 0"):
        call(draw(), "rbf", bandwidth=0)


def test_too_few_tokens_are_refused(draw, bert):
    with pytest.raises(HeadError, match="N at least 4"):
        sample_cka(draw(tokens=3))
    with pytest.raises(HeadError, match="not finite"):
        sample_cka(draw() / 0)
    with pytest.raises(HeadError, match="do not fit together"):
        sample_cka([torch.ones(9, 2), torch.ones(8, 2)])
    with pytest.raises(HeadError, match="minibatches of 3 tokens"):
        minibatch_cka(bert, [], tokens=3)
    with pytest.raises(HeadError, match="saw 3 tokens"):
        minibatch_cka(bert, [{"input_ids": torch.tensor([[5, 6, 7]])}])
    with pytest.raises(HeadError, match="expected a matrix"):
        mean_over_pairs(torch.ones(2, 3))
