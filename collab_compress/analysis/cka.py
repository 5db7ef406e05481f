"""Centred kernel alignment (CKA) of all pairs of heads, from covariances or from a sample of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from collab_compress.analysis.covariance import JointCovariance, rounding_variance
from collab_compress.errors import HeadError

Kernel = Literal["linear", "rbf"]
ROWS = 256  # rows of the kernels that are in memory at a time
PROBES = 1000  # tokens whose distances set the default bandwidth


def cka(responses: JointCovariance) -> Tensor:
    r"""Return linear CKA of all pairs of representations, computed from their covariance.

    $$\mathrm{CKA}(i, j) = \frac{\|C_{ij}\|_F^2}{\|C_{ii}\|_F \, \|C_{jj}\|_F}$$

    equals equation 5 of "Analyzing and Controlling Inter-Head Diversity in Multi-Head Attention" (Kornblith et al.,
    2019) with $K_i = X_i X_i^\top$. It is invariant under rotations, isotropic scalings and shifts. For independent
    representations it is not 0 but about $\sqrt{d_i d_j} / N$ (d directions of equal variance), so use many more
    tokens than directions, or `sample_cka(…, unbiased=True)`.

    Args:
        responses: covariance from `head_covariances` or `JointCovariance.of`.

    Returns:
        (n, m) in float64, between 0 and 1; 0 for a representation that never varies, with itself too.
    """
    norms = responses.own().square().sum((1, 2)).sqrt()  # (n,)
    squares = torch.stack([responses.cross(row, responses.columns).square().sum((1, 2)) for row in responses.rows])
    return _ratio(squares, norms[responses.rows.start : responses.rows.stop], norms[responses.columns.start :])


def sample_cka(
    tokens: Tensor | Sequence[Tensor],
    kernel: Kernel = "rbf",
    *,
    unbiased: bool = False,
) -> Tensor:
    r"""Return CKA of all pairs of heads on a sample of tokens, with the linear or the radial kernel.

    The radial kernel is $\kappa(y, z) = \exp(-\|y - z\|^2 / 2 \sigma^2)$, with σ each head's median distance between
    two of its first 1000 tokens. The cost is O(H d N²) operations and O(H N) memory, so N should be at most a few
    thousand tokens.

    Args:
        tokens: (N, H, d) from `head_samples`, or several representations (N, d_i) of the same tokens, as of layers
            or models; N is at least 4.
        kernel: `rbf` or `linear`.
        unbiased: estimate the dependence by HSIC₁ (Song et al., "Feature Selection via Dependence Maximization",
            2012). The ordinary estimate (equation 4 of "Inter-Head Diversity") is of order 1/N too high, and more so
            the narrower the kernel: independent heads do not come out at 0.

    Returns:
        (H, H) in float64; 0 for a head that never varies. The ordinary estimate is between 0 and 1; the unbiased one
        may lie a little outside.

    Raises:
        HeadError: too few tokens or not the same number, or an unknown kernel.
    """
    if kernel not in get_args(Kernel):
        raise HeadError(f"unknown kernel {kernel!r}; expected one of {', '.join(get_args(Kernel))}")
    centred = _centre(tokens if isinstance(tokens, Tensor) else _stack(tokens))
    widths = None if kernel == "linear" else _bandwidths(centred)
    dependence = _hsic(centred, widths, unbiased)
    norms = dependence.diagonal().clamp(min=0).sqrt()
    return _ratio(dependence, norms, norms)


def _centre(tokens: Tensor) -> Tensor:
    """Subtract each head's mean; return (H, N, d) in float64 on the CPU, 0 for heads that vary only by rounding."""
    if tokens.ndim != 3 or len(tokens) < 4:
        raise HeadError(f"got tokens {tuple(tokens.shape)}; expected (N, H, d) with N at least 4")
    heads = tokens.detach().double().cpu().transpose(0, 1)
    if not bool(heads.isfinite().all()):
        raise HeadError("what heads compute is not finite; look for NaN or infinity in the weights")
    centred = heads - heads.mean(1, keepdim=True)
    power, width = heads.square().sum(2).mean(1), heads.shape[2]
    noise = width * rounding_variance(power, width, torch.finfo(tokens.dtype).eps)
    return centred * (centred.square().sum(2).mean(1) > noise)[:, None, None]


def _bandwidths(centred: Tensor) -> Tensor:
    """Return σ of each head, (H, 1, 1)."""
    medians = torch.stack([torch.nn.functional.pdist(head).median() for head in centred[:, :PROBES]])
    return torch.where(medians > 0, medians, 1.0)[:, None, None]


def _hsic(centred: Tensor, widths: Tensor | None, unbiased: bool) -> Tensor:
    """Return HSIC of all pairs of heads, (H, H), but for a common factor in the ordinary estimate.

    Kernels are computed in blocks of rows, of which only products and sums are kept: O(H·N) memory.

    Args:
        centred: vectors (H, N, d).
        widths: σ of each head, (H, 1, 1), or None for the linear kernel.
        unbiased: HSIC₁ (Song et al., 2012) in place of tr(K C L C).
    """
    count = centred.shape[1]
    joint = centred.new_zeros(len(centred), len(centred))
    sums = []
    for start in range(0, count, ROWS):
        block = centred[:, start : start + ROWS]
        if widths is None:
            kernels = block @ centred.mT  # (H, rows, N)
        else:
            # a constant offset changes nothing, and with -1 a head that never varies gives 0 exactly
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


def _stack(representations: Sequence[Tensor]) -> Tensor:
    """Stack matrices (N, d_i) as heads (N, n, d), padded with zeros, which change no kernel."""
    if len({(x.ndim, len(x)) for x in representations}) != 1 or representations[0].ndim != 2:
        shapes = ", ".join(str(tuple(x.shape)) for x in representations)
        raise HeadError(f"representations do not fit together: got {shapes}; expected (N, d), all of the same N")
    width = max(x.shape[1] for x in representations)
    return torch.stack([torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in representations], 1)


def _ratio(squares: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Divide (n, m) by (n,) and (m,), 0 where one of these is 0."""
    norms = rows[:, None] * columns
    return torch.where(norms > 0, squares / torch.where(norms > 0, norms, 1.0), 0.0)
