"""Random tokens by their likelihoods, and texts that a language model writes itself."""

import pytest
import torch
from tiny_words import bert_config, word_tokenizer
from tokenizers import Tokenizer, models
from transformers import (
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from collab_compress.calibration import calibration_batches
from collab_compress.calibration.encode import ordinary_tokens
from collab_compress.calibration.random_tokens import likelihoods
from collab_compress.errors import CalibrationError

PIECES = ["[PAD]", "[UNK]", "[unused1]", "a", "!", "the", "of", "##ing", "##s", "<0x0A>", "▁was", "▁x", "__"]
WORDS = ["the", "of", "##ing", "▁was"]  # two characters or more, from the most frequent to the rarest


def tokenizer_of(pieces: list[str]) -> PreTrainedTokenizerFast:
    model = models.WordLevel({piece: place for place, piece in enumerate(pieces)}, unk_token=pieces[1])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), pad_token=pieces[0], unk_token=pieces[1])


def test_words_follow_zipf_and_every_token_is_possible():
    ordinary = list(range(2, len(PIECES)))
    probs = likelihoods(tokenizer_of(PIECES), ordinary)
    total = sum(1 / (rank + 2.7) for rank in range(1, len(WORDS) + 1))
    for place, token in enumerate(ordinary):
        piece = PIECES[token]
        common = 1 / (WORDS.index(piece) + 1 + 2.7) / total if piece in WORDS else 0.0
        assert probs[place].item() == pytest.approx((1 / len(ordinary) + common) / 2, rel=1e-6)


def test_an_alphabet_is_uniform():
    probs = likelihoods(tokenizer_of(["[PAD]", "[UNK]", *"ARNDCQEG", "<mask>"]), range(2, 11))
    torch.testing.assert_close(probs, torch.full((9,), 1 / 9, dtype=torch.float64))


def test_random_tokens_occur_as_often_as_they_seem_to():
    pieces = [*PIECES[:2], *(f"word{number}" for number in range(30)), *"abcdefgh"]
    tokenizer = tokenizer_of(pieces)
    model = BertModel(bert_config(tokenizer))
    batches = calibration_batches("synthetic", model, tokenizer, sequences=2000)
    drawn = torch.cat([batch["input_ids"][batch["attention_mask"].bool()] for batch in batches])
    counted = torch.bincount(drawn, minlength=len(pieces))[2:].double()
    expected = likelihoods(tokenizer, range(2, len(pieces)))
    assert (counted / counted.sum() - expected).abs().max() < 3e-3
    assert counted[0] > 3 * counted[29] > 3 * counted[-1]


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


def gpt2(tokenizer, **others):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 30}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1, **others)).eval()


def test_each_token_is_drawn_as_the_model_says(tokenizer):
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


def test_a_models_own_way_of_generating_does_not_matter(tokenizer):
    plain, strange = gpt2(tokenizer), gpt2(tokenizer)
    strange.generation_config.update(
        top_k=1, temperature=0.1, num_beams=3, repetition_penalty=9.0, eos_token_id=[1, 3]
    )
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


def test_masks_are_filled_in_random_order_as_the_model_says():
    """Pairs of tokens follow the mean over both orders of p(first | masks) · p(second | first)."""
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    torch.manual_seed(0)
    model = BertForMaskedLM(bert_config(tokenizer, initializer_range=0.5)).train()
    batches = calibration_batches("generated", model, tokenizer, sequences=6000, length=4, seed=1)
    tokens = torch.cat([batch["input_ids"] for batch in batches])
    assert model.training
    begin, _, end = tokenizer("red")["input_ids"]
    assert set(tokens[:, 0].tolist()) == {begin}
    assert set(tokens[:, 3].tolist()) == {end}
    model.eval()
    ordinary = ordinary_tokens(model, tokenizer)

    def probabilities(first, second, place):
        ids = torch.tensor([[begin, first, second, end]])
        with torch.no_grad():
            return model(ids).logits[0, place, ordinary].double().softmax(-1)

    mask = tokenizer.mask_token_id
    expected = torch.zeros(len(ordinary), len(ordinary), dtype=torch.float64)
    for row, token in enumerate(ordinary):
        expected[row] += probabilities(mask, mask, 1)[row] * probabilities(token, mask, 2) / 2
        expected[:, row] += probabilities(mask, mask, 2)[row] * probabilities(mask, token, 1) / 2
    counted = torch.zeros_like(expected)
    for _, first, second, _ in tokens.tolist():
        counted[ordinary.index(first), ordinary.index(second)] += 1 / 6000
    assert (counted - expected).abs().sum() < 0.25
    assert (counted.sum(0) - expected.sum(0)).abs().max() < 0.02
    assert (counted.sum(1) - expected.sum(1)).abs().max() < 0.02


@pytest.mark.parametrize(
    "make",
    [
        lambda tokenizer: BertModel(bert_config(tokenizer)),
        lambda tokenizer: GPT2Model(gpt2(tokenizer).config),
        lambda _: T5ForConditionalGeneration(
            T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=8, num_heads=2, num_layers=1)
        ),
    ],
)
def test_models_that_write_no_texts_are_refused(make, tokenizer):
    model = make(tokenizer)
    with pytest.raises(CalibrationError, match=f"{type(model).__name__} writes no texts by itself"):
        calibration_batches("generated", model, tokenizer)


def test_a_tokenizer_without_a_mask_token_is_named():
    tokenizer = word_tokenizer()
    model = BertForMaskedLM(bert_config(tokenizer))
    tokenizer.mask_token = None
    with pytest.raises(CalibrationError, match=r"its tokenizer has no mask token; set tokenizer\.mask_token"):
        calibration_batches("generated", model, tokenizer)
