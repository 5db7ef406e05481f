"""Models and data of the hub: their commits are recorded."""

import json
import shutil
from dataclasses import replace

import pytest
from collab_compress_glue_runs.commands import run as command
from collab_compress_glue_runs.experiments import Recipe, Tuning, protocol, run
from datasets import Dataset, DatasetDict

from collab_compress.errors import RecipeError

COMMITS = {"v1": "1" * 40, "v2": "2" * 40}
DATA = {"sentence1": ["red cat", "blue dog"] * 4, "sentence2": ["red cat", "red bird"] * 4, "label": [1, 0] * 4}
COLD = Tuning(epochs=1, learning_rate=1e-3, batch_size=8)


@pytest.fixture
def hub(start, tmp_path, monkeypatch):
    """Serve a model and a data set with commits; tests set the commit of the main branch."""
    at = {"model": COMMITS["v1"], "data": COMMITS["v1"]}
    for commit in COMMITS.values():
        shutil.copytree(start, tmp_path / "models--someone--tiny" / "snapshots" / commit)

    def find_directory(name, revision=None):
        assert name == "someone/tiny"
        commit = COMMITS.get(revision, revision or at["model"])
        return tmp_path / "models--someone--tiny" / "snapshots" / commit

    def load_dataset(path, **_):
        folder = tmp_path / path.replace("/", "___") / "mrpc" / "0.0.0" / at["data"]  # where `datasets` keeps it
        folder.mkdir(parents=True, exist_ok=True)
        rows = Dataset.from_dict(DATA).map(lambda row: row, cache_file_name=str(folder / "glue-train.arrow"))
        return DatasetDict(train=rows, validation=rows)

    monkeypatch.setattr("collab_compress_glue_runs.tasks.load.load_dataset", load_dataset)
    monkeypatch.setattr(protocol, "find_directory", find_directory)
    return at


@pytest.fixture
def recipe(tmp_path):
    common = {"task": "mrpc", "trackers": (), "calibration": "none", "progress": False, "max_length": 24}
    return Recipe(model="someone/tiny", output=tmp_path / "out", tuning=COLD, **common)


def test_commits_are_recorded(hub, recipe):
    (record,) = run(replace(recipe, revision="v2"))
    assert record["hub"] == {"model": COMMITS["v2"], "data": COMMITS["v1"]}
    assert record["recipe"]["revision"] == "v2"
    assert json.loads((recipe.output / "tuned" / "result.json").read_text()) == record
    with pytest.raises(RecipeError, match=r"tuned was made with another revision; choose another output"):
        run(replace(recipe, revision="v1"))


def test_files_of_this_machine_have_no_commits(recipe, start, data_dir):
    (record,) = run(replace(recipe, model=str(start), data_dir=data_dir))
    assert record["hub"] == {"model": None, "data": None}


def test_the_commands_take_a_revision(monkeypatch, tmp_path):
    recipes = []
    monkeypatch.setattr(command, "run", lambda recipe: recipes.append(recipe) or [])
    monkeypatch.setattr(command, "run_sweep", lambda sweep: recipes.extend(sweep.recipes()) or [])
    command.main(["task=mrpc", "model=org/name", "output=out", "--revision", "1.0"])
    (tmp_path / "sweep.yaml").write_text("{output: out, tasks: {mrpc: {}, rte: {revision: v2}}, base: {model: a/b}}")
    command.sweep_main([str(tmp_path / "sweep.yaml"), "--revision", "1.0"])
    assert [recipe.revision for recipe in recipes] == ["1.0", "1.0", "v2"]
