"""Trimmed vocabularies: tokens and hidden states that stay, texts that are still known, ids that follow."""

import copy
import json
from functools import cache
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DebertaConfig,
    DebertaForMaskedLM,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from collab_compress import CalibrationError, CompressionError, UnsupportedModelError, trim_vocabulary_
from collab_compress.calibration.builtin import builtin_texts
from collab_compress.vocabulary import trim

WIDTH, HEADS, SIZE = 24, 3, 700
SMALL = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 40}
TEXTS = [text for text in builtin_texts(pairs=False, more=False) if isinstance(text, str)]
SPECIAL = {
    "pad_token": "<pad>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def word_pieces():
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=SIZE, special_tokens=list(SPECIAL.values()), show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B:1 </s>:1", ends)
    return tokenizer


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=SIZE, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([token for token in SPECIAL.values() if token != "<unk>"])  # the last ids
    tokenizer.add_tokens(["@user"])
    ends = [(token, tokenizer.token_to_id(token)) for token in ("</s>", "<s>")]
    tokenizer.post_processor = processors.RobertaProcessing(*ends, trim_offsets=True, add_prefix_space=False)
    return tokenizer


def byte_fallback():
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = [*SPECIAL.values(), *BYTES]
    trainer = trainers.BpeTrainer(vocab_size=SIZE + 256, special_tokens=special, show_progress=False)
    trained.train_from_iterator([word for text in TEXTS for word in text.split()], trainer)
    state = json.loads(trained.to_str())
    state["model"] |= {"byte_fallback": True, "fuse_unk": True}
    state["added_tokens"] = state["added_tokens"][: len(SPECIAL)]  # bytes are ordinary tokens
    tokenizer = Tokenizer.from_str(json.dumps(state))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = list(SPECIAL.values())
    trainer = trainers.UnigramTrainer(
        vocab_size=SIZE, special_tokens=special, unk_token="<unk>", show_progress=False, max_piece_length=8
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    end = [("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", end)
    return tokenizer


TOKENIZERS = {"WordPiece": word_pieces, "bytes": byte_level, "fallback": byte_fallback, "Unigram": unigram}


@cache
def _trained(kind):
    return TOKENIZERS[kind]().to_str()


def tokenizer_of(kind):
    special = {name: token for name, token in SPECIAL.items() if kind != "bytes" or token != "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_trained(kind)), **special)


def sizes(tokenizer):
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    return {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in names}}


def masked(tokenizer):
    return BertForMaskedLM(BertConfig(**SMALL, **sizes(tokenizer)))


POSITIONS = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True}


def relative(tokenizer):
    return DebertaV2ForMaskedLM(DebertaV2Config(**SMALL, **POSITIONS, **sizes(tokenizer)))


def of_first_deberta(tokenizer):
    return DebertaForMaskedLM(DebertaConfig(**SMALL, **POSITIONS, **sizes(tokenizer)))


def tied(tokenizer):
    model = GPT2LMHeadModel(GPT2Config(n_embd=WIDTH, n_head=HEADS, n_layer=2, n_positions=80, **sizes(tokenizer)))
    model.generation_config.bad_words_ids = [[7], [9, 11]]
    model.generation_config.suppress_tokens = [13]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 20]
    return model


def untied(tokenizer):
    sized = sizes(tokenizer) | {"vocab_size": len(tokenizer) + 9}  # padded
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, tie_word_embeddings=False, **sized))


def shared(tokenizer):
    width = {"d_model": WIDTH, "d_kv": 8, "d_ff": 40, "num_heads": HEADS, "num_layers": 1}
    start = {"decoder_start_token_id": tokenizer.pad_token_id}
    return T5ForConditionalGeneration(T5Config(**width, **sizes(tokenizer), **start))


def biased(tokenizer):
    layers = {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 1), ("ffn_dim", 40))
    }
    heads = {f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")}
    ids = {"decoder_start_token_id": tokenizer.eos_token_id, "forced_bos_token_id": 6, "forced_eos_token_id": 2}
    config = BartConfig(d_model=WIDTH, max_position_embeddings=80, **layers, **heads, **sizes(tokenizer), **ids)
    model = BartForConditionalGeneration(config)
    model.final_logits_bias += torch.arange(len(tokenizer))
    model.generation_config.forced_bos_token_id = 6
    return model


CASES = {
    "masked": ("WordPiece", masked),
    "relative": ("Unigram", relative),
    "first DeBERTa": ("bytes", of_first_deberta),
    "tied": ("bytes", tied),
    "untied": ("fallback", untied),
    "shared": ("Unigram", shared),
    "biased": ("Unigram", biased),
}


def pair_of(case):
    kind, make = CASES[case]
    torch.manual_seed(0)
    tokenizer = tokenizer_of(kind)
    return make(tokenizer).eval(), tokenizer


@cache
def trimmed(case, share=0.8):
    """Return model and tokenizer before and after, the report, and old id → new id."""
    model, tokenizer = pair_of(case)
    before = copy.deepcopy(model), tokenizer_of(CASES[case][0])
    report = trim_vocabulary_(model, tokenizer, tokens=int(share * len(tokenizer)))
    vocabulary = before[1].get_vocab()
    return (
        before,
        (model, tokenizer),
        report,
        {vocabulary[token]: new for token, new in tokenizer.get_vocab().items()},
    )


def states(model, rows):
    ids = torch.tensor([rows])
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        output = model(input_ids=ids, **decoder, output_hidden_states=True)
    hidden = output.decoder_hidden_states if decoder else output.hidden_states
    return hidden, output.logits


def embeddings(model):
    return model.get_input_embeddings(), model.get_output_embeddings()


@pytest.mark.parametrize("case", CASES)
def test_a_text_whose_tokens_stay_has_the_same_states(case):
    (model, tokenizer), (small, smaller), report, new = trimmed(case)
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    kept = [(text, row) for text, row in zip(TEXTS, rows, strict=True) if set(row) <= new.keys() and len(row) < 80]
    assert len(kept) > 100
    for text, row in kept[:200]:
        assert smaller(text)["input_ids"] == [new[number] for number in row]
    old = torch.tensor(sorted(new))
    for _, row in kept[:3]:
        (before, logits), (after, fewer) = states(model, row), states(small, [new[number] for number in row])
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        torch.testing.assert_close(fewer, logits[..., old])
    counts = {small.config.vocab_size, *(layer.weight.shape[0] for layer in embeddings(small))}
    assert {report.tokens_after, len(smaller), small.get_output_embeddings().out_features} | counts == {len(new)}
    assert report.tokens_before == len(model.get_output_embeddings().weight)
    assert report.parameters_after == small.num_parameters() < model.num_parameters() == report.parameters_before
    assert [smaller.convert_ids_to_tokens(new[number]) for number in sorted(new)] == list(
        tokenizer.convert_ids_to_tokens(sorted(new))
    )
    assert sorted(new.values()) == list(range(len(new))) == [new[number] for number in sorted(new)]  # order is kept


WORDS = sorted(set(chain.from_iterable(text.split() for text in TEXTS)))
ANY = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=8)), max_size=8).map(" ".join)


@pytest.mark.parametrize(
    ("case", "share"), [(case, share) for case in CASES if case != "biased" for share in (0.6, 0.9)]
)
@given(data=st.data())
def test_any_text_is_still_known_and_decoded_as_before(case, share, data):
    (_, tokenizer), (_, smaller), _, new = trimmed(case, share)
    text = data.draw(ANY)
    before, after = tokenizer(text)["input_ids"], smaller(text)["input_ids"]
    if set(before) <= new.keys():
        assert after == [new[number] for number in before]
    assert after.count(smaller.unk_token_id) <= before.count(tokenizer.unk_token_id)
    assert smaller.decode(after) == tokenizer.decode(before)


@pytest.mark.parametrize("case", CASES)
def test_stock_classes_load_what_was_saved(case, tmp_path):
    _, (model, tokenizer), _, _ = trimmed(case)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, words = type(model).from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    row = words(TEXTS[0], TEXTS[1])["input_ids"]
    assert row == tokenizer(TEXTS[0], TEXTS[1])["input_ids"]
    torch.testing.assert_close(states(loaded.eval(), row[:60])[1], states(model, row[:60])[1])
    assert words.get_vocab() == tokenizer.get_vocab()
    ids, numbers = (config.to_dict() for config in (loaded.config, model.config))
    assert {name: value for name, value in ids.items() if "id" in name} == {
        name: value for name, value in numbers.items() if "id" in name
    }


def test_ids_of_configs_and_generation_settings_follow():
    (model, tokenizer), (small, smaller), _, new = trimmed("tied")
    assert small.config.pad_token_id == smaller.pad_token_id == new[tokenizer.pad_token_id] != tokenizer.pad_token_id
    settings, before = small.generation_config, model.generation_config
    assert settings.eos_token_id == [smaller.eos_token_id, new[20]]
    assert settings.bad_words_ids == [[new[7]], [new[9], new[11]]]
    assert settings.suppress_tokens == [new[13]]
    assert before.eos_token_id == [tokenizer.eos_token_id, 20]
    assert smaller.convert_tokens_to_ids("@user") == new[tokenizer.convert_tokens_to_ids("@user")]
    assert small.generate(**smaller("The", return_tensors="pt"), max_new_tokens=3, do_sample=False).shape[1] > 3
    assert small.get_output_embeddings().weight is small.get_input_embeddings().weight

    (model, tokenizer), (small, _), _, new = trimmed("biased")
    assert small.config.decoder_start_token_id == new[tokenizer.eos_token_id]
    assert small.generation_config.forced_bos_token_id == new[model.generation_config.forced_bos_token_id]
    assert torch.equal(small.final_logits_bias[0], torch.tensor(sorted(new)).float())


def test_ids_inside_other_settings_follow():
    model, tokenizer = pair_of("tied")
    settings, before = model.generation_config, tokenizer.get_vocab()
    settings.lang_to_id, settings.task_to_id = {"<|en|>": 691, "<|fr|>": 660}, {"translate": 680}
    settings.forced_decoder_ids = [[1, 691], [2, None], [3, 680]]
    settings.begin_suppress_tokens = [670]
    model.config.task_specific_params = {"translation": {"decoder_start_token_id": 660, "max_length": 670}}
    trim_vocabulary_(model, tokenizer, tokens=500)
    new = {number: tokenizer.get_vocab().get(token) for token, number in before.items()}
    assert {new[660], new[670], new[680], new[691]} <= set(range(500))
    assert settings.lang_to_id == {"<|en|>": 691, "<|fr|>": 660}
    after = model.generation_config
    assert after.lang_to_id == {"<|en|>": new[691], "<|fr|>": new[660]}
    assert after.task_to_id == {"translate": new[680]}
    assert after.forced_decoder_ids == [[1, new[691]], [2, None], [3, new[680]]]
    assert after.begin_suppress_tokens == [new[670]]
    translation = {"decoder_start_token_id": new[660], "max_length": 670}
    assert model.config.task_specific_params == {"translation": translation}


@pytest.mark.parametrize("name", ["language_ids", "char_to_id", "speaker_codes"])
def test_settings_that_may_hold_ids_in_an_unknown_form_are_refused(name):
    model, tokenizer = pair_of("tied")
    setattr(model.generation_config, name, {"a": [5, 9]})
    with pytest.raises(UnsupportedModelError, match=f"generation_config.{name} of GPT2LMHeadModel may hold ids"):
        trim_vocabulary_(model, tokenizer, tokens=500)
    assert len(model.get_input_embeddings().weight) == len(tokenizer) == model.config.vocab_size


@pytest.mark.parametrize("case", ["masked", "shared"])
def test_the_body_of_a_model_with_a_head_of_the_vocabulary_is_refused(case):
    model, tokenizer = pair_of(case)
    size = len(model.get_input_embeddings().weight)
    body = model.encoder if case == "shared" else model.base_model
    outer = torch.nn.Sequential(torch.nn.Identity(), model)
    with pytest.raises(
        UnsupportedModelError, match=rf"is part of {type(model).__name__}, .* {size} tokens; pass the"
    ):
        trim_vocabulary_(body, tokenizer, tokens=len(tokenizer) - 100)
    assert len(model.get_input_embeddings().weight) == size
    assert outer[1] is model
    del model, outer
    trim_vocabulary_(body, tokenizer, tokens=len(tokenizer) - 100)
    assert len(body.get_input_embeddings().weight) < size


def test_the_body_of_a_classifier_is_trimmed_with_it(tmp_path):
    _, tokenizer = pair_of("masked")
    model = BertForSequenceClassification(BertConfig(**SMALL, **sizes(tokenizer)))
    trim_vocabulary_(model.bert, tokenizer, tokens=500)
    model.save_pretrained(tmp_path)
    loaded = BertForSequenceClassification.from_pretrained(tmp_path)
    assert len(loaded.get_input_embeddings().weight) == loaded.config.vocab_size == 500


def test_an_interrupt_leaves_model_and_tokenizer_as_they_were(monkeypatch):
    model, tokenizer = pair_of("masked")
    words, attributes = tokenizer.get_vocab(), dict(vars(tokenizer))

    reload = trim.reload

    def reloaded(*args):
        made = reload(*args)
        monkeypatch.setattr(trim, "vars", lambda one: Attributes(vars(one)) if one is tokenizer else vars(one), False)
        return made

    class Attributes:
        def __init__(self, attributes):
            self.attributes = attributes

        def clear(self):
            self.attributes.clear()

        def update(self, others):
            self.attributes.update(others)
            if others.keys() != attributes.keys() or others["_tokenizer"] is not attributes["_tokenizer"]:
                raise KeyboardInterrupt

        def keys(self):
            return self.attributes.keys()

        def __getitem__(self, name):
            return self.attributes[name]

    monkeypatch.setattr(trim, "reload", reloaded)
    with pytest.raises(KeyboardInterrupt):
        trim_vocabulary_(model, tokenizer, tokens=500)
    assert tokenizer.get_vocab() == words
    assert vars(tokenizer) == attributes
    assert len(model.get_input_embeddings().weight) == model.config.vocab_size == SIZE


def test_a_row_that_the_config_names_stays_without_a_token():
    model, tokenizer = pair_of("untied")
    last = model.config.pad_token_id = len(tokenizer) + 2
    row = model.model.embed_tokens.weight[last]
    report = trim_vocabulary_(model, tokenizer, tokens=800)
    assert (len(tokenizer), report.tokens_after, model.config.pad_token_id) == (800, 801, 800)
    assert torch.equal(model.model.embed_tokens.weight[800], row)


def test_the_most_frequent_tokens_of_the_texts_stay():
    model, tokenizer = pair_of("tied")
    texts = ["zebra quartz zebra"] * 20
    rows = tokenizer.tokenize(texts[0])
    report = trim_vocabulary_(model, tokenizer, texts, tokens=320)
    assert report.length == 1
    assert report.same == report.texts == 2
    assert tokenizer.tokenize(texts[0]) == rows
    assert len(tokenizer) == 320
    assert "2 of 2 held-back texts keep their tokens, and so their hidden states; all have +0.0%" in str(report)


def test_texts_that_are_left_out_are_warned_of(caplog):
    trim_vocabulary_(*pair_of("tied"), ["a cat", "", "a dog"], tokens=320)
    assert "1 of 3" in caplog.text


def test_named_tokens_stay_with_those_that_they_are_merged_from():
    model, tokenizer = pair_of("tied")
    trim_vocabulary_(model, tokenizer, tokens=["Ġwith", "Ġand"])
    assert tokenizer.tokenize("x with of and") == ["x", "Ġwith", "Ġ", "o", "f", "Ġand"]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    assert {"".join(pair) for pair in merges} <= set(tokenizer.get_vocab())
    assert len(tokenizer) < 285


def test_a_token_with_a_character_that_is_none_by_itself_stays():
    pieces = ["[UNK]", "[PAD]", "a", "##a", "b", "##b", "##ab", "##cab", "ab", "aba"]
    words = models.WordPiece({piece: place for place, piece in enumerate(pieces)}, unk_token="[UNK]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="[UNK]", pad_token="[PAD]")
    model = BertForMaskedLM(BertConfig(**SMALL, vocab_size=len(pieces), pad_token_id=1))
    trim_vocabulary_(model, tokenizer, ["ab"], tokens=8)
    assert sorted(tokenizer.get_vocab()) == sorted([*pieces[:6], "##cab", "ab"])
    assert tokenizer.tokenize("acab") == ["a", "##cab"]


def test_a_sentence_transformer_and_its_tokenizer_are_trimmed(minilm_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(minilm_path), device="cpu")
    before = model.encode(["The cat sat on the mat."])
    report = trim_vocabulary_(model, tokens=8000)
    assert (report.tokens_before, report.tokens_after, len(model.tokenizer)) == (30522, 8000, 8000)
    assert (model.encode(["The cat sat on the mat."]) == before).all()
    assert 1 < report.length < 1.3
    assert 0 < report.same < report.texts


@pytest.mark.parametrize("texts", ["builtin", ["one text"]])
def test_what_cannot_be_trimmed_is_refused_and_left_as_it_was(texts):
    model, tokenizer = pair_of("masked")
    weights, config, words = copy.deepcopy(model.state_dict()), model.config.to_dict(), tokenizer.get_vocab()

    def refused(message, error=CompressionError, model=model, tokenizer=tokenizer, tokens=400):
        with pytest.raises(error, match=message):
            trim_vocabulary_(model, tokenizer, texts, tokens=tokens)

    least = r"expected at least \d\d\d?, as many as must stay .* and fewer than the 700 that there are"
    refused(f"a vocabulary of 5 tokens is asked for; {least}", tokens=5)
    refused(f"a vocabulary of 700 tokens is asked for; {least}", tokens=700)
    refused("the tokenizer has no token 'Zebra'; expected tokens as it writes them", tokens=["the", "Zebra"])
    refused("tokens is 'the'; expected how many tokens stay, or a list of them", tokens="the")
    refused("BertForMaskedLM comes without its tokenizer", tokenizer=None)
    small = BertForMaskedLM(BertConfig(**SMALL, vocab_size=650, pad_token_id=0))
    refused("the tokenizer has token 699, but BertForMaskedLM has embeddings of 650 tokens", model=small)
    refused("reads more than texts", UnsupportedModelError, ViTModel(ViTConfig(**SMALL, image_size=8, patch_size=4)))
    model.register_parameter("other", torch.nn.Parameter(torch.zeros(700, 3)))
    refused(r"^other has shape \(700, 3\) and is no input or output embedding", UnsupportedModelError)
    del model.other
    after = model.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(weights[name], after[name]) for name in weights)
    assert model.config.to_dict() == config
    assert tokenizer.get_vocab() == words


def test_a_slow_tokenizer_and_whole_words_are_refused():
    model, _ = pair_of("masked")
    words = models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")
    whole = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="<unk>")
    with pytest.raises(CompressionError, match="a WordLevel model, in which words without a token are unknown"):
        trim_vocabulary_(model, whole, tokens=1)
    from transformers.tokenization_python import PythonBackend

    class Slow(PythonBackend):
        vocab_size = 2

        def get_vocab(self):
            return {"a": 0, "b": 1}

        def _convert_token_to_id(self, token):
            return 0

    with pytest.raises(CompressionError, match="Slow is a slow tokenizer, whose vocabulary cannot be trimmed"):
        trim_vocabulary_(model, Slow(), tokens=1)


def test_positions_that_are_counted_from_the_padding_are_noticed():
    tokenizer = tokenizer_of("bytes")  # with its padding at the end
    config = RobertaConfig(**SMALL, max_position_embeddings=len(tokenizer) + 80, **sizes(tokenizer))
    model = RobertaModel(config)
    size = model.get_input_embeddings().weight.shape
    with pytest.raises(UnsupportedModelError, match="depends on the ids of tokens in a way that is not known"):
        trim_vocabulary_(model, tokenizer, tokens=500)
    assert model.get_input_embeddings().weight.shape == size
    assert model.config.vocab_size == len(tokenizer)


def test_english_texts_are_refused_where_the_tokenizer_does_not_know_them():
    model, tokenizer = pair_of("masked")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    spelling = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **SPECIAL)
    with pytest.raises(CalibrationError, match="the built-in texts are English, and the tokenizer spells English"):
        trim_vocabulary_(model, spelling, tokens=400)


@pytest.mark.parametrize("texts", [None, 5, {"text": ["a cat"]}, b"a cat", (), ("builtin", None)])
def test_what_is_no_texts_is_refused(texts):
    with pytest.raises(CalibrationError, match=r"texts is .*expected|texts is an empty tuple|texts is a tuple"):
        trim_vocabulary_(*pair_of("masked"), texts, tokens=400)


def test_tokens_of_several_sources_are_counted(tmp_path):
    (tmp_path / "texts.txt").write_text("a cat\n" * 8, encoding="utf-8")
    model, tokenizer = pair_of("masked")
    report = trim_vocabulary_(model, tokenizer, (tmp_path / "texts.txt", ["a dog"] * 8), tokens=400)
    assert report.texts == 2
