"""HSIC regularizer: statistical dependence between the heads' representations."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from collab_compress.losses.precision import check, full_precision, no_autocast, per_pair

Kernel = Literal["linear", "rbf"]


def hsic(x: Tensor, mask: Tensor | None = None, kernel: Kernel = "linear", bandwidth: float | None = None) -> Tensor:
    r"""Return the mean Hilbert-Schmidt independence criterion of two heads over the real tokens, over pairs.

    $$\mathrm{HSIC}(K_i, K_j) = \frac{1}{(N - 1)^2} \operatorname{tr}(K_i C K_j C), \quad C = I - \tfrac1N 1 1^\top$$

    equations 4 and 7 of "Analyzing and Controlling Inter-Head Diversity in Multi-Head Attention", without its
    λ, where $K_i$ is the N×N kernel of head i's outputs. No pair is formed. With the linear kernel

    $$\sum_{i < j} \operatorname{tr}(K_i C K_j C) =
      \tfrac12 \Big( \|X_{all}^\top C X_{all}\|_F^2 - \sum_i \|X_i^\top C X_i\|_F^2 \Big)$$

    takes O(B T H d · min(B T, H d)) operations; with the radial one

    $$\kappa(y, z) = \exp\!\big(-\|y - z\|^2 / 2 \sigma^2\big), \quad
      \tfrac12 \Big( \big\| \sum_i C K_i C \big\|_F^2 - \sum_i \|C K_i C\|_F^2 \Big)$$

    takes O((B T)² H d) operations and O((B T)² H) memory. First derivatives only.

    Args:
        x: head outputs, (B, T, H, d), finite.
        mask: True at real tokens, (B, T) bool, or None for all.
        kernel: `linear` or `rbf`.
        bandwidth: σ of the radial kernel, or None for each head's median distance between two real tokens,
            taken as a constant.

    Returns:
        A scalar in float32, or float64 if x is; 0 for one head or fewer than two real tokens.

    Raises:
        ValueError: a shape does not fit, the kernel is unknown, or the bandwidth is not positive.
    """
    check("x", x, "(B, T, H, d)", mask, (0, 1))
    if kernel not in ("linear", "rbf"):
        raise ValueError(f"unknown kernel: got {kernel!r}, expected 'linear' or 'rbf'")
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"the bandwidth is not positive: got {bandwidth}; None takes the median distance")
    with no_autocast(x):
        tokens = full_precision(x).flatten(0, 1)  # (N, H, d)
        real = tokens.new_ones(tokens.shape[0]) if mask is None else mask.flatten().to(tokens.dtype)
        count = real.sum()
        mean = torch.einsum("n,nhd->hd", real, tokens) / count.clamp(min=1)
        centred = (tokens - mean) * real[:, None, None]
        ordered = _linear(centred) if kernel == "linear" else _radial(centred, real, bandwidth)
        return ordered * per_pair(x.shape[2]) / (count - 1).clamp(min=1).square()


def _linear(centred: Tensor) -> Tensor:
    """Sum of tr(K_i C K_j C) over ordered pairs of distinct heads; centred vectors (N, H, d)."""
    every = centred.flatten(1)  # (N, H·d)
    # Half of a symmetric product's gradient, doubled: one large product less in the backward pass.
    gram = every.mT @ every.detach() if every.shape[0] >= every.shape[1] else every @ every.detach().mT
    total = gram.square().sum()
    blocks = torch.einsum("nhc,nhd->hcd", centred, centred)
    return 2 * total - total.detach() - blocks.square().sum()


def _radial(centred: Tensor, real: Tensor, bandwidth: float | None) -> Tensor:
    """Sum of tr(K_i C K_j C) over ordered pairs of distinct heads; vectors (N, H, d), real 1 or 0, (N,)."""
    heads = centred.transpose(0, 1)  # (H, N, d)
    squares = heads.square().sum(-1)
    distances = (squares[:, :, None] + squares[:, None, :] - 2 * heads @ heads.mT).clamp(min=0)  # (H, N, N)
    both = real[:, None] * real
    variance = _median(distances.detach(), both) if bandwidth is None else bandwidth**2
    kernels = torch.exp(distances * (-0.5 / variance))
    count = real.sum().clamp(min=1)
    means = kernels @ real / count  # (H, N)
    shift = means - (means @ real / count)[:, None] / 2
    kernels = (kernels - shift[:, :, None] - shift[:, None, :]) * both  # C K_i C
    return kernels.sum(0).square().sum() - kernels.square().sum()


def _median(distances: Tensor, both: Tensor) -> Tensor:
    """Median squared distance of two real tokens of each head, 1 where it is 0 or there are none, (H, 1, 1)."""
    pairs = torch.where(both.triu(1) > 0, distances, torch.nan)
    median = pairs.flatten(1).nanmedian(1).values
    return torch.where(median > 0, median, 1.0)[:, None, None]
