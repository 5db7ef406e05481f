"""Bhattacharyya penalty: how much the attention of the heads overlaps."""

from __future__ import annotations

import torch
from torch import Tensor

from collab_compress.losses.precision import check, full_precision, mean_over_real, no_autocast, per_pair

# Keeps the root's slope finite at 0. Adds at most 2 √(EPSILON · S) to a coefficient: 1e-5 at 2500 keys.
EPSILON = 1e-14
HALF_EPSILON = 6e-8  # float16's smallest number: the slope, scaled as in mixed precision, must fit float16 too


def bhattacharyya(rows: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Return the mean Bhattacharyya coefficient of two heads' attention rows, over real queries and pairs.

    $$BC(a, b) = \sum_j \sqrt{p_j^a \, p_j^b}$$

    equation 3 of "Diversified Attention on Transformers", from 0 for heads that attend to different tokens
    to 1 for heads that attend alike. Without a loop over pairs,

    $$\sum_{a < b} BC(a, b) = \tfrac12 \Big( \big\| \sum_h r_h \big\|^2 - \sum_h \|r_h\|^2 \Big)$$

    where $r_h = \sqrt{p^h}$.

    The paper trains with λ = 1 and finds its heads more diverse, but its own result is negative: the penalised
    translation model never reaches the BLEU of the plain one.

    Args:
        rows: attention probabilities before dropout, (B, H, T, S), finite, 0 at padded keys.
        mask: True at real queries, (B, T) bool, or None for all.

    Returns:
        A scalar in float32, or float64 if the rows are; 0 for one head or without real queries.

    Raises:
        ValueError: a shape does not fit.
    """
    check("rows", rows, "(B, H, T, S)", mask, (0, 2))
    with no_autocast(rows):
        shifted = full_precision(rows) + (HALF_EPSILON if rows.dtype == torch.float16 else EPSILON)
        total = shifted.sqrt().sum(1).square().sum(-1)  # (B, T)
        own = shifted.sum(1).sum(-1)
        return mean_over_real(total - own, mask) * per_pair(rows.shape[1])
