"""Exact line search: along a line the squared error is a polynomial of degree six."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .head_tensor import HeadTensor
from .iterate import Direction, Iterate

LONGEST_STEP = 100.0


@dataclass(frozen=True)
class Line:
    r"""The penalised squared error on the line $x + \alpha p$.

    $$\|T - \hat T(\alpha)\|_F^2 + \rho\,\big(\|\tilde W_Q\|^2 + \|M\|^2 + \|\tilde W_K\|^2\big)$$

    as six coefficients, with the constant left out so that small changes keep their digits.

    Args:
        point: x.
        direction: p.
        grams: per factor the matrices of $1, \alpha, \alpha^2$ in its Gram matrix along the line.
        coefficients: of $\alpha$ to $\alpha^6$, (6,).
    """

    point: Iterate
    direction: Direction
    grams: tuple[list[Tensor], list[Tensor], list[Tensor]]
    coefficients: Tensor

    @classmethod
    def of(cls, tensor: HeadTensor, point: Iterate, direction: Direction, ridge: float) -> Line:
        """Expand the polynomial; two R×R products per projection and none with the tensor."""
        grams = (
            _grams(point.query_gram, point.query, direction.query),
            _grams(point.mixing_gram, point.mixing, direction.mixing),
            _grams(point.key_gram, point.key, direction.key),
        )
        terms: list[list[Tensor]] = [[] for _ in range(7)]
        pairs = _products(grams[0], grams[1])
        for i, pair in enumerate(pairs):
            for j, gram in enumerate(grams[2]):
                terms[i + j].append((pair * gram).sum())
        for i, products in enumerate(_projected(tensor, point, direction)):
            for j, mixing in enumerate((point.mixing, direction.mixing)):
                terms[i + j].append(-2 * (products * mixing).sum())
        for i in range(3):
            terms[i].extend(ridge * factor[i].trace() for factor in grams)
        coefficients = torch.stack([torch.stack(parts).sum() for parts in terms[1:]]).cpu()
        return cls(point, direction, grams, coefficients)

    def at(self, step: float) -> Iterate:
        """Return the point at one step length, its Gram matrices taken from the expansion."""
        moved = self.point.plus(self.direction, step)
        grams = [torch.add(torch.add(g[0], g[1], alpha=step), g[2], alpha=step**2) for g in self.grams]
        return Iterate(
            moved.query, moved.mixing, moved.key, moved.projected_query, moved.projected_key, *grams
        )

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
    roots = torch.linalg.eigvals(companion)
    steps = roots.real[(roots.imag.abs() <= 1e-6 * roots.abs()) & (roots.real > 0)].clamp_max(LONGEST_STEP)
    if not len(steps):
        return 0.0
    values = (steps[:, None] ** powers) @ coefficients
    return float(steps[values.argmin()]) if bool(values.min() < 0) else 0.0


def _grams(gram: Tensor, point: Tensor, direction: Tensor) -> list[Tensor]:
    cross = point.mT @ direction
    return [gram, cross + cross.mT, direction.mT @ direction]


def _products(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    """Coefficients of the Hadamard product of two matrix polynomials of degree two."""
    return [
        torch.stack([first[i] * second[n - i] for i in range(3) if 0 <= n - i < 3]).sum(0)
        for n in range(5)
    ]


def _projected(tensor: HeadTensor, point: Iterate, direction: Direction) -> list[Tensor]:
    """Coefficients of the head mode's MTTKRP along the line, three of (H, R)."""
    return [
        tensor.mixing_mttkrp(point.projected_query, point.projected_key),
        tensor.mixing_mttkrp(point.projected_query, direction.projected_key)
        + tensor.mixing_mttkrp(direction.projected_query, point.projected_key),
        tensor.mixing_mttkrp(direction.projected_query, direction.projected_key),
    ]
