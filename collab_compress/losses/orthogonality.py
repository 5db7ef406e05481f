"""Orthogonality regularizer (SRIP): the heads' vectors at a position as near orthonormal as they can be."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from collab_compress.losses.precision import check, full_precision, mean_over_real, no_autocast

# How far, in units of the dtype's rounding, the spectral norm may fall short of itself where eigenvalues nearly tie,
# times 4 e: 12 units, or 1.4e-6 in float32.
SLACK = 128


def orthogonality(x: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Return the mean over real positions of the spectral norm of $V^\top V - I$.

    $$\sigma(V_{all}^\top V_{all} - I)$$

    where the columns of $V_{all}$, d×H, are the heads' vectors at one position: equation 8 of "Analyzing and
    Controlling Inter-Head Diversity in Multi-Head Attention", without its λ. More heads than dimensions
    cannot be orthonormal, and the norm is then at least 1. Only the smaller of $V^\top V$ and $V V^\top$ is
    looked at: they share their non-zero eigenvalues. One head gives $|\|v\|^2 - 1|$.

    Where several eigenvalues are equally far from 1 the gradient is one of the subgradients. Second
    derivatives are not provided.

    Args:
        x: the heads' value (or query, or key) vectors, (B, T, H, d), finite.
        mask: True at real tokens, (B, T) bool, or None for all.

    Returns:
        A scalar in float32, or float64 if x is; 0 without real tokens.

    Raises:
        ValueError: a shape does not fit.
    """
    check("x", x, "(B, T, H, d)", mask, (0, 1))
    heads, width = x.shape[2:]
    with no_autocast(x):
        vectors = full_precision(x).flatten(0, 1)  # (N, H, d)
        gram = vectors @ vectors.mT if heads <= width else vectors.mT @ vectors  # (N, n, n)
        residual = gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        with torch.no_grad():
            right = _dominant_vectors(residual)
            left = normalize(residual @ right, dim=1, eps=torch.finfo(gram.dtype).tiny)
        # A singular value's derivative is that of lᵀ A r with its two singular vectors held fixed. Unlike
        # |rᵀ A r| this stays right where r mixes eigenvectors of +σ and −σ.
        norms = (left * (residual @ right)).sum((1, 2))
        if heads > width:
            norms = norms.clamp(min=1.0)
        return mean_over_real(norms.view(x.shape[:2]), mask)


def _dominant_vectors(matrices: Tensor) -> Tensor:
    """Unit eigenvectors of the eigenvalues largest in magnitude of symmetric (N, n, n), (N, n, 1).

    By squaring the matrices over and over, four times faster than `eigh` on CPU at n = 12. Where eigenvalues
    tie the result is some combination of their eigenvectors; for the zero matrix it is zero.
    """
    size = matrices.shape[-1]
    tiny = torch.finfo(matrices.dtype).tiny
    power = matrices / matrices.abs().amax((1, 2), keepdim=True).clamp(min=tiny)
    # Whatever the gap, the power 2^k leaves a shortfall of about n / (2 e 2^k) at most. Even powers are
    # positive semi-definite: their trace bounds their norm.
    squarings = math.log2(2 * size / (SLACK * torch.finfo(matrices.dtype).eps))
    for _ in range(math.ceil(squarings / 3)):
        power = torch.linalg.matrix_power(power, 8)
        power = power / _diagonal(power).sum(1)[:, None, None].clamp(min=tiny)
    # The basis vector nearest to the dominant eigenspace is the one with the largest entry on the diagonal.
    nearest = _diagonal(power).argmax(1)[:, None, None].expand(-1, size, 1)
    return normalize(power.gather(2, nearest), dim=1, eps=tiny)


def _diagonal(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=1, dim2=2)
