"""Closed-form factors: exact concatenation, and the best per-head truncation to start from."""

from __future__ import annotations

import torch
from torch import Tensor

from collab_compress.factorization.factors import Factors, Solution, SolverOptions
from collab_compress.factorization.head_tensor import HeadTensor, relative


def concatenation(tensor: HeadTensor) -> Factors:
    """Return exact factors of rank H·d: the heads side by side, M blocks of ones.

    Section 3.1 of "Multi-Head Attention: Collaborate Instead of Concatenate": ordinary multi-head attention
    is the collaborative form with this mixing matrix.

    Args:
        tensor: the heads.

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
        equal: as many triplets for one head as for another, or one more for the first heads.

    Returns:
        Factors with query (Dq, R), mixing (H, R), key (Dk, R).
    """
    own, values = singular_channels(tensor)
    order = strongest(values, rank, equal)
    kept = len(order)
    factors = [tensor.query.new_zeros(rows, rank) for rows in (own.query.shape[1], own.heads, own.key.shape[1])]
    factors[0][:, :kept] = own.flat_query[:, order]
    factors[1][order.div(own.head_width, rounding_mode="floor"), torch.arange(kept, device=order.device)] = 1.0
    factors[2][:, :kept] = own.flat_key[:, order]
    return Factors(factors[0], factors[1], factors[2])


def strongest(values: Tensor, count: int, equal: bool = False) -> Tensor:
    """Return the places of the largest singular values over all heads, descending, heads side by side.

    Args:
        values: of each head, descending, (H, r).
        count: how many; all where there are no more.
        equal: as many for one head as for another, or one more for the first heads.
    """
    weight = values
    if equal:  # those that are i-th in their head come before those that are i+1-th
        places = torch.arange(values.shape[1], 0, -1, dtype=values.dtype, device=values.device)
        weight = places.expand_as(values)
    return weight.flatten().argsort(descending=True, stable=True)[:count]


def singular_values(tensor: HeadTensor) -> Tensor:
    """Return the singular values of every T_i, descending, (H, r)."""
    query_core, key_core = (torch.linalg.qr(side, mode="r").R for side in (tensor.query, tensor.key))
    values: Tensor = torch.linalg.svdvals(query_core @ key_core.mT)
    return values


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


def per_head(tensor: HeadTensor, rank: int, options: SolverOptions | None = None) -> Solution:
    r"""Share out R channels among the heads, none of them shared.

    The mixing matrix is one-hot, as in figure 2b of "Multi-Head Attention: Collaborate Instead of Concatenate"
    with heads of different sizes $r_i$, $\sum_i r_i = R$. For given sizes each $\hat T_i$ is the truncated
    singular value decomposition of $T_i$ (Eckart and Young), so the sizes with the lowest error are those of the R
    largest singular values over all heads: no iteration is needed.

    Args:
        tensor: the heads, weighted where inputs matter.
        rank: R, from 1 to H·d.
        options: whether heads are to be equally wide; else they are as wide as pays.

    Returns:
        Factors whose channels are sorted by head, and the sizes $r_i$; a size may be 0.
    """
    found = truncation(tensor, rank, options is not None and options.equal)
    order = found.mixing.argmax(0).argsort(stable=True)
    factors = Factors(found.query[:, order], found.mixing[:, order], found.key[:, order])
    sizes = torch.bincount(factors.mixing.argmax(0), minlength=tensor.heads)
    return Solution(factors, (), converged=True, sizes=tuple(sizes.tolist()))


def per_head_error(tensor: HeadTensor, rank: int) -> float:
    r"""Return $\|T - \hat T\|_F / \|T\|_F$ of `per_head` at this rank, from singular values alone."""
    squares = singular_values(tensor).flatten().square().sort(descending=True).values
    return relative(squares[rank:].sum().item(), squares.sum().item())
