"""Records → rows → differences, against numpy, statistics and scipy."""

import json
import math
import os
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from collab_compress_glue_runs.experiments.comparison import Estimate, compare, estimate
from collab_compress_glue_runs.experiments.outputs import read_records, record_lines, without_nulls
from collab_compress_glue_runs.experiments.recipe import Recipe, parse
from collab_compress_glue_runs.experiments.results import read_results
from scipy import stats
from tiny_recipes import make_record

from collab_compress.errors import RecipeError
from collab_compress.options import KINDS

SWEEPS = Path(__file__).parents[3] / "glue_runs" / "sweeps"


@pytest.fixture
def write(tmp_path):
    """Write a record into the folder of its run and stage."""

    def record(score, task="mrpc", method="plain", stage="tuned", seed=0, **more):
        recipe = {"model": "minilm", "seed": seed, **more.pop("recipe", {})}
        folder = tmp_path / "runs" / f"{task}-{method}-{recipe['model'] or ''}-{seed}".replace("/", "_") / stage
        folder.mkdir(parents=True, exist_ok=True)
        fields = make_record(task, method, stage, seed, score, **{"parameters": 1000, **more, "recipe": recipe})
        (folder / "result.json").write_text(json.dumps(fields))
        return folder / "result.json"

    return record


def table(folder, against=None):
    """Return the comparison, and its lines by method/stage and by the column's name."""
    comparison = compare(read_results(folder / "runs"), against)
    lines = {}
    for line in comparison.lines:
        lines.setdefault(f"{line['method']}/{line['stage']}", {})[line["task"]] = line
    return comparison, lines


def changes_of(comparison, name="method"):
    """Return the differences of a comparison, by a field of its lines."""
    return {line[name]: line["difference"] for line in comparison.lines if "difference" in line}


@pytest.mark.parametrize("values", [[1.0, 4.0], [80.2, 79.1, 84.4, 81.0], [5.0, 5.0, 5.5]])
def test_mean_deviation_and_interval(values):
    result = estimate(values)
    assert result.mean == pytest.approx(statistics.fmean(values))
    assert result.deviation == pytest.approx(statistics.stdev(values))
    low, high = stats.t.interval(0.95, len(values) - 1, result.mean, stats.sem(values))
    assert (result.mean - result.interval, result.mean + result.interval) == (pytest.approx(low), pytest.approx(high))
    assert result.count == len(values)
    assert estimate(values[:1]) == Estimate(values[0], None, 1)
    assert estimate(values[:1]).interval is None


def test_a_score_that_is_no_number_stays_visible(write, tmp_path):
    write(math.nan, task="stsb")
    write(80.0, task="stsb", seed=1)
    write(math.inf, task="stsb", method="hsic")
    write(80.0, task="stsb", method="hsic", seed=1)
    comparison, lines = table(tmp_path)
    assert math.isnan(lines["plain/tuned"]["stsb"]["mean"])
    assert lines["hsic/tuned"]["stsb"]["mean"] == math.inf
    assert math.isnan(lines["hsic/tuned"]["stsb"]["sd"])
    assert math.isnan(lines["hsic/tuned"]["stsb"]["difference"])
    assert comparison.notes == (
        "hsic/tuned of minilm on stsb: the score of seed 0 is inf, and so are the means that include it",
        "plain/tuned of minilm on stsb: the score of seed 0 is nan, and so are the means that include it",
    )


def test_differences_are_paired_by_seed(write, tmp_path):
    generator = np.random.default_rng(0)
    plain, hsic = generator.normal(80, 3, 5), generator.normal(81, 3, 5)
    for seed in range(5):
        write(plain[seed], seed=seed)
        write(hsic[4 - seed], method="hsic", seed=4 - seed)
    comparison, lines = table(tmp_path)
    cell = lines["hsic/tuned"]["mrpc"]
    interval = stats.ttest_rel(hsic, plain).confidence_interval(0.95)
    assert cell["difference"] == pytest.approx((hsic - plain).mean())
    assert (cell["low"], cell["high"]) == pytest.approx(tuple(interval))
    assert list(changes_of(comparison)) == ["hsic"]


def test_models_that_were_only_evaluated(write, tmp_path):
    for model, score in (("/a/mrpc/seed0/tuned/model", 80.0), ("/a/mrpc/seed1/tuned/model", 82.0), ("minilm", 70.0)):
        write(score, stage="given", recipe={"model": model})
        write(score - 1, stage="dk128", recipe={"model": model})
    comparison = compare(read_results(tmp_path / "runs"))
    assert comparison.reference == "plain/given"
    assert changes_of(comparison, "model") == dict.fromkeys(
        ["minilm", "seed0/tuned/model", "seed1/tuned/model"], -1.0
    )
    assert not any("low" in line for line in comparison.lines)  # of one seed


def test_what_is_tuned_again_is_compared_with_the_dense_model_tuned_again(write, tmp_path):
    for stage, score in (("tuned", 80.0), ("dk64", 70.0), ("dk64-again", 81.0)):
        write(score, stage=stage)
        write(score, stage=stage, recipe={"model": "albert"})
    write(83.0, stage="dense-again", conversion=None)
    write(84.0, stage="dense-again", conversion=None, method="hsic")
    comparison = compare(read_results(tmp_path / "runs"))
    changes = {(line["model"], line["method"], line["stage"]): line.get("difference") for line in comparison.lines}
    assert changes == {
        ("albert", "plain", "tuned"): None,
        ("albert", "plain", "dk64"): -10.0,
        ("albert", "plain", "dk64-again"): None,
        ("minilm", "plain", "tuned"): None,
        ("minilm", "plain", "dk64"): -10.0,
        ("minilm", "plain", "dk64-again"): -2.0,
        ("minilm", "plain", "dense-again"): 3.0,
        ("minilm", "hsic", "dense-again"): 4.0,
    }
    against = compare(read_results(tmp_path / "runs"), "plain/dk64").lines
    assert [line["difference"] for line in against if line["stage"] == "dk64-again"] == [11.0, 11.0]


def test_seeds_of_one_arm_only_are_no_pairs(write, tmp_path):
    for seed, score in enumerate((80.0, 82.0, 84.0)):
        write(score, seed=seed)
    for seed, score in ((1, 83.0), (2, 87.0), (3, 70.0)):
        write(score, method="hsic", seed=seed)
    write(60.0, method="ortho", seed=9)
    comparison, lines = table(tmp_path)
    cell = lines["hsic/tuned"]["mrpc"]
    assert (cell["mean"], cell["n"]) == (80.0, 3)
    assert (cell["difference"], cell["pairs"]) == (2.0, 2)
    half = 12.706 * stats.sem([1.0, 3.0])  # two pairs say very little
    assert cell["high"] - cell["difference"] == pytest.approx(half, rel=1e-4)
    assert list(changes_of(comparison)) == ["hsic"]


def test_the_average_is_over_tasks_first(write, tmp_path):
    plain = {"mrpc": [80.0, 82.0, 81.0], "cola": [40.0, 50.0, 42.0]}
    hsic = {"mrpc": [81.0, 84.0, 80.0], "cola": [43.0, 49.0, 45.0]}
    for method, arm in (("plain", plain), ("hsic", hsic)):
        for task, scores in arm.items():
            for seed, score in enumerate(scores):
                write(score, task, method, seed=seed)
    write(90.0, "mrpc", seed=3)  # without the other task
    write(70.0, "cola", "ortho")
    comparison, lines = table(tmp_path)
    assert [column.name for column in comparison.columns] == ["cola", "mrpc", "average"]
    seeds = np.mean([hsic["mrpc"], hsic["cola"]], axis=0)
    average = lines["hsic/tuned"]["average"]
    assert (average["mean"], average["sd"]) == (pytest.approx(seeds.mean()), pytest.approx(statistics.stdev(seeds)))
    paired = seeds - np.mean([plain["mrpc"], plain["cola"]], axis=0)
    half = stats.t.ppf(0.975, 2) * stats.sem(paired)
    assert average["difference"] == pytest.approx(paired.mean())
    assert average["high"] - average["difference"] == pytest.approx(half)
    assert lines["plain/tuned"]["average"]["n"] == 3
    assert "average" not in lines["ortho/tuned"]


def test_languages_are_columns_of_their_own(write, tmp_path):
    write(30.0, "multi30k", recipe={"translation": {"source": "en", "target": "de"}})
    write(31.0, "multi30k", seed=1, recipe={"translation": {"source": None, "target": None}})
    write(32.0, "parallel")
    write(33.0, "parallel", seed=1, recipe={"translation": {"source": "fr", "target": "de"}})
    comparison, _ = table(tmp_path)
    names = [column.name for column in comparison.columns]
    assert names == ["multi30k de-en", "multi30k en-de", "parallel", "parallel fr-de"]


def test_order_of_rows(write, tmp_path):
    for method in ("alphas", "plain"):
        for stage in ("dk64", "dk128-again", "dk128", "tuned", "narrow", "dk64-again", "given"):
            write(1.0, method=method, stage=stage)
    order = [(line["method"], line["stage"]) for line in table(tmp_path)[0].lines]
    stages = ["tuned", "given", "narrow", "dk128", "dk128-again", "dk64", "dk64-again"]
    assert order == [(method, stage) for method in ("plain", "alphas") for stage in stages]


def test_another_reference(write, tmp_path):
    for seed, (plain, alphas) in enumerate([(80.0, 81.0), (82.0, 85.0)]):
        write(plain, seed=seed)
        write(alphas, method="alphas", seed=seed)
    comparison, lines = table(tmp_path, "alphas/tuned")
    assert comparison.reference == "alphas/tuned"
    assert lines["plain/tuned"]["mrpc"]["difference"] == -2.0
    assert comparison.lines[0]["method"] == "alphas"
    with pytest.raises(RecipeError, match=r"no result is 'alphas/dk8'; expected one of alphas/tuned, plain/tuned"):
        table(tmp_path, "alphas/dk8")


def test_models_trained_on_another_kind_of_device_are_not_compared(write, tmp_path):
    fresh, hsic = {"model": None, "fresh": {"heads": 4}}, {"heads": {"penalties": [{"name": "hsic"}]}}
    write(35.0, environment={"device": "cpu"}, recipe=fresh)
    write(36.0, method="hsic", environment={"device": "cuda:0"}, recipe=fresh | hsic)
    assert changes_of(compare(read_results(tmp_path))) == {}
    write(35.5, seed=1, environment={"device": "cuda"}, recipe=fresh)
    write(38.0, method="hsic", seed=1, environment={"device": "cuda:1"}, recipe=fresh | hsic)
    comparison = compare(read_results(tmp_path))
    assert changes_of(comparison) == {"hsic": 2.5}
    assert {line["model"] for line in comparison.lines} == {"fresh (device cpu)", "fresh (device cuda)"}


def test_parameters_are_the_mean_of_those_recorded(write, tmp_path):
    write(1.0, parameters=100)
    write(1.0, "rte", parameters=104)
    write(1.0, "cola", parameters=None)
    write(1.0, stage="dk8", parameters=None)
    _, lines = table(tmp_path)
    assert {line["parameters"] for line in lines["plain/tuned"].values()} == {102.0}
    assert lines["plain/dk8"]["mrpc"]["parameters"] is None


def test_settings_that_differ_between_seeds_are_noted(write, tmp_path):
    for seed in (0, 1):
        settings = {"output": f"out-{seed}", "tuning": {"epochs": 3}, "compression": {"dk": 128}}
        write(80.0, seed=seed, recipe=settings)
    assert table(tmp_path)[0].notes == ()
    write(80.0, seed=2, recipe={"tuning": {"epochs": 4}, "compression": {"dk": 64}, "again": 1})
    write(80.0, "rte", seed=2, recipe={"tuning": {"epochs": 9}})
    assert table(tmp_path)[0].notes == ("plain/tuned of minilm on mrpc: seeds differ in tuning",)


def test_fields_that_older_records_lack_or_that_only_watch_training_are_no_difference(write, tmp_path):
    for seed, penalty in enumerate(({"name": "hsic"}, {"name": "hsic", "share": None})):
        write(80.0, method="hsic", seed=seed, recipe={"heads": {"penalties": [penalty]}})
    watched = {"eval_strategy": "epoch", "predict_with_generate": True, "generation_num_beams": 1, "logging_steps": 5}
    for method, arguments in (("plain", watched), ("faster", {"adam_beta2": 0.98})):
        for seed, changed in enumerate(({}, arguments)):
            settings = {"epochs": 3, "arguments": {"bf16": True, **changed}}
            write(80.0, method=method, seed=seed, recipe={"tuning": settings})
    assert table(tmp_path)[0].notes == ("faster/tuned of minilm on mrpc: seeds differ in tuning",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": "84"}, "score: Input should be a valid number, got '84'"),
        ({"task": "swag"}, "unknown task 'swag'; expected one of cola"),
        ({"recipe": {"translation": "de"}}, r"recipe\.translation: Input should be a valid dictionary, got 'de'"),
        ({"metrics": {"test": 5}}, r"metrics\.test: Input should be a valid dictionary, got 5"),
        ({"measures": {"svcca": {"layers": {"encoder": "abc"}}}}, r"measures has 'abc'; expected a number"),
        ({"method": "\ud800"}, "cannot read the record .*surrogates not allowed"),
    ],
)
def test_malformed_records_are_named(write, tmp_path, change, message):
    write(80.0)
    bad = write(80.0, seed=7)
    bad.write_text(json.dumps({**json.loads(bad.read_text()), **change}))
    with pytest.raises(RecipeError, match=message) as caught:
        read_results(tmp_path)
    assert str(bad) in str(caught.value)


def test_a_pipe_is_not_waited_for(write, tmp_path):
    write(80.0)
    os.mkfifo(tmp_path / "runs" / "result.json")
    with pytest.raises(RecipeError, match=r"result\.json: expected a regular file"):
        read_results(tmp_path)


def test_nothing_to_read(tmp_path):
    with pytest.raises(RecipeError, match=r"holds no result\.json"):
        read_results(tmp_path)
    with pytest.raises(RecipeError, match="is no folder"):
        read_results(tmp_path / "nowhere")


def test_a_file_of_records_is_read_as_the_folder_it_is_of(write, tmp_path):
    for seed in range(3):
        write(80.0 + seed, seed=seed, recipe={"model": "/a/müller"})
        write(math.nan, method="hsic", seed=seed, recipe={"model": None})
    file = tmp_path / "records.jsonl"
    file.write_text(record_lines(read_records(tmp_path / "runs").values()), encoding="utf-8")
    ours, theirs = read_results(file), read_results(tmp_path / "runs")
    assert [repr(replace(one, source="")) for one in ours] == [repr(replace(one, source="")) for one in theirs]
    assert [one.source for one in ours] == [f"{file}, line {n}" for n in range(1, 7)]
    assert record_lines(read_records(file).values()).encode() == file.read_bytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no records; expected one a line"),
        ("[1]\n", "line 1 holds a list; expected the record of an experiment"),
        ("\udcff", "cannot read the record"),
        ("\n{}\n", "line 2 is no record of an experiment: task: Field required"),
        ("{\n", "cannot read the record .*line 1: Expecting"),
    ],
)
def test_malformed_files_of_records_are_named(tmp_path, text, message):
    file = tmp_path / "records.jsonl"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(RecipeError, match=message):
        read_results(file)


def test_the_same_result_twice(write, tmp_path):
    path = write(80.0)
    copy = tmp_path / "runs" / "copy" / "result.json"
    copy.parent.mkdir()
    copy.write_text(path.read_text())
    with pytest.raises(RecipeError, match="are both plain/tuned of minilm on mrpc with seed 0") as caught:
        read_results(tmp_path)
    assert str(copy) in str(caught.value)
    assert str(path) in str(caught.value)


REMOVED = {"start": None, "share": None, "growth_form": "printed", "form": "shared", "equal_heads": False}
REMOVED |= {"batch_tokens": None, "average": 1, "num_proc": None}
REMOVED |= {"effort": "best", "tolerance": None, "centre": None, "printed": False, "recovery": None}
"""Options that recipes no longer have → the value in records that means what recipes without it do."""


def without_removed(recipe):
    """Return a recorded recipe without removed options, which records keep as their runs had them."""
    if isinstance(recipe, list):
        return [without_removed(part) for part in recipe]
    if not isinstance(recipe, dict):
        return recipe
    present = {key: value for key, value in recipe.items() if key not in REMOVED or value != REMOVED[key]}
    if "dk" in present:  # a conversion, of all kinds of attention
        assert set(present.pop("kinds", KINDS)) == set(KINDS)
    return {key: without_removed(value) for key, value in present.items()}


@pytest.mark.parametrize("path", sorted((SWEEPS.parent / "records").glob("*.jsonl")), ids=lambda path: path.stem)
def test_records_in_the_repository_have_all_fields_of_a_recipe(path):
    for place, record in read_records(path).items():
        recorded = without_removed(record["recipe"])
        recipe = json.loads(json.dumps(asdict(parse(Recipe, recorded, place)), default=str))
        assert without_nulls(recipe) == without_nulls(recorded), place
