"""Results as rows: means over seeds, and differences to one of the rows, paired by task and seed."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collab_compress.errors import RecipeError
from collab_compress.experiments.results import Column, Result, Variant
from collab_compress.tasks import TASKS

AVERAGE = "average"
REFERENCE = "plain/tuned"
AS_IT_IS = "plain/given"
ALIKE = ("files", "max_length", "translation", "tuning")
"""Settings in which rows are expected not to differ."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Args:
        mean: of the values.
        deviation: their sample standard deviation, √(Σ (x − mean)² / (n − 1)); None for one value.
        count: how many there are, n.
    """

    mean: float
    deviation: float | None
    count: int

    @property
    def error(self) -> float | None:
        """The standard error of the mean, deviation / √n; None for one value."""
        return None if self.deviation is None else self.deviation / math.sqrt(self.count)


@dataclass(frozen=True)
class Row:
    """One variant's results.

    Args:
        variant: what was done.
        parameters: mean over its results; None if none has them recorded.
        scores: column → mean over seeds.
        differences: column → mean over the seeds that the reference has too of score − the reference's score; empty
            for the reference itself and for models without one.
    """

    variant: Variant
    parameters: float | None
    scores: Mapping[Column, Estimate]
    differences: Mapping[Column, Estimate]


@dataclass(frozen=True)
class Comparison:
    """A table of results.

    Args:
        columns: tasks, and `AVERAGE` over all of them last, where there is one.
        rows: of one model after another; within one the reference's method first, and within a method the model
            before conversion, then conversions, without and with a second fine-tuning.
        reference: what differences are to, as method/stage; None if no variant is it.
        notes: what is doubtful about the results.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    reference: str | None
    notes: tuple[str, ...]


Series = dict[Column, dict[int, float]]


def compare(results: Sequence[Result], against: str | None = None) -> Comparison:
    """Put results side by side.

    The average is over tasks first, for each seed that has all of them, and over seeds then; there is one where
    there are several tasks and all are scored in one unit.

    Args:
        results: no two of the same variant, task and seed.
        against: method/stage of the variant that others of the same model are compared with; plain/tuned or
            plain/given, the first there is, if not given.

    Raises:
        RecipeError: no result is of `against`.
    """
    grouped: dict[Variant, list[Result]] = defaultdict(list)
    for result in results:
        grouped[result.variant].append(result)
    tasks = sorted({result.column for result in results}, key=_place)
    average = _average_column(tasks)
    series = {variant: _series(members, tasks, average) for variant, members in grouped.items()}
    reference = _reference(grouped, against)
    references = {variant.model: one for variant, one in series.items() if label(variant) == reference}
    rows = []
    for variant in sorted(grouped, key=lambda variant: _order(variant, reference)):
        own, other = series[variant], references.get(variant.model, {})
        counts = [result.parameters for result in grouped[variant] if result.parameters is not None]
        rows.append(
            Row(
                variant,
                sum(counts) / len(counts) if counts else None,
                {column: estimate(by_seed.values()) for column, by_seed in own.items()},
                {} if own is other else _differences(own, other),
            )
        )
    averaged = [average] if average is not None and any(average in row.scores for row in rows) else []
    return Comparison(
        (*tasks, *averaged), tuple(rows), reference, (*_seeds_apart(grouped), *_rows_apart(grouped, reference))
    )


def label(variant: Variant) -> str:
    """Name a variant as method/stage."""
    return f"{variant.method}/{variant.stage}"


def estimate(values: Iterable[float]) -> Estimate:
    """Give mean and sample standard deviation; they are NaN where a value is, or is infinite."""
    found = np.array(list(values), dtype=np.float64)
    with np.errstate(invalid="ignore"):
        deviation = float(found.std(ddof=1)) if len(found) > 1 else None
        return Estimate(float(found.mean()), deviation, len(found))


def _place(column: Column) -> tuple[int, str]:
    return list(TASKS).index(column.name.split()[0]), column.name


def _average_column(tasks: Sequence[Column]) -> Column | None:
    one_unit = len({column.unit for column in tasks}) == 1
    return Column(AVERAGE, tasks[0].unit, tasks[0].greater_is_better) if len(tasks) > 1 and one_unit else None


def _series(results: Iterable[Result], tasks: Sequence[Column], average: Column | None) -> Series:
    """Give scores by column and seed, and the average of each seed that has all tasks."""
    series: Series = defaultdict(dict)
    for result in results:
        series[result.column][result.seed] = result.score
    seeds = set.intersection(*(set(series.get(column, ())) for column in tasks))
    if average is not None and seeds:
        series[average] = {seed: sum(series[column][seed] for column in tasks) / len(tasks) for seed in sorted(seeds)}
    return dict(series)


def _differences(own: Series, other: Series) -> dict[Column, Estimate]:
    found = {}
    for column in own.keys() & other.keys():
        seeds = own[column].keys() & other[column].keys()
        if seeds:
            found[column] = estimate(own[column][seed] - other[column][seed] for seed in sorted(seeds))
    return found


def _reference(variants: Iterable[Variant], against: str | None) -> str | None:
    there = sorted({label(variant) for variant in variants})
    if against is not None and against not in there:
        raise RecipeError(f"nothing to compare with: no result is {against!r}; expected one of {', '.join(there)}")
    return against or next((name for name in (REFERENCE, AS_IT_IS) if name in there), None)


def _order(variant: Variant, reference: str | None) -> tuple[object, ...]:
    """Sort conversions by the numbers in their names, largest first: those of ranks come with less and less of it."""
    method = (reference or REFERENCE).rpartition("/")[0]
    sizes = [-int(number) for number in re.findall(r"\d+", variant.conversion or "")]
    return (
        variant.model, variant.method != method, variant.method, variant.conversion is not None,
        variant.stage != "tuned", sizes, variant.conversion or "", variant.again, variant.stage,
    )  # fmt: skip


def _seeds_apart(grouped: Mapping[Variant, Sequence[Result]]) -> Iterator[str]:
    """Name the settings in which seeds differ that are averaged."""
    for variant, results in grouped.items():
        for column, recipes in _recipes(results).items():
            differing = _differing(recipes, {name for recipe in recipes for name in recipe})
            if differing:
                yield f"{label(variant)} of {variant.model} on {column.name}: seeds differ in {differing}"


def _rows_apart(grouped: Mapping[Variant, Sequence[Result]], reference: str | None) -> Iterator[str]:
    """Name the settings, other than what a row is about, in which it differs from what it is compared with."""
    others = {variant.model: _recipes(results) for variant, results in grouped.items() if label(variant) == reference}
    for variant, results in grouped.items():
        for column, recipes in _recipes(results).items():
            both = recipes[:1] + others.get(variant.model, {}).get(column, [])[:1]
            differing = _differing(both, set(ALIKE).intersection(*both))
            if differing:
                yield f"{label(variant)} and {reference} of {variant.model} on {column.name} differ in {differing}"


def _recipes(results: Iterable[Result]) -> dict[Column, list[Mapping[str, Any]]]:
    found: dict[Column, list[Mapping[str, Any]]] = defaultdict(list)
    for result in results:
        found[result.column].append(result.recipe)
    return dict(found)


def _differing(recipes: Sequence[Mapping[str, Any]], fields: Iterable[str]) -> str:
    return ", ".join(name for name in sorted(fields) if any(r.get(name) != recipes[0].get(name) for r in recipes))
