"""The table of tasks: GLUE and other classification, translation, language modelling.

GLUE: Wang et al. 2019, "GLUE: A multi-task benchmark and analysis platform for natural language understanding".
Its files have columns split at tabs, quotes that are text, and test splits without labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from datasets import ClassLabel, Features, Value

from collab_compress.errors import DataError

from .layouts import (
    Folders,
    JsonLines,
    LabelFirst,
    Layout,
    Parallel,
    Place,
    Table,
    Text,
    malformed,
)

Kind: TypeAlias = Literal[
    "classification", "regression", "translation", "language modelling", "masked language modelling"
]
SCORES = (0.0, 5.0)  # range of STS-B, the only regression task
NO_LABEL = -1
_TEXT = Value("string")


@dataclass(frozen=True)
class Hub:
    """A data set on the hub.

    Args:
        path: name of the repository.
        columns: canonical column → the data set's columns, whose texts are joined by spaces; a dot separates a nested
            one. `{source}`, `{target}` and `{foreign}` (the language that is not English) are replaced.
        config: name of the configuration; placeholders are replaced as in `columns`.
        exported: whether only its conversion to Parquet can be read, because the data set itself is a script; the
            config is then a folder of it.
    """

    path: str
    columns: Mapping[str, tuple[str, ...]]
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
        escaped: whether texts have line ends and quotes written with a backslash.
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
    escaped: bool = False
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

    def clean(self, text: str) -> str:
        """Return a text with its backslash escapes replaced."""
        return text.replace("\\n", "\n").replace('\\"', '"') if self.escaped else text

    def number(self, label: int | str) -> int:
        """Return the number of a class from its name or number on the hub; −1 without a label."""
        if isinstance(label, str) and label in self.labels:
            return self.labels.index(label)
        if isinstance(label, str) or not NO_LABEL <= label < len(self.labels):
            raise DataError(f"{self.name}: {self._unknown(label)}")
        return label

    def has_classes(self, labels: Sequence[Any]) -> bool:
        """Return whether a model's outputs are the task's; case does not count, and numbers are no names.

        Args:
            labels: the names of the model's outputs, in their order; LABEL_0, LABEL_1, … if they have none. That of a
                regression does not count.
        """
        names = [str(label).lower().removeprefix("label_") for label in labels]
        named, numbered = [label.lower() for label in self.labels], list(map(str, range(len(self.labels))))
        return len(names) == self.num_labels and (self.kind == "regression" or names in (named, numbered))

    def check_classes(self, labels: Sequence[Any], of: str) -> None:
        """Refuse a model with other outputs, or with the task's classes in another order (`has_classes`).

        Args:
            labels: the names of the model's outputs, in their order.
            of: the model, in words.

        Raises:
            DataError: naming both.
        """
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
            if not SCORES[0] <= score <= SCORES[1]:
                raise malformed(place, f"score {written} is out of range; expected {SCORES[0]:g} to {SCORES[1]:g}")
            return score
        if layout.first_label is None:
            if written not in self.labels:
                raise malformed(place, self._unknown(written))
            return self.labels.index(written)
        first, last = layout.first_label, layout.first_label + len(self.labels) - 1
        if not written.isascii() or not written.isdigit() or not first <= int(written) <= last:
            raise malformed(place, f"label {written!r} is not the number of a class; expected {first} to {last}")
        return int(written) - first

    def _unknown(self, label: int | str) -> str:
        return f"unknown label {label!r}; expected one of {', '.join(self.labels)}"


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
    hub_columns = {key: (column,) for key, column in zip(("text", "text_pair"), hub or texts, strict=False)}
    return Task(
        name=name,
        kind=kind,
        metric=metric,
        layouts=(Table(text=(text,), pair=pair, label=label, **table),),
        hub=Hub("nyu-mll/glue", {**hub_columns, "label": ("label",)}, config=name),
        labels=labels,
        pair=pair is not None,
        folders=(folder, f"glue/{folder}"),
    )


COLA = ("source", "label", "mark", "sentence")  # its columns, which its files do not name
GLUE = (
    _glue("CoLA", ("unacceptable", "acceptable"), ("sentence",), metric="matthews", first_label=0, columns=COLA),
    _glue("SST-2", SENTIMENT, ("sentence",), first_label=0),
    _glue(
        "MRPC",
        ("not_equivalent", "equivalent"),
        ("#1 String", "#2 String"),
        "Quality",
        hub=SENTENCES,
        metric="accuracy+f1",
        first_label=0,
    ),
    _glue("STS-B", (), SENTENCES, "score", metric="correlation", kind="regression"),
    # Questions of QQP hold line ends, which break their rows in the official files; the benchmark leaves these out.
    _glue(
        "QQP",
        ("not_duplicate", "duplicate"),
        ("question1", "question2"),
        "is_duplicate",
        metric="accuracy+f1",
        first_label=0,
        broken=True,
    ),
    _glue("MNLI", NLI, SENTENCES, "gold_label", hub=("premise", "hypothesis"), files=MNLI_TSV),
    _glue("QNLI", RTE, ("question", "sentence")),
    _glue("RTE", RTE, SENTENCES),
    _glue("WNLI", RTE[::-1], SENTENCES, first_label=0),
)


CSV = {"train": ("train.csv",), "test": ("test.csv",)}
STARS = ("1 star", "2 stars", "3 stars", "4 stars", "5 stars")
NEWS = ("World", "Sports", "Business", "Sci/Tech")
ENTITIES = (
    "Company EducationalInstitution Artist Athlete OfficeHolder MeanOfTransportation Building NaturalPlace Village "
    "Animal Plant Album Film WrittenWork"
)
TOPICS = (
    "Society & Culture, Science & Mathematics, Health, Education & Reference, Computers & Internet, Sports, "
    "Business & Finance, Entertainment & Music, Family & Relationships, Politics & Government"
)
QUESTIONS = ("DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM")  # in the order of the numbered files


def _zhang(
    name: str,
    labels: Sequence[str],
    folder: str,
    hub: str,
    texts: tuple[str, ...],
    *,
    joined: bool,
    label: str = "label",
) -> Task:
    """Describe a data set of Zhang et al. 2015 (arXiv 1509.01626): rows of class, counted from 1, and texts.

    On the hub, texts are columns of the same names, or already joined in one.
    """
    columns = ("class", *texts)
    layout = Table(files=CSV, text=texts, label="class", columns=columns, delimiter=",", quoted=True, first_label=1)
    return Task(
        name=name,
        layouts=(layout,),
        hub=Hub(hub, {"text": ("text",) if joined else texts, "label": (label,)}),
        labels=tuple(labels),
        escaped=name.startswith(("yelp", "yahoo")),
        folders=(folder, name),
    )


def _snli_files(ending: str) -> dict[str, tuple[str, ...]]:
    return {
        split: (f"snli_1.0_{name}.{ending}|{name}.{ending}",)
        for split, name in (("train", "train"), ("validation", "dev"), ("test", "test"))
    }


# Pairs on whose label the annotators did not agree are left out, as everyone does.
SNLI: dict[str, Any] = {"pair": "sentence2", "label": "gold_label", "optional": ("test",), "left_out": ("-",)}

CLASSIFICATION = (
    Task(
        name="imdb",
        layouts=(
            Folders(files={"train": ("train",), "test": ("test",)}, classes=("neg", "pos"), first_label=0),
            Table(files=CSV, text=("text",), label="label", delimiter=",", quoted=True, first_label=0),
        ),
        hub=Hub("stanfordnlp/imdb", {"text": ("text",), "label": ("label",)}),
        labels=SENTIMENT,
        folders=("aclImdb", "imdb"),
    ),
    _zhang("yelp", SENTIMENT, "yelp_review_polarity_csv", "fancyzhx/yelp_polarity", ("text",), joined=True),
    _zhang("yelp_full", STARS, "yelp_review_full_csv", "Yelp/yelp_review_full", ("text",), joined=True),
    _zhang("ag_news", NEWS, "ag_news_csv", "fancyzhx/ag_news", ("title", "description"), joined=True),
    _zhang("dbpedia", ENTITIES.split(), "dbpedia_csv", "fancyzhx/dbpedia_14", ("title", "content"), joined=False),
    _zhang(
        "yahoo",
        TOPICS.split(", "),
        "yahoo_answers_csv",
        "community-datasets/yahoo_answers_topics",
        ("question_title", "question_content", "best_answer"),
        joined=False,
        label="topic",
    ),
    Task(
        name="trec",
        layouts=(
            LabelFirst(
                files={"train": ("TREC.train.all",), "test": ("TREC.test.all",)}, first_label=0, encoding="latin-1"
            ),
            LabelFirst(files={"train": ("train_5500.label",), "test": ("TREC_10.label",)}, encoding="latin-1"),
        ),
        hub=Hub("SetFit/TREC-QC", {"text": ("text",), "label": ("label_coarse_original",)}),
        labels=QUESTIONS,
        folders=("trec", "TREC"),
    ),
    Task(
        name="snli",
        layouts=(
            JsonLines(files=_snli_files("jsonl"), text="sentence1", **SNLI),
            Table(files=_snli_files("txt"), text=("sentence1",), **SNLI),
            Table(files=_snli_files("tsv"), text=("sentence1",), **SNLI),
        ),
        hub=Hub("stanfordnlp/snli", {"text": ("premise",), "text_pair": ("hypothesis",), "label": ("label",)}),
        labels=NLI,
        pair=True,
        folders=("snli_1.0", "SNLI", "snli"),
    ),
)


NESTED = {"source": ("translation.{source}",), "target": ("translation.{target}",)}


def _translation(name: str, *layouts: Parallel, hub: Hub | None = None) -> Task:
    return Task(
        name=name,
        kind="translation",
        metric="bleu",
        layouts=layouts,
        hub=hub,
        languages=("de", "en"),
        folders=(name,),
    )


def _prepared(validation: str = "", test: str = "", optional: tuple[str, ...] = ("test",)) -> Parallel:
    """Describe files of one sentence a line; the validation and test sets may have other names than these."""
    names = {
        "train": ("train", "train.{pair}"),
        "validation": (validation, "valid", "val", "dev", "valid.{pair}", "dev.{pair}"),
        "test": (test, "test", "test.{pair}"),
    }
    files = {split: ("|".join(f"{name}.{{lang}}" for name in those if name),) for split, those in names.items()}
    return Parallel(files=files, optional=optional)


def _iwslt(name: str, validation: Sequence[str], test: Sequence[str], hub: Hub | None) -> Task:
    """Describe a campaign's TED talks as given out: tagged training files, development and test sets in XML."""
    xml = f"{name.upper()}.{{}}.{{{{pair}}}}.{{{{lang}}}}.xml"
    files = {
        "train": ("train.tags.{pair}.{lang}",),
        "validation": tuple(xml.format(talks) for talks in validation),
        "test": tuple(xml.format(talks) for talks in test),
    }
    return _translation(name, Parallel(files=files, optional=("test",)), _prepared(), hub=hub)


def _wmt(year: int, validation: str, *corpora: str) -> Task:
    """Describe the news task of a year as its archives unpack, for German and English.

    The archives of other pairs differ; join their files into train, valid and test.
    """
    name, test = f"wmt{year % 100}", f"newstest{year}"
    sgm = "{set}-{{tight}}-{{side}}.{{lang}}.sgm"
    files = {
        "train": ("training/europarl-v7.{pair}.{lang}", "commoncrawl.{pair}.{lang}", *corpora),
        "validation": (f"dev/{validation}-{{side}}.{{lang}}.sgm|dev/{sgm.format(set=validation)}",),
        "test": ("|".join(f"{folder}/{sgm.format(set=test)}" for folder in ("test", "test-full", "dev")),),
    }
    official = Parallel(files=files, optional=("test",))
    hub = Hub(f"wmt/{name}", NESTED, config="{foreign}-en")
    return _translation(name, official, _prepared(validation, test), hub=hub)


TRANSLATION = (
    _translation(
        "multi30k",
        _prepared("val", "test_2016_flickr"),
        hub=Hub("bentrevett/multi30k", {"source": ("{source}",), "target": ("{target}",)}),
    ),
    _iwslt(
        "iwslt14",
        ("TED.dev2010", "TEDX.dev2012"),
        ("TED.tst2010", "TED.tst2011", "TED.tst2012"),
        None,  # the copies on the hub are loading scripts, or have other splits
    ),
    _iwslt(
        "iwslt17",
        ("TED.dev2010",),
        [f"TED.tst{year}" for year in range(2010, 2016)],
        Hub("IWSLT/iwslt2017", NESTED, config="iwslt2017-{foreign}-en", exported=True),
    ),
    _wmt(2014, "newstest2013", "training/news-commentary-v9.{pair}.{lang}"),
    _wmt(
        2016,
        "newstest2015",
        "training-parallel-nc-v11/news-commentary-v11.{pair}.{lang}|training/news-commentary-v11.{pair}.{lang}",
    ),
    _wmt(2017, "newstest2016", "training/news-commentary-v12.{pair}.{lang}", "rapid2016.{pair}.{lang}"),
    Task(
        name="parallel",
        kind="translation",
        metric="bleu",
        layouts=(_prepared(optional=("validation", "test")),),
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
        Hub("ptb-text-only/ptb_text_only", {"text": ("sentence",)}, config="penn_treebank", exported=True),
    ),
    *_language("text", Text(files=TEXT, optional=("validation", "test")), ("text",)),
)


TASKS: dict[str, Task] = {task.name: task for task in (*GLUE, *CLASSIFICATION, *TRANSLATION, *LANGUAGE)}
"""Name → task."""
