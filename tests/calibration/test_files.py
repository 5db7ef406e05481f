"""Columns of files and data sets as calibration texts."""

import csv
import json
import os

import pandas as pd
import pytest
from datasets import Dataset

from collab_compress.calibration import calibration_batches
from collab_compress.calibration.files import read_table, read_texts, split_columns, texts_of
from collab_compress.calibration.source import text_files
from collab_compress.errors import CalibrationError

ROWS = [
    {"id": "1", "first": 'a dog, and a "cat"', "second": "two\u2028lines"},
    {"id": "2", "first": "one more", "second": ""},
    {"id": "3", "first": "the last", "second": "its pair"},
]
FIRST = [row["first"] for row in ROWS]
PAIRS = [(row["first"], row["second"]) for row in ROWS if row["second"]]


@pytest.fixture(params=["csv", "tsv", "jsonl", "folder"])
def table(request, tmp_path, monkeypatch):
    frame = pd.DataFrame(ROWS)
    path = tmp_path / f"rows.{request.param}"
    if request.param == "csv":
        frame.to_csv(path, index=False)
    elif request.param == "tsv":  # as GLUE writes them: nothing is quoted
        lines = ["\t".join(frame.columns), *("\t".join(row.values()) for row in ROWS)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    elif request.param == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8")
    else:  # what `datasets` reads
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        path.mkdir()
        Dataset.from_pandas(frame).to_parquet(path / "train.parquet")
    return path


def test_columns(table):
    assert read_texts(f"{table}:first") == (FIRST, [])
    left_out = ["1 of 3 texts are blank, or lack one text of a pair, and are left out"]
    assert read_texts(f"{table}:first,second") == (PAIRS, left_out)
    with pytest.raises(CalibrationError, match=r"has the columns id, first, second; say which holds the texts"):
        read_texts(f"{table}:nothing")
    with pytest.raises(CalibrationError, match="names 3 columns"):
        read_texts(f"{table}:id,first,second")


def test_a_column_is_calibration_data(tmp_path, minilm, minilm_tokenizer, monkeypatch):
    file = tmp_path / "rows.csv"
    file.write_text("text,label\na dog runs,1\na cat,0\n", encoding="utf-8")
    (batch,) = calibration_batches(f"{file}:text", minilm, minilm_tokenizer)
    (same,) = calibration_batches(["a dog runs", "a cat"], minilm, minilm_tokenizer)
    assert batch["input_ids"].tolist() == same["input_ids"].tolist()
    assert text_files(f"{file}:text") == [file]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert text_files(("builtin", "~/rows.csv:text")) == [file]
    (from_pandas,) = calibration_batches(pd.read_csv(file)["text"], minilm, minilm_tokenizer)
    assert from_pandas["input_ids"].tolist() == same["input_ids"].tolist()


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("rows.csv", "text,label\na,1\n", None, r"columns text, label; .* as in .*rows.csv:text"),
        ("rows.jsonl", '{"text": "a", "label": 1}\n', None, r"columns text, label; .* as in .*rows.jsonl:text"),
        ("rows.jsonl", '{"text": 1}\n', "text", "rows.jsonl:text: item 0 is or holds a int; expected a text"),
        ("rows.jsonl", '{"text": "a"}\n[1]\n', "text", "line 2: a list; expected one JSON object a line"),
        ("rows.jsonl", '{"text": "a"\n', "text", "line 1: .*; expected one JSON object a line"),
        ("rows.csv", "text\n\n", "text", "rows.csv:text has no texts"),
        ("rows.jsonl", '{"text": ' + "[" * 100_000, "text", "line 1: .*recursion.*; expected one JSON object a line"),
        ("rows.csv", "text,text\na,b\n", "text", "rows.csv has several columns 'text'; expected one of each name"),
        ("rows.csv", "text,id\na, b,1\n", "text", "rows.csv, line 2: more columns than the first line names; quote"),
        (
            "rows.csv",
            'text\na\n"b\nc\n',
            "text",
            r"rows.csv, line 3: unexpected end of data, in the row that begins here",
        ),
        ("rows.txt", "a dog\n", "text", "rows.txt has no columns to choose from"),
    ],
)
def test_tables_that_hold_no_texts(name, content, column, message, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(CalibrationError, match=message):
        read_texts(f"{tmp_path / name}:{column}" if column else tmp_path / name)


def test_files_and_data_sets_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(CalibrationError, match=r"cannot read .*rows\.csv"):
        read_texts(f"{tmp_path / 'rows.csv'}:text")
    with pytest.raises(CalibrationError, match="org/nothing is no file, and as a data set it cannot be loaded"):
        read_texts("org/nothing:text")


def test_a_colon_in_a_name_is_no_column(tmp_path):
    file = tmp_path / "one:two"
    file.write_text("a dog\n", encoding="utf-8")
    assert read_texts(file) == (["a dog"], [])
    assert split_columns("C:\\missing.txt") == ("C:\\missing.txt", [])
    assert split_columns("org/name:mrpc:a, b") == ("org/name:mrpc", ["a", "b"])


def test_a_stream_of_texts_is_read_up_to_the_limit(minilm, minilm_tokenizer):
    def endless():
        while True:
            yield "a dog runs"

    batches = calibration_batches(endless(), minilm, minilm_tokenizer, sequences=5)
    assert sum(len(batch["input_ids"]) for batch in batches) == 5


@pytest.mark.parametrize("text", ["a dog ran", "a dog: it ran " * 30, "a\0 dog"])
def test_a_text_that_is_no_file(text, minilm, minilm_tokenizer, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(CalibrationError, match=r"pass a list of texts|as a data set it cannot be loaded"):
        calibration_batches(text, minilm, minilm_tokenizer)


def test_long_texts_of_a_table(tmp_path):
    """Longer than the csv module reads by default; its limit, which is everyone's, stays."""
    limit, text = csv.field_size_limit(), "a dog " * 30_000
    (tmp_path / "rows.csv").write_text(f"text\n{text}\n", encoding="utf-8")
    rows = read_table(tmp_path / "rows.csv")
    assert next(rows) == (2, {"text": text})
    assert csv.field_size_limit() == limit  # also between two rows


ROWS_OF_TEXTS = ["a dog", "", None, " \t ", "two  men ", ("a", "pair"), ("no", " "), (None, "pair"), float("nan")]


def test_rows_without_a_text_are_left_out_wherever_they_come_from(tmp_path):
    kept = ["a dog", "two  men ", ("a", "pair")]
    assert texts_of(ROWS_OF_TEXTS, "calibration") == (
        kept,
        ["6 of 9 texts are blank, or lack one text of a pair, and are left out"],
    )
    (tmp_path / "rows.txt").write_text("a dog\n\n  \r\ntwo  men \na\tpair\nno\t \n\tpair\n", encoding="utf-8")
    texts, (note,) = read_texts(tmp_path / "rows.txt")
    assert texts == kept
    assert note.startswith("4 of 7 texts are blank")
    with pytest.raises(CalibrationError, match="calibration has no texts; all 2 are blank"):
        texts_of(["", " "], "calibration")


@pytest.mark.parametrize("name", ["/dev/zero", "pipe.csv:text"])
def test_devices_and_pipes_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.csv")
    with pytest.raises(CalibrationError, match="expected a file"):
        read_texts(name)
