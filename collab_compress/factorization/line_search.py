"""The exact line search: along a line the squared error is a polynomial of degree six, whose best point is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from collab_compress.factorization.iterate import Channels, Direction, Iterate

LONGEST_STEP = 100.0


@dataclass(frozen=True)
class Line:
    r"""The penalised squared error on the line $x + \alpha p$.

    $$\|T - \hat T(\alpha)\|_F^2 + \rho\,\big(\|\tilde W_Q\|^2 + \|M\|^2 + \|\tilde W_K\|^2\big)$$

    Args:
        point: x.
        direction: p.
        grams: per factor the matrices of $1, \alpha, \alpha^2$ in its Gram matrix along the line, (3, 3, R, R).
        squared: coefficients of $1$ to $\alpha^6$ of the squared error of heads whose squared norm is 1, (7,).
        penalty: of $1$ to $\alpha^6$ of the ridge's part, (7,).
        out: where the next point's values go; into new memory if None.
    """

    point: Iterate
    direction: Direction
    grams: Tensor
    squared: Tensor
    penalty: Tensor
    out: Tensor | None = None

    @classmethod
    def of(
        cls,
        channels: Channels,
        point: Iterate,
        direction: Direction,
        ridge: float,
        out: Tensor | None = None,
    ) -> Line:
        """Expand the polynomial; two R×R products per projection and none with the tensor."""
        rank = point.grams.shape[-1]
        grams = point.grams.new_empty(3, 3, rank, rank)
        grams[:, 0] = point.grams
        sides = (
            (point.query, direction.query, direction.projected_query),
            (point.mixing, direction.mixing, direction.mixing),
            (point.key, direction.key, direction.projected_key),
        )
        for gram, (factor, step, projected_step) in zip(grams, sides, strict=True):
            cross = factor.mT @ projected_step
            torch.add(cross, cross.mT, out=gram[1])
            torch.matmul(step.mT, projected_step, out=gram[2])
        query, mixing, key = grams
        products = grams.new_zeros(5, rank, rank)
        for power in range(3):
            products[power : power + 3].addcmul_(query[power : power + 1], mixing)
        squared = _diagonal_sums(products.flatten(1) @ key.flatten(1).mT)
        cross = channels.mixing_mttkrp(point.projected_query, direction.projected_key)
        inner = torch.stack(
            [
                channels.mixing_mttkrp(point.projected_query, point.projected_key),
                cross + channels.mixing_mttkrp(direction.projected_query, point.projected_key),
                channels.mixing_mttkrp(direction.projected_query, direction.projected_key),
            ]
        )
        heads = torch.stack([point.mixing, direction.mixing])
        squared[:4] -= 2 * _diagonal_sums(inner.flatten(1) @ heads.flatten(1).mT)
        squared[0] += 1.0
        penalty = torch.zeros_like(squared)
        penalty[:3] = ridge * grams.diagonal(dim1=2, dim2=3).sum((0, 2))
        return cls(point, direction, grams, squared, penalty, out)

    def at(self, step: float) -> Iterate:
        """Return the point at one step length, its Gram matrices taken from the expansion."""
        grams = torch.add(self.grams[:, 1], self.grams[:, 2], alpha=step)
        grams = torch.add(self.grams[:, 0], grams, alpha=step)
        return Iterate(self.point.plus(self.direction, step, self.out).values, self.point.heads, grams)


def _diagonal_sums(table: Tensor) -> Tensor:
    """Sum a table of coefficients over i + j = n: the product of two polynomials, in float64."""
    rows, columns = table.shape
    sums = table.new_zeros(rows + columns - 1, dtype=torch.float64)
    for j in range(columns):
        sums[j : j + rows] += table[:, j]
    return sums


def positive_minimiser(coefficients: Sequence[float]) -> float:
    r"""Return the $\alpha \in [0, 100]$ minimising $\sum_k c_k \alpha^k$ for k from 1.

    Args:
        coefficients: $c_1, c_2, \dots$
    """
    slope = [power * value for power, value in enumerate(coefficients, 1)]
    if not all(map(isfinite, slope)):
        return 0.0
    least = float(np.finfo(float).eps) * max(map(abs, slope))
    degree = max((power for power, value in enumerate(slope) if abs(value) > least), default=0)
    if degree == 0 or not all(isfinite(value / slope[degree]) for value in slope):
        return 0.0
    roots: list[complex] = np.roots(slope[degree::-1]).tolist()
    steps = [min(root.real, LONGEST_STEP) for root in roots if root.real > 0 and abs(root.imag) <= 1e-6 * abs(root)]
    reached = [(sum(c * step**power for power, c in enumerate(coefficients, 1)), step) for step in steps]
    value, step = min(reached, default=(0.0, 0.0))
    return step if value < 0 else 0.0
