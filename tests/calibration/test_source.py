import copy

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from datasets import Dataset
from tiny_families import build, inputs
from tiny_words import bert_config, unpadded_rows, word_tokenizer
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GPT2Config,
    GPT2Model,
    MarianModel,
    MBart50Tokenizer,
    MBartTokenizer,
    NllbTokenizer,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
)

from collab_compress import CalibrationOptions, Compression, Solver, compress
from collab_compress.calibration import calibration_batches, run_batch
from collab_compress.calibration.batches import MAX_TOKENS_PER_BATCH, in_parts, sample_sequences, sequence_count
from collab_compress.calibration.files import read_texts
from collab_compress.calibration.source import resolve
from collab_compress.errors import CalibrationError


def test_synthetic_tokens(minilm, minilm_tokenizer):
    batches = calibration_batches("synthetic", minilm, minilm_tokenizer, sequences=20, length=10, seed=3)
    ids = torch.cat([batch["input_ids"] for batch in batches])
    assert ids.shape == (20, 10)
    assert (ids[:, 0] == minilm_tokenizer.cls_token_id).all()
    assert (ids[:, -1] == minilm_tokenizer.sep_token_id).all()
    assert not torch.isin(ids[:, 1:-1], torch.tensor(minilm_tokenizer.all_special_ids)).any()
    assert ids[:, 1:-1].unique().numel() > 150  # of 160 draws from 30 517 tokens


def test_random_sequences_are_short_and_long_single_and_in_pairs(minilm, minilm_tokenizer):
    batches = calibration_batches("synthetic", minilm, minilm_tokenizer)
    rows = [
        (ids[mask.bool()].tolist(), types[mask.bool()].tolist())
        for batch in batches
        for ids, mask, types in zip(
            *(batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")), strict=True
        )
    ]
    lengths = [len(ids) for ids, _ in rows]
    assert (len(rows), min(lengths), max(lengths)) == (384, 8, 128)
    assert 15000 < sum(lengths) < 18000
    for low in (8, 16, 32, 64):
        assert 72 < sum(low <= length < 2 * low for length in lengths) < 120
    first, between = minilm_tokenizer.cls_token_id, minilm_tokenizer.sep_token_id
    pairs = [row for row in rows if row[0].count(between) == 2]
    assert len(pairs) == 192
    for ids, types in rows:
        assert (ids[0], ids[-1]) == (first, between)
        place = ids.index(between)
        assert types == [0] * (place + 1) + [1] * (len(ids) - place - 1)
        assert len(ids) - 1 in (place, 2 * place, 2 * place + 1, 2 * place - 1)
        assert not set(minilm_tokenizer.all_special_ids) & {*ids[1:place], *ids[place + 1 : -1]}
    widths = [batch["input_ids"].shape[1] for batch in batches]
    assert widths != sorted(widths)  # the held-back sequences are not the longest
    assert minilm(**batches[0])[0].isfinite().all()


def test_causal_models_and_tokenizers_without_separators_get_no_pairs(minilm, minilm_tokenizer, words):
    minilm.config.is_decoder = True
    for batch in calibration_batches("synthetic", minilm, minilm_tokenizer, sequences=32):
        assert ((batch["input_ids"] == minilm_tokenizer.sep_token_id).sum(1) == 1).all()
        assert "token_type_ids" not in batch
    batches = calibration_batches("synthetic", roberta(42), words, sequences=50)
    assert max(batch["input_ids"].shape[1] for batch in batches) == 40
    for batch in batches:
        assert ((batch["input_ids"] == 1) == (batch["attention_mask"] == 0)).all()


def roberta(positions):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return RobertaModel(RobertaConfig(vocab_size=61, max_position_embeddings=positions, pad_token_id=1, **sizes))


@pytest.mark.parametrize("calibration", ["synthetic", ["a dog runs"]])
def test_a_tokenizer_of_another_model_is_refused(make_tiny, minilm_tokenizer, calibration):
    with pytest.raises(CalibrationError, match="vocabulary ends at 60; the tokenizer is not this model's"):
        calibration_batches(calibration, make_tiny("bert"), minilm_tokenizer)


def test_a_file_of_texts(tmp_path, minilm, minilm_tokenizer):
    file = tmp_path / "texts.txt"
    file.write_text("a dog runs\n\ntwo men play a long game of chess in the park\n", encoding="utf-8")
    (batch,) = calibration_batches(file, minilm, minilm_tokenizer)
    assert batch["input_ids"].shape[0] == 2
    assert batch["attention_mask"].sum(1).tolist() == [5, 13]
    (same,) = calibration_batches(str(file), minilm, minilm_tokenizer)
    assert torch.equal(same["input_ids"], batch["input_ids"])


def test_lines_of_a_file_end_where_editors_end_them(tmp_path):
    file = tmp_path / "texts.txt"
    file.write_bytes("\ufeffone\u2028text\x0c\x85more\r\ntwo\ttexts\n".encode())
    assert read_texts(file) == (["one\u2028text\x0c\x85more", ("two", "texts")], [])


def test_a_file_of_pairs(tmp_path, minilm, minilm_tokenizer):
    file = tmp_path / "pairs.tsv"
    file.write_text("a dog\ta cat\n\none\tof two texts\n", encoding="utf-8")
    (batch,) = calibration_batches(file, minilm, minilm_tokenizer)
    both = minilm_tokenizer([("a dog", "a cat"), ("one", "of two texts")], padding=True, return_tensors="pt")
    order = batch["input_ids"][:, 2].argsort(), both["input_ids"][:, 2].argsort()
    for name in ("input_ids", "token_type_ids", "attention_mask"):
        assert torch.equal(batch[name][order[0]], both[name][order[1]])
    file.write_text("1\ta dog\ta cat\n", encoding="utf-8")
    with pytest.raises(CalibrationError, match=r"line 1: 3 columns, '1\\ta dog\\ta cat'; expected one text"):
        calibration_batches(file, minilm, minilm_tokenizer)


def test_long_texts_are_read_in_passages_and_long_pairs_cut(minilm, minilm_tokenizer, caplog):
    long = " ".join(f"w{n}" for n in range(200))
    texts = [long, "a dog", ("word " * 200, "word " * 100)]
    ids = minilm_tokenizer(long, add_special_tokens=False, verbose=False)["input_ids"]
    minilm.config.max_position_embeddings = 256
    batches = calibration_batches(texts, minilm, minilm_tokenizer)
    start, end = minilm_tokenizer.cls_token_id, minilm_tokenizer.sep_token_id
    expected = [[start, *ids[place : place + 254], end] for place in range(0, len(ids), 254)]
    rows = [
        row[mask.bool()].tolist()
        for batch in batches
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert [row for row in sorted(rows) if row in expected] == sorted(expected)
    assert len(rows) == len(expected) + 2
    assert caplog.messages == [
        "1 of 3 texts are longer than 256 tokens and are read in passages of that length",
        "1 of 3 texts are longer than 256 tokens and are cut there",
    ]


def test_texts_and_passages_left_out_are_warned_of(minilm, minilm_tokenizer, caplog):
    texts = [f"{n} " + "word " * 299 for n in range(24)]
    batches = calibration_batches(texts, minilm, minilm_tokenizer, sequences=5, length=72)
    assert sum(len(batch["input_ids"]) for batch in batches) == 5
    assert caplog.messages == [
        "calibration uses 5 of 24 texts, drawn at random",
        "5 of 5 texts are longer than 72 tokens and are read in passages of that length",
    ]


def test_a_folder_of_documents(tmp_path, minilm, minilm_tokenizer, caplog):
    (tmp_path / "more").mkdir()
    for name, text in {
        "b.txt": "two\nlines\twith a tab",
        "more/a.MD": "# A title",
        "c.png": "no text",
        ".d.txt": "no",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_texts(tmp_path)[0] == ["two\nlines\twith a tab", "# A title"]
    calibration_batches(tmp_path, minilm, minilm_tokenizer)
    assert caplog.messages == [f"1 of 3 files in {tmp_path} are neither .txt nor .md, and are left out"]
    (tmp_path / "more" / "f.txt").write_bytes(b"\xff")
    with pytest.raises(CalibrationError, match=r"f\.txt, line 1: not UTF-8"):
        read_texts(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(CalibrationError, match=r"none holds no \.txt or \.md files"):
        read_texts(tmp_path / "none")


def test_shorter_random_sequences_are_warned_of(minilm, minilm_tokenizer, caplog):
    minilm.config.max_position_embeddings = 20
    drawn = calibration_batches("synthetic", minilm, minilm_tokenizer, sequences=4, length=30)
    assert {batch["input_ids"].shape[1] for batch in drawn} == {20}
    assert caplog.messages == ["random sequences have 20 tokens, the most the model takes, and not 30"]
    caplog.clear()
    calibration_batches("synthetic", minilm, minilm_tokenizer, sequences=4, length=20)
    calibration_batches("synthetic", minilm, minilm_tokenizer, sequences=4)
    assert caplog.messages == []


def test_positions_behind_the_pad_token_are_the_models_limit(words):
    model = roberta(20)
    (batch,) = calibration_batches(["w7 " * 50], model, words)
    assert batch["input_ids"].shape == (3, 18)
    assert model(**batch)[0].isfinite().all()


@pytest.fixture(scope="module")
def words():
    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1, **{f"w{n}": n for n in range(2, 61)}}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")


SETTINGS = {"d_model": 8} | {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 8))
}


def translator(name, start=None):
    """Build a model of this class whose vocabulary has room for the languages of every tokenizer."""
    config = getattr(transformers, f"{name}Config")(vocab_size=600, decoder_start_token_id=start, **SETTINGS)
    return getattr(transformers, f"{name}Model")(config)


LETTERS = ["▁", *"abcdefgh"]


@pytest.mark.parametrize("target", ["fra_Latn", None])
def test_nllb_has_its_language_in_front(target):
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **{piece: 4 + n for n, piece in enumerate(LETTERS)}}
    tokenizer = NllbTokenizer(vocab=vocabulary, merges=[], src_lang="deu_Latn", tgt_lang=target)
    (batch,) = calibration_batches("synthetic", translator("M2M100", 2), tokenizer, sequences=9, length=7)
    source, decoder = (batch[name] for name in ("input_ids", "decoder_input_ids"))
    one, other = tokenizer.convert_tokens_to_ids(["deu_Latn", target or "deu_Latn"])
    assert one > 3
    assert tokenizer("abc")["input_ids"][0] == one
    assert (source[:, 0] == one).all()
    assert (source[:, -1] == 2).all()
    assert ordinary(source[:, 1:-1], tokenizer)
    assert (decoder[:, :2] == torch.tensor([2, other])).all()
    assert ordinary(decoder[:, 2:], tokenizer)
    assert tokenizer.tgt_lang == target
    batches = calibration_batches("synthetic", translator("M2M100", 2), tokenizer, sequences=40)
    for batch in batches:  # targets are as long as sources
        assert torch.equal(batch["attention_mask"].sum(1), batch["decoder_attention_mask"].sum(1))
    assert len({int(length) for batch in batches for length in batch["attention_mask"].sum(1)}) > 20


def ordinary(tokens, tokenizer):
    return not torch.isin(tokens, torch.tensor(tokenizer.all_special_ids)).any()


def test_mbart_has_its_language_behind_and_mbart50_in_front():
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((piece, -1.0) for piece in LETTERS)]
    for kind, behind in ((MBartTokenizer, True), (MBart50Tokenizer, False)):
        vocabulary = pieces + [(code, 0.0) for code in ("de_DE", "fr_XX", "en_XX")] if behind else pieces
        tokenizer = kind(vocab=vocabulary, src_lang="de_DE", tgt_lang="fr_XX")
        german, french = tokenizer.convert_tokens_to_ids(["de_DE", "fr_XX"])
        model = translator("MBart", None if behind else 2)
        (batch,) = calibration_batches("synthetic", model, tokenizer, sequences=9, length=7)
        source, decoder = (batch[name] for name in ("input_ids", "decoder_input_ids"))
        probe, rows = tokenizer("abc")["input_ids"], slice(0, 5) if behind else slice(1, 6)
        if behind:
            assert probe[-2:] == [2, german]
            assert (source[:, -2:] == torch.tensor([2, german])).all()
        else:
            assert probe[0] == german
            assert (source[:, 0] == german).all()
            assert (source[:, -1] == 2).all()
        assert ordinary(source[:, rows], tokenizer)
        start = [french] if behind else [2, french]
        assert (decoder[:, : len(start)] == torch.tensor(start)).all()
        assert ordinary(decoder[:, len(start) :], tokenizer)


@pytest.mark.parametrize("limit", ["512", -1, float("nan")])
def test_a_limit_that_is_no_number_is_refused(words, minilm, limit, monkeypatch):
    monkeypatch.setattr(words, "model_max_length", limit)
    with pytest.raises(CalibrationError, match="model_max_length of the tokenizer is"):
        calibration_batches("synthetic", minilm, words)


def test_a_tokenizer_of_nothing_is_refused(minilm):
    mute = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    mute.normalizer = normalizers.Replace(Regex(".+"), "")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=mute)
    with pytest.raises(CalibrationError, match="the tokenizer makes no tokens of any text"):
        calibration_batches("synthetic", minilm, tokenizer)


def test_ready_batches_pass_through_and_need_no_tokenizer(minilm, batch):
    assert calibration_batches([batch], minilm) == [batch]
    assert calibration_batches(iter([batch]), minilm) == [batch]
    assert calibration_batches(None, minilm) == calibration_batches("none", minilm) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n \n", r"texts\.txt"),
        (b"a dog\n\xff\xfe\x00", r"texts\.txt, line 2: NUL"),
        (b"a dog\n\xe9t\xe9\n", r"texts\.txt, line 2: not UTF-8 \(.*, byte 1\)"),
        ("a dog runs\n".encode("utf-16-le"), r"texts\.txt, line 1: NUL characters, as in UTF-16; expected UTF-8"),
    ],
)
def test_a_file_without_text(tmp_path, content, message):
    file = tmp_path / "texts.txt"
    file.write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        read_texts(file)


def test_arrays_of_texts_are_texts(minilm, minilm_tokenizer):
    texts = ["a dog runs", "two men play a long game of chess", "it rains"]
    pairs = [["a dog", "a cat"], ["it rains", "the sun shines"]]
    for plain, array in (
        (texts, np.array(texts)),
        (texts, Dataset.from_dict({"text": texts})["text"]),
        (texts, pd.Series(texts, index=[5, 6, 7])),
        (pairs, np.array(pairs)),
    ):
        (expected,), (batch,) = (calibration_batches(data, minilm, minilm_tokenizer) for data in (plain, array))
        assert torch.equal(batch["input_ids"], expected["input_ids"])
    (batch,) = calibration_batches([("a dog", "a cat")], minilm, minilm_tokenizer)
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1]]
    with pytest.raises(CalibrationError, match=r"a data set with columns \['text', 'label'\]; pass the one"):
        calibration_batches(pd.DataFrame({"text": texts, "label": 0}), minilm, minilm_tokenizer)


def test_sequences_limits_ready_batches(make_tiny, make_batch):
    drawn = []

    def loader():
        while True:
            drawn.append({**make_batch("bert", seed=len(drawn)), "output_attentions": torch.tensor(False)})
            yield drawn[-1]

    model = make_tiny("bert")
    batches = calibration_batches(loader(), model, sequences=7)
    assert [len(batch["input_ids"]) for batch in batches] == [3, 3, 1]
    assert len(drawn) == 3
    report = compress(
        model,
        Compression(dk=8, solver=Solver(sweeps=1)),
        loader(),
        calibration_options=CalibrationOptions(sequences=9),
    )
    assert report.output_error.sequences == 1


def test_texts_without_a_pad_token_are_masked(minilm, minilm_tokenizer):
    texts = ["a dog runs", "two men play a long game of chess in the park"]
    (padded,) = calibration_batches(texts, minilm, minilm_tokenizer, length=8)
    minilm_tokenizer = copy.deepcopy(minilm_tokenizer)
    minilm_tokenizer.pad_token = None
    (masked,) = calibration_batches(texts, minilm, minilm_tokenizer, length=8)
    assert masked.keys() == padded.keys()
    for name, tensor in padded.items():
        assert torch.equal(masked[name], tensor)


def test_a_tokenizer_that_cannot_read_the_texts(minilm):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordPiece({"a": 0, "dog": 1}, unk_token="[UNK]"))
    )
    with pytest.raises(CalibrationError, match=r"cannot be encoded: WordPiece error: Missing \[UNK\] token"):
        calibration_batches(["a cat"], minilm, tokenizer)


def test_encoder_and_decoder_may_know_different_tokens(make_tiny, batch):
    config = make_tiny("bert").config
    decoder = {**config.to_dict(), "vocab_size": 20, "is_decoder": True, "add_cross_attention": True}
    both = EncoderDecoderConfig.from_encoder_decoder_configs(config, BertConfig(**decoder))
    model = EncoderDecoderModel(both)
    ready = {**batch, "decoder_input_ids": batch["input_ids"] % 20}
    assert calibration_batches([ready], model) == [ready]
    with pytest.raises(CalibrationError, match="but the model's vocabulary ends at 19"):
        calibration_batches([{**ready, "decoder_input_ids": ready["input_ids"]}], model)


def test_random_targets_are_of_the_decoders_vocabulary(make_tiny, words):
    tokenizer, config = words, make_tiny("marian").config
    config.vocab_size, config.decoder_vocab_size = len(tokenizer), 8
    config.share_encoder_decoder_embeddings = False
    made = calibration_batches("synthetic", MarianModel(config), tokenizer)
    assert max(int(batch["decoder_input_ids"].max()) for batch in made) < 8
    assert max(int(batch["input_ids"].max()) for batch in made) >= 8


def test_what_a_tokenizer_is_set_to_for_generation_does_not_count(words):
    model = GPT2Model(GPT2Config(vocab_size=61, n_positions=20, n_embd=8, n_head=2, n_layer=1))
    texts = ["w5 w6 w7", "w8 w9 w10 w11 w12 w13"]
    (expected,) = calibration_batches(texts, model, words, length=5)
    tokenizer = copy.deepcopy(words)
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    (batch,) = calibration_batches(texts, model, tokenizer, length=5)
    assert batch["attention_mask"][:, 0].tolist() == [1, 1, 1]
    for name, tensor in expected.items():
        assert torch.equal(batch[name], tensor)
    assert (tokenizer.padding_side, tokenizer.truncation_side) == ("left", "left")


@pytest.mark.parametrize(("rows", "wanted", "expected"), [([16] * 21, 256, 256), ([16] * 2, 64, 32), ([9], 4, 9)])
def test_a_sample_is_as_large_as_it_can_be(rows, wanted, expected):
    batches = [{"input_ids": torch.ones(count, 3, dtype=torch.long)} for count in rows]
    assert sum(map(sequence_count, sample_sequences(batches, wanted))) == expected


def test_a_batch_holds_a_bounded_number_of_tokens():
    tokenizer = word_tokenizer()
    tokenizer.model_max_length = int(1e30)
    model = BertModel(bert_config(tokenizer, max_position_embeddings=6000))
    long = [MAX_TOKENS_PER_BATCH + 9, 1500, 1400, 400]
    texts = ["a cat"] * 30 + ["cat " * words for words in long]
    batches = calibration_batches(texts, model, tokenizer)
    assert sum(map(sequence_count, batches)) == len(texts)
    sizes = [(sequence_count(batch), batch["input_ids"].numel()) for batch in batches]
    assert [count for count, numbers in sizes if numbers > MAX_TOKENS_PER_BATCH] == [1]
    joined = {name: torch.ones(16, 1000, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    assert [sequence_count(part) for part in in_parts([joined])] == [4, 4, 4, 4]
    drawn = calibration_batches("synthetic", model, tokenizer, sequences=5, length=2000)
    assert sorted(batch["input_ids"].shape for batch in drawn) == [(1, 2000), (2, 2000), (2, 2000)]


def test_a_long_pair_is_a_batch_by_itself(make_tiny):
    tokenizer = word_tokenizer()
    tokenizer.model_max_length = int(1e30)
    model = make_tiny("marian")
    model.config.max_position_embeddings = 6000
    pairs = [("a cat", "a dog")] * 3 + [("a cat", "dog " * 5000), ("cat " * 1500, "a dog"), ("cat " * 1500, "dog")]
    batches = calibration_batches(pairs, model, tokenizer)
    assert sorted(map(sequence_count, batches)) == [1, 2, 3]


@pytest.mark.parametrize("calibration", ["synthetic", [("a cat", "a dog runs")] * 4, ["a cat", "a dog"]])
def test_token_types_that_the_model_does_not_know(calibration, caplog):
    tokenizer = word_tokenizer()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")],
    )
    model = RobertaModel(RobertaConfig(**bert_config(tokenizer).to_dict() | {"type_vocab_size": 1})).eval()
    batches = calibration_batches(calibration, model, tokenizer)
    for batch in batches:
        run_batch(model, batch)
    has_pairs = calibration != ["a cat", "a dog"]
    assert any("token types up to 1, and RobertaModel has 1" in line for line in caplog.messages) == has_pairs
    assert all(("token_type_ids" in batch) != has_pairs for batch in batches)
    ready = {**batches[0], "token_type_ids": torch.ones_like(batches[0]["input_ids"])}
    assert "token_type_ids" not in calibration_batches([ready], model)[0]


def test_an_argument_that_the_model_lacks_is_left_out(monkeypatch):
    tokenizer = word_tokenizer()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    model = BertModel(bert_config(tokenizer))
    monkeypatch.setattr(BertModel, "forward", lambda self, input_ids, attention_mask: None)
    (batch,) = calibration_batches(["a cat"], model, tokenizer)
    assert batch.keys() == {"input_ids", "attention_mask"}


def test_several_sources_together(tmp_path, minilm, minilm_tokenizer):
    (tmp_path / "docs.txt").write_text("a dog runs\na cat\n", encoding="utf-8")
    ready = [{"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": torch.ones(2, 4)}]
    sources = (tmp_path / "docs.txt", ["a list", ("of", "pairs")], ready, "builtin", "synthetic")
    apart = [calibration_batches(source, minilm, minilm_tokenizer) for source in sources]
    together = calibration_batches(sources, minilm, minilm_tokenizer)
    assert unpadded_rows(together) == unpadded_rows(batch for batches in apart for batch in batches)
    first = [batch["input_ids"].tolist() for batch in together[:20]]
    assert first != [batch["input_ids"].tolist() for batches in apart for batch in batches][:20]  # mixed
    few = calibration_batches(("builtin", "synthetic"), minilm, minilm_tokenizer, sequences=20)
    assert sum(map(sequence_count, few)) == 40  # of each
    texts = (["a dog", "a cat"], "synthetic", tmp_path / "docs.txt", ready)
    sources = resolve(texts, minilm, minilm_tokenizer, CalibrationOptions())
    assert [source.words for source in sources] == ["texts", "random tokens", "texts (docs.txt)", "batches"]
    assert [source.is_random for source in sources] == [False, True, False, False]
    assert calibration_batches(("none",), minilm) == []


def ready(name="input_ids", value=None):
    """Return a batch in which one argument has this value."""
    return {"input_ids": torch.ones(2, 4).long(), name: torch.ones(2, 4).long() if value is None else value}


@pytest.mark.parametrize(
    ("calibration", "options", "message"),
    [
        ("missing.txt", {}, r"cannot read missing\.txt"),
        ([], {}, "calibration data is empty"),
        (7, {}, "calibration is a int; expected"),
        (["text", 3], {}, "calibration: item 1 is or holds a int; expected a text, or a pair"),
        ([ready(), "text"], {}, "item 1 is a str among batches; pass batches only"),
        (ready(), {}, "calibration is a dict; expected"),
        (Dataset.from_dict({"text": ["a"]}), {}, r"columns \['text'\]; pass the one with the texts"),
        ([ready(value=[[1, 2]])], {}, "batch 0: input_ids is a list; expected a tensor"),
        ([ready(value=torch.ones(2, 4, device="meta"))], {}, "batch 0: input_ids is on the meta device"),
        ([ready(value=torch.ones(2, 4).to_sparse())], {}, r"batch 0: input_ids is of layout torch\.sparse_coo"),
        ([ready("attention_mask", torch.full((2, 4), float("nan")))], {}, "attention_mask holds negative numbers or"),
        ([ready("decoder_attention_mask", torch.full((2, 4), -1))], {}, "decoder_attention_mask holds negative num"),
        ("synthetic", {"length": 2}, "length 2 leaves no room for texts beside the 2 special tokens"),
        ([("a", "dog")], {"length": 3}, "beside the 3 special tokens"),
        ("synthetic", {"sequences": 10**12}, "1000000000000 random sequences .* pass fewer sequences"),
        ("synthetic", {"tokenizer": None}, r"needs the model's tokenizer, and there is none: pass tokenizer="),
        ((), {}, "calibration is an empty tuple"),
        (("none", "builtin"), {}, "one of them is 'none'"),
        ((None, "builtin"), {}, "one of them is None"),
        (
            (("a cat", "a dog"), ("a", "pair")),
            {},
            "one of them is a tuple; expected names, files, or lists; pass texts",
        ),
        ((ready(),), {}, "one of them is a dict"),
        (("a cat runs", "a dog"), {}, "cannot read a cat runs.*if it is a text, pass a list of texts"),
        (("builtin", 5), {}, "calibration is a int"),
    ],
)
def test_bad_calibration_says_what_to_do(calibration, options, message, minilm, minilm_tokenizer):
    with pytest.raises(CalibrationError, match=message):
        calibration_batches(calibration, minilm, **{"tokenizer": minilm_tokenizer, **options})


@pytest.mark.parametrize("calibration", ["auto", "builtin", "synthetic", "generated", "photos", ["a dog"]])
@pytest.mark.parametrize(
    ("family", "read"),
    [("vit", "pixel_values"), ("clip", "images besides tokens"), ("whisper", "input_features")],
)
def test_models_that_read_more_than_tokens_need_batches_of_their_processor(calibration, family, read):
    model, ready = build(family), inputs(family)
    message = (
        rf"^{type(model).__name__} reads {read}; pass batches of your processor: calibration=\[dict\(processor\("
    )
    with pytest.raises(CalibrationError, match=message):
        calibration_batches(calibration, model, word_tokenizer())
    assert calibration_batches([ready], model)[0].keys() == ready.keys()
    assert calibration_batches("none", model) == []
