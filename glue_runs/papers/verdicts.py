"""Verdicts of our records on the papers' claims (claims.yaml), from differences paired by seed.

    python glue_runs/papers/verdicts.py [RECORDS ...]

Differences are tested by two-sided t-tests; a bound to one side by a one-sided t-test at 2.5 %, a bound to both sides
by two (TOST: Schuirmann, 1987), and p is twice the larger. Holm's correction is over all claims of a paper, those
without records too. With p < 0.05 a claim holds if the mean is on its side of the bound, and does not if it is not.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from quantities import LESS_IS_BETTER, OWN_UNITS, read_records, tabulate
from scipy import stats

from collab_compress.report.section import short

CLAIMS = Path(__file__).with_name("claims.yaml")
SEEDS = 5  # least pairs of a verdict
LATE_GAIN = 0.05  # most of its validation gain that a trained model may make in the last quarter of its training
HOLDS, FAILS, OPEN = "holds", "does not hold", "inconclusive"
UNDERTRAINED, NO_CONTROL, NO_RECORDS = "undertrained", "no control runs", "no records"
OUTCOMES = [HOLDS, FAILS, OPEN, UNDERTRAINED, NO_CONTROL, NO_RECORDS]


def verdicts_of(records: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Judge all claims: the paper's key → its verdicts."""
    claims = yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))
    return {paper: evaluate_claims(of_paper, records) for paper, of_paper in claims.items()}


def evaluate_claims(claims: Sequence[Mapping[str, Any]], records: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each claim of one paper and task, or mean of tasks: difference, interval, p and verdict."""
    rows = []
    for claim in claims:
        for tasks in [claim["tasks"]] if claim.get("mean") else [[task] for task in claim["tasks"]]:
            rows.append(compare(claim, tasks, records))
    table = pd.DataFrame(rows)
    table["p"] = holm(table["p"].fillna(1.0).to_numpy()) + 0 * table["p"]  # NaN stays
    inside = (table["sign"] * table["difference"]).between(table["lower"], table["upper"], inclusive="neither")
    table.loc[(table["p"] < 0.05) & inside, "verdict"] = HOLDS
    table.loc[(table["p"] < 0.05) & ~inside, "verdict"] = FAILS
    return table.sort_values("verdict", key=lambda verdicts: verdicts.map(OUTCOMES.index), kind="stable")


@np.errstate(invalid="ignore")  # of infinite numbers
def compare(claim: Mapping[str, Any], tasks: Sequence[str], records: pd.DataFrame) -> dict[str, Any]:
    """Return the difference of a claim's two sides over the seeds that both have, and p before correction.

    Where there are several models and the claim names none, the one with most pairs counts.
    """
    of, names = claim.get("of", "score"), (claim["method"], claim["than"])
    chosen = records[records["task"].isin(tasks) & records[of].notna()]
    chosen = chosen[chosen["model"] == claim.get("model", chosen["model"])]
    ours, controls = (chosen[chosen["label"] == name].set_index(["model", "seed", "task"]) for name in names)
    pairs = ours.merge(controls, left_index=True, right_index=True, suffixes=[" of method", " of control"])
    pairs = pairs.groupby(["model", "seed"]).filter(lambda of_seed: len(of_seed) == len(tasks))
    model = pairs.groupby("model").size().idxmax() if len(pairs) else ""
    pairs = pairs[pairs.index.get_level_values("model") == model]
    values = (pairs[f"{of} of method"] - pairs[f"{of} of control"]).fillna(np.inf).groupby("seed").mean()
    mean, half = values.mean(), stats.t.ppf(0.975, len(values) - 1) * values.sem()
    revisions = pairs[["revision of method", "revision of control"]].drop_duplicates().to_numpy()
    unit = OWN_UNITS.get(of, "".join(chosen["unit"][:1]))
    better = -1 if of in LESS_IS_BETTER else chosen["sign"].min()
    sign = {"higher": 1, "lower": -1}.get(claim.get("expect"), better)
    lower, upper = -claim.get("loses_at_most", claim.get("within", 0.0)), claim.get("within", np.inf)
    late = pairs[["late gain of method", "late gain of control"]].mean().max()
    verdict = UNDERTRAINED if late > LATE_GAIN else OPEN
    if not len(values):
        verdict = NO_CONTROL if len(ours) and not len(controls) else NO_RECORDS
    is_tested = verdict == OPEN and len(values) >= SEEDS and np.isfinite(values).all()
    return {
        **{name: claim[name] for name in ("says", "source")},
        "compared": f"{'' if of == 'score' else f'{of} of '}{' − '.join(names)}",
        "where": tasks[0] if len(tasks) == 1 else f"the mean of {', '.join(tasks)}",
        "model": model,
        "unit": unit,
        "change": f"{signed(mean)} [{signed(mean - half)}, {signed(mean + half)}] {unit}".strip() * bool(len(values)),
        "seeds": len(values),
        "difference": mean,
        "low": mean - half,
        "high": mean + half,
        "sign": sign,
        "lower": lower,
        "upper": upper,
        "p": p_value(sign * values, lower, upper) if is_tested else np.nan,
        "verdict": verdict,
        "revisions": "; ".join(f"{one} and {other}" for one, other in revisions if one != other),
    }


def p_value(differences: pd.Series, lower: float, upper: float) -> float:
    """Return the two-sided p-value of a mean that is inside bounds, or else of one that is outside."""
    mean, freedom = differences.mean(), len(differences) - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        above, below = np.nan_to_num((mean - np.array([lower, upper])) / differences.sem())
    p = max(stats.t.sf(above, freedom), stats.t.cdf(below, freedom))
    return float(min(2 * (p if lower < mean < upper else 1 - p), 1.0))


def holm(p: np.ndarray) -> np.ndarray:
    """Return p-values corrected for their number (Holm, 1979): (m − k) times the kth from below, 1 at most."""
    order = np.argsort(p)
    sorted_p = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return sorted_p[np.argsort(order)].clip(max=1.0)


def signed(value: float) -> str:
    """Return a difference as text, with its sign."""
    return f"+{short(value)}" if value > 0 else short(value)


if __name__ == "__main__":
    for paper, table in verdicts_of(tabulate(read_records())).items():
        print(paper, table[["says", "where", "compared", "change", "p", "seeds", "verdict"]].to_string(), sep="\n")
