import gzip
import logging
import re

import pytest
from collab_compress_glue_runs.metrics import METRICS
from collab_compress_glue_runs.tasks import TASKS, load_task
from datasets import ClassLabel, Value

from collab_compress.errors import DataError

LANGUAGES = {"parallel": {"source": "de", "target": "en"}}
ROWS = {
    "cola": (8551, 1043),
    "mrpc": (3668, 408),
    "stsb": (5749, 1500),
    "multi30k": (29000, 1014, 1000),
    "ptb": (42068, 3370, 3761),
    "trec": (5452, 500),
}


def rows(data):
    return {split: part.to_list() for split, part in data.items()}


def fails(folder, name, match, **options):
    with pytest.raises(DataError, match=match):
        load_task(name, folder, **options)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_loads_row_by_row_and_names_what_a_model_needs(name, samples, write, tmp_path):
    files, expected = samples[name]
    splits = load_task(name, write(tmp_path, files), **LANGUAGES.get(name, {}))
    assert rows(splits) == expected
    task, data = TASKS[name], splits["train"]
    assert task.metric in METRICS
    assert data.column_names == [*task.text_columns, *(["label"] if task.num_labels else [])]
    if task.kind == "classification":
        assert data.features["label"] == ClassLabel(names=list(task.labels))
        assert task.num_labels == len(task.labels) >= 2
    if task.kind == "regression":
        assert data.features["label"] == Value("float32")
        assert task.num_labels == 1


@pytest.mark.parametrize("name", ["mrpc", "multi30k", "ptb", "trec"])
def test_the_folder_may_be_the_task_itself(name, samples, write, tmp_path):
    write(tmp_path / "elsewhere", {path.rpartition("/")[2]: text for path, text in samples[name][0].items()})
    assert rows(load_task(name, tmp_path / "elsewhere")) == samples[name][1]


def test_the_folder_may_hold_all_data(samples, write, tmp_path):
    write(tmp_path / "glue", samples["rte"][0])
    assert rows(load_task("rte", str(tmp_path))) == samples["rte"][1]


def test_trec_with_names_of_labels(write, tmp_path):
    lines = "NUM:dist How far ?\nDESC:manner How \xf0 ?\n"
    write(tmp_path, {"train_5500.label": lines, "TREC_10.label": lines}, encoding="latin-1")
    expected = [{"text": "How far ?", "label": 5}, {"text": "How \xf0 ?", "label": 0}]
    assert rows(load_task("trec", tmp_path))["test"] == expected


def test_the_other_direction_of_a_pair(samples, write, tmp_path):
    data = load_task("multi30k", write(tmp_path, samples["multi30k"][0]), source="en", target="de")
    turned = [{"source": row["target"], "target": row["source"]} for row in samples["multi30k"][1]["test"]]
    assert rows(data)["test"] == turned


def test_files_of_any_name_read_one_after_another(write, tmp_path):
    write(tmp_path, {f"{name}.{lang}": f"{name} {lang}\n" for name in ("a/one", "two") for lang in ("x", "y")})
    files = {"train": ["a/one.{lang}", "two.{lang}"], "validation": "two.{lang}"}
    data = load_task("parallel", tmp_path, source="x", target="y", files=files)
    assert [row["source"] for row in data["train"]] == ["a/one x", "two x"]
    assert len(data["validation"]) == 1
    assert load_task("text", tmp_path, files={"test": "two.x"})["test"]["text"][:] == ["two x"]


def test_only_the_splits_asked_for(samples, write, tmp_path):
    files = {name: text for name, text in samples["stsb"][0].items() if "dev" in name}
    data = load_task("stsb", write(tmp_path, files), splits=["validation"])
    assert list(data) == ["validation"]
    fails(tmp_path, "stsb", "none of its files of test in .*STS-B", splits=["test"])
    fails(tmp_path, "stsb", r"no train.tsv \(train\) in .*STS-B", splits=["train", "validation"])
    fails(tmp_path, "stsb", r"stsb has no split 'dev'; expected train, validation, test", splits=["dev"])


def test_broken_rows_of_qqp_are_counted(samples, write, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        load_task("qqp", write(tmp_path, samples["qqp"][0]))
    assert "left out 2 lines that do not have 6 columns" in caplog.text


@pytest.mark.parametrize("name", sorted(ROWS))
def test_real_data_has_the_official_rows(name, real_data):
    data = load_task(name, real_data)
    assert tuple(map(len, data.values())) == ROWS[name]


def test_real_rows(real_data):
    """A few rows, written off the files: quotes, the byte-order mark's neighbour, what is not ASCII."""
    mrpc = load_task("mrpc", real_data / "glue")
    assert mrpc["validation"][0]["label"] == 1
    assert mrpc["validation"][0]["text_pair"].startswith('" The foodservice pie business')
    trec = load_task("trec", real_data / "trec")["train"]
    assert len([row for row in trec["text"] if not row.isascii()]) == 1
    french = load_task("multi30k", real_data, source="fr", target="en")["test"]
    assert french[0]["source"] == "Un homme avec un chapeau orange regardant quelque chose."
    ptb = load_task("ptb", real_data)
    assert sum(len(line.split()) + 1 for line in ptb["test"]["text"]) == 82430


def test_unknown_task_and_languages(tmp_path):
    fails(tmp_path, "glue", "unknown task 'glue'; expected one of cola, mnli")
    fails(tmp_path, "parallel", "parallel needs two languages, got source None and target None")
    fails(tmp_path, "multi30k", "two languages, got source 'en'", source="en")
    fails(tmp_path, "mrpc", "mrpc is classification and has no source or target language", source="en")
    fails(None, "ptb", "pass data_dir too", files={"train": "x"})
    fails(tmp_path, "ptb", "files of train name no path; pass one", files={"train": []})
    fails(tmp_path, "multi30k", "'x.txt' is that of both languages; put {lang}", files={"train": "x.txt"})


def test_missing_files_are_named_with_what_was_expected(samples, write, tmp_path):
    fails(tmp_path / "nowhere", "mrpc", r"mrpc: no folder .*nowhere; expected train.tsv, dev.tsv, \[test.tsv\]")
    fails(tmp_path, "mrpc", rf"none of its files in {tmp_path}; expected train.tsv, dev.tsv")
    write(tmp_path, {"MRPC/train.tsv": samples["mrpc"][0]["MRPC/train.tsv"]})
    fails(tmp_path, "mrpc", rf"no dev.tsv \(validation\) in {tmp_path / 'MRPC'}; expected train.tsv, dev.tsv")
    write(tmp_path, {"multi30k/train.de": "ein\n", "multi30k/val.de": "ein\n", "multi30k/val.en": "a\n"})
    fails(tmp_path, "multi30k", r"no train.en \(train\) in .*multi30k; expected train.de and train.en, val.de and")
    write(tmp_path, {"multi30k/train.en": "a\n", "multi30k/test_2016_flickr.de": "ein\n"})
    fails(tmp_path, "multi30k", r"no test_2016_flickr.en \(test\) in .*multi30k")


TSV = "MRPC/train.tsv"
HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"


@pytest.mark.parametrize(
    ("name", "changed", "content", "match"),
    [
        ("mrpc", TSV, f"{HEADER}1\t7\t8\tone\ttwo\n1\t7\t8\tone\n", "line 3: 4 columns; expected 5: Quality"),
        ("mrpc", TSV, "label\ttext\n1\tone\n", "line 1: no column '#1 String'; .* got label, text"),
        (
            "mrpc",
            TSV,
            f"{HEADER}2\t7\t8\tone\ttwo\n",
            "line 2: label '2' is not the number of a class; expected 0 to 1",
        ),
        ("mrpc", TSV, "", "line 1: no column .*got an empty file"),
        ("mrpc", TSV, HEADER, "line 1: the file is empty; expected rows of data"),
        ("mrpc", TSV, HEADER.encode() + b"1\t7\t8\tone\tf\xfcr\n", "line 2: not UTF-8 .*byte 12"),
        ("cola", "CoLA/train.tsv", "gj04\t1\tsentence\n", "line 1: 3 columns; expected 4: source, label, mark"),
        ("rte", "RTE/dev.tsv", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tyes\n", "2: unknown label 'yes'; exp"),
        (
            "stsb",
            "STS-B/dev.tsv",
            "sentence1\tsentence2\tscore\na\tb\tgood\n",
            "line 2: score 'good' is not a number",
        ),
        ("stsb", "STS-B/dev.tsv", "sentence1\tsentence2\tscore\na\tb\t5.1\n", "line 2: score 5.1 is out of range"),
        (
            "trec",
            "trec/TREC.train.all",
            "0 How ?\n6 Why ?\n",
            "line 2: label '6' is not the number .* expected 0 to 5",
        ),
        (
            "trec",
            "trec/TREC.train.all",
            "0 How ?\nWhy?\n",
            "line 2: got 'Why.'; expected a label, a space and a text",
        ),
        ("multi30k", "multi30k/train.de.gz", "eins\n", "train.en.gz, line 2: no counterpart in train.de.gz"),
        ("multi30k", "multi30k/train.en.gz", "a\n", "train.de.gz, line 2: no counterpart in train.en.gz"),
    ],
)
def test_malformed_files_are_refused_with_file_and_line(name, changed, content, match, samples, write, tmp_path):
    write(tmp_path, samples[name][0] | {changed: content})
    place = changed if "counterpart" not in match else ""
    fails(tmp_path, name, f"{re.escape(place)}.*{match}")


def test_a_gzip_file_cut_short_or_not_gzipped(samples, write, tmp_path):
    write(tmp_path, samples["ptb"][0])
    path = tmp_path / "ptb" / "ptb.train.txt.gz"
    path.write_bytes(gzip.compress(b"".join(b"%d\n" % number for number in range(10**5)))[:-1000])
    fails(tmp_path, "ptb", r"ptb.train.txt.gz, line \d+: not a whole gzip file")
    path.write_bytes(b"plain text\n")
    fails(tmp_path, "ptb", "ptb.train.txt.gz, line 1: not a whole gzip file")


def test_a_folder_in_the_place_of_a_file(samples, write, tmp_path):
    write(tmp_path, {name: text for name, text in samples["ptb"][0].items() if "test" not in name})
    (tmp_path / "ptb" / "ptb.test.txt").mkdir()
    fails(tmp_path, "ptb", "cannot read .*ptb.test.txt: Is a directory")
