"""What is written: all of it or nothing, and the same numbers everywhere."""

import csv
import json
from html import unescape

import pytest

from collab_compress.errors import CheckpointError
from collab_compress.report import render_page, to_dict, write_report


@pytest.fixture(scope="module")
def folder(result, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "heads"
    write_report(result, folder)
    return folder


def test_numbers_are_those_that_were_found(folder, result):
    stored = json.loads((folder / "numbers.json").read_text(encoding="utf-8"))
    assert stored == to_dict(result)
    assert [*stored["sections"]] == [section.name for section in result.sections]
    table = result.sections[0].tables[0]
    stored_table = stored["sections"]["widths"]["tables"]["dk"]
    for stored_row, row in zip(stored_table["rows"], table.rows, strict=True):
        assert stored_row[:3] == [*row[:3]]
        assert stored_row[3:] == pytest.approx(row[3:], rel=1e-5)
    assert stored_table["columns"][3] == {"name": "at 0.75 of it", "unit": "%"}
    for section in result.sections:
        assert len(stored["sections"][section.name]["pictures"]) == len(section.pictures)
    assert stored["facts"]["data"].startswith("20 sentences: 20 sequences, ")


def test_every_table_is_a_csv_file(folder, result):
    names = {f"{section.name}-{table.name}.csv" for section in result.sections for table in section.tables}
    assert {path.name for path in folder.iterdir()} == {"index.html", "numbers.json", *names}
    section = result.sections[0]
    with (folder / f"{section.name}-{section.tables[0].name}.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert len(header) == len(section.tables[0].columns)
    expected = [row[-1] for row in section.tables[0].rows]
    assert [float(row[-1]) for row in rows] == pytest.approx(expected, rel=1e-5)


def test_the_page_is_the_one_that_notebooks_show(folder, result):
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert page == render_page(result)
    frame = result._repr_html_()
    assert unescape(frame.partition('srcdoc="')[2].rpartition('" style')[0]) == page


def test_nothing_is_overwritten_and_nothing_is_left(folder, result, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="exists; choose another output"):
        write_report(result, folder)
    monkeypatch.setattr("collab_compress.report.result.to_csv", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(result, tmp_path / "new" / "heads")
    assert not [*tmp_path.iterdir()]
