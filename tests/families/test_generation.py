"""Generation with converted models, and what their key caches hold."""

import copy
from itertools import product

import pytest
import torch
from tiny_families import TINIES, WAYS, build, generated, inputs, run
from transformers import OPTConfig, OPTModel, StaticCache

from collab_compress import (
    Compression,
    CompressionError,
    HeadMask,
    Solver,
    UnsupportedModelError,
    compress,
    expand,
    prune_heads_,
    read_factors,
)
from collab_compress.analysis import part_costs
from collab_compress.architectures import find_attention, find_dense_attention
from collab_compress.heads import masks_without
from collab_compress.transformers_parts import CACHE_NAME


def test_full_rank_generates_what_the_dense_model_does(generator):
    """With narrower heads, it generates the same with a cache as without."""
    dense, batch = build(generator, TINIES[generator].generates), inputs(generator)
    converted, narrow = copy.deepcopy(dense), copy.deepcopy(dense)
    compress(converted, Compression(dk=TINIES[generator].full), calibration=None)
    for way, options in WAYS.items():
        assert torch.equal(generated(converted, batch, **options), generated(dense, batch, **options)), way
    compress(narrow, Compression(dk=9, dv=8, solver=Solver(sweeps=2, refit=False)), calibration=[batch, batch])
    expected = generated(narrow, batch, do_sample=False)
    assert torch.equal(generated(narrow, batch, do_sample=False, use_cache=False), expected)


def test_a_batch_may_hold_labels():
    """A `Seq2SeqTrainer` gives `generate` the batch as it is, and models pass what they do not read to attention."""
    dense, batch = build("marian", TINIES["marian"].generates), inputs("marian")
    converted = copy.deepcopy(dense)
    compress(converted, Compression(dk=TINIES["marian"].full), calibration=None)
    labelled = {**batch, "labels": batch["input_ids"]}
    assert torch.equal(generated(converted, labelled), generated(dense, labelled))


def cached(model, batch):
    """Return the bytes per token of the keys and the values in each decoder self-attention cache."""
    with torch.no_grad():
        cache = getattr(model(**batch, use_cache=True), CACHE_NAME)
    layers = getattr(cache, "self_attention_cache", cache).layers
    return [
        tuple(tensor.nbytes // (tensor.shape[0] * tensor.shape[2]) for tensor in (at.keys, at.values))
        for at in layers
    ]


@pytest.mark.parametrize(
    ("name", "widths", "keys", "values"),
    [
        ("gpt2", {"dk": 8}, 16, 24),
        ("gpt2", {"dk": 13}, 16, 24),
        ("marian", {"dk": 8}, 11, 24),
        ("marian", {"dk": 5}, 8, 24),
        ("t5", {"dk": 8}, 8, 24),
        ("opt", {"dk": 8}, 24, 24),
        ("gpt2", {"dv": 12}, 24, 16),
        ("marian", {"dv": 12}, 24, 12),
        ("opt", {"dv": 12}, 24, 24),
    ],
)
def test_cache_bytes_before_and_after(name, widths, keys, values):
    """R + H or dv numbers a token; in stock modules whole heads of 8 (T5 has no content biases, OPT saves none)."""
    model, batch = build(name), inputs(name)
    layers = len(cached(model, batch))
    assert layers > 0
    assert cached(model, batch) == [(4 * 24, 4 * 24)] * layers
    assert counted(model) == [4 * 24] * layers
    compression = Compression(**widths, solver=Solver(sweeps=3 if "dk" in widths else None, refit=False))
    compress(model, compression, [inputs(name, seed) for seed in range(3)])
    assert cached(model, batch) == [(4 * keys, 4 * values)] * layers
    assert counted(model) == [4 * keys] * layers


def test_the_room_of_opt_is_known_before_any_work(monkeypatch):
    cases = [(None, True, True), (None, False, True), (5, True, False), (5, False, True)]
    for (head_dim, biased, calibrated), dk in product(cases, (21, 22, 23, 24)):
        batches = [inputs("opt", seed) for seed in range(3)] if calibrated else None
        model = OPTModel(OPTConfig(**{**TINIES["opt"].settings, "enable_bias": biased}))
        options = Compression(dk=dk, head_dim=head_dim, solver=Solver(sweeps=1, refit=False))
        if biased and dk > 24 - 3:
            with monkeypatch.context() as patched:
                patched.setattr("collab_compress.calibration.source.resolve", None)  # not reached
                message = f"got dk {dk} and 3 content biases .*exactly 3 heads of 8; pass dk up to 21"
                with pytest.raises(CompressionError, match=message):
                    compress(model, options, batches)
        else:
            compress(model, options, batches)
            assert all((factors.content_bias is not None) == biased for factors in read_factors(model).values())


def counted(model):
    """Return the bytes per token of the keys, as the analysis counts them."""
    return [cost.cache_after for cost in part_costs(model, kinds=["decoder"]) if cost.part == "dk"]


@pytest.mark.parametrize(
    ("name", "dk", "dv"),
    [
        ("gpt2", 20, None),
        ("gpt2", 5, 12),
        ("marian", 13, None),
        ("bert-decoder", 5, None),
        ("t5", 13, 10),
        ("t5", None, 10),
        ("opt", 13, 16),
        ("opt", 5, None),
        ("whisper", None, 8),
    ],
)
def test_static_caches_take_what_keys_and_values_take(name, dk, dv):
    model, batch = build(name, TINIES[name].generates), inputs(name)
    compress(model, Compression(dk=dk, dv=dv, solver=Solver(sweeps=2 if dk else None)), calibration=None)
    expected = generated(model, batch, do_sample=False, return_dict_in_generate=True)
    options = {"cache_implementation": "static", "disable_compile": True, "return_dict_in_generate": True}
    actual = generated(model, batch, do_sample=False, **options)
    assert torch.equal(actual.sequences, expected.sequences)
    for one, other in zip(layers(getattr(actual, CACHE_NAME)), layers(getattr(expected, CACHE_NAME)), strict=True):
        for part in ("keys", "values"):
            (*_, length, width), pieces = getattr(one, part).shape, getattr(one, part).shape[1]
            assert (pieces, width) == (getattr(other, part).shape[1], getattr(other, part).shape[3])
            assert length >= getattr(other, part).shape[2]


def layers(cache):
    caches = (
        [cache.self_attention_cache, cache.cross_attention_cache]
        if hasattr(cache, "self_attention_cache")
        else [cache]
    )
    return [layer for part in caches for layer in part.layers]


def test_a_static_cache_allocated_before_is_refused_where_it_does_not_fit():
    model, batch = build("gpt2", TINIES["gpt2"].generates), inputs("gpt2")
    compress(model, Compression(dk=5), calibration=None)
    cache = StaticCache(model.config, max_cache_len=32)
    cache.early_initialization(len(batch["input_ids"]), 3, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="keys 8 and values 24 wide; leave out early_initialization"):
        model(**batch, **{CACHE_NAME: cache})


@pytest.mark.parametrize(
    ("name", "dk", "dv", "pieces"),
    [("opt", 5, 8, 1), ("whisper", 8, 8, 2), ("whisper", 13, None, 3), ("opt", None, 8, 3), ("opt", 21, 24, 3)],
)
def test_where_exactly_h_heads_are_viewed_both_maps_make_caches_smaller(name, dk, dv, pieces):
    """Keys and values are laid out alike, in as many pieces of 8 as the wider of the two fills: R + H, or dv."""
    model, batch = build(name), inputs(name)
    compress(model, Compression(dk=dk, dv=dv, solver=Solver(sweeps=1 if dk else None, refit=False)), [batch, batch])
    assert {site.heads for site in find_dense_attention(build(name))} == {3}
    assert {site.heads for site in find_attention(model)} == {3}
    with torch.no_grad():
        cache = getattr(model(**batch, use_cache=True), CACHE_NAME)
    for layer in layers(cache):
        assert layer.keys.shape[1] == layer.values.shape[1] == pieces
    costs = part_costs(model, kinds=["decoder", "cross"]) if name != "opt" else part_costs(model)
    assert {cost.cache_after for cost in costs if cost.part == "dk"} == {4 * (8 * pieces if dk else 24)}


@pytest.mark.parametrize("name", ["opt", "whisper"])
def test_heads_are_removed_and_the_model_expands(name, tmp_path):
    dense, batch = build(name), inputs(name)
    model = copy.deepcopy(dense)
    compress(model, Compression(dk=9, dv=8, solver=Solver(sweeps=1)), [batch, batch])
    heads = {site.name: [1] for site in find_attention(model)}
    with HeadMask(model, masks_without(model, heads)):
        expected = run(model, batch)
    prune_heads_(model, heads)
    assert {site.heads for site in find_attention(model)} == {2}
    torch.testing.assert_close(run(model, batch), expected, atol=2e-5, rtol=1e-4)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(run(loaded, batch), run(model, batch))
    expand(loaded)
    assert {site.heads for site in find_dense_attention(loaded)} == {2}
    again = copy.deepcopy(dense)
    compress(again, Compression(dk=21, dv=24), calibration=None)
    expand(again)
    assert vars(again.get_submodule(next(iter(heads)))).keys() == vars(dense.get_submodule(next(iter(heads)))).keys()
