"""The scripts of glue_runs/papers as modules, and records of methods."""

import json
import sys
from pathlib import Path

import pytest
from collab_compress_glue_runs.experiments.results import read_results
from tiny_recipes import make_record

sys.path.append(str(Path(__file__).parents[3] / "glue_runs/papers"))


@pytest.fixture
def write(tmp_path):
    """Append the records of one method, a score for each seed; return the file of all of them."""

    def records(method, scores, task="mrpc", model="minilm", stage="tuned", **more):
        path = tmp_path / "records.jsonl"
        with path.open("a") as file:
            for seed, score in enumerate(scores):
                record = make_record(task, method, stage, seed, score, **{"recipe": {"model": model}, **more})
                file.write(json.dumps(record) + "\n")
        return path

    return records


@pytest.fixture
def read():
    """Return a table of the records in a file."""
    from quantities import tabulate

    return lambda path: tabulate(read_results(path))
