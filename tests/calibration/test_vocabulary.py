"""How often tokens seem to occur in texts."""

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from collab_compress.calibration import calibration_batches
from collab_compress.calibration.synthetic import likelihoods

PIECES = ["[PAD]", "[UNK]", "[unused1]", "a", "!", "the", "of", "##ing", "##s", "<0x0A>", "▁was", "▁x", "__"]
WORDS = ["the", "of", "##ing", "▁was"]  # two characters or more, from the most frequent to the rarest


def tokenizer_of(pieces: list[str]) -> PreTrainedTokenizerFast:
    model = models.WordLevel({piece: place for place, piece in enumerate(pieces)}, unk_token=pieces[1])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), pad_token=pieces[0], unk_token=pieces[1])


def test_words_fall_off_with_their_rank_and_everything_else_is_seen_too():
    ordinary = list(range(2, len(PIECES)))
    found = likelihoods(tokenizer_of(PIECES), ordinary)
    whole = sum(1 / (rank + 2.7) for rank in range(1, len(WORDS) + 1))
    for place, token in enumerate(ordinary):
        piece = PIECES[token]
        common = 1 / (WORDS.index(piece) + 1 + 2.7) / whole if piece in WORDS else 0.0
        assert found[place].item() == pytest.approx((1 / len(ordinary) + common) / 2, rel=1e-6)


def test_an_alphabet_is_uniform():
    found = likelihoods(tokenizer_of(["[PAD]", "[UNK]", *"ARNDCQEG", "<mask>"]), range(2, 11))
    torch.testing.assert_close(found, torch.full((9,), 1 / 9, dtype=torch.float64))


def test_random_tokens_occur_as_often_as_they_seem_to():
    pieces = [*PIECES[:2], *(f"word{number}" for number in range(30)), *"abcdefgh"]
    tokenizer = tokenizer_of(pieces)
    model = BertModel(BertConfig(
        vocab_size=len(pieces), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
    ))  # fmt: skip
    batches = calibration_batches("synthetic", model, tokenizer, sequences=2000)
    drawn = torch.cat([batch["input_ids"][batch["attention_mask"].bool()] for batch in batches])
    counted = torch.bincount(drawn, minlength=len(pieces))[2:].double()
    expected = likelihoods(tokenizer, range(2, len(pieces)))
    assert (counted / counted.sum() - expected).abs().max() < 3e-3
    assert counted[0] > 3 * counted[29] > 3 * counted[-1]
