from dataclasses import replace
from pathlib import Path

import pytest
from collab_compress_glue_runs.experiments import read_recipe
from collab_compress_glue_runs.experiments.recipe import read_settings

from collab_compress.errors import RecipeError

RECIPE = """
task: mrpc
output: out
model: minilm
tuning: {epochs: 1, learning_rate: 5.0e-5, arguments: {weight_decay: 0.01}}
compression: {dk: 128}
heads:
  drophead: [{p: 0.2, schedule: scheduled, kinds: [encoder]}]
  penalties: [{name: hsic, weight: 1}]
  alphas: {frozen_ratio: 0.3}
  rotation: {strategy: manual, epochs: [0], pairs: [[[a, 0], [b, 1]]]}
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def test_fields_and_overrides(path):
    recipe = read_recipe(path, ["compression.dk=64", "again.epochs=2", "seed=3", "tuning.learning_rate=1e-4"])
    assert (recipe.compression.dk, recipe.seed, recipe.output) == (64, 3, Path("out"))
    assert recipe.tuning.arguments == {"weight_decay": 0.01}
    assert (recipe.tuning.epochs, recipe.tuning.learning_rate, recipe.again.epochs) == (1.0, 1e-4, 2.0)
    assert recipe.heads.drophead[0].kinds == ("encoder",)
    assert recipe.heads.penalties[0].weight == 1.0
    assert recipe.heads.rotation.pairs == ((("a", 0), ("b", 1)),)


def test_calibration_is_a_choice(path):
    recipe = read_recipe(
        path, ["calibration_options.sequences=500", "calibration_options.length=32", "calibration=texts.txt"]
    )
    assert (recipe.calibration_options.sequences, recipe.calibration_options.length) == (500, 32)
    assert read_recipe(path).calibration_options.sequences is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tuning.learningrate=1", r"recipe\.yaml: tuning\.learningrate: Unexpected keyword argument, got 1$"),
        ("heads.penalties=[{name: hsic, wt: 1}]", r"heads\.penalties\.0\.wt: Unexpected keyword argument, got 1$"),
        ("task=foo", "unknown task 'foo'; expected one of cola"),
        (
            "compression.solver.sweeps=1e30",
            r"compression\.solver\.sweeps: Input should be a valid int.*, got 1e\+30",
        ),
        ("held_out=1", r"held_out is 1\.0; expected a share of the training data"),
        ("tuning.epochs=0", "epochs is 0; expected more than 0, or max_steps"),
        ("fresh={width: 10, heads: 3}", "width 10 cannot be shared out evenly among 3 heads"),
        ("fresh={layers: 2}", "either a model to start from, or"),
        ("conversion=a/b", "'a/b' cannot name a folder"),
        ("conversion=dk1-again", "cannot be called 'dk1-again'"),
        ("tuning.arguments.save_total_limit=2", "save_total_limit, but a run keeps its last checkpoint"),
        ("tuning.arguments.fsdp=true", "arguments hold fsdp, but each process has the whole model; leave it out"),
        ("tuning.arguments.seed=2", "arguments hold seed, which the recipe's field seed sets"),
        ("model", "'model' sets nothing; expected field=value"),
        ("task.name=x", "task is 'mrpc', which has no fields"),
        ("seed=[", "cannot read the value"),
        ("tuning.learning_rate=.nan", "learning_rate: Input should be a finite number, got nan"),
        ("files={validation: 3}", r"recipe.yaml: files\.validation\.str: Input should be a valid string, got 3; "),
        (
            "fresh={config: 3, layers: a}",
            r"fresh\.config\.str: .*, got 3; .*; fresh\.layers: .*, got 'a'",
        ),
        ("output=~nobody-here/x", "home directory"),
        ("heads.penalties=[{name: hsic, weight: .inf}]", r"heads\.penalties\.0\.weight: .* a finite number, got inf"),
        ("files={validation: a}", "files names no training data"),
        ("trackers=wandb", r"trackers: Input should be a valid .*, got 'wandb'"),
        (
            "method=plain",
            "method is plain, the name of the baseline, but the recipe has drophead0.2-scheduled-hsic1-",
        ),
    ],
)
def test_mistakes_are_named(path, override, message):
    with pytest.raises(RecipeError, match=message):
        read_recipe(path, [override])


def test_numbers_lists_and_places_as_people_write_them(path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    overrides = [
        "tuning.arguments={weight_decay: 1e-4, adam_epsilon: 1E-8}",
        "trackers=[wandb]",
        "output=~/x",
        "data_dir=~/y",
    ]
    recipe = read_recipe(path, [*overrides, "again.arguments.weight_decay=-.5e+1", "conversion=e4"])
    assert recipe.tuning.arguments == {"weight_decay": 1e-4, "adam_epsilon": 1e-8}
    assert recipe.again.arguments == {"weight_decay": -5.0}
    assert (recipe.trackers, recipe.conversion) == (("wandb",), "e4")
    assert (recipe.output, recipe.data_dir) == (Path("/home/me/x"), Path("/home/me/y"))
    assert read_recipe(path, ["trackers=[wandb, aim]"]).trackers == ("wandb", "aim")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (["heads={}"], "plain"),
        (["heads={penalties: [{name: bhattacharyya, weight: 0.0}]}"], "plain"),
        (["heads={drophead: [{p: 0.2}], penalties: [{name: agreement, weight: 0.1}]}"], "drophead0.2-agreement0.1"),
        (["heads={penalties: [{name: hsic}]}"], "hsic1e-07"),
        ([], "drophead0.2-scheduled-hsic1-alphas-rotation"),
        (["method=mine"], "mine"),
        (["heads={}", "model=null", "fresh={attention: {dk: 8}}"], "collaborative8"),
    ],
)
def test_a_method_is_named_by_what_acts_on_heads(path, changes, name):
    assert read_recipe(path, changes).method_name == name


def test_an_alias_is_not_set_with_what_it_stands_for(tmp_path):
    text = "{task: mrpc, model: minilm, output: out, tuning: &t {epochs: 4}, compression: {dk: 8}, again: *t}"
    (tmp_path / "alias.yaml").write_text(text)
    recipe = read_recipe(str(tmp_path / "alias.yaml"), ["again.epochs=2", "tuning.batch_size=8"])
    assert (recipe.tuning.epochs, recipe.again.epochs) == (4, 2)
    assert (recipe.tuning.batch_size, recipe.again.batch_size) == (8, 32)


def test_merged_fields_are_replaced(tmp_path):
    text = "{base: &b {dk: 1}, outer: {inner: &a {<<: *b, dk: 2}}, other: {<<: *a, dv: 3}}"
    (tmp_path / "merged.yaml").write_text(text)
    settings = read_settings(tmp_path / "merged.yaml", [])
    assert (settings["outer"]["inner"], settings["other"]) == ({"dk": 2}, {"dk": 2, "dv": 3})


def test_a_file_that_is_no_recipe(tmp_path):
    with pytest.raises(RecipeError, match="cannot read the recipe"):
        read_recipe(tmp_path / "nowhere.yaml")
    (tmp_path / "broken.yaml").write_text("task: [\nx: {\n")
    with pytest.raises(RecipeError, match="cannot read the recipe") as caught:
        read_recipe(tmp_path / "broken.yaml")
    assert "\n" not in str(caught.value)
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(RecipeError, match="holds a list; expected fields"):
        read_recipe(tmp_path / "list.yaml")


def test_an_integer_too_large_for_a_float_is_refused(path):
    with pytest.raises(RecipeError, match=r"seed is 1000.*; expected a number from 0 to 4294967295"):
        replace(read_recipe(path), seed=10**400)


@pytest.mark.parametrize(
    ("widths", "name"),
    [("{dk: 64}", "dk64"), ("{dff: 512}", "dff512"), ("{dk: 64, dv: 192}", "dk64-dv192"), ("{keep: 0.5}", "keep0.5")],
)
def test_a_conversion_is_named_by_its_widths(path, widths, name):
    recipe = read_recipe(path, [f"compression={widths}", "again={}"])
    assert (recipe.conversion_name, recipe.again_name) == (name, f"{name}-again")
