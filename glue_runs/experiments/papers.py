"""The papers' printed numbers, and the numbers of our records that stand beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import yaml

from collab_compress.errors import RecipeError
from collab_compress.report.section import short

from .examples import scored_splits
from .results import Result

PAPERS = Path(__file__).with_name("papers.yaml")
Readings: TypeAlias = dict[tuple[str, int], float]
"""Model and seed → number."""


@dataclass(frozen=True)
class PaperRow:
    """A row of a paper's table; papers.yaml explains the fields.

    `scores` leaves out columns without a number, and has two where the paper gives both metrics of a task.
    """

    model: str
    scores: Mapping[str, tuple[Decimal, ...]]
    method: str = ""
    stage: str = ""
    parameters: Decimal | None = None
    average: Decimal | None = None
    baseline: bool = False
    ours: tuple[str, ...] = ()

    def score(self, column: str) -> Decimal | None:
        """Return one number for a column: the mean of two metrics, as ours is; None without any."""
        printed = self.scores.get(column)
        return None if printed is None else sum(printed, Decimal()) / len(printed)

    def mean(self, columns: Sequence[str]) -> Decimal | None:
        """Return the mean over columns; None if there are none or one is missing."""
        scores = [score for score in map(self.score, columns) if score is not None]
        return sum(scores, Decimal()) / len(scores) if scores and len(scores) == len(columns) else None


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper, or a figure or section whose text gives numbers; papers.yaml explains the fields."""

    paper: str
    title: str
    source: str
    name: str
    columns: Mapping[str, str]
    rows: tuple[PaperRow, ...]
    about: str = ""
    note: str = ""
    beside: tuple[str, ...] = ()
    of: tuple[str, ...] = ("score",)
    sweep: str = ""

    @property
    def place(self) -> str:
        """The paper's key and the table's name."""
        return f"{self.paper}, {self.name}"

    def baseline(self, row: PaperRow) -> PaperRow | None:
        """Return the baseline of a row; None for a baseline itself, or without one."""
        baselines = [other for other in self.rows if other.baseline and other.model == row.model]
        return baselines[0] if baselines and row is not baselines[0] else None

    def rows_for(self, columns: Sequence[str]) -> list[PaperRow]:
        """Return the rows that have a number in one of the columns."""
        return [row for row in self.rows if any(column in row.scores for column in columns)]


@cache
def read_papers() -> tuple[PaperTable, ...]:
    """Read the tables of all papers; numbers keep the digits they are printed with."""
    papers = yaml.load(PAPERS.read_text(encoding="utf-8"), _DecimalLoader)
    return tuple(_table(key, paper, name) for key, paper in papers.items() for name in paper["tables"])


def title_of(paper: str) -> str:
    """Return the title of a paper."""
    return next(table.title for table in read_papers() if table.paper == paper)


def select_tables(
    tables: Sequence[PaperTable], paper: str | None = None, table: str | None = None
) -> list[PaperTable]:
    """Return some of the tables of papers.

    Args:
        tables: to choose from.
        paper: key of the paper; all papers if not given.
        table: its number or name: "2", "Table 2", "Figure 3"; all of them if not given.

    Raises:
        RecipeError: there is no such paper or table; the message names the others.
    """
    papers = dict.fromkeys(one.paper for one in tables)
    if paper is not None and paper not in papers:
        raise RecipeError(f"unknown paper {paper!r}; expected one of {', '.join(papers)}")
    of_paper = [one for one in tables if paper in (None, one.paper)]
    if table is None:
        return of_paper
    chosen = [one for one in of_paper if table.casefold() in (one.name.casefold(), one.name.removeprefix("Table "))]
    if not chosen:
        names = dict.fromkeys(one.name for one in of_paper)
        raise RecipeError(f"no table {table!r}; expected one of {', '.join(names)}")
    return chosen


class _DecimalLoader(yaml.SafeLoader):
    """Reads numbers as decimals, which keep their digits."""


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Decimal:
    return Decimal(loader.construct_scalar(node))


for tag in ("int", "float"):
    _DecimalLoader.add_constructor(f"tag:yaml.org,2002:{tag}", _decimal)


def _table(key: str, paper: Mapping[str, Any], name: str) -> PaperTable:
    table = paper["tables"][name]
    rows = tuple(_row(row, list(table["columns"])) for row in table["rows"])
    lists = {field: tuple(table[field]) for field in ("beside", "of") if field in table}
    return PaperTable(key, paper["title"], paper["source"], name, **{**table, **lists, "rows": rows})


def _row(row: Mapping[str, Any], columns: Sequence[str]) -> PaperRow:
    printed = {}
    for column, score in zip(columns, row["scores"], strict=True):
        if score is not None:
            printed[column] = tuple(score if isinstance(score, list) else [score])
    ours = row.get("ours", ())
    return PaperRow(**{**row, "scores": printed, "ours": (ours,) if isinstance(ours, str) else tuple(ours)})


@dataclass(frozen=True)
class Quantity:
    """A number in a record."""

    read: Callable[[Result], float | None]  # None where a record has none
    unit: str | None = None  # None for the unit of the task's score
    greater_is_better: bool | None = None  # None where it is neither, or as for the task's score


def _metric(name: str, result: Result) -> float | None:
    """Return a metric of the test set, or of the validation set where there is no test set."""
    splits = (result.metrics[split] for split in scored_splits(result.metrics))
    return next((float(metrics[name]) for metrics in splits if name in metrics), None)


def _logged(name: str, result: Result) -> float | None:
    """Return the last logged value."""
    return next((float(line[name]) for line in reversed(result.history) if name in line), None)


def _similarity(name: str, result: Result) -> float | None:
    """Return the mean over pairs of heads in the last layer, between encoder and decoder where there is such."""
    kinds = result.measures.get(name, {}).get("layers", {})
    layers = kinds.get("cross") or next(reversed(kinds.values()), None)
    return float(layers[-1]) if layers else None


def _overlap(result: Result) -> float | None:
    return _mean(chain(*result.measures.get("overlap", {}).values()))


def _distance(name: str, result: Result) -> float | None:
    return _mean(layer[name] for layer in chain(*result.measures.get("discrepancy", {}).values()))


def _dominant(kind: str, result: Result) -> float | None:
    """Return the change of the score without the dominant heads of a kind."""
    scores = result.measures.get("dominance", {})
    return scores[kind] - scores["score"] if {kind, "score"} <= scores.keys() else None


def _half_pruned(result: Result) -> float | None:
    """Return the change of the score without half of the heads, at the nearest share."""
    curve = result.measures.get("pruning")
    if not curve:
        return None
    points = list(zip(curve["shares"], curve["scores"], strict=True))
    half = min(points, key=lambda point: abs(point[0] - 0.5))
    return float(half[1] - min(points)[1])


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return fmean(numbers) if numbers else None


QUANTITIES: dict[str, Quantity] = {
    "score": Quantity(lambda result: result.score),
    "perplexity": Quantity(partial(_metric, "perplexity"), "", False),
    "parameters": Quantity(lambda result: result.parameters, "", False),
    "task loss": Quantity(partial(_logged, "task_loss"), "nats", False),
    "training overlap": Quantity(partial(_logged, "bhattacharyya"), ""),
    "overlap": Quantity(_overlap, ""),
    "svcca": Quantity(partial(_similarity, "svcca"), ""),
    "cka": Quantity(partial(_similarity, "cka"), ""),
    "l2": Quantity(partial(_distance, "l2"), ""),
    "dominant encoder": Quantity(partial(_dominant, "encoder")),
    "dominant cross": Quantity(partial(_dominant, "cross")),
    "dominant decoder": Quantity(partial(_dominant, "decoder")),
    "half pruned": Quantity(_half_pruned),
}
"""Name → quantity."""


def readings(results: Sequence[Result], label: str, task: str, of: str = "score") -> Readings:
    """Return a quantity of one method and stage on one task, from all records that have it.

    Args:
        results: all records.
        label: method or method/stage; the stage is tuned if not given.
        task: name of the column.
        of: the quantity, of `QUANTITIES`.
    """
    values = {key: QUANTITIES[of].read(result) for key, result in results_by_seed(results, label, task, of).items()}
    return {key: float(value) for key, value in values.items() if value is not None}


def results_by_seed(results: Sequence[Result], label: str, task: str, of: str) -> dict[tuple[str, int], Result]:
    """Return the results of one method and stage on one task that have a quantity: model and seed → result."""
    chosen = (result for result in results if (result.variant.label, result.column.name) == (labelled(label), task))
    return {
        (result.variant.model, result.seed): result for result in chosen if QUANTITIES[of].read(result) is not None
    }


def labelled(name: str) -> str:
    """Return a method as method/stage; the stage is tuned if not given."""
    return name if "/" in name else f"{name}/tuned"


def differences(ours: Readings, baseline: Readings) -> Readings:
    """Return the differences of readings of the same model and seed."""
    return {key: value - baseline[key] for key, value in ours.items() if key in baseline}


def model_with_most(values: Iterable[tuple[str, int]]) -> str:
    """Return the model with most seeds, the first by name on ties; empty without readings."""
    counts = Counter(model for model, _ in values)
    return min(counts, key=lambda model: (-counts[model], model), default="")


def of_model(values: Readings, model: str) -> list[float]:
    """Return the numbers of one model, one a seed."""
    return [value for (name, _), value in values.items() if name == model]


def signed(value: float) -> str:
    """Return a difference as text, with its sign."""
    return f"+{short(value)}" if value > 0 else short(value)


def unit_of(of: str, task: str, results: Sequence[Result]) -> str:
    """Return the unit of a quantity on a task."""
    if (unit := QUANTITIES[of].unit) is not None:
        return unit
    return next((result.column.unit for result in results if result.column.name == task), "").replace("bleu", "BLEU")
