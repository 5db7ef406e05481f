"""Divergence of attention rows from those of another model: the loss of attention distillation."""

from __future__ import annotations

from torch import Tensor

from collab_compress.losses.precision import check, full_precision, mean_over_real, no_autocast

EPSILON = 1e-9  # keeps the logarithm finite where a row is 0


def kl_divergence(rows: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Return the mean Kullback–Leibler divergence of attention rows, over real queries and heads, in nats.

    $$KL(p \,\|\, q) = \sum_j p_j \log \frac{p_j}{q_j}$$

    with $p$ a row of the target and $q$ the same row here; 0 where they agree.

    Args:
        rows: attention probabilities before dropout, (B, H, T, S), finite, 0 at padded keys.
        target: those of the model to come near to, of the same shape; no gradient flows there.
        mask: True at real queries, (B, T) bool, or None for all.

    Returns:
        A scalar in float32, or float64 if the rows are; 0 without real queries.

    Raises:
        ValueError: a shape does not fit.
    """
    check("rows", rows, "(B, H, T, S)", mask, (0, 2))
    if target.shape != rows.shape:
        raise ValueError(f"target does not fit rows: got {tuple(target.shape)}, expected {tuple(rows.shape)}")
    with no_autocast(rows):
        here, there = full_precision(rows), full_precision(target.detach())
        lost = there * ((there + EPSILON).log() - (here + EPSILON).log())
        return mean_over_real(lost.sum(-1).mean(1), mask)
