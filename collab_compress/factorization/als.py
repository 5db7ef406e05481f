"""Alternating least squares on the factored tensor, with an exact line search and a fading ridge.

Along a line the squared error is a polynomial of degree six, whose best positive point is found exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from collab_compress.factorization.factors import Factors, Solution, SolverOptions
from collab_compress.factorization.head_tensor import HeadTensor, relative
from collab_compress.factorization.truncation import truncation

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


SHIFT = 16.0


@dataclass(frozen=True)
class Direction:
    """Three factors, or a step in them, with both projections onto the heads.

    The projections are linear in the factors, so sums of directions need no product with the tensor.

    Args:
        query: (Dq, R).
        mixing: (H, R).
        key: (Dk, R).
        projected_query: (H, d, R).
        projected_key: (H, d, R).
    """

    query: Tensor
    mixing: Tensor
    key: Tensor
    projected_query: Tensor
    projected_key: Tensor

    def plus(self, other: Direction, scale: float) -> Direction:
        """Return this plus a multiple of another direction."""
        return Direction(
            torch.add(self.query, other.query, alpha=scale),
            torch.add(self.mixing, other.mixing, alpha=scale),
            torch.add(self.key, other.key, alpha=scale),
            torch.add(self.projected_query, other.projected_query, alpha=scale),
            torch.add(self.projected_key, other.projected_key, alpha=scale),
        )

    def dot(self, other: Direction) -> Tensor:
        """Return the sum of the three factors' inner products, a scalar."""
        return (self.query * other.query).sum() + (self.mixing * other.mixing).sum() + (self.key * other.key).sum()


@dataclass(frozen=True)
class Iterate(Direction):
    """A point with its three R×R Gram matrices.

    Args:
        query_gram: of the query factor.
        mixing_gram: of the mixing matrix.
        key_gram: of the key factor.
    """

    query_gram: Tensor
    mixing_gram: Tensor
    key_gram: Tensor

    @classmethod
    def of(cls, tensor: HeadTensor, factors: Factors) -> Iterate:
        """Compute projections and Gram matrices of factors."""
        query, mixing, key = factors.query, factors.mixing, factors.key
        return cls(
            query, mixing, key, tensor.project_query(query), tensor.project_key(key),
            query.mT @ query, mixing.mT @ mixing, key.mT @ key,
        )  # fmt: skip

    def relative_error(self, tensor: HeadTensor, norm: float) -> float:
        """Return the relative error; it falls out of the products at no product with the tensor.

        Args:
            tensor: the heads.
            norm: their squared norm.
        """
        inner = (tensor.mixing_mttkrp(self.projected_query, self.projected_key) * self.mixing).sum()
        squared = (self.query_gram * self.mixing_gram * self.key_gram).sum()
        return relative((norm - 2 * inner + squared).item(), norm)

    def swept(self, tensor: HeadTensor, ridge: float, shift: float = SHIFT) -> Iterate:
        """Return the point after least squares for mixing, query, mixing again, and key.

        The mixing matrix costs next to nothing, and solving it before either projection saves about a
        third of the sweeps.

        Args:
            tensor: the heads.
            ridge: weight of the factors' squared norms beside the squared error.
            shift: as in `least_squares`; NaNs in the point say that a system was singular even so.
        """
        point = self._with_mixing(tensor, ridge, shift)
        right = tensor.query_mttkrp(point.mixing, point.projected_key)
        query = least_squares(point.key_gram * point.mixing_gram, right, ridge, shift)
        point = replace(
            point, query=query, query_gram=query.mT @ query, projected_query=tensor.project_query(query)
        )._with_mixing(tensor, ridge, shift)
        right = tensor.key_mttkrp(point.mixing, point.projected_query)
        key = least_squares(point.query_gram * point.mixing_gram, right, ridge, shift)
        return replace(point, key=key, key_gram=key.mT @ key, projected_key=tensor.project_key(key))._balanced()

    def _with_mixing(self, tensor: HeadTensor, ridge: float, shift: float) -> Iterate:
        right = tensor.mixing_mttkrp(self.projected_query, self.projected_key)
        mixing = least_squares(self.query_gram * self.key_gram, right, ridge, shift)
        return replace(self, mixing=mixing, mixing_gram=mixing.mT @ mixing)

    def _balanced(self) -> Iterate:
        """Give a component's three columns one length, the gauge in which the ridge is smallest."""
        lengths = [gram.diagonal().sqrt() for gram in (self.query_gram, self.mixing_gram, self.key_gram)]
        common = (lengths[0] * lengths[1] * lengths[2]).pow(1 / 3)
        tiny = torch.finfo(common.dtype).tiny
        query, mixing, key = (common / length.clamp_min(tiny) for length in lengths)
        return Iterate(
            self.query * query, self.mixing * mixing, self.key * key,
            self.projected_query * query, self.projected_key * key,
            self.query_gram * torch.outer(query, query),
            self.mixing_gram * torch.outer(mixing, mixing),
            self.key_gram * torch.outer(key, key),
        )  # fmt: skip


def least_squares(gram: Tensor, right: Tensor, ridge: float, shift: float = SHIFT) -> Tensor:
    """Return X minimising the quadratic whose normal equations are X (gram + ridge·I) = right.

    Args:
        gram: positive semidefinite, possibly singular, (R, R).
        right: (n, R).
        ridge: added to the diagonal.
        shift: added to the diagonal once it is scaled to 1, in units of R times the rounding of one number.

    Returns:
        (n, R); all NaN where the system has no Cholesky factorization even so, which needs no wait for a device.
    """
    system = gram.clone()
    diagonal = system.diagonal()
    diagonal.add_(ridge)
    # With a unit diagonal, rounding of every size of component is covered by one small shift.
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    system *= torch.outer(scale, scale)
    system.diagonal().add_(shift * torch.finfo(gram.dtype).eps * len(gram))
    root, info = torch.linalg.cholesky_ex(system)
    found = torch.cholesky_solve((right * scale).mT, root).mT * scale
    return torch.where(info == 0, found, torch.nan)


SWEEPS = 200
TOLERANCE = 1e-6
# Below this the error is rounding: the squares it is the difference of cancel.
EXACT = 1e-7
# Sweeps over which progress is averaged before it counts as stalled.
WINDOW = 10
# A sweep that moves the point by less, relative to its length, has reached a fixed point: the difference of
# two points is mostly rounding from here on, and directions built on it would amplify that.
FIXED = 1e-10
# Most weight of the last direction in the next one, against the same amplification.
LARGEST_TURN = 2.0
# What is added to the diagonal of a sweep's systems, by turns, until all of them can be solved; the last is about
# 1e-6 R, next to a diagonal of 1.
SHIFTS = (SHIFT, 1e3 * SHIFT, 1e6 * SHIFT, 1e9 * SHIFT)


@dataclass(frozen=True)
class Continuation:
    r"""A ridge on the factors that fades while the solver runs.

    Plain least squares drifts into swamps: components that nearly cancel, whose rank is wasted and which take
    thousands of sweeps to part. A ridge makes cancelling expensive; faded out, it leaves the solver
    in a better basin. On the weighted layers of MiniLM 200 sweeps with it end lower than 3000 without.

    Args:
        start: the first ridge, in units of $\lambda^{4/3}$ with $\lambda$ the smallest singular value kept by the
            start. From about 0.3 a ridge kills components for good.
        end: ratio of the last ridge to the first.
        share: part of the sweeps that have a ridge.
    """

    start: float = 0.1
    end: float = 1e-2
    share: float = 0.8

    def ridge(self, sweep: int, sweeps: int) -> float:
        """Return the ridge of one sweep, counted from 0, in the same units."""
        fading = self.share * sweeps
        return self.start * self.end ** (sweep / fading) if sweep + 1 < fading else 0.0


def als(tensor: HeadTensor, rank: int, options: SolverOptions) -> Solution:
    r"""Fit factors by alternating least squares from the best per-head truncation.

    A sweep's step, $p = \mathrm{ALS}(x) - x$, serves as the preconditioned gradient of a nonlinear conjugate
    gradient method (Polak-Ribière, restarted when it turns negative), and the length of each step is
    the exact minimiser of the squared error on the line. Deterministic; never worse than its start.

    Args:
        tensor: the heads, in float64: the error is a difference of squares that cancel.
        rank: R, below H·d.
        options: sweeps (200 unless said) and the tolerance, by default 1e-6, that the relative error must fall by
            per sweep, averaged over ten.

    Returns:
        The best factors met, and the lowest error so far after every sweep.

    Raises:
        ValueError: the squares of the heads are beyond what float64 holds.
    """
    norm = tensor.squared_norm().item()
    if not isfinite(norm):
        raise ValueError("the heads' squared norm overflows float64: their values, or the damping, are too large")
    if norm == 0.0:
        return Solution(truncation(tensor, rank), (), converged=True)
    scaled = HeadTensor(tensor.query / norm**0.25, tensor.key / norm**0.25)
    run = _Run(scaled, rank, options)
    run.descend()
    best = run.best
    factors = Factors(best.query * norm**0.25, best.mixing, best.key * norm**0.25)
    return Solution(factors, tuple(run.errors), run.converged, run.breakdowns)


class _Run:
    """One descent on a tensor of norm 1."""

    def __init__(self, tensor: HeadTensor, rank: int, options: SolverOptions) -> None:
        self.tensor = tensor
        self.norm = tensor.squared_norm().item()
        self.sweeps = SWEEPS if options.sweeps is None else options.sweeps
        self.tolerance = TOLERANCE if options.tolerance is None else options.tolerance
        self.progress = options.progress
        start = truncation(tensor, rank)
        # Columns of the start carry the root of their singular value.
        self.unit = float(start.query.norm(dim=0).min()) ** (8 / 3)
        self.point = Iterate.of(tensor, start)
        self.best: Direction = self.point
        self.lowest = self.point.relative_error(tensor, self.norm)
        self.errors: list[float] = []
        self.converged = self.lowest < EXACT
        self.breakdowns = 0

    def descend(self) -> None:
        """Sweep until the error is rounding, progress stalls without a ridge, or no sweep is left or possible."""
        step: Direction | None = None
        direction: Direction | None = None
        recent: list[float] = []
        fading = Continuation()
        faded = False
        for sweep in range(self.sweeps):
            if self.converged:
                break
            ridge = 0.0 if faded else self.unit * fading.ridge(sweep, self.sweeps)
            swept = self._swept(ridge)
            if swept is None:
                break
            step, direction = self._advance(swept, ridge, step, direction)
            recent.append(self._record())
            stalled = direction is None or (
                len(recent) > WINDOW and abs(recent[-1 - WINDOW] - recent[-1]) < WINDOW * self.tolerance
            )
            self.converged = self.lowest < EXACT or (stalled and ridge == 0.0)
            if stalled and not faded:
                faded, recent, step = True, [], None

    def _swept(self, ridge: float) -> Iterate | None:
        """Sweep once, with as large a shift as it takes; None where none helps."""
        for shift in SHIFTS:
            swept = self.point.swept(self.tensor, ridge, shift)
            if isfinite(swept.dot(swept).item()):
                return swept
            self.breakdowns += shift == SHIFT
        return None

    def _advance(
        self, swept: Iterate, ridge: float, last_step: Direction | None, last_direction: Direction | None
    ) -> tuple[Direction, Direction | None]:
        """Move the point; return the sweep's step and the direction taken, None at a fixed point."""
        step = swept.plus(self.point, -1.0)
        if not step.dot(step).item() > FIXED**2 * swept.dot(swept).item():
            self.point = swept
            return step, None
        direction = step
        if last_step is not None and last_direction is not None:
            turn = step.dot(step) - step.dot(last_step)
            beta = (turn / last_step.dot(last_step)).item()
            direction = step.plus(last_direction, min(beta, LARGEST_TURN)) if beta > 0.0 else step
        line = Line.of(self.tensor, self.point, direction, ridge)
        length = line.minimiser()
        self.point = swept if length == 0.0 else line.at(length)
        return step, step if length == 0.0 else direction

    def _record(self) -> float:
        error = self.point.relative_error(self.tensor, self.norm)
        if error < self.lowest:
            self.best, self.lowest = self.point, error
        self.errors.append(self.lowest)
        if self.progress is not None:
            self.progress(len(self.errors), self.lowest)
        return error
