"""Folders of others are never removed, overwritten or taken for an experiment's results."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from collab_compress_glue_runs.experiments import outputs, protocol, read_recipe, run, tuning
from collab_compress_glue_runs.experiments.outputs import LOCK, MARK, discard, is_ours, mark
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


def foreign(folder, kind):
    """Create a user's folder that contains names that experiments use."""
    place = {"start": "start/model.safetensors", "checkpoints": "given/checkpoints/notes.txt"}.get(kind)
    place = place or {"result": "tuned/result.json", "model": "tuned/model/config.json"}.get(kind, "notes.txt")
    (folder / place).parent.mkdir(parents=True)
    (folder / place).write_text('{"score": 99, "metrics": {}, "recipe": {}}')
    if kind == "recipe":
        (folder / "recipe.json").write_text("[1]")


@pytest.mark.parametrize("kind", ["start", "checkpoints", "result", "model", "notes", "recipe"])
def test_a_folder_of_someone_else_is_refused_and_stays(start, data_dir, tmp_path, kind):
    mine = tmp_path / "mine"
    foreign(mine, kind)
    before = snapshot(mine)
    for source in (FRESH, f"model={start}"):
        with pytest.raises(RecipeError, match="mine exists and is no output of an experiment"):
            run(recipe(data_dir, mine, source))
        assert snapshot(mine) == before
    with pytest.raises(RecipeError, match="mine exists"):
        run(recipe(data_dir, mine, f"model={start}", "tuning=null"))
    assert snapshot(mine) == before


def test_folders_of_someone_else_in_our_output_are_refused_and_stay(start, data_dir, tmp_path):
    output = tmp_path / "out"
    start_setting = f"model={start}"
    run(recipe(data_dir, output, start_setting))
    foreign(output / "dk12", "notes")
    before = snapshot(output)
    with pytest.raises(RecipeError, match="dk12 exists and no experiment made it; choose another output"):
        run(recipe(data_dir, output, start_setting, "compression.dk=12"))
    assert snapshot(output) == before
    (output / "tuned" / "result.json").write_text('{"score": 99, "metrics": {}, "recipe": {}}')
    with pytest.raises(RecipeError, match="has task None, not 'mrpc'"):
        run(recipe(data_dir, output, start_setting))


def test_the_model_is_not_taken_for_a_part_of_the_output(start, data_dir, tmp_path, monkeypatch):
    """Otherwise it would be removed as the start of an earlier run of another recipe."""
    monkeypatch.chdir(tmp_path)
    before = snapshot(start)
    (tmp_path / "outputs").mkdir()
    start = shutil.move(start, tmp_path / "outputs" / "start")
    with pytest.raises(RecipeError, match="model outputs/start lies in the output outputs"):
        run(recipe(data_dir, "outputs", "model=outputs/start"))
    assert [content for _, content in snapshot(start).values()] == [content for _, content in before.values()]
    with pytest.raises(RecipeError, match="model outputs/start lies in the output outputs"):
        run(recipe(data_dir, "outputs", "fresh.config=outputs/start"))


def test_nothing_is_written_into_a_model_or_among_the_data(start, data_dir, tmp_path, monkeypatch):
    before = snapshot(tmp_path)
    for output, message in ((start / "o", "lies in the model"), (data_dir / "MRPC/o", "lies among the data in")):
        with pytest.raises(RecipeError, match=rf"the output {output} {message} .*; choose another output"):
            run(recipe(data_dir, output, f"model={start}"))
    with pytest.raises(RecipeError, match="lies in the model"):
        run(recipe(data_dir, start / "o", f"fresh.config={start}"))
    assert snapshot(tmp_path) == before
    monkeypatch.chdir(data_dir / "MRPC")  # a project that holds its data
    with outputs.reserve_output(recipe(data_dir, "o", f"model={start}"), ["tuned"]) as finished:
        assert not finished


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data_dir={tmp}/nowhere", "no folder"),
        ("tuning.arguments.no_such_argument=1", "no_such_argument"),
        ("tuning.arguments.per_device_eval_batch_size=0", "batch_size should be a positive integer value"),
        ("model={tmp}/nowhere", "nowhere is not a directory; pass a model directory or a hub name"),
        ("trackers=[nowhere]", "no tracker 'nowhere' here"),
        ("tuning=null", "was not trained for mrpc"),
    ],
)
def test_a_run_that_is_refused_leaves_nothing(start, data_dir, tmp_path, change, message):
    before = snapshot(tmp_path)
    with pytest.raises((RecipeError, DataError, CheckpointError), match=message):
        run(recipe(data_dir, tmp_path / "a" / "b", f"model={start}", change.format(tmp=tmp_path)))
    assert snapshot(tmp_path).keys() == before.keys()
    (tmp_path / "empty").mkdir()
    with pytest.raises((RecipeError, DataError, CheckpointError), match=message):
        run(recipe(data_dir, tmp_path / "empty", f"model={start}", change.format(tmp=tmp_path)))
    assert list((tmp_path / "empty").iterdir()) == []


DK = "compression={dk: 12}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["compression.dk=1000"], "dk is 1000, but"),
        (["compression.keep=0.0001"], "keep"),
        (["compression={dff: 1000}", "calibration=synthetic"], "reads 32 neurons, and dff is 1000"),
        (["compression={dff: 8}", "recovery={}", "calibration=synthetic"], "recovery trains converted attention"),
        (["compression={dk: 12, solver: {refit: true}}", "calibration=none"], "refit takes calibration data"),
        (["compression={dk: 12, modules: nothing*}"], "nothing"),
        (["compression={dk: 12, solver: {device: 'cuda:9'}}"], "cuda:9"),
        ([DK, "calibration=nowhere.txt"], "nowhere.txt"),
        (["tuning.arguments={adam_beta1: 2}"], "beta"),
        (["tuning.arguments={dataloader_num_workers: -1}"], "num_workers"),
        (
            ["tuning.arguments={dataloader_num_workers: 99999}"],
            r"num_workers is 99999; expected at most the \d+ cores",
        ),
        (["tuning.arguments={lr_scheduler_kwargs: {nothing: 1}}"], "nothing"),
        ([DK, "again={epochs: 1, arguments: {adam_beta1: 2}}"], "beta"),
    ],
)
def test_what_cannot_be_done_is_known_before_training(start, data_dir, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(protocol, "fine_tune", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(CollabCompressError, match=message):
        run(recipe(data_dir, tmp_path / "out", f"model={start}", *changes))
    assert not (tmp_path / "out").exists()


def test_rows_that_cannot_be_padded_are_known_before_training(start, data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "fine_tune", lambda *_: pytest.fail("it was trained"))
    path = start / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    del settings["pad_token"]
    path.write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(RecipeError, match="does not have a padding token"):
        run(recipe(data_dir, tmp_path / "out", f"model={start}"))


def test_a_backend_that_cannot_be_opened(start, data_dir, tmp_path):
    try:
        with pytest.raises(RecipeError, match="process group"):
            run(recipe(data_dir, tmp_path / "out", f"model={start}", "tuning.arguments={ddp_backend: nowhere}"))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_what_failed_is_free_for_another_recipe(data_dir, tmp_path, monkeypatch):
    """Our start is made anew; the lock of a process that has ended is ignored."""
    output = tmp_path / "out"

    def broken(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(protocol, "fine_tune", broken)
        with pytest.raises(KeyboardInterrupt):
            run(recipe(data_dir, output, FRESH))
    assert not output.exists()
    output.mkdir()
    (output / LOCK).touch()
    run(recipe(data_dir, output, FRESH))
    assert is_ours(output)
    assert is_ours(output / "start")
    with pytest.raises(RecipeError, match="out was made with another fresh"):
        run(recipe(data_dir, output, FRESH, "fresh.layers=2"))


def test_one_process_at_a_time(start, data_dir, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    with (
        FileLock(output / LOCK, is_singleton=False),
        pytest.raises(RecipeError, match=r"another process is at work in .*out; wait for it"),
    ):
        run(recipe(data_dir, output, f"model={start}"))
    assert {path.name for path in output.iterdir()} <= {LOCK}


def test_calibration_and_config_are_known_by_what_they_say(start, data_dir, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("red cat runs\nblue dog sings\n" * 8)
    output = tmp_path / "out"
    overrides = (f"fresh.config={start}", "fresh.tokenizer=word", "fresh.vocab_size=null", "fresh.max_length=40")
    converted = (*overrides, "compression.dk=12", f"calibration={texts}")
    records = run(recipe(data_dir, output, *converted))
    moved = shutil.copytree(start, tmp_path / "moved")
    shutil.move(texts, tmp_path / "other.txt")
    again = (f"fresh.config={moved}", *converted[1:-1], f"calibration={tmp_path / 'other.txt'}")
    assert run(recipe(data_dir, output, *again)) == records
    (tmp_path / "other.txt").write_text("red cat\n" * 8)
    with pytest.raises(RecipeError, match=r"dk12 was made with another calibration \(other\.txt changed\)"):
        run(recipe(data_dir, output, *again))
    config = moved / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 32', '"intermediate_size": 40'))
    with pytest.raises(RecipeError, match=r"out was made with another fresh \(config\.json changed\)"):
        run(recipe(data_dir, output, *again))


def test_another_column_is_another_calibration(start, data_dir, tmp_path):
    table = tmp_path / "rows.csv"
    table.write_text("one,other\n" + "red cat runs,blue dog sings\n" * 8)
    overrides = (f"model={start}", "compression.dk=12")
    records = run(recipe(data_dir, tmp_path / "out", *overrides, f"calibration={table}:one"))
    assert run(recipe(data_dir, tmp_path / "out", *overrides, f"calibration={table}:one")) == records
    with pytest.raises(RecipeError, match="dk12 was made with another calibration"):
        run(recipe(data_dir, tmp_path / "out", *overrides, f"calibration={table}:other"))


def test_a_run_killed_while_it_removed_its_checkpoints_goes_on(start, data_dir, tmp_path, monkeypatch):
    output = tmp_path / "out"

    def kill(path, *arguments, original=shutil.rmtree, **options):
        """Begin with the mark, and be killed then."""
        if not Path(path).name.startswith("checkpoint"):
            return original(path, *arguments, **options)
        (Path(path) / MARK).unlink(missing_ok=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tuning.shutil, "rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            run(recipe(data_dir, output, f"model={start}"))
    assert list((output / "tuned" / "checkpoints").iterdir())
    assert run(recipe(data_dir, output, f"model={start}"))
    assert not (output / "tuned" / "checkpoints").exists()


def test_a_folder_is_known_as_ours_until_it_is_removed(tmp_path, monkeypatch):
    folder = tmp_path / "start"
    (folder / "inner").mkdir(parents=True)
    (folder / "weights").touch()
    mark(folder, {})

    def kill(path, **_):
        """Begin with the mark, and be killed then."""
        (Path(path) / MARK).unlink(missing_ok=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(outputs.shutil, "rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            discard(folder)
    assert is_ours(folder)
    discard(folder)
    assert not folder.exists()


def test_what_does_not_decide_a_model_is_no_other_recipe(start, data_dir, tmp_path):
    output, source = tmp_path / "out", f"model={start}"
    records = run(recipe(data_dir, output, source))
    content = json.loads((output / MARK).read_text())
    del content["recipe"]["fresh"]  # as an earlier version would have written it
    (output / MARK).write_text(json.dumps(content))
    for arguments in ("{disable_tqdm: true, logging_steps: 3}", "{eval_strategy: epoch, eval_steps: 1}"):
        assert run(recipe(data_dir, output, source, f"tuning.arguments={arguments}")) == records
    for other in ("tuning.arguments.adam_beta2=0.98", "tuning.batch_size=200"):
        with pytest.raises(RecipeError, match="out was made with another tuning; choose another output"):
            run(recipe(data_dir, output, source, other))


def test_evaluations_that_choose_the_best_checkpoint_decide_a_model():
    best = {"load_best_model_at_end": True, "generation_num_beams": 1, "logging_steps": 5}
    assert outputs.without_neutral("again", {"arguments": best})["arguments"].keys() == best.keys() - {
        "logging_steps"
    }


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("tuned/result.json", {"score": "x"}, "is no record of an experiment; remove it, or choose another output"),
        ("tuned/result.json", {"score": ...}, "is no record of an experiment"),
        ("tuned/result.json", {"metrics": ...}, "is no record of an experiment"),
        ("tuned/result.json", {"metrics": 5}, "is no record of an experiment"),
        ("tuned/result.json", {"hub": None}, "is no record of an experiment"),
        ("tuned/result.json", {"hub": "main"}, "is no record of an experiment"),
        ("tuned/result.json", {"measured": 5}, "is no record of an experiment"),
        *(
            (MARK, {"recipe": {"model": {"sha256": digests}}}, "json is damaged; choose another output")
            for digests in (5, [5], [[5]])
        ),
        (MARK, {"recipe": ...}, "out has no valid mark file, .* is unknown; choose another output"),
        (f"tuned/{MARK}", {"recipe": ...}, "tuned has no valid mark file, so the recipe that made it is unknown"),
    ],
)
def test_damaged_records_and_marks_are_refused(start, data_dir, tmp_path, monkeypatch, file, changes, message):
    """Of a finished experiment, and of one that is to be continued."""
    base = recipe(data_dir, tmp_path / "out", f"model={start}", "compression.dk=12")
    settings = outputs.settings_of(base, True)
    for stage in ("tuned", "dk12"):
        fields = {"score": 1.0, "metrics": {}, "recipe": {}, "task": "mrpc", "stage": stage, "seed": 0}
        mark(base.output / stage, {} if stage == "tuned" else {name: settings[name] for name in outputs.CONVERTED})
        outputs.write_record(base.output / stage / "result.json", fields)
    mark(base.output, {name: settings[name] for name in outputs.BASE})
    assert len(run(base)) == 2
    content = json.loads((base.output / file).read_text()) | changes
    content = {name: value for name, value in content.items() if value is not ...}
    (base.output / file).write_text(json.dumps(content))
    for one in (base, replace(base, measures=("svcca",)), replace(base, again=base.tuning)):
        with pytest.raises(RecipeError, match=message):
            run(one)


@pytest.mark.parametrize(("output", "message"), [("x" * 300, "too long"), ("~nobody-here/x", "home directory")])
def test_places_that_cannot_be(start, data_dir, output, message):
    with pytest.raises(RecipeError, match=re.compile(message, re.IGNORECASE)):
        run(recipe(data_dir, f'"{output}"', f"model={start}"))
