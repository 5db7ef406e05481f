"""The script for GLUE and own files: it trains, converts, evaluates and predicts."""

import csv
import json
import random
import runpy
import sys
from pathlib import Path

import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict
from tiny_words import bert_config, sentence, word_tokenizer, write_mrpc
from tiny_words import sentences as draw_sentences
from transformers import AutoConfig, AutoModelForSequenceClassification, BertForSequenceClassification, BertModel

from collab_compress.errors import DataError

SCRIPT = Path(__file__).parents[2] / "glue_runs" / "run_glue.py"
QUIET = "--use_cpu --disable_tqdm True --report_to none --dataloader_pin_memory False --max_length 24"


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    BertModel(bert_config(tokenizer, initializer_range=0.3)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def run_glue(monkeypatch, tmp_path):
    def run(model, *options):
        words = f"--model {model} --output_dir {tmp_path / 'out'} {QUIET}".split()
        monkeypatch.setattr(
            sys, "argv", [SCRIPT.name, *words, *(word for option in options for word in str(option).split())]
        )
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return tmp_path / "out"

    return run


def write_rows(path, rows, labelled=True):
    """Write sentences, which are `feline` where they name a cat."""
    lines = draw_sentences(rows, rows)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerow(["sentence", "kind"] if labelled else ["sentence"])
        for line in lines:
            writer.writerow([line, "feline" if "cat" in line else "other"] if labelled else [line])
    return path


def scores(folder, split):
    return json.loads((folder / f"{split}_results.json").read_text())


def test_files_of_ones_own(run_glue, model, tmp_path, capsys):
    files = {
        "train": write_rows(tmp_path / "train.csv", 96),
        "validation": write_rows(tmp_path / "dev.tsv", 16),
        "test": write_rows(tmp_path / "test.csv", 5, labelled=False),
    }
    data = [word for split, path in files.items() for word in (f"--{split}_file", path)]
    columns = "--text_columns sentence --label_column kind"
    tuning = "--do_train --do_eval --do_predict --num_train_epochs 12 --learning_rate 3e-3 --drophead 0.1 --dk 12"
    folder = run_glue(model, *data, columns, tuning)
    assert scores(folder, "validation")["validation_accuracy"] > 0.8
    assert 0 <= scores(folder, "validation_converted")["validation_converted_accuracy"] <= 1
    for name, kind in ((".", "query"), ("converted", "qk")):
        trained = AutoModelForSequenceClassification.from_pretrained(folder / name)
        assert trained.config.id2label == {0: "feline", 1: "other"}
        assert hasattr(trained.bert.encoder.layer[0].attention.self, kind)
    lines = (folder / "test.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction"
    assert [line.split("\t")[1] in ("feline", "other") for line in lines[1:]] == [True] * 5


def test_a_task_of_glue(run_glue, model, tmp_path):
    generator = random.Random(0)
    for name, rows in (("train.tsv", 16), ("dev.tsv", 8), ("test.tsv", 4)):
        pairs = [
            (first, first if row % 2 else sentence(generator))
            for row in range(rows)
            for first in [sentence(generator)]
        ]
        write_mrpc(tmp_path / "data/MRPC" / name, pairs)
    data = ["--task", "mrpc", "--data_dir", tmp_path / "data"]
    folder = run_glue(model, *data, "--num_train_epochs 1 --penalty agreement --max_train_samples 8")
    assert scores(folder, "validation").keys() >= {"validation_accuracy", "validation_f1"}
    run_glue(folder, *data, "--do_predict")
    lines = (folder / "MRPC.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["index", "0", "1", "2", "3"]
    assert {line.split("\t")[1] for line in lines[1:]} <= {"0", "1"}
    BertForSequenceClassification(bert_config(word_tokenizer(), num_labels=3)).save_pretrained(model)
    with pytest.raises(DataError, match="has the classes LABEL_0, LABEL_1, LABEL_2"):
        run_glue(model, *data, "--do_eval")


def test_scores(run_glue, model, tmp_path):
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"text": "a cat", "label": n / 2}) + "\n" for n in range(8))
    )
    folder = run_glue(model, "--train_file", tmp_path / "train.jsonl", "--validation_file", tmp_path / "train.jsonl")
    assert scores(folder, "validation").keys() >= {"validation_pearson", "validation_spearmanr"}
    (tmp_path / "test.csv").write_text("text\na cat\na dog\n")
    run_glue(folder, "--test_file", tmp_path / "test.csv", "--do_predict")
    predictions = [line.split("\t")[1] for line in (folder / "test.tsv").read_text().splitlines()[1:]]
    assert all("." in prediction for prediction in predictions)


def test_a_data_set_of_the_hub(run_glue, model, monkeypatch):
    rows = Dataset.from_dict({"question": ["a cat", "a dog"] * 8, "kind": [1, 0] * 8})
    rows = rows.cast_column("kind", ClassLabel(names=["dogs", "cats"]))
    splits = DatasetDict(train=rows, validation=rows, test=rows.remove_columns("kind"))
    monkeypatch.setattr("datasets.load_dataset", {"someone/pets": splits}.get)
    folder = run_glue(model, "--dataset someone/pets --text_columns question --label_column kind")
    assert scores(folder, "validation").keys() >= {"validation_accuracy"}
    assert AutoConfig.from_pretrained(folder).id2label == {0: "cats", 1: "dogs"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--task mrpc --train_file train.csv", "give one of --task, --dataset and files"),
        ("--train_file train.csv", "train has no column 'text'; it has sentence, kind"),
        (
            "--train_file train.csv --validation_file odd.csv --text_columns sentence --label_column kind",
            "has the class 'dog'",
        ),
        (
            "--train_file train.csv --validation_file numbers.csv --text_columns sentence --label_column kind",
            "has the class '0.5'",  # without the name of numpy's type
        ),
    ],
)
def test_what_does_not_fit(options, message, run_glue, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "train.csv", 8)
    (tmp_path / "odd.csv").write_text("sentence,kind\na dog,dog\n")
    (tmp_path / "numbers.csv").write_text("sentence,kind\na dog,0.5\n")
    with pytest.raises(DataError, match=message):
        run_glue(model, options)


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
