"""The papers' claims, and verdicts of our records on them: differences paired by seed, with t-intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Literal, TypeAlias

import yaml

from collab_compress.errors import RecipeError
from collab_compress.experiments.comparison import Estimate, estimate
from collab_compress.experiments.recipe import parse
from collab_compress.experiments.results import Result
from collab_compress.report.section import short

CLAIMS = Path(__file__).with_name("claims.yaml")
SEEDS = 3
"""Pairs that a verdict takes at least."""

HOLDS, FAILS, OPEN, WITHDRAWN = "holds", "does not hold", "cannot be told", "withdrawn"
Readings: TypeAlias = dict[tuple[str, int], float]
"""Model and seed → number."""


@dataclass(frozen=True)
class Quantity:
    """A number in a record.

    Args:
        read: record → number; None where it has none.
        unit: of the number; None for that of the task's score.
        greater_is_better: None where it is neither better nor worse, or as the task's score.
    """

    read: Callable[[Result], float | None]
    unit: str | None = None
    greater_is_better: bool | None = None


def _metric(name: str, result: Result) -> float | None:
    """Read a metric of the test set, or of the validation set where there is no test set."""
    tests = [split for split in result.metrics if split.startswith("test")]
    found = (result.metrics[split] for split in tests or result.metrics)
    return next((float(metrics[name]) for metrics in found if name in metrics), None)


def _logged(name: str, result: Result) -> float | None:
    """Read what was logged last."""
    return next((float(line[name]) for line in reversed(result.history) if name in line), None)


def _similarity(name: str, kind: str | None, result: Result) -> float | None:
    """Read the mean over layers, of one kind of attention or of all."""
    kinds = result.measures.get(name, {}).get("layers", {})
    return _mean(chain(*kinds.values()) if kind is None else kinds.get(kind, ()))


def _overlap(result: Result) -> float | None:
    return _mean(chain(*result.measures.get("overlap", {}).values()))


def _distance(name: str, result: Result) -> float | None:
    return _mean(layer[name] for layer in chain(*result.measures.get("discrepancy", {}).values()))


def _dominant(kind: str, result: Result) -> float | None:
    """Read what the score loses with the dominant heads of a kind."""
    found = result.measures.get("dominance", {})
    return found[kind] - found["score"] if {kind, "score"} <= found.keys() else None


def _half_pruned(result: Result) -> float | None:
    """Read what the score loses with half of the heads, at the share that is nearest."""
    found = result.measures.get("pruning")
    if not found:
        return None
    points = list(zip(found["shares"], found["scores"], strict=True))
    half = min(points, key=lambda point: abs(point[0] - 0.5))
    return float(half[1] - min(points)[1])


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


QUANTITIES: dict[str, Quantity] = {
    "score": Quantity(lambda result: result.score),
    "perplexity": Quantity(partial(_metric, "perplexity"), "", False),
    "parameters": Quantity(lambda result: result.parameters, "", False),
    "seconds": Quantity(lambda result: result.seconds, "s", False),
    "task loss": Quantity(partial(_logged, "task_loss"), "nats", False),
    "training overlap": Quantity(partial(_logged, "bhattacharyya"), ""),
    "overlap": Quantity(_overlap, ""),
    "svcca": Quantity(partial(_similarity, "svcca", None), ""),
    "svcca cross": Quantity(partial(_similarity, "svcca", "cross"), ""),
    "cka": Quantity(partial(_similarity, "cka", None), ""),
    "cka cross": Quantity(partial(_similarity, "cka", "cross"), ""),
    "cosine": Quantity(partial(_distance, "cosine"), ""),
    "l2": Quantity(partial(_distance, "l2"), ""),
    "dominant encoder": Quantity(partial(_dominant, "encoder")),
    "dominant cross": Quantity(partial(_dominant, "cross")),
    "dominant decoder": Quantity(partial(_dominant, "decoder")),
    "half pruned": Quantity(_half_pruned),
}
"""Name → what is read from a record."""


@dataclass(frozen=True)
class Claim:
    """A paper's claim, in terms of records."""

    says: str
    """The claim, a sentence."""

    tasks: tuple[str, ...]
    """Our columns that it is tried on, each by itself."""

    method: str
    """Subject of the claim, as method or method/stage."""

    than: str
    """Baseline, as method or method/stage."""

    expect: Literal["better", "higher", "lower"] = "better"
    """Claimed difference; the quantity says which direction is better."""

    by: float = 0.0
    """By more than this; below 0, by how much it may miss."""

    of: str = "score"
    """Compared quantity, one of `QUANTITIES`."""

    mean: bool = False
    """Whether it is tried on the mean of its tasks, in place of each."""

    model: str | None = None
    """The model that it is about, named as in tables; that with most pairs if not given."""

    withdrawn: str = ""
    """Why the records cannot decide it, a sentence; empty where they can."""

    def __post_init__(self) -> None:
        if self.of not in QUANTITIES:
            raise RecipeError(f"{self.says} {self.of!r} is no quantity; expected one of {', '.join(QUANTITIES)}")


@dataclass(frozen=True)
class Verdict:
    """Verdict of the records on a claim.

    Args:
        claim: the claim.
        where: the task, or the mean of several.
        model: that the records are of; empty where there are none.
        difference: of the method to what it is compared with, over the seeds that both have; None without any.
        unit: of the difference.
        found: holds, where the whole interval is on the claim's side of its bound; does not hold, where the whole
            interval is on the other; cannot be told, also of fewer than three pairs; and withdrawn with the claim.
    """

    claim: Claim
    where: str
    model: str
    difference: Estimate | None
    unit: str
    found: str

    @property
    def compared(self) -> str:
        """Subject and baseline of the comparison."""
        of = "" if self.claim.of == "score" else f"{self.claim.of} of "
        return f"{of}{self.claim.method} − {self.claim.than}"

    @property
    def sentence(self) -> str:
        """The verdict with its numbers."""
        start = f"{self.found.capitalize()}: {self.claim.says}"
        if self.claim.withdrawn:
            return f"{start} {self.claim.withdrawn}"
        if self.difference is None:
            return f"{start} No seed has records of both sides of {self.compared} on {self.where}."
        pairs = f"{self.difference.count} seed{'s' * (self.difference.count != 1)}"
        unit = f" {self.unit}" if self.unit else ""
        numbers = f"{self.compared} is {signed(self.difference.mean)}{unit} on {self.where}"
        few = f"; a verdict takes {SEEDS}" if self.difference.count < SEEDS else ""
        interval = self.difference.ends
        ends = "" if interval is None else f"95 % interval {signed(interval[0])} to {signed(interval[1])}, "
        return f"{start} {numbers} ({ends}{pairs}{few})."


def tried(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return the verdicts that rest on one seed or more: what holds, does not hold, cannot be told, is withdrawn."""
    found = [verdict for verdict in verdicts if verdict.difference is not None]
    return sorted(found, key=lambda verdict: (HOLDS, FAILS, OPEN, WITHDRAWN).index(verdict.found))


def read_claims(path: Path = CLAIMS) -> dict[str, list[Claim]]:
    """Read what the papers claim: the paper's key → its claims.

    Raises:
        RecipeError: the file cannot be read, or a claim in it is malformed.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        return {
            paper: [parse(Claim, claim, f"a claim of {paper}") for claim in each] for paper, each in found.items()
        }
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"cannot read the papers' claims in {path}: {error}") from error
    except (AttributeError, TypeError) as error:
        raise RecipeError(f"{path} is not laid out as the papers' claims are: {error}") from error


def judge(claim: Claim, results: Sequence[Result]) -> list[Verdict]:
    """Return the verdicts of the records on a claim, for each of its tasks or for their mean.

    Where several models have been tried, that with most pairs counts, if the claim names none.
    """
    groups = [claim.tasks] if claim.mean else [(task,) for task in claim.tasks]
    return [_verdict(claim, tasks, results) for tasks in groups]


def readings(results: Sequence[Result], label: str, task: str, of: str = "score") -> Readings:
    """Read a quantity from the records of one method and stage on one task, where they have it.

    Args:
        results: all of them.
        label: method or method/stage; the stage is tuned if not given.
        task: name of the column.
        of: the quantity, of `QUANTITIES`.
    """
    found: Readings = {}
    for result in results:
        if (result.variant.label, result.column.name) == (labelled(label), task):
            value = QUANTITIES[of].read(result)
            if value is not None:
                found[result.variant.model, result.seed] = float(value)
    return found


def labelled(name: str) -> str:
    """Return a method as method/stage; the stage is tuned if not given."""
    return name if "/" in name else f"{name}/tuned"


def differences(one: Readings, other: Readings) -> Readings:
    """Subtract readings from readings, of the same model and seed."""
    return {key: value - other[key] for key, value in one.items() if key in other}


def model_with_most(found: Readings) -> str:
    """Return the model with most seeds, the first by name on ties; empty without readings."""
    counts = Counter(model for model, _ in found)
    return min(counts, key=lambda model: (-counts[model], model), default="")


def of_model(found: Readings, model: str) -> list[float]:
    """Return the numbers of one model, a seed each."""
    return [value for (name, _), value in found.items() if name == model]


def signed(value: float) -> str:
    """Write a difference, with its sign."""
    return f"+{short(value)}" if value > 0 else short(value)


def unit_of(of: str, task: str, results: Sequence[Result]) -> str:
    """Name what a quantity on a task is in."""
    if (own := QUANTITIES[of].unit) is not None:
        return own
    return next((result.column.unit for result in results if result.column.name == task), "").replace("bleu", "BLEU")


def _verdict(claim: Claim, tasks: Sequence[str], results: Sequence[Result]) -> Verdict:
    where = tasks[0] if len(tasks) == 1 else f"the mean of {', '.join(tasks)}"
    each = []
    for task in tasks:
        ours, theirs = (readings(results, label, task, claim.of) for label in (claim.method, claim.than))
        each.append(differences(ours, theirs))
    shared = [key for key in each[0] if all(key in found for found in each)]
    means = {key: fmean(found[key] for found in each) for key in shared}
    model = model_with_most(means) if claim.model is None else claim.model
    values = of_model(means, model)
    difference = estimate(values) if values else None
    unit = unit_of(claim.of, tasks[0], results).replace("%", "points")
    found = WITHDRAWN if claim.withdrawn else _found(claim, difference, _sign(claim, tasks[0], results))
    return Verdict(claim, where, model, difference, unit, found)


def _sign(claim: Claim, task: str, results: Sequence[Result]) -> int:
    """Return 1 where the claim is that a quantity is greater, and −1 where it is that it is less."""
    if claim.expect != "better":
        return 1 if claim.expect == "higher" else -1
    better = QUANTITIES[claim.of].greater_is_better
    if better is None:
        columns = (result.column for result in results if result.column.name == task)
        better = next((column.greater_is_better for column in columns), True)
    return 1 if better else -1


def _found(claim: Claim, difference: Estimate | None, sign: int) -> str:
    if difference is None or difference.count < SEEDS or difference.ends is None:
        return OPEN
    low, high = sorted(sign * end for end in difference.ends)
    if not (math.isfinite(low) and math.isfinite(high)):
        return OPEN
    return HOLDS if low > claim.by else FAILS if high <= claim.by else OPEN
