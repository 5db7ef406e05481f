"""Folders of others are never removed, overwritten or taken for an experiment's results."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from collab_compress_glue_runs.experiments import outputs, protocol, read_recipe, run, tuning
from collab_compress_glue_runs.experiments.outputs import LOCK, RECIPE, claim, remove_output
from filelock import FileLock

from collab_compress.errors import CheckpointError, CollabCompressError, DataError, RecipeError

FRESH = "fresh={layers: 1, width: 24, heads: 3, max_length: 40, tokenizer: word, vocab_size: null}"
TUNING = "tuning={epochs: 1, batch_size: 8, arguments: {disable_tqdm: true}}"


def recipe(data_dir, output, *more):
    common = (f"output={output}", f"data_dir={data_dir}", "task=mrpc", "max_length=24", "trackers=[]", TUNING)
    return read_recipe(overrides=[*common, "calibration=none", *more])


def snapshot(folder):
    """Map every path in a folder to its content and the time of its last change."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None) for path in folder.rglob("*")
    }


@pytest.mark.parametrize("name", ["start/model.safetensors", "given/checkpoints/notes.txt", "dk12/x"])
@pytest.mark.parametrize("recipe_file", [None, "{}"])
def test_foreign_folders_are_refused_and_stay(start, data_dir, tmp_path, name, recipe_file):
    """A user's folder that has the name of a stage; a recipe file that is none makes it no experiment's."""
    file = tmp_path / "mine" / name
    file.parent.mkdir(parents=True)
    file.write_text('{"score": 99, "metrics": {}, "recipe": {}}')
    folder = tmp_path / "mine" / name.partition("/")[0]
    if recipe_file is not None:
        (folder / RECIPE).write_text(recipe_file)
    before = snapshot(tmp_path)
    source = FRESH if folder.name == "start" else f"model={start}"
    tuning = ["tuning=null"] if folder.name == "given" else []
    with pytest.raises(RecipeError, match=f"{folder} exists and no experiment made it; choose another output"):
        run(recipe(data_dir, tmp_path / "mine", source, "compression.dk=12", *tuning))
    assert snapshot(tmp_path) == before


def test_only_what_a_recipe_made_is_removed(data_dir, tmp_path):
    (tmp_path / "mine").mkdir()
    claim(recipe(data_dir, tmp_path, FRESH), tmp_path / "start")
    (tmp_path / "link").symlink_to(tmp_path / "start")
    for name in ("mine", "link", "start"):
        remove_output(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} >= {"mine", "link"}
    assert not (tmp_path / "start").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data_dir={tmp}/nowhere", "no folder"),
        ("tuning.arguments.per_device_eval_batch_size=0", "batch_size should be a positive integer value"),
        ("model={tmp}/nowhere", "nowhere is not a directory; pass a model directory or a hub name"),
        ("tuning=null", "was not trained for mrpc"),
    ],
)
def test_a_run_that_is_refused_leaves_nothing(start, data_dir, tmp_path, change, message):
    (tmp_path / "empty").mkdir()
    before = snapshot(tmp_path)
    for output in (tmp_path / "a" / "b", tmp_path / "empty"):
        with pytest.raises((RecipeError, DataError, CheckpointError), match=message):
            run(recipe(data_dir, output, f"model={start}", change.format(tmp=tmp_path)))
    assert snapshot(tmp_path).keys() == before.keys()


DK = "compression={dk: 12}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["compression.dk=1000"], "dk is 1000, but"),
        (["compression={dff: 1000}", "calibration=synthetic"], "reads 32 neurons, and dff is 1000"),
        (["compression={dk: 12, solver: {refit: true}}", "calibration=none"], "refit takes calibration data"),
        (["compression={layers: 9}", "calibration=synthetic"], "layers is 9, and the deepest stack"),
        (["compression={layers: 1}", "calibration=none"], "layers takes calibration data"),
        ([DK, "calibration=nowhere.txt"], "nowhere.txt"),
        (["tuning.arguments={adam_beta1: 2}"], "beta"),
        (["tuning.arguments={lr_scheduler_kwargs: {nothing: 1}}"], "nothing"),
        ([DK, "again={epochs: 1, arguments: {adam_beta1: 2}}"], "beta"),
    ],
)
def test_what_cannot_be_done_is_known_before_training(start, data_dir, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(protocol, "fine_tune", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(CollabCompressError, match=message):
        run(recipe(data_dir, tmp_path / "out", f"model={start}", *changes))
    assert not (tmp_path / "out").exists()


def test_rows_that_cannot_be_padded_are_known_before_training(start, data_dir, tmp_path):
    path = start / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    del settings["pad_token"]
    path.write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(RecipeError, match="does not have a padding token"):
        run(recipe(data_dir, tmp_path / "out", f"model={start}"))
    assert not (tmp_path / "out").exists()


def test_what_failed_is_free_for_another_recipe(data_dir, tmp_path, monkeypatch):
    """The untrained model is made anew; the lock of a process that has ended is ignored."""
    output = tmp_path / "out"

    with monkeypatch.context() as patch:
        patch.setattr(protocol, "fine_tune", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(recipe(data_dir, output, FRESH))
    (output / LOCK).touch()
    (record,) = run(recipe(data_dir, output, FRESH, "fresh.layers=2"))
    assert record["recipe"]["fresh"]["layers"] == 2
    assert json.loads((output / "start" / "config.json").read_text())["num_hidden_layers"] == 2
    with pytest.raises(RecipeError, match="tuned was made with another fresh"):
        run(recipe(data_dir, output, FRESH))


def test_one_process_at_a_time(start, data_dir, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    with (
        FileLock(output / LOCK, is_singleton=False),
        pytest.raises(RecipeError, match=r"another process is at work in .*out; wait for it"),
    ):
        run(recipe(data_dir, output, f"model={start}"))
    assert {path.name for path in output.iterdir()} <= {LOCK}


def test_a_run_killed_while_it_removed_its_checkpoints_goes_on(start, data_dir, tmp_path, monkeypatch):
    output = tmp_path / "out"

    def kill(path, *arguments, original=shutil.rmtree, **options):
        if not Path(path).name.startswith("checkpoint"):
            return original(path, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tuning.shutil, "rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            run(recipe(data_dir, output, f"model={start}"))
    assert list((output / "tuned" / "checkpoints").iterdir())
    assert run(recipe(data_dir, output, f"model={start}"))
    assert not (output / "tuned" / "checkpoints").exists()


def test_what_does_not_decide_a_model_is_no_other_recipe(start, data_dir, tmp_path):
    output, source = tmp_path / "out", f"model={start}"
    records = run(recipe(data_dir, output, source))
    file = output / "tuned" / RECIPE
    content = json.loads(file.read_text())
    del content["fresh"]  # as a version without this field would have written it
    file.write_text(json.dumps(content))
    for arguments in ("{disable_tqdm: true, logging_steps: 3}", "{eval_strategy: epoch, eval_steps: 1}"):
        assert run(recipe(data_dir, output, source, f"tuning.arguments={arguments}")) == records
    for other in ("tuning.arguments.adam_beta2=0.98", "tuning.batch_size=200"):
        with pytest.raises(RecipeError, match="tuned was made with another tuning; choose another output"):
            run(recipe(data_dir, output, source, other))


@pytest.mark.parametrize(("output", "message"), [("x" * 300, "too long"), ("~nobody-here/x", "home directory")])
def test_places_that_cannot_be(start, data_dir, output, message):
    with pytest.raises(RecipeError, match=re.compile(message, re.IGNORECASE)):
        run(recipe(data_dir, f'"{output}"', f"model={start}"))


@pytest.mark.parametrize("changes", [{"score": "x"}, {"metrics": ...}, {"measured": 5}])
def test_damaged_records_are_refused(start, data_dir, tmp_path, changes):
    base = recipe(data_dir, tmp_path / "out", f"model={start}")
    claim(base, base.output / "tuned")
    file = base.output / "tuned" / "result.json"
    outputs.write_record(file, {"score": 1.0, "metrics": {}, "recipe": {}})
    assert len(run(base)) == 1
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))
    for one in (base, replace(base, measures=("svcca",))):
        with pytest.raises(RecipeError, match="is no record of an experiment; remove it, or choose another output"):
            run(one)
