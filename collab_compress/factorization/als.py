"""Alternating least squares on the factored tensor, accelerated and kept out of swamps."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from collab_compress.factorization.factors import Factors
from collab_compress.factorization.head_tensor import HeadTensor
from collab_compress.factorization.iterate import SHIFT, Direction, Iterate
from collab_compress.factorization.line_search import Line
from collab_compress.factorization.solution import Solution, SolverOptions
from collab_compress.factorization.start import truncation

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
