"""Closed-form factors: exact concatenation, and the best per-head truncation."""

from __future__ import annotations

import torch
from torch import Tensor

from collab_compress.factorization.factors import Factors, HeadTensor


def concatenation(tensor: HeadTensor) -> Factors:
    """Return exact factors of rank H·d: the heads side by side, M blocks of ones.

    Section 3.1 of "Multi-Head Attention: Collaborate Instead of Concatenate": ordinary multi-head attention
    is the collaborative form with this mixing matrix.
    """
    eye = torch.eye(tensor.heads, dtype=tensor.query.dtype, device=tensor.query.device)
    mixing = eye.repeat_interleave(tensor.head_width, dim=1)
    return Factors(tensor.flat_query.clone(), mixing, tensor.flat_key.clone())


def truncation(tensor: HeadTensor, rank: int, equal: bool = False) -> Factors:
    """Return the R largest singular triplets over all heads, every component serving one head.

    The best approximation whose mixing matrix is one-hot: per-head truncated SVDs that share out the rank. Query and
    key factor take the root of the singular value each. Columns past the H·min(Dq, Dk, d) triplets are zero.
    """
    singular, values = singular_channels(tensor)
    chosen, mixing = one_hot(strongest(values, rank, equal), values, rank)
    return Factors(singular.flat_query @ chosen, mixing, singular.flat_key @ chosen)


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


def one_hot(channels: Tensor, values: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return coefficients (H·r, R) and mixing (H, R) of components that are one channel of one head each.

    Args:
        channels: flat indices of up to R channels.
        values: their singular values, (H, r), for shape and dtype.
        rank: R.
    """
    heads, width = values.shape
    place = torch.arange(len(channels), device=channels.device)
    coefficients, mixing = values.new_zeros(heads * width, rank), values.new_zeros(heads, rank)
    coefficients[channels, place] = 1.0
    mixing[channels.div(width, rounding_mode="floor"), place] = 1.0
    return coefficients, mixing


def singular_channels(tensor: HeadTensor) -> tuple[HeadTensor, Tensor]:
    r"""Return the same heads with singular vectors as channels, $Q_i = U_i S_i^{1/2}$ and $K_i = V_i S_i^{1/2}$.

    There are r = min(Dq, Dk, d) channels a head, with singular values (H, r), descending; from QR of both sides and
    the SVD of a d×d core.
    """
    query_basis, query_core = torch.linalg.qr(tensor.query)
    key_basis, key_core = torch.linalg.qr(tensor.key)
    left, values, right = torch.linalg.svd(query_core @ key_core.mT, full_matrices=False)
    root = values.sqrt()[:, None]
    return HeadTensor(query_basis @ (left * root), key_basis @ (right.mT * root)), values
