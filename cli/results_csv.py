"""Results and the papers' numbers as CSV: a line for each of them."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from collab_compress.experiments.comparison import AVERAGE, Comparison
from collab_compress.experiments.papers import PaperRow, PaperTable
from collab_compress.experiments.results import Column

from .results_markdown import place

FIELDS = (
    "from", "model", "method", "stage", "parameters", "task", "metric", "greater_is_better",
    "mean", "sd", "n", "reference", "difference", "low", "high", "pairs", "printed",
)  # fmt: skip


def comparison_csv(comparison: Comparison, papers: Sequence[PaperTable]) -> str:
    """Give each score with its difference to the reference, and the papers' on the same tasks below ours.

    `low` and `high` are the ends of the difference's 95 % t-interval. What is not there is left empty: the deviation
    and the interval of one seed, and differences that have no pair.
    """
    lines: list[dict[str, Any]] = []
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
            lines += _beside_ours(table, paper_row, comparison.columns)
    return _csv(lines)


def papers_csv(tables: Sequence[PaperTable]) -> str:
    """Give the papers' numbers; `mean` is that of the two that are printed for a task with two metrics."""
    return _csv(
        line for table in tables for row in table.rows for line in _paper_lines(table, row, list(table.columns))
    )


def _beside_ours(table: PaperTable, row: PaperRow, columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Give a paper's numbers in our columns; an average is over the tasks that we have, as ours is."""
    better = {column.name: column.greater_is_better for column in columns}
    tasks = [name for name in better if name != AVERAGE]
    lines = _paper_lines(table, row, tasks)
    if AVERAGE in better and (mean := row.mean(tasks)) is not None:
        lines.append({**_paper_named(table, row), "task": AVERAGE, "metric": columns[-1].metric, "mean": mean})
    return [{**line, "greater_is_better": better[line["task"]]} for line in lines]


def _paper_lines(table: PaperTable, row: PaperRow, columns: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            **_paper_named(table, row), "task": column, "metric": table.columns[column], "mean": row.score(column),
            "printed": "/".join(map(str, row.scores[column])),
        }
        for column in columns
        if column in row.scores
    ]  # fmt: skip


def _paper_named(table: PaperTable, row: PaperRow) -> dict[str, Any]:
    parameters = None if row.parameters is None else int(row.parameters * 1_000_000)
    return {
        "from": place(table), "model": row.model, "method": row.method, "stage": row.stage, "parameters": parameters,
    }  # fmt: skip


def _csv(lines: Iterable[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
