"""Every task's files in small, in its authors' layout, and the rows they hold."""

import gzip

import pytest

NLI_COLUMNS = "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse"
NLI_COLUMNS = f"{NLI_COLUMNS} sentence2_parse sentence1 sentence2".replace(" ", "\t")
STSB_COLUMNS = "index genre filename year old_index source1 source2 sentence1 sentence2".replace(" ", "\t")
MRPC_COLUMNS = "#1 ID\t#2 ID\t#1 String\t#2 String"


def table(*lines):
    return "".join(f"{line}\n" for line in lines)


def pair(text, text_pair, label):
    return {"text": text, "text_pair": text_pair, "label": label}


def text(text, label):
    return {"text": text, "label": label}


def moved(source, target):
    return {"source": source, "target": target}


def nli(row, labels, label):
    return f"{row}\tp\tq\tgenre\t(a)\t(b)\t(A)\t(B)\tone {row}\ttwo {row}\t{labels}{label}"


SAMPLES = {
    "cola": (
        {
            "CoLA/train.tsv": table('gj04\t1\t\tIt "works".', "gj04\t0\t*\tIt work."),
            "CoLA/dev.tsv": table("gj04\t1\t\tWe sail."),
            "CoLA/test.tsv": table("index\tsentence", "0\tBill sleeps."),
        },
        {
            "train": [text('It "works".', 1), text("It work.", 0)],
            "validation": [text("We sail.", 1)],
            "test": [text("Bill sleeps.", -1)],
        },
    ),
    "sst2": (
        {
            "SST-2/train.tsv": table("sentence\tlabel", "a charm \t1", '"dull" \t0'),
            "SST-2/dev.tsv": table("sentence\tlabel", "fine\t1"),
            "SST-2/test.tsv": table("index\tsentence", "0\tuneasy mishmash"),
        },
        {
            "train": [text("a charm ", 1), text('"dull" ', 0)],
            "validation": [text("fine", 1)],
            "test": [text("uneasy mishmash", -1)],
        },
    ),
    "mrpc": (
        {
            "MRPC/train.tsv": table(f"Quality\t{MRPC_COLUMNS}", '1\t7\t8\tHe said "yes .\tHe agreed .'),
            "MRPC/dev.tsv": "\ufeff" + table(f"Quality\t{MRPC_COLUMNS}", "0\t7\t8\tOne .\tTwo ."),
            "MRPC/test.tsv": "\ufeff" + table(f"index\t{MRPC_COLUMNS}", "0\t7\t8\tThree .\tFour ."),
        },
        {
            "train": [pair('He said "yes .', "He agreed .", 1)],
            "validation": [pair("One .", "Two .", 0)],
            "test": [pair("Three .", "Four .", -1)],
        },
    ),
    "stsb": (
        {
            "STS-B/train.tsv": table(f"{STSB_COLUMNS}\tscore", "0\tg\tf\ty\t1\tn\tn\tA plane.\tA jet.\t4.750"),
            "STS-B/dev.tsv": table(f"{STSB_COLUMNS}\tscore", "0\tg\tf\ty\t1\tn\tn\tA cat.\tA rock.\t0.000"),
            "STS-B/test.tsv": table(STSB_COLUMNS, "0\tg\tf\ty\t1\tn\tn\tA girl.\tA woman."),
        },
        {
            "train": [pair("A plane.", "A jet.", 4.75)],
            "validation": [pair("A cat.", "A rock.", 0.0)],
            "test": [pair("A girl.", "A woman.", -1.0)],
        },
    ),
    "qqp": (
        {
            "QQP/train.tsv": table(
                "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
                "1\t2\t3\tWhy?\tHow come?\t1",
                "2\t3\t4\tThis one was",
                "broken?\tYes?\t0",
                "3\t4\t5\tWho?\tWhen?\t0",
            ),
            "QQP/dev.tsv": table("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "1\t2\t3\tA?\tB?\t0"),
            "QQP/test.tsv": table("id\tquestion1\tquestion2", "0\tC?\tD?"),
        },
        {
            "train": [pair("Why?", "How come?", 1), pair("Who?", "When?", 0)],
            "validation": [pair("A?", "B?", 0)],
            "test": [pair("C?", "D?", -1)],
        },
    ),
    "mnli": (
        {
            "MNLI/train.tsv": table(
                f"{NLI_COLUMNS}\tlabel1\tgold_label",
                *(nli(row, f"{name}\t", name) for row, name in enumerate(("neutral", "entailment", "contradiction"))),
            ),
            "MNLI/dev_matched.tsv": table(
                f"{NLI_COLUMNS}\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label", nli(7, "x\t" * 5, "neutral")
            ),
            "MNLI/dev_mismatched.tsv": table(
                f"{NLI_COLUMNS}\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label", nli(8, "x\t" * 5, "entailment")
            ),
            "MNLI/test_matched.tsv": table(NLI_COLUMNS, nli(9, "", "").rstrip("\t")),
        },
        {
            "train": [pair("one 0", "two 0", 1), pair("one 1", "two 1", 0), pair("one 2", "two 2", 2)],
            "validation_matched": [pair("one 7", "two 7", 1)],
            "validation_mismatched": [pair("one 8", "two 8", 0)],
            "test_matched": [pair("one 9", "two 9", -1)],
        },
    ),
    "qnli": (
        {
            "QNLI/train.tsv": table("index\tquestion\tsentence\tlabel", "0\tWho?\tShe.\tentailment"),
            "QNLI/dev.tsv": table("index\tquestion\tsentence\tlabel", "0\tWhere?\tNow.\tnot_entailment"),
        },
        {"train": [pair("Who?", "She.", 0)], "validation": [pair("Where?", "Now.", 1)]},
    ),
    "rte": (
        {
            "RTE/train.tsv": table("index\tsentence1\tsentence2\tlabel", "0\tRain.\tDry.\tnot_entailment"),
            "RTE/dev.tsv": table("index\tsentence1\tsentence2\tlabel", "0\tRain.\tWet.\tentailment"),
            "RTE/test.tsv": table("index\tsentence1\tsentence2", "0\tSnow.\tCold."),
        },
        {
            "train": [pair("Rain.", "Dry.", 1)],
            "validation": [pair("Rain.", "Wet.", 0)],
            "test": [pair("Snow.", "Cold.", -1)],
        },
    ),
    "wnli": (
        {
            "WNLI/train.tsv": table("index\tsentence1\tsentence2\tlabel", "0\tJohn is here.\tHe is.\t1"),
            "WNLI/dev.tsv": table("index\tsentence1\tsentence2\tlabel", "0\tJane left.\tShe is here.\t0"),
        },
        {"train": [pair("John is here.", "He is.", 1)], "validation": [pair("Jane left.", "She is here.", 0)]},
    ),
    "trec": (
        {"trec/TREC.train.all": table("0 How far ?", "2 What is .com ?"), "trec/TREC.test.all": table("5 When ?")},
        {"train": [text("How far ?", 0), text("What is .com ?", 2)], "test": [text("When ?", 5)]},
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
            "train": [moved("Zwei Männer.", "Two men."), moved("Ein\x85 Hund.", "A dog.")],
            "validation": [moved("Eine Frau.", "A woman.")],
            "test": [moved("Ein Hut.", "A hat.")],
        },
    ),
    "parallel": (
        {
            "train.de": table("eins"),
            "train.en": table("one"),
            "dev.de.gz": table("zwei", ""),
            "dev.en": table("two", ""),
        },
        {"train": [moved("eins", "one")], "validation": [moved("zwei", "two"), moved("", "")]},
    ),
    "ptb": (
        {
            "ptb/ptb.train.txt.gz": table(" pierre <unk> N years old ", " mr. <unk> "),
            "ptb/ptb.valid.txt.gz": table(" consumers may "),
            "ptb/ptb.test.txt": table(" no it was n't "),
        },
        {
            "train": [{"text": "pierre <unk> N years old"}, {"text": "mr. <unk>"}],
            "validation": [{"text": "consumers may"}],
            "test": [{"text": "no it was n't"}],
        },
    ),
    "text": (
        {"train.txt": "  def f():\n\n    pass", "valid.txt": table("two")},
        {"train": [{"text": "  def f():"}, {"text": ""}, {"text": "    pass"}], "validation": [{"text": "two"}]},
    ),
}
SAMPLES |= {f"{name}_masked": SAMPLES[name] for name in ("ptb", "text")}


@pytest.fixture(scope="session")
def samples():
    """Map each task to its files and the rows of each split."""
    return SAMPLES


@pytest.fixture(scope="session")
def write():
    """Write files of text or bytes into a folder; names in .gz are gzipped."""

    def write(folder, files, encoding="utf-8"):
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            data = content.encode(encoding) if isinstance(content, str) else content
            path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return folder

    return write


@pytest.fixture(scope="session")
def real_data(glue):
    """Return the folder of real data, which holds glue and others."""
    return glue.parent
