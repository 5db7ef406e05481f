"""Every task's files in small, in its authors' layout, and the rows they hold; mistakes with file and line."""

import gzip
import logging
import re

import pytest
from collab_compress_glue_runs.metrics import METRICS
from collab_compress_glue_runs.tasks import TASKS, load_task
from datasets import ClassLabel, Value

from collab_compress.errors import DataError

LANGUAGES = {"parallel": {"source": "de", "target": "en"}}
NLI = "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
NLI = f"{NLI}sentence1 sentence2".replace(" ", "\t")
NLI_DEV = f"{NLI}\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label"
NLI_ROW = "{0}\tp\tq\tgenre\t(a)\t(b)\t(A)\t(B)\tone {0}\ttwo {0}"
STSB = "index genre filename year old_index source1 source2 sentence1 sentence2".replace(" ", "\t")
STSB_ROW = "0\tg\tf\ty\t1\tn\tn\t"
MRPC = "#1 ID\t#2 ID\t#1 String\t#2 String"
QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
RTE = "index\tsentence1\tsentence2"
QNLI = "index\tquestion\tsentence\tlabel"


def table(*lines):
    return "".join(f"{line}\n" for line in lines)


SAMPLES = {
    "cola": (
        {
            "CoLA/train.tsv": table('gj04\t1\t\tIt "works".', "gj04\t0\t*\tIt work."),
            "CoLA/dev.tsv": table("gj04\t1\t\tWe sail."),
            "CoLA/test.tsv": table("index\tsentence", "0\tBill sleeps."),
        },
        {
            "train": [('It "works".', 1), ("It work.", 0)],
            "validation": [("We sail.", 1)],
            "test": [("Bill sleeps.", -1)],
        },
    ),
    "sst2": (
        {
            "SST-2/train.tsv": table("sentence\tlabel", "a charm \t1", '"dull" \t0'),
            "SST-2/dev.tsv": table("sentence\tlabel", "fine\t1"),
            "SST-2/test.tsv": table("index\tsentence", "0\tuneasy mishmash"),
        },
        {"train": [("a charm ", 1), ('"dull" ', 0)], "validation": [("fine", 1)], "test": [("uneasy mishmash", -1)]},
    ),
    "mrpc": (
        {
            "MRPC/train.tsv": table(f"Quality\t{MRPC}", '1\t7\t8\tHe said "yes .\tHe agreed .'),
            "MRPC/dev.tsv": "\ufeff" + table(f"Quality\t{MRPC}", "0\t7\t8\tOne .\tTwo ."),
            "MRPC/test.tsv": "\ufeff" + table(f"index\t{MRPC}", "0\t7\t8\tThree .\tFour ."),
        },
        {
            "train": [('He said "yes .', "He agreed .", 1)],
            "validation": [("One .", "Two .", 0)],
            "test": [("Three .", "Four .", -1)],
        },
    ),
    "stsb": (
        {
            "STS-B/train.tsv": table(f"{STSB}\tscore", f"{STSB_ROW}A plane.\tA jet.\t4.750"),
            "STS-B/dev.tsv": table(f"{STSB}\tscore", f"{STSB_ROW}A cat.\tA rock.\t0.000"),
            "STS-B/test.tsv": table(STSB, f"{STSB_ROW}A girl.\tA woman."),
        },
        {
            "train": [("A plane.", "A jet.", 4.75)],
            "validation": [("A cat.", "A rock.", 0.0)],
            "test": [("A girl.", "A woman.", -1.0)],
        },
    ),
    "qqp": (
        {
            "QQP/train.tsv": table(
                QQP, "1\t2\t3\tWhy?\tHow come?\t1", "2\t3\t4\tIt was", "broken?\tYes?\t0", "3\t4\t5\tWho?\tWhen?\t0"
            ),
            "QQP/dev.tsv": table(QQP, "1\t2\t3\tA?\tB?\t0"),
            "QQP/test.tsv": table("id\tquestion1\tquestion2", "0\tC?\tD?"),
        },
        {
            "train": [("Why?", "How come?", 1), ("Who?", "When?", 0)],
            "validation": [("A?", "B?", 0)],
            "test": [("C?", "D?", -1)],
        },
    ),
    "mnli": (
        {
            "MNLI/train.tsv": table(
                f"{NLI}\tlabel1\tgold_label",
                *(
                    NLI_ROW.format(row) + f"\tx\t{('neutral', 'entailment', 'contradiction')[row]}"
                    for row in range(3)
                ),
            ),
            "MNLI/dev_matched.tsv": table(NLI_DEV, NLI_ROW.format(7) + "\tx" * 5 + "\tneutral"),
            "MNLI/dev_mismatched.tsv": table(NLI_DEV, NLI_ROW.format(8) + "\tx" * 5 + "\tentailment"),
            "MNLI/test_matched.tsv": table(NLI, NLI_ROW.format(9)),
        },
        {
            "train": [("one 0", "two 0", 1), ("one 1", "two 1", 0), ("one 2", "two 2", 2)],
            "validation_matched": [("one 7", "two 7", 1)],
            "validation_mismatched": [("one 8", "two 8", 0)],
            "test_matched": [("one 9", "two 9", -1)],
        },
    ),
    "qnli": (
        {
            "QNLI/train.tsv": table(QNLI, "0\tWho?\tShe.\tentailment"),
            "QNLI/dev.tsv": table(QNLI, "0\tWhere?\tNow.\tnot_entailment"),
        },
        {"train": [("Who?", "She.", 0)], "validation": [("Where?", "Now.", 1)]},
    ),
    "rte": (
        {
            "RTE/train.tsv": table(f"{RTE}\tlabel", "0\tRain.\tDry.\tnot_entailment"),
            "RTE/dev.tsv": table(f"{RTE}\tlabel", "0\tRain.\tWet.\tentailment"),
            "RTE/test.tsv": table(RTE, "0\tSnow.\tCold."),
        },
        {"train": [("Rain.", "Dry.", 1)], "validation": [("Rain.", "Wet.", 0)], "test": [("Snow.", "Cold.", -1)]},
    ),
    "wnli": (
        {
            "WNLI/train.tsv": table(f"{RTE}\tlabel", "0\tJohn is here.\tHe is.\t1"),
            "WNLI/dev.tsv": table(f"{RTE}\tlabel", "0\tJane left.\tShe is here.\t0"),
        },
        {"train": [("John is here.", "He is.", 1)], "validation": [("Jane left.", "She is here.", 0)]},
    ),
    "trec": (
        {"trec/TREC.train.all": table("0 How far ?", "2 What is .com ?"), "trec/TREC.test.all": table("5 When ?")},
        {"train": [("How far ?", 0), ("What is .com ?", 2)], "test": [("When ?", 5)]},
    ),
    "multi30k": (
        {
            "multi30k/train.de.gz": table("Zwei Männer.", "Ein\x85 Hund."),
            "multi30k/train.en.gz": table("Two men.", "A dog."),
            "multi30k/val.de.gz": table("Eine Frau."),
            "multi30k/val.en.gz": table("A woman."),
            "multi30k/test_2016_flickr.de": table("Ein Hut."),
            "multi30k/test_2016_flickr.en": table("A hat."),
        },
        {
            "train": [("Zwei Männer.", "Two men."), ("Ein\x85 Hund.", "A dog.")],
            "validation": [("Eine Frau.", "A woman.")],
            "test": [("Ein Hut.", "A hat.")],
        },
    ),
    "parallel": (
        {"train.de": "eins\n", "train.en": "one\n", "dev.de.gz": table("zwei", ""), "dev.en": table("two", "")},
        {"train": [("eins", "one")], "validation": [("zwei", "two"), ("", "")]},
    ),
    "ptb": (
        {
            "ptb/ptb.train.txt.gz": table(" pierre <unk> N years old ", " mr. <unk> "),
            "ptb/ptb.valid.txt.gz": table(" consumers may "),
            "ptb/ptb.test.txt": table(" no it was n't "),
        },
        {
            "train": [("pierre <unk> N years old",), ("mr. <unk>",)],
            "validation": [("consumers may",)],
            "test": [("no it was n't",)],
        },
    ),
    "text": (
        {"train.txt": "  def f():\n\n    pass", "valid.txt": table("two")},
        {"train": [("  def f():",), ("",), ("    pass",)], "validation": [("two",)]},
    ),
}
SAMPLES |= {f"{name}_masked": SAMPLES[name] for name in ("ptb", "text")}
ROWS = {
    "cola": (8551, 1043),
    "mrpc": (3668, 408),
    "stsb": (5749, 1500),
    "multi30k": (29000, 1014, 1000),
    "ptb": (42068, 3370, 3761),
    "trec": (5452, 500),
}


def write(folder, files, encoding="utf-8"):
    """Write files of text or bytes into a folder; names in .gz are gzipped."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode(encoding) if isinstance(content, str) else content
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return folder


def rows(data):
    return {split: [tuple(row.values()) for row in part] for split, part in data.items()}


def fails(folder, name, match, **options):
    with pytest.raises(DataError, match=match):
        load_task(name, folder, **options)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_loads_row_by_row_and_names_what_a_model_needs(name, tmp_path):
    files, expected = SAMPLES[name]
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
def test_the_folder_may_be_the_task_itself(name, tmp_path):
    write(tmp_path / "elsewhere", {path.rpartition("/")[2]: text for path, text in SAMPLES[name][0].items()})
    assert rows(load_task(name, tmp_path / "elsewhere")) == SAMPLES[name][1]


def test_the_folder_may_hold_all_data(tmp_path):
    write(tmp_path / "glue", SAMPLES["rte"][0])
    assert rows(load_task("rte", str(tmp_path))) == SAMPLES["rte"][1]


def test_trec_with_names_of_labels(tmp_path):
    lines = "NUM:dist How far ?\nDESC:manner How \xf0 ?\n"
    write(tmp_path, {"train_5500.label": lines, "TREC_10.label": lines}, encoding="latin-1")
    assert rows(load_task("trec", tmp_path))["test"] == [("How far ?", 5), ("How \xf0 ?", 0)]


def test_the_other_direction_of_a_pair(tmp_path):
    data = load_task("multi30k", write(tmp_path, SAMPLES["multi30k"][0]), source="en", target="de")
    assert rows(data)["test"] == [row[::-1] for row in SAMPLES["multi30k"][1]["test"]]


def test_files_of_any_name_read_one_after_another(tmp_path):
    write(tmp_path, {f"{name}.{lang}": f"{name} {lang}\n" for name in ("a/one", "two") for lang in ("x", "y")})
    files = {"train": ["a/one.{lang}", "two.{lang}"], "validation": "two.{lang}"}
    data = load_task("parallel", tmp_path, source="x", target="y", files=files)
    assert [row["source"] for row in data["train"]] == ["a/one x", "two x"]
    assert len(data["validation"]) == 1
    assert load_task("text", tmp_path, files={"test": "two.x"})["test"]["text"][:] == ["two x"]


def test_only_the_splits_asked_for(tmp_path):
    files = {name: text for name, text in SAMPLES["stsb"][0].items() if "dev" in name}
    assert list(load_task("stsb", write(tmp_path, files), splits=["validation"])) == ["validation"]
    fails(tmp_path, "stsb", "none of its files of test in .*STS-B", splits=["test"])
    fails(tmp_path, "stsb", r"no train.tsv \(train\) in .*STS-B", splits=["train", "validation"])
    fails(tmp_path, "stsb", r"stsb has no split 'dev'; expected train, validation, test", splits=["dev"])


def test_broken_rows_of_qqp_are_counted(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        load_task("qqp", write(tmp_path, SAMPLES["qqp"][0]))
    assert "left out 2 lines that do not have 6 columns" in caplog.text


@pytest.mark.parametrize("name", sorted(ROWS))
def test_real_data_has_the_official_rows(name, glue):
    assert tuple(map(len, load_task(name, glue.parent).values())) == ROWS[name]


def test_real_rows(glue):
    """A few rows, written off the files: quotes, the byte-order mark's neighbour, what is not ASCII."""
    mrpc = load_task("mrpc", glue)
    assert mrpc["validation"][0]["label"] == 1
    assert mrpc["validation"][0]["text_pair"].startswith('" The foodservice pie business')
    trec = load_task("trec", glue.parent / "trec")["train"]
    assert len([row for row in trec["text"] if not row.isascii()]) == 1
    french = load_task("multi30k", glue.parent, source="fr", target="en")["test"]
    assert french[0]["source"] == "Un homme avec un chapeau orange regardant quelque chose."
    ptb = load_task("ptb", glue.parent)
    assert sum(len(line.split()) + 1 for line in ptb["test"]["text"]) == 82430


def test_unknown_task_and_languages(tmp_path):
    fails(tmp_path, "glue", "unknown task 'glue'; expected one of cola, mnli")
    fails(tmp_path, "parallel", "parallel needs two languages, got source None and target None")
    fails(tmp_path, "multi30k", "two languages, got source 'en'", source="en")
    fails(tmp_path, "mrpc", "mrpc is classification and has no source or target language", source="en")
    fails(None, "ptb", "pass data_dir too", files={"train": "x"})
    fails(tmp_path, "ptb", "files of train name no path; pass one", files={"train": []})
    fails(tmp_path, "multi30k", "'x.txt' is that of both languages; put {lang}", files={"train": "x.txt"})


def test_missing_files_are_named_with_what_was_expected(tmp_path):
    fails(tmp_path / "nowhere", "mrpc", r"mrpc: no folder .*nowhere; expected train.tsv, dev.tsv, \[test.tsv\]")
    fails(tmp_path, "mrpc", rf"none of its files in {tmp_path}; expected train.tsv, dev.tsv")
    write(tmp_path, {"MRPC/train.tsv": SAMPLES["mrpc"][0]["MRPC/train.tsv"]})
    fails(tmp_path, "mrpc", rf"no dev.tsv \(validation\) in {tmp_path / 'MRPC'}; expected train.tsv, dev.tsv")
    write(tmp_path, {"multi30k/train.de": "ein\n", "multi30k/val.de": "ein\n", "multi30k/val.en": "a\n"})
    fails(tmp_path, "multi30k", r"no train.en \(train\) in .*multi30k; expected train.de and train.en, val.de and")
    write(tmp_path, {"multi30k/train.en": "a\n", "multi30k/test_2016_flickr.de": "ein\n"})
    fails(tmp_path, "multi30k", r"no test_2016_flickr.en \(test\) in .*multi30k")


TSV, DEV, QUESTIONS = "MRPC/train.tsv", "STS-B/dev.tsv", "trec/TREC.train.all"
HEADER, SCORES = f"Quality\t{MRPC}\n", "sentence1\tsentence2\tscore\n"


@pytest.mark.parametrize(
    ("name", "changed", "content", "match"),
    [
        ("mrpc", TSV, f"{HEADER}1\t7\t8\tone\ttwo\n1\t7\t8\tone\n", "line 3: 4 columns; expected 5: Quality"),
        ("mrpc", TSV, "label\ttext\n1\tone\n", "line 1: no column '#1 String'; .* got label, text"),
        ("mrpc", TSV, f"{HEADER}2\t7\t8\tone\ttwo\n", "line 2: unknown label '2'; expected one of 0, 1$"),
        ("mrpc", TSV, "", "line 1: no column .*got an empty file"),
        ("mrpc", TSV, HEADER, "line 1: the file is empty; expected rows of data"),
        ("mrpc", TSV, HEADER.encode() + b"1\t7\t8\tone\tf\xfcr\n", "line 2: not UTF-8 .*byte 12"),
        ("cola", "CoLA/train.tsv", "gj04\t1\tsentence\n", "line 1: 3 columns; expected 4: source, label, mark"),
        ("rte", "RTE/dev.tsv", f"{RTE}\tlabel\n0\ta\tb\tyes\n", "2: unknown label 'yes'; exp"),
        ("stsb", DEV, f"{SCORES}a\tb\tgood\n", "line 2: score 'good' is not a number"),
        ("stsb", DEV, f"{SCORES}a\tb\t5.1\n", "line 2: score 5.1 is out of range"),
        ("trec", QUESTIONS, "0 How ?\n6 Why ?\n", "line 2: unknown label '6'; expected one of 0, 1, 2, 3, 4, 5$"),
        ("trec", QUESTIONS, "0 How ?\nWhy?\n", "line 2: got 'Why.'; expected a label, a space and a text"),
        ("multi30k", "multi30k/train.de.gz", "eins\n", "train.en.gz, line 2: no counterpart in train.de.gz"),
        ("multi30k", "multi30k/train.en.gz", "a\n", "train.de.gz, line 2: no counterpart in train.en.gz"),
    ],
)
def test_malformed_files_are_refused_with_file_and_line(name, changed, content, match, tmp_path):
    write(tmp_path, SAMPLES[name][0] | {changed: content})
    place = changed if "counterpart" not in match else ""
    fails(tmp_path, name, f"{re.escape(place)}.*{match}")


def test_a_gzip_file_cut_short_or_not_gzipped(tmp_path):
    write(tmp_path, SAMPLES["ptb"][0])
    path = tmp_path / "ptb" / "ptb.train.txt.gz"
    path.write_bytes(gzip.compress(b"".join(b"%d\n" % number for number in range(10**5)))[:-1000])
    fails(tmp_path, "ptb", r"ptb.train.txt.gz, line \d+: not a whole gzip file")
    path.write_bytes(b"plain text\n")
    fails(tmp_path, "ptb", "ptb.train.txt.gz, line 1: not a whole gzip file")


def test_a_folder_in_the_place_of_a_file(tmp_path):
    write(tmp_path, {name: text for name, text in SAMPLES["ptb"][0].items() if "test" not in name})
    (tmp_path / "ptb" / "ptb.test.txt").mkdir()
    fails(tmp_path, "ptb", "cannot read .*ptb.test.txt: Is a directory")
