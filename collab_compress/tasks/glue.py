"""GLUE: Wang et al. 2019, "GLUE: A multi-task benchmark and analysis platform for natural language understanding".

The files are the benchmark's own: columns split at tabs, quotes are text, test splits without labels.
"""

from collections.abc import Mapping
from dataclasses import replace

from collab_compress.tasks.layouts import Table
from collab_compress.tasks.task import Hub, Kind, Task

FILES = {"train": ("train.tsv",), "validation": ("dev.tsv",), "test": ("test.tsv",)}
MNLI_FILES = {
    "train": ("train.tsv",),
    "validation_matched": ("dev_matched.tsv",),
    "validation_mismatched": ("dev_mismatched.tsv",),
    "test_matched": ("test_matched.tsv",),
    "test_mismatched": ("test_mismatched.tsv",),
}
TESTS = ("test", "test_matched", "test_mismatched")
NLI = ("entailment", "neutral", "contradiction")
RTE = ("entailment", "not_entailment")


def _task(
    folder: str,
    table: Table,
    labels: tuple[str, ...],
    columns: tuple[str, ...],
    metric: str = "accuracy",
    kind: Kind = "classification",
) -> Task:
    """Describe one of GLUE's tasks: `folder` is its name in the archive, `columns` name its texts on the hub."""
    name = folder.lower().replace("-", "")
    there = {canonical: (column,) for canonical, column in zip(("text", "text_pair"), columns, strict=False)}
    return Task(
        name=name,
        kind=kind,
        metric=metric,
        layouts=(replace(table, optional=TESTS, unlabelled=TESTS),),
        hub=Hub("nyu-mll/glue", {**there, "label": ("label",)}, config=name),
        labels=labels,
        pair=table.pair is not None,
        folders=(folder, f"glue/{folder}"),
    )


def _pairs(
    text: str,
    pair: str,
    label: str = "label",
    first_label: int | None = None,
    files: Mapping[str, tuple[str, ...]] = FILES,
    broken: bool = False,
) -> Table:
    return Table(files=files, text=(text,), pair=pair, label=label, first_label=first_label, broken=broken)


SENTENCES = ("sentence1", "sentence2")
GLUE = (
    _task(
        "CoLA",
        Table(
            files=FILES, text=("sentence",), label="label", first_label=0,
            columns=("source", "label", "mark", "sentence"),
        ),
        ("unacceptable", "acceptable"), ("sentence",), metric="matthews",
    ),
    _task(
        "SST-2", Table(files=FILES, text=("sentence",), label="label", first_label=0),
        ("negative", "positive"), ("sentence",),
    ),
    _task(
        "MRPC", _pairs("#1 String", "#2 String", "Quality", 0), ("not_equivalent", "equivalent"), SENTENCES,
        metric="accuracy+f1",
    ),
    _task("STS-B", _pairs(*SENTENCES, "score"), (), SENTENCES, metric="correlation", kind="regression"),
    # Questions of QQP hold line ends, which break their rows in the official files; the benchmark leaves these out.
    _task(
        "QQP", _pairs("question1", "question2", "is_duplicate", 0, broken=True), ("not_duplicate", "duplicate"),
        ("question1", "question2"), metric="accuracy+f1",
    ),
    _task("MNLI", _pairs(*SENTENCES, "gold_label", files=MNLI_FILES), NLI, ("premise", "hypothesis")),
    _task("QNLI", _pairs("question", "sentence"), RTE, ("question", "sentence")),
    _task("RTE", _pairs(*SENTENCES), RTE, SENTENCES),
    _task("WNLI", _pairs(*SENTENCES, first_label=0), RTE[::-1], SENTENCES),
)  # fmt: skip
