r"""Alternating least squares with momentum, an exact line search, a fading ridge and spare components.

The point is held as coefficients of the heads' own channels (`iterate`); a step's length is the exact minimiser of
the squared error on its line (`line_search`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import TypeAlias

import torch
from torch import Tensor

from collab_compress.factorization.factors import Factors, Solution, SolverOptions
from collab_compress.factorization.head_tensor import HeadTensor
from collab_compress.factorization.iterate import SHIFT, Channels, Direction, Iterate
from collab_compress.factorization.line_search import Line, positive_minimiser
from collab_compress.factorization.spare import narrowed, widened
from collab_compress.factorization.truncation import singular_channels, strongest, truncation

SWEEPS = 90
FAST_SWEEPS = 36
# A run without a number of sweeps goes on beyond `SWEEPS`, while that pays, up to as many.
MOST_SWEEPS = 200
TOLERANCE = 2e-4
# Below this the error is rounding: the squares it is the difference of cancel.
EXACT = 1e-7
# Sweeps over which progress is averaged before it counts as stalled.
WINDOW = 3
# A sweep that moves the point by less, relative to its length, has reached a fixed point: the difference of
# two points is mostly rounding from here on, and directions built on it would amplify that.
FIXED = 1e-10
# Coefficients from which products in float32 pay.
LARGE = 1 << 14
# Most weight of the last direction in the next one, against directions that amplify rounding.
LARGEST_TURN = 2.0
# Blocks of the point's size that a sweep fills: swept point, step, direction, next point.
BLOCKS = 4
# What is added to the diagonal of a sweep's systems, by turns, until all of them can be solved; the last is about
# 1e-6 R, next to a diagonal of 1.
SHIFTS = (SHIFT, 1e3 * SHIFT, 1e6 * SHIFT, 1e9 * SHIFT)


@dataclass(frozen=True)
class Continuation:
    r"""Schedule of the solver: a fading ridge on the factors, and the number of components.

    Plain least squares drifts into swamps: components that nearly cancel, whose rank is wasted and which take
    thousands of sweeps to part. A ridge makes cancelling expensive; faded out, it leaves the solver
    in a better basin. At first, under the largest ridge, there are components to spare (see `widened`).

    Args:
        first: the ridge up to the end of the search, in units of $\lambda^{4/3}$ with $\lambda$ the smallest singular
            value kept by the start. From about 0.3 a ridge kills components for good.
        start: the ridge after the search, in the same units.
        end: ratio of the last ridge to that.
        share: part of the sweeps that have a ridge.
        widening: part of the sweeps after which there are components to spare.
        search: part of the sweeps after which the smallest are given up.
        spare: ratio of components meanwhile to those that are kept.
    """

    first: float = 0.2
    start: float = 0.05
    end: float = 2e-3
    share: float = 0.97
    widening: float = 0.06
    search: float = 0.2
    spare: float = 1.1

    def ridge(self, sweep: int, sweeps: int) -> float:
        """Return the ridge of one sweep, counted from 0."""
        search, fading = self.search * sweeps, self.share * sweeps
        if sweep + 1 >= fading:
            return 0.0
        if self.searching(sweep, sweeps):
            return self.first
        faded = max(sweep - search, 0.0) / (fading - search)  # below 0 where the search has no whole sweep
        return self.start * float(self.end**faded)

    def searching(self, sweep: int, sweeps: int) -> bool:
        """Return whether a sweep belongs to the search phase, which ends with spare components."""
        return sweep < int(self.search * sweeps)

    def width(self, sweep: int, sweeps: int, rank: int, channels: int) -> int:
        """Return how many components there are in one sweep, of those R that are kept and n channels."""
        spare = self.searching(sweep, sweeps) and sweep >= int(self.widening * sweeps)
        return min(ceil(self.spare * rank), channels) if spare else rank


def als(tensor: HeadTensor, rank: int, options: SolverOptions) -> Solution:
    r"""Fit factors by alternating least squares from the best per-head truncation.

    A sweep's step, $p = \mathrm{ALS}(x) - x$, serves as the preconditioned gradient of a nonlinear conjugate
    gradient method (Polak-Ribière, restarted when it turns negative), and the length of each step is
    the exact minimiser of the squared error on the line. A ridge and spare components lead to a good basin
    (`Continuation`). Products are made in float32 as long as there is a ridge, where problems are large enough for
    that to pay. Deterministic; never worse than its start.

    Args:
        tensor: the heads, in float64: the error is a difference of squares that cancel.
        rank: R, below H·d.
        options: sweeps, and the tolerance, by default 2e-4: the share of the error that another sweep must be
            expected to gain, by the average of the last three, once the ridge has faded. Without a number of sweeps
            the ridge fades over most of 90, and 200 is the limit.

    Returns:
        The best factors met, and the lowest error of R components so far after every sweep.

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


Last: TypeAlias = tuple[Direction, Direction]
"""Step of the last sweep, and the direction taken."""


@dataclass(frozen=True)
class Sweep:
    """The point that least squares lead to, and the line on which to go there.

    Args:
        swept: the point after least squares.
        step: from the point to the swept one.
        line: through the point, in the direction of the step and the last direction.
        numbers: what decides how far to go: squared lengths of the step and of the swept point, the squared error's
            seven coefficients along the line, and those with the ridge's part, (16,), in float64.
    """

    swept: Direction
    step: Direction
    line: Line
    numbers: Tensor

    @classmethod
    def of(
        cls,
        channels: Channels,
        point: Iterate,
        last: Last | None,
        ridge: float,
        shift: float,
        blocks: Sequence[Tensor | None] = (None,) * BLOCKS,
    ) -> Sweep:
        """Sweep from a point.

        Args:
            channels: of the heads.
            point: in the channels' dtype.
            last: of the last sweep; None goes straight along the step.
            ridge: as in `Iterate.swept`.
            shift: as in `Iterate.swept`; numbers that are not finite ask for a larger one.
            blocks: memory of the point's size for the results; new memory where None.
        """
        swept = point.swept(channels, ridge, shift, blocks[0])
        step = swept.plus(point, -1.0, blocks[1])
        direction = step if last is None else step.plus(last[1], _turn(step, last[0]), blocks[2])
        line = Line.of(channels, point, direction, ridge, blocks[3])
        sizes = torch.stack([step.dot(step), swept.dot(swept)]).double()
        return cls(swept, step, line, torch.cat([sizes, line.squared, line.squared + line.penalty]))


class Sweeper:
    """Makes sweeps in two sets of blocks in turn, for a sweep needs only what the last one made."""

    def __init__(self) -> None:
        self.sets: tuple[Tensor, ...] = ()

    def __call__(
        self, channels: Channels, point: Iterate, last: Last | None, ridge: float, shift: float
    ) -> tuple[Sweep, list[float]]:
        """Sweep over the memory of the sweep before the last, and read the numbers; arguments as for `Sweep.of`."""
        values = point.values
        if not self.sets or (self.sets[0][0].shape, self.sets[0].dtype) != (values.shape, values.dtype):
            self.sets = tuple(values.new_empty(BLOCKS, *values.shape) for _ in range(2))
        in_use = values.untyped_storage().data_ptr()
        free = next(blocks for blocks in self.sets if blocks.untyped_storage().data_ptr() != in_use)
        sweep = Sweep.of(channels, point, last, ridge, shift, free.unbind())
        return sweep, sweep.numbers.tolist()


def _turn(step: Direction, last: Direction) -> Tensor:
    """Return the weight of the last direction in the next one (Polak-Ribière); 0 restarts."""
    weight = (step.dot(step) - step.dot(last)) / last.dot(last)
    return weight.clamp(0.0, LARGEST_TURN)


class _Run:
    """One descent on a tensor of norm 1, given by its singular channels and their singular values (H, r)."""

    def __init__(self, channels: Channels, values: Tensor, rank: int, options: SolverOptions) -> None:
        self.channels, self.rank, self.sweeper = channels, rank, Sweeper()
        self.sweeps = MOST_SWEEPS if options.sweeps is None else options.sweeps
        self.planned = SWEEPS if options.sweeps is None else options.sweeps
        self.tolerance = TOLERANCE if options.tolerance is None else options.tolerance
        self.progress = options.progress
        self.point = _start(channels, values, rank)
        self.unit = float(self.point.grams[0].diagonal().min()) ** (4 / 3)
        self.best: Direction = self.point
        self.lowest = self.point.relative_error(channels)
        self.errors: list[float] = []
        self.converged = self.lowest < EXACT
        self.breakdowns = 0
        self.last: Last | None = None

    def descend(self) -> None:
        """Sweep until the error is rounding, a further sweep promises too little, or none is left or possible."""
        continuation, faded = Continuation(), False
        recent: list[float] = []  # errors since the ridge has faded
        large = self.point.query.numel() >= LARGE
        rough = self.channels.to(torch.float32) if large else self.channels
        for sweep in range(self.sweeps):
            if self.converged:
                break
            ridge = 0.0 if faded else self.unit * continuation.ridge(sweep, self.planned)
            channels = rough if ridge > 0.0 else self.channels
            self._resize(continuation.width(sweep, self.planned, self.rank, len(self.point.query)), channels)
            error = self._advance(channels, ridge)
            if error is None:
                break
            self.converged = self.lowest < EXACT
            if continuation.searching(sweep, self.planned):
                continue
            resting = self.last is None
            if ridge == 0.0:
                recent.append(error)
            stalled = len(recent) > WINDOW and recent[-1 - WINDOW] - error < WINDOW * self.tolerance * error
            self.converged |= ridge == 0.0 and (resting or stalled)
            faded = faded or resting

    def _resize(self, width: int, channels: Channels) -> None:
        """Return the point with more or fewer components."""
        if width == self.point.query.shape[1]:
            return
        self.point, self.last = narrowed(Iterate.at(self.point.seen_by(channels)), width), None
        missing = width - self.point.query.shape[1]
        if missing > 0:
            self.point = widened(self.point, channels, missing)

    def _advance(self, channels: Channels, ridge: float) -> float | None:
        """Move the point and return its error; None where no shift helps to sweep.

        A device is waited for once: for the numbers that decide, when all that may be needed is under way.
        """
        if channels.dtype != self.point.values.dtype:
            self.point = Iterate.at(self.point.seen_by(channels))
            self.last = self.last and (self.last[0].seen_by(channels), self.last[1].seen_by(channels))
        for shift in SHIFTS:
            found, (moved, size, *squared) = self.sweeper(channels, self.point, self.last, ridge, shift)
            if isfinite(sum(squared)):
                break
            self.breakdowns += shift == SHIFT
        else:
            return None
        length = positive_minimiser(squared[8:])
        if not moved > FIXED**2 * size or length == 0.0:
            self.point = Iterate.at(found.swept)
            self.last = (found.step, found.step) if moved > FIXED**2 * size else None
            error = self.point.relative_error(channels)
        else:
            self.point = found.line.at(length)
            self.last = found.step, found.line.direction
            error = max(sum(c * length**power for power, c in enumerate(squared[:7])), 0.0) ** 0.5
        if error < self.lowest and self.point.query.shape[1] == self.rank:
            self._keep(error)
        self.errors.append(self.lowest)
        if self.progress is not None:
            self.progress(len(self.errors), self.lowest)
        return error

    def _keep(self, error: float) -> None:
        """Copy the point, which has the lowest error so far: sweeps will write over it."""
        values = self.point.values
        if (self.best.values.shape, self.best.values.dtype) != (values.shape, values.dtype):
            self.best = Direction(torch.empty_like(values), self.point.heads)
        self.best.values.copy_(values)
        self.lowest = error
