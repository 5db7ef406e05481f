"""A page for each paper: every figure is drawn or marked with what it needs, and numbers stand beside the paper's."""

import json
import math
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from collab_compress_glue_runs.experiments.figures import read_figures
from collab_compress_glue_runs.experiments.pages import paper_pages, write_pages
from collab_compress_glue_runs.experiments.papers import read_papers
from collab_compress_glue_runs.experiments.results import read_results
from collab_compress_glue_runs.experiments.verdicts import OUTCOMES, read_claims
from scipy import stats
from tiny_recipes import make_record

from collab_compress.errors import CollabCompressError

FIGURES = read_figures()
PAPERS = tuple(dict.fromkeys(table.paper for table in read_papers()))
SWEEPS = Path(__file__).parents[3] / "glue_runs" / "sweeps"
FROM_A_MODEL = {"collaborate": {"Figure 1", "Figure 4"}, "diversity": {"Figure 1", "Figure 2"}}
"""Figures that no record has, but a model that is looked at."""


def measured(seed, of=1.0):
    matrix = [[1.0, 0.1 * of], [-0.1, 0.9]]
    return {
        "svcca": {"layers": {"encoder": [0.5 * of]}, "curve": {"encoder": [0.9, 0.4 + seed / 10]}},
        "cka": {"layers": {"encoder": [0.3 * of]}},
        "confidence": {"encoder": [[0.5, 0.6], [0.7, 0.8]], "cross": [[0.1], [0.2, 0.3]]},
        "discrepancy": {"encoder": [{"difference": 2.0 * of, "l2": 4.0}, {"difference": 1.0, "l2": 2.0 * of}]},
        "overlap": {"encoder": [0.5]},
        "dominance": {"encoder": 17.0, "score": 20.0},
        "pruning": {"shares": [0.0, 0.5, 1.0], "scores": [20.0, 15.0 + seed, 1.0], "random": [20.0, 5.0 + seed, 1.0]},
        "mixing": {"encoder": [[[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]]]},
        "alphas": {"encoder": [matrix]},
    }


def trained(method, score, seed, *, task="multi30k", heads=None, attention=None):
    """Return the record of a model that was trained from scratch."""
    penalties = {"penalties": [{"name": "bhattacharyya", "weight": float(method == "bhattacharyya")}]}
    history = [
        {"epoch": 1, "step": 10, "loss": 4.0, "task_loss": 3.0 + seed, "bhattacharyya": 1.0, "eval_bleu": 9.5},
        {"epoch": 2, "step": 20, "loss": 2.0, "task_loss": 1.5 + seed, "bhattacharyya": 0.5, "eval_bleu": 19.0},
    ]
    recipe = {"fresh": {"width": 32, "attention": attention}, "heads": heads or penalties}
    recipe["translation"] = {"source": "de", "target": "en"}
    more = {"parameters": 1000, "history": history, "recipe": recipe}
    more["measures"] = measured(seed, 1.1 if method == "alphas" else 1.0)
    more["metrics"] = {"validation": {"bleu": 20.0, "perplexity": 9.0}}
    return make_record(task, method, "tuned", seed, score, **more)


def converted(dk, score, seed, again=False):
    stage = f"dk{dk}-again" if again else f"dk{dk}" if dk else "tuned"
    recipe = {"model": "minilm", "compression": dk and {"dk": dk}}
    return make_record("mrpc", "plain", stage, seed, score, recipe=recipe)


SCORES = {"plain": [20.0, 21.0, 20.4], "alphas": [19.0, 20.5, 20.1]}
"""On Multi30k."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the fewest records for which every figure is drawn."""
    alphas = {"alphas": {"growth_weight": 40.0}}
    records = []
    for seed in range(3):
        records += [
            trained("plain", SCORES["plain"][seed], seed),
            trained("alphas", SCORES["alphas"][seed], seed, heads=alphas),
            trained("alphas-alone", 20.0, seed, heads={"alphas": {"growth_weight": 0.0}}),
            trained("bhattacharyya", 18.0, seed),
            trained("drophead", 18.0, seed, heads={"drophead": [{"p": 0.2}]}),
            trained("quarter", 20.0, seed, attention={"dk": 8}),
            trained("narrow-quarter", 19.0, seed, attention={"dk": 8, "train_mixing": False}),
            trained("d64-h2", 19.0, seed, task="trec", heads={"penalties": []}),
            converted(None, 80.0, seed),
            converted(128, 79.0, seed),
            converted(64, 70.0, seed),
            converted(64, 78.0 + seed, seed, again=True),
            make_record("mrpc", "plain", "dense-again", seed, 82.0 - seed, conversion=None),
        ]
    return read(tmp_path_factory.mktemp("results"), records)


@pytest.fixture(scope="module")
def pages(results):
    return paper_pages(results)


@pytest.fixture(scope="module")
def few_pages(tmp_path_factory):
    return paper_pages(read(tmp_path_factory.mktemp("few"), [converted(None, 80.0, 0)]))


def read(tmp_path, records):
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_results(path)


def drawn(findings):
    return [picture for section in findings.sections for picture in section.pictures]


def needing(findings):
    return {name.partition(",")[0] for name in findings.omitted if name.startswith("Figure")}


def rows(findings, name):
    """Lines of a section's table; of several columns of one name, the one after "ours" is `change`."""
    (section,) = (section for section in findings.sections if section.name == name)
    (table,) = section.tables
    return [column.name for column in table.columns], table.rows


@pytest.mark.parametrize("paper", PAPERS)
def test_every_figure_is_drawn_or_marked(pages, few_pages, paper):
    findings = pages[paper]
    assert needing(findings) == FROM_A_MODEL.get(paper, set())
    sources = " ".join(picture.source for picture in drawn(findings))
    for figure in FIGURES[paper]:
        number = figure.name.replace("Figure ", "Fig. ")
        assert (number in sources) != (figure.name in needing(findings))
    few = few_pages[paper]
    schedules = {"Figure 2"} if paper == "drophead" else set()  # they need no record
    assert needing(few) == {figure.name for figure in FIGURES[paper]} - schedules
    assert all(reason.startswith(("needs: ", "nothing: ")) for reason in few.omitted.values())


def test_random_heads_stand_beside_a_pruning_curve(tmp_path):
    records = [trained("plain", 20.0, seed) for seed in range(2)]
    before = trained("drophead", 18.0, 0, heads={"drophead": [{"p": 0.2}]})  # of a record without random heads
    del before["measures"]["pruning"]["random"]
    pictures = {shown.source: shown for shown in drawn(paper_pages(read(tmp_path, [*records, before]))["drophead"])}
    (panel,) = pictures["DropHead, Fig. 3"].panels
    assert {curve.name: (curve.y, curve.weight) for curve in panel.curves} == {
        "plain": ((20.0, 15.5, 1.0), "line"),
        "plain, random heads": ((20.0, 5.5, 1.0), "dashed"),
        "drophead": ((20.0, 15.0, 1.0), "line"),
    }


def test_what_is_no_number_is_left_empty(tmp_path):
    record = trained("alphas", math.nan, 0, heads={"alphas": {"growth_weight": 0.0}})
    for name in ("alphas", "mixing", "confidence"):
        record["measures"][name] = {"encoder": [[[math.nan, 1.0]] if name != "confidence" else [math.nan, 1.0]]}
    record["history"][-1] |= {"task_loss": math.nan, "bhattacharyya": math.nan, "loss": math.inf}
    pages = paper_pages(read(tmp_path, [record, trained("plain", math.nan, 0)]))
    maps = [heat for picture in drawn(pages["rotation"]) for heat in getattr(picture, "maps", ())]
    assert (None, 1.0) in {row for heat in maps for row in heat.values}
    write_pages(read(tmp_path, [record]), tmp_path / "pages")


def test_ours_stand_beside_the_papers(pages):
    columns, lines = rows(pages["rotation"], "table_3")
    place = columns.index("ours: multi30k de-en")
    eight = next(line for line in lines if line[0] == "Transformer 8 heads")
    assert eight[columns.index("iwslt14 de-en")] == "35.04"
    mean, deviation = statistics.fmean(SCORES["alphas"]), statistics.stdev(SCORES["alphas"])
    assert eight[place] == f"{mean:.1f} ± {deviation:.3f} (3), alphas"
    change = [one - other for one, other in zip(SCORES["alphas"], SCORES["plain"], strict=True)]
    low, high = stats.ttest_rel(SCORES["alphas"], SCORES["plain"]).confidence_interval(0.95)
    assert eight[place + 1] == f"−{-statistics.fmean(change):.3f} ± {(high - low) / 2:.3f} (3)"
    sixteen = next(line for line in lines if line[0] == "Transformer 16 heads")
    assert sixteen[place : place + 2] == (None, None)
    _, baseline = rows(pages["rotation"], "table_4")
    assert baseline[0][-2:] == ("20.5 ± 0.503 (3), plain", None)


def test_the_first_of_several_names_that_has_records_counts(pages):
    columns, lines = rows(pages["collaborate"], "table_2")
    place = columns.index("ours: mrpc")
    assert columns[place - 1] == "mrpc"
    by_stage = {line[2]: line[place] for line in lines if line[0] == "BERT-base"}
    assert by_stage["dk128-again"] == "79.0 ± 1.00 (3), plain/dk64-again"
    change = next(line[place + 1] for line in lines if line[0] == "BERT-base" and line[2] == "dk128-again")
    assert change == "−2.00 ± 4.97 (3)"  # to the dense model tuned again: −4, −2 and 0
    assert by_stage["dk384-again"] is None


def test_growth_is_against_the_plain_model_of_the_same_seed(pages):
    pictures = {picture.source: picture for picture in drawn(pages["rotation"])}
    for source, layers in (("Rotation, Fig. 6", (10.0, 0.0)), ("Rotation, Fig. 7", (0.0, 10.0))):
        (panel,) = pictures[source].panels
        curve = next(curve for curve in panel.curves if curve.name == "alphas")
        assert (panel.title, curve.x, curve.y) == ("encoder", (0.0, 1.0), pytest.approx(layers))


def test_curves_are_means_over_seeds(pages):
    pictures = {picture.source: picture for picture in drawn(pages["bhattacharyya"])}
    (panel,) = pictures["Bhattacharyya, Fig. 2"].panels
    assert {curve.name for curve in panel.curves} >= {"plain", "bhattacharyya"}
    assert panel.curves[0].y == pytest.approx((3.0 + 1.0, 1.5 + 1.0))
    losses = {curve.name for curve in pictures["Bhattacharyya, Fig. 4"].panels[0].curves}
    assert losses == {"cross-entropy", "overlap", "total"}


@pytest.mark.parametrize(("angle", "above"), [(0.0, False), (math.pi / 2, True)])
def test_growth_is_above_zero_where_heads_move_apart(tmp_path, angle, above):
    """Two heads at 45 degrees in the plain model, alike or orthogonal in the other; by a loop over pairs."""

    def discrepancy(theta):
        heads = [(1.0, 0.0), (math.cos(theta), math.sin(theta))]
        pairs = [(one, other) for one in heads for other in heads]
        difference = sum(1 - one[0] * other[0] - one[1] * other[1] for one, other in pairs)
        return {"encoder": [{"difference": difference, "l2": sum(math.dist(one, other) for one, other in pairs)}]}

    plain, mixed = trained("plain", 20.0, 0), trained("alphas", 20.0, 0, heads={"alphas": {"growth_weight": 0.01}})
    plain["measures"]["discrepancy"] = discrepancy(math.pi / 4)
    mixed["measures"]["discrepancy"] = discrepancy(angle)
    pictures = {picture.source: picture for picture in drawn(paper_pages(read(tmp_path, [plain, mixed]))["rotation"])}
    for source in ("Rotation, Fig. 6", "Rotation, Fig. 7"):
        [growth] = pictures[source].panels[0].curves[0].y
        assert (growth > 0) == above


def test_every_logged_bleu_is_drawn(tmp_path):
    record = trained("plain", 20.0, 0)
    record["history"][-1]["eval_bleu"] = 1.2
    pages = paper_pages(read(tmp_path, [record]))
    [picture] = [shown for shown in drawn(pages["bhattacharyya"]) if shown.source == "Bhattacharyya, Fig. 5"]
    assert picture.panels[0].curves[0].y[-1] == 1.2


def test_scores_against_width(pages):
    pictures = [picture for picture in drawn(pages["collaborate"]) if "shared width" in picture.title]
    (panel,) = pictures[0].panels
    curves = {curve.name: (curve.x, curve.y) for curve in panel.curves}
    assert curves["converted"] == ((64.0, 128.0), (70.0, 79.0))
    assert curves["converted, fine-tuned again"] == ((64.0,), (79.0,))
    assert curves["dense"] == ((64.0, 128.0), (80.0, 80.0))
    (picture,) = (picture for picture in drawn(pages["collaborate"]) if "against width" in picture.title)
    widths = {curve.name: curve.x for curve in picture.panels[0].curves}
    assert widths == {"concatenated": (8.0, 32.0), "shared": (8.0,)}


def test_the_index_counts(pages):
    columns, lines = rows(pages["index"], "papers")
    counted = {line[0]: dict(zip(columns, line, strict=True)) for line in lines}
    assert set(counted) == set(PAPERS)
    for paper, line in counted.items():
        assert line["rows in its tables"] == sum(len(table.rows) for table in read_papers() if table.paper == paper)
        assert line["figures drawn"] + line["figures that need more"] == len(FIGURES[paper])
    assert sum(counted["rotation"][outcome] for outcome in OUTCOMES) == len(read_claims()["rotation"])
    assert counted["rotation"]["rows of ours, 5 seeds or more"] == 0


class Page(HTMLParser):
    """The addresses in a page."""

    def __init__(self, text):
        super().__init__()
        self.fetched = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.fetched += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]


def test_pages_are_written_and_link_to_each_other_only(results, tmp_path):
    write_pages(results, tmp_path / "pages")
    names = {f"{name}.html" for name in ("index", *PAPERS)}
    assert {path.name for path in (tmp_path / "pages").iterdir()} == names
    for name in names:
        page = Page((tmp_path / "pages" / name).read_text(encoding="utf-8"))
        assert {link for link in page.fetched if not link.startswith(("#", "data:"))} == names
    with pytest.raises(CollabCompressError, match="exists"):
        write_pages(results, tmp_path / "pages")


def test_sweeps_that_are_named_are_there():
    named = [table.sweep for table in read_papers() if table.sweep]
    named += [
        words
        for figures in FIGURES.values()
        for figure in figures
        for words in re.findall(r"collab-sweep ([^`]*)", figure.needs)
    ]
    assert len(named) > len(PAPERS)
    for words in named:
        file, _, scale = words.partition(" scale=")
        scales = yaml.safe_load((SWEEPS / file).read_text(encoding="utf-8"))["scales"]
        assert not scale or scale in scales, words
