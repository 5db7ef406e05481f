"""The main job on the real model."""

import torch

from collab_compress import Compression, compress, expand

TEXTS = ["A man is playing a guitar.", "The quick brown fox jumps over the lazy dog, twice, and then it rests."]


def hidden(model, tokenizer):
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**batch).last_hidden_state[batch["attention_mask"].bool()]


def test_full_rank_is_exact_with_padding(minilm, minilm_tokenizer):
    expected = hidden(minilm, minilm_tokenizer)
    compress(minilm, Compression(dk=384), calibration=None)
    for implementation in ("eager", "sdpa"):
        minilm.set_attn_implementation(implementation)
        torch.testing.assert_close(hidden(minilm, minilm_tokenizer), expected, atol=1e-4, rtol=0)
    expand(minilm)
    torch.testing.assert_close(hidden(minilm, minilm_tokenizer), expected, atol=1e-4, rtol=0)
