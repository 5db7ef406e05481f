"""Forward passes of several batches that stop at the same places, so that a layer can be fitted on all of them.

Each pass runs in a thread of its own, one thread at a time, and keeps what it has computed while it waits. So a
change of its hidden states at one place is seen by everything behind it, in one pass of the data over the whole
model, whatever its architecture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

_passing = threading.local()


class _Ended(BaseException):
    """Raised in a pass that is not wanted any more."""


class Pass:
    """A forward pass that can be stopped by a hook.

    Attributes:
        at: what the hook said when the pass stopped; None before the first stop and once it is done.
        notes: whatever hooks keep for this pass.
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        self.at: Any = None
        self.notes: dict[Any, Any] = {}
        self._run = run
        self._error: BaseException | None = None
        self._ended = self._done = False
        self._mine, self._others = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._pass, daemon=True)

    def _pass(self) -> None:
        _passing.current = self
        self._mine.acquire()
        try:
            if not self._ended:
                self._run()
        except _Ended:
            pass
        except BaseException as error:  # raised again where the pass is waited for
            self._error = error
        self.at, self._done = None, True
        self._others.release()

    def go_on(self) -> None:
        """Run to the next stop, or to the end.

        Raises:
            BaseException: what the forward pass raises.
        """
        if self._done:
            return
        if self._thread.ident is None:
            self._thread.start()
        self._mine.release()
        self._others.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def stop(self, at: Any) -> None:
        """Wait here until the pass is to go on; called in its own thread."""
        self.at = at
        self._others.release()
        self._mine.acquire()
        if self._ended:
            raise _Ended

    def end(self) -> None:
        """End the pass where it is."""
        self._ended = True
        if self._thread.ident is not None:
            self._mine.release()
            self._thread.join()


def current_pass() -> Pass | None:
    """Return the pass that runs in this thread, if one does."""
    return getattr(_passing, "current", None)


class Passes:
    """Forward passes of several batches, side by side; leaving the context ends them.

    Args:
        runs: each runs the model on one batch.
    """

    def __init__(self, runs: Sequence[Callable[[], Any]]) -> None:
        self.all = [Pass(run) for run in runs]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.all:
            each.end()

    def go_on(self) -> list[Any]:
        """Run all to their next stop, one after the other, and return where each is; None where it is done."""
        for each in self.all:
            each.go_on()
        return [each.at for each in self.all]
