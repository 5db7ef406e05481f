"""Tables of results, as text for people and as lines of CSV and JSON for programs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from collab_compress.experiments.comparison import AVERAGE, REFERENCE, Comparison, Line
from collab_compress.experiments.results import Column, PaperRow, PaperTable
from collab_compress.experiments.significance import significance

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
    """A table whose first `words` columns hold text, and whose other columns hold numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int

    def markdown(self) -> str:
        """Return the table in Markdown, with aligned columns."""
        lines = [[cell.replace("|", "\\|") for cell in line] for line in (self.header, *self.rows)]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        lines.insert(
            1, ["-" * width if place < self.words else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
        )
        return "\n".join(self._line(cells, widths) for cells in lines)

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        words = [cell.ljust(width) for cell, width in zip(cells[: self.words], widths, strict=False)]
        numbers = [cell.rjust(width) for cell, width in zip(cells[self.words :], widths[self.words :], strict=True)]
        return f"| {' | '.join(words + numbers)} |"


def to_markdown(blocks: Iterable[str | Grid]) -> str:
    """Return text and tables as one page of Markdown, without a newline at its end."""
    return "\n\n".join(block if isinstance(block, str) else block.markdown() for block in blocks)


def comparison_blocks(comparison: Comparison, papers: Sequence[PaperTable]) -> list[str | Grid]:
    """Format scores, differences and notes, with the papers' rows on the same tasks below ours."""
    lines = comparison_lines(comparison, papers)
    differences = [line for line in lines if "difference" in line]
    named = [*(["from"] if papers else []), "model", "method", "stage"]
    about = " A paper's number is the mean of the two it prints for a task with two metrics." if papers else ""
    blocks: list[str | Grid] = [
        f"Mean ± sample standard deviation over seeds (number of seeds).{about}",
        _grid(lines, [*named, MILLIONS], comparison.columns, _score, "lower"),
    ]
    if differences:
        theirs = any(line["from"] != "ours" for line in differences)
        about = " A paper's is to the baseline of its table." if theirs else ""
        blocks += [
            f"Difference to {comparison.reference} of the same model, task and seed: mean ± half of its "
            f"95 % t-interval (number of pairs).{about}",
            _grid(differences, named, comparison.columns, _difference, "negative"),
        ]
    if notes := [f"{note}." for note in comparison.notes] + list(map(_conditions, papers)):
        blocks.append("\n".join(f"* {note}" for note in notes))
    return blocks


def _grid(
    lines: Sequence[Line], named: Sequence[str], columns: Sequence[Column], cell: Callable[[Line], str], better: str
) -> Grid:
    """Return a table with a row for each name of lines, and a column for each task."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for line in lines:
        names = {**line, MILLIONS: _millions(line)}
        rows.setdefault(tuple(names[name] for name in named), {})[line["task"]] = cell(line)
    header = list(named)
    for column in columns:
        direction = "" if column.greater_is_better else f", {better} is better"
        header.append(f"{column.name} ({column.metric}{direction})")
    cells = [[*names, *(found.get(column.name, "") for column in columns)] for names, found in rows.items()]
    return Grid(header, cells, words=len(named) - (MILLIONS in named))


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
    """Format the papers' tables as they are printed."""
    for table in tables:
        columns = [f"{name} ({metric})" for name, metric in table.columns.items()]
        header = ["model", "method", "stage", MILLIONS, *columns, "average"]
        rows = [
            [row.model, row.method, row.stage, _text(row.parameters)]
            + [_printed(row, column) for column in table.columns]
            + [_text(row.average)]
            for row in table.rows
        ]
        used = [place for place in range(len(header)) if any(row[place] for row in rows)]
        filled = [[line[place] for place in used] for line in (header, *rows)]
        yield _conditions(table)
        yield Grid(filled[0], filled[1:], words=sum(place < 3 for place in used))


def _printed(row: PaperRow, column: str) -> str:
    return "/".join(map(str, row.scores.get(column, ())))


def _text(number: Decimal | None) -> str:
    return "" if number is None else str(number)


def _conditions(table: PaperTable) -> str:
    """Return a table's source, the conditions of its numbers, and what is doubtful about them."""
    doubts = f" **But:** {table.note}" if table.note else ""
    return f"{table.place} (“{table.title}”, {table.source}): {table.about}{doubts}"


def comparison_lines(comparison: Comparison, papers: Sequence[PaperTable]) -> list[Line]:
    """Return each of our scores, as `compare` does, then the papers' scores on the same tasks."""
    lines = list(comparison.lines)
    for table in papers:
        for row in table.rows:
            lines += _beside_ours(table, row, comparison)
    return lines


def papers_lines(tables: Sequence[PaperTable]) -> list[Line]:
    """Return the papers' numbers; `mean` averages the two that are printed for a task with two metrics."""
    lines = []
    for table in tables:
        for row in table.rows:
            lines += [_paper_line(table, row, column, row.score(column)) for column in row.scores]
    return lines


def _beside_ours(table: PaperTable, row: PaperRow, comparison: Comparison) -> list[Line]:
    """Return a paper's numbers in our columns; its average is over the tasks of our results.

    Differences are to the baseline of the paper's table, where ours are to plain fine-tuning too.
    """
    base = table.baseline(row) if comparison.reference == REFERENCE else None
    tasks = [column.name for column in comparison.columns if column.name != AVERAGE]
    lines = []
    for column in comparison.columns:
        mean = _number(row, column.name, tasks)
        before = None if base is None else _number(base, column.name, tasks)
        if mean is not None:
            line = _paper_line(table, row, column.name, mean)
            line |= {"metric": table.columns.get(column.name, column.metric)}
            line |= {"greater_is_better": column.greater_is_better}
            lines.append(line if before is None else {**line, "difference": mean - before})
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
    """Return a value for JSON: a decimal as a float, and None for a number that is not finite."""
    number = float(value) if isinstance(value, Decimal) else value
    return None if isinstance(number, float) and not math.isfinite(number) else number


def csv_text(lines: Iterable[Line]) -> str:
    """Return lines as CSV with the columns `FIELDS`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def significance_blocks(folder: Path, against: str | None) -> list[str | Grid]:
    """Compare the translations in a folder with those of a reference run, and format scores, differences and p."""
    compared = significance(folder, against)
    named = ["model", "method", "stage", "task", "split", "seed"]
    rows = []
    for line in compared:
        difference = "" if line["difference"] is None else f"{line['difference']:+.2f}"
        p = "" if line["p"] is None else f"{line['p']:.3f}"
        score = f"{line['score']:.2f} ± {line['interval']:.2f}"
        rows.append([*(str(line[name]) for name in named), score, difference, p])
    references = dict.fromkeys(line["reference"] for line in compared)
    signatures = dict.fromkeys(line["signature"] for line in compared)
    return [
        "BLEU ± half of its 95 % interval over resamples of the sentences, and the difference to "
        f"{' or '.join(references)} of the same model, task and seed with its p by paired bootstrap: chance in the "
        f"test set, not in training. sacreBLEU: {', '.join(signatures)}.",
        Grid([*named, "BLEU", "difference", "p"], rows, words=len(named)),
    ]
