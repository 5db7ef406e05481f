"""What is doubtful about a table of results, and what its rows are called."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from collab_compress.experiments.results import FRESH, Column, Result, Variant

ALIKE = ("files", "fresh", "max_length", "translation", "tuning")
"""Settings in which rows are expected not to differ."""


def label(variant: Variant) -> str:
    """Name a variant as method/stage."""
    return f"{variant.method}/{variant.stage}"


def compared_otherwise(
    grouped: Iterable[Variant], references: Mapping[str, Variant], reference: str | None
) -> Iterator[str]:
    """Say which untrained models are compared with something else, or with nothing."""
    for model in sorted({variant.model for variant in grouped}):
        other = references.get(model)
        if other is not None and label(other) != reference:
            yield f"{model} is compared with {label(other)}, which is {reference} in its shape"
        if other is None and reference is not None and model.startswith(FRESH):
            yield f"{model} is compared with nothing: no result is {reference} in its shape"


def no_numbers(grouped: Mapping[Variant, Sequence[Result]]) -> Iterator[str]:
    """Name the scores that are no finite numbers."""
    for variant, results in grouped.items():
        for result in results:
            if not math.isfinite(result.score):
                where = f"{label(variant)} of {variant.model} on {result.column.name}"
                yield f"{where}: the score of seed {result.seed} is {result.score}, and so is what is made of it"


def seeds_apart(grouped: Mapping[Variant, Sequence[Result]]) -> Iterator[str]:
    """Name the settings in which seeds differ that are averaged."""
    for variant, results in grouped.items():
        for column, recipes in recipes_of(results).items():
            differing = _differing(recipes, {name for recipe in recipes for name in recipe})
            if differing:
                yield f"{label(variant)} of {variant.model} on {column.name}: seeds differ in {differing}"


def rows_apart(grouped: Mapping[Variant, Sequence[Result]], references: Mapping[str, Variant]) -> Iterator[str]:
    """Name the settings, other than what a row is about, in which it differs from what it is compared with."""
    for variant, results in grouped.items():
        if (other := references.get(variant.model)) is None:
            continue
        theirs = recipes_of(grouped[other])
        for column, recipes in recipes_of(results).items():
            both = [_flat(recipe) for recipe in (*recipes[:1], *theirs.get(column, [])[:1])]
            differing = _differing(both, set.intersection(*map(set, both)))
            if differing:
                yield f"{label(variant)} and {label(other)} of {variant.model} on {column.name} differ in {differing}"


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Give the settings in which rows are expected not to differ, those of a fresh model one by one."""
    flat = {name: recipe[name] for name in ALIKE if name in recipe}
    fresh = flat.pop("fresh", None) or {}
    return flat | {f"fresh.{name}": value for name, value in fresh.items() if name != "attention"}


def recipes_of(results: Iterable[Result]) -> dict[Column, list[Mapping[str, Any]]]:
    """Give the recipes of results by what they were scored on."""
    found: dict[Column, list[Mapping[str, Any]]] = defaultdict(list)
    for result in results:
        found[result.column].append(result.recipe)
    return dict(found)


def _differing(recipes: Sequence[Mapping[str, Any]], fields: Iterable[str]) -> str:
    return ", ".join(name for name in sorted(fields) if any(r.get(name) != recipes[0].get(name) for r in recipes))
