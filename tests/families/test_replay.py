"""Attention that is not run again while its layer is refitted: the conversion stays the same, number for number."""

import copy

import pytest
import torch
from tiny_families import build, inputs

from collab_compress import Compression, UnsupportedModelError, compress
from collab_compress.conversion import replay
from collab_compress.conversion.replay import Producer, find_producer

NOT_REFITTED = {"segformer"}
WIDTHS = ({"dk": 7, "dv": 8, "dff": 16}, {"dff": 16})


def converted(model, batch, widths):
    result = copy.deepcopy(model)
    compress(result, Compression(**widths), [batch, batch])
    return result.state_dict()


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.structures
def test_a_conversion_is_the_same(kin, widths, monkeypatch):
    model, batch = build(kin), inputs(kin)
    try:
        skipping = converted(model, batch, widths)
    except UnsupportedModelError:
        assert kin in NOT_REFITTED
        return
    monkeypatch.setattr(replay, "find_producer", lambda *_: None)
    torch.testing.assert_close(skipping, converted(model, batch, widths), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "linear", "producer"),
    [
        ("bert", "encoder.layer.0.attention.output.dense", Producer("encoder.layer.0.attention.self", False, 2)),
        ("distilbert", "transformer.layer.0.attention.out_lin", Producer("transformer.layer.0.attention", True, 2)),
        ("bert", "encoder.layer.0.output.dense", Producer("encoder.layer.0.intermediate", False, None)),
    ],
)
def test_the_outermost_module_is_left_out(name, linear, producer):
    model, batch = build(name), inputs(name)
    assert find_producer(model, linear.partition(".0.")[0] + ".0", linear, lambda: model(**batch)) == producer


@pytest.mark.parametrize("name", ["bert", "distilbert", "llama"])
def test_attention_runs_once_for_each_batch(name):
    """Once more for each layer, to find what can be left out."""
    model, batch = build(name), inputs(name)
    counts = dict.fromkeys((False, True), 0)

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            counts[skips] += "scaled_dot_product_attention" in getattr(function, "__name__", "")
            return function(*args, **(kwargs or {}))

    for skips in counts:
        with pytest.MonkeyPatch.context() as patch, Counting():
            if not skips:
                patch.setattr(replay, "find_producer", lambda *_: None)
            converted(model, batch, WIDTHS[0])
    assert counts[True] < counts[False]
