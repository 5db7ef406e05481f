"""Sweeps: what they run, what they skip, and that they can be stopped."""

from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml
from collab_compress_glue_runs.commands.run import sweep_main
from collab_compress_glue_runs.experiments import read_sweep, run_sweep
from collab_compress_glue_runs.experiments import sweep as sweep_module

from collab_compress.errors import RecipeError

SWEEP = "from collab_compress_glue_runs.commands.run import sweep_main; sweep_main()"
TUNING = {"epochs": 1, "learning_rate": 1e-3, "batch_size": 8, "arguments": {"disable_tqdm": True}}
ROUGH = {"dk": 6, "solver": {"sweeps": 1}}


@pytest.fixture
def path(start, data_dir, tmp_path):
    base = {"model": str(start), "data_dir": str(data_dir), "max_length": 24, "tuning": TUNING}
    sweep = {
        "output": str(tmp_path / "out"),
        "base": base | {"calibration": "none", "trackers": []},
        "tasks": {"mrpc": {"tuning": {"epochs": 2}}},
        "methods": {"plain": None, "drophead": {"heads": {"drophead": [{"p": 0.2}]}}},
        "conversions": {"dk12": {"compression": {"dk": 12}}, "rough": {"compression": ROUGH}},
        "seeds": [0, 1],
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
    return tmp_path / "sweep.yaml"


def test_every_combination_once(path):
    recipes = list(read_sweep(path).recipes())
    names = [(recipe.seed, recipe.method, recipe.conversion_name) for recipe in recipes]
    assert names == list(product((0, 1), ("plain", "drophead"), ("dk12", "rough")))
    assert len({(recipe.output, recipe.conversion_name) for recipe in recipes}) == 8
    assert recipes[0].output.parts[-3:] == ("mrpc", "plain", "seed0")
    assert (recipes[0].tuning.epochs, recipes[0].tuning.learning_rate) == (2, 1e-3)  # the task's own, and everyone's
    assert recipes[2].heads.drophead[0].p == 0.2
    assert recipes[1].compression.solver.sweeps == 1
    assert list(read_sweep(path, ["only={methods: [drophead], seeds: [1]}"]).recipes()) == recipes[6:]


def test_a_scale_is_laid_over_the_sweep_and_settings_over_both(path, tmp_path):
    sweep = yaml.safe_load(path.read_text())
    conversions = sweep.pop("conversions")
    theirs = {"output": str(tmp_path / "theirs"), "methods": {"plain": {"max_length": 20}}, "tasks": {"sst2": None}}
    sweep["scales"] = {"small": {"seeds": [0], "base": {"tuning": {"learning_rate": 5e-3}}}, "paper": theirs}
    path.write_text(yaml.safe_dump(sweep, sort_keys=False))

    def recipes(*overrides):
        return list(read_sweep(path, overrides).recipes())

    small, paper = recipes(), recipes("scale=paper")
    assert recipes("scale=small") == small  # the first, if none is chosen
    assert [(recipe.seed, recipe.method) for recipe in small] == [(0, "plain"), (0, "drophead")]
    assert {(recipe.tuning.learning_rate, recipe.tuning.batch_size) for recipe in small} == {(5e-3, 8)}
    assert {recipe.output.parts[-4] for recipe in small} == {"out"}
    assert {(recipe.seed, recipe.task) for recipe in paper} == {(s, t) for s in (0, 1) for t in ("mrpc", "sst2")}
    assert {(recipe.method, recipe.max_length) for recipe in paper} == {("plain", 20), ("drophead", 24)}
    assert {(recipe.output.parts[-4], recipe.tuning.learning_rate) for recipe in paper} == {("theirs", 1e-3)}
    changed = recipes("base.tuning.learning_rate=1e-2", "scale=small", "seeds=[3]")
    assert {(recipe.tuning.learning_rate, recipe.seed) for recipe in changed} == {(1e-2, 3)}
    assert {recipe.seed for recipe in recipes("scales.small.seeds=[4]")} == {4}
    for setting, message in (
        ("scale=large", "scale is 'large'; expected one of small, paper"),
        ("scale=[]", r"scale is \[\]; expected one of small, paper"),
        ("scales.small=1", "scale is 'small'; expected one of small, paper, each with fields"),
        ("scales=3", "scales: Input should be an object, got 3"),
    ):
        with pytest.raises(RecipeError, match=message):
            recipes(setting)
    with pytest.raises(RecipeError, match=r"scales: Input should be an object, got \['small'\]"):
        recipes("scales=[small]", "scale=small")
    path.write_text(yaml.safe_dump({**sweep, "scales": {}, "conversions": conversions}, sort_keys=False))
    with pytest.raises(RecipeError, match="scale is 'paper'; the sweep has none"):
        recipes("scale=paper")
    assert len(recipes()) == 8


def test_null_reaches_tasks_that_have_the_field_themselves(path):
    settings = yaml.safe_load(path.read_text())
    settings["base"]["again"] = TUNING
    settings["tasks"] = {"mrpc": {"again": {"epochs": 2}}, "rte": None, "cola": {"max_length": 16}}
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    agains = {recipe.task: recipe.again.epochs for recipe in read_sweep(path).recipes()}
    assert agains == {"mrpc": 2, "rte": 1, "cola": 1}
    assert {recipe.again for recipe in read_sweep(path, ["base.again=null"]).recipes()} == {None}
    tuned = list(read_sweep(path, ["base.again=null", "tasks.rte.again={epochs: 3}"]).recipes())
    assert {recipe.task for recipe in tuned if recipe.again is not None} == {"rte"}


def test_base_extends_a_recipe_beside_the_sweep(path):
    recipe = {"task": "rte", "output": "elsewhere", "max_length": 32, "tuning": {"epochs": 5, "warmup": 0.2}}
    (path.parent / "shared.yaml").write_text(yaml.safe_dump(recipe))
    first = next(read_sweep(path, ["recipe=shared.yaml", "base.tuning.batch_size=4"]).recipes())
    assert (first.task, first.output.parts[-1], first.max_length) == ("mrpc", "seed0", 24)  # the sweep's own
    assert (first.tuning.epochs, first.tuning.warmup, first.tuning.batch_size) == (2, 0.2, 4)
    assert read_sweep(path, ["recipe=null"]) == read_sweep(path)
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*nosuch\.yaml: .*No such file"):
        read_sweep(path, ["recipe=nosuch.yaml"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("only.tasks=[rte]", "only.tasks names 'rte'; expected some of mrpc"),
        ("only.ranks=[1]", "only holds 'ranks'; expected some of tasks"),
        ("seeds=[]", "there is nothing to run"),
        ("base.modle=x", "mrpc, plain, dk12: modle: Unexpected keyword argument, got 'x'"),
        ("seeds=0", "seeds: Input should be a valid .*, got 0"),
        ("methods=[a]", r"methods: Input should be an object, got \['a'\]"),
        ("base.output=x", "^.*base has output, which each run gets from the sweep; give its output$"),
        ("methods.drophead.seed=3", "methods.drophead has seed, which each run gets from the sweep; give its seeds$"),
    ],
)
def test_mistakes_are_named(path, override, message):
    with pytest.raises(RecipeError, match=message):
        read_sweep(path, [override])


def test_a_run_that_fails_for_any_reason_does_not_stop_the_others(path, monkeypatch):
    attempts = []

    def broken(recipe):
        attempts.append(recipe.conversion_name)
        raise {"dk12": MemoryError, "rough": ZeroDivisionError}[recipe.conversion_name]("so")

    monkeypatch.setattr(sweep_module, "run", broken)
    failed = run_sweep(read_sweep(path, ["only={methods: [plain], seeds: [0]}"]))
    assert [line.partition(": ")[2] for line in failed] == ["MemoryError: so", "ZeroDivisionError: so"]
    with pytest.raises(SystemExit) as caught:
        sweep_main([str(path), "only={methods: [plain], seeds: [0]}"])
    assert caught.value.code.count("so") == 2  # which exits with 1

    with monkeypatch.context() as patch:
        patch.setattr(sweep_module, "process_state", lambda: SimpleNamespace(num_processes=2))
        with pytest.raises(RecipeError, match="so; a sweep of several processes stops at the first failure"):
            run_sweep(read_sweep(path, ["only={conversions: [dk12]}"]))

    monkeypatch.setattr(sweep_module, "run", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_sweep(read_sweep(path))
    assert attempts == [*["dk12", "rough"] * 2, "dk12"]


def test_two_processes_stop_at_the_first_failure_and_can_be_started_again(python, path, tmp_path):
    """A failure in both, or in the main one alone."""
    only = "only={methods: [plain], seeds: [0]}"
    run_sweep(read_sweep(path, [only, "conversions={other: {compression: {dk: 9}}}"]))
    conversions = "other: {compression: {dk: 8}}, bad: {compression: {dk: 1000}}, dk12: {compression: {dk: 12}}"
    arguments = [only, f"conversions={{{conversions}}}"]

    def finished():
        return {file.parent.name for file in (tmp_path / "out").rglob("result.json")}

    messages = {"other, bad, dk12": "other was made with another compression", "bad, dk12": "1000"}
    for names, message in messages.items():
        done = python.both(SWEEP, path, *arguments, f"only.conversions=[{names}]")
        assert done.returncode != 0
        assert message in done.stderr, done.stderr[-5000:]
        assert "stops at the first failure" in done.stderr
        assert finished() == {"tuned", "other"}
    assert python.both(SWEEP, path, *arguments, "only.conversions=[dk12]").returncode == 0
    assert finished() == {"tuned", "other", "dk12"}


@pytest.mark.parametrize(
    ("field", "message"),
    [("base.measures=[cka,svca]", "unknown measure 'svca'"), ("base.trackers=[tensorbord]", "tensorbord")],
)
def test_unknown_measures_and_trackers_are_refused_before_the_first_run(path, field, message, tmp_path):
    with pytest.raises(RecipeError, match=message):
        run_sweep(read_sweep(path, [field]))
    assert not (tmp_path / "out").exists()
