"""Costs against the paper's Table 1 and against counting."""

from math import inf

import pytest
import torch
from torch import nn

from collab_compress.attention.projections import SharedProjection
from collab_compress.conversion.report import (
    break_even_length,
    collaborative_macs,
    collaborative_parameters,
    dense_macs,
    dense_parameters,
    per_head_break_even_length,
    per_head_macs,
    per_head_parameters,
)


@pytest.mark.parametrize(
    ("width", "heads", "dk", "parameters", "macs"),
    [
        (512, 8, 128, (1.05e6, 0.66e6), (1.51e8, 1.09e8)),
        (768, 12, 256, (2.36e6, 1.58e6), (3.27e8, 2.65e8)),
    ],
)
def test_whole_layer_equals_table_1(width, heads, dk, parameters, macs):
    """T = 128; the table counts values and output projection too, and neither biases nor v."""
    length, head_width = 128, width // heads
    rest = 2 * width**2
    rest_macs = 2 * length * width**2 + length**2 * width
    assert rest + dense_parameters(width, heads, head_width, False) == pytest.approx(parameters[0], rel=6e-3)
    assert rest + collaborative_parameters(width, heads, dk, False) == pytest.approx(parameters[1], rel=6e-3)
    assert rest_macs + dense_macs(width, heads, head_width, length) == pytest.approx(macs[0], rel=6e-3)
    assert rest_macs + collaborative_macs(width, heads, dk, length, False) == pytest.approx(macs[1], rel=1e-2)


def test_parameters_are_those_of_the_modules():
    modules = [SharedProjection(24, 13, 8), SharedProjection(24, 13 + 3, 8)]
    count = sum(parameter.numel() for module in modules for parameter in module.parameters()) + 3 * 13
    assert collaborative_parameters(24, 3, 13, True) == count
    dense = 2 * sum(parameter.numel() for parameter in nn.Linear(24, 24).parameters())
    assert dense_parameters(24, 3, 8, True) == dense


@pytest.mark.parametrize(("dk", "length"), [(384, 152), (256, 340), (128, 1278)])
def test_break_even_of_bert_base(dk, length):
    assert int(break_even_length(768, 12, 64, dk, content_bias=False)) == length


@pytest.mark.parametrize("content", [False, True])
@pytest.mark.parametrize("dk", [40, 96, 200])
def test_break_even_is_where_the_costs_cross(dk, content):
    length = break_even_length(96, 6, 16, dk, content)
    before, after = int(length), int(length) + 1
    cost = [
        collaborative_macs(96, 6, dk, tokens, content) - dense_macs(96, 6, 16, tokens) for tokens in (before, after)
    ]
    assert cost[0] <= 0 < cost[1]


def test_break_even_at_the_borders():
    assert break_even_length(96, 6, 16, 16, False) == inf
    assert break_even_length(96, 6, 16, 96, False) == 0
    assert torch.isfinite(torch.tensor(break_even_length(96, 6, 16, 17, True)))


def test_heads_that_share_no_channels():
    sizes, tokens = (4, 1, 8), 7
    projections = [nn.Linear(24, size, bias=False) for size in sizes for _ in range(2)]
    weights = sum(parameter.numel() for projection in projections for parameter in projection.parameters())
    assert per_head_parameters(24, 3, 13, False) == weights
    assert per_head_parameters(24, 3, 13, True) == weights + 3 * 24
    macs = tokens * weights + sum(tokens * tokens * size for size in sizes)
    assert per_head_macs(24, 3, 13, tokens, False) == macs
    assert per_head_macs(24, 3, 13, tokens, True) == macs + tokens * 24 * 3


@pytest.mark.parametrize("content", [False, True])
@pytest.mark.parametrize("dk", [1, 40, 93, 94, 96])
def test_heads_that_share_no_channels_cost_less_at_any_length_or_more_on_short_inputs(dk, content):
    cheaper = [
        per_head_macs(96, 6, dk, tokens, content) <= dense_macs(96, 6, 16, tokens) for tokens in (1, 128, 4096)
    ]
    length = per_head_break_even_length(96, 6, 16, dk, content)
    assert all(cheaper) == (length == inf)
    assert cheaper[0] == (length > 0)
