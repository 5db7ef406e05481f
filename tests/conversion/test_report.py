"""Costs against the paper's Table 1 and against counting; reports as text and as tables."""

from math import inf

import pytest
import torch
from torch import nn

from collab_compress import Compression, compress
from collab_compress.attention import PerHeadScores, SharedScores
from collab_compress.attention.projections import PaddedProjection
from collab_compress.conversion.report import dense_macs, dense_parameters


def shared(heads, head_width, dk, content):
    return SharedScores(heads, head_width, "query", "key", dk, content)


def per_head(heads, head_width, dk, content):
    return PerHeadScores(heads, head_width, "query", "key", dk, content)


@pytest.mark.parametrize(
    ("width", "heads", "dk", "parameters", "macs"),
    [
        (512, 8, 128, (1.05e6, 0.66e6), (1.51e8, 1.09e8)),
        (768, 12, 256, (2.36e6, 1.58e6), (3.27e8, 2.65e8)),
    ],
)
def test_whole_layer_equals_table_1(width, heads, dk, parameters, macs):
    """At T = 128; the table includes values and the output projection, but neither biases nor v."""
    length, head_width = 128, width // heads
    widths, form = (width, width), shared(heads, head_width, dk, False)
    rest = 2 * width**2
    rest_macs = 2 * length * width**2 + length**2 * width
    assert rest + dense_parameters(widths, widths, (False, False)) == pytest.approx(parameters[0], rel=6e-3)
    assert rest + form.parameters(widths) == pytest.approx(parameters[1], rel=6e-3)
    assert rest_macs + dense_macs(widths, widths, length) == pytest.approx(macs[0], rel=6e-3)
    assert rest_macs + form.macs(widths, length) == pytest.approx(macs[1], rel=1e-2)


def test_parameters_are_those_of_the_modules():
    modules = [PaddedProjection(24, 13, 8), PaddedProjection(24, 13, 8, content_biases=3)]
    count = sum(parameter.numel() for module in modules for parameter in module.parameters()) + 3 * 13
    assert shared(3, 8, 13, True).parameters((24, 24)) == count
    dense = 2 * sum(parameter.numel() for parameter in nn.Linear(24, 24).parameters())
    assert dense_parameters((24, 24), (24, 24), (True, True)) == dense


@pytest.mark.parametrize(("dk", "length"), [(384, 152), (256, 340), (128, 1278)])
def test_break_even_of_bert_base(dk, length):
    assert int(shared(12, 64, dk, False).break_even((768, 768))) == length


@pytest.mark.parametrize("content", [False, True])
@pytest.mark.parametrize("dk", [40, 96, 200])
def test_break_even_is_where_the_costs_cross(dk, content):
    length = shared(6, 16, dk, content).break_even((96, 96))
    before, after = int(length), int(length) + 1
    cost = [
        shared(6, 16, dk, content).macs((96, 96), tokens) - dense_macs((96, 96), (96, 96), tokens)
        for tokens in (before, after)
    ]
    assert cost[0] <= 0 < cost[1]


def test_break_even_at_the_borders():
    assert shared(6, 16, 16, False).break_even((96, 96)) == inf
    assert shared(6, 16, 96, False).break_even((96, 96)) == 0
    assert torch.isfinite(torch.tensor(shared(6, 16, 17, True).break_even((96, 96))))


def test_heads_that_share_no_channels():
    sizes, tokens = (4, 1, 8), 7
    projections = [nn.Linear(24, size, bias=False) for size in sizes for _ in range(2)]
    weights = sum(parameter.numel() for projection in projections for parameter in projection.parameters())
    assert per_head(3, 8, 13, False).parameters((24, 24)) == weights
    assert per_head(3, 8, 13, True).parameters((24, 24)) == weights + 3 * 24
    macs = tokens * weights + sum(tokens * tokens * size for size in sizes)
    assert per_head(3, 8, 13, False).macs((24, 24), tokens) == macs
    assert per_head(3, 8, 13, True).macs((24, 24), tokens) == macs + tokens * 24 * 3


@pytest.mark.parametrize("content", [False, True])
@pytest.mark.parametrize("dk", [1, 40, 93, 94, 96])
def test_heads_that_share_no_channels_cost_less_at_any_length_or_more_on_short_inputs(dk, content):
    cheaper = [
        per_head(6, 16, dk, content).macs((96, 96), tokens) <= dense_macs((96, 96), (96, 96), tokens)
        for tokens in (1, 128, 4096)
    ]
    length = per_head(6, 16, dk, content).break_even((96, 96))
    assert all(cheaper) == (length == inf)
    assert cheaper[0] == (length > 0)


def test_a_report_prints_itself_and_becomes_a_table(make_tiny):
    tokens = torch.randint(3, 61, (4, 9), generator=torch.Generator().manual_seed(0))
    report = compress(make_tiny("bert"), Compression(dk=8, dv=12, dff=16), [{"input_ids": tokens}] * 4)
    frame = report.to_frame()
    assert (
        list(zip(frame["part"], frame["width"], strict=True))
        == [("dk", 8)] * 2 + [("dv", 12)] * 2 + [("dff", 16)] * 2
    )
    assert list(frame["macs_after"][:2]) == [module.macs_after for module in report.modules]
    words = str(report)
    assert f"{report.parameters_after:,} parameters" in words
    assert "dk=8 in 2 modules\ndv=12 in 2 modules\ndff=16 in 2 modules" in words
    assert all(warning in words for warning in report.warnings)
