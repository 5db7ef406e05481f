"""The texts that come with the package: whole, and read by models that know English only."""

from itertools import chain

import pytest
import torch
from tiny_words import bert_config, unpadded_rows, word_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianModel,
    PreTrainedTokenizerFast,
)

from collab_compress import CalibrationOptions
from collab_compress.calibration import calibration_batches
from collab_compress.calibration.builtin import builtin_texts
from collab_compress.calibration.source import resolve
from collab_compress.errors import CalibrationError


def characters():
    """Return a tokenizer of single characters, as one of another script has for English."""
    alphabet = {chr(code): code - 32 for code in range(32, 127)} | {"[UNK]": 95}
    inner = Tokenizer(models.WordLevel(alphabet, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", model_max_length=60)


def parts(calibration, model, tokenizer, sequences=None, seed=0):
    """Return the words and the batches of each source, of which nothing is left out."""
    notes = []
    sources = resolve(calibration, model, tokenizer, CalibrationOptions(sequences=sequences), seed)
    made = [(source.words, source.batches(notes)) for source in sources]
    assert notes == []
    return made


def marian():
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 0}
    return MarianModel(MarianConfig(vocab_size=30522, max_position_embeddings=64, pad_token_id=0, **sizes, **heads))


def test_the_texts_are_whole_and_each_is_there_once():
    pairs, single = builtin_texts(pairs=True), builtin_texts(pairs=False)
    texts, tuples, more = pairs[:640], pairs[640:1120], pairs[1120:]
    assert single == [*texts, *chain.from_iterable(tuples), *more]
    assert len(set(texts)) == 640
    assert len(set(more) - set(texts)) == 1350 + 2222 + 900
    assert builtin_texts(pairs=True, more=False) == pairs[:1120]
    assert len(set(tuples)) == 480
    for text in single:
        assert text == text.strip()
        assert text.isprintable()
        assert len(text.split()) > 0


@pytest.fixture
def classifier(minilm_tokenizer):
    return BertForSequenceClassification(bert_config(minilm_tokenizer, max_position_embeddings=512))


def test_random_tokens_stand_beside_the_texts(classifier, minilm_tokenizer):
    batches = calibration_batches("auto", classifier, minilm_tokenizer, seed=3)
    (words, texts), (random_words, random) = parts("auto", classifier, minilm_tokenizer, seed=3)
    assert (words, random_words) == ("the texts that come with collab_compress", "random tokens")
    alone = calibration_batches("synthetic", classifier, minilm_tokenizer, seed=3)
    encoded = minilm_tokenizer(builtin_texts(pairs=True, more=False))
    assert unpadded_rows(texts) == sorted(encoded["input_ids"])
    assert unpadded_rows(random) == unpadded_rows(alone)
    assert unpadded_rows(batches) == sorted([*unpadded_rows(texts), *unpadded_rows(alone)])
    assert sum(int(batch["token_type_ids"].sum()) for batch in texts) == sum(map(sum, encoded["token_type_ids"]))
    named = calibration_batches("builtin", classifier, minilm_tokenizer, seed=3)
    assert all(torch.equal(one["input_ids"], two["input_ids"]) for one, two in zip(batches, named, strict=True))


def test_a_model_without_a_head_reads_single_texts_alone(minilm, minilm_tokenizer):
    batches = calibration_batches("auto", minilm, minilm_tokenizer)
    assert unpadded_rows(batches) == sorted(minilm_tokenizer(builtin_texts(pairs=False))["input_ids"])
    few = calibration_batches("builtin", minilm, minilm_tokenizer, sequences=100)
    assert len(unpadded_rows(few)) == 100
    assert {*map(tuple, unpadded_rows(few))} <= {*map(tuple, unpadded_rows(batches))}


def test_a_decoder_reads_the_texts_of_a_pair_one_by_one(minilm_tokenizer):
    config = GPT2Config(vocab_size=len(minilm_tokenizer), n_embd=8, n_head=2, n_layer=1)
    (_, texts), _ = parts("auto", GPT2LMHeadModel(config), minilm_tokenizer)
    encoded = minilm_tokenizer(builtin_texts(pairs=False, more=False))
    assert unpadded_rows(texts) == sorted(encoded["input_ids"])


@pytest.mark.parametrize(("sequences", "texts"), [(100, 74), (2000, 1120)])
def test_fewer_sequences_are_the_same_mixture(sequences, texts, classifier, minilm_tokenizer):
    (_, given), (_, random) = parts("builtin", classifier, minilm_tokenizer, sequences)
    assert (len(unpadded_rows(given)), len(unpadded_rows(random))) == (texts, sequences - texts)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (characters, r"the tokenizer spells English, 0\.8 characters a token"),
        (word_tokenizer, "the tokenizer does not know English"),
    ],
)
def test_a_tokenizer_that_does_not_know_english_gets_random_tokens(make, reason, caplog):
    tokenizer = make()
    model = BertModel(bert_config(tokenizer, max_position_embeddings=60))
    batches = calibration_batches("auto", model, tokenizer)
    (note,) = caplog.messages
    assert note.startswith("calibration uses random tokens, not the built-in texts: the tokenizer ")
    assert unpadded_rows(batches) == unpadded_rows(calibration_batches("synthetic", model, tokenizer))
    with pytest.raises(CalibrationError, match=f"the built-in texts are English, and {reason}; pass texts"):
        calibration_batches("builtin", model, tokenizer)
    (source,) = resolve("auto", model, tokenizer, CalibrationOptions())
    assert source.is_random


def test_an_encoder_decoder_gets_random_tokens(minilm_tokenizer):
    model = marian()
    batches = calibration_batches("auto", model, minilm_tokenizer)
    assert unpadded_rows(batches) == unpadded_rows(calibration_batches("synthetic", model, minilm_tokenizer))
    with pytest.raises(CalibrationError, match="MarianModel reads a source and a target; pass texts, or 'synthetic'"):
        calibration_batches("builtin", model, minilm_tokenizer)
