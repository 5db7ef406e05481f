"""The papers' claims, and verdicts of our records on them: differences paired by seed, with t-intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeAlias

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
Readings: TypeAlias = dict[str, dict[int, float]]
"""Model → seed → number."""


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


def _metric(name: str) -> Callable[[Result], float | None]:
    """Read a metric of the test set, or of the validation set where there is no test set."""

    def read(result: Result) -> float | None:
        splits = result.metrics
        order = [split for split in splits if split.startswith("test")] or list(splits)
        return next((float(splits[split][name]) for split in order if name in splits[split]), None)

    return read


def _logged(name: str) -> Callable[[Result], float | None]:
    """Read what was logged last."""

    def read(result: Result) -> float | None:
        return next((float(line[name]) for line in reversed(result.history) if name in line), None)

    return read


def _similarity(name: str, kind: str | None = None) -> Callable[[Result], float | None]:
    """Read the mean over layers, of one kind of attention or of all."""

    def read(result: Result) -> float | None:
        layers = result.measures.get(name, {}).get("layers", {})
        return _mean(value for each in _of(layers, kind) for value in each)

    return read


def _overlap(result: Result) -> float | None:
    return _mean(value for each in result.measures.get("overlap", {}).values() for value in each)


def _distance(name: str) -> Callable[[Result], float | None]:
    def read(result: Result) -> float | None:
        return _mean(layer[name] for each in result.measures.get("discrepancy", {}).values() for layer in each)

    return read


def _dominant(kind: str) -> Callable[[Result], float | None]:
    """Read what the score loses with the dominant heads of a kind."""

    def read(result: Result) -> float | None:
        found = result.measures.get("dominance", {})
        return found[kind] - found["score"] if {kind, "score"} <= found.keys() else None

    return read


def _half_pruned(result: Result) -> float | None:
    """Read what the score loses with half of the heads, at the share that is nearest."""
    found = result.measures.get("pruning")
    if not found:
        return None
    shares, scores = found["shares"], found["scores"]
    half = min(range(len(shares)), key=lambda place: abs(shares[place] - 0.5))
    return float(scores[half] - scores[shares.index(min(shares))])


QUANTITIES: dict[str, Quantity] = {
    "score": Quantity(lambda result: result.score),
    "perplexity": Quantity(_metric("perplexity"), "", False),
    "parameters": Quantity(lambda result: result.parameters, "", False),
    "seconds": Quantity(lambda result: result.seconds, "s", False),
    "task loss": Quantity(_logged("task_loss"), "nats", False),
    "training overlap": Quantity(_logged("bhattacharyya"), ""),
    "overlap": Quantity(_overlap, ""),
    "svcca": Quantity(_similarity("svcca"), ""),
    "svcca cross": Quantity(_similarity("svcca", "cross"), ""),
    "cka": Quantity(_similarity("cka"), ""),
    "cka cross": Quantity(_similarity("cka", "cross"), ""),
    "cosine": Quantity(_distance("cosine"), ""),
    "l2": Quantity(_distance("l2"), ""),
    "dominant encoder": Quantity(_dominant("encoder")),
    "dominant cross": Quantity(_dominant("cross")),
    "dominant decoder": Quantity(_dominant("decoder")),
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
    def interval(self) -> tuple[float, float] | None:
        """Ends of the difference's 95 % t-interval; None of one pair or none."""
        if self.difference is None or (half := self.difference.interval) is None:
            return None
        return self.difference.mean - half, self.difference.mean + half

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
        ends = "" if self.interval is None else "95 % interval {} to {}, ".format(*map(signed, self.interval))
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
    """Read a quantity from the records of one method and stage on one task.

    Args:
        results: all of them.
        label: method or method/stage; the stage is tuned if not given.
        task: name of the column.
        of: the quantity, of `QUANTITIES`.

    Returns:
        Model → seed → number, of the records that have it.
    """
    method, _, stage = label.partition("/")
    found: Readings = {}
    for result in results:
        variant = result.variant
        if (variant.method, variant.stage, result.column.name) == (method, stage or "tuned", task):
            value = QUANTITIES[of].read(result)
            if value is not None:
                found.setdefault(variant.model, {})[result.seed] = float(value)
    return found


def differences(one: Readings, other: Readings) -> Readings:
    """Subtract readings from readings, of the same model and seed."""
    found = {
        model: {seed: value - other[model][seed] for seed, value in seeds.items() if seed in other[model]}
        for model, seeds in one.items()
        if model in other
    }
    return {model: seeds for model, seeds in found.items() if seeds}


def most(found: Readings) -> tuple[str, dict[int, float]]:
    """Return the model with most seeds and its numbers; the first by name on ties."""
    return min(found.items(), key=lambda item: (-len(item[1]), item[0]), default=("", {}))


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
    each = [
        differences(readings(results, claim.method, task, claim.of), readings(results, claim.than, task, claim.of))
        for task in tasks
    ]
    means = _means(each)
    model, values = most(means) if claim.model is None else (claim.model, means.get(claim.model, {}))
    found = estimate(values.values()) if values else None
    sign = {"higher": 1, "lower": -1}.get(claim.expect) or (
        1 if _greater_is_better(claim.of, tasks[0], results) else -1
    )
    unit = unit_of(claim.of, tasks[0], results).replace("%", "points")
    verdict = WITHDRAWN if claim.withdrawn else _found(found, sign, claim.by)
    return Verdict(claim, where, model, found, unit, verdict)


def _found(difference: Estimate | None, sign: int, bound: float) -> str:
    if difference is None or difference.count < SEEDS or (half := difference.interval) is None:
        return OPEN
    middle = sign * difference.mean
    if not math.isfinite(middle) or not math.isfinite(half):
        return OPEN
    return HOLDS if middle - half > bound else FAILS if middle + half <= bound else OPEN


def _means(each: Sequence[Readings]) -> Readings:
    """Average over tasks, for each seed that has all of them."""
    first, *others = each
    found = {
        model: {
            seed: fmean([value, *(other[model][seed] for other in others)])
            for seed, value in seeds.items()
            if all(seed in other.get(model, {}) for other in others)
        }
        for model, seeds in first.items()
    }
    return {model: seeds for model, seeds in found.items() if seeds}


def _greater_is_better(of: str, task: str, results: Sequence[Result]) -> bool:
    own = QUANTITIES[of].greater_is_better
    if own is not None:
        return own
    return next((result.column.greater_is_better for result in results if result.column.name == task), True)


def _of(layers: Mapping[str, Any], kind: str | None) -> list[Any]:
    return list(layers.values()) if kind is None else [layers[kind]] if kind in layers else []


def _mean(values: Iterator[float]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if found else None
