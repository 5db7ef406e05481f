import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.losses import agreement, agreement_probs

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))


def oracle(x, mask, mean_over_pairs):
    """Return the mean cosine, one pair of heads and one unpadded token at a time; x is (B, T, H, d)."""
    tokens = x[mask]

    def cosine(a, b):
        return torch.stack([token[a] @ token[b] / (token[a].norm() * token[b].norm()) for token in tokens]).mean()

    return mean_over_pairs(x.shape[2], cosine)


@given(SHAPES, st.integers(0, 99))
def test_it_is_the_mean_cosine(make_vectors, mean_over_pairs, assert_same_gradient, shape, seed):
    x, mask = make_vectors(*shape, seed=seed)
    assert_same_gradient(x, agreement(x, mask), oracle(x, mask, mean_over_pairs))


@given(SHAPES, st.integers(0, 99))
def test_rows_are_compared_query_by_query(make_rows, mean_over_pairs, assert_same_gradient, shape, seed):
    rows, mask = make_rows(*shape, seed=seed)
    assert_same_gradient(rows, agreement_probs(rows, mask), oracle(rows.transpose(1, 2), mask, mean_over_pairs))


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
