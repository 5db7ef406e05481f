"""Records as a table with the numbers that the papers' claims and tables are about."""

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from collab_compress_glue_runs.experiments.examples import scored_splits
from collab_compress_glue_runs.experiments.results import Result, read_results


def read_records() -> list[Result]:
    """Return the results in the folders and files that the command line names; by default glue_runs/records."""
    return read_results(*map(Path, sys.argv[1:] or sorted(Path(__file__).parents[1].glob("records/*.jsonl"))))


def of_test(name: str, result: Result) -> float | None:
    """Return a metric of the test set, or of the validation set where there is no test set."""
    splits = (result.metrics[split] for split in scored_splits(result.metrics))
    return next((metrics[name] for metrics in splits if name in metrics), None)


def last_logged(name: str, result: Result) -> float | None:
    """Return the last logged value."""
    return next((line[name] for line in reversed(result.history) if name in line), None)


def similarity(name: str, result: Result) -> float | None:
    """Return the mean over pairs of heads in the last layer, between encoder and decoder where there is such."""
    kinds = result.measures.get(name, {}).get("layers", {})
    layers = kinds.get("cross") or next(reversed(kinds.values()), None)
    return layers[-1] if layers else None


def distance(name: str, result: Result) -> float | None:
    """Return the mean distance of heads over layers."""
    layers = list(chain(*result.measures.get("discrepancy", {}).values()))
    return fmean(layer[name] for layer in layers) if layers else None


def without_dominant(kind: str, result: Result) -> float | None:
    """Return the change of the score without the dominant heads of a kind of attention."""
    scores = result.measures.get("dominance", {})
    return scores[kind] - scores["score"] if {kind, "score"} <= scores.keys() else None


def without_half(result: Result) -> float | None:
    """Return the change of the score without half of the heads, at the nearest share."""
    curve = result.measures.get("pruning", {"shares": (), "scores": ()})
    points = list(zip(curve["shares"], curve["scores"], strict=True))
    return min(points, key=lambda point: abs(point[0] - 0.5))[1] - min(points)[1] if points else None


QUANTITIES = {  # name → function of a record, which returns None where it has none
    "score": lambda result: result.score,
    "perplexity": partial(of_test, "perplexity"),
    "parameters": lambda result: result.parameters,
    "task loss": partial(last_logged, "task_loss"),
    "training overlap": partial(last_logged, "bhattacharyya"),
    "svcca": partial(similarity, "svcca"),
    "cka": partial(similarity, "cka"),
    "l2": partial(distance, "l2"),
    "dominant encoder": partial(without_dominant, "encoder"),
    "dominant cross": partial(without_dominant, "cross"),
    "dominant decoder": partial(without_dominant, "decoder"),
    "half pruned": without_half,
}
# Units of quantities whose unit is not that of the score.
OWN_UNITS = {"task loss": "nats", **dict.fromkeys(("perplexity", "training overlap", "svcca", "cka", "l2"), "")}
LESS_IS_BETTER = {"perplexity", "parameters", "task loss"}


def late_gain(history: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the gain on the validation data that a model made in the last quarter of its training.

    The gain is from the first evaluation to the best, in BLEU where it was logged, or else in loss; the late gain is
    from the best of the first three quarters. Infinity without two evaluations, or with one that is not finite.
    """
    key, sign = ("eval_bleu", 1) if any("eval_bleu" in line for line in history) else ("eval_loss", -1)
    points = [(line["epoch"], sign * line[key]) for line in history if key in line and "epoch" in line]
    if len(points) < 2 or not all(math.isfinite(value) for _, value in points):
        return math.inf
    values = [value for _, value in points]
    early = [value for epoch, value in points if epoch <= 0.75 * points[-1][0]]
    gain = max(values) - values[0]
    return (max(values) - max(early, default=values[0])) / gain if gain > 0 else 0.0


def tabulate(results: Sequence[Result]) -> pd.DataFrame:
    """Return a row for each record; its quantities are NaN where it has none, and infinite where not finite."""
    rows = []
    for result in results:
        numbers = {name: read(result) for name, read in QUANTITIES.items()}
        row = {
            "model": result.variant.model,
            "label": result.variant.label.removesuffix("/tuned"),
            "task": result.column.name,
            "seed": result.seed,
            "unit": result.column.unit.replace("bleu", "BLEU").replace("%", "points"),
            "sign": 1 if result.column.greater_is_better else -1,
            "revision": result.revision or "unknown",
            "late gain": late_gain(result.history) if result.recipe.get("fresh") else math.nan,
        }
        rows.append(row | {name: math.inf if number != number else number for name, number in numbers.items()})
    return pd.DataFrame(rows).astype(dict.fromkeys(QUANTITIES, float))
