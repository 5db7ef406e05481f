"""The papers' numbers, checked by what the papers' own texts and other tables say of them; and ours beside them."""

import math
from statistics import fmean

import pytest
import yaml
from collab_compress_glue_runs.tasks import TASKS
from printed import PRINTED, beside
from quantities import QUANTITIES

TABLES = {
    (paper, name.removeprefix("Table ")): table
    for paper, about in yaml.safe_load(PRINTED.read_text(encoding="utf-8")).items()
    for name, table in about["tables"].items()
}
MEASURES = {
    "svcca": {"layers": {"encoder": [0.2, 0.4], "cross": [0.9]}, "curve": {"encoder": [0.9, 0.1]}},
    "cka": {"layers": {"encoder": [0.1, 0.3]}},
    "discrepancy": {"encoder": [{"cosine": 1.0, "l2": 2.0}, {"cosine": 3.0, "l2": 4.0}]},
    "dominance": {"encoder": 78.0, "score": 80.0},
    "pruning": {"shares": [0.0, 0.25, 0.5, 1.0], "scores": [80.0, 79.0, 75.0, 50.0]},
}


def scores(paper, table):
    """Return the numbers of a table, row by row."""
    rows = (row["scores"] for row in TABLES[paper, table]["rows"])
    flat = ([score if isinstance(score, list) else [score] for score in row] for row in rows)
    return [[n for printed in row for n in printed if n is not None] for row in flat]


def models(paper, table):
    return [row["model"] for row in TABLES[paper, table]["rows"]]


def test_the_tables_are_those_of_the_papers():
    assert list(TABLES) == [
        *(("collaborate", name) for name in ("1", "2", "Figure 3")),
        *(("rotation", name) for name in "2345"),
        *(("diversity", name) for name in "1234567"),
        ("bhattacharyya", "Section 4"),
        *(("drophead", name) for name in "1234567"),
    ]


def test_columns_of_tasks_are_named_as_ours():
    kinds = {"BLEU": "translation", "perplexity": "language modelling"}
    ours = {name.split()[0] for table in TABLES.values() for name in table["columns"]} & TASKS.keys()
    assert len(ours) == 10
    for table in TABLES.values():
        for name, metric in table["columns"].items():
            if name in TASKS or (name.split()[0] in TASKS and "perplexity" not in name):
                kind = TASKS[name.split()[0]].kind
                assert kinds.get(metric, kind) == kind, name


def test_collaborate_table_1_is_what_the_layers_cost():
    def cost(width, heads, dk=None, length=128):
        """Return a layer's parameters in millions and multiply-accumulates in 1e8, without the content bias."""
        values = 2 * width * width
        if dk is None:
            return 2 * values / 1e6, (2 * values * length + 2 * length**2 * width) / 1e8
        queries_and_keys, attention = 2 * width * dk, length**2 * (heads * dk + width)
        extra = heads * dk
        macs = length * (queries_and_keys + extra + values) + attention
        return (queries_and_keys + extra + values) / 1e6, macs / 1e8

    expected = [cost(512, 8), cost(512, 8, 128), cost(768, 12), cost(768, 12, 256)]
    for (parameters, flops, _), (own_parameters, own_flops) in zip(scores("collaborate", "1"), expected, strict=True):
        assert parameters == round(own_parameters, 2)
        assert flops == pytest.approx(own_flops, abs=0.0051)


def test_collaborate_table_2_averages_eleven_figures():
    table = TABLES["collaborate", "2"]
    gaps = []
    for row, printed in zip(table["rows"], scores("collaborate", "2"), strict=True):
        assert len(printed) == 11
        assert row["average"] == pytest.approx(math.fsum(printed) / 11, abs=0.06)
        means = [fmean(score) if isinstance(score, list) else score for score in row["scores"]]
        gaps.append(row["average"] - fmean(means))
    assert (round(min(gaps), 1), round(max(gaps), 1)) == (1.7, 2.2)


def test_collaborate_table_2_parameters():
    """A converted layer has 2·768·(768 − R) weights less; BERT has 12 layers, DistilBERT 6, ALBERT one."""
    rows = {(row["model"], row["stage"]): row["parameters"] for row in TABLES["collaborate", "2"]["rows"]}
    layers = {"BERT-base": 12, "DistilBERT": 6, "ALBERT": 1}
    dense = {"BERT-base": rows["BERT-base", "dk768-again"], "DistilBERT": 66.4, "ALBERT": 11.7}
    for (model, stage), parameters in rows.items():
        if stage != "tuned":
            dk = int(stage.removeprefix("dk").removesuffix("-again"))
            assert parameters == pytest.approx(dense[model] - layers[model] * 2 * 768 * (768 - dk) / 1e6, abs=0.11)


def test_rotation_gains_are_those_of_the_text():
    baseline, alphas = scores("rotation", "2")[0], scores("rotation", "3")[0]
    manual, dynamic = scores("rotation", "4"), [row[0] for row in scores("rotation", "5")]
    assert alphas[0] - baseline[0] == pytest.approx(0.53)
    assert manual[1][1] - manual[0][1] == pytest.approx(0.38)
    assert max(dynamic) - dynamic[3] == pytest.approx(0.25)
    assert manual[0] == baseline[::2]
    assert dynamic[3] == baseline[0]


def test_rotation_parameters_contradict_themselves_as_noted():
    (eight, sixteen), (more_eight, more_sixteen) = scores("rotation", "2"), scores("rotation", "3")
    attention = 18
    assert {more_eight[1] - eight[1], more_eight[3] - eight[3]} == {attention * (64 + 8)}
    assert more_sixteen[1] == sixteen[1]
    assert more_sixteen[3] == sixteen[1] + attention * (16 * 16 + 16)


def test_diversity_tables_agree_but_for_what_is_noted():
    sizes = dict(zip(models("diversity", "1"), scores("diversity", "1"), strict=True))
    assert sizes["Transformer d=512, H=8"][0] == scores("diversity", "4")[0][0]
    similarity = dict(zip(models("diversity", "3"), scores("diversity", "3"), strict=True))
    assert similarity["Transformer d=512, H=8"][1:] == [0.419, 0.197]
    assert scores("diversity", "5")[0] == [0.397, 0.199]
    for model, (width, *_) in similarity.items():
        d, heads = (int(part.split("=")[1]) for part in model.removeprefix("Transformer ").split(", "))
        assert width == d / heads
    assert min(scores("diversity", "7"))[0] == scores("diversity", "7")[3][0]


def test_drophead_tables_agree_but_for_what_is_noted():
    first = {row["method"]: row["scores"][0] for row in TABLES["drophead", "1"]["rows"] if "more" not in row["model"]}
    fifth, sixth, seventh = ([row[0] for row in scores("drophead", table)] for table in "567")
    assert first["ours (reproduced)"] == fifth[0] == 28.7
    assert sixth[0] == 28.6
    assert {first["+ Scheduled DropHead"]} == {fifth[2], sixth[4], seventh[3]}
    assert first["+ DropHead"] == seventh[0]


def test_contradictions_have_notes():
    noted = {key for key, table in TABLES.items() if "note" in table}
    assert noted >= {
        ("collaborate", "2"),
        ("rotation", "3"),
        ("drophead", "1"),
        ("drophead", "6"),
    }
    assert noted >= {("diversity", "3"), ("diversity", "5")}


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ("svcca", 0.9),  # of the last layer between encoder and decoder
        ("cka", 0.3),  # of the last layer
        ("l2", 3.0),
        ("dominant encoder", -2.0),
        ("dominant cross", None),
        ("half pruned", -5.0),
        ("perplexity", 12.5),
        ("parameters", 1000),
        ("task loss", 3.0),
        ("training overlap", 0.25),
        ("score", 80.0),
    ],
)
def test_quantities(write, read, of, expected):
    history = [{"task_loss": 4.0, "epoch": 1}, {"task_loss": 3.0, "bhattacharyya": 0.25, "epoch": 2}, {"epoch": 2}]
    metrics = {"validation": {"perplexity": 9.0}, "test": {"perplexity": 12.5}}
    more = {"history": history, "metrics": metrics, "parameters": 1000}
    path = write("plain", [80.0], measures=MEASURES, **more)
    (value,) = read(path)[of]
    assert value == pytest.approx(math.nan if expected is None else expected, nan_ok=True)


def test_what_stands_beside_the_papers_is_known():
    for table in TABLES.values():
        assert set(table.get("of", ())) <= QUANTITIES.keys()
        assert {task.split()[0] for task in table.get("beside", ())} <= TASKS.keys()
        assert "beside" not in table or any("ours" in row for row in table["rows"])


def test_ours_stand_beside_the_papers(write, read):
    rows = beside(TABLES["collaborate", "2"], read(write("plain", [80.0, 82.0])))
    assert list(rows["score, mrpc, minilm"].dropna()) == ["81 ± 1.4 (plain)"]
    assert rows["mrpc"][0] == "[88.8, 83.8]"
