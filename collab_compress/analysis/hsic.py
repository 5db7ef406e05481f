"""HSIC of all pairs of heads on some tokens, with either kernel, ordinary or unbiased."""

from typing import Literal, get_args

import torch
from torch import Tensor

from collab_compress.analysis.joint import rounding_variance
from collab_compress.errors import HeadError

Kernel = Literal["linear", "rbf"]
ROWS = 256  # rows of the kernels that are in memory at a time
PROBES = 1000  # tokens whose distances the bandwidth is taken from


def check(kernel: str, bandwidth: float | None) -> None:
    """Refuse a kernel that is not known.

    Raises:
        HeadError: unknown kernel, or a bandwidth that is not positive.
    """
    if kernel not in get_args(Kernel):
        raise HeadError(f"unknown kernel {kernel!r}; expected one of {', '.join(get_args(Kernel))}")
    if bandwidth is not None and not bandwidth > 0:
        raise HeadError(f"bandwidth is {bandwidth}; expected above 0, or None for the median distance")


def centre(tokens: Tensor) -> Tensor:
    """Take the mean off each head, (H, N, d) in float64 on the CPU; 0 for heads that vary by no more than rounding.

    Raises:
        HeadError: they are not (N, H, d), fewer than four, or not finite.
    """
    if tokens.ndim != 3 or len(tokens) < 4:
        raise HeadError(f"got tokens {tuple(tokens.shape)}; expected (N, H, d) with N at least 4")
    heads = tokens.detach().double().cpu().transpose(0, 1)
    if not bool(heads.isfinite().all()):
        raise HeadError("what heads compute is not finite; look for NaN or infinity in the weights")
    centred = heads - heads.mean(1, keepdim=True)
    power, width = heads.square().sum(2).mean(1), heads.shape[2]
    noise = width * rounding_variance(power, width, torch.finfo(tokens.dtype).eps)
    return centred * (centred.square().sum(2).mean(1) > noise)[:, None, None]


def bandwidths(centred: Tensor, kernel: Kernel, bandwidth: float | None) -> Tensor | None:
    """σ of each head, (H, 1, 1), or None for the linear kernel."""
    if kernel == "linear":
        return None
    if bandwidth is not None:
        return torch.full((len(centred), 1, 1), bandwidth, dtype=torch.float64)
    medians = torch.stack([torch.nn.functional.pdist(head).median() for head in centred[:, :PROBES]])
    return torch.where(medians > 0, medians, 1.0)[:, None, None]


def hsic(centred: Tensor, widths: Tensor | None, unbiased: bool) -> Tensor:
    """Measure the dependence of all pairs of heads, but for a common factor in the ordinary estimate.

    Takes O(H·N) memory: rows of all kernels are computed in blocks, and only their products and sums are kept.

    Args:
        centred: vectors (H, N, d).
        widths: σ of each head, (H, 1, 1), or None for the linear kernel.
        unbiased: HSIC₁ (Song et al., 2012) in place of tr(K C L C).

    Returns:
        (H, H).
    """
    count = centred.shape[1]
    joint = centred.new_zeros(len(centred), len(centred))
    sums = []
    for start in range(0, count, ROWS):
        block = centred[:, start : start + ROWS]
        if widths is None:
            kernels = block @ centred.mT  # (H, rows, N)
        else:
            # less 1, which changes nothing, so that a head that never varies gives 0 exactly
            kernels = torch.expm1(-(torch.cdist(block, centred) / widths).square() / 2)
        if unbiased:
            kernels.diagonal(start, 1, 2).zero_()
        sums.append(kernels.sum(2))
        joint += torch.einsum("hrn,grn->hg", kernels, kernels)
    rows = torch.cat(sums, 1)  # (H, N)
    totals = rows.sum(1)
    if not unbiased:
        return joint - 2 / count * rows @ rows.mT + torch.outer(totals, totals) / count**2
    middle = torch.outer(totals, totals) / ((count - 1) * (count - 2))
    return (joint + middle - 2 / (count - 2) * rows @ rows.mT) / (count * (count - 3))
