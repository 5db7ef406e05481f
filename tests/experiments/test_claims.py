"""Verdicts, against the interval that scipy's paired t-test gives."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from tiny_recipes import make_record

from collab_compress.errors import RecipeError
from collab_compress.experiments.papers import (
    FAILS,
    HOLDS,
    OPEN,
    QUANTITIES,
    WITHDRAWN,
    Claim,
    judge,
    read_claims,
    read_papers,
    readings,
    tried,
)
from collab_compress.experiments.results import read_results
from collab_compress.tasks import TASKS

CLAIM = Claim("Heads are better.", ("mrpc",), "drophead", "plain")
MEASURES = {
    "svcca": {"layers": {"encoder": [0.2, 0.4], "cross": [0.9]}, "curve": {"encoder": [0.9, 0.1]}},
    "cka": {"layers": {"encoder": [0.1, 0.3]}},
    "discrepancy": {"encoder": [{"cosine": 1.0, "l2": 2.0}, {"cosine": 3.0, "l2": 4.0}]},
    "overlap": {"encoder": [0.5, 0.7]},
    "dominance": {"encoder": 78.0, "score": 80.0},
    "pruning": {"shares": [0.0, 0.25, 0.5, 1.0], "scores": [80.0, 79.0, 75.0, 50.0]},
}


@pytest.fixture
def write(tmp_path):
    """Write the records of one method, a score a seed; returns the file of all that were written."""

    def records(method, scores, task="mrpc", model="minilm", stage="tuned", **more):
        path = tmp_path / "records.jsonl"
        with path.open("a") as file:
            for seed, score in enumerate(scores):
                record = make_record(task, method, stage, seed, score, recipe={"model": model}, **more)
                file.write(json.dumps(record) + "\n")
        return path

    return records


def verdict(path, claim=CLAIM):
    (found,) = judge(claim, read_results(path))
    return found


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ([81.0, 83.2, 82.1], HOLDS),
        ([79.2, 80.9, 80.0], FAILS),
        ([81.0, 79.0, 85.0], OPEN),
        ([81.0, 83.0, 82.1, 84.4, 81.5], HOLDS),
        ([80.0, 82.0, 81.0], FAILS),  # nothing changed, so nothing improved
    ],
)
@pytest.mark.parametrize("by", [0.0, -0.5, 0.5])
def test_verdicts_are_those_of_the_paired_t_test(write, ours, expected, by):
    theirs = [80.0, 82.0, 81.0, 83.1, 80.2][: len(ours)]
    write("plain", theirs)
    found = verdict(write("drophead", ours), replace(CLAIM, by=by))
    assert found.difference.mean == pytest.approx(np.mean(np.subtract(ours, theirs)))
    if np.std(np.subtract(ours, theirs)) > 0:
        low, high = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    else:
        low = high = 0.0
    assert found.difference.mean - found.difference.interval == pytest.approx(low)
    assert found.difference.mean + found.difference.interval == pytest.approx(high)
    assert found.outcome == (HOLDS if low > by else FAILS if high <= by else OPEN)
    if by == 0:
        assert found.outcome == expected


@pytest.mark.parametrize(("expect", "verdicts"), [("better", FAILS), ("higher", HOLDS), ("lower", FAILS)])
def test_lower_perplexity_is_better(write, expect, verdicts):
    write("plain", [100.0, 104.0, 99.0], task="ptb")
    path = write("drophead", [110.1, 114.0, 109.0], task="ptb")
    assert verdict(path, replace(CLAIM, tasks=("ptb",), expect=expect)).outcome == verdicts


def test_fewer_than_three_seeds_tell_nothing(write):
    write("plain", [80.0, 82.0])
    found = verdict(write("drophead", [90.0, 92.1, 95.0]))
    assert (found.outcome, found.difference.count) == (OPEN, 2)
    assert found.sentence.endswith("2 seeds; a verdict takes 3).")
    assert (
        "No seed has records of both sides" in verdict(write("hsic", [1.0]), replace(CLAIM, than="hsic/dk8")).sentence
    )


def test_a_withdrawn_claim_has_a_reason_in_place_of_a_verdict(write):
    write("plain", [80.0, 82.0, 81.0])
    found = verdict(write("drophead", [81.0, 83.2, 82.1]), replace(CLAIM, withdrawn="The weight was wrong."))
    assert found.outcome == WITHDRAWN
    assert found.sentence == "Withdrawn: Heads are better. The weight was wrong."
    assert tried([found]) == [found]


def test_what_is_no_number_tells_nothing(write):
    write("plain", [80.0, 82.0, 81.0])
    assert verdict(write("drophead", [90.0, math.nan, 92.0])).outcome == OPEN


def test_the_mean_is_over_tasks_of_one_seed(write):
    claim = replace(CLAIM, tasks=("mrpc", "rte"), mean=True)
    for method, mrpc, rte in (
        ("plain", [80.0, 82.0, 81.0], [60.0, 61.0]),
        ("drophead", [81.0, 83.0, 88.0], [60.5, 63.0]),
    ):
        write(method, mrpc)
        path = write(method, rte, task="rte")
    found = verdict(path, claim)
    assert found.difference.count == 2
    assert found.difference.mean == pytest.approx(np.mean([(1 + 0.5) / 2, (1 + 2) / 2]))
    assert found.where == "the mean of mrpc, rte"


def test_models_do_not_mix_and_the_one_with_most_pairs_counts(write):
    write("plain", [80.0, 82.0, 81.0])
    write("plain", [10.0], model="other")
    write("drophead", [90.0], model="other")
    path = write("drophead", [81.0, 83.2, 82.1])
    found = verdict(path)
    assert (found.model, found.difference.count, found.outcome) == ("minilm", 3, HOLDS)
    found = verdict(path, replace(CLAIM, model="other"))
    assert (found.model, found.difference.mean, found.outcome) == ("other", 80.0, OPEN)
    assert verdict(path, replace(CLAIM, model="another")).difference is None


def test_stages_are_told_apart(write):
    write("plain", [80.0, 82.0, 81.0])
    path = write("plain", [79.0, 80.9, 79.9], stage="dk128")
    found = verdict(path, replace(CLAIM, method="plain/dk128"))
    assert found.outcome == FAILS
    assert found.sentence.startswith(
        "Does not hold: Heads are better. plain/dk128 − plain is −1.07 points on mrpc (95 % "
    )


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ("svcca", np.mean([0.2, 0.4, 0.9])),
        ("svcca cross", 0.9),
        ("cka", 0.2),
        ("cka cross", None),
        ("overlap", 0.6),
        ("cosine", 2.0),
        ("l2", 3.0),
        ("dominant encoder", -2.0),
        ("dominant cross", None),
        ("half pruned", -5.0),
        ("perplexity", 12.5),
        ("seconds", 60),
        ("parameters", 1000),
        ("task loss", 3.0),
        ("training overlap", 0.25),
        ("score", 80.0),
    ],
)
def test_quantities(write, of, expected):
    history = [{"task_loss": 4.0, "epoch": 1}, {"task_loss": 3.0, "bhattacharyya": 0.25, "epoch": 2}, {"epoch": 2}]
    metrics = {"validation": {"perplexity": 9.0}, "test": {"perplexity": 12.5}}
    more = {"history": history, "metrics": metrics, "seconds": 60, "parameters": 1000}
    path = write("plain", [80.0], measures=MEASURES, **more)
    found = readings(read_results(path), "plain", "mrpc", of)
    assert found == ({} if expected is None else {("minilm", 0): pytest.approx(expected)})


@pytest.mark.parametrize("of", QUANTITIES)
def test_older_records_have_scores_only(write, of):
    found = readings(read_results(write("plain", [80.0])), "plain", "mrpc", of)
    assert bool(found) == (of == "score")


def test_claims_are_of_the_papers_and_of_tasks_that_there_are():
    claims = read_claims()
    assert list(claims) == list(dict.fromkeys(table.paper for table in read_papers()))
    for each in claims.values():
        assert len({(claim.says, claim.tasks) for claim in each}) == len(each)
        for claim in each:
            assert claim.says.endswith(".")
            assert {task.split()[0] for task in claim.tasks} <= TASKS.keys()


def test_what_stands_beside_the_papers_is_known():
    for table in read_papers():
        assert set(table.of) <= QUANTITIES.keys()
        assert {task.split()[0] for task in table.beside} <= TASKS.keys()
        assert not table.beside or any(row.ours for row in table.rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot read .*claims.yaml"),
        ("a: 3", "does not have the layout that its first lines describe"),
        ("a: [{says: b, tasks: [mrpc], method: c}]", "a claim of a: .*than"),
        ("a: [{says: b., tasks: [mrpc], method: c, than: d, of: e}]", "'e' is no quantity; expected one of score"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    (tmp_path / "claims.yaml").write_text(text)
    with pytest.raises(RecipeError, match=message):
        read_claims(tmp_path / "claims.yaml")
