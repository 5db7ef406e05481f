"""Render the help of every command into `help_texts`, so that `--help` needs no large library: `make help-texts`."""

import ast
import inspect
import io
import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

from .start import COMMANDS

WIDTH = 100
fill = partial(textwrap.fill, width=WIDTH, break_on_hyphens=False, break_long_words=False)
TEXTS = Path(__file__).parent / "help_texts"


def main() -> None:
    """Write the help of every command."""
    TEXTS.mkdir(exist_ok=True)
    for name in COMMANDS:
        (TEXTS / f"{name}.txt").write_text(rendered(name), encoding="utf-8")


def rendered(name: str) -> str:
    """Give what a command's parser prints for `--help`, and all fields where it reads a recipe or a sweep."""
    module = import_module(f".{COMMANDS[name]}", __package__)
    told = io.StringIO()
    with _terminal(), redirect_stdout(told), suppress(SystemExit):
        module.main(["--help"])
    lines = [line.rstrip() for line in told.getvalue().strip().splitlines()]
    return "\n".join([*_filled(lines), *_further(name)]) + "\n"


def _filled(lines: Sequence[str]) -> Iterator[str]:
    """Fill again what is said of each option: the parser breaks lines where its docstring does, too."""
    column = max(len(line) - len(line.lstrip()) for line in lines)  # where options are told
    before, said = " " * column, list[str]()
    for line in [*lines, ""]:
        if said and not line.startswith(" " * column):
            yield fill(" ".join(said), initial_indent=before, subsequent_indent=" " * column)
            before, said = " " * column, []
        if line[column - 2 : column] == "  " and line[column:].strip():
            before, said = (line[:column], [line[column:]]) if not said else (before, [*said, line[column:]])
        else:
            yield line


def _further(name: str) -> Iterator[str]:
    from collab_compress.experiments import Recipe, Sweep

    described = {"collab-run": Recipe, "collab-sweep": Sweep}.get(name)
    if described is not None:
        yield "fields of a recipe:" if described is Recipe else "fields of a sweep:"
        yield from _fields(described)
        if described is Sweep:
            yield ""
            yield "fields of base, tasks, methods and conversions are those of a recipe: collab-run --help"


def _fields(described: Any, before: str = "") -> Iterator[str]:
    """Describe the fields of a dataclass, and of those in it, from the strings that stand below them."""
    words, types = _docstrings(described), get_type_hints(described)
    for field in fields(described):
        name = f"{before}{field.name}"
        nested = next(
            (kind for kind in (types[field.name], *get_args(types[field.name])) if is_dataclass(kind)), None
        )
        told = f"  {name}  {words.get(field.name, '')}{_default(field)}"
        yield fill(told, subsequent_indent=" " * 6)
        if nested is not None:
            yield from _fields(nested, f"{name}.")


def _default(field: "Field[Any]") -> str:
    if field.default is MISSING:
        return " (required)" if field.default_factory is MISSING else ""
    if field.default is None:
        return ""
    return f" (default: {field.default})"


def _docstrings(described: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for owner in reversed(described.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
        for one, other in pairwise(body):
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(other, ast.Expr):
                with suppress(ValueError):
                    found[one.target.id] = " ".join(str(ast.literal_eval(other.value)).split())
    return found


class _terminal:
    """A terminal of a fixed width and without colours, whatever this one is."""

    def __enter__(self) -> None:
        wanted = {"COLUMNS": str(WIDTH), "LINES": "50", "NO_COLOR": "1", "TERM": "dumb"}
        self.before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)

    def __exit__(self, *_: object) -> None:
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


if __name__ == "__main__":
    main()
