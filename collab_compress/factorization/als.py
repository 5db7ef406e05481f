r"""Alternating least squares with momentum, an exact line search, a fading ridge and spare components.

An iteration's step, $p = \mathrm{ALS}(x) - x$, serves as the preconditioned gradient of a nonlinear conjugate
gradient method (Polak-Ribière, restarted when it turns negative), and the length of each step is the exact minimiser
of the squared error on the line.

Plain least squares drifts into swamps: components that nearly cancel, which waste rank and take thousands of
iterations to part; and they hardly ever let two components change places, so that the first iterations decide which
channels of which heads are shared. A ridge makes cancelling expensive, and kills some of the spare components that
are added at first; faded out, it leaves the solver in a better basin.
"""

from collections.abc import Callable, Sequence
from math import ceil, isfinite, sqrt

import torch
from torch import Tensor

from collab_compress.factorization.factors import (
    Factors,
    HeadTensor,
    Solution,
    choose_channels,
    one_hot,
    singular_channels,
)
from collab_compress.factorization.point import SHIFT, Channels, LineSearch, Point, Step, positive_minimiser

ITERATIONS = 90  # over which the ridge fades if no number is given
MAX_ITERATIONS = 200  # limit of such a run, which goes on while that pays
MIN_GAIN = 2e-4  # share of the error that another iteration must be expected to gain, once the ridge has faded
GAIN_WINDOW = 3  # iterations over which this gain is averaged
ROUNDING_RTOL = 1e-7  # lower errors are rounding: the squares cancel
# An iteration that moves the point by less, relative to its length, has reached a fixed point: further differences of
# points are mostly rounding, and directions built on them would amplify it.
FIXED_POINT_RTOL = 1e-10
MIN_FLOAT32_COEFFICIENTS = 1 << 14  # coefficients from which products in float32 pay
# Limit of the last direction's weight in the next one, against directions that amplify rounding.
MAX_DIRECTION_WEIGHT = 2.0
# Tried in turn on the diagonal of an iteration's systems, until all of them can be solved; the last is about 1e-6 R,
# next to a diagonal of 1.
SHIFTS = (SHIFT, 1e3 * SHIFT, 1e6 * SHIFT, 1e9 * SHIFT)

# The schedule, in shares of the planned iterations. Ridges are in units of λ^(4/3), with λ the smallest singular
# value that the start keeps; from about 0.3 a ridge kills components for good.
SPARE_RATIO = 1.1  # ratio of components with the spare ones to those that are kept
SPARE_FROM = 0.06
SEARCH_TO = 0.2  # here the spare components are given up
SEARCH_RIDGE = 0.2
RIDGE_TO = 0.97
FIRST_RIDGE, LAST_RIDGE = 0.05, 1e-4  # after the search, and in the end

THINNING_STEPS = 5  # in which heads come to read fewer components
THINNING_ITERATIONS = 3  # after each of these steps but the last
FINAL_ITERATIONS = 20


def ridge_at(iteration: int, planned: int) -> float:
    """Return the ridge of one of the planned iterations, counted from 0."""
    if iteration + 1 >= RIDGE_TO * planned:
        return 0.0
    if is_search(iteration, planned):
        return SEARCH_RIDGE
    faded = (iteration - SEARCH_TO * planned) / ((RIDGE_TO - SEARCH_TO) * planned)
    return FIRST_RIDGE * float(
        (LAST_RIDGE / FIRST_RIDGE) ** max(faded, 0.0)
    )  # below 0 without a whole search iteration


def is_search(iteration: int, planned: int) -> bool:
    """Return whether an iteration belongs to the search phase, in the end of which there are spare components."""
    return iteration < int(SEARCH_TO * planned)


def width_at(iteration: int, planned: int, rank: int, channels: int) -> int:
    """Return the number of components in one iteration, for R components to be kept of n channels."""
    has_spare = is_search(iteration, planned) and iteration >= int(SPARE_FROM * planned)
    return min(ceil(SPARE_RATIO * rank), channels) if has_spare else rank


def als(
    tensor: HeadTensor,
    rank: int,
    sweeps: int | None = None,
    reads: int | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Solution:
    """Fit factors (at most `sweeps` iterations, k = `reads` components a head) from the best per-head truncation.

    In large problems products are made in float32 while there is a ridge. Deterministic; never worse than its start.
    Without `sweeps` the run ends once three iterations have gained less than 0.02 % of the error each, or after 200.
    `progress` gets the number of each iteration and the lowest relative error so far.
    """
    norm = tensor.squared_norm().item()
    if not isfinite(norm):
        raise ValueError("the heads' squared norm overflows float64: their values, or the damping, are too large")
    if norm == 0.0:
        query, key = (side.new_zeros(side.shape[1], rank) for side in (tensor.query, tensor.key))
        return Solution(Factors(query, query.new_zeros(tensor.heads, rank), key), sweeps=0, converged=True)
    heads, values = singular_channels(HeadTensor(tensor.query / norm**0.25, tensor.key / norm**0.25))
    descent = _Descent(Channels(heads), values, rank, sweeps, progress)
    descent.run()
    if reads is not None and reads < rank:
        descent.thin(reads, values)
    query, mixing, key = (part.double() for part in (descent.best.query, descent.best.mixing, descent.best.key))
    factors = Factors(heads.flat_query @ query * norm**0.25, mixing, heads.flat_key @ key * norm**0.25)
    return Solution(factors, descent.sweeps, descent.converged, descent.breakdowns)


class _Descent:
    """One descent on a tensor of norm 1, given by its singular channels and their singular values (H, r)."""

    def __init__(
        self,
        channels: Channels,
        values: Tensor,
        rank: int,
        sweeps: int | None,
        progress: Callable[[int, float], None] | None,
    ) -> None:
        self.channels, self.rank, self.progress = channels, rank, progress
        self.limit, self.planned = (MAX_ITERATIONS, ITERATIONS) if sweeps is None else (sweeps, sweeps)
        self.point = self._select(values, choose_channels(values, rank))
        self.unit = float(self.point.grams[0].diagonal().min()) ** (4 / 3)
        self.best: Step = self.point
        self.lowest = self.point.relative_error(channels)
        self.converged = self.lowest < ROUNDING_RTOL
        self.sweeps = self.breakdowns = 0
        self.last: tuple[Step, Step] | None = None  # step of the last iteration, and the direction taken
        self.is_stuck = False  # whether a system could not be solved by any shift
        self.reads: Tensor | None = None  # components that each head reads, (H, k); None for all

    def _select(self, values: Tensor, chosen: Tensor) -> Point:
        """Return the point whose components are single channels of the heads."""
        coefficients, mixing = one_hot(chosen, values, self.rank)
        return Point.at(Step.of(self.channels, coefficients, mixing, coefficients))

    def run(self) -> None:
        """Iterate until the error is rounding, progress stalls, iterations are used up or none is possible."""
        rough = (
            self.channels.to(torch.float32) if self.point.query.numel() >= MIN_FLOAT32_COEFFICIENTS else self.channels
        )
        recent: list[float] = []  # errors since the ridge has faded
        is_resting = False  # at a fixed point, where a ridge is of no more use
        for iteration in range(self.limit):
            if self.converged:
                return
            ridge = 0.0 if is_resting else self.unit * ridge_at(iteration, self.planned)
            channels = rough if ridge > 0.0 else self.channels
            self._resize(width_at(iteration, self.planned, self.rank, len(self.point.query)), channels)
            error = self._iterate(channels, ridge)
            if error is None:
                return
            self.converged = self.lowest < ROUNDING_RTOL
            if is_search(iteration, self.planned):
                continue
            if ridge == 0.0:
                recent.append(error)
                self.converged |= self.last is None or _is_stalled(recent)
            is_resting |= self.last is None

    def thin(self, reads: int, values: Tensor) -> None:
        """Let each head read only k components, those it would lose most without; iterate between the steps.

        If separate heads of equal width, the best truncation of each head, are better, start from those instead.
        """
        rank = self.rank
        self._restrict(
            self.best,
            [round(rank * (reads / rank) ** (step / THINNING_STEPS)) for step in range(1, THINNING_STEPS + 1)],
        )
        separate = self._select(values, choose_channels(values, min(rank, len(values) * reads), equal=True))
        if separate.relative_error(self.channels) < self.lowest:
            self._restrict(separate, [reads])

    def _restrict(self, start: Step, counts: Sequence[int]) -> None:
        """Iterate from a point while heads read fewer components, by these numbers in turn; keep the best result."""
        self.point, self.reads = Point.at(start), None
        for count in counts:
            self.reads = self.point.choose_reads(count, self.reads)
            self.point, self.last = self.point.restrict(self.channels, self.reads), None
            self.best, self.lowest = self.point, self.point.relative_error(self.channels)
            recent = [self.lowest]
            for _ in range(min(self.limit, FINAL_ITERATIONS if count == counts[-1] else THINNING_ITERATIONS)):
                error = None if self.is_stuck else self._iterate(self.channels, 0.0)
                if error is None or self.last is None:
                    break
                recent.append(error)
                if _is_stalled(recent):
                    break

    def _resize(self, width: int, channels: Channels) -> None:
        """Give the point more or fewer components."""
        if width == self.point.rank:
            return
        self.point, self.last = Point.at(self.point.project_by(channels)).narrow(width), None
        if width > self.point.rank:
            self.point = self.point.widen(channels, width - self.point.rank)

    def _iterate(self, channels: Channels, ridge: float) -> float | None:
        """Move the point and return its error; None where no shift makes the systems solvable."""
        if channels.dtype != self.point.query.dtype:
            self.point = Point.at(self.point.project_by(channels))
            self.last = self.last and (self.last[0].project_by(channels), self.last[1].project_by(channels))
        point, last = self.point, self.last
        for attempt, shift in enumerate(SHIFTS):
            solved = point.solve(channels, ridge, shift, self.reads)
            direction = step = solved.plus(point, -1.0)
            if last is not None:  # Polak-Ribière; a weight of 0 restarts
                last_step, last_direction = last
                weight = (step.dot(step) - step.dot(last_step)) / last_step.dot(last_step)
                direction = step.plus(last_direction, weight.clamp(0.0, MAX_DIRECTION_WEIGHT))
            line = LineSearch.of(channels, point, direction, ridge)
            lengths = torch.stack([step.dot(step), solved.dot(solved)]).double()
            # The only place where the device is waited for.
            moved, size, *numbers = torch.cat([lengths, line.squared, line.squared + line.penalty]).tolist()
            squared, penalised = numbers[:7], numbers[7:]
            if isfinite(sum(numbers)):
                break
            self.breakdowns += attempt == 0
        else:
            self.is_stuck = True
            return None
        has_moved = moved > FIXED_POINT_RTOL**2 * size
        length = positive_minimiser(penalised[1:]) if has_moved else 0.0
        if length > 0.0:
            self.point, self.last = line.at(length), (step, direction)
            error = sqrt(max(sum(c * length**power for power, c in enumerate(squared)), 0.0))
        else:
            self.point, self.last = Point.at(solved), (step, step) if has_moved else None
            error = self.point.relative_error(channels)
        if error < self.lowest and self.point.rank == self.rank:
            self.best, self.lowest = self.point, error
        self.sweeps += 1
        if self.progress is not None:
            self.progress(self.sweeps, self.lowest)
        return error


def _is_stalled(recent: Sequence[float]) -> bool:
    """Return whether the last of these errors have fallen by less than the tolerance an iteration."""
    return len(recent) > GAIN_WINDOW and recent[-1 - GAIN_WINDOW] - recent[-1] < GAIN_WINDOW * MIN_GAIN * recent[-1]
