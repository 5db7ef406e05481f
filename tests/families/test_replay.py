"""Attention that is not run again while its layer is refitted: the conversion stays the same, number for number."""

import copy

import pytest
import torch
from tiny_families import build, inputs

from collab_compress import Compression, UnsupportedModelError, compress
from collab_compress.conversion import replay
from collab_compress.conversion.layers import HiddenStateStore
from collab_compress.conversion.replay import Producer, Replay, find_producer

NOT_REFITTED = {"segformer"}
WIDTHS = ({"dk": 7, "dv": 8, "dff": 16}, {"dff": 16})
OUTPUTS = {
    "bert": ("encoder.layer.0", "encoder.layer.0.attention.output.dense"),
    "distilbert": ("transformer.layer.0", "transformer.layer.0.attention.out_lin"),
}
ATTENTION = {
    "bert": Producer("encoder.layer.0.attention.self", False, 2),
    "distilbert": Producer("transformer.layer.0.attention", True, 2),
}


def converted(model, data, widths):
    result = copy.deepcopy(model)
    compress(result, Compression(**widths), data)
    return result.state_dict()


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.structures
def test_a_conversion_is_the_same(kin, widths, monkeypatch):
    model, data = build(kin), [inputs(kin, seed) for seed in range(3)]
    try:
        skipping = converted(model, data, widths)
    except UnsupportedModelError:
        assert kin in NOT_REFITTED
        return
    monkeypatch.setattr(replay, "find_producer", lambda *_: None)
    torch.testing.assert_close(skipping, converted(model, data, widths), rtol=0, atol=0)


class Kept:
    """The first layer of a tiny model, called on the hidden states of two batches, with what `Replay` keeps."""

    def __init__(self, name, change_=lambda layer: None):
        self.model = build(name)
        path, linear = OUTPUTS[name]
        self.layer = self.model.get_submodule(path)
        self.hidden = [torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
        change_(self.layer)
        read = {}
        for number in range(2):
            output = self.model.get_submodule(linear)
            handle = output.register_forward_pre_hook(lambda _, args, n=number: read.update({n: args[0].clone()}))
            self.run(number)
            handle.remove()
        self.replay = Replay(self.model, path, HiddenStateStore())
        self.replay.keep(linear, read, self.run)

    @torch.no_grad()
    def run(self, number):
        output = self.layer(self.hidden[number])
        return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("name", OUTPUTS)
def test_attention_is_left_out_for_a_batch(name):
    kept = Kept(name)
    assert find_producer(kept.model, *OUTPUTS[name], lambda: kept.run(0)) == ATTENTION[name]
    queries = kept.model.get_submodule(ATTENTION[name].path)
    calls = []
    next(queries.children()).register_forward_hook(lambda *_: calls.append(1))
    for number in range(2):
        expected = kept.run(number)
        ran = len(calls)
        with kept.replay.batch(number):
            assert torch.equal(kept.run(number), expected)
        assert len(calls) == ran
    with kept.replay:
        pass
    with kept.replay.batch(0):
        kept.run(0)
    assert len(calls) == 3


def halved_outputs_(layer):
    layer.attention.self.register_forward_hook(lambda _, __, output: (output[0] / 2, *output[1:]))


def halved_inputs_(layer):
    layer.attention.out_lin.register_forward_pre_hook(lambda _, args: (args[0] / 2,))


def halved_in_place_(layer):
    def halve(_, args):
        args[0].mul_(0.5)

    layer.attention.output.register_forward_pre_hook(halve)


@pytest.mark.parametrize(
    ("name", "change_"), [("bert", halved_outputs_), ("distilbert", halved_inputs_), ("bert", halved_in_place_)]
)
def test_a_module_that_does_more_runs_again(name, change_):
    """Where a hook would act twice, or on what is kept."""
    kept = Kept(name, change_)
    for number in range(2):
        expected = kept.run(number)
        with kept.replay.batch(number):
            assert torch.equal(kept.run(number), expected)
