"""Whatever is looked at, a report has defined numbers or says why it has none."""

from dataclasses import replace

import pytest
import torch
from tiny_families import build, make_rotary

from collab_compress import Compression, Solver, compress
from collab_compress.analysis import module_costs
from collab_compress.architectures import find_attention
from collab_compress.calibration import calibration_batches
from collab_compress.errors import CalibrationError, HeadError
from collab_compress.report import ReportContext, ReportOptions, make_report, render_page, to_json
from collab_compress.report.sections import SECTIONS

QUICK = ReportOptions(lengths=(4,), rounds=2, kernel_tokens=20, head_sequences=3, input_sequences=3)


def checked_report(context):
    """Measure every section; all numbers must be finite, and no word of the page may be `nan`."""
    result = make_report(context)
    to_json(result)  # refuses NaN
    page = render_page(result)
    assert ">nan" not in page
    assert '"nan' not in page
    assert "not measured" not in page
    return result


@pytest.mark.parametrize("family", ["albert", "marian"])
def test_other_families_and_their_conversions(family, make_tiny, make_batch):
    model, converted = make_tiny(family), make_tiny(family)
    batches = [make_batch(family, seed=seed) for seed in range(2)]
    compress(converted, Compression(dk=9, solver=Solver(sweeps=2)), calibration=None)
    report = checked_report(ReportContext(converted, batches, baseline=model, options=QUICK))
    assert {section.name for section in report.sections} == set(SECTIONS) - {"attention_maps"}
    growth = next(t for section in report.sections for t in section.tables if t.name == "growth")
    labels = {"albert": ["0", "1", "2"], "marian": ["encoder 0", "encoder 1", "decoder 0", "cross 0"]}[family]
    assert [row[0] for row in growth.rows][: len(labels)] == labels
    blocks = {"albert": ["0"], "marian": ["encoder 0", "encoder 1", "decoder 0", "decoder 1"]}[family]
    assert [row["layer"] for row in report.table("widths", "dff")] == blocks
    # A converted model is measured as it is, without a suggested dff.
    assert [row["dff"] for row in report.table("cost", "blocks")] == [None] * len(blocks)


@pytest.mark.parametrize(("family", "dk", "dv"), [("bert", None, 9), ("marian", 9, 12)])
def test_narrow_values(family, dk, dv, make_tiny, make_batch):
    model, converted = make_tiny(family), make_tiny(family)
    batches = [make_batch(family, seed=seed) for seed in range(2)]
    compress(converted, Compression(dk=dk, dv=dv), calibration=None)
    report = checked_report(ReportContext(converted, batches, baseline=model, options=QUICK))
    tables = {table.name: table for section in report.sections for table in section.tables}
    for row, cost in zip(tables["values"].rows, module_costs(converted, 128), strict=True):
        dense, narrow = cost.values.dense, cost.values.converted
        numbers = (dv, dense.parameters, narrow.parameters, dense.macs / 1e6, narrow.macs / 1e6)
        assert row[2:] == (*numbers, dense.cache_bytes, narrow.cache_bytes)
    assert ("modules" in tables) == (dk is not None)
    assert len(tables["latency"].rows) == len(tables["values"].rows)
    assert ("mixing" in report.omitted) == (dk is None)
    lines = [line for line in report.highlights if f"at dv = {dv}." in line]
    assert len(lines) == 1
    assert "Values and outputs: " in lines[0]
    planned = make_report(
        ReportContext(model, batches, options=ReportOptions(dk=dk, dv=dv, lengths=(4,), rounds=2)), ("cost",)
    ).sections[0]
    (values,) = [table for table in planned.tables if table.name == "values"]
    assert values.rows == tables["values"].rows
    assert "not measured" not in planned.reading
    assert {table.name for table in planned.tables} == {"layers", "values", "blocks", "latency"} | (
        {"modules"} if dk else set()
    )


def test_images():
    model = build("vit")
    report = checked_report(ReportContext(model, calibration_batches("synthetic", model, sequences=4), options=QUICK))
    latency = next(t for section in report.sections for t in section.tables if t.name == "latency")
    assert {row[1] for row in latency.rows} == {5}  # four patches and one more


def test_one_token():
    model = build("gpt2")
    report = checked_report(ReportContext(model, [{"input_ids": torch.tensor([[3]])}], options=QUICK))
    assert "needs at least 2" in report.omitted["similarity"]
    assert "two sequences at least" in report.omitted["dominance"]
    assert {"diversity", "cost"} == {section.name for section in report.sections}


def test_one_head(bert, context):
    report = checked_report(ReportContext(bert(heads=1, layers=1), context.batches, options=QUICK))
    assert "single head" in report.omitted["similarity"]
    diversity = next(section for section in report.sections if section.name == "diversity")
    assert diversity.tables[0].rows[0][4] is None  # no distance from others
    assert diversity.tables[0].rows[0][8] is None  # no pair


def test_layers_too_wide_together_are_not_compared(context, result, monkeypatch):
    monkeypatch.setattr("collab_compress.report.context.WIDEST", 1)
    report = make_report(ReportContext(context.model, context.batches, options=context.options), ["similarity"])
    rows, expected = report.table("similarity", "heads"), result.table("similarity", "heads")
    assert [row["most similar heads"] for row in rows] == [row["most similar heads"] for row in expected]
    assert [row["CKA, linear"] for row in rows] == pytest.approx([row["CKA, linear"] for row in expected])
    assert not any(picture.title == "Similarity of layers" for picture in report.sections[0].pictures)


def test_models_of_different_depths(bert, context):
    other = bert(layers=1)
    report = make_report(
        ReportContext(context.model, context.batches, baseline=other, options=QUICK), ["similarity", "diversity"]
    )
    similarity, diversity = report.sections
    assert "The two models were not compared: the models have 2 and 1 attention modules" in similarity.reading
    assert "no growth is given" in diversity.reading
    assert [table.name for table in similarity.tables + diversity.tables] == ["heads", "layers"]


def test_what_cannot_be_looked_at_is_refused(context, bert, make_tiny):
    with pytest.raises(HeadError, match="no batches"):
        ReportContext(context.model, [])
    with pytest.raises(HeadError, match="share a tokenizer"):
        ReportContext(context.model, context.batches, baseline=make_tiny("bert"))
    with pytest.raises(HeadError, match=r"unknown section colour; expected some of widths, "):
        make_report(context, ["colour"])
    with pytest.raises(HeadError, match="nothing to show: mixing: heads of a dense model"):
        make_report(context, ["mixing"])
    with pytest.raises(CalibrationError, match=r"cannot run on .* it reads input_ids, .*; pass batches made for it$"):
        make_report(ReportContext(context.model, [{"pixel_values": torch.zeros(1, 3, 8, 8)}]), ["similarity"])


def test_options_that_make_no_sense_are_refused():
    for name, value in {"dk": 0, "kernel_tokens": 3, "rounds": 1, "lengths": (0,)}.items():
        with pytest.raises(HeadError, match=f"{name} (is|are) .*; expected at least"):
            ReportOptions(**{name: value})
    with pytest.raises(HeadError, match=r"lengths is .*; expected numbers of tokens, such as"):
        ReportOptions(lengths=("12",))
    with pytest.raises(HeadError, match="rounds is '3'; expected a whole number"):
        ReportOptions(rounds="3")


def test_progress_is_reported(context):
    steps = []
    watched = replace(context, baseline=None, on_progress=lambda *step: steps.append(step))
    make_report(watched, ["similarity"])
    assert steps == [("heads of <tiny> & small", done, 2) for done in (1, 2)]


def test_first_returns_so_many_sequences(context):
    assert context.sequences == 20
    assert [len(batch["input_ids"]) for batch in context.first(18)] in ([16, 2], [4, 14])
    assert sum(len(batch["input_ids"]) for batch in context.first(99)) == 20
    assert context.tokens == sum(int(batch["attention_mask"].sum()) for batch in context.batches)


@pytest.fixture
def token_batches():
    return [{"input_ids": torch.randint(5, 20, (2, 6), generator=torch.Generator().manual_seed(0))}]


def test_a_rotary_model(token_batches):
    """Sections that need products of query and key weights are left out with the reason; the rest is shown."""
    report = checked_report(ReportContext(make_rotary("llama"), token_batches, options=QUICK))
    sections = {section.name: section for section in report.sections}
    assert {"widths", "diversity", "dominance"} <= sections.keys()
    assert "dk stays as it is: what queries and keys with a rotary embedding lose" in sections["widths"].reading
    assert [table.name for table in sections["widths"].tables] == ["dv", "dff"]


@pytest.mark.parametrize(("name", "part"), [("llama", "dk"), ("qwen3", "dv")])
def test_grouped_queries_are_timed_at_a_width_that_a_conversion_takes(name, part, token_batches):
    model = make_rotary(name)
    report = make_report(ReportContext(model, token_batches, options=QUICK), ["cost"])
    width = find_attention(model)[0].key_value_width // 3
    assert f"modules with {part} = {width}, " in report.sections[0].reading
    assert "Latency was not measured" not in report.sections[0].reading


def test_a_mixture_of_experts(token_batches):
    """Its blocks are left out, and the page says why."""
    report = make_report(ReportContext(make_rotary("mixtral"), token_batches, options=QUICK), ["widths", "cost"])
    widths, cost = report.sections
    assert "dff stays as it is: MixtralForCausalLM has no feed-forward block of plain linear" in widths.reading
    assert "Feed-forward blocks were not counted: MixtralForCausalLM has no feed-forward block" in cost.reading
    assert [table.name for table in widths.tables] == ["dv"]
    assert [row["part"] for row in report.table("cost", "layers")] == ["queries and keys", "values and outputs"]


def test_a_dff_beyond_the_blocks_is_refused(context):
    wide = ReportContext(context.model, context.batches, options=ReportOptions(dff=10_000))
    with pytest.raises(HeadError, match=r"nothing to show: cost: .*reads \d+ neurons, and dff is 10000; pass up to"):
        make_report(wide, ["cost"])
