"""One new token reads the cache as it lies: the same outputs as otherwise, and no copy of keys or values."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    OPTConfig,
    OPTModel,
    StaticCache,
)

from collab_compress import Compression, HeadMask, Solver, compress
from collab_compress.attention import decoding, run
from collab_compress.attention.decoding import cached_scores, weighted_values
from collab_compress.transformers_parts import CACHE_NAME

IDS = {"vocab_size": 61, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}


SIZES = {"num_hidden_layers": 2, "initializer_range": 0.4, **IDS}


def gpt2():
    return GPT2Model(GPT2Config(n_embd=24, n_head=3, n_layer=2, n_positions=800, initializer_range=0.4, **IDS))


def opt():
    widths = {"hidden_size": 24, "word_embed_proj_dim": 24, "ffn_dim": 32, "num_attention_heads": 3}
    return OPTModel(OPTConfig(**widths, num_hidden_layers=2, init_std=0.4, max_position_embeddings=800, **IDS))


def llama(groups=4):
    heads = {"num_attention_heads": 4, "num_key_value_heads": groups}
    return LlamaModel(LlamaConfig(hidden_size=32, intermediate_size=40, **heads, **SIZES))


CASES = {
    "some channels": (gpt2, Compression(dk=13, head_dim=5, solver=Solver(sweeps=1))),
    "all channels": (gpt2, Compression(dk=13, head_dim=13, solver=Solver(sweeps=1))),
    "whole pieces": (gpt2, Compression(dk=16, solver=Solver(sweeps=1))),
    "values": (gpt2, Compression(dv=12)),
    "straddling values": (gpt2, Compression(dv=9)),
    "few values": (gpt2, Compression(dv=6)),
    "both": (gpt2, Compression(dk=9, dv=12, solver=Solver(sweeps=1))),
    "fixed heads": (opt, Compression(dk=9, dv=12, solver=Solver(sweeps=1))),
    "fixed heads, some channels": (opt, Compression(dk=12, head_dim=6, solver=Solver(sweeps=1))),
    "rotary": (llama, Compression(dk=16, dv=16, solver=Solver(sweeps=1))),
    "grouped": (lambda: llama(2), Compression(dk=8, dv=8, solver=Solver(sweeps=1))),
    "grouped, straddling values": (lambda: llama(2), Compression(dv=10)),
}


def converted(case):
    torch.manual_seed(0)
    build, compression = CASES[case]
    model = build().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    compress(model, compression, calibration=None)
    return model


@pytest.fixture
def decoded(monkeypatch):
    """Return a list of whether each call of the attention function used the decoding path."""
    decisions = []

    def spy(*inputs):
        decisions.append(decoding.can_decode(*inputs))
        return decisions[-1]

    monkeypatch.setattr(run, "can_decode", spy)
    return decisions


@torch.no_grad()
def token_after(model, ids, past=None, **options):
    """Return the outputs of the last token, with the others in a cache."""
    past = DynamicCache(config=model.config) if past is None else past
    prefix = {name: value[:, :-1] for name, value in options.items()}
    model(ids[:, :-1], **{CACHE_NAME: past}, **prefix)
    return model(ids[:, -1:], **{CACHE_NAME: past}, **options).last_hidden_state


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", sorted(CASES))
def test_decoding_gives_the_ordinary_outputs(case, padded, decoded, monkeypatch):
    if padded:  # with the smallest blocks as well
        monkeypatch.setattr(decoding, "CACHE_BYTES", 1)
    model = converted(case)
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    options = {"attention_mask": torch.ones_like(ids).index_fill(1, torch.arange(3), 0)} if padded else {}
    states = token_after(model, ids, **options)
    assert decoded == [False, False, True, True]
    monkeypatch.setattr(run, "can_decode", lambda *_: False)
    torch.testing.assert_close(states, token_after(model, ids, **options), rtol=1e-4, atol=1e-5)


def test_decoding_reads_a_static_cache(decoded):
    model = converted("rotary")
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    states = token_after(model, ids, StaticCache(model.config, max_cache_len=16))
    assert decoded == [False, False, True, True]
    torch.testing.assert_close(states, token_after(model, ids), rtol=1e-4, atol=1e-5)


def test_masked_heads_and_half_precision_are_not_decoded(decoded):
    model, ids = converted("both"), torch.tensor([[5, 6, 7]])
    with HeadMask(model, {"h.0.attn": torch.tensor([1.0, 0.0, 1.0])}):
        token_after(model, ids)
    assert decoded == []  # never called
    token_after(copy.deepcopy(model).bfloat16(), ids)
    model(ids[:, :1])
    assert decoded == [False] * 6


class Largest(TorchDispatchMode):
    """Track the largest number of elements that an operation allocates."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {part.untyped_storage().data_ptr() for part in args if isinstance(part, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.most = max(self.most, result.numel())
        return result


@pytest.mark.parametrize("case", ["some channels", "both", "straddling values", "fixed heads", "rotary", "grouped"])
def test_only_scores_grow_with_the_cache(case, monkeypatch):
    monkeypatch.setattr(decoding, "CACHE_BYTES", 1)  # products of keys pass through a buffer of constant size
    model, largest, real = converted(case), [], run._attend_to_cache

    def watched(*inputs):
        with Largest() as tracked:
            result = real(*inputs)
        largest.append(tracked.most)
        return result

    monkeypatch.setattr(run, "_attend_to_cache", watched)
    token_after(model, torch.randint(3, 61, (1, 600), generator=torch.Generator().manual_seed(1)))
    assert largest == [model.config.num_attention_heads * 600] * 2


@pytest.mark.parametrize(("size", "groups"), [(3, 3), (2, 2), (2, 3), (4, 3), (1, 1)])
def test_heads_and_pieces(size, groups):
    """Heads of values in key groups of 4 channels; some lie in two groups, and some groups have room left."""
    heads = 4 if (size, groups) == (2, 2) else 3
    probs, value = torch.rand(2, 2 * heads, 5), torch.randn(2, groups, 5, 4)  # two heads share each head of values
    joined = value.transpose(1, 2).flatten(2)[..., : heads * size].split(size, -1)
    expected = [probs[:, head, None] @ joined[head // 2] for head in range(2 * heads)]
    torch.testing.assert_close(weighted_values(probs, value, heads, size), torch.cat(expected, -1)[:, 0])
    query, key = torch.randn(2, 3, 8), torch.randn(2, 2, 5, 4)
    torch.testing.assert_close(cached_scores(query, key), query @ key.transpose(1, 2).flatten(2).mT)
