r"""Alternating least squares with momentum, an exact line search, a fading ridge and spare components.

Least squares move components but hardly ever let two of them change places: which channels of which heads are shared
is decided in the first sweeps. With a ridge and some spare components more combinations are tried, and the spare ones
that the ridge makes small are given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite, sqrt
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from collab_compress.factorization.factors import Factors, HeadTensor, Solution, SolverOptions
from collab_compress.factorization.iterate import SHIFT, Channels, Direction, Iterate, Line, positive_minimiser
from collab_compress.factorization.truncation import one_hot, singular_channels, strongest, truncation

SWEEPS = 90
MOST_SWEEPS = 200  # limit of a run without a number of sweeps, which goes on beyond `SWEEPS` while that pays
TOLERANCE = 2e-4
EXACT = 1e-7  # lower errors are rounding: the squares cancel
STEPS = 5  # in which heads come to read fewer components
STEP_SWEEPS = 3  # after each of these steps but the last
LAST_SWEEPS = 20
WINDOW = 3  # sweeps over which progress is averaged before it counts as stalled
# A sweep that moves the point by less, relative to its length, has reached a fixed point: further differences of
# points are mostly rounding, and directions built on them would amplify it.
FIXED = 1e-10
LARGE = 1 << 14  # coefficients from which products in float32 pay
LARGEST_TURN = 2.0  # limit of the last direction's weight in the next one, against directions that amplify rounding
# Tried in turn on the diagonal of a sweep's systems, until all of them can be solved; the last is about 1e-6 R, next
# to a diagonal of 1.
SHIFTS = (SHIFT, 1e3 * SHIFT, 1e6 * SHIFT, 1e9 * SHIFT)


@dataclass(frozen=True)
class Continuation:
    r"""Schedule of the solver: a fading ridge on the factors, and the number of components.

    Plain least squares drift into swamps: components that nearly cancel, which waste rank and take thousands of
    sweeps to part. A ridge makes cancelling expensive; faded out, it leaves the solver in a better basin. At first,
    under the largest ridge, there are spare components (`Iterate.widened`).

    Args:
        first: the ridge up to the end of the search, in units of $\lambda^{4/3}$ with $\lambda$ the smallest singular
            value kept by the start. From about 0.3 a ridge kills components for good.
        start: the ridge after the search, in the same units.
        end: ratio of the last ridge to `start`.
        share: part of the sweeps that have a ridge.
        widening: part of the sweeps after which spare components are added.
        search: part of the sweeps after which the smallest components are given up.
        spare: ratio of components in between to those that are kept.
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
        """Return the number of components in one sweep, for R components to be kept of n channels."""
        spare = self.searching(sweep, sweeps) and sweep >= int(self.widening * sweeps)
        return min(ceil(self.spare * rank), channels) if spare else rank


def als(tensor: HeadTensor, rank: int, options: SolverOptions) -> Solution:
    r"""Fit factors by alternating least squares from the best per-head truncation.

    A sweep's step, $p = \mathrm{ALS}(x) - x$, serves as the preconditioned gradient of a nonlinear conjugate
    gradient method (Polak-Ribière, restarted when it turns negative), and the length of each step is
    the exact minimiser of the squared error on the line. A ridge and spare components lead to a good basin
    (`Continuation`). In large problems products are made in float32 while there is a ridge. Deterministic; never
    worse than its start.

    Args:
        tensor: the heads, in float64: the error is a difference of squares that cancel.
        rank: R, below H·d.
        options: sweeps, and the tolerance, by default 2e-4: the share of the error that another sweep must be
            expected to gain, by the average of the last three, once the ridge has faded. Without a number of sweeps
            the ridge fades over most of 90, and 200 is the limit.

    Returns:
        The best factors met.

    Raises:
        ValueError: the squares of the heads are beyond what float64 holds.
    """
    norm = tensor.squared_norm().item()
    if not isfinite(norm):
        raise ValueError("the heads' squared norm overflows float64: their values, or the damping, are too large")
    if norm == 0.0:
        return Solution(truncation(tensor, rank), sweeps=0, converged=True)
    heads, values = singular_channels(HeadTensor(tensor.query / norm**0.25, tensor.key / norm**0.25))
    run = _Run(Channels.of(heads), values, rank, options)
    run.descend()
    if options.reads is not None and options.reads < rank:
        run.thin(options.reads, values)
    query, mixing, key = (part.double() for part in (run.best.query, run.best.mixing, run.best.key))
    factors = Factors(heads.flat_query @ query * norm**0.25, mixing, heads.flat_key @ key * norm**0.25)
    return Solution(factors, run.sweeps, run.converged, run.breakdowns)


Last: TypeAlias = tuple[Direction, Direction]
"""Step of the last sweep, and the direction taken."""


class Sweep(NamedTuple):
    """Least squares from a point, and the line towards their solution."""

    swept: Direction  # the point after least squares
    step: Direction  # from the point to the swept one
    line: Line  # through the point, along the step and the last direction
    moved: float  # squared length of the step
    size: float  # squared length of the swept point
    squared: list[float]  # coefficients of the squared error along the line, (7,)
    penalised: list[float]  # the same with the ridge's part


class Memory:
    """Two sets of four blocks of the point's size, used in turn: a sweep needs only the results of the last one."""

    def __init__(self) -> None:
        self.sets: tuple[Tensor, ...] = ()

    def unused(self, values: Tensor) -> Tensor:
        """Return the set that does not hold the values of the point, (4, 4n + 2H, R)."""
        if not self.sets or (self.sets[0][0].shape, self.sets[0].dtype) != (values.shape, values.dtype):
            self.sets = tuple(values.new_empty(4, *values.shape) for _ in range(2))
        first, second = self.sets
        in_use = values.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        return second if in_use else first


def make_sweep(
    channels: Channels,
    point: Iterate,
    last: Last | None,
    *,
    ridge: float,
    shift: float,
    memory: Memory,
    reads: Tensor | None = None,
) -> Sweep:
    """Sweep from a point in the channels' dtype; without a last sweep the line goes along the step.

    Waits for the device once, for the numbers that decide how far to go; if they are not finite, a larger shift is
    needed.
    """
    blocks = memory.unused(point.values)
    swept = point.swept(channels, ridge, shift, blocks[0], reads)
    direction = step = swept.plus(point, -1.0, blocks[1])
    if last is not None:  # Polak-Ribière; a weight of 0 restarts
        last_step, last_direction = last
        weight = (step.dot(step) - step.dot(last_step)) / last_step.dot(last_step)
        direction = step.plus(last_direction, weight.clamp(0.0, LARGEST_TURN), blocks[2])
    line = Line.of(channels, point, direction, ridge, blocks[3])
    lengths = torch.stack([step.dot(step), swept.dot(swept)]).double()
    moved, size, *numbers = torch.cat([lengths, line.squared, line.squared + line.penalty]).tolist()
    return Sweep(swept, step, line, moved, size, squared=numbers[:7], penalised=numbers[7:])


class _Run:
    """One descent on a tensor of norm 1, given by its singular channels and their singular values (H, r)."""

    def __init__(self, channels: Channels, values: Tensor, rank: int, options: SolverOptions) -> None:
        self.channels, self.rank, self.memory = channels, rank, Memory()
        self.limit = MOST_SWEEPS if options.sweeps is None else options.sweeps
        self.planned = SWEEPS if options.sweeps is None else options.sweeps
        self.tolerance = TOLERANCE if options.tolerance is None else options.tolerance
        self.progress = options.progress
        chosen, mixing = one_hot(strongest(values, rank), values, rank)  # the best per-head truncation
        self.point = Iterate.at(Direction.of(channels, chosen, mixing, chosen))
        self.unit = float(self.point.grams[0].diagonal().min()) ** (4 / 3)
        self.best: Direction = self.point
        self.lowest = self.point.relative_error(channels)
        self.sweeps = 0
        self.converged = self.lowest < EXACT
        self.breakdowns = 0
        self.last: Last | None = None
        self.is_stuck = False  # whether a system could not be solved by any shift
        self.reads: Tensor | None = None  # components that each head reads, (H, k); None for all

    def descend(self) -> None:
        """Sweep until the error is rounding, progress stalls, sweeps are used up or none is possible."""
        continuation, faded = Continuation(), False
        recent: list[float] = []  # errors since the ridge has faded
        large = self.point.query.numel() >= LARGE
        rough = self.channels.to(torch.float32) if large else self.channels
        for sweep in range(self.limit):
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
            self.converged |= ridge == 0.0 and (resting or self._is_stalled(recent))
            faded = faded or resting

    def thin(self, reads: int, values: Tensor) -> None:
        """Let each head read only `reads` components, those it would lose most without; sweep between the steps.

        If separate heads of equal width, the best truncation of each head, are better, start from those instead.

        Args:
            reads: k, less than R.
            values: singular values of the heads, (H, r).
        """
        rank = self.rank
        self._restrict(self.best, [round(rank * (reads / rank) ** (step / STEPS)) for step in range(1, STEPS + 1)])
        heads = self.point.heads
        separate, mixing = one_hot(strongest(values, min(rank, heads * reads), equal=True), values, rank)
        start = Iterate.at(Direction.of(self.channels, separate, mixing, separate))
        if start.relative_error(self.channels) < self.lowest:
            self._restrict(start, [reads])

    def _restrict(self, start: Direction, counts: Sequence[int]) -> None:
        """Sweep from a point while heads read fewer components, by these numbers in turn; keep the best result."""
        self.point, self.reads = Iterate.at(start), None
        for count in counts:
            self.reads = self.point.strongest_reads(count, self.reads)
            self.point, self.last = self.point.read_by(self.channels, self.reads), None
            self._keep(self.point.relative_error(self.channels))
            recent = [self.lowest]
            for _ in range(min(self.limit, LAST_SWEEPS if count == counts[-1] else STEP_SWEEPS)):
                error = None if self.is_stuck else self._advance(self.channels, 0.0)
                if error is None or self.last is None:
                    break
                recent.append(error)
                if self._is_stalled(recent):
                    break

    def _is_stalled(self, recent: Sequence[float]) -> bool:
        """Return whether the last of these errors have fallen by less than the tolerance a sweep."""
        return len(recent) > WINDOW and recent[-1 - WINDOW] - recent[-1] < WINDOW * self.tolerance * recent[-1]

    def _resize(self, width: int, channels: Channels) -> None:
        """Give the point more or fewer components."""
        if width == self.point.query.shape[1]:
            return
        self.point, self.last = Iterate.at(self.point.seen_by(channels)).narrowed(width), None
        missing = width - self.point.query.shape[1]
        if missing > 0:
            self.point = self.point.widened(channels, missing)

    def _advance(self, channels: Channels, ridge: float) -> float | None:
        """Move the point and return its error; None where no shift makes the systems solvable."""
        if channels.dtype != self.point.values.dtype:
            self.point = Iterate.at(self.point.seen_by(channels))
            self.last = self.last and (self.last[0].seen_by(channels), self.last[1].seen_by(channels))
        for shift in SHIFTS:
            sweep = make_sweep(
                channels, self.point, self.last, ridge=ridge, shift=shift, memory=self.memory, reads=self.reads
            )
            if isfinite(sum(sweep.squared + sweep.penalised)):
                break
            self.breakdowns += shift == SHIFT
        else:
            self.is_stuck = True
            return None
        length = positive_minimiser(sweep.penalised[1:])
        moved = sweep.moved > FIXED**2 * sweep.size
        if moved and length > 0.0:
            self.point = sweep.line.at(length)
            self.last = sweep.step, sweep.line.direction
            error = sqrt(max(sum(c * length**power for power, c in enumerate(sweep.squared)), 0.0))
        else:
            self.point = Iterate.at(sweep.swept)
            self.last = (sweep.step, sweep.step) if moved else None
            error = self.point.relative_error(channels)
        if error < self.lowest and self.point.query.shape[1] == self.rank:
            self._keep(error)
        self.sweeps += 1
        if self.progress is not None:
            self.progress(self.sweeps, self.lowest)
        return error

    def _keep(self, error: float) -> None:
        """Copy the point, which has the lowest error so far: later sweeps overwrite its memory."""
        values = self.point.values
        if (self.best.values.shape, self.best.values.dtype) != (values.shape, values.dtype):
            self.best = Direction(torch.empty_like(values), self.point.heads)
        self.best.values.copy_(values)
        self.lowest = error
