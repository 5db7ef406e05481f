"""What the measures have in common that give one number for each pair of heads."""

import torch
from torch import Tensor

from collab_compress.errors import HeadError


def mean_over_pairs(matrix: Tensor) -> float:
    """Average a symmetric matrix of heads against heads over the pairs i < j.

    Equation 6 of "Analyzing and Controlling Inter-Head Diversity in Multi-Head Attention".

    Args:
        matrix: (H, H).

    Raises:
        HeadError: the matrix is not square, or there is a single head, which has no pairs.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise HeadError(f"got {tuple(matrix.shape)}, expected a matrix (H, H) of heads against heads")
    heads = len(matrix)
    if heads < 2:
        raise HeadError("a single head has no pairs to average over; compare heads where there are several")
    rows, columns = torch.triu_indices(heads, heads, 1)
    return float(matrix[rows, columns].mean())
