import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collab_compress.losses import bhattacharyya

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 6))


def oracle(rows, mask, mean_over_pairs):
    """Return equation 3, one pair of heads and one unpadded query at a time, over the keys that both attend to."""

    def coefficient(a, b):
        per_row = []
        for sample, query in mask.nonzero().tolist():
            p, q = rows[sample, a, query], rows[sample, b, query]
            per_row.append(sum((p[key] * q[key]).sqrt() for key in range(len(p)) if p[key] * q[key] > 0))
        return sum(per_row) / len(per_row)

    return mean_over_pairs(rows.shape[1], coefficient)


@given(SHAPES, st.integers(0, 99))
def test_it_is_the_mean_coefficient(make_rows, mean_over_pairs, assert_same_gradient, shape, seed):
    rows, mask = make_rows(*shape, seed=seed)
    padded = rows == 0
    value, expected = bhattacharyya(rows, mask), oracle(rows, mask, mean_over_pairs)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-5)
    if rows.shape[1] > 1:
        (gradient,) = torch.autograd.grad(value, rows)
        (right,) = torch.autograd.grad(expected, rows)
        # At keys without weight the oracle has no slope, and the softmax before passes none on.
        torch.testing.assert_close(gradient.masked_fill(padded, 0.0), right, rtol=1e-5, atol=1e-5)


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
