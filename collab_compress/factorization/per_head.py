"""The best factors whose channels belong to one head each, in closed form."""

from __future__ import annotations

import torch

from collab_compress.factorization.factors import Factors
from collab_compress.factorization.head_tensor import HeadTensor, relative
from collab_compress.factorization.start import singular_values, truncation


def per_head(tensor: HeadTensor, rank: int) -> tuple[Factors, tuple[int, ...]]:
    r"""Share out R channels among the heads, none of them shared.

    The mixing matrix is one-hot, as in figure 2b of "Multi-Head Attention: Collaborate Instead of Concatenate"
    with heads of different sizes $r_i$, $\sum_i r_i = R$. For given sizes each $\hat T_i$ is the truncated
    singular value decomposition of $T_i$ (Eckart and Young), so the sizes with the lowest error are those of the R
    largest singular values over all heads: no iteration is needed.

    Args:
        tensor: the heads, weighted where inputs matter.
        rank: R, from 1 to H·d.

    Returns:
        Factors whose channels are sorted by head, and the sizes $r_i$; a size may be 0.
    """
    found = truncation(tensor, rank)
    order = found.mixing.argmax(0).argsort(stable=True)
    factors = Factors(found.query[:, order], found.mixing[:, order], found.key[:, order])
    sizes = torch.bincount(factors.mixing.argmax(0), minlength=tensor.heads)
    return factors, tuple(sizes.tolist())


def per_head_error(tensor: HeadTensor, rank: int) -> float:
    r"""Return $\|T - \hat T\|_F / \|T\|_F$ of `per_head` at this rank, from singular values alone."""
    squares = singular_values(tensor).flatten().square().sort(descending=True).values
    return relative(squares[rank:].sum().item(), squares.sum().item())
