"""Parts of a Markdown file that are made of records; RESULTS.md is what its records make."""

import json
import os
import re
from pathlib import Path

import pytest
from collab_compress_glue_runs.commands import results as command
from collab_compress_glue_runs.commands.results import check_editable, regenerated
from collab_compress_glue_runs.experiments.results import read_results
from tiny_recipes import make_record

from collab_compress.errors import CheckpointError, RecipeError

RUNS = Path(__file__).parents[3] / "glue_runs"
TABLE = '<!-- records: {"tasks": ["mrpc"]} -->\nold\n<!-- end -->'


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "records.jsonl"
    scores = {("mrpc", "plain"): 80.0, ("mrpc", "drophead"): 81.0, ("rte", "plain"): 60.0}
    scores |= {("trec", "plain"): 85.0, ("trec", "drophead"): 87.0}
    environments = {("trec", "plain"): {"revision": "aaa"}, ("trec", "drophead"): {"revision": "bbb"}}
    lines = [
        make_record(task, method, "tuned", seed, score + seed, environment=environments.get((task, method), {}))
        for (task, method), score in scores.items()
        for seed in range(5)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_results_are_what_the_records_make():
    results = read_results(*sorted((RUNS / "records").glob("*.jsonl")))
    text, plots = regenerated(RUNS / "RESULTS.md", results)
    assert (RUNS / "RESULTS.md").read_text(encoding="utf-8") == text
    assert set((RUNS / "images").iterdir()) == set(plots)
    pytest.importorskip("matplotlib")
    for path, draw in plots.items():  # by their texts: paths depend on Matplotlib's version
        shown, drawn = (
            re.findall("<text.*?>(.*?)</text>", svg) for svg in (path.read_text("utf-8"), draw().decode())
        )
        assert len(drawn) > 5
        assert shown == drawn


def test_the_text_of_results_is_short():
    """At most 2,500 words before the appendix."""
    text = (RUNS / "RESULTS.md").read_text(encoding="utf-8")
    assert len(text.partition("## Appendix")[0].split()) <= 2500


def test_a_single_seed_is_one(tmp_path, records):
    (tmp_path / "page.md").write_text(TABLE)
    results = [result for result in read_results(records) if result.seed == 0]
    assert "-->\n\n1 seed:\n\n|" in regenerated(tmp_path / "page.md", results)[0]


def test_generated_parts_are_replaced_and_the_rest_stays(tmp_path, records, capsys):
    pytest.importorskip("matplotlib")
    text = (
        f"# Title\n\n{TABLE}\n\nbetween\n\n"
        '<!-- records: {"tasks": ["mrpc", "rte"], "methods": ["plain"]} -->\n<!-- end -->\n'
        '<!-- claims: drophead -->\n<!-- end -->\n<!-- records: {"tasks": ["ptb"]} -->\n<!-- end -->\n'
        "<!-- findings: drophead -->\n<!-- end -->\n<!-- forest: rotation -->\n<!-- end -->\n"
        "<!-- forest: drophead -->\n<!-- end -->\n<!-- findings: records -->\n<!-- end -->\n"
        '<!-- records: {"tasks": ["mrpc"], "models": ["albert"]} -->\n<!-- end -->\n'
        "<!-- findings: rotation -->\n<!-- end -->\n"
    )
    (tmp_path / "page.md").write_text(text)
    command.main([str(records), "--markdown", str(tmp_path / "page.md"), "--quiet"])
    assert capsys.readouterr().out == ""
    parts = (tmp_path / "page.md").read_text().split("<!-- end -->")
    first, second, claims, none, findings, rotation, forest, counts, other, empty = parts[:10]
    assert first.startswith('# Title\n\n<!-- records: {"tasks": ["mrpc"]} -->\n\n5 seeds:\n\n| method ')
    assert re.search(r"\| drophead *\| +83.00 ± 1.58 \|", first)
    assert "rte" not in first
    assert "between" in second
    assert "average (%)" in second
    assert "drophead" not in second
    assert "* Holds: DropHead improves over none. (Tables 1 and 3) drophead − plain is +2.00 points (95 %" in claims
    assert "\n* No records to compare on trec: Scheduled DropHead improves over none.\n" in claims
    assert claims.endswith("* Revisions that are paired: bbb and aaa.\n\n")
    tried = "**: 2 comparisons tried: 1 holds, 1 no control. "
    assert findings.endswith(f"{tried}Holds: DropHead improves over none (+2.00 points on trec).\n\n")
    assert "**Records**: 25, of 5 methods and stages on a task, 5 of them with 5 seeds or more." in counts
    assert "The revision of 15 is unknown." in counts
    assert "No records." in rotation
    assert empty.endswith("Parameters Rotation and Linear Mixing**: No records.\n\n")
    assert "](images/forest-drophead.svg)" in forest
    picture = (tmp_path / "images" / "forest-drophead.svg").read_text(encoding="utf-8")
    assert "drophead − plain (trec)" in picture
    assert "holds (n = 5, p = 0)" in picture
    assert "No records." in none
    assert "No records." in other
    again = (tmp_path / "page.md").read_text()
    text, plots = regenerated(tmp_path / "page.md", read_results(records))
    assert text == again
    assert [path.read_bytes() for path in plots] == [draw() for draw in plots.values()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "has 0 complete generated parts; expected at least one"),
        ('<!-- records: {"tasks": ["mrpc"]} -->\nno end', "has 0 complete generated parts"),
        (f"{TABLE}\n<!-- claims: drophead -->\nno end", "has 1 complete generated parts"),
        (f"<!-- claims: drophead -->\n{TABLE}", "has 1 complete generated parts"),
        ("<!-- claims: bert -->\n<!-- end -->", "unknown paper 'bert'; expected one of collaborate"),
        ('<!-- records: {"task": ["mrpc"]} -->\n<!-- end -->', "tasks"),
        ("<!-- records: {[ -->\n<!-- end -->", "cannot read"),
        ("<!-- records: [1] -->\n<!-- end -->", "expected {.tasks.:"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(tmp_path, records, text, message):
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        regenerated(path, read_results(records))
    with pytest.raises(SystemExit):
        command.main([str(records), "--markdown", str(path), "--quiet"])
    assert path.read_text() == text


def test_line_ends_stay_and_other_outputs_are_not_written_beside_a_mistake(tmp_path, records):
    path = tmp_path / "page.md"
    path.write_bytes(f"one\r\ntwo\n{TABLE}\n".replace("-->\n", "-->\r\n").encode())
    command.main([str(records), "--markdown", str(path), "--quiet"])
    text = path.read_bytes()
    assert text.startswith(b"one\r\ntwo\n<!-- records")
    assert text.count(b"\n") == text.count(b"\r\n") + 1
    path.write_text("no part")
    outputs = [
        word for name in ("output", "json", "records", "pages") for word in (f"--{name}", str(tmp_path / name))
    ]
    with pytest.raises(SystemExit):
        command.main([str(records), *outputs, "--markdown", str(path)])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["page.md", "records.jsonl"]


def test_a_file_that_is_not_there(tmp_path, records):
    with pytest.raises(RecipeError, match="cannot read"):
        regenerated(tmp_path / "none.md", read_results(records))


def test_what_is_not_edited(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("text")
    path.chmod(0o444)
    with pytest.raises(CheckpointError, match="write-protected"):
        check_editable(path)
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "none"):
        with pytest.raises(CheckpointError, match="expected a file that exists"):
            check_editable(tmp_path / name)
