"""What feed-forward blocks lose and cost, against least squares on gathered activations, and the live model."""

import copy

import numpy as np
import pytest
import torch
from recorded import recorded_inputs
from tiny_families import make_rotary
from transformers import CONFIG_MAPPING, AutoModel

from collab_compress import Compression, compress
from collab_compress.analysis import FeedForwardEnergy, feed_forward_costs, feed_forward_energy
from collab_compress.conversion.drift import split_held_back
from collab_compress.conversion.feed_forward import find_feed_forward
from collab_compress.errors import HeadError, UnsupportedModelError

NEURONS = 80  # leave in two rankings: 64, then the others
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": NEURONS}
DISTILBERT = {"dim": 24, "n_heads": 3, "n_layers": 2, "hidden_dim": NEURONS}
GPT2 = {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_inner": NEURONS}
LLAMA = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}
T5 = {"d_model": 24, "d_kv": 8, "num_heads": 3, "d_ff": NEURONS, "num_layers": 2, "decoder_start_token_id": 0}
GATED = T5 | {"feed_forward_proj": "gated-gelu"}
MODELS = {
    "bert": (SIZES, "encoder.layer.{}.output.dense"),
    "distilbert": (DISTILBERT, "transformer.layer.{}.ffn.lin2"),
    "albert": (SIZES | {"embedding_size": 8}, "encoder.albert_layer_groups.0.albert_layers.{}.ffn_output"),
    "gpt2": (GPT2, "h.{}.mlp.c_proj"),
    "llama": (LLAMA, "layers.{}.mlp.down_proj"),
    "t5": (T5, "encoder.block.{}.layer.1.DenseReluDense.wo"),
    "gated t5": (GATED, "encoder.block.{}.layer.1.DenseReluDense.wo"),
}  # model → sizes, and the layers that read the neurons


@pytest.fixture(params=MODELS)
def kind(request):
    return request.param


@pytest.fixture
def model(kind):
    """A tiny model in float64 whose weights and biases all matter."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind.removeprefix("gated ")](vocab_size=20, **MODELS[kind][0])
    model = AutoModel.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def batches(model, count=12):
    """Return padded sequences of two lengths, with decoder inputs where the model has a decoder."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for _ in range(count):
        ids = torch.randint(5, 20, (2, 11), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        batch = {"input_ids": ids, "attention_mask": mask}
        if model.config.is_encoder_decoder:
            batch |= {"decoder_input_ids": ids.flip(1), "decoder_attention_mask": mask}
        result.append(batch)
    return result


def activations(model, name, data):
    """Return the inputs of a layer without padding, over all its calls."""
    layer, inputs = model.get_submodule(name), []
    for batch in data:
        calls = recorded_inputs(model, batch, {name: layer})[name]
        inputs += [call[batch["attention_mask"].bool()] for call in calls]
    return torch.cat(inputs).numpy()


def solved(inputs, outputs, ridge, start):
    """Fit outputs by least squares, with rows √λ that pull towards `start`."""
    rows = np.concatenate([inputs, ridge**0.5 * np.eye(inputs.shape[1])])
    return np.linalg.lstsq(rows, np.concatenate([outputs, ridge**0.5 * start]), rcond=None)[0]


def slow_order(inputs, outputs, ridge):
    """Rank neurons: leave out each in turn, refit the others, remove the 64 that cost least, and repeat."""
    order, kept = [], list(range(inputs.shape[1]))
    while kept:
        costs = []
        for place in kept:
            others = [other for other in kept if other != place]
            fitted = solved(inputs[:, others], outputs, ridge, np.zeros((len(others), outputs.shape[1])))
            missing = outputs - inputs[:, others] @ fitted
            costs.append((missing**2).sum() + ridge * (fitted**2).sum())
        leaving = [kept[place] for place in np.argsort(costs)[:64]]
        order += leaving
        kept = [place for place in kept if place not in leaving]
    return order


def slow_errors(layer, used, held_back, widths, damping):
    """Measure refitted narrower layers on the held-back activations themselves."""
    weight = layer.weight.detach().numpy() if hasattr(layer, "nf") else layer.weight.detach().numpy().T
    mean = used.mean(0) * (layer.bias is not None)
    inputs = used - mean
    ridge = damping * (inputs**2).sum() / inputs.shape[1]
    order = slow_order(inputs, inputs @ weight, ridge)
    dense = held_back @ weight
    errors = []
    for width in widths:
        kept = sorted(order[len(order) - width :])
        own_ridge = damping * (inputs[:, kept] ** 2).sum() / len(kept)
        fitted = solved(inputs[:, kept], inputs @ weight, own_ridge, weight[kept])
        narrower = (held_back - mean)[:, kept] @ fitted + mean @ weight
        errors.append(np.linalg.norm(narrower - dense) / np.linalg.norm(dense - dense.mean(0)))
    return errors


def test_errors_are_those_of_least_squares_on_the_activations(kind, model):
    data = batches(model)
    curves = feed_forward_energy(model, data)
    layers = 1 if kind == "albert" else 4 if "t5" in kind else 2
    names = [MODELS[kind][1].format(layer) for layer in range(min(layers, 2))]
    assert len(curves) == layers
    assert list(curves)[: len(names)] == names
    used, held_back = split_held_back(data)
    for name, curve in curves.items():
        assert curve.widths.tolist() == [5 * step for step in range(1, 17)]
        expected = slow_errors(
            model.get_submodule(name),
            activations(model, name, used),
            activations(model, name, held_back),
            curve.widths.tolist(),
            1e-3,
        )
        np.testing.assert_allclose(curve.errors, expected, rtol=1e-6, atol=1e-6)
        assert curve.errors[-1] == 0
        assert curve.errors[0] > curve.errors[8] > 0


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_moments_in_several_passes_give_the_same(kind, model, monkeypatch):
    data = batches(model)
    expected = feed_forward_energy(model, data)
    monkeypatch.setattr("collab_compress.analysis.energy.ROOM", 1)
    done = []
    curves = feed_forward_energy(model, iter(data), progress=lambda *args: done.append(args))
    assert done == [(count, len(expected)) for count in range(1, len(expected) + 1)]
    for name, curve in curves.items():
        torch.testing.assert_close(curve.errors, expected[name].errors)


def test_widths_are_the_least_that_keep_a_share():
    errors = torch.tensor([1.2, 0.2, 0.4, 0.1, 0.0], dtype=torch.float64)
    curve = FeedForwardEnergy(torch.tensor([4, 8, 12, 16, 20]), errors)
    torch.testing.assert_close(curve.energy, torch.tensor([0, 0.84, 0.84, 0.99, 1], dtype=torch.float64))
    assert [curve.rank(share) for share in (0.8, 0.9, 0.99, 1)] == [8, 16, 16, 20]
    assert curve.ranks() == {0.9: 16, 0.95: 16, 0.99: 16}
    with pytest.raises(HeadError, match="share of energy is 0; expected above 0"):
        curve.rank(0)
    with pytest.raises(HeadError, match="unknown curve 'shared'; expected one of energy"):
        curve.rank(0.9, "shared")


def test_outputs_that_never_vary_lose_nothing(make_tiny, calibration):
    model = make_tiny("bert")
    torch.nn.init.zeros_(model.encoder.layer[1].intermediate.dense.weight)
    first, second = feed_forward_energy(model, calibration).values()
    assert first.rank() > 2
    assert second.rank() == 2
    assert not second.errors.any()


def test_what_cannot_be_measured_is_refused(make_tiny, batch):
    model = make_tiny("bert")
    one = {name: value[:1] for name, value in batch.items()}
    with pytest.raises(HeadError, match="pass two sequences at least"):
        feed_forward_energy(model, [one])
    with pytest.raises(
        HeadError, match=r"encoder\.layer\.0\.output\.dense: the .* are singular; pass a larger damping"
    ):
        feed_forward_energy(model, [batch], damping=0.0)
    with pytest.raises(UnsupportedModelError, match=r"MixtralForCausalLM has no feed-forward block of plain linear"):
        feed_forward_energy(make_rotary("mixtral"), [batch])


def test_costs_are_those_of_the_live_model(kind, model):
    data = batches(model)
    blocks = find_feed_forward(model, data[0])
    planned = feed_forward_costs(model, blocks, 7, dff=30)
    as_they_are = feed_forward_costs(model, blocks, 7)
    narrow = copy.deepcopy(model)
    compress(narrow, Compression(dff=30), data[:2])
    for block in blocks:
        cost = planned[block.down]
        for live, counted in ((model, cost.dense), (narrow, cost.converted)):
            layers = [live.get_submodule(name) for name in (block.down, *block.ups)]
            assert counted.parameters == sum(part.numel() for layer in layers for part in layer.parameters())
            assert counted.macs == 7 * sum(layer.weight.numel() for layer in layers)
        dense = as_they_are[block.down]
        assert (cost.width, dense.width) == (30, None)
        assert dense.dense == dense.converted == cost.dense


def test_widths_that_cannot_be_counted_are_refused(make_tiny, batch):
    model = make_tiny("bert")
    blocks = find_feed_forward(model, batch)
    with pytest.raises(HeadError, match="got length 0, dff None; expected at least 1"):
        feed_forward_costs(model, blocks, 0)
    with pytest.raises(HeadError, match="dff 0; expected at least 1"):
        feed_forward_costs(model, blocks, dff=0)
    with pytest.raises(HeadError, match=r"layer\.0\.output\.dense reads 32 neurons, and dff is 33; pass up to 32"):
        feed_forward_costs(model, blocks, dff=33)
