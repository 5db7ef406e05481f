r"""Alternating least squares on the factored tensor, with an exact line search and a fading ridge.

Least squares for a projection always give a combination of the heads' own channels, $\tilde W_Q = F_Q Z_Q$ with
$F_Q = [Q_1 \dots Q_H]$. So the solver holds coefficients $Z$ and their products with the channels' Gram matrix,
$P_Q = F_Q^\top \tilde W_Q = (F_Q^\top F_Q) Z_Q$: one product with the tensor for each projection and sweep. Along a
line the squared error is a polynomial of degree six, whose best positive point is found exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from collab_compress.factorization.factors import Factors, Solution, SolverOptions
from collab_compress.factorization.head_tensor import HeadTensor
from collab_compress.factorization.truncation import singular_channels, strongest, truncation

LONGEST_STEP = 100.0
SHIFT = 16.0
# Of an entry of a Gram matrix whose products are made in that dtype: in float32 errors of 1e-7 average out.
ROUNDING = {torch.float32: 1e-9, torch.float64: torch.finfo(torch.float64).eps}


class Channels:
    r"""The channels of all heads side by side, as the solver uses them.

    Args:
        query: $F_Q$, (Dq, n) with n = H·r.
        key: $F_K$, (Dk, n).
        heads: H.
    """

    def __init__(self, query: Tensor, key: Tensor, heads: int) -> None:
        self.query, self.key, self.heads, self.dtype = query, key, heads, query.dtype
        self.grams: tuple[Tensor, Tensor] | None = None
        # Where heads are many and inputs narrow, the Gram matrices would be the larger ones.
        if query.shape[1] <= 2 * min(len(query), len(key)):
            self.grams = query.mT @ query, key.mT @ key

    @classmethod
    def of(cls, tensor: HeadTensor) -> Channels:
        """Give the channels of heads, as they are."""
        return cls(tensor.flat_query, tensor.flat_key, tensor.heads)

    def to(self, dtype: torch.dtype) -> Channels:
        """Return them in another dtype."""
        return Channels(self.query.to(dtype), self.key.to(dtype), self.heads)

    def project_query(self, coefficients: Tensor) -> Tensor:
        r"""Return $F_Q^\top F_Q Z$, (n, R), from Z (n, R)."""
        return self.query.mT @ (self.query @ coefficients) if self.grams is None else self.grams[0] @ coefficients

    def project_key(self, coefficients: Tensor) -> Tensor:
        r"""Return $F_K^\top F_K Z$, (n, R), from Z (n, R)."""
        return self.key.mT @ (self.key @ coefficients) if self.grams is None else self.grams[1] @ coefficients

    def by_head(self, projected: Tensor) -> Tensor:
        """Give rows (n, R) as (H, r, R)."""
        return projected.view(self.heads, -1, projected.shape[1])

    def mttkrp(self, mixing: Tensor, projected: Tensor) -> Tensor:
        r"""Matricised tensor times Khatri-Rao product for one side, as coefficients: $P$ with $m_i$ on head i's rows.

        $$\sum_i T_i \tilde W_K \mathrm{diag}(m_i) = F_Q\; \mathrm{stack}_i\big((K_i^\top \tilde W_K) \odot m_i\big)$$

        Args:
            mixing: M, (H, R).
            projected: of the other side, (n, R).

        Returns:
            (n, R).
        """
        return (self.by_head(projected) * mixing[:, None]).flatten(0, 1)

    def mixing_mttkrp(self, projected_query: Tensor, projected_key: Tensor) -> Tensor:
        r"""The same product for the head mode, $n_{ir} = \tilde w_{Q,r}^\top T_i \tilde w_{K,r}$, (H, R)."""
        return self.by_head(projected_query * projected_key).sum(1)


class Direction:
    """Three factors, or a step in them, with both projections onto the heads, in one block of numbers.

    Everything is linear in the factors, so sums of directions need no product with the tensor.

    Args:
        values: Z of queries, Z of keys, M, projected queries, projected keys, M: (4n + 2H, R). The first half times
            the second is the factors' inner product.
        heads: H.
    """

    def __init__(self, values: Tensor, heads: int) -> None:
        self.values, self.heads = values, heads
        channels = len(values) // 4 - heads // 2
        sizes = (channels, channels, heads, channels, channels, heads)
        self.parts = values.split(sizes)
        self.query, self.key, self.mixing, self.projected_query, self.projected_key, _ = self.parts

    @classmethod
    def of(cls, channels: Channels, query: Tensor, mixing: Tensor, key: Tensor) -> Direction:
        """Compute the projections of coefficients (n, R), (H, R), (n, R)."""
        projected = channels.project_query(query), channels.project_key(key)
        return cls(torch.cat([query, key, mixing, *projected, mixing]), channels.heads)

    def seen_by(self, channels: Channels) -> Direction:
        """Return the same factors with projections by these channels, in their dtype."""
        query, mixing, key = (part.to(channels.dtype) for part in (self.query, self.mixing, self.key))
        return Direction.of(channels, query, mixing, key)

    def plus(self, other: Direction, scale: float | Tensor) -> Direction:
        """Return this plus a multiple of another direction."""
        if isinstance(scale, Tensor):
            return Direction(torch.addcmul(self.values, other.values, scale), self.heads)
        return Direction(torch.add(self.values, other.values, alpha=scale), self.heads)

    def dot(self, other: Direction) -> Tensor:
        """Return the sum of the three factors' inner products, a scalar."""
        half = len(self.values) // 2
        return torch.dot(self.values[:half].flatten(), other.values[half:].flatten())


class Iterate(Direction):
    """A point with its three R×R Gram matrices.

    Args:
        values: as for `Direction`.
        heads: H.
        grams: of query factor, mixing matrix and key factor, (3, R, R).
    """

    def __init__(self, values: Tensor, heads: int, grams: Tensor) -> None:
        super().__init__(values, heads)
        self.grams = grams

    @classmethod
    def at(cls, point: Direction) -> Iterate:
        """Compute the Gram matrices of a point."""
        pairs = ((point.query, point.projected_query), (point.mixing,) * 2, (point.key, point.projected_key))
        return cls(point.values, point.heads, torch.stack([left.mT @ right for left, right in pairs]))

    def relative_error(self, channels: Channels) -> float:
        """Return the error of heads whose squared norm is 1."""
        inner = (channels.mixing_mttkrp(self.projected_query, self.projected_key) * self.mixing).sum()
        squared = self.grams.prod(0).sum()
        return float((1 - 2 * inner + squared).clamp_min(0).sqrt())

    def swept(self, channels: Channels, ridge: float, shift: float = SHIFT) -> Direction:
        """Return the point after least squares for mixing, query, mixing again, and key.

        The mixing matrix costs next to nothing, and solving it before either projection saves about a
        third of the sweeps.

        Args:
            channels: of the heads.
            ridge: weight of the factors' squared norms beside the squared error.
            shift: as in `least_squares`; NaNs in the point say that a system was singular even so.
        """
        query_gram, _, key_gram = self.grams
        projected_query, projected_key = self.projected_query, self.projected_key
        right = channels.mixing_mttkrp(projected_query, projected_key)
        mixing = least_squares(query_gram * key_gram, right, ridge, shift)
        right = channels.mttkrp(mixing, projected_key)
        query = least_squares(key_gram * (mixing.mT @ mixing), right, ridge, shift)
        projected_query = channels.project_query(query)
        query_gram = query.mT @ projected_query
        right = channels.mixing_mttkrp(projected_query, projected_key)
        mixing = least_squares(query_gram * key_gram, right, ridge, shift)
        right = channels.mttkrp(mixing, projected_query)
        key = least_squares(query_gram * (mixing.mT @ mixing), right, ridge, shift)
        projected_key = channels.project_key(key)
        # A component's three columns get one length, the gauge in which the ridge is smallest.
        squares = query_gram.diagonal(), (key * projected_key).sum(0).clamp_min(0), mixing.square().sum(0)
        lengths = torch.stack(squares).sqrt()
        scales = lengths.prod(0).pow(1 / 3) / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
        balanced = Direction(torch.empty_like(self.values), self.heads)
        found = (query, key, mixing, projected_query, projected_key, mixing)
        for part, values, scale in zip(balanced.parts, found, (*scales, *scales), strict=True):
            torch.mul(values, scale, out=part)
        return balanced


def least_squares(gram: Tensor, right: Tensor, ridge: float, shift: float = SHIFT) -> Tensor:
    """Return X minimising the quadratic whose normal equations are X (gram + ridge·I) = right; solved in float64.

    Args:
        gram: positive semidefinite, possibly singular, (R, R).
        right: (n, R).
        ridge: added to the diagonal.
        shift: added to the diagonal once it is scaled to 1, in units of R times the rounding of one number.

    Returns:
        (n, R); all NaN where the system has no Cholesky factorization even so, which needs no wait for a device.
    """
    system = gram.to(torch.float64, copy=True)
    diagonal = system.diagonal()
    diagonal.add_(ridge)
    # With a unit diagonal, rounding of every size of component is covered by one small shift.
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    system *= torch.outer(scale, scale)
    system.diagonal().add_(shift * ROUNDING[gram.dtype] * len(gram))
    root, info = torch.linalg.cholesky_ex(system)
    scale = torch.where(info == 0, scale, torch.nan)
    if len(right) < len(gram):
        return (torch.cholesky_solve((right * scale).mT, root).mT * scale).to(right.dtype)
    # Of many right sides a product costs less than two triangular solves.
    inverse = torch.cholesky_inverse(root).mul_(torch.outer(scale, scale))
    return right @ inverse.to(right.dtype)


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
    """

    point: Iterate
    direction: Direction
    grams: Tensor
    squared: Tensor
    penalty: Tensor

    @classmethod
    def of(cls, channels: Channels, point: Iterate, direction: Direction, ridge: float) -> Line:
        """Expand the polynomial; two R×R products per projection and none with the tensor."""
        grams = point.grams.new_empty(3, 3, *point.grams.shape[1:])
        grams[:, 0] = point.grams
        sides = (
            (point.query, direction.query, direction.projected_query),
            (point.mixing, direction.mixing, direction.mixing),
            (point.key, direction.key, direction.projected_key),
        )
        for gram, (here, there, projected) in zip(grams, sides, strict=True):
            cross = here.mT @ projected
            torch.add(cross, cross.mT, out=gram[1])
            torch.mm(there.mT, projected, out=gram[2])
        products = grams.new_zeros(5, *grams.shape[2:])
        for power in range(3):
            products[power : power + 3].addcmul_(grams[0, power], grams[1])
        squared = _diagonal_sums(products.flatten(1) @ grams[2].flatten(1).mT)
        cross = channels.mixing_mttkrp(point.projected_query, direction.projected_key)
        inner = torch.stack([
            channels.mixing_mttkrp(point.projected_query, point.projected_key),
            cross + channels.mixing_mttkrp(direction.projected_query, point.projected_key),
            channels.mixing_mttkrp(direction.projected_query, direction.projected_key),
        ])  # fmt: skip
        mixing = torch.stack([point.mixing, direction.mixing])
        squared[:4] -= 2 * _diagonal_sums(inner.flatten(1) @ mixing.flatten(1).mT)
        squared[0] += 1.0
        penalty = torch.zeros_like(squared)
        penalty[:3] = ridge * grams.diagonal(dim1=2, dim2=3).sum((0, 2))
        return cls(point, direction, grams, squared, penalty)

    def at(self, step: float) -> Iterate:
        """Return the point at one step length, its Gram matrices taken from the expansion."""
        grams = torch.add(self.grams[:, 1], self.grams[:, 2], alpha=step)
        grams = torch.add(self.grams[:, 0], grams, alpha=step)
        return Iterate(self.point.plus(self.direction, step).values, self.point.heads, grams)


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
    roots = np.roots(slope[degree::-1])
    steps = roots.real[(abs(roots.imag) <= 1e-6 * abs(roots)) & (roots.real > 0)].clip(max=LONGEST_STEP)
    reached = [(sum(c * step**power for power, c in enumerate(coefficients, 1)), step) for step in steps.tolist()]
    value, step = min(reached, default=(0.0, 0.0))
    return step if value < 0 else 0.0


SWEEPS = 200
FAST_SWEEPS = 50
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
# Coefficients from which products in float32 pay.
LARGE = 1 << 14
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
    the exact minimiser of the squared error on the line. Products are made in float32 as long as there is a ridge,
    where problems are large enough for that to pay. Deterministic; never worse than its start.

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
    own, values = singular_channels(HeadTensor(tensor.query / norm**0.25, tensor.key / norm**0.25))
    run = _Run(Channels.of(own), values, rank, options)
    run.descend()
    best, errors = run.best, tuple(run.errors)
    if best.values.dtype != torch.float64:  # then errors are rounded
        best = best.seen_by(run.channels)
        lowest = Iterate.at(best).relative_error(run.channels)
        errors = tuple(max(error, lowest) for error in errors)
    factors = Factors(own.flat_query @ best.query * norm**0.25, best.mixing, own.flat_key @ best.key * norm**0.25)
    return Solution(factors, errors, run.converged, run.breakdowns)


def _start(channels: Channels, values: Tensor, rank: int) -> Iterate:
    """The best per-head truncation: channels as they are, each for its own head."""
    order = strongest(values, rank)
    place = torch.arange(len(order), device=order.device)
    chosen = values.new_zeros(values.numel(), rank)
    chosen[order, place] = 1.0
    mixing = values.new_zeros(channels.heads, rank)
    mixing[order.div(values.shape[1], rounding_mode="floor"), place] = 1.0
    return Iterate.at(Direction.of(channels, chosen, mixing, chosen))


class _Run:
    """One descent on a tensor of norm 1, given by its singular channels and their singular values (H, r)."""

    def __init__(self, channels: Channels, values: Tensor, rank: int, options: SolverOptions) -> None:
        self.channels = channels
        self.sweeps = SWEEPS if options.sweeps is None else options.sweeps
        self.tolerance = TOLERANCE if options.tolerance is None else options.tolerance
        self.progress = options.progress
        self.point = _start(channels, values, rank)
        self.unit = float(self.point.grams[0].diagonal().min()) ** (4 / 3)
        self.best: Direction = self.point
        self.lowest = self.point.relative_error(channels)
        self.errors: list[float] = []
        self.converged = self.lowest < EXACT
        self.breakdowns = 0
        self.last: tuple[Direction, Direction] | None = None  # step of the last sweep, and the direction taken

    def descend(self) -> None:
        """Sweep until the error is rounding, progress stalls without a ridge, or no sweep is left or possible."""
        recent: list[float] = []
        fading = Continuation()
        faded = False
        large = self.point.query.numel() >= LARGE
        rough = self.channels.to(torch.float32) if large else self.channels
        for sweep in range(self.sweeps):
            if self.converged:
                break
            ridge = 0.0 if faded else self.unit * fading.ridge(sweep, self.sweeps)
            error = self._advance(rough if ridge > 0.0 else self.channels, ridge)
            if error is None:
                break
            recent.append(error)
            stalled = self.last is None or (
                len(recent) > WINDOW and abs(recent[-1 - WINDOW] - recent[-1]) < WINDOW * self.tolerance
            )
            self.converged = self.lowest < EXACT or (stalled and ridge == 0.0)
            if stalled and not faded:
                faded, recent, self.last = True, [], None

    def _advance(self, channels: Channels, ridge: float) -> float | None:
        """Move the point and return its error; None where no shift helps to sweep.

        A device is waited for once: for the numbers that decide, when all that may be needed is under way.
        """
        if channels.dtype != self.point.values.dtype:
            self.point = Iterate.at(self.point.seen_by(channels))
            self.last = self.last and (self.last[0].seen_by(channels), self.last[1].seen_by(channels))
        for shift in SHIFTS:
            swept = self.point.swept(channels, ridge, shift)
            step = swept.plus(self.point, -1.0)
            direction = step if self.last is None else step.plus(self.last[1], _turn(step, self.last[0]))
            line = Line.of(channels, self.point, direction, ridge)
            sizes = torch.stack([step.dot(step), swept.dot(swept)]).double()
            moved, size, *squared = torch.cat([sizes, line.squared, line.squared + line.penalty]).tolist()
            if isfinite(sum(squared)):
                break
            self.breakdowns += shift == SHIFT
        else:
            return None
        length = positive_minimiser(squared[8:])
        if not moved > FIXED**2 * size or length == 0.0:
            self.point = Iterate.at(swept)
            self.last = (step, step) if moved > FIXED**2 * size else None
            error = self.point.relative_error(channels)
        else:
            self.point = line.at(length)
            self.last = step, direction
            error = max(sum(c * length**power for power, c in enumerate(squared[:7])), 0.0) ** 0.5
        if error < self.lowest:
            self.best, self.lowest = self.point, error
        self.errors.append(self.lowest)
        if self.progress is not None:
            self.progress(len(self.errors), self.lowest)
        return error


def _turn(step: Direction, last: Direction) -> Tensor:
    """Weight of the last direction in the next one (Polak-Ribière); 0 restarts."""
    weight = (step.dot(step) - step.dot(last)) / last.dot(last)
    return weight.clamp(0.0, LARGEST_TURN)
