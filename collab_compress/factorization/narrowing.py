"""Narrower values: the best channels of each head, and an output projection fitted to all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from collab_compress.factorization.factors import check_weights, relative
from collab_compress.factorization.moments import Moments, check_moments, cholesky, damped_

MIN_VARIANCE_SHARE = 1e-10  # share of the variance in the second moments below which there is only rounding


@dataclass(frozen=True)
class Narrowing:
    r"""Narrower values of an attention layer: the channels that heads keep, and the refitted output projection.

    Head $i$ of a dense layer adds $o_i W^O_i$ to the residual stream, with $o_i$ its output, d channels wide. In the
    narrow form it adds $o_i P_i O_i$: the channels $o_i P_i$ are the outputs of values $W^V_i P_i$ under the same
    attention probabilities. Heads that share their values, as grouped queries do, share $P_i$ too.

    Args:
        heads: $P_i$ of each head of values, (Hkv, d, s), in float64.
        output: $O$, heads side by side, (dv·group, D).
        bias: to be added to the output projection's bias, (D,), or None where nothing is folded into it.
        weight_error: relative error of the heads' maps, $\|U - \hat U\|_F / \|U\|_F$ over the stacked
            $U_i = W^V_i W^O_i$.
        data_error: relative error of the layer's output on calibration data, around the mean where that is folded;
            None without data.

    Example:
        >>> narrow = narrow_values(torch.randn(3, 24, 8), torch.randn(3, 8, 24), size=8, moments=None)
        >>> narrow.weight_error  # all channels are kept
        0.0
    """

    heads: Tensor
    output: Tensor
    bias: Tensor | None
    weight_error: float
    data_error: float | None


def narrow_values(
    value: Tensor,
    output: Tensor,
    size: int,
    moments: Moments | None,
    *,
    fold: bool = True,
    damping: float = 1e-3,
    device: str | None = None,
) -> Narrowing:
    r"""Choose the channels that each head's values keep, and refit the output projection on them.

    Minimises $E\|\sum_i o_i (W^O_i - P_i O_i)\|^2$: each $P_i$ for its head alone, by the truncated singular value
    decomposition of $C_i^{1/2} W^O_i$ with $C_i$ the covariance of $o_i$; then $O$ for all heads together, by least
    squares on the kept channels, so that heads make up for each other. The lost part of the mean goes into
    the bias. A head that keeps all its channels keeps them as they are. Heads that share their values are taken
    together: their outputs side by side, under the mean of their covariances.

    Without moments, inputs are assumed white and heads independent: $C_i = W_i^{V\top} W^V_i$.

    Args:
        value: $W^V$ of each head of values, (Hkv, D, d); each serves H / Hkv heads, side by side.
        output: $W^O$ of each head, (H, d, D).
        size: channels s of each head of values, 1 to d.
        moments: of the output projection's input, heads side by side, H·d wide; None without data. If the input is
            constant, as in the first layer of DETR's decoder, and is folded into the bias, channels are chosen as
            without data.
        fold: whether the output projection has a bias to take the mean part; without, second moments count.
        damping: share of the mean variance that is added to every direction.
        device: device of the work; None for the device of the weights, or the CPU if that has no float64.

    Raises:
        ValueError: shapes, size or moments do not fit, a value is not finite, the device cannot be used, or the
            moments are singular even after damping.

    Example:
        >>> value, output = torch.randn(3, 24, 8), torch.randn(3, 8, 24)  # of 3 heads
        >>> moments = Moments.of(torch.randn(100, 24))  # of the heads' outputs, side by side
        >>> narrow = narrow_values(value, output, size=5, moments=moments)
        >>> narrow.heads.shape, narrow.output.shape
        (torch.Size([3, 8, 5]), torch.Size([15, 24]))
    """
    value, output = check_weights("value", value, device), check_weights("output", output, device)
    if value.ndim != 3 or output.ndim != 3 or len(output) % len(value) or value.shape[2] != output.shape[1]:
        raise ValueError(
            f"value and output heads do not fit together: got {tuple(value.shape)} and {tuple(output.shape)}; "
            "expected (Hkv, D, d) and (H, d, D) with Hkv a divisor of H"
        )
    heads, width, _ = output.shape
    check_moments("moments", moments, heads * width)
    if not 1 <= size <= width:
        raise ValueError(f"size is out of range: got {size}, expected 1 to {width}")
    count, group = len(value), heads // len(value)
    white = torch.block_diag(*(value.mT @ value).repeat_interleave(group, 0))  # (H·d, H·d)
    joint = white
    if moments is not None:
        given = (moments.covariance() if fold else moments.second).to(white)
        varies = float(given.trace()) > MIN_VARIANCE_SHARE * float(moments.second.trace())
        joint = given if varies else white
    dense = output.flatten(0, 1)  # (H·d, D)
    damped = damped_(joint.clone(), damping)
    # exactly the identity where nothing is dropped
    kept = torch.eye(width, dtype=joint.dtype, device=joint.device).expand(count, -1, -1)
    refit, residual = dense, torch.zeros_like(dense)
    if size < width:
        heads_of_values = group_heads(damped, list(output), group)
        kept = torch.stack([rank_channels(*head)[0][:, :size] for head in heads_of_values])
        channels = torch.block_diag(*kept.repeat_interleave(group, 0))  # (H·d, dv·group)
        crossed = damped @ channels
        refit = torch.cholesky_solve(crossed.mT @ dense, _lower_root(channels.mT @ crossed))
        residual = dense - channels @ refit
    return Narrowing(
        heads=kept,
        output=refit,
        bias=moments.mean.to(residual) @ residual if fold and moments is not None else None,
        weight_error=_relative(residual, dense, white),
        data_error=None if moments is None else _relative(residual, dense, joint),
    )


def group_heads(moments: Tensor, outputs: Sequence[Tensor], group: int) -> list[tuple[Tensor, Tensor]]:
    """Merge every `group` heads that share their values, with outputs o_i of damped moments (n, n) and W^O (d_i, D).

    Returns for each head of values the mean moments of its o_i, (d_i, d_i), and W^O side by side, (d_i, D·group).
    """
    blocks = [moments[start:stop, start:stop] for start, stop in pairwise(accumulate(map(len, outputs), initial=0))]
    return [
        (torch.stack(blocks[first : first + group]).mean(0), torch.cat(list(outputs[first : first + group]), 1))
        for first in range(0, len(blocks), group)
    ]


def _relative(residual: Tensor, dense: Tensor, weights: Tensor) -> float:
    """Return the norm of one matrix over that of another, with the same weights for directions of the input."""
    error, total = (float((matrix * (weights @ matrix)).sum()) for matrix in (residual, dense))
    return relative(error, total)


def rank_channels(moments: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return P (d, d), the channels o·P by their contribution to E‖o·W^O‖², descending, and these contributions.

    The output o of a head has damped moments (d, d), and o·P are uncorrelated with variance 1.
    """
    root = _lower_root(moments).mT
    directions, sizes, _ = torch.linalg.svd(root @ output, full_matrices=False)
    return torch.linalg.solve_triangular(root, directions, upper=True), sizes.square()


def explained_energy(moments: Tensor, outputs: Sequence[Tensor], group: int = 1) -> tuple[list[Tensor], Tensor]:
    """Return what channels of values contribute to a layer's output, in the narrow form of equal widths.

    The channels that values of dv channels keep are among those that dv + 1 keep, so that one factorization serves
    every width: with the channels in the order in which they are kept and LLᵀ their moments, channel j adds the
    square of row j of L⁻¹ E[f (Σ o_i W_i)].

    Arguments are as for `group_heads`. Returns the contribution of each channel to E‖o_i W_i‖² of its head of values
    alone, (d_i,) for each; and that of each further channel of all heads of values to E‖Σ o_i W_i‖² once outputs are
    refitted, (n / group,): the first head's best, the second head's, …, then the first head's second.
    """
    ranked = [rank_channels(*head) for head in group_heads(moments, outputs, group)]
    of_heads = [channels for channels, _ in ranked for _ in range(group)]  # (d_i, at most d_i) each
    starts = accumulate((channels.shape[1] for channels in of_heads), initial=0)
    order = sorted(  # by rank, then head of values, then head
        (rank, start + rank)
        for start, channels in zip(starts, of_heads, strict=False)
        for rank in range(channels.shape[1])
    )
    channels = torch.block_diag(*of_heads)
    channels = channels[:, [column for _, column in order]]
    crossed = moments @ channels
    products = crossed.mT @ torch.cat(list(outputs))  # (n, D)
    added = torch.linalg.solve_triangular(_lower_root(channels.mT @ crossed), products, upper=False)
    return [sizes for _, sizes in ranked], added.square().sum(1).unflatten(0, (-1, group)).sum(1)


def _lower_root(matrix: Tensor) -> Tensor:
    return cholesky(matrix, "the values' moments are singular; pass a larger damping, or more data")
