"""Pairs of texts: targets as an encoder–decoder reads them in training, passages in windows after their question."""

import pytest
import torch
from tiny_families import build
from tiny_words import unpadded_rows
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertTokenizerLegacy,
    PreTrainedTokenizerFast,
)

from collab_compress import CalibrationError, Compression, Solver, compress
from collab_compress.calibration import calibration_batches

WORDS = [f"w{number}" for number in range(4, 61)]
END = 2
PAIRS = [(" ".join(WORDS[: 3 + n]), " ".join(WORDS[n : 2 * n + 2 - n // 2])) for n in range(6)]
NAMES = ("T5ForConditionalGeneration", "MarianModel", "MBartForConditionalGeneration")


@pytest.fixture(scope="module")
def tokenizer():
    tokens = ["<pad>", "[UNK]", "</s>", "<s>", *WORDS]
    inner = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", unk_token="[UNK]", eos_token="</s>")


def translator(name):
    model = build({"T": "t5", "M": "marian"}[name[0]] if "MBart" not in name else "mbart", name)
    model.config.pad_token_id, model.config.decoder_start_token_id = 0, None if "MBart" in name else 0
    return model


def read_by_decoder(model, batch):
    """The tokens that reach the decoder's embedding, the last of what the model embeds."""
    embedded = []
    embedding = model.get_decoder().get_input_embeddings()
    with embedding.register_forward_pre_hook(lambda _, args: embedded.append(args[0])), torch.no_grad():
        model(**batch)
    return embedded[-1]


def with_labels(tokenizer, pairs):
    """What a `Trainer` gives the model: the tokenizer's labels, -100 at padding; and which positions predict one."""
    sources, targets = map(list, zip(*pairs, strict=True))
    batch = dict(tokenizer(sources, text_target=targets, padding=True, return_tensors="pt"))
    mask = batch["labels"] != 0
    return batch | {"labels": batch["labels"].masked_fill(~mask, -100), "decoder_attention_mask": mask.long()}


@pytest.mark.parametrize("name", NAMES)
def test_the_decoder_reads_targets_shifted_to_the_right(tokenizer, name):
    model = translator(name)
    (batch,) = calibration_batches(PAIRS, model, tokenizer)
    read, lengths = read_by_decoder(model, batch), batch["decoder_attention_mask"].sum(1)
    start = END if "MBart" in name else 0
    pairs = {
        (tuple(ids), *row[:count].tolist())
        for ids, row, count in zip(batch["input_ids"].tolist(), read, lengths, strict=True)
    }
    width = batch["input_ids"].shape[1]
    for source, target in PAIRS:
        ids = tokenizer(source)["input_ids"]
        assert (tuple(ids + [0] * (width - len(ids))), start, *tokenizer(target)["input_ids"][:-1]) in pairs
    assert torch.equal(batch["attention_mask"], (batch["input_ids"] != 0).long())
    if name != "MarianModel":
        ordered = sorted(PAIRS, key=lambda pair: len(pair[0]) + len(pair[1]))
        assert torch.equal(read, read_by_decoder(model, with_labels(tokenizer, ordered)))


def test_a_conversion_is_that_on_batches_with_labels(tokenizer):
    ordered = sorted(PAIRS, key=lambda pair: len(pair[0]) + len(pair[1]))
    converted, options = [], Compression(dk=7, dv=9, dff=20, solver=Solver(sweeps=3))
    for calibration in (PAIRS, [with_labels(tokenizer, ordered)]):
        model = translator("T5ForConditionalGeneration")
        report = compress(model, options, calibration, tokenizer)
        assert report.refits
        converted.append((model.state_dict(), report.output_error.relative_error))
    (first, output_error), (second, expected) = converted
    assert output_error == pytest.approx(expected, rel=1e-4)
    for key, tensor in first.items():
        torch.testing.assert_close(tensor, second[key], rtol=1e-3, atol=1e-4)


def test_files_and_columns_of_pairs(tokenizer, tmp_path):
    model = translator("MarianMTModel")
    (expected,) = calibration_batches(PAIRS, model, tokenizer)
    for file, columns, separator in (("pairs.csv", ":source,target", ","), ("pairs.txt", "", "\t")):
        lines = [separator.join(pair) for pair in (*([("source", "target")] if columns else []), *PAIRS)]
        (tmp_path / file).write_text("\n".join(lines))
        (batch,) = calibration_batches(f"{tmp_path / file}{columns}", model, tokenizer)
        assert all(torch.equal(batch[name], tensor) for name, tensor in expected.items())
    (tmp_path / "pairs.txt").write_text("w5\nw6\tw7\n")
    for calibration in (["w5"], [("w6", "w7"), "w5"], tmp_path / "pairs.txt"):
        with pytest.raises(CalibrationError, match="'w5' is no pair; an encoder–decoder reads a source and a"):
            calibration_batches(calibration, model, tokenizer)


def test_long_sources_and_long_targets_are_cut_and_warned_of(tokenizer, caplog):
    long, short = " ".join(WORDS), "w5 w6"
    pairs = [(short, long), (long, short), (long, long), (short, short)]
    (batch,) = calibration_batches(pairs, translator("MarianMTModel"), tokenizer, length=12)
    assert batch["input_ids"].shape == batch["decoder_input_ids"].shape == (4, 12)
    assert caplog.messages == ["3 of 4 texts are longer than 12 tokens and are cut there"]


def test_a_start_token_that_is_not_set_is_named(tokenizer):
    model = translator("T5ForConditionalGeneration")
    model.config.decoder_start_token_id = None
    with pytest.raises(CalibrationError, match=r"the texts cannot be encoded: .*decoder_start_token_id"):
        calibration_batches(PAIRS, model, tokenizer)


QUESTION, PASSAGE = "who plays the guitar?", " ".join(f"word {number}" for number in range(300))


def bert(model_class, tokenizer, positions):
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 32}
    return model_class(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=positions, **sizes))


def windows(tokenizer, question, passage, length, stride):
    """Return token ids and token types of the windows of a passage, by slicing."""
    first, second = (
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in (question, passage)
    )
    room, start, rows = length - 3 - len(first), 0, []
    while True:
        part = second[start : start + room]
        ids = [tokenizer.cls_token_id, *first, tokenizer.sep_token_id, *part, tokenizer.sep_token_id]
        rows.append((ids, [0] * (len(first) + 2) + [1] * (len(part) + 1)))
        if start + room >= len(second):
            return rows
        start += room - stride


@pytest.mark.parametrize(("length", "stride"), [(384, 128), (64, 28), (9, 0)])  # the question has 5 tokens
def test_a_passage_is_read_in_windows_after_its_question(minilm_tokenizer, caplog, length, stride):
    model = bert(BertForQuestionAnswering, minilm_tokenizer, length)
    pairs = [(QUESTION, PASSAGE), ("who?", "me")]
    expected = windows(minilm_tokenizer, *pairs[0], length, stride)
    expected += windows(minilm_tokenizer, *pairs[1], length, 0)
    batches = calibration_batches(pairs, model, minilm_tokenizer)
    inputs = ("input_ids", "token_type_ids", "attention_mask")
    read = [
        (ids[mask.bool()].tolist(), types[mask.bool()].tolist())
        for batch in batches
        for ids, types, mask in zip(*(batch[name] for name in inputs), strict=True)
    ]
    assert sorted(read) == sorted(expected)
    assert caplog.messages == [
        f"1 of 2 texts are longer than {length} tokens and are read in passages of that length"
    ]


def test_questions_of_several_lengths_leave_several_strides(minilm_tokenizer):
    model = bert(BertForQuestionAnswering, minilm_tokenizer, 40)
    pairs = [(" ".join(["who"] * count), PASSAGE) for count in (1, 7, 20, 36)]
    expected = [
        ids
        for (question, passage), stride in zip(pairs, (18, 15, 8, 0), strict=True)
        for ids, _ in windows(minilm_tokenizer, question, passage, 40, stride)
    ]
    assert unpadded_rows(calibration_batches(pairs, model, minilm_tokenizer)) == sorted(expected)


def test_pairs_that_no_window_holds_or_no_answer_is_asked_of_are_cut(minilm_tokenizer, minilm_path, caplog):
    written_in_python = BertTokenizerLegacy(str(minilm_path / "vocab.txt"))
    cut = "1 of 1 texts are longer than 40 tokens and are cut there"
    long_question = " ".join(["who"] * 37)  # and three special tokens
    for model_class, tokenizer, question in (
        (BertForQuestionAnswering, minilm_tokenizer, long_question),
        (BertForQuestionAnswering, written_in_python, QUESTION),
        (BertForSequenceClassification, minilm_tokenizer, QUESTION),
    ):
        caplog.clear()
        model = bert(model_class, tokenizer, 40)
        (batch,) = calibration_batches([(question, PASSAGE)], model, tokenizer)
        expected = minilm_tokenizer(question, PASSAGE, truncation=True, max_length=40)["input_ids"]
        assert batch["input_ids"].tolist() == [expected]
        assert caplog.messages[-1] == cut  # Transformers warns too, of tokenizers written in Python
