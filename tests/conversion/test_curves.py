"""Losses of every width, against conversions and least squares."""

import copy

import pytest
import torch
from tiny_families import build, inputs

from collab_compress import Compression, Solver, compress
from collab_compress.architectures import find_dense_attention, find_dense_values
from collab_compress.conversion.curves import loss_curves
from collab_compress.conversion.feed_forward import find_feed_forward

FAMILIES = ["bert", "t5", "gpt2", "vit", "albert"]


def data(name, count=12):
    return [inputs(name, seed) for seed in range(count)]


def curves_of(model, batches):
    found = find_dense_attention(model), find_dense_values(model), find_feed_forward(model, batches[0])
    return loss_curves(model, *found, batches)


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_fall_with_the_width_and_end_at_nothing(name):
    model = build(name)
    before = {path: tensor.clone() for path, tensor in model.state_dict().items()}
    curves = curves_of(model, data(name))
    count = len(find_dense_attention(model))
    assert [len(curves[part]) for part in ("dk", "dv")] == [count, count]
    for part, losses in ((part, losses) for part, modules in curves.items() for losses in modules.values()):
        assert losses.isfinite().all()
        assert (losses[1:] <= losses[:-1] + 1e-9).all() or part == "dff"  # which counts chance too
        assert abs(float(losses[-1])) < 1e-6
        assert losses[0] > 0
    assert all(torch.equal(tensor, before[path]) for path, tensor in model.state_dict().items())


def streams(model, batches, writer):
    """Return the residual stream after a layer of BERT's attention, and what it adds to, without padding."""
    seen = []
    at = model.get_submodule(writer.removesuffix("dense") + "LayerNorm")
    with at.register_forward_pre_hook(lambda _, args: seen.append(args[0])), torch.no_grad():
        for batch in batches:
            model(**batch)
    mask = [batch["attention_mask"].bool() for batch in batches]
    return torch.cat([stream[keep] for stream, keep in zip(seen, mask, strict=True)]).double()


@pytest.mark.parametrize("dv", [6, 18])
def test_losses_of_values_are_those_of_a_conversion(dv):
    dense, batches = build("bert"), data("bert")
    curves = curves_of(dense, batches)
    first = "encoder.layer.0.attention"
    model = copy.deepcopy(dense)
    compress(model, Compression(dv=dv, modules="*0*", solver=Solver(refit=False)), batches)
    before, after = (streams(each, batches, f"{first}.output.dense") for each in (dense, model))
    lost = (after - before).square().sum() / (before - before.mean(0)).square().sum()
    # The conversion holds an eighth of the sequences back, and both add a damping.
    assert float(curves["dv"][f"{first}.self"][dv]) == pytest.approx(float(lost), rel=0.25)


def test_losses_of_neurons_are_those_of_the_best_fit_without_them():
    dense, batches = build("bert"), data("bert", 24)
    curves = curves_of(dense, batches)
    name = "encoder.layer.0.output.dense"
    layer, seen = dense.get_submodule(name), []
    with layer.register_forward_pre_hook(lambda _, args: seen.append(args[0])), torch.no_grad():
        for batch in batches:
            dense(**batch)
    masks = [batch["attention_mask"].bool() for batch in batches]
    neurons = torch.cat([inputs[mask] for inputs, mask in zip(seen, masks, strict=True)]).double()
    outputs = (neurons - neurons.mean(0)) @ layer.weight.detach().double().mT
    weakest = outputs.new_tensor([float("inf")])
    stream = streams(dense, batches, name)
    spread = (stream - stream.mean(0)).square().sum()
    count = len(neurons)
    for neuron in range(32):  # the best 31 to keep, one by one
        others = neurons[:, [other for other in range(32) if other != neuron]]
        centred = others - others.mean(0)
        fitted = centred @ torch.linalg.lstsq(centred, outputs).solution
        weakest = torch.minimum(weakest, (outputs - fitted).square().sum() / spread)
    expected = float(weakest) * (count + 31) / (count - 31)
    assert float(curves["dff"][name][31]) == pytest.approx(expected, rel=0.3)  # but for the damping


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_values_that_are_the_same_everywhere_lose_nothing(bias):
    dense, batches = build("bert"), data("bert")
    attention = dense.encoder.layer[0].attention.self
    with torch.no_grad():
        attention.value.weight.zero_()
        attention.value.bias.fill_(bias)
    losses = curves_of(dense, batches)
    assert not losses["dv"]["encoder.layer.0.attention.self"].any()
    assert losses["dv"]["encoder.layer.1.attention.self"][0] > 0


def test_a_stream_that_is_the_same_everywhere_loses_nothing():
    dense, batches = build("detr"), data("detr")  # whose decoder starts from zeros
    losses = curves_of(dense, batches)
    first = "decoder.layers.0.self_attn"
    assert not losses["dk"][first].any()
    assert not losses["dv"][first].any()
    assert all(curve.isfinite().all() for modules in losses.values() for curve in modules.values())
    assert compress(dense, Compression(keep=0.5), batches).refits
