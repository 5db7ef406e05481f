"""Narrower values: the best channels of each head, and the output projection that makes the most of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collab_compress.factorization.moments import Moments, float64_device


@dataclass(frozen=True)
class Narrowing:
    r"""What makes the values of an attention layer narrower, and what its output projection becomes.

    Head $i$ of a dense layer adds $o_i W^O_i$ to the residual stream, with $o_i$ its output, d channels wide. In the
    narrow form it adds $o_i P_i O_i$: the channels $o_i P_i$ are what values $W^V_i P_i$ give under the same
    attention rows.

    Args:
        heads: $P_i$ of each head, (d, s_i), in float64.
        output: $O$, heads side by side, (dv, D).
        bias: what is to be added to the output projection's bias, (D,), or None where nothing is folded into it.
        weight_error: relative error of the heads' maps, $\|U - \hat U\|_F / \|U\|_F$ over the stacked
            $U_i = W^V_i W^O_i$.
        data_error: relative error of what the layer adds on calibration data, around the mean where that is folded;
            None without.
    """

    heads: tuple[Tensor, ...]
    output: Tensor
    bias: Tensor | None
    weight_error: float
    data_error: float | None


def narrow_values(
    value: Tensor,
    output: Tensor,
    sizes: Sequence[int],
    moments: Moments | None,
    *,
    fold: bool = True,
    damping: float = 1e-3,
    device: str | None = None,
) -> Narrowing:
    r"""Find the channels that each head's values keep, and the output projection for what is left.

    Minimises $E\|\sum_i o_i (W^O_i - P_i O_i)\|^2$: each $P_i$ for its head alone, by the truncated singular value
    decomposition of $C_i^{1/2} W^O_i$ with $C_i$ the covariance of $o_i$; then $O$ for all heads together, by least
    squares on the channels that are left, so that heads make up for each other. What is lost of the mean goes into
    the bias. A head that keeps all its channels keeps them as they are.

    Without moments vectors are taken to be white, and what heads attend to as unrelated: $C_i = W_i^{V\top} W^V_i$.

    Args:
        value: $W^V$ of each head, (H, D, d).
        output: $W^O$ of each head, (H, d, D).
        sizes: channels s_i of each head, 0 to d.
        moments: of what the output projection reads, heads side by side, H·d wide; None without data.
        fold: whether the output projection has a bias to take the mean part; without, second moments count.
        damping: share of the mean variance that is added to every direction.
        device: where to compute; where the weights are if not given, or the CPU if that device has no float64.

    Raises:
        ValueError: sizes do not fit, or the moments are singular even after damping.
    """
    heads, width, _ = output.shape
    if len(sizes) != heads or not all(0 <= size <= width for size in sizes) or not any(sizes):
        raise ValueError(f"sizes do not fit: got {tuple(sizes)}, expected {heads} numbers from 0 to {width}")
    place = float64_device(output.device) if device is None else torch.device(device)
    wv, wo = (each.detach().to(place).double() for each in (value, output))
    white = torch.block_diag(*(wv.mT @ wv))  # (H·d, H·d)
    joint = white
    if moments is not None:
        joint = (moments.covariance() if fold else moments.second).to(place)
    damped = joint.clone()
    damped.diagonal().add_(damping * joint.diagonal().mean())
    kept = tuple(
        _leading(damped[i * width : (i + 1) * width, i * width : (i + 1) * width], wo[i], size)
        for i, size in enumerate(sizes)
    )
    whole = wo.flatten(0, 1)  # (H·d, D)
    refit, lost = whole, torch.zeros_like(whole)
    if sum(sizes) < heads * width:
        channels = torch.block_diag(*kept)  # (H·d, dv)
        seen = damped @ channels
        refit = torch.cholesky_solve(seen.mT @ whole, _root(channels.mT @ seen))
        lost = whole - channels @ refit
    return Narrowing(
        kept, refit, moments.mean.to(place) @ lost if fold and moments is not None else None,
        _relative(lost, whole, white), None if moments is None else _relative(lost, whole, joint),
    )  # fmt: skip


def _relative(lost: Tensor, whole: Tensor, weights: Tensor) -> float:
    """Norm of one matrix over that of another, directions of the input weighed alike for both."""
    error, total = (float((each * (weights @ each)).sum()) for each in (lost, whole))
    return (max(error, 0.0) / total) ** 0.5 if total > 0 else 0.0


def _leading(moments: Tensor, output: Tensor, size: int) -> Tensor:
    """P (d, s) whose channels o·P carry most of what o·W adds, for o with these moments (d, d) and W (d, D)."""
    if size == len(moments):
        return torch.eye(size, dtype=moments.dtype, device=moments.device)
    root = _root(moments).mT
    directions, _, _ = torch.linalg.svd(root @ output, full_matrices=False)
    leading: Tensor = torch.linalg.solve_triangular(root, directions[:, :size], upper=True)
    return leading


def _root(matrix: Tensor) -> Tensor:
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        raise ValueError("the values' moments are singular; pass a larger damping, or more data")
    return root
