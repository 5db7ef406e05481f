"""The scripts: one process and two give the same metrics, and what a script is not for is refused."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "glue_runs"
FRESH = "fresh={layers: 1, width: 24, heads: 3, dropout: 0.0, max_length: 40, tokenizer: word, vocab_size: null}"
LANGUAGES = "translation={source: aa, target: bb, beams: 2, max_length: 12}"
CASES = {
    "run_translation.py": ("sentences", "task=parallel", LANGUAGES, "max_length=24"),
    "run_language_model.py": ("text", "task=text", "max_length=7"),
    "run_classification.py": ("questions", "task=trec", "max_length=24"),
}


def start(script, processes, *settings):
    """Run a script whose steps see eight rows, however many processes share them."""
    tuning = f"tuning={{epochs: 2, learning_rate: 1.0e-3, batch_size: {8 // processes}}}"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if processes == 2 else []
    return subprocess.run(
        [sys.executable, *launch, str(SCRIPTS / script), FRESH, tuning, "compression.rank=12", *settings],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("script", sorted(CASES))
def test_two_processes_give_the_metrics_of_one(script, request, tmp_path):
    fixture, *settings = CASES[script]
    data = f"data_dir={request.getfixturevalue(fixture)}"
    metrics = []
    for processes in (1, 2):
        output = tmp_path / str(processes)
        done = start(script, processes, f"output={output}", data, *settings)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-9000:]
        found = {file.parent.name: json.loads(file.read_text()) for file in output.glob("*/result.json")}
        metrics.append({name: record["metrics"] for name, record in found.items()})
        for name, record in found.items():
            assert f"{name:14} {record['score']:.2f}" in done.stdout
    assert metrics[0].keys() == metrics[1].keys() == {"tuned", "dk12"}
    for stage, splits in metrics[0].items():
        for split, scores in splits.items():
            assert metrics[1][stage][split] == pytest.approx(scores, rel=1e-4)


def test_another_kind_of_task(text, tmp_path):
    done = start("run_translation.py", 1, "task=text", f"data_dir={text}", f"output={tmp_path / 'out'}")
    assert done.returncode == 1
    message = "error: text is language modelling; this script is for multi30k, iwslt14, iwslt17, wmt14, wmt16, wmt17,"
    assert message in done.stderr


@pytest.mark.parametrize("script", ["run_glue.py", "run_translation.py", "sweep.py"])
def test_usage(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(SystemExit, match=f"python glue_runs/{script} glue_runs/"):
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
