"""One sweep of the solver up to where its numbers are read: nothing here waits for a device but `alone`, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from collab_compress.factorization.iterate import Channels, Direction, Iterate
from collab_compress.factorization.line_search import Line

# Most weight of the last direction in the next one, against directions that amplify rounding.
LARGEST_TURN = 2.0
# What a sweep makes of a point's size.
BLOCKS = 4

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
        cls,
        channels: Channels,
        point: Iterate,
        last: Last | None,
        ridge: float | Tensor,
        shift: float | Tensor,
        blocks: Sequence[Tensor | None] = (None,) * BLOCKS,
    ) -> Sweep:
        """Make a sweep from a point, of one layer or several.

        Args:
            channels: of the heads.
            point: in the channels' dtype.
            last: of the last sweep; None goes straight along the step.
            ridge: as in `Iterate.swept`.
            shift: as in `Iterate.swept`; numbers that are not finite ask for a larger one.
            blocks: as the point's values, where the swept point, the step, the direction and the next point go; into
                new memory if None.
        """
        swept = point.swept(channels, ridge, shift, blocks[0])
        step = swept.plus(point, -1.0, blocks[1])
        direction = step if last is None else step.plus(last[1], _turn(step, last[0]), blocks[2])
        line = Line.of(channels, point, direction, ridge, blocks[3])
        sizes = torch.stack([step.dot(step), swept.dot(swept)], -1).double()
        return cls(swept, step, line, torch.cat([sizes, line.squared, line.squared + line.penalty], -1))


Sweeper: TypeAlias = Callable[[Channels, Iterate, Last | None, float, float], tuple[Sweep, list[float]]]
"""Makes a sweep of one layer, as `Sweep.of`, and reads its numbers."""


class Alone:
    """Makes the sweeps of one layer by itself, in memory that it uses again.

    A sweep needs what the last one made, and no more: there are two sets of blocks.
    """

    def __init__(self) -> None:
        self.sets: tuple[Tensor, ...] = ()

    def __call__(
        self, channels: Channels, point: Iterate, last: Last | None, ridge: float, shift: float
    ) -> tuple[Sweep, list[float]]:
        """Make a sweep over the one before the last; as `Sweeper`."""
        values = point.values
        if not self.sets or (self.sets[0][0].shape, self.sets[0].dtype) != (values.shape, values.dtype):
            self.sets = tuple(values.new_empty(BLOCKS, *values.shape) for _ in range(2))
        here = values.untyped_storage().data_ptr()
        free = next(blocks for blocks in self.sets if blocks.untyped_storage().data_ptr() != here)
        sweep = Sweep.of(channels, point, last, ridge, shift, free.unbind())
        return sweep, sweep.numbers.tolist()


def _turn(step: Direction, last: Direction) -> Tensor:
    """Weight of the last direction in the next one (Polak-Ribière); 0 restarts."""
    weight = (step.dot(step) - step.dot(last)) / last.dot(last)
    return weight.clamp(0.0, LARGEST_TURN)
