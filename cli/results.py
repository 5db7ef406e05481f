"""`collab-results`: a table of what experiments found, with the papers' numbers beside it."""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from .arguments import ResultsArguments as Arguments
from .command import parse, stopping_in_one_line

if TYPE_CHECKING:  # what takes long to import is imported where it is used
    from collab_compress.experiments.comparison import Comparison, Estimate, Row
    from collab_compress.experiments.results import Column, PaperRow, PaperTable

FIELDS = (
    "from", "model", "method", "stage", "parameters", "task", "metric", "greater_is_better",
    "mean", "sd", "n", "reference", "difference", "low", "high", "pairs", "printed",
)  # fmt: skip
"""Columns of the CSV, and fields of the JSON."""
Line = dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """A table, of which the first columns hold `words`, and the others numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int

    def markdown(self) -> str:
        """Give the table in Markdown, with columns of one width."""
        lines = [[cell.replace("|", "\\|") for cell in line] for line in (self.header, *self.rows)]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        rule = ["-" * width if place < self.words else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
        padded = [
            [
                cell.ljust(width) if place < self.words else cell.rjust(width)
                for place, (cell, width) in enumerate(pairs)
            ]
            for pairs in (list(zip(line, widths, strict=True)) for line in lines)
        ]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (padded[0], rule, *padded[1:]))

    def draw(self) -> None:
        """Draw the table on the terminal, no wider than that is and with nothing cut."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
        for place, name in enumerate(self.header):
            drawn.add_column(name, justify="left" if place < self.words else "right", overflow="fold")
        for row in self.rows:
            drawn.add_row(*row)
        Console(markup=False, emoji=False, highlight=False).print(drawn)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; errors are one line on standard error and exit code 2."""
    with stopping_in_one_line("collab-results"):
        run(parse(Arguments, "collab-results", argv))


def run(arguments: Arguments) -> None:
    """Read, compare and print or write."""
    from collab_compress.checkpoint.directory import atomic_file, to_json
    from collab_compress.errors import RecipeError
    from collab_compress.experiments.comparison import compare
    from collab_compress.experiments.record import read_records, write_records
    from collab_compress.experiments.results import read_papers, read_results, select_tables

    from .outputs import check_editable, check_outputs, edit

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
        lines, blocks = _papers_lines(tables), list(_papers_blocks(tables))
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
        lines, blocks = _comparison_lines(comparison, shown), comparison_blocks(comparison, shown)
        if arguments.significance:
            from .significance import blocks as significance_blocks

            blocks += significance_blocks(paths[0], arguments.against)
        if arguments.markdown is not None:
            from .generated import regenerated

            page = regenerated(arguments.markdown, results)
    markdown = "\n\n".join(block if isinstance(block, str) else block.markdown() for block in blocks) + "\n"
    text = markdown if arguments.format == "markdown" else _csv(lines)
    numbers = to_json([{name: _plain(value) for name, value in line.items()} for line in lines])
    with ExitStack() as all_files:  # which are there when the last is written, or not at all
        for path, content in ((arguments.output, text), (arguments.json, numbers)):
            if path is not None:
                all_files.enter_context(atomic_file(path)).write_text(content, encoding="utf-8")
        if arguments.records is not None:
            records = all_files.enter_context(atomic_file(arguments.records))
            write_records((record for path in paths for record in read_records(path).values()), records)
        if arguments.pages is not None:
            from collab_compress.experiments.pages import write_pages

            write_pages(results, arguments.pages)
        if arguments.markdown is not None:
            edit(arguments.markdown, page)
    if arguments.output is None and not arguments.quiet:
        _print(blocks if arguments.format == "markdown" and sys.stdout.isatty() else [text])


def _print(blocks: Iterable[str | Grid]) -> None:
    try:
        for block in blocks:
            if isinstance(block, Grid):
                block.draw()
            else:
                print(block.rstrip("\n"))
        sys.stdout.flush()
    except BrokenPipeError:  # told by the exit code alone
        raise
    except OSError as error:
        from collab_compress.errors import RecipeError

        raise RecipeError(f"cannot write the output: {error.strerror}") from error


def comparison_blocks(comparison: Comparison, papers: Sequence[PaperTable]) -> list[str | Grid]:
    """Format scores, differences and notes, with the papers' rows on the same tasks below ours."""
    columns = comparison.columns
    header = [*(["from"] if papers else []), "model", "method", "stage"]
    words = len(header)
    rows = [[*_named(row, papers), _millions(row), *_scores(row, columns)] for row in comparison.rows]
    rows += [
        [table.place, row.model, row.method, row.stage, _text(row.parameters), *_paper_scores(row, comparison)]
        for table in papers
        for row in table.rows_for([column.name for column in columns])
    ]
    header += ["parameters (M)", *(_header(column, "lower") for column in columns)]
    blocks: list[str | Grid] = [
        "Mean ± sample standard deviation over seeds (number of seeds)." + _about_papers(papers),
        Grid(header, rows, words),
    ]
    differences = [
        [*_named(row, papers), *_differences(row, columns)] for row in comparison.rows if row.differences
    ] + _paper_differences(comparison, papers)
    if differences:
        header = [*header[:words], *(_header(column, "negative") for column in columns)]
        blocks += [
            f"Difference to {comparison.reference} of the same model, task and seed: mean ± half of its "
            "95 % t-interval (number of pairs)." + _about_differences(comparison, papers),
            Grid(header, differences, words),
        ]
    notes = [f"* {note}." for note in comparison.notes] + [f"* {_conditions(table)}" for table in papers]
    return [*blocks, *(["\n".join(notes)] if notes else [])]


def _papers_blocks(tables: Sequence[PaperTable]) -> Iterator[str | Grid]:
    """Format the papers' tables as they are printed."""
    for table in tables:
        columns = [f"{name} ({metric})" for name, metric in table.columns.items()]
        header = ["model", "method", "stage", "parameters (M)", *columns, "average"]
        rows = [
            [row.model, row.method, row.stage, _text(row.parameters), *_printed(row, table), _text(row.average)]
            for row in table.rows
        ]
        used = [place for place in range(len(header)) if any(row[place] for row in rows)]
        filled = [[line[place] for place in used] for line in (header, *rows)]
        yield _conditions(table)
        yield Grid(filled[0], filled[1:], words=sum(place < 3 for place in used))


def _paper_scores(row: PaperRow, comparison: Comparison) -> list[str]:
    """Give a paper's numbers in our columns; an average is over the tasks that we have, as ours is."""
    averages = [] if comparison.average is None else [_rounded(row.mean(comparison.tasks))]
    return [*(_text(row.score(task)) for task in comparison.tasks), *averages]


def _paper_differences(comparison: Comparison, papers: Sequence[PaperTable]) -> list[list[str]]:
    """Compare the papers' rows with the baselines of their own tables, where ours are compared with the baseline."""
    if not comparison.with_baseline:
        return []
    tasks = comparison.tasks
    lines = []
    for table in papers:
        for row in table.rows_for(tasks):
            if (base := table.baseline(row)) is None:
                continue
            changes = [_change(row.score(task), base.score(task)) for task in tasks]
            if comparison.average is not None:
                changes.append(_change(row.mean(tasks), base.mean(tasks)))
            if any(changes):
                lines.append([table.place, row.model, row.method, row.stage, *changes])
    return lines


def _named(row: Row, papers: Sequence[PaperTable]) -> list[str]:
    variant = row.variant
    return [*(["ours"] if papers else []), variant.model, variant.method, variant.stage]


def _scores(row: Row, columns: Sequence[Column]) -> list[str]:
    return [_cell(row.scores[column]) if column in row.scores else "" for column in columns]


def _differences(row: Row, columns: Sequence[Column]) -> list[str]:
    found = [row.differences.get(column) for column in columns]
    return ["" if one is None else _signed(one) for one in found]


def _cell(estimate: Estimate) -> str:
    spread = "" if estimate.deviation is None else f" ± {estimate.deviation:.2f}"
    return f"{estimate.mean:.2f}{spread} ({estimate.count})"


def _signed(difference: Estimate) -> str:
    spread = "" if difference.interval is None else f" ± {difference.interval:.2f}"
    return f"{difference.mean:+.2f}{spread} ({difference.count})"


def _header(column: Column, better: str) -> str:
    return f"{column.name} ({column.metric}{'' if column.greater_is_better else f', {better} is better'})"


def _millions(row: Row) -> str:
    return "" if row.parameters is None else f"{row.parameters / 1e6:.2f}"


def _printed(row: PaperRow, table: PaperTable) -> list[str]:
    return ["/".join(map(str, row.scores.get(column, ()))) for column in table.columns]


def _text(number: Decimal | None) -> str:
    return "" if number is None else str(number)


def _rounded(number: Decimal | None) -> str:
    return "" if number is None else f"{number:.2f}"


def _change(number: Decimal | None, base: Decimal | None) -> str:
    return "" if number is None or base is None else f"{number - base:+.2f}"


def _about_papers(papers: Sequence[PaperTable]) -> str:
    return " A paper's number is the mean of the two it prints for a task with two metrics." if papers else ""


def _about_differences(comparison: Comparison, papers: Sequence[PaperTable]) -> str:
    return " A paper's is to the baseline of its table." if _paper_differences(comparison, papers) else ""


def _conditions(table: PaperTable) -> str:
    """Say where a table is from, under what conditions, and what is doubtful about it."""
    doubts = f" **But:** {table.note}" if table.note else ""
    return f"{table.place} (“{table.title}”, {table.source}): {table.about}{doubts}"


def _comparison_lines(comparison: Comparison, papers: Sequence[PaperTable]) -> list[Line]:
    """Give each score with its difference to the reference, and the papers' on the same tasks below ours.

    `low` and `high` are the ends of the difference's 95 % t-interval. What is not there is left empty: the deviation
    and the interval of one seed, and differences that have no pair.
    """
    lines: list[Line] = []
    for row in comparison.rows:
        variant = row.variant
        named = {"from": "ours", "model": variant.model, "method": variant.method, "stage": variant.stage}
        for column in comparison.columns:
            if (score := row.scores.get(column)) is None:
                continue
            line = {
                **named, "parameters": row.parameters, "task": column.name, "metric": column.metric,
                "greater_is_better": column.greater_is_better,
                "mean": score.mean, "sd": score.deviation, "n": score.count,
            }  # fmt: skip
            if (difference := row.differences.get(column)) is not None:
                line |= {
                    "reference": row.reference, "difference": difference.mean, "pairs": difference.count,
                }  # fmt: skip
                if (half := difference.interval) is not None:
                    line |= {"low": difference.mean - half, "high": difference.mean + half}
            lines.append(line)
    for table in papers:
        for paper_row in table.rows_for([column.name for column in comparison.columns]):
            lines += _beside_ours(table, paper_row, comparison)
    return lines


def _papers_lines(tables: Sequence[PaperTable]) -> list[Line]:
    """Give the papers' numbers; `mean` is that of the two that are printed for a task with two metrics."""
    return [line for table in tables for row in table.rows for line in _paper_lines(table, row, list(table.columns))]


def _beside_ours(table: PaperTable, row: PaperRow, comparison: Comparison) -> list[Line]:
    """Give a paper's numbers in our columns; an average is over the tasks that we have, as ours is."""
    better = {column.name: column.greater_is_better for column in comparison.columns}
    lines = _paper_lines(table, row, comparison.tasks)
    average = comparison.average
    if average is not None and (mean := row.mean(comparison.tasks)) is not None:
        lines.append({**_paper_named(table, row), "task": average.name, "metric": average.metric, "mean": mean})
    return [{**line, "greater_is_better": better[line["task"]]} for line in lines]


def _paper_lines(table: PaperTable, row: PaperRow, columns: Sequence[str]) -> list[Line]:
    return [
        {
            **_paper_named(table, row), "task": column, "metric": table.columns[column], "mean": row.score(column),
            "printed": "/".join(map(str, row.scores[column])),
        }
        for column in columns
        if column in row.scores
    ]  # fmt: skip


def _paper_named(table: PaperTable, row: PaperRow) -> Line:
    parameters = None if row.parameters is None else int(row.parameters * 1_000_000)
    return {
        "from": table.place, "model": row.model, "method": row.method, "stage": row.stage, "parameters": parameters,
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """Give a number as JSON has it: null where it is not finite."""
    number = float(value) if isinstance(value, Decimal) else value
    return None if isinstance(number, float) and not math.isfinite(number) else number


def _csv(lines: Iterable[Line]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


if __name__ == "__main__":
    main()
