"""Tables of results: Markdown to read, and one line for each number as CSV and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import pandas as pd

from ..experiments.comparison import AVERAGE, REFERENCE, Comparison, Line
from ..experiments.papers import PaperRow, PaperTable
from ..experiments.results import Column

FIELDS = (
    "from",
    "model",
    "method",
    "stage",
    "parameters",
    "task",
    "metric",
    "greater_is_better",
    "mean",
    "sd",
    "n",
    "reference",
    "difference",
    "low",
    "high",
    "pairs",
    "printed",
)
"""Columns of the CSV, and fields of the JSON."""
MILLIONS = "parameters (M)"


@dataclass(frozen=True)
class Grid:
    """A table whose first columns hold text, and whose other columns hold numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int

    def markdown(self) -> str:
        """Return the table in Markdown, with aligned columns."""
        lines = [[cell.replace("|", "\\|") for cell in line] for line in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rule = ["-" * width for width in widths[: self.text_columns]]
        rule += ["-" * (width - 1) + ":" for width in widths[self.text_columns :]]
        return "\n".join(self._line(line, widths) for line in (lines[0], rule, *lines[1:]))

    def _line(self, line: Sequence[str], widths: Sequence[int]) -> str:
        cells = [
            cell.ljust(width) if column < self.text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"


def to_markdown(blocks: Iterable[str | Grid]) -> str:
    """Return texts and tables as one page of Markdown, without a final newline."""
    return "\n\n".join(block if isinstance(block, str) else block.markdown() for block in blocks)


def comparison_blocks(comparison: Comparison, papers: Sequence[PaperTable]) -> list[str | Grid]:
    """Return scores, differences and notes, with the papers' rows on the same tasks below ours."""
    lines = comparison_lines(comparison, papers)
    differences = [line for line in lines if "difference" in line]
    names = [*(["from"] if papers else []), "model", "method", "stage"]
    about = " A paper's number is the mean of the two it prints for a task with two metrics." if papers else ""
    blocks: list[str | Grid] = [
        f"Mean ± sample standard deviation over seeds (number of seeds).{about}",
        _grid(lines, [*names, MILLIONS], comparison.columns, _score, "lower"),
    ]
    if differences:
        has_papers = any(line["from"] != "ours" for line in differences)
        about = " A paper's is to the baseline of its table." if has_papers else ""
        blocks += [
            f"Difference to {comparison.reference} of the same model, task and seed: mean ± half of its "
            f"95 % t-interval (number of pairs).{about}",
            _grid(differences, names, comparison.columns, _difference, "negative"),
        ]
    notes = [f"{note}." for note in comparison.notes] + list(map(_conditions, papers))
    if notes:
        blocks.append("\n".join(f"* {note}" for note in notes))
    return blocks


def scores_blocks(comparison: Comparison) -> list[str | Grid]:
    """Return scores alone, without the columns, and the number of seeds, that are the same in all rows."""
    names = [name for name in ("model", "method", "stage") if len({line[name] for line in comparison.lines}) > 1]
    grid = _grid(comparison.lines, names or ["method"], comparison.columns, _score, "lower")
    counts = {line["n"] for line in comparison.lines}
    if len(counts) > 1:
        return [grid]
    (count,) = counts
    rows = [[cell.removesuffix(f" ({count})") for cell in row] for row in grid.rows]
    return [f"{count} seed{'s' * (count > 1)}:", replace(grid, rows=rows)]


def _grid(
    lines: Sequence[Line], names: Sequence[str], columns: Sequence[Column], cell: Callable[[Line], str], better: str
) -> Grid:
    """Return a table with a row for each combination of names, and a column for each task."""
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for line in lines:
        row = {**line, MILLIONS: _millions(line)}
        cells.setdefault(tuple(row[name] for name in names), {})[line["task"]] = cell(line)
    header = list(names)
    for column in columns:
        direction = "" if column.greater_is_better else f", {better} is better"
        header.append(f"{column.name} ({column.metric}{direction})")
    rows = [[*key, *(scores.get(column.name, "") for column in columns)] for key, scores in cells.items()]
    return Grid(header, rows, text_columns=len(names) - (MILLIONS in names))


def _millions(line: Line) -> str:
    count = line["parameters"]
    if count is None:
        return ""
    return f"{count / 1e6:.2f}" if line["from"] == "ours" else str(Decimal(count) / 1_000_000)


def _score(line: Line) -> str:
    if line["from"] != "ours":
        return f"{line['mean']:.2f}" if line["task"] == AVERAGE else str(line["mean"])
    spread = "" if line["sd"] is None else f" ± {line['sd']:.2f}"
    return f"{line['mean']:.2f}{spread} ({line['n']})"


def _difference(line: Line) -> str:
    spread = f" ± {line['difference'] - line['low']:.2f}" if "low" in line else ""
    pairs = f" ({line['pairs']})" if "pairs" in line else ""
    return f"{line['difference']:+.2f}{spread}{pairs}"


def papers_blocks(tables: Sequence[PaperTable]) -> Iterator[str | Grid]:
    """Yield the papers' tables as printed."""
    for table in tables:
        columns = [f"{name} ({metric})" for name, metric in table.columns.items()]
        header = ["model", "method", "stage", MILLIONS, *columns, "average"]
        rows = [
            [row.model, row.method, row.stage, _text(row.parameters)]
            + [_printed(row, column) for column in table.columns]
            + [_text(row.average)]
            for row in table.rows
        ]
        used = [column for column in range(len(header)) if any(row[column] for row in rows)]
        header, *rows = ([line[column] for column in used] for line in (header, *rows))
        yield _conditions(table)
        yield Grid(header, rows, text_columns=sum(column < 3 for column in used))


def _printed(row: PaperRow, column: str) -> str:
    return "/".join(map(str, row.scores.get(column, ())))


def _text(number: Decimal | None) -> str:
    return "" if number is None else str(number)


def _conditions(table: PaperTable) -> str:
    """Return a table's source, the conditions of its numbers, and doubts about them."""
    doubt = f" **But:** {table.note}" if table.note else ""
    return f"{table.place} (“{table.title}”, {table.source}): {table.about}{doubt}"


def comparison_lines(comparison: Comparison, papers: Sequence[PaperTable]) -> list[Line]:
    """Return our scores, as `compare` does, then the papers' scores on the same tasks."""
    lines = list(comparison.lines)
    for table in papers:
        for row in table.rows:
            lines += _beside_ours(table, row, comparison)
    return lines


def papers_lines(tables: Sequence[PaperTable]) -> list[Line]:
    """Return the papers' numbers; `mean` averages the two that are printed for a task with two metrics."""
    return [
        _paper_line(table, row, column, row.score(column))
        for table in tables
        for row in table.rows
        for column in row.scores
    ]


def _beside_ours(table: PaperTable, row: PaperRow, comparison: Comparison) -> list[Line]:
    """Return a paper's numbers in our columns; its average is over the tasks of our results.

    Differences are to the baseline of the paper's table, but only if ours are to plain fine-tuning.
    """
    base = table.baseline(row) if comparison.reference == REFERENCE else None
    tasks = [column.name for column in comparison.columns if column.name != AVERAGE]
    lines = []
    for column in comparison.columns:
        mean = _number(row, column.name, tasks)
        baseline = None if base is None else _number(base, column.name, tasks)
        if mean is None:
            continue
        line = _paper_line(table, row, column.name, mean)
        line["metric"] = table.columns.get(column.name, column.metric)
        line["greater_is_better"] = column.greater_is_better
        if baseline is not None:
            line["difference"] = mean - baseline
        lines.append(line)
    return lines


def _number(row: PaperRow, column: str, tasks: Sequence[str]) -> Decimal | None:
    return row.mean(tasks) if column == AVERAGE else row.score(column)


def _paper_line(table: PaperTable, row: PaperRow, column: str, mean: Decimal | None) -> Line:
    line = {
        "from": table.place,
        "model": row.model,
        "method": row.method,
        "stage": row.stage,
        "parameters": None if row.parameters is None else int(row.parameters * 1_000_000),
        "task": column,
        "metric": table.columns.get(column),
        "mean": mean,
    }
    return {**line, "printed": _printed(row, column)} if column in row.scores else line


def plain(value: Any) -> Any:
    """Return a value for JSON: decimals become floats, and numbers that are not finite None."""
    number = float(value) if isinstance(value, Decimal) else value
    return None if isinstance(number, float) and not math.isfinite(number) else number


def csv_text(lines: Sequence[Line]) -> str:
    """Return lines as CSV with the columns `FIELDS`."""
    text: str = pd.DataFrame(lines, columns=FIELDS, dtype=object).to_csv(index=False, lineterminator="\n")
    return text
