"""What feed-forward blocks cost, against the live model."""

import copy

import pytest
from tiny_families import build, inputs

from collab_compress import Compression, compress
from collab_compress.conversion.cost import block_cost
from collab_compress.conversion.inventory import find_feed_forward


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "llama", "t5"])
def test_costs_are_those_of_the_live_model(name):
    model, batch = build(name), inputs(name)
    blocks, narrow = find_feed_forward(model, batch), copy.deepcopy(model)
    neurons = blocks[0].width // 2
    compress(narrow, Compression(dff=neurons), [batch, batch])
    for block in blocks:
        cost, dense = block_cost(model, block, neurons, 7), block_cost(model, block, None, 7)
        counted = (cost.parameters_before, cost.macs_before), (cost.parameters_after, cost.macs_after)
        for live, (parameters, macs) in zip((model, narrow), counted, strict=True):
            layers = [live.get_submodule(name) for name in (block.down, *block.ups)]
            assert parameters == sum(part.numel() for layer in layers for part in layer.parameters())
            assert macs == 7 * sum(layer.weight.numel() for layer in layers)
        assert (cost.width, dense.width) == (neurons, None)
        assert (dense.parameters_after, dense.macs_after) == counted[0]
