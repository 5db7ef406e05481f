"""Layers that are solved together: their runs meet at each sweep, and those of one shape make it as one.

On an accelerator one layer's matrices are too small to keep it busy, and it is waited for after each sweep. Together,
products and Cholesky factorizations are batched and all numbers are read at once; all else is each run's own: its
steps, its ridge and shift, how many components it has, its dtype and its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Condition

import torch
from torch import Tensor

from collab_compress.factorization.iterate import Channels, Direction, Iterate
from collab_compress.factorization.line_search import Line
from collab_compress.factorization.sweep import Last, Sweep, Sweeper

PATIENCE = 0.1  # seconds after which a run that waits looks whether it is to go on


@dataclass(frozen=True)
class Asked:
    """A sweep that a run waits for; fields as for `Sweep.of`."""

    channels: Channels
    point: Iterate
    last: Last | None
    ridge: float
    shift: float

    @property
    def shape(self) -> tuple[object, ...]:
        """What sweeps have in common that are made as one."""
        values, channels = self.point.values, self.channels
        sides = channels.query.shape, channels.key.shape, channels.heads
        return values.shape, values.dtype, values.device, *sides, self.last is None


class Together:
    """Where runs in threads of their own meet, each of which works only while all others wait.

    So it does not matter which is faster, and libraries that cannot begin in two threads at once need not.

    Args:
        count: how many runs there will be.
        width: how many threads there are for them; each that is free begins another run.
        check: called while a run waits; what it raises ends the run.
    """

    def __init__(self, count: int, width: int, check: Callable[[], None]) -> None:
        self.left, self.width, self.check = count, width, check
        self.turn = Condition()
        self.asked: dict[int, Asked] = {}
        self.answers: dict[int, tuple[Sweep, list[float]] | Exception] = {}
        self.stacked: dict[tuple[Channels, ...], Channels] = {}  # of the last sweep

    @contextmanager
    def run(self, place: int) -> Iterator[Sweeper]:
        """Begin a run once all others wait, and let it go at the end; gives what makes its sweeps.

        Args:
            place: the run's number.
        """
        with self.turn:
            try:
                self.check()
                yield partial(self._sweep, place)
            finally:
                self.left -= 1
                self.asked.pop(place, None)
                self._meet()

    def _sweep(
        self, place: int, channels: Channels, point: Iterate, last: Last | None, ridge: float, shift: float
    ) -> tuple[Sweep, list[float]]:
        """Wait until every run has asked for a sweep, or ended, and give this run its own."""
        self.asked[place] = Asked(channels, point, last, ridge, shift)
        self._meet()
        while place not in self.answers:
            self.turn.wait(PATIENCE)
            self.check()
        answer = self.answers.pop(place)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _meet(self) -> None:
        """Make the sweeps that were asked for, if no other run is to ask; an error is that of all."""
        if not self.asked or len(self.asked) < min(self.width, self.left):
            return
        try:
            self.answers.update(self._sweeps())
        except Exception as error:
            self.answers.update(dict.fromkeys(self.asked, error))
        self.asked = {}
        self.turn.notify_all()

    def _sweeps(self) -> Iterator[tuple[int, tuple[Sweep, list[float]]]]:
        """Make sweeps of one shape as one, and read the numbers of all at once."""
        shapes: dict[tuple[object, ...], dict[int, Asked]] = {}
        for place in sorted(self.asked):
            shapes.setdefault(self.asked[place].shape, {})[place] = self.asked[place]
        groups = {tuple(one.channels for one in group.values()): group for group in shapes.values()}
        self.stacked = {layers: self.stacked.get(layers) or Channels.stacked(layers) for layers in groups}
        sweeps: dict[int, Sweep] = {}
        for layers, group in groups.items():
            sweeps.update(zip(group, _parted(self.stacked[layers], list(group.values())), strict=True))
        device = next(iter(sweeps.values())).numbers.device
        numbers = torch.stack([sweep.numbers.to(device) for sweep in sweeps.values()]).tolist()
        return zip(sweeps, zip(sweeps.values(), numbers, strict=True), strict=True)


def _parted(channels: Channels, asked: Sequence[Asked]) -> Iterator[Sweep]:
    """Make sweeps of one shape as one, with the run as the first dimension, and give each run its part."""

    def stacked(directions: Sequence[Direction]) -> Direction:
        return Direction(torch.stack([each.values for each in directions]), channels.heads)

    def column(numbers: Sequence[float]) -> Tensor:  # filled where it is: a copy to a device would wait for that
        return torch.stack([point.values.new_full((1,), number, dtype=torch.float64) for number in numbers])

    points = [one.point for one in asked]
    point = Iterate(stacked(points).values, channels.heads, torch.stack([each.grams for each in points]))
    lasts = [one.last for one in asked if one.last is not None]
    last = (stacked([step for step, _ in lasts]), stacked([taken for _, taken in lasts])) if lasts else None
    ridge, shift = column([one.ridge for one in asked]), column([one.shift for one in asked])
    found = Sweep.of(channels, point, last, ridge, shift)
    line = found.line
    for place, one in enumerate(asked):
        swept, step, direction = (
            Direction(each.values[place], each.heads) for each in (found.swept, found.step, line.direction)
        )
        own = Line(one.point, direction, line.grams[place], line.squared[place], line.penalty[place])
        yield Sweep(swept, step, own, found.numbers[place])
