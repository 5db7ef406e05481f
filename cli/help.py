"""Help of a command: what its parser prints."""

import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from shutil import get_terminal_size
from types import ModuleType

from .command import arguments_of, parse

WIDTH = min(100, get_terminal_size().columns)
fill = partial(textwrap.fill, width=WIDTH, break_on_hyphens=False, break_long_words=False)


def help_text(name: str, arguments: ModuleType) -> str:
    """Return the help of a command, as wide as the terminal, at most 100 columns.

    Args:
        name: of the command.
        arguments: module with the dataclass of its arguments.
    """
    arguments_class = arguments_of(name, arguments)
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        parse(arguments_class, name, ["--help"])
    text = re.sub(r"-options options", " options", printed.getvalue().strip())
    return "\n".join(_filled([line.rstrip() for line in text.splitlines()]))


def _filled(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a help text, rewrapped: the parser keeps the line breaks of docstrings."""
    column = max(len(line) - len(line.lstrip()) for line in lines)  # where descriptions begin
    indent = " " * column
    start, words = indent, list[str]()
    for line in [*lines, ""]:
        if words and not line.startswith(indent):
            yield fill(" ".join(words), initial_indent=start, subsequent_indent=indent)
            start, words = indent, []
        if line[column - 2 : column] != "  " or not line[column:]:
            yield line if line.startswith(" ") else fill(line)
            continue
        if not words:
            start = line[:column]
        words.append(line[column:])
