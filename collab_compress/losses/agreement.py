"""Agreement of heads: the mean cosine between them, which the disagreement regularizer lowers."""

from __future__ import annotations

import torch
from torch import Tensor

from collab_compress.losses.precision import check, full_precision, mean_over_real, no_autocast, per_pair

FAINT = 1e-4  # of the root mean square length; trained models do have such vectors


def agreement(x: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Return the mean cosine between two heads' vectors, over pairs of heads and real tokens.

    The disagreement regularizer of Li et al. 2018, "Multi-Head Attention with Disagreement Regularization", with
    the sign of a loss: the lower, the more the heads disagree. Without a loop over pairs,

    $$\sum_{a < b} \cos(x_a, x_b) = \tfrac12 \Big( \big\| \sum_h \hat x_h \big\|^2 - \sum_h \|\hat x_h\|^2 \Big)$$

    where $\hat x_h = x_h / \|x_h\|$. A zero vector, as of a dropped head, has cosine 0 with every other, and
    no gradient; so has one that is 10⁻⁴ of the others' length, whose gradient would drown all else.

    Args:
        x: head outputs or values, (B, T, H, d), finite.
        mask: True at real tokens, (B, T) bool, or None for all.

    Returns:
        A scalar in float32, or float64 if x is; 0 for one head or without real tokens.

    Raises:
        ValueError: a shape does not fit.
    """
    check("x", x, "(B, T, H, d)", mask, (0, 1))
    return _mean_cosine(x, 2, mask)


def agreement_rows(rows: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Return the mean cosine between two heads' attention rows, over pairs of heads and real queries.

    `agreement` with the attention weights of one query as the head's vector.

    Args:
        rows: attention weights, (B, H, T, S), finite, 0 at padded keys.
        mask: True at real queries, (B, T) bool, or None for all.

    Returns:
        A scalar in float32, or float64 if the rows are; 0 for one head or without real queries.

    Raises:
        ValueError: a shape does not fit.
    """
    check("rows", rows, "(B, H, T, S)", mask, (0, 2))
    return _mean_cosine(rows, 1, mask)


def _mean_cosine(vectors: Tensor, head_axis: int, mask: Tensor | None) -> Tensor:
    """Mean over pairs and real positions; the vectors lie along the last axis."""
    with no_autocast(vectors):
        vectors = full_precision(vectors)
        squares = vectors.square().sum(-1, keepdim=True)
        there = squares > (FAINT**2 * squares.detach().mean()).clamp(min=torch.finfo(vectors.dtype).tiny)
        # The inner choice keeps inf out of the gradient of the outer one.
        units = vectors * torch.where(there, torch.where(there, squares, 1.0).rsqrt(), 0.0)
        total = units.sum(head_axis).square().sum(-1)  # (B, T)
        # ‖x̂_h‖² is 1, with gradient 0.
        cosines = total - there.sum(head_axis).squeeze(-1)
        return mean_over_real(cosines, mask) * per_pair(vectors.shape[head_axis])
