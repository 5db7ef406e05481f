import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import kl_div

from collab_compress.losses import kl_divergence

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 6))


@given(SHAPES, st.integers(0, 99))
def test_it_is_the_mean_over_real_rows(make_rows, shape, seed):
    rows, mask = make_rows(*shape, seed=seed)
    target, _ = make_rows(*shape, seed=seed + 100)
    target = torch.where(rows == 0, 0.0, target)  # padded keys are padded for both
    divergences = [
        # the loss adds 1e-9 to probabilities, which tells in rows as small as 1e-7
        kl_div((rows[sample, head, query] + 1e-9).log(), target[sample, head, query], reduction="sum")
        for sample, query in mask.nonzero().tolist()
        for head in range(shape[1])
    ]
    expected = torch.stack(divergences).mean() if divergences else torch.tensor(0.0)
    torch.testing.assert_close(kl_divergence(rows, target, mask), expected, rtol=1e-4, atol=1e-5, check_dtype=False)


def test_it_is_zero_for_equal_rows_and_pulls_towards_the_target(make_rows):
    rows, mask = make_rows(2, 3, 4, 4)
    assert kl_divergence(rows, rows, mask).item() == 0
    scores = torch.randn(1, 2, 3, 4, requires_grad=True)
    target = torch.randn(1, 2, 3, 4).softmax(-1)
    before = kl_divergence(scores.softmax(-1), target)
    (gradient,) = torch.autograd.grad(before, scores)
    assert kl_divergence((scores - 0.1 * gradient).softmax(-1), target) < before


def test_no_gradient_flows_to_the_target():
    rows, target = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(2))
    kl_divergence(rows.softmax(-1), target.softmax(-1)).backward()
    assert target.grad is None


def test_shapes_are_checked(make_rows):
    rows, _ = make_rows(2, 3, 4, 4)
    with pytest.raises(ValueError, match=r"target does not fit probs: got \(1, 3, 4, 4\), expected \(2, 3, 4, 4\)"):
        kl_divergence(rows, rows[:1])
