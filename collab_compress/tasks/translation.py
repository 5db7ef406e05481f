"""Translation: the papers' data sets, and any parallel text files.

Every data set is read from files train, valid and test of one sentence a line as well, however they were prepared.
"""

from collab_compress.tasks.task import Hub, Task
from collab_compress.tasks.text_layouts import Parallel

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
    return _task(name, (official, _prepared()), hub)


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
    return _task(name, (official, _prepared(development, test)), Hub(f"wmt/{name}", NESTED, config="{foreign}-en"))


def _task(name: str, layouts: tuple[Parallel, ...], hub: Hub | None) -> Task:
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
    _task(
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
