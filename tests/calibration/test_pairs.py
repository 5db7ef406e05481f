"""Sources and targets of encoder–decoders: the decoder reads what it reads in training with labels."""

import pytest
import torch
from tiny_families import build
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

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
