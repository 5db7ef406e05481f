"""Whatever is looked at, a report has defined numbers or says why it has none."""

import json

import pytest
import torch
from tiny_families import build, inputs, make_rotary

from collab_compress import Compression, Solver, compress
from collab_compress.analysis import part_costs
from collab_compress.architectures import find_attention
from collab_compress.errors import CalibrationError, HeadError
from collab_compress.options import SECTION_NAMES
from collab_compress.report import ReportOptions, make_report, render_page, to_json
from collab_compress.report.result import take_sequences

QUICK = ReportOptions(lengths=(4,), rounds=2, head_sequences=3, input_sequences=3)


def checked_report(model, batches, **arguments):
    """Measure every section; no word of the page may be `nan`, and latency is measured."""
    result = make_report(model, batches, options=QUICK, **arguments)
    json.loads(to_json(result), parse_constant=pytest.fail)
    page = render_page(result)
    assert ">nan" not in page
    assert '"nan' not in page
    return result


@pytest.mark.parametrize(
    ("family", "dk", "dv"), [("albert", 9, None), ("marian", 9, None), ("bert", None, 9), ("marian", 9, 12)]
)
def test_families_and_their_conversions(family, dk, dv, make_tiny, make_batch):
    model, converted = make_tiny(family), make_tiny(family)
    batches = [make_batch(family, seed=seed) for seed in range(2)]
    compress(converted, Compression(dk=dk, dv=dv, solver=Solver(sweeps=2 if dk else None)), calibration=None)
    report = checked_report(converted, batches, baseline=model)
    missing = {"attention_maps"} if dk else {"attention_maps", "mixing"}
    assert report.sections.keys() == set(SECTION_NAMES) - missing
    assert "not measured" not in report.sections["cost"].reading
    layers = {
        "albert": ["0", "1", "2"],
        "bert": ["0", "1"],
        "marian": ["encoder 0", "encoder 1", "decoder 0", "cross 0"],
    }[family]
    labels = [row["layer"] for row in report.sections["diversity"].tables["layers"].rows]
    assert labels[: len(layers)] == layers
    modules = report.sections["cost"].tables["modules"].rows
    blocks = [row for row in modules if row["part"] == "feed-forward blocks"]
    expected = {"albert": ["0"], "bert": ["0", "1"], "marian": ["encoder 0", "encoder 1", "decoder 0", "decoder 1"]}
    assert [row["layer"] for row in blocks] == expected[family]
    assert {row["width"] for row in blocks} == {None}  # measured as it is, without a suggested dff
    values = [row for row in modules if row["part"] == "values and outputs"]
    for row, cost in zip(values, part_costs(converted, 128)[1::2], strict=True):
        counted = [cost.parameters_before, cost.parameters_after, cost.cache_before, cost.cache_after]
        assert [*row.values()][3:] == [dv, cost.macs_before / 1e6, cost.macs_after / 1e6, *counted]


def test_images():
    report = checked_report(build("vit"), [inputs("vit", seed) for seed in range(2)])
    assert "Latency was not measured: ViTModel reads no tokens" in report.sections["cost"].reading
    assert {"widths", "similarity", "patterns", "dominance"} <= report.sections.keys()


def test_one_token():
    report = checked_report(build("gpt2"), [{"input_ids": torch.tensor([[3]])}])
    assert "needs at least 2" in report.omitted["similarity"]
    assert "two sequences at least" in report.omitted["dominance"]
    assert report.sections.keys() == {"diversity", "cost"}


def test_one_head(bert, batches):
    report = checked_report(bert(heads=1, layers=1), batches)
    assert "single head" in report.omitted["similarity"]
    (row,) = json.loads(to_json(report))["sections"]["diversity"]["tables"]["layers"]["rows"]
    assert row["AVG_L2, mean"] is None  # no distance from others
    assert row["Bhattacharyya"] is None


def test_models_of_different_depths(model, bert, batches):
    report = make_report(model, batches, ["similarity", "diversity"], baseline=bert(layers=1))
    similarity, diversity = report.sections.values()
    assert "The two models were not compared: the models ran 2 and 1 attention modules" in similarity.reading
    assert [*similarity.tables] == ["heads"]
    assert [row["model"] for row in diversity.tables["layers"].rows] == ["model", "model", "baseline"]


def test_what_cannot_be_looked_at_is_refused(model, batches, make_tiny):
    for message, arguments in (
        ("no batches", (model, [])),
        (r"unknown section colour; expected some of widths, ", (model, batches, ["colour"])),
        ("nothing to show: mixing: heads of a dense model", (model, batches, ["mixing"])),
    ):
        with pytest.raises(HeadError, match=message):
            make_report(*arguments)
    with pytest.raises(HeadError, match="share a tokenizer"):
        make_report(model, batches, baseline=make_tiny("bert"))
    with pytest.raises(HeadError, match=r"nothing to show: cost: .*reads \d+ neurons, and dff is 10000; pass up to"):
        make_report(model, batches, ["cost"], options=ReportOptions(dff=10_000))
    with pytest.raises(CalibrationError, match=r"cannot run on .* it reads input_ids, .*; pass batches made for it$"):
        make_report(model, [{"pixel_values": torch.zeros(1, 3, 8, 8)}], ["similarity"])


def test_options_that_make_no_sense_are_refused():
    for name, value in {"dk": 0, "rounds": 1, "lengths": (0,)}.items():
        with pytest.raises(HeadError, match=f"{name} (is|are) .*; expected at least"):
            ReportOptions(**{name: value})
    with pytest.raises(HeadError, match=r"lengths is .*; expected numbers of tokens, such as"):
        ReportOptions(lengths=("12",))
    with pytest.raises(HeadError, match="rounds is '3'; expected a whole number"):
        ReportOptions(rounds="3")


def test_progress_is_reported(model, batches):
    steps = []
    make_report(model, batches, ["similarity"], on_progress=lambda *step: steps.append(step))
    assert steps == [("similarity", 0, None), *(("heads", done + 1, len(batches)) for done in range(len(batches)))]


def test_first_returns_so_many_sequences(batches):
    assert [sum(len(batch["input_ids"]) for batch in take_sequences(batches, count)) for count in (18, 99)] == [
        18,
        20,
    ]
    whole = {**batches[0], "extra": torch.ones(1)}  # of another length, so it cannot be divided
    assert take_sequences([whole, *batches], 2) == [whole]


@pytest.fixture
def token_batches():
    return [{"input_ids": torch.randint(5, 20, (2, 6), generator=torch.Generator().manual_seed(0))}]


def test_a_rotary_model(token_batches):
    """Sections that need products of query and key weights are left out with the reason; the rest is shown."""
    report = checked_report(make_rotary("llama"), token_batches)
    widths = report.sections["widths"]
    assert {"diversity", "dominance"} <= report.sections.keys()
    assert "dk stays as it is: what queries and keys with a rotary embedding lose" in widths.reading
    assert [*widths.tables] == ["dv", "dff"]


@pytest.mark.parametrize(("name", "part"), [("llama", "dk"), ("qwen3", "dv")])
def test_grouped_queries_are_timed_at_a_width_that_a_conversion_takes(name, part, token_batches):
    model = make_rotary(name)
    reading = make_report(model, token_batches, ["cost"], options=QUICK).sections["cost"].reading
    assert f"layers with {part} = {find_attention(model)[0].key_value_width // 3}, " in reading
    assert "Latency was not measured" not in reading


def test_a_mixture_of_experts(token_batches):
    """Its blocks are left out, and the page says why."""
    report = make_report(make_rotary("mixtral"), token_batches, ["widths", "cost"], options=QUICK)
    widths, cost = report.sections.values()
    assert "dff stays as it is: MixtralForCausalLM has no feed-forward block of plain linear" in widths.reading
    assert "Feed-forward blocks were not counted: MixtralForCausalLM has no feed-forward block" in cost.reading
    assert [*widths.tables] == ["dv"]
    assert [row["part"] for row in cost.tables["layers"].rows] == ["queries and keys", "values and outputs"]
