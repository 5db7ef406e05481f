"""The command `collab-results`."""

import csv
import io
import json
import os
import statistics

import pytest
from collab_compress_glue_runs.commands import start
from collab_compress_glue_runs.experiments.results import read_results
from commands import ran
from scipy import stats
from tiny_recipes import make_record

PLAIN = {"mrpc": [84.0, 85.0, 83.5], "ptb": [100.0, 104.0, 99.0], "rte": [60.0, 61.0, 65.0]}
CONVERTED = {"mrpc": [83.0, 84.5, 81.0], "ptb": [101.0, 103.0, 99.5], "rte": [60.5, 60.0, 66.0]}


@pytest.fixture
def write(tmp_path):
    def records(*tasks):
        common = {"metrics": {}, "recipe": {"model": "minilm|x"}}
        for stage, parameters, scores in (("tuned", 22713602, PLAIN), ("dk128", 21565824, CONVERTED)):
            for task in tasks:
                for seed, score in enumerate(scores[task]):
                    folder = tmp_path / "runs" / f"{task}-{seed}" / stage
                    folder.mkdir(parents=True)
                    record = make_record(task, "plain", stage, seed, score, parameters=parameters, **common)
                    (folder / "result.json").write_text(json.dumps(record))
        return tmp_path / "runs"

    return records


@pytest.fixture
def run(capsys):
    return lambda *arguments: ran(start.results, arguments, capsys)


def grids(text):
    """Return the tables of a text as lists of dictionaries; every line of a table must have all its cells."""
    tables = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        if not lines:
            continue
        assert len({len(line) for line in lines}) == 1
        cells = [[cell.strip() for cell in line.replace("\\|", "¦").strip("|").split("|")] for line in lines]
        assert all(len(line) == len(cells[0]) for line in cells)
        assert all(set(rule) <= {"-", ":"} for rule in cells[1])
        tables.append([dict(zip(cells[0], line, strict=True)) for line in cells[2:]])
    return tables


def test_means_and_differences(run, write):
    code, printed, error = run(write("mrpc", "ptb"))
    assert (code, error) == (0, "")
    scores, differences = grids(printed)
    lower = "ptb (perplexity, lower is better)"
    assert list(scores[0]) == ["model", "method", "stage", "parameters (M)", "mrpc (accuracy+f1)", lower]
    assert [row["stage"] for row in scores] == ["tuned", "dk128"]
    assert [row["parameters (M)"] for row in scores] == ["22.71", "21.57"]
    assert scores[0]["model"] == "minilm¦x"
    for row, arm in zip(scores, (PLAIN, CONVERTED), strict=True):
        for name, task in (("mrpc (accuracy+f1)", "mrpc"), (lower, "ptb")):
            mean, deviation = statistics.fmean(arm[task]), statistics.stdev(arm[task])
            assert row[name] == f"{mean:.2f} ± {deviation:.2f} (3)"
    (change,) = differences
    t = stats.t.ppf(0.975, 2)
    assert change["mrpc (accuracy+f1)"] == f"-1.33 ± {t * stats.sem([1.0, 0.5, 2.5]):.2f} (3)"
    assert change["ptb (perplexity, negative is better)"] == f"+0.17 ± {t * stats.sem([1.0, -1.0, 0.5]):.2f} (3)"
    assert "Difference to plain/tuned of the same model, task and seed: mean ± half of its 95 % t-interval" in printed


def test_output_is_complete_or_absent(run, write, tmp_path, monkeypatch):
    folder, output = write("mrpc"), tmp_path / "table.md"
    _, printed, _ = run(folder)
    assert run(folder, "--output", output) == (0, "", "")

    def fail(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("pathlib.Path.rename", fail)
    code, _, error = run(folder, "--output", tmp_path / "other.md")
    assert (code, "No space left" in error) == (2, True)
    assert output.read_text(encoding="utf-8") == printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "table.md"]


def test_records_in_one_file(run, write, tmp_path):
    folder, file = write("mrpc", "rte"), tmp_path / "records.jsonl"
    printed = run(folder, "--records", file)
    assert printed == run(folder) == run(file)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["environment"] for line in lines] == [{"revision": "unknown"}] * 12
    assert {result.revision for result in read_results(file)} == {None}


def test_json_has_the_numbers_of_the_csv(run, write, tmp_path):
    folder, file = write("mrpc", "rte"), tmp_path / "numbers.json"
    assert run(folder, "--json", file, "--quiet") == (0, "", "")
    written = json.loads(file.read_text(encoding="utf-8"))
    lines = list(csv.DictReader(io.StringIO(run(folder, "--format", "csv")[1])))
    for line, numbers in zip(lines, written, strict=True):
        cells = {name: type(numbers[name])(text) for name, text in line.items() if text}
        assert cells == {name: value for name, value in numbers.items() if value is not None}
    assert run(folder, "--quiet", "--output", tmp_path / "table.md") == (0, "", "")
    assert grids((tmp_path / "table.md").read_text(encoding="utf-8"))


def test_notes(run, write):
    folder = write("mrpc")
    path = folder / "mrpc-1" / "tuned" / "result.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "recipe": {**record["recipe"], "max_length": 64}}))
    _, printed, _ = run(folder)
    assert "* plain/tuned of minilm|x on mrpc: seeds differ in max_length." in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{runs}/nowhere"], "nowhere is no folder"),
        (["{empty}"], "holds no result.json"),
        (["{runs}", "--output", "{empty}"], "empty exists; choose another output"),
        (["{runs}", "--json", "{empty}"], "empty exists; choose another output"),
        (["{runs}", "--records", "{empty}"], "empty exists; choose another output"),
        (["{runs}", "--against", "hsic/tuned"], "no result is 'hsic/tuned'; expected one of plain/dk128"),
        ([], "no results: give a folder"),
    ],
)
def test_mistakes_are_one_line(run, write, tmp_path, arguments, message):
    folder = write("mrpc")
    (tmp_path / "empty").mkdir()
    code, printed, error = run(*(a.format(runs=folder, empty=tmp_path / "empty") for a in arguments))
    assert (code, printed) == (2, "")
    assert error.startswith("collab-results: ")
    assert error.count("\n") == 1
    assert message in error
