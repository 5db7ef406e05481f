"""The table of tasks: GLUE and TREC, translation, language modelling.

GLUE: Wang et al. 2019, "GLUE: A multi-task benchmark and analysis platform for natural language understanding".
Its files have columns split at tabs, quotes that are text, and test splits without labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from datasets import ClassLabel, Features, Value

from collab_compress.errors import DataError

from .layouts import LabelFirst, Layout, Parallel, Place, Table, Text, malformed

Kind: TypeAlias = Literal[
    "classification", "regression", "translation", "language modelling", "masked language modelling"
]
MAX_SCORE = 5.0  # from 0 on, of STS-B, the only regression task
NO_LABEL = -1
_TEXT = Value("string")


@dataclass(frozen=True)
class Hub:
    """A data set on the hub.

    Args:
        path: name of the repository.
        columns: canonical column → the data set's; `{source}` and `{target}` stand for the languages.
        config: name of the configuration.
        exported: whether only its conversion to Parquet can be read, because the data set itself is a script; the
            config is then a folder of it.
    """

    path: str
    columns: Mapping[str, str]
    config: str | None = None
    exported: bool = False


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task as data.

    Args:
        name: as in `load_task(name)`.
        layouts: possible layouts of its files; the first that fits is used.
        kind: decides the columns: text, label (and text_pair) for classification and regression; source, target for
            translation; text for language modelling, masked or not.
        metric: its name in `metrics.METRICS`.
        hub: its data set on the hub.
        labels: names of the classes, in the order of their numbers.
        pair: whether there is a second text.
        languages: default source and target language.
        folders: possible paths of its folder within a folder of tasks.
    """

    name: str
    layouts: tuple[Layout, ...]
    kind: Kind = "classification"
    metric: str = "accuracy"
    hub: Hub | None = None
    labels: tuple[str, ...] = ()
    pair: bool = False
    languages: tuple[str, str] | None = None
    folders: tuple[str, ...] = ()

    @property
    def num_labels(self) -> int | None:
        """Outputs of the model's head: one for each class, one for regression, None without a head."""
        return {"classification": len(self.labels), "regression": 1}.get(self.kind)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Columns that hold text."""
        if self.kind == "translation":
            return ("source", "target")
        return ("text", "text_pair") if self.pair else ("text",)

    @property
    def features(self) -> Features:
        """Columns and their types."""
        features: dict[str, Any] = dict.fromkeys(self.text_columns, _TEXT)
        if self.kind == "classification":
            features["label"] = ClassLabel(names=list(self.labels))
        elif self.kind == "regression":
            features["label"] = Value("float32")
        return Features(features)

    def number(self, label: int | str) -> int:
        """Return the number of a class from its name or number on the hub; −1 without a label."""
        if isinstance(label, str) and label in self.labels:
            return self.labels.index(label)
        if isinstance(label, str) or not NO_LABEL <= label < len(self.labels):
            raise DataError(f"{self.name}: unknown label {label!r}; expected one of {', '.join(self.labels)}")
        return label

    def has_classes(self, labels: Sequence[Any]) -> bool:
        """Return whether these names of a model's outputs are the task's classes, whatever their case, or numbers."""
        names = [str(label).lower().removeprefix("label_") for label in labels]
        named, numbered = [label.lower() for label in self.labels], list(map(str, range(len(self.labels))))
        return len(names) == self.num_labels and (self.kind == "regression" or names in (named, numbered))

    def check_classes(self, labels: Sequence[Any], of: str) -> None:
        """Raise a DataError if a model, `of` in words, has other outputs, or the classes in another order."""
        if not self.has_classes(labels):
            raise DataError(
                f"{of} has the classes {', '.join(map(str, labels))[:200]}; {self.name} has "
                f"{', '.join(self.labels) or 'one score'}, in this order; fine-tune it on {self.name}, or correct "
                "id2label and label2id in its config.json if these only name the same classes differently"
            )

    def label(self, written: Any, layout: Layout, place: Place) -> int | float:
        """Return the number of a class, or the score, from its text in a file; −1 for None."""
        if written is None:
            return NO_LABEL
        if self.kind == "regression":
            try:
                score = float(written)
            except ValueError:
                raise malformed(place, f"score {written!r} is not a number") from None
            if not 0 <= score <= MAX_SCORE:
                raise malformed(place, f"score {written} is out of range; expected 0 to {MAX_SCORE:g}")
            return score
        names = list(map(str, range(len(self.labels)))) if layout.numbered else list(self.labels)
        if written not in names:
            raise malformed(place, f"unknown label {written!r}; expected one of {', '.join(names)}")
        return names.index(written)


TSV = {"train": ("train.tsv",), "validation": ("dev.tsv",), "test": ("test.tsv",)}
MNLI_TSV = {
    "train": ("train.tsv",),
    "validation_matched": ("dev_matched.tsv",),
    "validation_mismatched": ("dev_mismatched.tsv",),
    "test_matched": ("test_matched.tsv",),
    "test_mismatched": ("test_mismatched.tsv",),
}
TESTS = ("test", "test_matched", "test_mismatched")
SENTENCES = ("sentence1", "sentence2")
NLI = ("entailment", "neutral", "contradiction")
RTE = ("entailment", "not_entailment")
SENTIMENT = ("negative", "positive")


def _glue(
    folder: str,
    labels: tuple[str, ...],
    texts: tuple[str, ...],
    label: str = "label",
    *,
    hub: tuple[str, ...] | None = None,
    metric: str = "accuracy",
    kind: Kind = "classification",
    **table: Any,
) -> Task:
    """Describe a task of GLUE: `folder` is its name in the archive, `hub` names its text columns there."""
    name = folder.lower().replace("-", "")
    text, pair = texts[0], texts[1] if len(texts) > 1 else None
    table = {"files": TSV, **table, "optional": TESTS, "unlabelled": TESTS}
    hub_columns = dict(zip(("text", "text_pair"), hub or texts, strict=False))
    return Task(
        name=name,
        kind=kind,
        metric=metric,
        layouts=(Table(text=text, pair=pair, label=label, **table),),
        hub=Hub("nyu-mll/glue", {**hub_columns, "label": "label"}, config=name),
        labels=labels,
        pair=pair is not None,
        folders=(folder, f"glue/{folder}"),
    )


COLA = ("source", "label", "mark", "sentence")  # its columns, which its files do not name
GLUE = (
    _glue("CoLA", ("unacceptable", "acceptable"), ("sentence",), metric="matthews", numbered=True, columns=COLA),
    _glue("SST-2", SENTIMENT, ("sentence",), numbered=True),
    _glue(
        "MRPC",
        ("not_equivalent", "equivalent"),
        ("#1 String", "#2 String"),
        "Quality",
        hub=SENTENCES,
        metric="accuracy+f1",
        numbered=True,
    ),
    _glue("STS-B", (), SENTENCES, "score", metric="correlation", kind="regression"),
    # Questions of QQP hold line ends, which break their rows in the official files; the benchmark leaves these out.
    _glue(
        "QQP",
        ("not_duplicate", "duplicate"),
        ("question1", "question2"),
        "is_duplicate",
        metric="accuracy+f1",
        numbered=True,
        broken=True,
    ),
    _glue("MNLI", NLI, SENTENCES, "gold_label", hub=("premise", "hypothesis"), files=MNLI_TSV),
    _glue("QNLI", RTE, ("question", "sentence")),
    _glue("RTE", RTE, SENTENCES),
    _glue("WNLI", RTE[::-1], SENTENCES, numbered=True),
)


QUESTIONS = ("DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM")  # in the order of the numbered files
TREC = Task(
    name="trec",
    layouts=(
        LabelFirst(
            files={"train": ("TREC.train.all",), "test": ("TREC.test.all",)}, numbered=True, encoding="latin-1"
        ),
        LabelFirst(files={"train": ("train_5500.label",), "test": ("TREC_10.label",)}, encoding="latin-1"),
    ),
    hub=Hub("SetFit/TREC-QC", {"text": "text", "label": "label_coarse_original"}),
    labels=QUESTIONS,
    folders=("trec", "TREC"),
)


MULTI30K = {
    "train": ("train.{lang}",),
    "validation": ("val.{lang}",),
    "test": ("test_2016_flickr.{lang}|test.{lang}",),
}
PARALLEL = {
    "train": ("train.{lang}",),
    "validation": ("valid.{lang}|val.{lang}|dev.{lang}",),
    "test": ("test.{lang}",),
}
TRANSLATION = (
    Task(
        name="multi30k",
        kind="translation",
        metric="bleu",
        layouts=(Parallel(files=MULTI30K, optional=("test",)),),
        hub=Hub("bentrevett/multi30k", {"source": "{source}", "target": "{target}"}),
        languages=("de", "en"),
        folders=("multi30k",),
    ),
    Task(
        name="parallel",
        kind="translation",
        metric="bleu",
        layouts=(Parallel(files=PARALLEL, optional=("validation", "test")),),
        folders=("parallel",),
    ),
)


def _language(name: str, layout: Text, folders: tuple[str, ...], hub: Hub | None = None) -> tuple[Task, Task]:
    """Describe texts as a task of language modelling, and of masked language modelling."""
    task = Task(
        name=name, kind="language modelling", metric="perplexity", layouts=(layout,), hub=hub, folders=folders
    )
    return task, replace(task, name=f"{name}_masked", kind="masked language modelling")


PTB = {"train": ("ptb.train.txt",), "validation": ("ptb.valid.txt",), "test": ("ptb.test.txt",)}
TEXT = {"train": ("train.txt",), "validation": ("valid.txt|val.txt|dev.txt",), "test": ("test.txt",)}
LANGUAGE = (
    *_language(
        "ptb",
        Text(files=PTB, strip=True),
        ("ptb", "simple-examples/data"),
        Hub("ptb-text-only/ptb_text_only", {"text": "sentence"}, config="penn_treebank", exported=True),
    ),
    *_language("text", Text(files=TEXT, optional=("validation", "test")), ("text",)),
)


TASKS: dict[str, Task] = {task.name: task for task in (*GLUE, TREC, *TRANSLATION, *LANGUAGE)}
"""Name → task."""
