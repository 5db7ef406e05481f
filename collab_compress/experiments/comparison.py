"""Results side by side: means over seeds, differences paired by seed, and what is doubtful about them."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from scipy import stats

from collab_compress.errors import RecipeError
from collab_compress.experiments.results import FRESH, UNSHAPED, Column, Result, Variant
from collab_compress.tasks import TASKS

Line: TypeAlias = dict[str, Any]
AVERAGE = "average"
REFERENCE = "plain/tuned"
AS_IT_IS = "plain/given"
ALIKE = ("files", "fresh", "max_length", "translation", "tuning")
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
    def interval(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean, t · deviation / √n; None for one value.

        t is the 97.5 % quantile of Student's distribution with n − 1 degrees of freedom (Biometrika 6, 1908).
        """
        if self.deviation is None:
            return None
        return float(stats.t.ppf(0.975, self.count - 1)) * self.deviation / math.sqrt(self.count)

    @property
    def ends(self) -> tuple[float, float] | None:
        """Ends of that interval; None for one value."""
        half = self.interval
        return None if half is None else (self.mean - half, self.mean + half)


@dataclass(frozen=True)
class Comparison:
    """A table of results.

    Args:
        columns: tasks, and `AVERAGE` over all of them last, where there is one.
        lines: a score each, with its difference to the reference: see `compare`. Of one model after another; within
            one the reference's method first, and within a method the model before conversion, then conversions,
            without and with a second fine-tuning.
        reference: what differences are to, as method/stage; None if no variant is it. Untrained models of another
            shape are compared with the one of their shape that has its recipe otherwise.
        notes: what is doubtful about the results.
    """

    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    reference: str | None
    notes: tuple[str, ...]


def compare(results: Sequence[Result], against: str | None = None) -> Comparison:
    """Compare results: a line for each variant and task.

    The average is over tasks first, for each seed that has all of them, and over seeds then; there is one where
    there are several tasks and all are scored in one unit.

    A line has `mean`, sample deviation `sd` and number `n` of the scores; `difference`, the mean over the `pairs` of
    seeds that the `reference` has too of score − the reference's score; and `low` and `high`, the ends of its 95 %
    t-interval. With one seed `sd` is None, and there is no interval; a score without a pair has no difference.

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
    reference = _reference(grouped, against)
    references = _references(grouped, reference)
    scores = _scores(results, tasks)
    means, differences = _estimates(scores), _estimates(_paired(scores, references))
    columns = (*tasks, *(column for column in dict.fromkeys(scores["column"]) if column.name == AVERAGE))
    lines = []
    for variant in sorted(grouped, key=lambda variant: _order(variant, references.get(variant.model))):
        other = references.get(variant.model)
        counts = [result.parameters for result in grouped[variant] if result.parameters is not None]
        for column in columns:
            if (score := means.get((variant, column))) is None:
                continue
            line: Line = {
                "from": "ours",
                "model": variant.model,
                "method": variant.method,
                "stage": variant.stage,
                "parameters": fmean(counts) if counts else None,
                "task": column.name,
                "metric": column.metric,
                "greater_is_better": column.greater_is_better,
                "mean": score.mean,
                "sd": score.deviation,
                "n": score.count,
            }
            if other is not None and (difference := differences.get((variant, column))) is not None:
                line |= {"reference": other.label, "difference": difference.mean, "pairs": difference.count}
                if difference.ends is not None:
                    line["low"], line["high"] = difference.ends
            lines.append(line)
    notes = (
        *_compared_otherwise(grouped, references, reference),
        *_no_numbers(results),
        *_seeds_apart(grouped),
        *_rows_apart(grouped, references),
    )
    return Comparison(columns, tuple(lines), reference, notes)


def estimate(values: Iterable[float]) -> Estimate:
    """Return mean and sample standard deviation; NaN if a value is NaN or infinite."""
    found = np.array(list(values), dtype=np.float64)
    with np.errstate(invalid="ignore"):
        deviation = float(found.std(ddof=1)) if len(found) > 1 else None
        return Estimate(float(found.mean()), deviation, len(found))


def _place(column: Column) -> tuple[int, str]:
    return list(TASKS).index(column.name.split()[0]), column.name


def _scores(results: Sequence[Result], tasks: Sequence[Column]) -> pd.DataFrame:
    """Return a row for each score, and for the average of each seed that has all tasks."""
    lines = [(result.variant, result.column, result.seed, result.score) for result in results]
    scores = pd.DataFrame(lines, columns=["variant", "column", "seed", "score"])
    if len(tasks) == 1 or len({column.unit for column in tasks}) > 1:
        return scores
    average = Column(AVERAGE, tasks[0].unit, tasks[0].greater_is_better)
    whole = [
        (variant, average, seed, float(found.to_numpy().mean()))
        for (variant, seed), found in scores.groupby(["variant", "seed"], sort=False)["score"]
        if len(found) == len(tasks)
    ]
    return pd.concat([scores, pd.DataFrame(whole, columns=scores.columns)]) if whole else scores


def _paired(scores: pd.DataFrame, references: Mapping[str, Variant]) -> pd.DataFrame:
    """Return a row for each score whose baseline has the same column and seed, with the difference."""
    others = [references.get(variant.model) for variant in scores["variant"]]
    compared = [other not in (None, variant) for variant, other in zip(scores["variant"], others, strict=True)]
    keys = ["reference", "column", "seed"]
    pairs = scores.assign(reference=others)[compared].merge(
        scores.rename(columns={"variant": "reference", "score": "theirs"}), on=keys
    )
    return pairs.assign(score=pairs["score"] - pairs["theirs"])


def _estimates(scores: pd.DataFrame) -> dict[tuple[Variant, Column], Estimate]:
    """Return means over seeds."""
    return {key: estimate(found) for key, found in scores.groupby(["variant", "column"], sort=False)["score"]}


def _reference(variants: Iterable[Variant], against: str | None) -> str | None:
    there = sorted({variant.label for variant in variants})
    if against is not None and against not in there:
        raise RecipeError(f"nothing to compare with: no result is {against!r}; expected one of {', '.join(there)}")
    return against or next((name for name in (REFERENCE, AS_IT_IS) if name in there), None)


def _references(grouped: Mapping[Variant, Sequence[Result]], reference: str | None) -> dict[str, Variant]:
    """Return the baseline of each model.

    An untrained model of another shape has the method of the reference under another name: it is the variant whose
    recipe is the reference's but for the shape.
    """
    found = {variant.model: variant for variant in grouped if variant.label == reference}
    theirs = [
        (variant.stage, column, _unshaped(recipes[0]))
        for variant in found.values()
        for column, recipes in _recipes_of(grouped[variant]).items()
        if recipes[0].get("fresh")
    ]
    for variant in sorted(grouped, key=lambda variant: variant.method):
        for column, recipes in _recipes_of(grouped[variant]).items():
            if variant.model not in found and (variant.stage, column, _unshaped(recipes[0])) in theirs:
                found[variant.model] = variant
    return found


def _unshaped(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {**recipe, "fresh": {name: (recipe.get("fresh") or {}).get(name) for name in UNSHAPED}}


def _order(variant: Variant, reference: Variant | None) -> tuple[object, ...]:
    """Sort conversions by the numbers in their names, largest first: those of ranks come with less and less of it."""
    method = REFERENCE.rpartition("/")[0] if reference is None else reference.method
    sizes = [-int(number) for number in re.findall(r"\d+", variant.conversion or "")]
    return (
        variant.model, variant.method != method, variant.method, variant.conversion is not None,
        variant.stage != "tuned", sizes, variant.conversion or "", variant.again, variant.stage,
    )  # fmt: skip


def _compared_otherwise(
    grouped: Iterable[Variant], references: Mapping[str, Variant], reference: str | None
) -> Iterator[str]:
    """Note which untrained models are compared with another shape, or with nothing."""
    for model in sorted({variant.model for variant in grouped}):
        other = references.get(model)
        if other is not None and other.label != reference:
            yield f"{model} is compared with {other.label}, which is {reference} in its shape"
        if other is None and reference is not None and model.startswith(FRESH):
            yield f"{model} is compared with nothing: no result is {reference} in its shape"


def _no_numbers(results: Iterable[Result]) -> Iterator[str]:
    """Name the scores that are no finite numbers."""
    for result in results:
        if not math.isfinite(result.score):
            where = f"{result.variant.label} of {result.variant.model} on {result.column.name}"
            yield f"{where}: the score of seed {result.seed} is {result.score}, and so is what is made of it"


def _seeds_apart(grouped: Mapping[Variant, Sequence[Result]]) -> Iterator[str]:
    """Name the settings in which seeds differ that are averaged."""
    for variant, results in grouped.items():
        for column, recipes in _recipes_of(results).items():
            differing = _differing(recipes, {name for recipe in recipes for name in recipe})
            if differing:
                yield f"{variant.label} of {variant.model} on {column.name}: seeds differ in {differing}"


def _rows_apart(grouped: Mapping[Variant, Sequence[Result]], references: Mapping[str, Variant]) -> Iterator[str]:
    """Name the settings, other than what a row is about, in which it differs from what it is compared with."""
    for variant, results in grouped.items():
        if (other := references.get(variant.model)) is None:
            continue
        theirs = _recipes_of(grouped[other])
        for column, recipes in _recipes_of(results).items():
            both = [_flat(recipe) for recipe in (*recipes[:1], *theirs.get(column, [])[:1])]
            differing = _differing(both, set.intersection(*map(set, both)))
            if differing:
                yield f"{variant.label} and {other.label} of {variant.model} on {column.name} differ in {differing}"


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that should be equal in compared rows; those of an untrained model one by one."""
    flat = {name: recipe[name] for name in ALIKE if name in recipe}
    fresh = flat.pop("fresh", None) or {}
    return flat | {f"fresh.{name}": value for name, value in fresh.items() if name != "attention"}


def _recipes_of(results: Iterable[Result]) -> dict[Column, list[Mapping[str, Any]]]:
    """Group the recipes of results by task."""
    found: dict[Column, list[Mapping[str, Any]]] = defaultdict(list)
    for result in results:
        found[result.column].append(result.recipe)
    return dict(found)


def _differing(recipes: Sequence[Mapping[str, Any]], fields: Iterable[str]) -> str:
    return ", ".join(name for name in sorted(fields) if any(r.get(name) != recipes[0].get(name) for r in recipes))
