"""The papers' claims, and the verdicts of our records: tests of differences paired by seed.

Differences are tested by two-sided t-tests over pairs; a bound to one side by a one-sided t-test at 2.5 %, a bound to
both sides by two (TOST: Schuirmann, 1987); p is twice the larger. Where outcomes of single examples are known, p and
the 95 % interval include the chance of the test set; p is never below that without it. Holm's correction is over all
claims of a paper, those without records too, so that a verdict does not depend on how many have been tried. With p <
0.05 a claim holds if the mean is on its side of the bound, and does not if it is on the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeAlias

import numpy as np
import yaml
from scipy import stats

from collab_compress.report.section import short

from .comparison import Estimate, estimate
from .papers import (
    QUANTITIES,
    labelled,
    model_with_most,
    results_by_seed,
    signed,
    unit_of,
)
from .recipe import parse
from .resampling import error_of_mean
from .results import Result, differing_revisions

CLAIMS = Path(__file__).with_name("claims.yaml")
SEEDS = 5
"""Least number of pairs of a verdict."""

LATE_GAIN = 0.05
"""Most of its validation gain that a model may make in the last quarter of a training that counts as finished."""

HOLDS, FAILS, SAME, OPEN = "holds", "does not hold", "no difference", "cannot be told"
UNDERTRAINED, NO_CONTROL = "undertrained, cannot be told", "no control, cannot be told"
OUTCOMES = (HOLDS, FAILS, SAME, OPEN, UNDERTRAINED, NO_CONTROL)
Pair: TypeAlias = tuple[Result, Result]


@dataclass(frozen=True)
class Claim:
    """A paper's claim, in terms of records; claims.yaml explains the fields."""

    says: str
    source: str
    tasks: tuple[str, ...]
    method: str
    than: str
    expect: Literal["better", "higher", "lower"] = "better"
    loses_at_most: float | None = None
    within: float | None = None
    of: str = "score"
    mean: bool = False
    model: str | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """Ends of the claimed differences, greater being as the claim expects."""
        if self.within is not None:
            return -self.within, self.within
        return -(self.loses_at_most or 0.0), math.inf

    @property
    def of_difference(self) -> bool:
        """Whether a difference is claimed, not a bound."""
        return self.within is None and self.loses_at_most is None


@dataclass(frozen=True)
class Verdict:
    """Verdict of the records on a claim."""

    claim: Claim
    where: str  # the task, or the mean of several
    model: str = ""  # empty without records
    unit: str = ""
    sign: int = 1  # 1 where the claim is that a quantity is greater, −1 for less
    difference: Estimate | None = None  # of the method to the control, over the seeds that both have
    interval: tuple[float, float] | None = None  # 95 %
    of_examples: bool = False  # whether the interval includes the chance of the test set
    p: float | None = None  # corrected; None if nothing is tested
    outcome: str = OPEN
    reasons: tuple[str, ...] = ()  # why it cannot be told
    revisions: tuple[str, ...] = ()  # of this package that differ within pairs

    @property
    def compared(self) -> str:
        """Subject and control of the comparison."""
        of = "" if self.claim.of == "score" else f"{self.claim.of} of "
        return f"{of}{self.claim.method} − {self.claim.than}"

    @property
    def change(self) -> str:
        """The mean difference with its unit; empty without pairs."""
        return "" if self.difference is None else f"{signed(self.difference.mean)} {self.unit}".strip()

    @property
    def sentence(self) -> str:
        """The verdict with the difference and its interval, p and seeds."""
        start = f"{self.outcome.capitalize()}: {self.claim.says} ({self.claim.source})"
        reasons = "".join(f" {reason[0].upper()}{reason[1:]}." for reason in self.reasons)
        if self.difference is None:
            return f"{start}{reasons}"
        parts = []
        if self.interval is not None:
            by = "seeds and test examples" if self.of_examples else "seeds alone"
            parts.append(f"95 % interval {signed(self.interval[0])} to {signed(self.interval[1])}, of {by}")
        if self.p is not None:
            parts.append(f"p = {short(self.p)}")
        parts.append(f"{self.difference.count} seed{'s' * (self.difference.count != 1)}")
        where = f"{self.where}, {self.model}" if "(" in self.model else self.where  # one of several shapes or devices
        return f"{start} {self.compared} is {self.change} ({'; '.join(parts)}) on {where}.{reasons}"


def read_claims() -> dict[str, list[Claim]]:
    """Read the papers' claims: the paper's key → its claims."""
    claims = yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))
    return {paper: [parse(Claim, claim, f"a claim of {paper}") for claim in claims[paper]] for paper in claims}


def verdicts_of(results: Sequence[Result]) -> dict[str, list[Verdict]]:
    """Judge all claims: the paper's key → verdicts."""
    return {paper: judge(claims, results) for paper, claims in read_claims().items()}


def tried(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return the verdicts with records of the method, sorted by outcome."""
    with_records = [
        verdict for verdict in verdicts if verdict.difference is not None or verdict.outcome == NO_CONTROL
    ]
    return sorted(with_records, key=lambda verdict: OUTCOMES.index(verdict.outcome))


def counted(verdicts: Iterable[Verdict]) -> str:
    """Return how many verdicts there are of each outcome, as text."""
    counts = Counter(verdict.outcome.removesuffix(f", {OPEN}") for verdict in verdicts)
    several = {HOLDS: "hold", FAILS: "do not hold"}
    words = (f"{n} {several.get(outcome, outcome) if n > 1 else outcome}" for outcome, n in counts.most_common())
    return ", ".join(words) or "none"


def judge(claims: Sequence[Claim], results: Sequence[Result]) -> list[Verdict]:
    """Return the verdicts of the records on the claims of one paper, for each task of a claim or for their mean.

    Where there are several models and the claim names none, the one with most pairs counts.
    """
    verdicts = [
        _compared(claim, tasks, results)
        for claim in claims
        for tasks in ([claim.tasks] if claim.mean else [(task,) for task in claim.tasks])
    ]
    corrected = holm([1.0 if verdict.p is None else verdict.p for verdict in verdicts])
    return [
        verdict if verdict.p is None else _decided(replace(verdict, p=p))
        for verdict, p in zip(verdicts, corrected, strict=True)
    ]


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm, 1979): (m − k) times the kth from below, 1 at most."""
    p = np.asarray(values, dtype=np.float64)
    order = np.argsort(p)
    corrected = np.empty_like(p)
    corrected[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1.0)
    return [float(value) for value in corrected]


def p_value(mean: float, error: float, freedom: float, bounds: tuple[float, float]) -> float:
    """Return the two-sided p-value of a mean that is inside bounds, or else of one that is outside.

    Inside, it is twice the larger of two one-sided t-tests, each of a bound.

    Args:
        mean: of the differences.
        error: its standard error.
        freedom: degrees of freedom of the error.
        bounds: the lower and the upper; infinite for none.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        above, below = np.nan_to_num((mean - np.array(bounds)) / np.float64(error))
    p = max(stats.t.sf(above, freedom), stats.t.cdf(below, freedom))
    return float(min(2 * (p if bounds[0] < mean < bounds[1] else 1 - p), 1.0))


def late_gain(history: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of a model's gain on the validation data that it made in the last quarter of its training.

    The gain is from the first evaluation to the best, in BLEU where it was logged, or else in loss; the late gain is
    from the best of the first three quarters. None without two evaluations, or with one that is not finite.
    """
    key, sign = ("eval_bleu", 1) if any("eval_bleu" in line for line in history) else ("eval_loss", -1)
    points = [(float(line["epoch"]), sign * float(line[key])) for line in history if key in line and "epoch" in line]
    if len(points) < 2 or not np.isfinite(points).all():
        return None
    values = [value for _, value in points]
    early = [value for epoch, value in points if epoch <= 0.75 * points[-1][0]]
    gain = max(values) - values[0]
    return (max(values) - max(early, default=values[0])) / gain if gain > 0 else 0.0


def _compared(claim: Claim, tasks: Sequence[str], results: Sequence[Result]) -> Verdict:
    """Return a verdict that is open for want of records or training, or one whose p is to be corrected."""
    where = tasks[0] if len(tasks) == 1 else f"the mean of {', '.join(tasks)}"
    results = [result for result in results if claim.model in (None, result.variant.model)]
    verdict = Verdict(claim, where, unit=unit_of(claim.of, tasks[0], results).replace("%", "points"))
    ours, controls = (
        [results_by_seed(results, labelled(label), task, claim.of) for task in tasks]
        for label in (claim.method, claim.than)
    )
    keys = [key for key in ours[0] if all(key in of_task for of_task in (*ours, *controls))]
    model = model_with_most(keys)
    keys = [key for key in keys if key[0] == model]
    if not keys:
        if all(ours) and not all(controls):
            return replace(verdict, outcome=NO_CONTROL, reasons=(f"no record of {claim.than} on {where}",))
        return replace(verdict, reasons=(f"no seed has records of both sides of {verdict.compared} on {where}",))
    pairs = [[(of_task[key], control[key]) for of_task, control in zip(ours, controls, strict=True)] for key in keys]
    values = np.array([fmean(_difference(pair, claim.of) for pair in of_seed) for of_seed in pairs])
    resampled = _resampled(pairs, claim.of)
    flat = [pair for of_seed in pairs for pair in of_seed]
    mean = float(values.mean())
    is_finite = bool(np.isfinite(values).all())
    if len(keys) > 1 and is_finite:
        error, freedom = error_of_mean(values, resampled)
        width = stats.t.ppf(0.975, freedom) * error
        verdict = replace(verdict, interval=(mean - width, mean + width))
    verdict = replace(
        verdict,
        model=model,
        sign=_sign(claim, flat[0][0]),
        difference=estimate(values),
        of_examples=resampled is not None,
        revisions=differing_revisions(flat),
    )
    undertrained = [
        reason
        for name, side in zip((claim.method, claim.than), zip(*flat, strict=True), strict=True)
        for reason in _undertrained(name, side)
    ]
    reasons = tuple(undertrained)
    if len(keys) < SEEDS:
        reasons += (f"{len(keys)} seed{'s' * (len(keys) != 1)}, and a verdict takes {SEEDS}",)
    elif not is_finite:
        reasons += ("a number is not finite",)
    if reasons:
        outcome = UNDERTRAINED if undertrained else OPEN
        return replace(verdict, outcome=outcome, reasons=reasons)
    errors = ((error, freedom), error_of_mean(values))
    return replace(verdict, p=max(p_value(verdict.sign * mean, *error, claim.bounds) for error in errors))


def _decided(verdict: Verdict) -> Verdict:
    """Return a verdict with the outcome of its corrected p."""
    if verdict.difference is None or verdict.p is None:
        return verdict
    (lower, upper), mean = verdict.claim.bounds, verdict.sign * verdict.difference.mean
    if verdict.claim.of_difference and verdict.interval == (0, 0):
        return replace(verdict, outcome=SAME)
    if verdict.p < 0.05:
        return replace(verdict, outcome=HOLDS if lower < mean < upper else FAILS)
    return verdict


def _difference(pair: Pair, of: str) -> float:
    ours, control = (QUANTITIES[of].read(result) for result in pair)
    return math.nan if ours is None or control is None else float(ours) - float(control)


def _resampled(pairs: Sequence[Sequence[Pair]], of: str) -> np.ndarray | None:
    """Return the differences on resampled test sets, (n, draws); None where outcomes of examples are not known."""
    if not all(of in result.resampled for of_seed in pairs for pair in of_seed for result in pair):
        return None
    differences = [[ours.resampled[of] - control.resampled[of] for ours, control in of_seed] for of_seed in pairs]
    mean: np.ndarray = np.mean(differences, axis=1)
    return mean


def _undertrained(name: str, results: Sequence[Result]) -> list[str]:
    """Return why models that were trained from scratch are not known to be trained to the end."""
    gains = [late_gain(result.history) for result in results if result.recipe.get("fresh")]
    known = [gain for gain in gains if gain is not None]
    if len(known) < len(gains):
        return [f"{name} has no validation history"]
    if known and fmean(known) > LATE_GAIN:
        return [f"{name} made {fmean(known):.0%} of its validation gain in the last quarter of its training"]
    return []


def _sign(claim: Claim, result: Result) -> int:
    """Return 1 if the claim is that a quantity is greater, −1 if it is less."""
    if claim.expect != "better":
        return 1 if claim.expect == "higher" else -1
    better = QUANTITIES[claim.of].greater_is_better
    return 1 if (result.column.greater_is_better if better is None else better) else -1
