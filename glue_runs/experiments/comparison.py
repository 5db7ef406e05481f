"""Results side by side: means over seeds, and differences paired by seed."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from scipy import stats

from collab_compress.errors import RecipeError

from ..tasks import TASKS
from .outputs import without_nulls
from .results import Column, Result, Variant

Line: TypeAlias = dict[str, Any]

AVERAGE = "average"
REFERENCE = "plain/tuned"
UNTUNED_REFERENCE = "plain/given"


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, the sample standard deviation (None for one value), and the number of values."""

    mean: float
    deviation: float | None
    count: int

    @property
    def interval(self) -> float | None:
        """Half the width of the 95 % t-interval of the mean, t · deviation / √n; None for one value."""
        if self.deviation is None:
            return None
        return float(stats.t.ppf(0.975, self.count - 1)) * self.deviation / math.sqrt(self.count)


def estimate(values: Iterable[float]) -> Estimate:
    """Return mean and sample standard deviation; NaN if a value is NaN or infinite."""
    numbers = np.array(list(values), dtype=np.float64)
    with np.errstate(invalid="ignore"):
        deviation = float(numbers.std(ddof=1)) if len(numbers) > 1 else None
        return Estimate(float(numbers.mean()), deviation, len(numbers))


@dataclass(frozen=True)
class Comparison:
    """A table of results.

    Lines, as `compare` describes them, are sorted by model, with the reference's method first; within a method the
    dense model comes first, then conversions, each before its second fine-tuning.
    """

    columns: tuple[Column, ...]  # tasks, and last `AVERAGE` over all of them, where there is one
    lines: tuple[Line, ...]
    reference: str | None  # baseline of the differences, as method/stage; None if no variant is it
    notes: tuple[str, ...]  # doubts about the results


def compare(results: Sequence[Result], against: str | None = None) -> Comparison:
    """Return a line for each variant and task, compared with `against` (method/stage), or else with the dense model.

    The average is over tasks first, for each seed that has all of them, and then over seeds; there is one if there
    are several tasks and all are scored in one unit.

    A line has `mean`, sample deviation `sd` and number `n` of the scores; `difference`, the mean over the `pairs` of
    seeds that the `reference` has too of score − the reference's score; and `low` and `high`, the ends of its 95 %
    t-interval. With one seed `sd` is None, and there is no interval; a score without a pair has no difference.
    """
    grouped: dict[Variant, list[Result]] = defaultdict(list)
    for result in results:
        grouped[result.variant].append(result)
    tasks = sorted({result.column for result in results}, key=_task_order)
    labels = sorted({variant.label for variant in grouped})
    if against is not None and against not in labels:
        raise RecipeError(f"nothing to compare with: no result is {against!r}; expected one of {', '.join(labels)}")
    reference = against or next((label for label in (REFERENCE, UNTUNED_REFERENCE) if label in labels), None)
    references = {variant.model: variant for variant in grouped if variant.label == reference}
    baselines = _find_baselines(grouped, references, with_controls=against is None)
    scores = _tabulate_scores(results, tasks)
    means, differences = _estimate_means(scores), _estimate_means(_subtract_baselines(scores, baselines))
    columns = (*tasks, *(column for column in dict.fromkeys(scores["column"]) if column.name == AVERAGE))
    lines = []
    for variant in sorted(grouped, key=lambda variant: _sort_key(variant, references.get(variant.model))):
        baseline = baselines.get(variant)
        counts = [result.parameters for result in grouped[variant] if result.parameters is not None]
        for column in columns:
            if (score := means.get((variant, column))) is None:
                continue
            line: Line = {
                "model": variant.model,
                "method": variant.method,
                "stage": variant.stage,
                "parameters": mean(counts) if counts else None,
                "task": column.name,
                "metric": column.metric,
                "greater_is_better": column.greater_is_better,
                "mean": score.mean,
                "sd": score.deviation,
                "n": score.count,
            }
            if baseline is not None and (difference := differences.get((variant, column))) is not None:
                line |= {"reference": baseline.label, "difference": difference.mean, "pairs": difference.count}
                if (half := difference.interval) is not None:
                    line["low"], line["high"] = difference.mean - half, difference.mean + half
            lines.append(line)
    notes = (*_note_numbers(results), *_note_seeds(results))
    return Comparison(columns, tuple(lines), reference, notes)


def _task_order(column: Column) -> tuple[int, str]:
    return list(TASKS).index(column.name.split()[0]), column.name


def _sort_key(variant: Variant, reference: Variant | None) -> tuple[object, ...]:
    """Return a key that sorts conversions by the numbers in their names, the largest, such as a rank, first."""
    method = REFERENCE.rpartition("/")[0] if reference is None else reference.method
    return (
        variant.model,
        variant.method != method,
        variant.method,
        variant.conversion is not None,
        variant.stage != "tuned",
        [-int(number) for number in re.findall(r"\d+", variant.conversion or "")],
        variant.conversion or "",
        variant.again,
        variant.stage,
    )


def _tabulate_scores(results: Sequence[Result], tasks: Sequence[Column]) -> pd.DataFrame:
    """Return a row for each score, and for the average of each seed that has all tasks."""
    rows = [(result.variant, result.column, result.seed, result.score) for result in results]
    scores = pd.DataFrame(rows, columns=["variant", "column", "seed", "score"])
    if len(tasks) == 1 or len({column.unit for column in tasks}) > 1:
        return scores
    average = Column(AVERAGE, tasks[0].unit, tasks[0].greater_is_better)
    averages = [
        (variant, average, seed, float(of_seed.to_numpy().mean()))
        for (variant, seed), of_seed in scores.groupby(["variant", "seed"], sort=False)["score"]
        if len(of_seed) == len(tasks)
    ]
    return pd.concat([scores, pd.DataFrame(averages, columns=scores.columns)]) if averages else scores


def _subtract_baselines(scores: pd.DataFrame, baselines: Mapping[Variant, Variant]) -> pd.DataFrame:
    """Return a row for each score whose baseline has the same column and seed, with the difference."""
    bases = [baselines.get(variant) for variant in scores["variant"]]
    compared = [base not in (None, variant) for variant, base in zip(scores["variant"], bases, strict=True)]
    pairs = scores.assign(baseline=bases)[compared].merge(
        scores.rename(columns={"variant": "baseline", "score": "theirs"}), on=["baseline", "column", "seed"]
    )
    return pairs.assign(score=pairs["score"] - pairs["theirs"])


def _estimate_means(scores: pd.DataFrame) -> dict[tuple[Variant, Column], Estimate]:
    """Return means over seeds."""
    return {key: estimate(values) for key, values in scores.groupby(["variant", "column"], sort=False)["score"]}


def _find_baselines(
    variants: Iterable[Variant], references: Mapping[str, Variant], *, with_controls: bool
) -> dict[Variant, Variant]:
    """Return the reference of each variant's model; with controls, for `-again` conversions the dense one again."""
    again = {}  # model → its reference's method, tuned again without conversion
    for variant in variants:
        reference = references.get(variant.model)
        if reference is not None and variant.method == reference.method and variant.again and not variant.conversion:
            again[variant.model] = variant
    bases = {
        variant: (again if with_controls and variant.again and variant.conversion else references).get(variant.model)
        for variant in variants
    }
    return {variant: base for variant, base in bases.items() if base is not None}


def _note_numbers(results: Iterable[Result]) -> Iterator[str]:
    """Yield the scores that are not finite."""
    for result in results:
        if not math.isfinite(result.score):
            where = f"{result.variant.label} of {result.variant.model} on {result.column.name}"
            yield f"{where}: the score of seed {result.seed} is {result.score}, and so are the means that include it"


def _note_seeds(results: Iterable[Result]) -> Iterator[str]:
    """Yield the settings in which seeds differ that are averaged."""
    grouped: dict[tuple[Variant, Column], list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        grouped[result.variant, result.column].append(without_nulls(result.recipe))
    for (variant, column), recipes in grouped.items():
        names = sorted(set().union(*recipes))
        differing = [name for name in names if any(r.get(name) != recipes[0].get(name) for r in recipes)]
        if differing:
            yield f"{variant.label} of {variant.model} on {column.name}: seeds differ in {', '.join(differing)}"
