"""Narrower values: the best channels of each head, and the output projection that makes the most of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from collab_compress.factorization.moments import Moments, float64_device

CONSTANT = 1e-10  # share of the variance in the second moments below which there is only rounding


@dataclass(frozen=True)
class Narrowing:
    r"""Narrower values of an attention layer: the channels that heads keep, and the refitted output projection.

    Head $i$ of a dense layer adds $o_i W^O_i$ to the residual stream, with $o_i$ its output, d channels wide. In the
    narrow form it adds $o_i P_i O_i$: the channels $o_i P_i$ are what values $W^V_i P_i$ give under the same
    attention probabilities. Heads that share their values, as grouped queries do, share $P_i$ too.

    Args:
        heads: $P_i$ of each head of values, (d, s_i), in float64.
        output: $O$, heads side by side, (dv·group, D).
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
    r"""Choose the channels that each head's values keep, and refit the output projection on them.

    Minimises $E\|\sum_i o_i (W^O_i - P_i O_i)\|^2$: each $P_i$ for its head alone, by the truncated singular value
    decomposition of $C_i^{1/2} W^O_i$ with $C_i$ the covariance of $o_i$; then $O$ for all heads together, by least
    squares on the channels that are left, so that heads make up for each other. What is lost of the mean goes into
    the bias. A head that keeps all its channels keeps them as they are. Heads that share their values are taken
    together: their outputs side by side, under the mean of their covariances.

    Without moments vectors are taken to be white, and what heads attend to as unrelated: $C_i = W_i^{V\top} W^V_i$.

    Args:
        value: $W^V$ of each head of values, (Hkv, D, d); each serves H / Hkv heads, side by side.
        output: $W^O$ of each head, (H, d, D).
        sizes: channels s_i of each head of values, 0 to d.
        moments: of what the output projection reads, heads side by side, H·d wide; None without data. Where they are
            those of one vector that never varies, as in the first layer of DETR's decoder, and the bias takes that,
            the weights decide as without data.
        fold: whether the output projection has a bias to take the mean part; without, second moments count.
        damping: share of the mean variance that is added to every direction.
        device: where to compute; where the weights are if not given, or the CPU if that device has no float64.

    Raises:
        ValueError: sizes do not fit, or the moments are singular even after damping.
    """
    heads, width, _ = output.shape
    count = len(value)
    if len(sizes) != count or not all(0 <= size <= width for size in sizes) or not any(sizes):
        raise ValueError(f"sizes do not fit: got {tuple(sizes)}, expected {count} numbers from 0 to {width}")
    group = heads // count
    place = float64_device(output.device) if device is None else torch.device(device)
    wv, wo = (each.detach().to(place).double() for each in (value, output))
    white = torch.block_diag(*(wv.mT @ wv).repeat_interleave(group, 0))  # (H·d, H·d)
    joint = white
    if moments is not None:
        joint = (moments.covariance() if fold else moments.second).to(place)
        if float(joint.trace()) <= CONSTANT * float(moments.second.trace()):  # then the bias takes all there is
            joint = white
    damped = damp(joint, damping)
    own, outputs = grouped(damped, list(wo), group)
    kept = tuple(_leading(*each) for each in zip(own, outputs, sizes, strict=True))
    whole = wo.flatten(0, 1)  # (H·d, D)
    refit, lost = whole, torch.zeros_like(whole)
    if sum(sizes) < count * width:
        channels = torch.block_diag(*(each for each in kept for _ in range(group)))  # (H·d, dv·group)
        seen = damped @ channels
        refit = torch.cholesky_solve(seen.mT @ whole, _root(channels.mT @ seen))
        lost = whole - channels @ refit
    return Narrowing(
        kept, refit, moments.mean.to(place) @ lost if fold and moments is not None else None,
        _relative(lost, whole, white), None if moments is None else _relative(lost, whole, joint),
    )  # fmt: skip


def grouped(moments: Tensor, outputs: Sequence[Tensor], group: int) -> tuple[list[Tensor], list[Tensor]]:
    """Merge heads that share their values.

    Args:
        moments: of what the output projection reads, heads side by side, (n, n).
        outputs: W^O of each head, (d_i, D).
        group: how many heads share their values, one after the other.

    Returns:
        For each head of values: the mean moments of its heads' outputs o_i, (d_i, d_i); and their W^O side by side,
        (d_i, D·group).
    """
    starts = accumulate(map(len, outputs), initial=0)
    blocks = [moments[start:stop, start:stop] for start, stop in pairwise(starts)]
    firsts = range(0, len(blocks), group)
    return (
        [torch.stack(blocks[first : first + group]).mean(0) for first in firsts],
        [torch.cat(list(outputs[first : first + group]), 1) for first in firsts],
    )


def _relative(lost: Tensor, whole: Tensor, weights: Tensor) -> float:
    """Norm of one matrix over that of another, directions of the input weighed alike for both."""
    error, total = (float((each * (weights @ each)).sum()) for each in (lost, whole))
    return (max(error, 0.0) / total) ** 0.5 if total > 0 else 0.0


def _leading(moments: Tensor, output: Tensor, size: int) -> Tensor:
    """P (d, s) whose channels o·P carry most of what o·W adds, for o with these moments (d, d) and W (d, D)."""
    if size == len(moments):
        return torch.eye(size, dtype=moments.dtype, device=moments.device)
    return ranked_channels(moments, output)[0][:, :size]


def ranked_channels(moments: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Rank the channels of a head by what they add to the residual stream.

    Args:
        moments: of what the head hands to the output projection, o, (d, d), damped.
        output: W^O of the head, (d, D).

    Returns:
        Channels o·P, P (d, d), each of variance 1 and none correlated with another, those that add most first; and
        how much each adds to E‖o·W^O‖².

    Raises:
        ValueError: the moments are singular.
    """
    root = _root(moments).mT
    directions, sizes, _ = torch.linalg.svd(root @ output, full_matrices=False)
    return torch.linalg.solve_triangular(root, directions, upper=True), sizes.square()


def damp(moments: Tensor, damping: float) -> Tensor:
    """Add a share of the mean variance to every direction of moments (n, n)."""
    damped = moments.clone()
    damped.diagonal().add_(damping * moments.diagonal().mean())
    return damped


def captured(moments: Tensor, outputs: Sequence[Tensor], group: int = 1) -> tuple[list[Tensor], Tensor]:
    """Measure what values of every width capture of what a layer adds, in the narrow form of equal widths.

    The channels that values of dv channels keep are among those that dv + 1 keep, so that one factorization serves
    every width: with the channels in the order in which they are kept and LLᵀ their moments, channel j adds the
    square of row j of L⁻¹ E[f (Σ o_i W_i)].

    Args:
        moments: of what the output projection reads, heads side by side, (n, n), damped.
        outputs: W^O of each head, (d_i, D).
        group: how many heads share their values, one after the other.

    Returns:
        What each channel adds to E‖o_i W_i‖² of its head of values alone, (d_i,) for each; and what each further
        channel of all heads of values adds to E‖Σ o_i W_i‖² once outputs are refitted, (n / group,): the first
        head's best, the second head's, …, then the first head's second, ….

    Raises:
        ValueError: the moments are singular.
    """
    starts = list(accumulate(map(len, outputs), initial=0))
    ranked = [ranked_channels(*each) for each in zip(*grouped(moments, outputs, group), strict=True)]
    places = sorted(  # by place, then head of values, then head
        (place, start + place) for start, output in zip(starts, outputs, strict=False) for place in range(len(output))
    )
    own = torch.block_diag(*(channels for channels, _ in ranked for _ in range(group)))
    channels = own[:, [column for _, column in places]]
    seen = moments @ channels
    adds = seen.mT @ torch.cat(list(outputs))  # (n, D)
    reached = torch.linalg.solve_triangular(_root(channels.mT @ seen), adds, upper=False)
    return [sizes for _, sizes in ranked], reached.square().sum(1).unflatten(0, (-1, group)).sum(1)


def _root(matrix: Tensor) -> Tensor:
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        raise ValueError("the values' moments are singular; pass a larger damping, or more data")
    return root
