"""Continuous batching: a paged cache holds converted attention too, and what is not known is refused."""

import copy

import pytest
import torch
from transformers import (
    BertModel,
    ContinuousBatchingConfig,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
)

from collab_compress import Compression, HeadMask, UnsupportedModelError, compress
from collab_compress.attention.functions import collab_eager, collab_sdpa

IDS = {"vocab_size": 61, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15, 16, 17, 18, 19]]


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_embd=24, n_head=3, n_layer=2, n_positions=80, initializer_range=0.4, **IDS)
    model = GPT2LMHeadModel(config).eval()
    for layer in model.transformer.h:
        torch.nn.init.normal_(layer.attn.c_attn.bias, std=0.5)
    return model


def opt():
    torch.manual_seed(0)
    config = OPTConfig(
        hidden_size=24, num_attention_heads=3, num_hidden_layers=2, ffn_dim=32, word_embed_proj_dim=24, init_std=0.4,
        max_position_embeddings=80, **IDS,
    )  # fmt: skip
    return OPTForCausalLM(config).eval()


def one_by_one(model):
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "use_cache": True}
    return [
        model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), **options)[
            0, len(ids) :
        ].tolist()
        for ids in PROMPTS
    ]


def together(model):
    config = copy.deepcopy(model.generation_config)
    config.update(max_new_tokens=7, do_sample=False, eos_token_id=-1)
    small = ContinuousBatchingConfig(page_size=4, num_blocks=32, max_batch_tokens=32)  # else it takes all memory
    done = model.generate_batch(PROMPTS, generation_config=config, continuous_batching_config=small)
    return [output.generated_tokens for output in done.values()]


CASES = {
    "full": (gpt2, Compression(dk=24)),
    "low": (gpt2, Compression(dk=7)),
    "per-head": (gpt2, Compression(dk=9, form="per-head")),
    "fixed heads": (opt, Compression(dk=9)),
    "narrow": (gpt2, Compression(dk=7, dv=12)),
    "unequal": (gpt2, Compression(dv=10)),
    "narrow, fixed heads": (opt, Compression(dv=10)),
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("case", sorted(CASES))
def test_continuous_batching_equals_generate(case, implementation):
    build, compression = CASES[case]
    model = build()
    dense = one_by_one(model)
    model.set_attn_implementation(implementation)
    compress(model, compression, calibration=None)
    expected = one_by_one(model)
    assert together(model) == expected
    assert (expected == dense) == (case == "full")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_continuous_batching_with_masked_heads(implementation):
    model = gpt2()
    model.set_attn_implementation(implementation)
    with HeadMask(model, {"transformer.h.0.attn": torch.tensor([1.0, 0.0, 1.0])}):
        assert together(model) == one_by_one(model)


@pytest.mark.parametrize("attend", [collab_sdpa, collab_eager])
@pytest.mark.parametrize("converted", [True, False])
def test_what_is_not_known_is_refused(attend, converted, make_tiny):
    model: BertModel = make_tiny("bert")
    if converted:
        compress(model, Compression(dk=8), calibration=None)
    module = model.encoder.layer[0].attention.self
    query = key = value = torch.randn(1, 3, 4, 8)
    known = {"output_attentions": True, "position_ids": torch.arange(4), "s_aux": None}
    if converted:
        key = torch.randn(1, 2, 4, 8)
        query = key[:, :1]
    attend(module, query, key, value, None, scaling=1.0, **known)
    with pytest.raises(UnsupportedModelError, match=r"BertSelfAttention passes s_aux, softcap to its attention"):
        attend(module, query, key, value, None, scaling=1.0, softcap=50.0, s_aux=torch.ones(3))


def test_a_keyword_that_the_stock_model_would_leave_out_is_refused(make_tiny, batch):
    model = make_tiny("bert")
    compress(model, Compression(dk=8), calibration=None)
    with pytest.raises(UnsupportedModelError, match="passes head_mask to its attention"):
        model(**batch, head_mask=torch.ones(2, 3))
