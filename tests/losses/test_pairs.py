"""Losses over pairs of heads, against the papers' double loops; and what is particular to each."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.losses import agreement, agreement_probs, bhattacharyya, hsic


def mean_over_pairs(heads, similarity):
    """Return the mean of similarity(a, b) over a < b; 0 for one head."""
    values = [similarity(a, b) for a, b in combinations(range(heads), 2)]
    return sum(values) / len(values) if values else torch.zeros((), dtype=torch.float64)


def mean_cosine(x, mask):
    """Return the mean cosine, one pair of heads and one unpadded token at a time; x is (B, T, H, d)."""
    tokens = x[mask]

    def cosine(a, b):
        return torch.stack([token[a] @ token[b] / (token[a].norm() * token[b].norm()) for token in tokens]).mean()

    return mean_over_pairs(x.shape[2], cosine)


def mean_coefficient(rows, mask):
    """Return equation 3, one pair of heads and one unpadded query at a time, over the keys that both attend to."""

    def coefficient(a, b):
        per_row = []
        for sample, query in mask.nonzero().tolist():
            p, q = rows[sample, a, query], rows[sample, b, query]
            per_row.append(sum((p[key] * q[key]).sqrt() for key in range(len(p)) if p[key] * q[key] > 0))
        return sum(per_row) / len(per_row)

    return mean_over_pairs(rows.shape[1], coefficient)


def mean_criterion(x, mask, unscaled=False):
    """Return equations 4 and 7 with N×N matrices of the unpadded tokens."""
    tokens = x[mask]  # (N, H, d)
    count = len(tokens)
    centring = torch.eye(count, dtype=x.dtype) - torch.ones(count, count, dtype=x.dtype) / count
    kernels = [tokens[:, head] @ tokens[:, head].T for head in range(x.shape[2])]

    def criterion(i, j):
        trace = torch.trace(kernels[i] @ centring @ kernels[j] @ centring)
        return trace if unscaled else trace / max(count - 1, 1) ** 2

    return mean_over_pairs(x.shape[2], criterion)


ORACLES = {
    hsic: mean_criterion,
    lambda x, mask: hsic(x, mask, unscaled=True): lambda x, mask: mean_criterion(x, mask, unscaled=True),
    agreement: mean_cosine,
    agreement_probs: lambda rows, mask: mean_cosine(rows.transpose(1, 2), mask),
    bhattacharyya: mean_coefficient,
}


@pytest.mark.parametrize("loss", ORACLES)
@given(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 6)), st.integers(0, 99))
def test_it_is_the_mean_over_pairs(make_vectors, make_rows, assert_same_gradient, loss, shape, seed):
    x, mask = (make_rows if loss in (agreement_probs, bhattacharyya) else make_vectors)(*shape, seed=seed)
    assert_same_gradient(x, loss(x, mask), ORACLES[loss](x, mask), rtol=1e-5, atol=1e-5)


def test_a_dropped_head_agrees_with_nobody_and_gets_no_gradient():
    x = torch.ones(1, 2, 3, 4)
    x[:, :, 1] = 0.0
    x.requires_grad_()
    value = agreement(x)
    value.backward()
    assert value.item() == pytest.approx(1 / 3, abs=1e-6)
    assert torch.isfinite(x.grad).all()
    assert not x.grad[:, :, 1].any()


def test_vectors_of_every_size_count_alike(make_vectors):
    x, mask = make_vectors(2, 5, 4, 8, dtype=torch.float32)
    for scale in (1e-12, 1e12):
        torch.testing.assert_close(agreement(x * scale, mask), agreement(x, mask), rtol=1e-5, atol=1e-5)


def test_a_vanishing_vector_has_no_gradient_that_drowns_the_rest():
    """A fine-tuned model had head outputs of length 1e-13 next to others of length 1."""
    x = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(0))
    x[0, 1, 2] *= 1e-13
    x[1, 2, 0] *= 1e-6
    x.requires_grad_()
    agreement(x).backward()
    assert torch.isfinite(x.grad).all()
    assert x.grad.abs().max() < 1
    with torch.no_grad():
        zeroed = x.clone()
        zeroed[0, 1, 2] = zeroed[1, 2, 0] = 0.0
    torch.testing.assert_close(agreement(x), agreement(zeroed))


@pytest.mark.parametrize("keys", [2, 64, 1024])
def test_heads_that_attend_alike_overlap_fully_and_those_that_share_no_key_do_not(keys):
    rows = torch.full((2, 3, 5, keys), 1 / keys)
    assert bhattacharyya(rows).item() == pytest.approx(1.0, abs=1e-5)
    rows = torch.zeros(1, 2, 3, keys, requires_grad=True)
    with torch.no_grad():
        rows[:, 0, :, : keys // 2] = 2 / keys
        rows[:, 1, :, keys // 2 :] = 2 / keys
    value = bhattacharyya(rows)
    assert value.item() == pytest.approx(0.0, abs=1e-5)
    (gradient,) = torch.autograd.grad(value, rows)
    assert torch.isfinite(gradient).all()


def test_gradients_of_saturated_scores_stay_finite_and_small():
    scores = torch.tensor([[200.0, 0.0, -torch.inf], [0.0, 40.0, -torch.inf]]).view(1, 2, 1, 3).requires_grad_()
    bhattacharyya(scores.softmax(-1)).backward()
    assert torch.isfinite(scores.grad).all()
    assert scores.grad.abs().max() < 1.0


def test_gradients_of_half_precision_stay_finite_under_loss_scaling():
    """The root is steep at a key that one head ignores, and mixed precision multiplies by 2¹⁶."""
    scores = 12 * torch.randn(32, 12, 64, 64, generator=torch.Generator().manual_seed(0))
    scores = scores.half().requires_grad_()
    rows = scores.softmax(-1)
    assert (rows == 0).any()
    (65536 * bhattacharyya(rows)).backward()
    assert torch.isfinite(scores.grad).all()
    exact = bhattacharyya(rows.detach().double())
    torch.testing.assert_close(bhattacharyya(rows.detach()).double(), exact, atol=2e-3, rtol=0)


@pytest.mark.parametrize("shape", [(2, 20, 3, 2), (1, 3, 4, 5)], ids=["H·d products", "N×N products"])
def test_both_routes_of_hsic_agree_with_the_oracle_without_padding(make_vectors, assert_same_gradient, shape):
    x, _ = make_vectors(*shape)
    everything = torch.ones(shape[:2], dtype=torch.bool)
    assert_same_gradient(x, hsic(x), mean_criterion(x, everything))
    assert torch.autograd.gradcheck(hsic, x)


@pytest.mark.parametrize("shape", [(0, 5, 3, 4), (2, 0, 3, 4)])
def test_no_tokens_are_independent(shape):
    assert hsic(torch.zeros(shape)).item() == 0
