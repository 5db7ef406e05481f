"""`collab-results`: tables of what experiments found."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from collab_compress_cli.command import table
from collab_compress_cli.model import check_outputs

from collab_compress.checkpoint.files import atomic_file, mapped, to_json
from collab_compress.errors import RecipeError

from ..experiments.comparison import compare
from ..experiments.outputs import finite_or_none, read_records, record_lines
from ..experiments.results import read_results
from .arguments import ResultsArguments as Arguments
from .tables import comparison_blocks, csv_text, to_markdown


def run(arguments: Arguments) -> None:
    """Read, compare, and print or write."""
    check_outputs({f"--{name}": getattr(arguments, name) for name in ("output", "json", "records")})
    if not arguments.records_in:
        raise RecipeError("no results: give a folder with the outputs of experiments, or a file of records")
    comparison = compare(read_results(*arguments.records_in), arguments.against)
    blocks, lines = comparison_blocks(comparison), comparison.lines
    text = f"{to_markdown(blocks)}\n" if arguments.format == "markdown" else csv_text(lines)
    contents = {
        arguments.output: text,
        arguments.json: to_json(mapped(finite_or_none, lines)),
        arguments.records: gather(arguments.records_in),
    }
    with ExitStack() as files:  # all of them are written, or none
        for path, content in contents.items():
            if path is not None:
                files.enter_context(atomic_file(path)).write_text(content, encoding="utf-8")
    if arguments.output is not None or arguments.quiet:
        return
    if arguments.format == "csv" or not sys.stdout.isatty():
        print(text, end="")
        return
    for block in blocks:
        print(*([block] if isinstance(block, str) else table(block.header, block.rows, block.text_columns)), sep="\n")


def gather(paths: Sequence[Path]) -> str:
    """Return the records of all paths, one a line."""
    records: dict[str, dict[str, Any]] = {}
    for path in paths:
        records |= read_records(path)
    lines = []
    for record in records.values():
        environment = record.get("environment", {})
        revision = environment.get("revision") or "unknown"
        lines.append(record | {"environment": environment | {"revision": revision}})
    return record_lines(lines)
