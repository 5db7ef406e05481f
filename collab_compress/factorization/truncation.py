"""Singular channels of heads, and components that are single channels: the best per-head truncation."""

import torch
from torch import Tensor

from collab_compress.factorization.factors import HeadTensor


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
