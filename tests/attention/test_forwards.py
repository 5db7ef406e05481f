"""Modules that compute their scores themselves, while something of ours is in them and afterwards."""

import copy
import pickle

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from tiny_families import TINIES, build
from transformers import RemBertConfig, RemBertModel

from collab_compress import Compression, HeadMask, Solver, compress, expand
from collab_compress.architectures import find_attention
from collab_compress.attention.forward import edited_class
from collab_compress.heads import Recorder, masks_without
from collab_compress.transformers_parts import CACHE_NAME

NAMES = ("deberta-v2", "mpnet", "rembert")


@pytest.fixture(params=NAMES)
def model(request):
    return build(request.param)


@pytest.fixture
def ids():
    return torch.randint(5, 61, (2, 9), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def run(model, ids):
    return model(input_ids=ids)[0]


def attention(model):
    return [site.module for site in find_attention(model)]


def test_undoing_the_last_edit_restores_the_stock_class(model, ids):
    before, other = run(model, ids), build(model.config.model_type)
    stock, attributes = type(attention(model)[0]), [set(vars(module)) for module in attention(model)]
    with Recorder(model), HeadMask(model, masks_without(model, {})):
        assert all(type(module) is edited_class(stock) for module in attention(model))
        assert all(isinstance(module, stock) for module in attention(model))
        torch.testing.assert_close(run(model, ids), before, atol=2e-5, rtol=1e-4)
    assert all(type(module) is stock for module in attention(model))
    compress(model, Compression(dk=24, dv=24), calibration=None)
    assert type(attention(model)[0]) is edited_class(stock)
    assert edited_class(stock).__name__ == stock.__name__
    expand(model)
    assert all(type(module) is stock for module in attention(model))
    assert [set(vars(module)) for module in attention(model)] == attributes
    assert all(type(module) is stock for module in attention(other))
    assert torch.equal(run(other, ids), before)


def test_copies_and_pickles_are_edited_too(model, ids):
    compress(model, Compression(dk=7, solver=Solver(sweeps=5)), calibration=None)
    expected = run(model, ids)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(attention(made)[0]) is type(attention(model)[0])
        assert torch.equal(run(made, ids), expected)
        for parameter in attention(made)[0].parameters():
            parameter.data.zero_()
        assert torch.equal(run(model, ids), expected)


@pytest.mark.parametrize("converted", [False, True])
def test_rows_and_outputs_are_those_of_the_stock_module(model, ids, converted):
    with torch.no_grad():
        expected = model(input_ids=ids, output_attentions=True)
    if converted:
        compress(model, Compression(dk=24), calibration=None)
    with torch.no_grad(), Recorder(model, ["probs"]) as recorder:
        outputs, read = model(input_ids=ids, output_attentions=True), recorder.take()
    for recorded, rows, stock in zip(read, outputs.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(rows, stock, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(recorded.probs, stock, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(outputs[0], expected[0], atol=2e-5, rtol=1e-4)


def test_dropout_of_the_module_is_kept(model, ids):
    for module in attention(model):
        for name in ("dropout", "attention_dropout"):
            if hasattr(module, name):
                getattr(module, name).p = 0.5
    compress(model, Compression(dk=24), calibration=None)
    still = run(model, ids)
    assert torch.equal(run(model, ids), still)
    for module in attention(model):
        module.train()
    torch.manual_seed(0)
    one = run(model, ids)
    assert not torch.allclose(one, run(model, ids), atol=1e-3)


def test_hooks_of_accelerate_stay(model, ids):
    """Offloading wraps `forward` of the instance; what it calls inside is ours all the same."""
    before = run(model, ids)
    for module in attention(model):
        add_hook_to_module(module, ModelHook())
    compress(model, Compression(dk=7, solver=Solver(sweeps=5)), calibration=None)
    hooked = run(model, ids)
    for module in attention(model):
        remove_hook_from_module(module)
    assert torch.equal(run(model, ids), hooked)
    assert not torch.allclose(hooked, before, atol=1e-3)


@pytest.mark.parametrize("name", ["deberta-v2", "mpnet"])
def test_they_compile(name, ids):
    model = build(name)
    compress(model, Compression(dk=7, dv=9), calibration=None)
    expected = run(model, ids)
    torch.testing.assert_close(
        run(torch.compile(model, fullgraph=True, backend="aot_eager"), ids), expected, atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("dk", [7, 24])
def test_caches_hold_the_keys_of_an_encoder(dk, ids):
    torch.manual_seed(0)
    model = RemBertModel(
        RemBertConfig(**TINIES["rembert"].settings, is_decoder=True, add_cross_attention=True)
    ).eval()
    states = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        stock = model(input_ids=ids, encoder_hidden_states=states)[0]
    compress(model, Compression(dk=dk, dv=12 if dk == 7 else 24), calibration=None)
    with torch.no_grad():
        full = model(input_ids=ids, encoder_hidden_states=states)[0]
        first = model(input_ids=ids[:, :6], encoder_hidden_states=states, use_cache=True)
        cache = getattr(first, CACHE_NAME)
        cached_keys = [layer.keys for layer in cache.cross_attention_cache.layers]
        last = model(input_ids=ids[:, 6:], encoder_hidden_states=states, **{CACHE_NAME: cache}, use_cache=True)
    torch.testing.assert_close(torch.cat([first[0], last[0]], 1), full, atol=2e-5, rtol=1e-4)
    assert all(
        after.keys is before for after, before in zip(cache.cross_attention_cache.layers, cached_keys, strict=True)
    )
    assert (dk == 24) == torch.allclose(full, stock, atol=2e-4)
