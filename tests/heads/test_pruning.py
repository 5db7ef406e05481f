"""Heads removed, against the same heads masked; and removals that are refused and change nothing."""

import copy

import numpy as np
import pytest
import torch
from forms import COMPILED, FORMS, convert_, converted, hidden, in_pairs, in_turns
from tiny_families import build
from transformers import MarianMTModel

from collab_compress import (
    Compression,
    FromScratch,
    HeadMask,
    compress,
    expand,
    from_config,
    prune_heads_,
    read_factors,
)
from collab_compress.architectures import find_attention, find_dense_attention
from collab_compress.checkpoint import edits_of
from collab_compress.errors import HeadError
from collab_compress.heads import masks_without

SIZES = {"narrow": 4, "both": 3}
FIRST, SECOND = "encoder.layer.0.attention.self", "encoder.layer.1.attention.self"


def some_heads(model):
    """Return one or two of three heads in every module but the second, which keeps all."""
    names = [site.name for site in find_attention(model)]
    return {name: [{1}, {}, {0, 2}, {2}, {0}, {0, 1}][index % 6] for index, name in enumerate(names)}


def masked(model, heads, batch):
    with HeadMask(model, masks_without(model, heads)):
        return hidden(model, batch)


def close(one, other):
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@in_turns
def test_equals_masking(family, form, implementation, make_tiny, batch):
    model = converted(make_tiny, family, form)
    model.set_attn_implementation(implementation)
    heads, stock, before = some_heads(model), hidden(model, batch), model.num_parameters()
    expected = masked(model, heads, batch)
    prune_heads_(model, heads)
    close(hidden(model, batch), expected)
    assert not torch.allclose(expected, stock, atol=1e-2)
    assert model.num_parameters() < before
    for site in find_attention(model):
        head_count = 3 - len(heads[site.name])
        assert (site.heads, site.head_width) == (head_count, 8)
        value, output = site.part(site.paths.value), site.part(site.paths.output)
        width = head_count * SIZES.get(form, 8)
        value = getattr(value, "proj", value)
        assert (value.out_features, output.in_features, output.out_features) == (width, width, 24)
        assert getattr(site.module, "all_head_size", width) == width
        if form in SIZES:
            assert site.module.ov.config.size == SIZES[form]
        if form not in ("dense", "narrow"):
            assert read_factors(model)[site.name].mixing.shape == (head_count, FORMS[form].dk)


@in_pairs
def test_twice_counts_the_heads_that_are_left(family, form, make_tiny, batch):
    model = converted(make_tiny, family, form)
    name = find_attention(model)[0].name
    expected = masked(model, {name: [0, 2]}, batch)
    prune_heads_(model, {name: [0]})
    prune_heads_(model, {name: [1]})
    close(hidden(model, batch), expected)
    with pytest.raises(HeadError, match="has no head 1; its heads are 0 to 0"):
        prune_heads_(model, {name: [1]})
    with pytest.raises(HeadError, match=r"removing heads \[0\] leaves none; keep at least one head"):
        prune_heads_(model, {name: [0]})


@pytest.mark.parametrize(("family", "form"), [("bert", "both"), ("albert", "dense"), ("marian", "both")])
def test_frozenness_dtype_and_training_mode_are_kept(family, form, make_tiny):
    model = converted(make_tiny, family, form).to(torch.bfloat16).train()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 == 0)
    frozen = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    edits = edits_of(model)
    for nothing in ({}, {find_attention(model)[0].name: []}):
        prune_heads_(model, nothing)
        assert edits_of(model) == edits
    prune_heads_(model, {name: np.array(list(heads), int) for name, heads in some_heads(model).items()})
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == frozen
    assert list(model.state_dict()) == list(converted(make_tiny, family, form).state_dict())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(module.training for module in model.modules())
    assert all(parameter.is_leaf for parameter in model.parameters())


def test_a_pruned_model_converts_and_expands(family, make_tiny, batch, calibration):
    model = make_tiny(family)
    name = find_attention(model)[0].name
    prune_heads_(model, {site.name: [1] for site in find_attention(model)})
    pruned = copy.deepcopy(model)
    compress(model, Compression(dk=16), calibration=None)
    close(hidden(model, batch), hidden(pruned, batch))
    expand(model)
    close(hidden(model, batch), hidden(pruned, batch))
    assert [edit.kind for edit in edits_of(model)] == ["pruned"]
    compress(model, Compression(dk=5), calibration=calibration)
    assert read_factors(model)[name].mixing.shape == (2, 5)
    assert {site.heads for site in find_attention(model)} == {2}


def test_a_converted_model_is_pruned_and_expands(family, make_tiny, batch):
    model = make_tiny(family)
    compress(model, Compression(dk=24), calibration=None)
    heads = some_heads(model)
    expected = masked(model, heads, batch)
    prune_heads_(model, heads)
    expand(model)
    close(hidden(model, batch), expected)
    assert [edit.kind for edit in edits_of(model)] == ["pruned"]
    assert [site.query.out_features for site in find_dense_attention(model)] == [
        8 * (3 - len(heads[site.name])) for site in find_attention(model)
    ]


def unbiased(model):
    for site in find_dense_attention(model):
        site.query.bias = None
    compress(model, Compression(dk=13), calibration=None)
    return model


def narrow_from_scratch(model):
    return from_config(model.config, FromScratch(dk=6, train_mixing=False), type(model)).eval()


@pytest.mark.parametrize("make", [unbiased, narrow_from_scratch])
def test_collaborative_models_without_content_bias(make, make_tiny, batch):
    model, heads = make(make_tiny("bert")), {FIRST: [2], SECOND: [0, 1]}
    trained = model.get_submodule(FIRST).qk.mixing.requires_grad
    expected = masked(model, heads, batch)
    prune_heads_(model, heads)
    close(hidden(model, batch), expected)
    assert model.get_submodule(FIRST).qk.mixing.requires_grad == trained == (make is unbiased)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), COMPILED)
def test_compiles_without_graph_breaks(family, form, make_tiny, batch):
    model = converted(make_tiny, family, form)
    prune_heads_(model, some_heads(model))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(hidden(compiled, batch), hidden(model, batch), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("form", "beams"), [*((form, 1) for form in FORMS), ("both", 2)])
def test_generation_equals_masking(form, beams, make_tiny, batch):
    torch.manual_seed(0)
    model = MarianMTModel(make_tiny("marian").config).eval()
    convert_(model, form)
    heads = some_heads(model)
    options = {**batch, "max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    with HeadMask(model, masks_without(model, heads)):
        expected = model.generate(**options)
    unpruned = model.generate(**options)
    prune_heads_(model, heads)
    assert torch.equal(model.generate(**options), expected)
    assert not torch.equal(unpruned, expected)


def test_alignment_heads_of_whisper_follow_the_heads_that_stay():
    model = build("whisper", "WhisperForConditionalGeneration")
    settings = model.generation_config
    settings.alignment_heads = [[0, 1], [0, 2]]
    prune_heads_(model, {"model.decoder.layers.0.self_attn": [0]})
    assert model.generation_config.alignment_heads == [[0, 1], [0, 2]]
    prune_heads_(model, {"model.decoder.layers.0.encoder_attn": [0]})
    assert model.generation_config.alignment_heads == [[0, 0], [0, 1]]
    prune_heads_(model, {"model.decoder.layers.0.encoder_attn": [1]})
    assert model.generation_config.alignment_heads == [[0, 0]]
    model.generation_config.alignment_heads = [[7, 0]]  # of a layer that there is not
    prune_heads_(model, {"model.encoder.layers.0.self_attn": [0]})
    assert not hasattr(model.generation_config, "alignment_heads")
    assert settings.alignment_heads == [[0, 1], [0, 2]]
