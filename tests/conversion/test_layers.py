"""Numbered layers that are called alone, with the arguments that the model gave them."""

import copy

import pytest
import torch
from tiny_families import build, inputs, numbered_layers
from transformers import BertModel

from collab_compress import Compression, Solver, UnsupportedModelError, compress
from collab_compress.conversion.inventory import Inventory
from collab_compress.conversion.layers import by_layer, capture, plain_stack

PLAIN = ["bert", "gpt2", "mpnet", "vit", "albert"]
OTHERS = ["t5", "bart"]  # the decoder reads what the encoder returns, and T5's layers return biases too


@pytest.mark.parametrize("name", PLAIN + OTHERS)
def test_layers_alone_make_what_they_make_in_the_model(name):
    model, batch = build(name), inputs(name)
    outputs = []
    with torch.no_grad():
        calls = capture(model, numbered_layers(model, batch), batch)
        hooks = [
            model.get_submodule(layer).register_forward_hook(lambda _, __, output: outputs.append(output))
            for layer in by_layer(calls)
        ]
        model(**batch)
        for hook in hooks:
            hook.remove()
        hidden = None
        for call, output in zip(calls, outputs, strict=True):
            hidden = call.run(model, hidden if call.hidden is None else call.hidden)
            assert torch.equal(hidden, output if isinstance(output, torch.Tensor) else output[0])
    starts = [call.name for call in calls if call.hidden is not None]
    assert len(starts) == (2 if name in OTHERS else 1)


@pytest.mark.parametrize("name", PLAIN)
def test_skipped_layers_get_the_same_arguments(name, monkeypatch):
    model, batch = build(name), inputs(name)
    with torch.no_grad():
        plain, calls = (
            plain_stack(model, numbered_layers(model, batch), batch),
            capture(model, numbered_layers(model, batch), batch),
        )
        assert plain is not None
        assert plain.calls == len(calls)
        skipped = capture(model, numbered_layers(model, batch), batch, plain=plain)
    assert torch.equal(calls[0].hidden, skipped[0].hidden)
    for call, other in zip(calls, skipped, strict=True):
        assert (call.name, call.keyword, call.kwargs.keys()) == (other.name, other.keyword, other.kwargs.keys())
        values = [(*each.args, *each.kwargs.values()) for each in (call, other)]
        for one, two in zip(*values, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", OTHERS)
def test_layers_that_others_depend_on_are_not_skipped(name):
    with torch.no_grad():
        model = build(name)
        assert plain_stack(model, numbered_layers(model, inputs(name)), inputs(name)) is None


def twice(encoder):
    """Make an encoder of BERT run its layers twice, one after the other."""
    forward = type(encoder).forward

    class Twice(type(encoder)):
        def forward(self, hidden_states, *args, **kwargs):
            first = forward(self, hidden_states, *args, **kwargs)
            return forward(self, first.last_hidden_state, *args, **kwargs)

    encoder.__class__ = Twice


def test_a_model_whose_layers_come_again_is_converted_but_not_refitted(make_tiny, calibration):
    dense = make_tiny("bert")
    twice(dense.encoder)
    model = copy.deepcopy(dense)
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match=r"layer\.0 is called again after other layers"):
        _ = Inventory(dense, calibration[0]).layers
    report = compress(model, Compression(dk=12, dv=12, solver=Solver(sweeps=3)), calibration)
    assert not report.refits
    assert any("no layer was refitted: encoder.layer.0 is called again" in warning for warning in report.warnings)
    assert all(0 < module.data_error < 1 for module in (*report.of("dk"), *report.of("dv")))
    for options, message in (
        ({"dff": 16}, "called again"),
        ({"dk": 12, "solver": Solver(refit=True)}, "called again"),
        ({"keep": 0.5}, "its losses cannot be measured; pass dk or dv"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            compress(copy.deepcopy(dense), Compression(**options), calibration)


def test_a_layer_that_is_another_alone_is_refused(make_tiny, batch):
    model = make_tiny("bert", BertModel)
    model.encoder.layer[1].register_forward_hook(lambda _, __, output: output * torch.rand(()))
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match=r"layer\.1 of BertModel returns something else"):
        _ = Inventory(model, batch).layers
