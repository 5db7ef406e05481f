"""Texts that a language model writes itself."""

import pytest
import torch
from tiny_words import bert_config, word_tokenizer
from transformers import (
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from collab_compress import CalibrationOptions, Compression, compress
from collab_compress.calibration import calibration_batches
from collab_compress.calibration.synthetic import likelihoods, ordinary_tokens
from collab_compress.errors import CalibrationError


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


def gpt2(tokenizer, **others):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 30}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1, **others)).eval()


def test_each_token_is_drawn_as_the_model_says(tokenizer):
    """Counts of the third token, against the probabilities of full forward passes, summed over beginnings."""
    model = gpt2(tokenizer, initializer_range=0.5)
    batches = calibration_batches("generated", model, tokenizer, sequences=6000, length=3)
    tokens = torch.cat([batch["input_ids"] for batch in batches])
    assert tokens.shape == (6000, 3)
    with torch.no_grad():
        logits = model(tokens[:, :2]).logits[:, -1]
    expected = logits.double().softmax(-1).mean(0)
    counted = torch.bincount(tokens[:, 2], minlength=len(tokenizer)) / 6000
    assert (counted - expected).abs().max() < 0.02
    assert expected.max() > 2 * expected.mean()
    assert counted[model.config.eos_token_id] > 0


def test_texts_begin_with_random_tokens(tokenizer):
    batches = calibration_batches("generated", gpt2(tokenizer), tokenizer, sequences=4000, length=3)
    begin, first, _ = torch.cat([batch["input_ids"] for batch in batches]).unbind(1)
    assert set(begin.tolist()) == {tokenizer.bos_token_id}
    ordinary = ordinary_tokens(gpt2(tokenizer), tokenizer)
    counted = torch.bincount(first, minlength=len(tokenizer))[ordinary] / 4000
    assert (counted - likelihoods(tokenizer, ordinary)).abs().max() < 0.02


def test_a_models_own_way_of_generating_does_not_matter(tokenizer):
    plain, strange = gpt2(tokenizer), gpt2(tokenizer)
    for name, value in {
        "top_k": 1,
        "temperature": 0.1,
        "num_beams": 3,
        "repetition_penalty": 9.0,
        "eos_token_id": [1, 3],
    }.items():
        setattr(strange.generation_config, name, value)
    state = torch.get_rng_state()
    strange.train()
    one, other = (
        calibration_batches("generated", model, tokenizer, sequences=20, seed=3) for model in (plain, strange)
    )
    assert strange.training
    assert torch.equal(torch.get_rng_state(), state)
    assert [batch["input_ids"].shape for batch in one] == [(16, 30), (4, 30)]  # as long as the model takes
    assert len({tuple(row) for batch in other for row in batch["input_ids"].tolist()}) == 20
    again = calibration_batches("generated", plain, tokenizer, sequences=20, seed=3)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, again, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda tokenizer: BertForMaskedLM(bert_config(tokenizer)),
        lambda tokenizer: GPT2Model(gpt2(tokenizer).config),
        lambda _: T5ForConditionalGeneration(
            T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=8, num_heads=2, num_layers=1)
        ),
    ],
)
def test_what_writes_no_texts(make, tokenizer):
    model = make(tokenizer)
    with pytest.raises(CalibrationError, match=f"{type(model).__name__} writes no texts by itself"):
        calibration_batches("generated", model, tokenizer)


def test_layers_are_refitted_to_them(tokenizer):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            num_attention_heads=2,
            num_hidden_layers=1,
            intermediate_size=24,
            max_position_embeddings=40,
            initializer_range=0.3,
        )
    )
    options = CalibrationOptions(sequences=40)
    report = compress(model, Compression(dff=12), "generated", tokenizer, calibration_options=options)
    assert report.sequences == 35
    assert [each.name for each in report.refits] == [
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.down_proj",
    ]
    assert report.length == 40
