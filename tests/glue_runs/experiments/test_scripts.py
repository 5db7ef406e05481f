"""The commands: one process and two give the same metrics; settings, paths and errors."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from collab_compress_glue_runs.commands.run import main
from tqdm import tqdm

from collab_compress.errors import RecipeError

RUN = "from collab_compress_glue_runs.commands.run import main; main()"
FRESH = "fresh={layers: 1, width: 24, heads: 3, dropout: 0.0, max_length: 40, tokenizer: word, vocab_size: null}"
LANGUAGES = "translation={source: aa, target: bb, beams: 2, max_length: 12}"
CASES = {
    "mrpc": ("data_dir", "max_length=24", "measures=[overlap,dominance]"),
    "parallel": ("sentences", LANGUAGES, "max_length=24"),
    "text": ("text", "max_length=7"),
    "trec": ("questions", "max_length=24"),
}


@pytest.fixture
def accelerate():
    """Run a recipe as `accelerate launch` does, which starts one process where there is no GPU."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    launcher += ["-m", "collab_compress_glue_runs.commands.run"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 300, "check": False}
    return lambda *arguments: subprocess.run([*launcher, *arguments], **options)


@pytest.mark.parametrize(
    "task", ["mrpc", *(pytest.param(task, marks=pytest.mark.slow) for task in CASES if task != "mrpc")]
)
def test_two_processes_give_the_metrics_of_one(task, python, accelerate, request, tmp_path):
    """Batches of eight are the same: four rows in each of two processes, or eight in one."""
    fixture, *settings = CASES[task]
    data = f"data_dir={request.getfixturevalue(fixture)}"
    metrics, measures = [], []
    launchers = [(partial(python, RUN), 8), (partial(python.both, RUN), 4)]
    if task == "trec":
        launchers.append((accelerate, 8))
    for place, (launch, rows) in enumerate(launchers):
        output = tmp_path / str(place)
        tuning = f"tuning={{epochs: 2, learning_rate: 1.0e-3, batch_size: {rows}}}"
        done = launch(FRESH, tuning, "compression.dk=12", f"task={task}", f"output={output}", data, *settings)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-9000:]
        records = {file.parent.name: json.loads(file.read_text()) for file in output.glob("*/result.json")}
        metrics.append({name: record["metrics"] for name, record in records.items()})
        measures.append(records["tuned"].get("measures"))
        for name, record in records.items():
            assert f"{name:14} {record['score']:.2f}" in done.stdout
    for other in metrics[1:]:
        assert metrics[0].keys() == other.keys() == {"tuned", "dk12"}
        for stage, splits in metrics[0].items():
            for split, scores in splits.items():
                assert other[stage][split] == pytest.approx(scores, rel=1e-4)
    if task == "mrpc":
        assert measures[0]["dominance"] == measures[1]["dominance"]
        assert measures[0]["overlap"]["encoder"] == pytest.approx(measures[1]["overlap"]["encoder"], rel=1e-3)


def test_errors_and_interrupts_are_one_line(monkeypatch, capsys, questions, tmp_path):
    settings = [FRESH, "task=trec", f"data_dir={questions}", f"output={tmp_path / 'out'}", "trackers=[]"]

    for error, code, message in (
        (RecipeError("no such thing"), 2, "no such thing"),
        (KeyboardInterrupt(), 130, "interrupted; nothing half-written is left"),
    ):
        monkeypatch.setattr("collab_compress_glue_runs.commands.run.run", Mock(side_effect=error))
        tqdm(total=3).update()
        with pytest.raises(SystemExit, match=f"^{code}$"):
            main([*settings, "tuning={epochs: 1}"])
        assert capsys.readouterr().err.endswith(f"\ncollab-run: {message}\n")


def test_settings_may_be_written_as_flags(monkeypatch, capsys):
    recipes = []
    monkeypatch.setattr("collab_compress_glue_runs.commands.run.run", lambda recipe: recipes.append(recipe) or [])
    flags = "--task mrpc --data-dir=DIR output=out --model minilm --tuning.batch_size 8"
    main(flags.split())
    assert (recipes[0].task, str(recipes[0].data_dir), recipes[0].tuning.batch_size) == ("mrpc", "DIR", 8)
    for wrong in ("--task", "--task --seed=1"):
        with pytest.raises(SystemExit, match="2"):
            main(wrong.split())
        assert capsys.readouterr().err == "collab-run: --task sets nothing; expected a value after it\n"


@pytest.mark.parametrize("place", ["runs/lr=0.1/recipe.yaml", "lr=0.1.yaml"])
def test_paths_of_recipes_may_have_equals_signs(place, monkeypatch, capsys, tmp_path):
    recipes = []
    monkeypatch.setattr("collab_compress_glue_runs.commands.run.run", lambda recipe: recipes.append(recipe) or [])
    monkeypatch.chdir(tmp_path)
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).write_text("{task: mrpc, model: minilm, output: out}")
    main([place, "seed=3"])
    assert recipes[0].seed == 3
    with pytest.raises(SystemExit, match="2"):
        main(["runs/lr=0.2/recipe.yaml"])
    assert "cannot read the recipe runs/lr=0.2/recipe.yaml" in capsys.readouterr().err
