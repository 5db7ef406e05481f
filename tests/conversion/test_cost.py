"""Costs against counts of the live model's parameters and products."""

import pytest
import torch

from collab_compress import CalibrationOptions, Compression, Solver, compress
from collab_compress.analysis import part_costs
from collab_compress.architectures import find_attention
from collab_compress.attention import SharedConfig
from collab_compress.conversion.cost import dense_macs, dense_parameters
from collab_compress.errors import HeadError


def live(model):
    """Return the parameters of each module's scores, and of its values without the output bias."""
    counts = []
    for site in find_attention(model):
        query, key, value, output = (
            site.part(getattr(site.paths, part)) for part in ("query", "key", "value", "output")
        )
        scores = sum(parameter.numel() for part in (query, key) for _, parameter in part.named_parameters())
        scores += site.module.qk.mixing.numel() if hasattr(site.module, "qk") else 0
        counts.append((scores, sum(p.numel() for _, p in value.named_parameters()) + output.weight.numel()))
    return counts


@pytest.mark.parametrize(("dk", "dv"), [(9, None), (None, 12), (9, 9)])
def test_costs_and_caches_are_those_of_the_live_model(family, dk, dv, make_tiny, calibration):
    model, length = make_tiny(family), 7
    planned = part_costs(model, length, dk=dk, dv=dv)
    scores, values = planned[::2], planned[1::2]
    sites = find_attention(model)
    both = list(zip(scores, values, strict=True))
    assert [cost.name for cost in scores] == [cost.name for cost in values] == [site.name for site in sites]
    before = zip(
        (cost.parameters_before for cost in scores), (cost.parameters_before for cost in values), strict=True
    )
    assert list(before) == live(model)
    compression = Compression(dk=dk, dv=dv, solver=Solver(sweeps=3 if dk else None, refit=False))
    options = CalibrationOptions(length=length)  # for which costs are counted
    report = compress(model, compression, calibration[:2], calibration_options=options)
    assert part_costs(model, length, dk=None if dk is None else 99, dv=None if dv is None else 99) == planned
    for part, costs in (("dk", scores), ("dv", values)):
        for reported, cost in zip(report.of(part), costs, strict=False):
            assert vars(cost).items() <= vars(reported).items()
    assert [(score.parameters_after, value.parameters_after) for score, value in both] == live(model)
    for cost in values:
        assert cost.macs_before == length * 24 * (24 + 24 + length)
        assert cost.macs_after == length * (dv or 24) * (24 + 24 + length)
        assert cost.width == dv

    widths = {}
    for site in sites:
        for part in ("key", "value"):
            path = getattr(site.paths, part)
            widths[site.name, part] = site.part(path).out_features
            if site.family.forward == "stock":  # padded to whole heads
                site.module.get_submodule(path).register_forward_hook(
                    lambda _, args, out, at=(site.name, part): widths.update({at: out.shape[-1]})
                )
    with torch.no_grad():
        model(**calibration[0])
    kinds = {site.name: site.kind for site in sites}
    for costs, part in ((scores, "key"), (values, "value")):
        for cost in costs:
            cached = 0 if kinds[cost.name] == "encoder" else 4  # bytes of a number
            assert cost.cache_before == cached * 24
            assert cost.cache_after == cached * widths[cost.name, part]


def test_half_precision_halves_the_cache(make_tiny):
    (*_, cost) = part_costs(make_tiny("marian").to(torch.bfloat16))
    assert cost.cache_before == 2 * 24


@pytest.mark.parametrize(
    ("width", "heads", "dk", "printed"),
    [(512, 8, 128, (1.05, 0.66, 1.51, 1.09)), (768, 12, 256, (2.36, 1.58, 3.27, 2.65))],
)
def test_a_layer_costs_what_table_1_of_the_paper_says(width, heads, dk, printed):
    """Millions of parameters and hundreds of millions of products, dense and converted, without content biases."""
    length, widths = 128, (width, width)
    form = SharedConfig(heads, width // heads, dk, content_bias=False, reads=dk)
    parameters = dense_parameters(widths, widths, (False, False)), form.parameters(widths)
    macs = dense_macs(widths, widths, length), form.macs(widths, length)
    assert macs[1] == 2 * length * width * dk + heads * length * dk + heads * length * length * dk
    values = 2 * width * width, (2 * width + length) * length * width
    counted = [(count + values[0]) / 1e6 for count in parameters] + [(count + values[1]) / 1e8 for count in macs]
    assert [round(number, 2) for number in counted] == list(printed)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [({"length": 0}, "got length 0"), ({"dk": 0}, "dk 0"), ({"dv": 0}, "got length 128, dv 0; expected at least 1")],
)
def test_what_cannot_be_counted_is_refused(numbers, message, make_tiny):
    with pytest.raises(HeadError, match=message):
        part_costs(make_tiny("bert"), **numbers)
