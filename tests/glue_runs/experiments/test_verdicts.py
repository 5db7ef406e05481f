"""Verdicts on the papers' claims, against scipy's t-tests, Holm's correction by hand, and a loop over evaluations."""

import json
import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from collab_compress_glue_runs.experiments.forest import forest_plot
from collab_compress_glue_runs.experiments.papers import QUANTITIES, read_papers
from collab_compress_glue_runs.experiments.resampling import error_of_mean
from collab_compress_glue_runs.experiments.results import read_results
from collab_compress_glue_runs.experiments.verdicts import (
    FAILS,
    HOLDS,
    NO_CONTROL,
    OPEN,
    SAME,
    UNDERTRAINED,
    Claim,
    counted,
    holm,
    judge,
    late_gain,
    p_value,
    read_claims,
    tried,
)
from collab_compress_glue_runs.tasks import TASKS
from scipy import stats
from tiny_recipes import make_record

from collab_compress.errors import RecipeError

CLAIM = Claim("Heads are better.", "Table 1", ("mrpc",), "drophead", "plain")
PLAIN = [80.0, 82.0, 81.0, 83.1, 80.2]
BETTER = [81.0, 83.2, 82.1, 84.4, 81.5]


def verdict(path, claim=CLAIM):
    (judged,) = judge([claim], read_results(path))
    return judged


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (BETTER, HOLDS),
        ([79.2, 80.9, 80.0, 82.0, 79.3], FAILS),
        ([81.0, 79.0, 85.0, 80.0, 83.0], OPEN),
        (PLAIN, SAME),  # nothing changed, which is no failure
    ],
)
def test_a_difference_is_tested_by_the_paired_t_test(write, ours, expected):
    write("plain", PLAIN)
    judged = verdict(write("drophead", ours))
    assert judged.difference.mean == pytest.approx(np.mean(np.subtract(ours, PLAIN)))
    if expected == SAME:
        assert (judged.p, judged.interval) == (1.0, (0.0, 0.0))
    else:
        test = stats.ttest_rel(ours, PLAIN)
        assert judged.p == pytest.approx(test.pvalue)
        assert judged.interval == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert judged.outcome == expected
    assert not judged.of_examples
    assert judged.sentence.startswith(f"{expected.capitalize()}: Heads are better. (Table 1) drophead − plain is ")


@pytest.mark.parametrize("mean", [-2.0, -0.9, 0.0, 0.4, 2.5])
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_bounds_are_tested_by_two_one_sided_tests(write, mean, spread):
    changes = mean + spread * np.array([0.3, -0.4, 0.1, 0.2, -0.2])
    write("plain", PLAIN)
    path = write("drophead", list(np.add(PLAIN, changes)))
    low, high = stats.ttest_1samp(changes, 0).confidence_interval(0.95)

    above = stats.ttest_1samp(changes, -1.0, alternative="greater").pvalue
    judged = verdict(path, replace(CLAIM, loses_at_most=1.0))
    assert judged.p == pytest.approx(min(1, 2 * (above if mean > -1 else 1 - above)))
    assert judged.outcome == (HOLDS if low > -1 else FAILS if high < -1 else OPEN)

    below = stats.ttest_1samp(changes, 1.0, alternative="less").pvalue
    judged = verdict(path, replace(CLAIM, within=1.0))
    p = max(above, below)
    assert judged.p == pytest.approx(min(1, 2 * (p if -1 < mean < 1 else 1 - p)))
    inside, outside = low > -1 and high < 1, high < -1 or low > 1
    assert judged.outcome == (HOLDS if inside else FAILS if outside else OPEN)


def test_the_same_scores_stay_within_any_bound(write):
    write("plain", PLAIN)
    path = write("drophead", PLAIN)
    assert verdict(path, replace(CLAIM, within=0.1)).outcome == HOLDS
    assert verdict(path, replace(CLAIM, loses_at_most=0.1)).outcome == HOLDS


def test_a_constant_difference_has_no_error():
    assert p_value(1.0, 0.0, math.inf, (0.0, math.inf)) == 0.0
    assert p_value(-1.0, 0.0, math.inf, (0.0, math.inf)) == 0.0
    assert p_value(0.0, 0.0, math.inf, (0.0, math.inf)) == 1.0


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == []
    values = np.random.default_rng(0).uniform(size=9) ** 3
    for place, value in enumerate(values):  # the largest step among those that are no greater
        steps = [(np.sum(values >= other)) * other for other in values if other <= value]
        assert holm(values)[place] == pytest.approx(min(1.0, max(steps)))


def test_p_is_corrected_over_all_claims_of_a_paper(write):
    write("plain", PLAIN)
    write("hsic", [80.4, 82.9, 80.9, 83.3, 81.0])
    write("few", [90.0, 91.0])
    path = write("drophead", BETTER)
    claims = [CLAIM, replace(CLAIM, method="hsic"), replace(CLAIM, method="few"), replace(CLAIM, method="none")]
    judged = judge(claims, read_results(path))
    raw = [stats.ttest_rel(ours, PLAIN).pvalue for ours in (BETTER, [80.4, 82.9, 80.9, 83.3, 81.0])]
    assert [one.p for one in judged] == [pytest.approx(4 * raw[0]), pytest.approx(3 * raw[1]), None, None]


def test_a_claim_on_two_tasks_counts_twice(write):
    for task in ("mrpc", "rte"):
        write("plain", PLAIN, task=task)
        path = write("drophead", BETTER, task=task)
    first, second = judge([replace(CLAIM, tasks=("mrpc", "rte"))], read_results(path))
    assert first.p == second.p == pytest.approx(2 * stats.ttest_rel(BETTER, PLAIN).pvalue)


@pytest.mark.parametrize(("expect", "expected"), [("better", FAILS), ("higher", HOLDS), ("lower", FAILS)])
def test_lower_perplexity_is_better(write, expect, expected):
    write("plain", [100.0, 104.0, 99.0, 101.0, 98.0], task="ptb")
    path = write("drophead", [110.1, 114.0, 109.0, 110.9, 108.2], task="ptb")
    assert verdict(path, replace(CLAIM, tasks=("ptb",), expect=expect)).outcome == expected


def test_fewer_than_five_seeds_tell_nothing(write):
    write("plain", PLAIN[:4])
    judged = verdict(write("drophead", BETTER))
    assert (judged.outcome, judged.difference.count, judged.p) == (OPEN, 4, None)
    assert judged.sentence.endswith("; 4 seeds) on mrpc. 4 seeds, and a verdict takes 5.")
    assert verdict(write("same", PLAIN), replace(CLAIM, method="same")).outcome == OPEN  # not "no difference"


def test_without_the_control_it_cannot_be_told(write):
    path = write("drophead", BETTER)
    judged = verdict(path)
    assert judged.outcome == NO_CONTROL == "no control, cannot be told"
    assert judged.sentence == "No control, cannot be told: Heads are better. (Table 1) No record of plain on mrpc."
    assert tried([judged]) == [judged]
    assert counted([judged, judged]) == "2 no control"
    told = [replace(judged, outcome=outcome) for outcome in ("holds", "holds", "does not hold")]
    assert counted(told) == "2 hold, 1 does not hold"
    neither = verdict(path, replace(CLAIM, method="hsic"))
    assert (neither.outcome, tried([neither])) == (OPEN, [])
    write("plain", PLAIN, stage="dk128-again", model="a")
    write("plain", PLAIN, stage="dense-again", model="b")
    path = write("plain", PLAIN)
    again = replace(CLAIM, method="plain/dk128-again", than="plain/dense-again", model="a")
    assert verdict(path, again).outcome == NO_CONTROL


def test_what_is_no_number_tells_nothing(write):
    write("plain", PLAIN)
    judged = verdict(write("drophead", [90.0, math.nan, 92.0, 93.0, 95.0]))
    assert (judged.outcome, judged.reasons) == (OPEN, ("a number is not finite",))


def curve(*scores, key="eval_bleu"):
    """The log of a training of evenly spaced evaluations, with losses between them."""
    lines = []
    for epoch, score in enumerate(scores, 1):
        lines += [{"loss": 3.0, "epoch": epoch - 0.5}, {"eval_loss": 9.0 - epoch, key: score, "epoch": float(epoch)}]
    return lines


@pytest.mark.parametrize(
    ("history", "share"),
    [
        (curve(6.5, 14.2, 18.6), (18.6 - 14.2) / (18.6 - 6.5)),  # three epochs: the last is the last quarter
        (curve(5.0, 20.0, 28.0, 30.0, 31.0, 31.5, 31.4, 31.8), 0.3 / 26.8),
        (curve(30.0, 29.0, 28.0, 27.0), 0.0),
        (curve(4.4, 3.8, 3.5, 3.4, key="eval_loss"), 0.1 / 1.0),
        (curve(5.0), None),
        (curve(5.0, math.nan, 6.0), None),
        ([{"loss": 3.0, "epoch": 1.0}, {"loss": 2.0, "epoch": 2.0}], None),
        ([], None),
    ],
)
def test_the_late_gain_of_a_training(history, share):
    assert late_gain(history) == (None if share is None else pytest.approx(share))


FLAT = curve(5.0, 20.0, 28.0, 30.0, 31.0, 31.5, 31.4, 31.8)


@pytest.mark.parametrize(
    ("history", "reason"),
    [
        (curve(6.5, 14.2, 18.6), "made 36% of its validation gain in the last quarter of its training"),
        ([], "has no validation history"),
        (FLAT, None),
    ],
)
@pytest.mark.parametrize("undertrained", ["plain", "drophead"])
def test_untrained_models_must_have_been_trained_to_the_end(write, history, reason, undertrained):
    for method, scores in (("plain", PLAIN), ("drophead", BETTER)):
        log = history if method == undertrained else FLAT
        path = write(method, scores, history=log, recipe={"fresh": {"width": 32}})
    judged = verdict(path)
    assert judged.outcome == (HOLDS if reason is None else UNDERTRAINED)
    assert judged.reasons == (() if reason is None else (f"{undertrained} {reason}",))
    assert (judged.p is None) == (reason is not None)


def test_pretrained_models_need_no_history(write):
    write("plain", PLAIN, history=curve(6.5, 14.2, 18.6))
    assert verdict(write("drophead", BETTER)).outcome == HOLDS


def test_pairs_of_different_revisions_are_flagged(write):
    write("plain", PLAIN, environment={"revision": "aaa"})
    judged = verdict(write("drophead", BETTER, environment={"revision": "bbb"}))
    assert (judged.outcome, judged.revisions) == (HOLDS, ("bbb and aaa",))
    judged = verdict(write("hsic", BETTER), replace(CLAIM, method="hsic"))
    assert judged.revisions == ("unknown and aaa",)
    write("old", PLAIN)
    judged = verdict(
        write("older", BETTER, environment={"revision": "unknown"}), replace(CLAIM, method="older", than="old")
    )
    assert judged.revisions == ()


@pytest.mark.parametrize(("count", "plain", "ours", "outcome"), [(60, 40, 43, OPEN), (600, 150, 510, HOLDS)])
def test_the_interval_includes_the_test_set_where_outcomes_are_known(tmp_path, count, plain, ours, outcome):
    """A difference of all seeds that a small test set does not bear, and one that is large."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, count).astype(np.int16)
    for method, correct, cycle in (("plain", plain, 2), ("drophead", ours, 3)):
        for seed in range(5):
            folder = tmp_path / "runs" / method / str(seed)
            folder.mkdir(parents=True)
            places = generator.permutation(count)[: correct + seed % cycle]
            predictions = np.where(np.isin(np.arange(count), places), labels, 1 - labels).astype(np.int16)
            np.savez(folder / "validation.examples.npz", predictions=predictions, labels=labels)
            score = 100 * np.mean(predictions == labels)
            record = make_record(
                "rte", method, "tuned", seed, score, metrics={"validation": {"accuracy": score / 100}}
            )
            (folder / "result.json").write_text(json.dumps(record))
    results = read_results(tmp_path / "runs")
    (judged,) = judge([replace(CLAIM, tasks=("rte",))], results)
    by = {(result.variant.method, result.seed): result for result in results}
    resampled = [by["drophead", n].resampled["score"] - by["plain", n].resampled["score"] for n in range(5)]
    values = [by["drophead", n].score - by["plain", n].score for n in range(5)]
    assert judged.of_examples
    error, freedom = error_of_mean(np.array(values), np.array(resampled))
    half = stats.t.ppf(0.975, freedom) * error
    assert judged.interval == pytest.approx((np.mean(values) - half, np.mean(values) + half))
    of_both, of_seeds = 2 * stats.t.sf(np.mean(values) / error, freedom), stats.ttest_1samp(values, 0).pvalue
    assert judged.p == pytest.approx(max(of_both, of_seeds))
    assert (of_both > of_seeds) == (judged.p > 0.05) == (outcome == OPEN)
    assert judged.outcome == outcome
    assert "of seeds and test examples; p = " in judged.sentence


def test_the_mean_is_over_tasks_of_one_seed(write):
    claim = replace(CLAIM, tasks=("mrpc", "rte"), mean=True)
    for method, mrpc, rte in (
        ("plain", [80.0, 82.0, 81.0], [60.0, 61.0]),
        ("drophead", [81.0, 83.0, 88.0], [60.5, 63.0]),
    ):
        write(method, mrpc)
        path = write(method, rte, task="rte")
    judged = verdict(path, claim)
    assert judged.difference.count == 2
    assert judged.difference.mean == pytest.approx(np.mean([(1 + 0.5) / 2, (1 + 2) / 2]))
    assert judged.where == "the mean of mrpc, rte"


def test_models_do_not_mix_and_the_one_with_most_pairs_counts(write):
    write("plain", PLAIN)
    write("plain", [10.0], model="other")
    write("drophead", [90.0], model="other")
    path = write("drophead", BETTER)
    judged = verdict(path)
    assert (judged.model, judged.difference.count, judged.outcome) == ("minilm", 5, HOLDS)
    judged = verdict(path, replace(CLAIM, model="other"))
    assert (judged.model, judged.difference.mean, judged.outcome) == ("other", 80.0, OPEN)
    of_a_shape = replace(judged, model="fresh (heads 16)", reasons=())
    assert of_a_shape.sentence.endswith(" on mrpc, fresh (heads 16).")
    assert verdict(path, replace(CLAIM, model="another")).difference is None


def test_claims_are_of_the_papers_and_of_tasks_that_there_are():
    claims = read_claims()
    assert list(claims) == list(dict.fromkeys(table.paper for table in read_papers()))
    for each in claims.values():
        assert len({(claim.says, claim.tasks) for claim in each}) == len(each)
        for claim in each:
            assert claim.says.endswith(".")
            assert claim.source
            assert {task.split()[0] for task in claim.tasks} <= TASKS.keys()
            assert claim.of in QUANTITIES


def test_without_matplotlib_it_says_what_to_install(write, monkeypatch):
    write("plain", PLAIN)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        RecipeError, match=r"forest plots need Matplotlib; run: pip install 'collab-compress\[data\]'"
    ):
        forest_plot("title", [verdict(write("drophead", BETTER))])


def test_a_forest_plot_has_the_claimed_side_to_the_right(write):
    """Centres of two marks in one panel, of perplexities that fall and rise."""
    matplotlib = pytest.importorskip("matplotlib")
    assert matplotlib.get_backend()  # drawing must not open a window
    write("plain", PLAIN, task="ptb")
    path = write("drophead", list(np.subtract(PLAIN, [1, 1.2, 1, 1, 1])), task="ptb")
    path = write("worse", list(np.add(PLAIN, [1, 1.2, 1, 1, 1])), task="ptb")
    claim = replace(CLAIM, tasks=("ptb",))
    judged = judge([claim, replace(claim, method="worse")], read_results(path))
    assert [one.outcome for one in judged] == [HOLDS, FAILS]
    picture = forest_plot("title", judged).decode()
    assert picture == forest_plot("title", judged).decode()
    centres = {
        colour: float(re.search(rf'<use [^>]*x="([\d.]+)"[^>]*style="fill: {colour}', picture)[1])
        for colour in ("#1a7f37", "#cf222e")
    }
    assert centres["#1a7f37"] > centres["#cf222e"]
    assert "holds (n = 5" in picture
    assert "does not hold (n = 5" in picture
