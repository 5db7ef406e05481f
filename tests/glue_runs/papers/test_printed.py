"""The papers' numbers, checked by what the papers' own texts and other tables say of them; and ours beside them."""

import math

import pytest
import yaml
from collab_compress_glue_runs.tasks import TASKS
from printed import PRINTED, beside
from quantities import QUANTITIES

TABLES = {
    (paper, name.removeprefix("Table ")): table
    for paper, about in yaml.safe_load(PRINTED.read_text(encoding="utf-8")).items()
    for name, table in about["tables"].items()
}
MEASURES = {
    "svcca": {"layers": {"encoder": [0.2, 0.4], "cross": [0.9]}, "curve": {"encoder": [0.9, 0.1]}},
    "cka": {"layers": {"encoder": [0.1, 0.3]}},
    "discrepancy": {"encoder": [{"cosine": 1.0, "l2": 2.0}, {"cosine": 3.0, "l2": 4.0}]},
    "dominance": {"encoder": 78.0, "score": 80.0},
    "pruning": {"shares": [0.0, 0.25, 0.5, 1.0], "scores": [80.0, 79.0, 75.0, 50.0]},
}


def test_columns_of_tasks_are_named_as_ours():
    kinds = {"BLEU": "translation", "perplexity": "language modelling"}
    ours = {name.split()[0] for table in TABLES.values() for name in table["columns"]} & TASKS.keys()
    assert len(ours) == 10
    for table in TABLES.values():
        for name, metric in table["columns"].items():
            if name in TASKS or (name.split()[0] in TASKS and "perplexity" not in name):
                kind = TASKS[name.split()[0]].kind
                assert kinds.get(metric, kind) == kind, name


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ("svcca", 0.9),  # of the last layer between encoder and decoder
        ("cka", 0.3),  # of the last layer
        ("l2", 3.0),
        ("dominant encoder", -2.0),
        ("dominant cross", None),
        ("half pruned", -5.0),
        ("perplexity", 12.5),
        ("parameters", 1000),
        ("task loss", 3.0),
        ("training overlap", 0.25),
        ("score", 80.0),
    ],
)
def test_quantities(write, read, of, expected):
    history = [{"task_loss": 4.0, "epoch": 1}, {"task_loss": 3.0, "bhattacharyya": 0.25, "epoch": 2}, {"epoch": 2}]
    metrics = {"validation": {"perplexity": 9.0}, "test": {"perplexity": 12.5}}
    more = {"history": history, "metrics": metrics, "parameters": 1000}
    path = write("plain", [80.0], measures=MEASURES, **more)
    (value,) = read(path)[of]
    assert value == pytest.approx(math.nan if expected is None else expected, nan_ok=True)


def test_what_stands_beside_the_papers_is_known():
    for table in TABLES.values():
        assert set(table.get("of", ())) <= QUANTITIES.keys()
        assert {task.split()[0] for task in table.get("beside", ())} <= TASKS.keys()
        assert "beside" not in table or any("ours" in row for row in table["rows"])


def test_ours_stand_beside_the_papers(write, read):
    rows = beside(TABLES["collaborate", "2"], read(write("plain", [80.0, 82.0])))
    assert list(rows["score, mrpc, minilm"].dropna()) == ["81 ± 1.4 (plain)"]
    assert rows["mrpc"][0] == "[88.8, 83.8]"
