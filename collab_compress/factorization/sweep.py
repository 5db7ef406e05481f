"""One sweep of the solver up to where its numbers are read: nothing here waits for a device but `alone`, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from collab_compress.factorization.iterate import Channels, Direction, Iterate
from collab_compress.factorization.line_search import Line

# Most weight of the last direction in the next one, against directions that amplify rounding.
LARGEST_TURN = 2.0

Last: TypeAlias = tuple[Direction, Direction]
"""Step of the last sweep, and the direction taken."""


@dataclass(frozen=True)
class Sweep:
    """Where least squares lead from a point, and the line on which to go there.

    Args:
        swept: the point after least squares.
        step: from the point to that.
        line: through the point, in the direction of the step and the last direction.
        numbers: what decides how far to go: squared lengths of the step and of the point after least squares, the
            squared error's seven coefficients along the line, and those with the ridge's part, (16,), in float64.
    """

    swept: Direction
    step: Direction
    line: Line
    numbers: Tensor

    @classmethod
    def of(
        cls, channels: Channels, point: Iterate, last: Last | None, ridge: float | Tensor, shift: float | Tensor
    ) -> Sweep:
        """Make a sweep from a point, of one layer or several.

        Args:
            channels: of the heads.
            point: in the channels' dtype.
            last: of the last sweep; None goes straight along the step.
            ridge: as in `Iterate.swept`.
            shift: as in `Iterate.swept`; numbers that are not finite ask for a larger one.
        """
        swept = point.swept(channels, ridge, shift)
        step = swept.plus(point, -1.0)
        direction = step if last is None else step.plus(last[1], _turn(step, last[0]))
        line = Line.of(channels, point, direction, ridge)
        sizes = torch.stack([step.dot(step), swept.dot(swept)], -1).double()
        return cls(swept, step, line, torch.cat([sizes, line.squared, line.squared + line.penalty], -1))


Sweeper: TypeAlias = Callable[[Channels, Iterate, Last | None, float, float], tuple[Sweep, list[float]]]
"""Makes a sweep of one layer, as `Sweep.of`, and reads its numbers."""


def alone(
    channels: Channels, point: Iterate, last: Last | None, ridge: float, shift: float
) -> tuple[Sweep, list[float]]:
    """Make a sweep of one layer by itself."""
    sweep = Sweep.of(channels, point, last, ridge, shift)
    return sweep, sweep.numbers.tolist()


def _turn(step: Direction, last: Direction) -> Tensor:
    """Weight of the last direction in the next one (Polak-Ribière); 0 restarts."""
    weight = (step.dot(step) - step.dot(last)) / last.dot(last)
    return weight.clamp(0.0, LARGEST_TURN)
