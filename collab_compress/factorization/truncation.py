"""Closed-form factors: exact concatenation, and the best per-head truncation."""

from __future__ import annotations

import torch
from torch import Tensor

from collab_compress.factorization.factors import Factors, HeadTensor, Solution, SolverOptions, relative


def concatenation(tensor: HeadTensor) -> Factors:
    """Return exact factors of rank H·d: the heads side by side, M blocks of ones.

    Section 3.1 of "Multi-Head Attention: Collaborate Instead of Concatenate": ordinary multi-head attention
    is the collaborative form with this mixing matrix.

    Returns:
        Factors with query (Dq, H·d), mixing (H, H·d) and key (Dk, H·d).
    """
    eye = torch.eye(tensor.heads, dtype=tensor.query.dtype, device=tensor.query.device)
    mixing = eye.repeat_interleave(tensor.head_width, dim=1)
    return Factors(tensor.flat_query.clone(), mixing, tensor.flat_key.clone())


def truncation(tensor: HeadTensor, rank: int, equal: bool = False) -> Factors:
    """Return the R largest singular triplets over all heads, every component serving one head.

    The best approximation whose mixing matrix is one-hot: per-head truncated SVDs that share out the rank.
    Columns are balanced: query and key factor take the root of the singular value each.

    Args:
        tensor: the heads.
        rank: R, at most H·min(Dq, Dk, d) triplets exist; further columns are zero.
        equal: as in `strongest`.

    Returns:
        Factors with query (Dq, R), mixing (H, R), key (Dk, R).
    """
    singular, values = singular_channels(tensor)
    order = strongest(values, rank, equal)
    kept = len(order)
    query, mixing, key = (
        tensor.query.new_zeros(size, rank) for size in (tensor.query.shape[1], tensor.heads, tensor.key.shape[1])
    )
    query[:, :kept] = singular.flat_query[:, order]
    mixing[order.div(singular.head_width, rounding_mode="floor"), torch.arange(kept, device=order.device)] = 1.0
    key[:, :kept] = singular.flat_key[:, order]
    return Factors(query, mixing, key)


def strongest(values: Tensor, count: int, equal: bool = False) -> Tensor:
    """Return the flat indices of the largest singular values over all heads, descending.

    Args:
        values: of each head, descending, (H, r).
        count: how many; all where there are no more.
        equal: as many for one head as for another, or one more for the first heads.
    """
    if equal:  # the i-th of every head before the (i + 1)-th of any
        places = torch.arange(values.shape[1], 0, -1, dtype=values.dtype, device=values.device)
        values = places.expand_as(values)
    return values.flatten().argsort(descending=True, stable=True)[:count]


def singular_channels(tensor: HeadTensor) -> tuple[HeadTensor, Tensor]:
    r"""Return the same heads with singular vectors as channels, $Q_i = U_i S_i^{1/2}$ and $K_i = V_i S_i^{1/2}$.

    From QR of both sides and a d×d core.

    Returns:
        Heads of r = min(Dq, Dk, d) channels, and their singular values, descending, (H, r).
    """
    query_basis, query_core = torch.linalg.qr(tensor.query)
    key_basis, key_core = torch.linalg.qr(tensor.key)
    left, values, right = torch.linalg.svd(query_core @ key_core.mT, full_matrices=False)
    root = values.sqrt()[:, None]
    return HeadTensor(query_basis @ (left * root), key_basis @ (right.mT * root)), values


def per_head(tensor: HeadTensor, rank: int, options: SolverOptions) -> Solution:
    r"""Share out R channels among the heads, none of them shared.

    The mixing matrix is one-hot, as in figure 2b of "Multi-Head Attention: Collaborate Instead of Concatenate"
    with heads of different sizes $r_i$, $\sum_i r_i = R$. For given sizes each $\hat T_i$ is the truncated
    singular value decomposition of $T_i$ (Eckart and Young), so the sizes with the lowest error are those of the R
    largest singular values over all heads: no iteration is needed.

    Args:
        tensor: the heads, weighted where inputs matter.
        rank: R, from 1 to H·d.
        options: whether heads are to be equally wide; else sizes are those of the lowest error.

    Returns:
        Factors whose channels are sorted by head, and the sizes $r_i$; a size may be 0.
    """
    factors = truncation(tensor, rank, options.equal)
    heads, order = factors.mixing.argmax(0).sort(stable=True)
    factors = Factors(factors.query[:, order], factors.mixing[:, order], factors.key[:, order])
    sizes = torch.bincount(heads, minlength=tensor.heads)
    return Solution(factors, (), converged=True, sizes=tuple(sizes.tolist()))


def per_head_error(tensor: HeadTensor, rank: int) -> float:
    r"""Return $\|T - \hat T\|_F / \|T\|_F$ of `per_head` at this rank, from singular values alone."""
    query_core, key_core = (torch.linalg.qr(side, mode="r").R for side in (tensor.query, tensor.key))
    values: Tensor = torch.linalg.svdvals(query_core @ key_core.mT)
    squares = values.flatten().square().sort(descending=True).values
    return relative(squares[rank:].sum().item(), squares.sum().item())
