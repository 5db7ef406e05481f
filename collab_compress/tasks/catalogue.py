"""The dataclass of a task, and the table of tasks: GLUE and other classification, translation,
language modelling.

GLUE: Wang et al. 2019, "GLUE: A multi-task benchmark and analysis platform for natural language understanding".
The files are the benchmark's own: columns split at tabs, quotes are text, test splits without labels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from datasets import ClassLabel, Features, Value

from collab_compress.errors import DataError
from collab_compress.tasks.layouts import (
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
    "classification",
    "regression",
    "translation",
    "language modelling",
    "masked language modelling",
]
SCORES = (0.0, 5.0)  # of STS-B, the one task of regression
NO_LABEL = -1
_TEXT = Value("string")


@dataclass(frozen=True)
class Hub:
    """Where a data set is on the hub.

    Args:
        path: name of the repository.
        columns: canonical column → columns there whose texts, joined by spaces, it holds; a dot goes into a nested
            one. `{source}`, `{target}` and `{foreign}` (that of the two which is not English) are filled in.
        config: which of the repository's data sets; filled in the same way.
        exported: whether only its conversion to Parquet can be read, because the data set itself is a script; the
            config is then a folder there.
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
        kind: decides the columns: text, label (and text_pair) for classification and regression; source, target for
            translation; text for language modelling, masked or not.
        metric: its name in `collab_compress.metrics.METRICS`.
        layouts: how its files may be laid out; the first that fits counts.
        hub: where it is on the hub, if it is.
        labels: names of the classes, in the order of their numbers.
        pair: whether there is a second text.
        languages: source and target, where none are given.
        escaped: whether texts have line ends and quotes written with a backslash.
        folders: where its folder may be within a folder of tasks.
    """

    name: str
    kind: Kind
    metric: str
    layouts: tuple[Layout, ...]
    hub: Hub | None = None
    labels: tuple[str, ...] = ()
    pair: bool = False
    languages: tuple[str, str] | None = None
    escaped: bool = False
    folders: tuple[str, ...] = ()

    @property
    def num_labels(self) -> int | None:
        """Outputs that a model's head needs: a class each, one for regression, None without a head."""
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
        """Return a text with its escapes undone."""
        return text.replace("\\n", "\n").replace('\\"', '"') if self.escaped else text

    def number(self, label: int | str) -> int:
        """Return the number of a class from its name or number on the hub; −1 without a label.

        Raises:
            DataError: there is no such class.
        """
        if isinstance(label, str) and label in self.labels:
            return self.labels.index(label)
        if isinstance(label, str) or not NO_LABEL <= label < len(self.labels):
            raise DataError(f"{self.name}: {self._unknown(label)}")
        return label

    def label(self, written: Any, layout: Layout, place: Place) -> int | float:
        """Turn a label as a file has it into the number of its class, or a score; None becomes −1.

        Raises:
            DataError: there is no such label.
        """
        if written is None:
            return NO_LABEL
        if self.kind == "regression":
            return _score(written, place)
        if layout.first_label is None:
            if written not in self.labels:
                raise malformed(place, self._unknown(written))
            return self.labels.index(written)
        first, last = layout.first_label, layout.first_label + len(self.labels) - 1
        if not written.isascii() or not written.isdigit() or not first <= int(written) <= last:
            raise malformed(place, f"label {written!r} is no number of a class; expected {first} to {last}")
        return int(written) - first

    def _unknown(self, label: int | str) -> str:
        return f"unknown label {label!r}; expected one of {', '.join(self.labels)}"


def _score(written: str, place: Place) -> float:
    try:
        score = float(written)
    except ValueError:
        raise malformed(place, f"score {written!r} is no number") from None
    if not SCORES[0] <= score <= SCORES[1]:
        raise malformed(place, f"score {written} is out of range; expected {SCORES[0]:g} to {SCORES[1]:g}")
    return score


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


CSV = {"train": ("train.csv",), "test": ("test.csv",)}
SENTIMENT = ("negative", "positive")
STARS = ("1 star", "2 stars", "3 stars", "4 stars", "5 stars")
NEWS = ("World", "Sports", "Business", "Sci/Tech")
ENTITIES = (
    "Company", "EducationalInstitution", "Artist", "Athlete", "OfficeHolder", "MeanOfTransportation", "Building",
    "NaturalPlace", "Village", "Animal", "Plant", "Album", "Film", "WrittenWork",
)  # fmt: skip
TOPICS = (
    "Society & Culture", "Science & Mathematics", "Health", "Education & Reference", "Computers & Internet",
    "Sports", "Business & Finance", "Entertainment & Music", "Family & Relationships", "Politics & Government",
)  # fmt: skip
QUESTIONS = ("DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM")  # in the order of the numbered files


def _zhang(name: str, labels: tuple[str, ...], texts: tuple[str, ...], folders: tuple[str, ...], hub: Hub) -> Task:
    """Describe a data set of Zhang et al. 2015 (arXiv 1509.01626): rows of class, counted from 1, and texts."""
    layout = Table(
        files=CSV, text=texts, label="class", columns=("class", *texts), delimiter=",", quoted=True, first_label=1
    )
    escaped = name.startswith(("yelp", "yahoo"))
    return Task(
        name=name, kind="classification", metric="accuracy", layouts=(layout,), hub=hub, labels=labels,
        escaped=escaped, folders=(*folders, name),
    )  # fmt: skip


def _columns(*text: str, label: str = "label") -> dict[str, tuple[str, ...]]:
    return {"text": text, "label": (label,)}


def _snli_files(ending: str) -> dict[str, tuple[str, ...]]:
    return {
        split: (f"snli_1.0_{name}.{ending}|{name}.{ending}",)
        for split, name in (("train", "train"), ("validation", "dev"), ("test", "test"))
    }


CLASSIFICATION = (
    Task(
        name="imdb", kind="classification", metric="accuracy", labels=SENTIMENT,
        layouts=(
            Folders(files={"train": ("train",), "test": ("test",)}, classes=("neg", "pos"), first_label=0),
            Table(files=CSV, text=("text",), label="label", delimiter=",", quoted=True, first_label=0),
        ),
        hub=Hub("stanfordnlp/imdb", _columns("text")), folders=("aclImdb", "imdb"),
    ),
    _zhang(
        "yelp", SENTIMENT, ("text",), ("yelp_review_polarity_csv",),
        Hub("fancyzhx/yelp_polarity", _columns("text")),
    ),
    _zhang("yelp_full", STARS, ("text",), ("yelp_review_full_csv",), Hub("Yelp/yelp_review_full", _columns("text"))),
    _zhang(
        "ag_news", NEWS, ("title", "description"), ("ag_news_csv",), Hub("fancyzhx/ag_news", _columns("text")),
    ),
    _zhang(
        "dbpedia", ENTITIES, ("title", "content"), ("dbpedia_csv",),
        Hub("fancyzhx/dbpedia_14", _columns("title", "content")),
    ),
    _zhang(
        "yahoo", TOPICS, ("question_title", "question_content", "best_answer"), ("yahoo_answers_csv",),
        Hub(
            "community-datasets/yahoo_answers_topics",
            _columns("question_title", "question_content", "best_answer", label="topic"),
        ),
    ),
    Task(
        name="trec", kind="classification", metric="accuracy", labels=QUESTIONS,
        layouts=(
            LabelFirst(
                files={"train": ("TREC.train.all",), "test": ("TREC.test.all",)}, first_label=0, encoding="latin-1",
            ),
            LabelFirst(files={"train": ("train_5500.label",), "test": ("TREC_10.label",)}, encoding="latin-1"),
        ),
        hub=Hub("SetFit/TREC-QC", _columns("text", label="label_coarse_original")), folders=("trec", "TREC"),
    ),
    Task(
        name="snli", kind="classification", metric="accuracy", labels=NLI, pair=True,
        layouts=(
            # Pairs on whose label the annotators did not agree are left out, as everyone does.
            JsonLines(
                files=_snli_files("jsonl"), optional=("test",), left_out=("-",),
                text="sentence1", pair="sentence2", label="gold_label",
            ),
            *(
                Table(
                    files=_snli_files(ending), optional=("test",), left_out=("-",),
                    text=("sentence1",), pair="sentence2", label="gold_label",
                )
                for ending in ("txt", "tsv")
            ),
        ),
        hub=Hub(
            "stanfordnlp/snli", {"text": ("premise",), "text_pair": ("hypothesis",), "label": ("label",)},
        ),
        folders=("snli_1.0", "SNLI", "snli"),
    ),
)  # fmt: skip


NESTED = {"source": ("translation.{source}",), "target": ("translation.{target}",)}


def _prepared(validation: str = "", test: str = "", optional: tuple[str, ...] = ("test",)) -> Parallel:
    """Describe files of one sentence a line, which may have the names of well-known sets."""
    names = {
        "train": ("train", "train.{pair}"),
        "validation": (validation, "valid", "val", "dev", "valid.{pair}", "dev.{pair}"),
        "test": (test, "test", "test.{pair}"),
    }
    files = {split: ("|".join(f"{name}.{{lang}}" for name in those if name),) for split, those in names.items()}
    return Parallel(files=files, optional=optional)


def _iwslt(name: str, campaign: str, validation: tuple[str, ...], test: tuple[str, ...], hub: Hub | None) -> Task:
    """Describe a campaign's TED talks as given out: tagged training files, development and test sets in XML."""

    def parts(sets: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{campaign}.{part}.{{pair}}.{{lang}}.xml" for part in sets)

    official = Parallel(
        files={"train": ("train.tags.{pair}.{lang}",), "validation": parts(validation), "test": parts(test)},
        optional=("test",),
    )
    return _translation(name, (official, _prepared()), hub)


def _wmt(name: str, year: str, commentary: tuple[str, ...], more: tuple[str, ...], development: str) -> Task:
    """Describe the news task of a year as its archives unpack, for German and English.

    The archives of other pairs differ; join their files into train, valid and test.
    """
    corpora = ("training/europarl-v7.{pair}.{lang}", "commoncrawl.{pair}.{lang}", "|".join(commentary), *more)
    test = f"newstest{year}"
    markup = "{set}-{{tight}}-{{side}}.{{lang}}.sgm"
    dev = f"dev/{development}-{{side}}.{{lang}}.sgm|dev/{markup.format(set=development)}"
    tests = "|".join(f"{folder}/{markup.format(set=test)}" for folder in ("test", "test-full", "dev"))
    official = Parallel(files={"train": corpora, "validation": (dev,), "test": (tests,)}, optional=("test",))
    return _translation(
        name, (official, _prepared(development, test)), Hub(f"wmt/{name}", NESTED, config="{foreign}-en")
    )


def _translation(name: str, layouts: tuple[Parallel, ...], hub: Hub | None) -> Task:
    return Task(
        name=name,
        kind="translation",
        metric="bleu",
        layouts=layouts,
        hub=hub,
        languages=("de", "en"),
        folders=(name,),
    )


TRANSLATION = (
    _translation(
        "multi30k", (_prepared("val", "test_2016_flickr"),),
        Hub("bentrevett/multi30k", {"source": ("{source}",), "target": ("{target}",)}),
    ),
    _iwslt(
        "iwslt14", "IWSLT14",
        ("TED.dev2010", "TEDX.dev2012"), ("TED.tst2010", "TED.tst2011", "TED.tst2012"),
        None,  # the copies on the hub are programs to be run, or have other splits
    ),
    _iwslt(
        "iwslt17", "IWSLT17", ("TED.dev2010",), tuple(f"TED.tst{year}" for year in range(2010, 2016)),
        Hub("IWSLT/iwslt2017", NESTED, config="iwslt2017-{foreign}-en", exported=True),
    ),
    _wmt("wmt14", "2014", ("training/news-commentary-v9.{pair}.{lang}",), (), "newstest2013"),
    _wmt(
        "wmt16", "2016",
        ("training-parallel-nc-v11/news-commentary-v11.{pair}.{lang}", "training/news-commentary-v11.{pair}.{lang}"),
        (), "newstest2015",
    ),
    _wmt(
        "wmt17", "2017", ("training/news-commentary-v12.{pair}.{lang}",), ("rapid2016.{pair}.{lang}",),
        "newstest2016",
    ),
    Task(name="parallel", kind="translation", metric="bleu", folders=("parallel",),
        layouts=(_prepared(optional=("validation", "test")),),
    ),
)  # fmt: skip


LANGUAGE = (
    Task(
        name="ptb", kind="language modelling", metric="perplexity",
        layouts=(
            Text(
                files={"train": ("ptb.train.txt",), "validation": ("ptb.valid.txt",), "test": ("ptb.test.txt",)},
                strip=True,
            ),
        ),
        hub=Hub("ptb-text-only/ptb_text_only", {"text": ("sentence",)}, config="penn_treebank", exported=True),
        folders=("ptb", "simple-examples/data"),
    ),
    Task(
        name="text", kind="language modelling", metric="perplexity",
        layouts=(
            Text(
                files={"train": ("train.txt",), "validation": ("valid.txt|val.txt|dev.txt",), "test": ("test.txt",)},
                optional=("validation", "test"),
            ),
        ),
        folders=("text",),
    ),
)  # fmt: skip
MASKED = [replace(task, name=f"{task.name}_masked", kind="masked language modelling") for task in LANGUAGE]


TASKS: dict[str, Task] = {task.name: task for task in (*GLUE, *CLASSIFICATION, *TRANSLATION, *LANGUAGE, *MASKED)}
"""Name → task."""
