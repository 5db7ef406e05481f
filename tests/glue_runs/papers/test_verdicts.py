"""Verdicts on the papers' claims, against scipy's t-tests, Holm's correction by hand, and a loop over evaluations."""

import math

import numpy as np
import pandas as pd
import pytest
import yaml
from collab_compress_glue_runs.tasks import TASKS
from quantities import QUANTITIES, late_gain
from scipy import stats
from verdicts import CLAIMS, FAILS, HOLDS, NO_CONTROL, NO_RECORDS, OPEN, UNDERTRAINED, evaluate_claims, holm, p_value

CLAIM = {"says": "Heads are better.", "source": "Table 1", "tasks": ["mrpc"], "method": "drophead", "than": "plain"}
PLAIN = [80.0, 82.0, 81.0, 83.1, 80.2]
BETTER = [81.0, 83.2, 82.1, 84.4, 81.5]


@pytest.fixture
def verdict_of(read):
    """Return the verdict of records on one claim."""

    def verdict(path, **changes):
        (row,) = evaluate_claims([CLAIM | changes], read(path)).itertuples()
        return row

    return verdict


@pytest.mark.parametrize(
    ("ours", "expected"),
    [(BETTER, HOLDS), ([79.2, 80.9, 80.0, 82.0, 79.3], FAILS), ([81.0, 79.0, 85.0, 80.0, 83.0], OPEN)],
)
def test_a_difference_is_tested_by_the_paired_t_test(write, verdict_of, ours, expected):
    write("plain", PLAIN)
    row = verdict_of(write("drophead", ours))
    test = stats.ttest_rel(ours, PLAIN)
    assert (row.difference, row.p) == (pytest.approx(np.mean(np.subtract(ours, PLAIN))), pytest.approx(test.pvalue))
    assert (row.low, row.high) == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert row.verdict == expected


@pytest.mark.parametrize("mean", [-2.0, -0.9, 0.0, 0.4, 2.5])
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_bounds_are_tested_by_two_one_sided_tests(write, verdict_of, mean, spread):
    changes = mean + spread * np.array([0.3, -0.4, 0.1, 0.2, -0.2])
    write("plain", PLAIN)
    path = write("drophead", list(np.add(PLAIN, changes)))
    low, high = stats.ttest_1samp(changes, 0).confidence_interval(0.95)

    above = stats.ttest_1samp(changes, -1.0, alternative="greater").pvalue
    row = verdict_of(path, loses_at_most=1.0)
    assert row.p == pytest.approx(min(1, 2 * (above if mean > -1 else 1 - above)))
    assert row.verdict == (HOLDS if low > -1 else FAILS if high < -1 else OPEN)

    below = stats.ttest_1samp(changes, 1.0, alternative="less").pvalue
    row = verdict_of(path, within=1.0)
    p = max(above, below)
    assert row.p == pytest.approx(min(1, 2 * (p if -1 < mean < 1 else 1 - p)))
    inside, outside = low > -1 and high < 1, high < -1 or low > 1
    assert row.verdict == (HOLDS if inside else FAILS if outside else OPEN)


def test_the_same_scores_stay_within_any_bound_and_are_not_better(write, verdict_of):
    write("plain", PLAIN)
    path = write("drophead", PLAIN)
    assert verdict_of(path, within=0.1).verdict == verdict_of(path, loses_at_most=0.1).verdict == HOLDS
    assert verdict_of(path).verdict == OPEN
    assert p_value(pd.Series([1.0] * 5), 0.0, math.inf) == p_value(pd.Series([-1.0] * 5), 0.0, math.inf) == 0.0


def test_holm_by_hand():
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    values = np.random.default_rng(0).uniform(size=9) ** 3
    for place, value in enumerate(values):  # the largest step among those that are no greater
        steps = [(np.sum(values >= other)) * other for other in values if other <= value]
        assert holm(values)[place] == pytest.approx(min(1.0, max(steps)))


def test_p_is_corrected_over_all_claims_and_tasks_of_a_paper(write, read):
    write("plain", PLAIN)
    write("hsic", [80.4, 82.9, 80.9, 83.3, 81.0])
    path = write("drophead", BETTER)
    claims = [CLAIM, CLAIM | {"method": "hsic"}, CLAIM | {"method": "none", "tasks": ["mrpc", "rte"]}]
    table = evaluate_claims(claims, read(path)).sort_index()
    raw = [stats.ttest_rel(ours, PLAIN).pvalue for ours in (BETTER, [80.4, 82.9, 80.9, 83.3, 81.0])]
    assert list(table["p"]) == pytest.approx([4 * raw[0], 3 * raw[1], math.nan, math.nan], nan_ok=True)


@pytest.mark.parametrize(("expect", "expected"), [("better", FAILS), ("higher", HOLDS), ("lower", FAILS)])
def test_lower_perplexity_is_better(write, verdict_of, expect, expected):
    write("plain", [100.0, 104.0, 99.0, 101.0, 98.0], task="ptb")
    path = write("drophead", [110.1, 114.0, 109.0, 110.9, 108.2], task="ptb")
    assert verdict_of(path, tasks=["ptb"], expect=expect).verdict == expected


def test_fewer_than_five_seeds_or_numbers_that_are_not_finite_are_inconclusive(write, verdict_of):
    write("plain", PLAIN[:4])
    row = verdict_of(write("drophead", BETTER))
    assert (row.verdict, row.seeds, math.isnan(row.p)) == (OPEN, 4, True)
    write("plain", PLAIN, task="rte")
    row = verdict_of(write("drophead", [90.0, math.nan, 92.0, 93.0, 95.0], task="rte"), tasks=["rte"])
    assert (row.verdict, row.seeds, math.isnan(row.p)) == (OPEN, 5, True)


def test_without_the_control_there_is_no_verdict(write, verdict_of):
    path = write("drophead", BETTER)
    assert (verdict_of(path).verdict, verdict_of(path, method="hsic").verdict) == (NO_CONTROL, NO_RECORDS)


def curve(*scores, key="eval_bleu"):
    """The log of a training of evenly spaced evaluations, with losses between them."""
    lines = []
    for epoch, score in enumerate(scores, 1):
        lines += [{"loss": 3.0, "epoch": epoch - 0.5}, {"eval_loss": 9.0 - epoch, key: score, "epoch": float(epoch)}]
    return lines


FLAT = curve(5.0, 20.0, 28.0, 30.0, 31.0, 31.5, 31.4, 31.8)


@pytest.mark.parametrize(
    ("history", "share"),
    [
        (curve(6.5, 14.2, 18.6), (18.6 - 14.2) / (18.6 - 6.5)),  # three epochs: the last is the last quarter
        (FLAT, 0.3 / 26.8),
        (curve(30.0, 29.0, 28.0, 27.0), 0.0),
        (curve(4.4, 3.8, 3.5, 3.4, key="eval_loss"), 0.1 / 1.0),
        (curve(5.0), math.inf),
        (curve(5.0, math.nan, 6.0), math.inf),
        ([], math.inf),
    ],
)
def test_the_late_gain_of_a_training(history, share):
    assert late_gain(history) == pytest.approx(share)


@pytest.mark.parametrize(
    ("history", "expected"), [(curve(6.5, 14.2, 18.6), UNDERTRAINED), ([], UNDERTRAINED), (FLAT, HOLDS)]
)
@pytest.mark.parametrize("undertrained", ["plain", "drophead"])
def test_untrained_models_must_have_been_trained_to_the_end(write, verdict_of, history, expected, undertrained):
    for method, scores in (("plain", PLAIN), ("drophead", BETTER)):
        log = history if method == undertrained else FLAT
        path = write(method, scores, history=log, recipe={"fresh": {"width": 32}})
    row = verdict_of(path)
    assert (row.verdict, math.isnan(row.p)) == (expected, expected == UNDERTRAINED)


def test_pretrained_models_need_no_history_and_pairs_of_different_revisions_are_listed(write, verdict_of):
    write("plain", PLAIN, history=curve(6.5, 14.2, 18.6), environment={"revision": "aaa"})
    path = write("drophead", BETTER, environment={"revision": "bbb"})
    assert (verdict_of(path).verdict, verdict_of(path).revisions) == (HOLDS, "bbb and aaa")
    assert verdict_of(path, method="plain").revisions == ""


def test_the_mean_is_over_tasks_of_one_seed(write, verdict_of):
    write("plain", [80.0, 82.0, 81.0])
    write("plain", [60.0, 61.0], task="rte")
    write("drophead", [81.0, 83.0, 88.0])
    path = write("drophead", [60.5, 63.0], task="rte")
    row = verdict_of(path, tasks=["mrpc", "rte"], mean=True)
    assert (row.seeds, row.where) == (2, "the mean of mrpc, rte")
    assert row.difference == pytest.approx(np.mean([(1 + 0.5) / 2, (1 + 2) / 2]))


def test_models_do_not_mix_and_the_one_with_most_pairs_counts(write, verdict_of):
    write("plain", PLAIN)
    write("plain", [10.0], model="other")
    write("drophead", [90.0], model="other")
    path = write("drophead", BETTER)
    row = verdict_of(path)
    assert (row.model, row.seeds, row.verdict) == ("minilm", 5, HOLDS)
    row = verdict_of(path, model="other")
    assert (row.model, row.difference, row.verdict) == ("other", 80.0, OPEN)
    assert verdict_of(path, model="another").seeds == 0


def test_claims_are_of_tasks_and_quantities_that_there_are():
    for claims in yaml.safe_load(CLAIMS.read_text(encoding="utf-8")).values():
        assert len({(claim["says"], *claim["tasks"]) for claim in claims}) == len(claims)
        for claim in claims:
            assert claim["says"].endswith(".")
            assert claim["source"]
            assert {task.split()[0] for task in claim["tasks"]} <= TASKS.keys()
            assert claim.get("of", "score") in QUANTITIES
