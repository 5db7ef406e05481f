"""The script for GLUE and own files: it trains, converts, evaluates and predicts."""

import json
import runpy
import sys
from pathlib import Path

import pandas as pd
import pytest
from datasets import ClassLabel, Dataset, DatasetDict
from tiny_words import bert_config, sentences, word_tokenizer, write_mrpc
from transformers import AutoConfig, AutoModelForSequenceClassification, BertForSequenceClassification

from collab_compress.errors import DataError

SCRIPT = Path(__file__).parents[2] / "glue_runs" / "run_glue.py"
COLUMNS = "--text_columns sentence --label_column kind"
QUIET = "--use_cpu --disable_tqdm True --report_to none --dataloader_pin_memory False --max_length 24"


@pytest.fixture
def run_glue(monkeypatch, tmp_path):
    def run(model, *options):
        words = f"--model {model} --output_dir {tmp_path / 'out'} {QUIET} {' '.join(map(str, options))}"
        monkeypatch.setattr(sys, "argv", [SCRIPT.name, *words.split()])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return tmp_path / "out"

    return run


def write_rows(path, rows, labelled=True):
    """Write sentences, which are `feline` where they name a cat."""
    lines = sentences(rows, rows)
    kinds = {"kind": ["feline" if "cat" in line else "other" for line in lines]} if labelled else {}
    pd.DataFrame({"sentence": lines, **kinds}).to_csv(path, sep="\t" if path.suffix == ".tsv" else ",", index=False)
    return path


def scores(folder, split):
    return json.loads((folder / f"{split}_results.json").read_text())


def test_files_of_ones_own(run_glue, start, tmp_path, capsys):
    files = {
        "train": write_rows(tmp_path / "train.csv", 96),
        "validation": write_rows(tmp_path / "dev.tsv", 16),
        "test": write_rows(tmp_path / "test.csv", 5, labelled=False),
    }
    data = [word for split, path in files.items() for word in (f"--{split}_file", path)]
    tuning = "--do_train --do_eval --do_predict --num_train_epochs 12 --learning_rate 3e-3 --drophead 0.1 --dk 12"
    folder = run_glue(start, *data, COLUMNS, tuning)
    assert scores(folder, "validation")["validation_accuracy"] > 0.8
    assert 0 <= scores(folder, "validation_converted")["validation_converted_accuracy"] <= 1
    for name, kind in ((".", "query"), ("converted", "qk")):
        trained = AutoModelForSequenceClassification.from_pretrained(folder / name)
        assert trained.config.id2label == {0: "feline", 1: "other"}
        assert hasattr(trained.bert.encoder.layer[0].attention.self, kind)
    lines = (folder / "test.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction"
    assert [line.split("\t")[1] in ("feline", "other") for line in lines[1:]] == [True] * 5


def test_a_task_of_glue(run_glue, start, data_dir):
    write_mrpc(data_dir / "MRPC/test.tsv", [("red cat", "blue dog")] * 4)
    data = ["--task", "mrpc", "--data_dir", data_dir]
    folder = run_glue(start, *data, "--num_train_epochs 1 --penalty agreement --max_train_samples 8")
    assert scores(folder, "validation").keys() >= {"validation_accuracy", "validation_f1"}
    run_glue(folder, *data, "--do_predict")
    lines = (folder / "MRPC.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["index", "0", "1", "2", "3"]
    assert {line.split("\t")[1] for line in lines[1:]} <= {"0", "1"}
    BertForSequenceClassification(bert_config(word_tokenizer(), num_labels=3)).save_pretrained(start)
    with pytest.raises(DataError, match="has the classes LABEL_0, LABEL_1, LABEL_2"):
        run_glue(start, *data, "--do_eval")


def test_scores(run_glue, start, tmp_path):
    (tmp_path / "train.jsonl").write_text("\n".join(f'{{"text": "a cat", "label": {n / 2}}}' for n in range(8)))
    folder = run_glue(start, "--train_file", tmp_path / "train.jsonl", "--validation_file", tmp_path / "train.jsonl")
    assert scores(folder, "validation").keys() >= {"validation_pearson", "validation_spearmanr"}
    (tmp_path / "test.csv").write_text("text\na cat\na dog\n")
    run_glue(folder, "--test_file", tmp_path / "test.csv", "--do_predict")
    predictions = [line.split("\t")[1] for line in (folder / "test.tsv").read_text().splitlines()[1:]]
    assert all("." in prediction for prediction in predictions)


def test_a_data_set_of_the_hub(run_glue, start, monkeypatch):
    rows = Dataset.from_dict({"question": ["a cat", "a dog"] * 8, "kind": [1, 0] * 8})
    rows = rows.cast_column("kind", ClassLabel(names=["dogs", "cats"]))
    splits = DatasetDict(train=rows, validation=rows, test=rows.remove_columns("kind"))
    monkeypatch.setattr("datasets.load_dataset", {"someone/pets": splits}.get)
    folder = run_glue(start, "--dataset someone/pets --text_columns question --label_column kind")
    assert scores(folder, "validation").keys() >= {"validation_accuracy"}
    assert AutoConfig.from_pretrained(folder).id2label == {0: "cats", 1: "dogs"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--task mrpc --train_file train.csv", "give one of --task, --dataset and files"),
        ("--train_file train.csv", "train has no column 'text'; it has sentence, kind"),
        (f"--train_file train.csv --validation_file odd.csv {COLUMNS}", "has the class 'dog'"),
        (
            f"--train_file train.csv --validation_file numbers.csv {COLUMNS}",
            "has the class '0.5'",
        ),  # not numpy's type
    ],
)
def test_what_does_not_fit(options, message, run_glue, start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "train.csv", 8)
    (tmp_path / "odd.csv").write_text("sentence,kind\na dog,dog\n")
    (tmp_path / "numbers.csv").write_text("sentence,kind\na dog,0.5\n")
    with pytest.raises(DataError, match=message):
        run_glue(start, options)


def load(path, labels=("a", "b"), **more):
    script = runpy.run_path(str(SCRIPT))
    return script["load_texts"](script["DataArguments"]("minilm", train_file=str(path), **more), list(labels))


def test_quotes_in_a_tsv_are_text(tmp_path):
    rows = [f"sentence {row}\t{row % 2}" for row in range(8)]
    rows[2], rows[5] = '"an opened quote\t1', 'a closed one"\t0'
    (tmp_path / "train.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    splits, classes = load(tmp_path / "train.tsv")
    assert splits["train"]["text"][:] == [row.split("\t")[0] for row in rows]
    assert classes == ["0", "1"]


@pytest.mark.parametrize("form", ['{{"text": "a cat", "label": "{}"}}', '{{"text": "a cat", "label": {}}}'])
def test_scores_may_be_texts_and_those_of_a_test_may_be_missing(form, tmp_path):
    (tmp_path / "train.jsonl").write_text("\n".join(form.format(row / 10) for row in range(20)))
    (tmp_path / "test.csv").write_text("text,label\na cat,\na dog,0.5\n")
    splits, classes = load(tmp_path / "train.jsonl", test_file=str(tmp_path / "test.csv"))
    assert classes == []
    assert splits["train"]["label"][:3] == [0, 0.1, 0.2]
    assert splits["test"]["label"][:] == [-1, 0.5]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label\na cat,0\na dog,\n", r"a\.csv, line 3: label is missing"),
        ("a.csv", "text,label\na cat,0.5\n\na dog,\n", r"a\.csv, line 4: label is missing"),
        ("a.csv", "text,label\na cat,0.5\na dog,good\n", r"a\.csv, line 3 has the label 'good' among decimal numb"),
        ("a.csv", "text,label\n", "train has no rows"),
        ("a.jsonl", '{"text": "a", "label": 0}\n{"text": null, "label": 1}\n', r"a\.jsonl, line 2: text is nothing"),
        ("a.jsonl", '{"text": 5, "label": 0}\n', r"a\.jsonl, line 1: text is a int; expected a text"),
        ("a.jsonl", '{"text": "a", "label": null}\n', r"a\.jsonl, line 1: label is missing"),
        ("a.json", '[{"text": "a", "label": 0}]\n', r"a\.json is no table; expected a \.csv, \.tsv or \.jsonl file"),
        ("a.tsv", b"text\tlabel\n\xe9t\xe9\t1\n", r"a\.tsv, line 2: not UTF-8"),
    ],
)
def test_rows_that_cannot_be_read_are_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        load(tmp_path / name)
