"""Taggers and question-answering models keep their heads and labels, in Python and by the command."""

import copy
import json

import pytest
import torch
from collab_compress_cli import start
from commands import ran
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    BertConfig,
    BertForQuestionAnswering,
    BertForTokenClassification,
)

from collab_compress import Compression, Solver, compress, read_factors

LABELS = {0: "O", 1: "B-PLACE", 2: "I-PLACE"}
SENTENCES = [f"{name} lives in the town of {name} Hill since {year}" for year, name in enumerate(["Ann", "Bo"] * 20)]
PASSAGE = " ".join(f"In year {year} Ann moved to town {year}." for year in range(1, 12))
PAIRS = [(f"Where did Ann move in year {year}?", PASSAGE) for year in range(1, 11)]
CASES = [
    (AutoModelForTokenClassification, BertForTokenClassification, "classifier", SENTENCES, "labels of tokens"),
    (AutoModelForQuestionAnswering, BertForQuestionAnswering, "qa_outputs", PAIRS, "answers"),
]


def make(model_class, tokenizer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 32}
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    is_tagger = model_class is BertForTokenClassification
    labels = {"id2label": LABELS, "label2id": {name: label for label, name in LABELS.items()}} if is_tagger else {}
    config = BertConfig(initializer_range=0.4, **sizes, **labels)
    return model_class(config).eval()


def assert_kept(model, dense, head):
    assert type(model) is type(dense)
    assert read_factors(model)
    assert (model.config.id2label, model.config.label2id) == (dense.config.id2label, dense.config.label2id)
    for name, weight in dense.get_submodule(head).state_dict().items():
        assert torch.equal(model.get_submodule(head).state_dict()[name], weight)


def assert_same_outputs(one, other, batch):
    with torch.no_grad():
        outputs, others = one(**batch), other(**batch)
    assert outputs.keys() == others.keys()
    for name, tensor in outputs.items():
        torch.testing.assert_close(tensor, others[name])


@pytest.mark.parametrize(("auto_class", "model_class", "head", "texts", "kind"), CASES)
def test_heads_and_labels_are_kept(minilm_tokenizer, tmp_path, caplog, auto_class, model_class, head, texts, kind):
    model = make(model_class, minilm_tokenizer)
    dense = copy.deepcopy(model)
    report = compress(model, Compression(dk=9, dv=12, dff=20, solver=Solver(sweeps=3)), texts, minilm_tokenizer)
    assert_kept(model, dense, head)
    assert report.agreement.kind == kind
    divided = "10 of 10 texts are longer than 64 tokens and are read in passages of that length"
    assert (divided in report.warnings) == (kind == "answers")
    model.save_pretrained(tmp_path)
    loaded = auto_class.from_pretrained(tmp_path)
    assert_kept(loaded, dense, head)
    batch = minilm_tokenizer(texts[:3], padding=True, truncation=True, max_length=64, return_tensors="pt")
    assert_same_outputs(model, loaded, batch)


@pytest.mark.parametrize(("auto_class", "model_class", "head", "texts", "kind"), CASES)
def test_the_command_keeps_heads_and_labels(
    minilm_tokenizer, tmp_path, capsys, auto_class, model_class, head, texts, kind
):
    dense = make(model_class, minilm_tokenizer)
    for saved in (dense, minilm_tokenizer):
        saved.save_pretrained(tmp_path / "dense")
    rows = tmp_path / "rows.tsv"
    rows.write_text("\n".join(text if isinstance(text, str) else "\t".join(text) for text in texts), encoding="utf-8")
    output = tmp_path / "out"
    options = (tmp_path / "dense", "--dk", 9, "--calibration", rows, "--output", output)
    code, printed, error = ran(start.compress, options, capsys)
    assert code == 0, error
    assert f"model = {model_class.__name__}.from_pretrained(" in printed
    assert_kept(auto_class.from_pretrained(output), dense, head)
    stored = json.loads((output / "collab_compress.json").read_text(encoding="utf-8"))
    assert stored["report"]["agreement"]["kind"] == kind
