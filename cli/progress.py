"""What a command is doing, on standard error: a bar on a terminal, elsewhere a line for each step."""

import os
import sys
from contextlib import suppress
from time import monotonic
from typing import Any

EVERY = 5.0  # seconds after which a step that goes on has another line


class Progress:
    """Shows the steps of a command that runs as a process of its own; nothing before `begin`."""

    def __init__(self) -> None:
        self._name = self._step = ""
        self._bar: Any = None
        self._started = self._printed = 0.0

    def begin(self, name: str) -> None:
        """Show the steps of a command from now on; of several processes, the main one does."""
        if os.environ.get("RANK", "0") == "0":
            self._name, self._started = name, monotonic()

    def __call__(self, step: str, done: int = 0, total: int | None = None) -> None:
        """Show a step, as "fitting encoder.layer.0", of which `done` parts of `total` are finished."""
        if not self._name:
            return
        if sys.stderr.isatty():
            self._draw(step, done, total)
            return
        now = monotonic()
        if step != self._step or now - self._printed >= EVERY:
            self._step, self._printed = step, now
            count = "" if total is None else f" ({done} of {total} done)"
            with suppress(OSError):
                print(f"{self._name}: {now - self._started:.0f} s: {step}{count}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Close the bar, and those of libraries, so that a line can be printed; the next step draws another."""
        self._bar = None
        for bar in list(getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())):
            bar.close()

    def _draw(self, step: str, done: int, total: int | None) -> None:
        from tqdm import tqdm

        if self._bar is None or done < self._bar.n or total != self._bar.total:  # other work begins
            self.clear()
            drawn = "{desc}" if total is None else "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"
            self._bar = tqdm(desc=step, initial=done, total=total, leave=False, bar_format=drawn + " [{elapsed}]")
        elif step != self._step:
            self._bar.set_description_str(step)
        self._step = step
        self._bar.update(done - self._bar.n)


progress = Progress()
"""Of this process."""
