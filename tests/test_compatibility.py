"""A conversion is used like any other model: sentence-transformers, pipelines, Trainer, Accelerate, half precision.

What needs packages of its own, or long, is in tests/extras; docs/compatibility.md has a line for each.
"""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, dispatch_model, infer_auto_device_map
from collab_compress_cli.arguments import Conversion, Saving
from collab_compress_cli.compress import Arguments, run
from forms import outputs
from sentence_transformers import CrossEncoder, SentenceTransformer
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    DebertaV2ForSequenceClassification,
    Trainer,
    TrainingArguments,
    pipeline,
)

from collab_compress import (
    CalibrationOptions,
    Compression,
    Solver,
    UnsupportedModelError,
    compress,
    expand,
    mix_heads_,
    prune_heads_,
    read_factors,
)
from collab_compress.conversion.refit import refit_
from collab_compress.errors import CompressionError, HeadError

ROOT = Path(__file__).parents[1]
TEXTS = ["A man is playing a guitar.", "Someone makes music.", "The market fell."]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Return MiniLM at dk = 192, as the command saves it."""
    output = tmp_path_factory.mktemp("converted") / "minilm"
    few = CalibrationOptions(sequences=16)
    conversion = Conversion(dk=192, solver=Solver(sweeps=1, refit=False))
    options = {"output": output, "calibration_options": few, "saving": Saving(quiet=True)}
    run(Arguments(model="minilm", compression=conversion, **options))
    return output


def test_sentence_transformers(converted, minilm_path, tmp_path):
    dense, model = (SentenceTransformer(str(path), device="cpu") for path in (minilm_path, converted))
    one, other = dense.encode(TEXTS), model.encode(TEXTS)
    assert one.shape == other.shape == (3, 384)
    np.testing.assert_allclose(np.linalg.norm(other, axis=1), 1, rtol=1e-5)  # pooling and normalisation came along
    assert (one * other).sum(1).min() > 0.95
    model.save(str(tmp_path / "again"))
    again = SentenceTransformer(str(tmp_path / "again"), device="cpu")
    np.testing.assert_array_equal(again.encode(TEXTS), other)


@pytest.mark.parametrize("class_", [BertForSequenceClassification, DebertaV2ForSequenceClassification])
def test_cross_encoder(class_, minilm_tokenizer, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 32}
    if class_ is DebertaV2ForSequenceClassification:
        sizes |= {"relative_attention": True, "pos_att_type": "c2p|p2c", "share_att_key": True, "type_vocab_size": 2}
    config = class_.config_class(vocab_size=len(minilm_tokenizer), num_labels=1, initializer_range=0.4, **sizes)
    for part in (class_(config), minilm_tokenizer):
        part.save_pretrained(tmp_path / "dense")
    pairs = [(TEXTS[0], text) for text in TEXTS]
    model = CrossEncoder(str(tmp_path / "dense"), device="cpu")
    before = model.predict(pairs)
    compress(model, Compression(dk=4, dff=16), pairs * 10)
    scores = model.predict(pairs)
    assert np.abs(scores - before).max() > 1e-4
    model.save_pretrained(str(tmp_path / "converted"))
    again = CrossEncoder(str(tmp_path / "converted"), device="cpu")
    torch.testing.assert_close(again.state_dict(), model.state_dict(), atol=0, rtol=0)
    np.testing.assert_allclose(again.predict(pairs), scores, rtol=1e-6)  # alignment of memory changes rounding


def test_fill_mask_and_classification_pipelines(minilm_path, minilm_tokenizer, tmp_path):
    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(minilm_path, num_labels=3).eval()
    compress(model, Compression(dk=64, solver=Solver(sweeps=2)), calibration=None)
    model.save_pretrained(tmp_path)
    minilm_tokenizer.save_pretrained(tmp_path)
    (scores,) = pipeline("text-classification", model=str(tmp_path), device="cpu", top_k=None)([TEXTS[0]])
    with torch.no_grad():
        expected = model(**minilm_tokenizer(TEXTS[0], return_tensors="pt")).logits.softmax(-1)[0]
    assert sorted(s["score"] for s in scores) == pytest.approx(sorted(expected.tolist()), abs=1e-5)


@pytest.fixture
def training(make_tiny, minilm_tokenizer, tmp_path):
    """Return a converted tiny classifier, a learnable data set, and arguments of a stock Trainer."""
    model = make_tiny("bert", BertForSequenceClassification)
    model.resize_token_embeddings(30522)
    compress(model, Compression(dk=8), calibration=None)
    words = {0: "good great fine nice", 1: "bad awful poor dull"}
    rows = [
        {**minilm_tokenizer(f"{words[label].split()[number % 4]} film {number}"), "labels": label}
        for number in range(32)
        for label in (0, 1)
    ]
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
    steps = {"per_device_train_batch_size": 8, "num_train_epochs": 4, "save_steps": 16, "logging_steps": 8}
    arguments = TrainingArguments(str(tmp_path / "run"), learning_rate=1e-2, seed=1, **quiet, **steps)
    return model, rows, arguments


def test_stock_trainer_trains_saves_and_resumes(training, minilm_tokenizer, tmp_path):
    model, rows, arguments = training
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=DataCollatorWithPadding(minilm_tokenizer))
    before = {name: factors.mixing.clone() for name, factors in read_factors(model).items()}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.75 * losses[0]
    assert {torch.equal(before[name], factors.mixing) for name, factors in read_factors(model).items()} == {False}

    checkpoint = tmp_path / "run" / "checkpoint-16"
    resumed = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    second = Trainer(resumed, arguments, train_dataset=rows, data_collator=DataCollatorWithPadding(minilm_tokenizer))
    second.train(resume_from_checkpoint=str(checkpoint))
    for (name, one), (_, other) in zip(model.named_parameters(), resumed.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def embeddings(model, tokenizer):
    """Return mean-pooled embeddings of unit length, (B, D)."""
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states, mask = model(**batch).last_hidden_state.float(), batch["attention_mask"][..., None]
    return nn.functional.normalize((states * mask).sum(1), dim=1)


@pytest.mark.parametrize(("dtype", "implementation"), [(torch.bfloat16, "sdpa"), (torch.float16, "eager")])
def test_half_precision(converted, minilm_tokenizer, dtype, implementation, tmp_path):
    expected = embeddings(AutoModel.from_pretrained(converted), minilm_tokenizer)
    model = AutoModel.from_pretrained(converted, dtype=dtype, attn_implementation=implementation)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    halved = embeddings(model, minilm_tokenizer)
    assert (halved * expected).sum(1).min() > 0.999
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path, dtype="auto", attn_implementation=implementation)
    assert again.dtype == dtype
    assert torch.equal(embeddings(again, minilm_tokenizer), halved)


@pytest.fixture
def edited(family, make_tiny):
    """Converted, with heads that mix: parameters of ours in attention and before the output projection."""
    model = make_tiny(family)
    compress(model, Compression(dk=8), calibration=None)
    mix_heads_(model)
    return model


@pytest.mark.skipif(
    "whole model to the disk" in inspect.getsource(dispatch_model),
    reason="this Accelerate refuses a model that is on disk as a whole",
)
def test_device_map_auto_wherever_memory_ends(edited, batch, tmp_path):
    """The rest goes to disk; no cut may separate a module's own parameters from those of its children."""
    expected = outputs(edited, batch)
    edited.save_pretrained(tmp_path / "model")
    loaded = AutoModel.from_pretrained(tmp_path / "model", device_map="auto")
    assert torch.equal(outputs(loaded, batch).cpu(), expected.cpu())
    size = sum(tensor.nbytes for tensor in edited.state_dict().values())
    memories = {}
    for share in np.linspace(0.05, 1.2, 24):
        memory = {"cpu": int(share * size)}
        places = infer_auto_device_map(loaded, memory, loaded._no_split_modules)
        memories.setdefault(tuple(places.items()), memory)
    for memory in memories.values():  # one for each device map
        loaded = AutoModel.from_pretrained(
            tmp_path / "model", device_map="auto", max_memory=memory, offload_folder=tmp_path / "o"
        )
        assert torch.equal(outputs(loaded, batch), expected)


def test_dispatched_over_cpu_and_disk(edited, batch, tmp_path):
    expected = outputs(edited, batch)
    size = sum(tensor.nbytes for tensor in edited.state_dict().values())
    places = infer_auto_device_map(
        edited, max_memory={"cpu": int(0.7 * size)}, no_split_module_classes=edited._no_split_modules
    )
    assert set(places.values()) == {"cpu", "disk"}
    dispatch_model(edited, places, main_device="cpu", offload_dir=tmp_path)
    assert any(parameter.is_meta for parameter in edited.parameters())
    assert torch.equal(outputs(edited, batch), expected)


def test_offloaded_factors_are_refused(family, make_tiny, batch):
    model = make_tiny(family)
    compress(model, Compression(dk=8), calibration=None)
    expected = outputs(model, batch)
    cpu_offload(model, torch.device("cpu"))
    for read in (expand, read_factors):
        with pytest.raises(UnsupportedModelError, match=r"(proj|qkv|q_lin) is offloaded; load the model into memory"):
            read(model)
    assert torch.equal(outputs(model, batch), expected)


@pytest.mark.parametrize("options", [{"dff": 8}, {"dk": 8}])
def test_offloaded_feed_forward_blocks_are_refused(options, make_tiny, calibration):
    model = make_tiny("bert")
    cpu_offload(model.encoder.layer[1].output, torch.device("cpu"))
    with pytest.raises(CompressionError, match=r"^encoder\.layer\.1\.output.* is offloaded; load the model into"):
        compress(model, Compression(**options), calibration)


def test_an_offloaded_dense_model_is_refused(make_tiny, calibration):
    model, dense = make_tiny("bert"), make_tiny("bert")
    compress(model, Compression(dk=8), calibration=None)
    cpu_offload(dense, torch.device("cpu"))
    with pytest.raises(HeadError, match="of the dense model is offloaded; load the model into memory"):
        refit_(model, dense, None, calibration)


def test_weights_of_a_class_of_their_own_are_refused(make_tiny):
    """As quantization in memory leaves them: still an `nn.Linear`, still called float32."""

    class Packed(nn.Parameter):
        pass

    name = "encoder.layer.1.attention.self"
    dense, model = make_tiny("bert"), make_tiny("bert")
    compress(model, Compression(dk=8), calibration=None)
    for linear in (dense.get_submodule(name).key, model.get_submodule(name).qkv):
        linear.weight = Packed(linear.weight.detach())
    with pytest.raises(UnsupportedModelError, match=rf"{name}\.key: .*Packed of torch.float32; convert before quant"):
        compress(dense, Compression(dk=8), calibration=None)
    for edited in (dense, model):
        with pytest.raises(
            HeadError, match=rf"{name}\.(key|query).*: got .*Packed, expected a plain .*undo quantization"
        ):
            prune_heads_(edited, {name: [0]})
    for read in (expand, read_factors):
        with pytest.raises(UnsupportedModelError, match=rf"{name}\.qkv: got .*Packed, .*undo quantization"):
            read(model)


def test_the_table_names_tests_and_versions_that_are_there():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    page = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| ([^|`]+) \| `(tests/[^:`]+)(?:::(\w+))?` \|$", page, re.MULTILINE)
    assert len(rows) > 15
    for versions, path, test in rows:
        for package, version in (entry.split(" ") for entry in versions.split(", ")):
            assert pins.get(package, version) == version  # those of benchmarks are not pinned
        assert f"def {test}" in (ROOT / path).read_text(encoding="utf-8")
