"""`collab-results`: a table of what experiments found, with the papers' numbers beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from .arguments import ResultsArguments as Arguments
from .command import parse, stopping_in_one_line, table

if TYPE_CHECKING:
    from .tables import Grid


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; errors are one line on standard error and exit code 2."""
    with stopping_in_one_line("collab-results"):
        run(parse(Arguments, "collab-results", argv))


def run(arguments: Arguments) -> None:
    """Read, compare and print or write."""
    from collab_compress.checkpoint.directory import atomic_file, to_json
    from collab_compress.errors import RecipeError
    from collab_compress.experiments.comparison import compare
    from collab_compress.experiments.record import read_records, record_lines
    from collab_compress.experiments.results import read_papers, read_results, select_tables

    from .outputs import check_editable, check_outputs, edit
    from .tables import (
        comparison_blocks,
        comparison_lines,
        csv_text,
        papers_blocks,
        papers_lines,
        plain,
        significance_blocks,
        to_markdown,
    )

    paths = arguments.records_in
    if arguments.significance and (len(paths) != 1 or arguments.format == "csv"):
        raise RecipeError("--significance makes a table to read of a folder's translations; give one, and no csv")
    check_outputs({f"--{name}": getattr(arguments, name) for name in ("output", "json", "records", "pages")})
    if arguments.markdown is not None:
        check_editable(arguments.markdown)
    chosen = arguments.paper is not None or arguments.table is not None
    tables = select_tables(read_papers(), arguments.paper, arguments.table) if arguments.papers or chosen else []
    if not paths:
        of_results = (arguments.against, arguments.records, arguments.pages, arguments.markdown)
        if not tables or any(option is not None for option in of_results):
            raise RecipeError("no results: give a folder with the outputs of experiments, or --papers alone")
        lines, blocks = papers_lines(tables), list(papers_blocks(tables))
    else:
        results = read_results(*paths)
        comparison = compare(results, arguments.against)
        names = [column.name for column in comparison.columns]
        shown = [table for table in tables if table.rows_for(names)]
        if tables and not shown:
            missing = f"no table of the papers that was asked for has {' or '.join(names)}"
            if chosen:
                raise RecipeError(f"{missing}; leave the folder out to print what they have")
            print(f"collab-results: {missing}", file=sys.stderr)
        lines, blocks = comparison_lines(comparison, shown), comparison_blocks(comparison, shown)
        if arguments.significance:
            blocks += significance_blocks(paths[0], arguments.against)
        if arguments.markdown is not None:
            from .generated import regenerated

            page = regenerated(arguments.markdown, results)
    text = f"{to_markdown(blocks)}\n" if arguments.format == "markdown" else csv_text(lines)
    numbers = to_json([{name: plain(value) for name, value in line.items()} for line in lines])
    with ExitStack() as all_files:  # which are there when the last is written, or not at all
        contents = [(arguments.output, text), (arguments.json, numbers)]
        if arguments.records is not None:
            found = (record for path in paths for record in read_records(path).values())
            contents.append((arguments.records, record_lines(found)))
        for path, content in contents:
            if path is not None:
                all_files.enter_context(atomic_file(path)).write_text(content, encoding="utf-8")
        if arguments.pages is not None:
            from collab_compress.experiments.pages import write_pages

            write_pages(results, arguments.pages)
        if arguments.markdown is not None:
            edit(arguments.markdown, page)
    if arguments.output is None and not arguments.quiet:
        _print(blocks if arguments.format == "markdown" and sys.stdout.isatty() else [text])


def _print(blocks: Iterable[str | Grid]) -> None:
    for block in blocks:
        lines = [block.rstrip("\n")] if isinstance(block, str) else table(block.header, block.rows, block.words)
        print(*lines, sep="\n")


if __name__ == "__main__":
    main()
