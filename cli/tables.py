"""Tables of results, as text for people and as lines of CSV and JSON for programs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what takes long to import is imported where it is used
    from collab_compress.experiments.comparison import Comparison, Estimate, Row
    from collab_compress.experiments.results import Column, PaperRow, PaperTable

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
Line = dict[str, Any]


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


def papers_blocks(tables: Sequence[PaperTable]) -> Iterator[str | Grid]:
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
    """Return a paper's numbers in our columns; its average is over the tasks of our results."""
    averages = [] if comparison.average is None else [_rounded(row.mean(comparison.tasks))]
    return [*(_text(row.score(task)) for task in comparison.tasks), *averages]


def _paper_differences(comparison: Comparison, papers: Sequence[PaperTable]) -> list[list[str]]:
    """Return the papers' differences to the baselines of their tables, where ours are to plain fine-tuning too."""
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
    return [_signed(row.differences[column]) if column in row.differences else "" for column in columns]


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
    """Return a table's source, the conditions of its numbers, and what is doubtful about them."""
    doubts = f" **But:** {table.note}" if table.note else ""
    return f"{table.place} (“{table.title}”, {table.source}): {table.about}{doubts}"


def comparison_lines(comparison: Comparison, papers: Sequence[PaperTable]) -> list[Line]:
    """Return each score with its difference to the reference, then the papers' scores on the same tasks.

    `low` and `high` are the ends of the difference's 95 % t-interval. With one seed `sd` is None, and there is no
    interval; a score without a pair has no difference. Fields that a score does not have are left out.
    """
    lines: list[Line] = []
    for row in comparison.rows:
        variant = row.variant
        named = {"from": "ours", "model": variant.model, "method": variant.method, "stage": variant.stage}
        for column in comparison.columns:
            if (score := row.scores.get(column)) is None:
                continue
            line = {
                **named,
                "parameters": row.parameters,
                "task": column.name,
                "metric": column.metric,
                "greater_is_better": column.greater_is_better,
                "mean": score.mean,
                "sd": score.deviation,
                "n": score.count,
            }
            if (difference := row.differences.get(column)) is not None:
                line |= {
                    "reference": row.reference,
                    "difference": difference.mean,
                    "pairs": difference.count,
                }
                if (half := difference.interval) is not None:
                    line |= {"low": difference.mean - half, "high": difference.mean + half}
            lines.append(line)
    for table in papers:
        for paper_row in table.rows_for([column.name for column in comparison.columns]):
            lines += _beside_ours(table, paper_row, comparison)
    return lines


def papers_lines(tables: Sequence[PaperTable]) -> list[Line]:
    """Return the papers' numbers; `mean` averages the two that are printed for a task with two metrics."""
    return [line for table in tables for row in table.rows for line in _paper_lines(table, row, list(table.columns))]


def _beside_ours(table: PaperTable, row: PaperRow, comparison: Comparison) -> list[Line]:
    """Return a paper's numbers in our columns; its average is over the tasks of our results."""
    better = {column.name: column.greater_is_better for column in comparison.columns}
    lines = _paper_lines(table, row, comparison.tasks)
    average = comparison.average
    if average is not None and (mean := row.mean(comparison.tasks)) is not None:
        lines.append({**_paper_named(table, row), "task": average.name, "metric": average.metric, "mean": mean})
    return [{**line, "greater_is_better": better[line["task"]]} for line in lines]


def _paper_lines(table: PaperTable, row: PaperRow, columns: Sequence[str]) -> list[Line]:
    return [
        {
            **_paper_named(table, row),
            "task": column,
            "metric": table.columns[column],
            "mean": row.score(column),
            "printed": "/".join(map(str, row.scores[column])),
        }
        for column in columns
        if column in row.scores
    ]


def _paper_named(table: PaperTable, row: PaperRow) -> Line:
    parameters = None if row.parameters is None else int(row.parameters * 1_000_000)
    return {
        "from": table.place,
        "model": row.model,
        "method": row.method,
        "stage": row.stage,
        "parameters": parameters,
    }


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
    from collab_compress.experiments.significance import significance

    compared = significance(folder, against)
    rows = []
    for run in compared:
        variant = run.variant
        difference = "" if run.difference is None else f"{run.difference:+.2f}"
        p = "" if run.p is None else f"{run.p:.3f}"
        labels = [variant.model, variant.method, variant.stage, run.column.name, run.split, str(run.seed)]
        rows.append([*labels, f"{run.score:.2f} ± {run.interval:.2f}", difference, p])
    references = dict.fromkeys(run.reference for run in compared)
    signatures = dict.fromkeys(run.signature for run in compared)
    return [
        "BLEU ± half of its 95 % interval over resamples of the sentences, and the difference to "
        f"{' or '.join(references)} of the same model, task and seed with its p by paired bootstrap: chance in the "
        f"test set, not in training. sacreBLEU: {', '.join(signatures)}.",
        Grid(["model", "method", "stage", "task", "split", "seed", "BLEU", "difference", "p"], rows, words=6),
    ]
