"""`collab-results`: a table of what experiments found, with the papers' numbers beside it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from collab_compress.checkpoint.directory import refuse_place, write_new
from collab_compress.errors import RecipeError
from collab_compress.experiments.comparison import compare
from collab_compress.experiments.papers import read_papers, select_tables
from collab_compress.experiments.record import read_records, write_records
from collab_compress.experiments.results import read_results

from .command import parse, stopping_in_one_line
from .results_csv import comparison_csv, papers_csv
from .results_markdown import comparison_markdown, papers_markdown


@dataclass(frozen=True)
class Arguments:
    """Put the results of experiments into a table: means over seeds, and differences paired by seed with t-intervals.

    Examples:
      collab-results outputs/glue
      collab-results outputs/glue --papers --output RESULTS.md
      collab-results outputs/glue --against drophead/tuned --format csv
      collab-results outputs/glue --records glue.jsonl
      collab-results glue.jsonl
      collab-results outputs/glue --paper collaborate --table 2
      collab-results --paper diversity
    """

    folder: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="PATH")] = None
    """Folder with the outputs of experiments, at any depth, or a file of records; without it the papers' tables are
    printed as they are."""

    against: Annotated[str | None, tyro.conf.arg(metavar="METHOD/STAGE")] = None
    """What the others are compared with; plain/tuned, or plain/given where nothing was tuned, if not given."""

    papers: bool = False
    """Show the papers' numbers on the same tasks."""

    paper: Annotated[str | None, tyro.conf.arg(metavar="KEY")] = None
    """Of this paper only: collaborate, rotation, diversity, bhattacharyya or drophead."""

    table: Annotated[str | None, tyro.conf.arg(metavar="N")] = None
    """Of this table only: 2, or "Figure 3"."""

    format: Literal["markdown", "csv"] = "markdown"
    """Tables to read, or a line for each number."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write there instead of printing; must not exist."""

    records: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the folder's records there, one a line, to be read in its place; must not exist."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; errors are one line on standard error and exit code 2."""
    with stopping_in_one_line("collab-results"):
        run(parse(Arguments, "collab-results", argv))


def run(arguments: Arguments) -> None:
    """Read, compare and print or write."""
    for place in (arguments.output, arguments.records):
        if place is not None:
            refuse_place(place)
    chosen = arguments.paper is not None or arguments.table is not None
    tables = select_tables(read_papers(), arguments.paper, arguments.table) if arguments.papers or chosen else []
    if arguments.folder is None:
        if not tables or arguments.against is not None or arguments.records is not None:
            raise RecipeError("no results: give a folder with the outputs of experiments, or --papers alone")
        text = papers_markdown(tables) if arguments.format == "markdown" else papers_csv(tables)
    else:
        comparison = compare(read_results(arguments.folder), arguments.against)
        if arguments.records is not None:
            write_records(read_records(arguments.folder).values(), arguments.records)
        names = [column.name for column in comparison.columns]
        shown = [table for table in tables if table.rows_for(names)]
        if tables and not shown:
            missing = f"no table of the papers that was asked for has {' or '.join(names)}"
            if chosen:
                raise RecipeError(f"{missing}; leave the folder out to print what they have")
            print(f"collab-results: {missing}", file=sys.stderr)
        render = comparison_markdown if arguments.format == "markdown" else comparison_csv
        text = render(comparison, shown)
    if arguments.output is None:
        _print(text)
    else:
        write_new(arguments.output, text)


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise RecipeError(f"cannot print: {error.strerror}") from error


if __name__ == "__main__":
    main()
