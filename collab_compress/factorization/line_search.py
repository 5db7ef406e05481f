"""Exact line search: along a line the squared error is a polynomial of degree six."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from collab_compress.factorization.head_tensor import HeadTensor
from collab_compress.factorization.iterate import Direction, Iterate

LONGEST_STEP = 100.0


@dataclass(frozen=True)
class Line:
    r"""The penalised squared error on the line $x + \alpha p$.

    $$\|T - \hat T(\alpha)\|_F^2 + \rho\,\big(\|\tilde W_Q\|^2 + \|M\|^2 + \|\tilde W_K\|^2\big)$$

    as six coefficients, with the constant left out so that small changes keep their digits.

    Args:
        point: x.
        direction: p.
        grams: per factor the matrices of $1, \alpha, \alpha^2$ in its Gram matrix along the line, (3, R, R).
        coefficients: of $\alpha$ to $\alpha^6$, (6,).
    """

    point: Iterate
    direction: Direction
    grams: tuple[Tensor, Tensor, Tensor]
    coefficients: Tensor

    @classmethod
    def of(cls, tensor: HeadTensor, point: Iterate, direction: Direction, ridge: float) -> Line:
        """Expand the polynomial; two R×R products per projection and none with the tensor."""
        grams = (
            _grams(point.query_gram, point.query, direction.query),
            _grams(point.mixing_gram, point.mixing, direction.mixing),
            _grams(point.key_gram, point.key, direction.key),
        )
        values = _diagonal_sums(_products(grams[0], grams[1]).flatten(1) @ grams[2].flatten(1).mT)
        mixing = torch.stack([point.mixing, direction.mixing])
        inner = _projected(tensor, point, direction).flatten(1) @ mixing.flatten(1).mT
        values[:4] -= 2 * _diagonal_sums(inner)
        values[:3] += ridge * sum(gram.diagonal(dim1=1, dim2=2).sum(1) for gram in grams)
        coefficients = values[1:].cpu()
        return cls(point, direction, grams, coefficients)

    def at(self, step: float) -> Iterate:
        """Return the point at one step length, its Gram matrices taken from the expansion."""
        moved = self.point.plus(self.direction, step)
        grams = [torch.add(torch.add(g[0], g[1], alpha=step), g[2], alpha=step**2) for g in self.grams]
        return Iterate(moved.query, moved.mixing, moved.key, moved.projected_query, moved.projected_key, *grams)

    def minimiser(self) -> float:
        """Return the best step length, at most 100, or 0 where no step forward lowers the value."""
        return positive_minimiser(self.coefficients)


def positive_minimiser(coefficients: Tensor) -> float:
    r"""Return the $\alpha \in [0, 100]$ minimising $\sum_k c_k \alpha^k$ for k from 1.

    Args:
        coefficients: $c_1, c_2, \dots$, (n,), in float64 on the CPU.
    """
    powers = torch.arange(1, len(coefficients) + 1, dtype=coefficients.dtype)
    slope = coefficients * powers
    used = (slope.abs() > torch.finfo(slope.dtype).eps * slope.abs().max()).nonzero()
    degree = int(used.max()) if len(used) else 0
    if degree == 0 or not bool(torch.isfinite(slope).all()):
        return 0.0
    companion = torch.zeros(degree, degree, dtype=slope.dtype)
    companion[1:, :-1] = torch.eye(degree - 1, dtype=slope.dtype)
    companion[:, -1] = -slope[:degree] / slope[degree]
    if not bool(torch.isfinite(companion).all()):
        return 0.0
    roots = torch.linalg.eigvals(companion)
    steps = roots.real[(roots.imag.abs() <= 1e-6 * roots.abs()) & (roots.real > 0)].clamp_max(LONGEST_STEP)
    if not len(steps):
        return 0.0
    values = (steps[:, None] ** powers) @ coefficients
    return float(steps[values.argmin()]) if bool(values.min() < 0) else 0.0


def _grams(gram: Tensor, point: Tensor, direction: Tensor) -> Tensor:
    cross = point.mT @ direction
    return torch.stack([gram, cross + cross.mT, direction.mT @ direction])


def _products(first: Tensor, second: Tensor) -> Tensor:
    """Coefficients of the Hadamard product of two matrix polynomials of degree two, (5, R, R)."""
    products = first.new_zeros(5, *first.shape[1:])
    for i in range(3):
        products[i : i + 3].addcmul_(first[i], second)
    return products


def _projected(tensor: HeadTensor, point: Iterate, direction: Direction) -> Tensor:
    """Coefficients of the head mode's MTTKRP along the line, (3, H, R)."""
    cross = tensor.mixing_mttkrp(point.projected_query, direction.projected_key)
    return torch.stack([
        tensor.mixing_mttkrp(point.projected_query, point.projected_key),
        cross + tensor.mixing_mttkrp(direction.projected_query, point.projected_key),
        tensor.mixing_mttkrp(direction.projected_query, direction.projected_key),
    ])  # fmt: skip


def _diagonal_sums(table: Tensor) -> Tensor:
    """Sum a table of coefficients over i + j = n: the product of two polynomials, (rows + columns - 1,)."""
    rows, columns = table.shape
    sums = table.new_zeros(rows + columns - 1)
    for j in range(columns):
        sums[j : j + rows] += table[:, j]
    return sums
