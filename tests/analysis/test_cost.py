"""Costs against counts of the live model's parameters and products, and the paper's table."""

import pytest
import torch

from collab_compress import CalibrationOptions, Compression, Solver, compress
from collab_compress.analysis import MapCost, layer_cost, module_costs, paper_table_1
from collab_compress.architectures import FAMILIES, find_attention
from collab_compress.errors import HeadError


def live_parameters(site):
    """Parameters of what makes a module's scores."""
    query, key = (site.part(getattr(site.family, side)) for side in ("query", "key"))
    count = sum(parameter.numel() for part in (query, key) for _, parameter in part.named_parameters())
    shared = isinstance(getattr(site.module, "mixing", None), torch.nn.Parameter)
    return count + (site.module.mixing.numel() if shared else 0)


@pytest.mark.parametrize("form", ["shared", "per-head"])
def test_parameters_and_cache_are_those_of_the_live_model(family, form, make_tiny, calibration):
    model = make_tiny(family)
    planned = module_costs(model, dk=9, form=form)
    for site, cost in zip(find_attention(model, FAMILIES), planned, strict=True):
        assert cost.name == site.name
        assert cost.scores.dense.parameters == live_parameters(site)
    options = CalibrationOptions(length=128)  # at which costs are counted
    report = compress(model, Compression(dk=9, form=form), calibration[:2], calibration_options=options)
    assert module_costs(model, dk=99) == planned
    for cost, module in zip(planned, report.modules, strict=True):
        counted = (module.parameters_before, module.parameters_after, module.macs_before, module.macs_after)
        found = (
            cost.scores.dense.parameters,
            cost.scores.converted.parameters,
            cost.scores.dense.macs,
            cost.scores.converted.macs,
        )
        assert found == counted
        assert cost.scores.break_even_length == module.break_even_length
    widths = {}
    for site, cost in zip(find_attention(model, FAMILIES), planned, strict=True):
        assert cost.scores.converted.parameters == live_parameters(site)
        site.part(site.family.key).register_forward_hook(
            lambda _, args, out, name=site.name: widths.update({name: out.shape[-1]})
        )
    with torch.no_grad():
        model(**calibration[0])
    for cost in planned:
        cached = 4 * widths[cost.name] if cost.kind != "encoder" else 0
        assert cost.scores.converted.cache_bytes == cached
        assert cost.scores.dense.cache_bytes == (4 * 24 if cost.kind != "encoder" else 0)


def live_value_parameters(site):
    """Parameters of a module's values and outputs, the output's bias left out."""
    value, output = site.part(site.family.value), site.part(site.family.output)
    return sum(parameter.numel() for _, parameter in value.named_parameters()) + output.weight.numel()


@pytest.mark.parametrize(("dk", "dv"), [(None, 12), (9, 10)])
def test_values_and_their_cache_are_those_of_the_live_model(family, dk, dv, make_tiny, calibration):
    model = make_tiny(family)
    planned = module_costs(model, 7, dk=dk, dv=dv)
    for site, cost in zip(find_attention(model, FAMILIES), planned, strict=True):
        assert cost.values.dense.parameters == live_value_parameters(site)
    report = compress(model, Compression(dk=dk, dv=dv, solver=Solver(refit=False)), calibration[:2])
    assert module_costs(model, 7, dv=99) == planned
    widths = {}
    for site, cost, module in zip(find_attention(model, FAMILIES), planned, report.values, strict=True):
        assert cost.values.width == dv
        assert cost.values.converted.parameters == live_value_parameters(site) == module.parameters_after
        assert cost.values.dense.parameters == module.parameters_before
        assert cost.values.converted.macs == 7 * dv * (24 + 24 + 7)
        assert cost.values.dense.macs == 7 * 24 * (24 + 24 + 7)
        site.part(site.family.value).register_forward_hook(
            lambda _, args, out, name=site.name: widths.update({name: out.shape[-1]})
        )
    with torch.no_grad():
        model(**calibration[0])
    for cost in planned:
        assert cost.values.converted.cache_bytes == (4 * widths[cost.name] if cost.kind != "encoder" else 0)
        assert cost.values.dense.cache_bytes == (4 * 24 if cost.kind != "encoder" else 0)


def test_macs_meet_at_the_break_even_length(bert):
    (cost, _) = module_costs(bert, dk=12)
    below, above = (module_costs(bert, int(cost.scores.break_even_length) + step, dk=12)[0] for step in (0, 1))
    assert below.scores.converted.macs <= below.scores.dense.macs
    assert above.scores.converted.macs > above.scores.dense.macs


def test_without_a_rank_a_dense_module_has_one_form(bert):
    cost = module_costs(bert, 64)[0]
    assert cost.scores == MapCost(None, cost.scores.dense, cost.scores.dense, None)
    assert cost.values == MapCost(None, cost.values.dense, cost.values.dense, None)
    assert cost.scores.dense.macs == 2 * 64 * 24 * 24 + 64 * 64 * 24


def test_half_precision_halves_the_cache(make_tiny):
    sizes = [
        sum(cost.scores.dense.cache_bytes for cost in module_costs(model))
        for model in (make_tiny("marian"), make_tiny("marian").to(torch.bfloat16))
    ]
    assert sizes[0] == 2 * sizes[1] == 4 * 4 * 24  # four modules, four bytes, H·d numbers


def test_table_1_is_the_papers():
    rows = paper_table_1()
    assert [(row.width, row.dk) for row in rows] == [(512, 128), (768, 256)]
    for row in rows:
        found = (
            row.dense.parameters / 1e6, row.collaborative.parameters / 1e6,
            row.dense.macs / 1e8, row.collaborative.macs / 1e8,
        )  # fmt: skip
        assert tuple(round(value, 2) for value in found) == row.printed


def test_a_layer_counts_every_product():
    width, heads, dk, length = 24, 3, 9, 7
    head_width = width // heads
    dense = 4 * length * width * width + heads * length * length * head_width * 2
    assert layer_cost(width, heads, length=length).macs == dense
    scores = 2 * length * width * dk + heads * length * dk + heads * length * length * dk
    rest = 2 * length * width * width + heads * length * length * head_width
    assert layer_cost(width, heads, dk, length).macs == scores + rest
    assert layer_cost(width, heads).parameters == 4 * width * width
    assert layer_cost(width, heads, dk).parameters == 2 * width * dk + heads * dk + 2 * width * width


def test_what_cannot_be_counted_is_refused(bert):
    with pytest.raises(HeadError, match="got length 0"):
        module_costs(bert, 0)
    with pytest.raises(HeadError, match="dk 0"):
        module_costs(bert, dk=0)
    with pytest.raises(HeadError, match="got length 128, dv 0; expected at least 1"):
        module_costs(bert, dv=0)
    with pytest.raises(HeadError, match="unknown form 'half'"):
        module_costs(bert, form="half")
    with pytest.raises(HeadError, match="no multiple of 5 heads"):
        layer_cost(24, 5)
