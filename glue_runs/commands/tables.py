"""Tables of results: Markdown to read, and one line for each number as CSV and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from ..experiments.comparison import Comparison, Line
from ..experiments.results import Column

FIELDS = (
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


def comparison_blocks(comparison: Comparison) -> list[str | Grid]:
    """Return scores, differences and notes."""
    names = ["model", "method", "stage"]
    blocks: list[str | Grid] = [
        "Mean ± sample standard deviation over seeds (number of seeds).",
        _make_grid(comparison.lines, [*names, MILLIONS], comparison.columns, _format_score, "lower"),
    ]
    if differences := [line for line in comparison.lines if "difference" in line]:
        blocks += [
            f"Difference to {comparison.reference} of the same model, task and seed: mean ± half of its "
            "95 % t-interval (number of pairs).",
            _make_grid(differences, names, comparison.columns, _format_difference, "negative"),
        ]
    if comparison.notes:
        blocks.append("\n".join(f"* {note}." for note in comparison.notes))
    return blocks


def _make_grid(
    lines: Sequence[Line], names: Sequence[str], columns: Sequence[Column], cell: Callable[[Line], str], better: str
) -> Grid:
    """Return a table with a row for each combination of names, and a column for each task."""
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for line in lines:
        count = line["parameters"]
        row = {**line, MILLIONS: "" if count is None else f"{count / 1e6:.2f}"}
        cells.setdefault(tuple(row[name] for name in names), {})[line["task"]] = cell(line)
    header = list(names)
    for column in columns:
        direction = "" if column.greater_is_better else f", {better} is better"
        header.append(f"{column.name} ({column.metric}{direction})")
    rows = [[*key, *(scores.get(column.name, "") for column in columns)] for key, scores in cells.items()]
    return Grid(header, rows, text_columns=len(names) - (MILLIONS in names))


def _format_score(line: Line) -> str:
    spread = "" if line["sd"] is None else f" ± {line['sd']:.2f}"
    return f"{line['mean']:.2f}{spread} ({line['n']})"


def _format_difference(line: Line) -> str:
    spread = f" ± {line['difference'] - line['low']:.2f}" if "low" in line else ""
    pairs = f" ({line['pairs']})" if "pairs" in line else ""
    return f"{line['difference']:+.2f}{spread}{pairs}"


def csv_text(lines: Sequence[Line]) -> str:
    """Return lines as CSV with the columns `FIELDS`."""
    text: str = pd.DataFrame(lines, columns=FIELDS, dtype=object).to_csv(index=False, lineterminator="\n")
    return text
