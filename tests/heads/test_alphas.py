"""Mixing heads, against a double loop over heads; and merging it back."""

import copy

import pytest
import torch
from forms import converted, in_turns, outputs, randomise_
from torch import nn

from collab_compress import (
    CheckpointError,
    Compression,
    UnsupportedModelError,
    alphas_of,
    compress,
    expand,
    merge_alphas_,
    mix_heads_,
    read_factors,
)
from collab_compress.architectures import find_attention
from collab_compress.checkpoint import edits_of
from collab_compress.heads import Recorder

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def mixed(make_tiny, family, form="dense"):
    model = converted(make_tiny, family, form)
    mix_heads_(model)
    randomise_(model)
    return model


@in_turns
def test_heads_start_as_they_were_combine_and_merge(family, form, implementation, make_tiny, batch):
    untouched, model = converted(make_tiny, family, form), converted(make_tiny, family, form)
    for network in (untouched, model):
        network.set_attn_implementation(implementation)
    before = outputs(untouched, batch)
    mix_heads_(model)
    torch.testing.assert_close(outputs(model, batch), before, atol=1e-6, rtol=1e-6)
    sites = find_attention(model)
    assert list(alphas_of(model)) == [site.name for site in sites]
    for site in sites:
        assert torch.equal(alphas_of(model)[site.name], torch.eye(site.heads))
    randomise_(model)
    projections = {site.name: site.part(site.paths.output) for site in sites}
    returned = []
    for projection in projections.values():
        projection.register_forward_hook(lambda _, __, output: returned.append(output))
    with Recorder(model) as recorder:
        mixed_outputs = outputs(model, batch)
        records = recorder.take()
    assert (mixed_outputs - before).abs().max() > 0.1
    assert len(records) == len(returned)
    for record, output in zip(records, returned, strict=True):
        projection, z = projections[record.site.name], record.outputs  # (B, T, H, d)
        width = z.shape[-1]
        expected = projection.proj.bias.expand_as(output).clone()
        for i in range(z.shape[2]):
            head = torch.zeros_like(z[:, :, 0])
            for j in range(z.shape[2]):
                head += projection.alphas[i, j] * z[:, :, j]
            expected += head @ projection.proj.weight[:, i * width : (i + 1) * width].T
        torch.testing.assert_close(output, expected, **CLOSE)
    merge_alphas_(model)
    torch.testing.assert_close(outputs(model, batch), mixed_outputs, **CLOSE)
    assert alphas_of(model) == {}
    assert [type(module) for module in model.modules()] == [type(module) for module in untouched.modules()]
    assert model.state_dict().keys() == untouched.state_dict().keys()
    assert [edit.kind for edit in edits_of(model)] == [edit.kind for edit in edits_of(untouched)]


def test_only_one_kind(make_tiny, make_batch):
    model = make_tiny("marian")
    mix_heads_(model, kinds=["cross"])
    assert list(alphas_of(model)) == [f"decoder.layers.{layer}.encoder_attn" for layer in (0, 1)]
    randomise_(model)
    before = outputs(model, make_batch("marian"))
    merge_alphas_(model)
    torch.testing.assert_close(outputs(model, make_batch("marian")), before, **CLOSE)


@pytest.mark.parametrize("first", ["mix", "compress"])
def test_conversion_and_mixing_combine(first, family, make_tiny, batch):
    model = make_tiny(family)
    dense = copy.deepcopy(model)
    steps = {"mix": mix_heads_, "compress": lambda model: compress(model, Compression(dk=24), calibration=None)}
    for step in (first, *(steps.keys() - {first})):
        steps[step](model)
    assert {edit.kind for edit in edits_of(model)} == {"alphas", "collaborative"}
    randomise_(model)
    before = outputs(model, batch)
    expand(model)
    assert read_factors(model) == {}
    assert len(alphas_of(model)) == len(find_attention(model))
    torch.testing.assert_close(outputs(model, batch), before, atol=5e-5, rtol=1e-3)
    merge_alphas_(model)
    assert edits_of(model) == []
    torch.testing.assert_close(outputs(model, batch), before, atol=5e-5, rtol=1e-3)
    assert model.state_dict().keys() == dense.state_dict().keys()


@pytest.mark.parametrize("then", ["expand, merge", "merge, expand"])
def test_mixed_narrow_values_become_dense_again(then, family, make_tiny, batch):
    model = mixed(make_tiny, family, "narrow")
    before, stock = outputs(model, batch), make_tiny(family)
    for step in then.split(", "):
        {"expand": expand, "merge": merge_alphas_}[step](model)
        torch.testing.assert_close(outputs(model, batch), before, **CLOSE)
    assert edits_of(model) == []
    shapes = [{name: tensor.shape for name, tensor in network.state_dict().items()} for network in (model, stock)]
    assert shapes[0] == shapes[1]


def test_frozen_weights_stay_frozen_and_alphas_do_not(make_tiny):
    model = make_tiny("bert").requires_grad_(False)
    mix_heads_(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"encoder.layer.{layer}.attention.output.dense.alphas" for layer in (0, 1)}
    merge_alphas_(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.slow
def test_compiles_whole(make_tiny, batch):
    model = mixed(make_tiny, "bert")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outputs(compiled, batch), outputs(model, batch), **CLOSE)
    compiled(**batch)[0].square().mean().backward()
    assert [alphas.grad is not None for alphas in alphas_of(model).values()] == [True] * 2


def test_models_of_others_are_refused(make_tiny):
    model = make_tiny("bert")
    model.config.quantization_config = type("Shipped", (), {"quant_method": "collab_compress", "edits": []})()
    for use in (mix_heads_, alphas_of, merge_alphas_):
        with pytest.raises(CheckpointError, match="import it first, then load"):
            use(model)
    del model.config.quantization_config
    model.config.model_type = "unheard-of"
    with pytest.raises(UnsupportedModelError, match="'unheard-of' has no description"):
        mix_heads_(model)


def test_merging_that_is_interrupted_changes_nothing(make_tiny, batch, monkeypatch):
    model = mixed(make_tiny, "bert", "both")
    before, edits = outputs(model, batch), edits_of(model)
    parameters = dict(model.named_parameters())
    install, installed = nn.Module.set_submodule, []

    def interrupted(self, path, *args, **options):
        if installed:
            raise KeyboardInterrupt
        installed.append(path)
        return install(self, path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "set_submodule", interrupted)
        with pytest.raises(KeyboardInterrupt):
            merge_alphas_(model)
    assert installed == ["encoder.layer.0.attention.output.dense"]
    assert torch.equal(outputs(model, batch), before)
    assert edits_of(model) == edits
    merge_alphas_(model)
    torch.testing.assert_close(outputs(model, batch), before, **CLOSE)
    for name, parameter in model.named_parameters():  # which an optimizer knows
        assert parameter is parameters.get(name, parameters.get(name.replace("dense.", "dense.proj.")))
