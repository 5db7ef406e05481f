"""Text classification as in "Scheduled DropHead" (Zhou et al. 2020), each data set in its authors' files."""

from collab_compress.tasks.layouts import Folders, JsonLines, LabelFirst, Table
from collab_compress.tasks.task import Hub, Task

CSV = {"train": ("train.csv",), "test": ("test.csv",)}
NLI = ("entailment", "neutral", "contradiction")
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
