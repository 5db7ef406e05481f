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
    left, values, right = _slice_svd(tensor)
    kept = min(rank, values.numel())
    weight = values
    if equal:  # those that are i-th in their head come before those that are i+1-th
        places = torch.arange(values.shape[1], 0, -1, dtype=values.dtype, device=values.device)
        weight = places.expand_as(values)
    order = weight.flatten().argsort(descending=True, stable=True)[:kept]
    head = order.div(values.shape[1], rounding_mode="floor")
    root = values.flatten()[order].sqrt()
    factors = [tensor.query.new_zeros(rows, rank) for rows in (left.shape[1], tensor.heads, right.shape[1])]
    factors[0][:, :kept] = left.transpose(1, 2).flatten(0, 1)[order].mT * root
    factors[1][head, torch.arange(kept, device=head.device)] = 1.0
    factors[2][:, :kept] = right.transpose(1, 2).flatten(0, 1)[order].mT * root
    return Factors(factors[0], factors[1], factors[2])


def singular_values(tensor: HeadTensor) -> Tensor:
    """Return the singular values of every T_i, descending, (H, r)."""
    query_core, key_core = (torch.linalg.qr(side, mode="r").R for side in (tensor.query, tensor.key))
    values: Tensor = torch.linalg.svdvals(query_core @ key_core.mT)
    return values


def _slice_svd(tensor: HeadTensor) -> tuple[Tensor, Tensor, Tensor]:
    """SVD of every T_i from QR of both sides and a d×d core: (H, Dq, r), (H, r), (H, Dk, r)."""
    query_basis, query_core = torch.linalg.qr(tensor.query)
    key_basis, key_core = torch.linalg.qr(tensor.key)
    left, values, right = torch.linalg.svd(query_core @ key_core.mT, full_matrices=False)
    return query_basis @ left, values, key_basis @ right.mT


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
