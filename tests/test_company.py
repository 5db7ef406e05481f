"""A saved conversion is used like any other model: sentence-transformers, pipelines, a stock Trainer, DDP."""

import numpy as np
import pytest
import torch
from collab_compress_cli.compress import Arguments, run
from sentence_transformers import SentenceTransformer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    pipeline,
)

from collab_compress import Compression, compress, read_factors

TEXTS = ["A man is playing a guitar.", "Someone makes music.", "The market fell."]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """MiniLM at dk = 192, as the command saves it."""
    output = tmp_path_factory.mktemp("converted") / "minilm"
    run(Arguments("minilm", Compression(rank=192, sweeps=20), output=output))
    return output


def test_sentence_transformers(converted, minilm_path):
    dense, model = (SentenceTransformer(str(path), device="cpu") for path in (minilm_path, converted))
    one, other = dense.encode(TEXTS), model.encode(TEXTS)
    assert one.shape == other.shape == (3, 384)
    np.testing.assert_allclose(np.linalg.norm(other, axis=1), 1, rtol=1e-5)  # pooling and normalisation came along
    assert (one * other).sum(1).min() > 0.95


def test_sentence_transformers_saves_it_again(converted, tmp_path):
    model = SentenceTransformer(str(converted), device="cpu")
    model.save(str(tmp_path / "again"))
    again = SentenceTransformer(str(tmp_path / "again"), device="cpu")
    np.testing.assert_array_equal(again.encode(TEXTS), model.encode(TEXTS))


def test_feature_extraction_pipeline(converted):
    features = pipeline("feature-extraction", model=str(converted), device="cpu")(TEXTS[0])
    assert np.array(features).shape[-1] == 384


def test_fill_mask_and_classification_pipelines(minilm_path, minilm_tokenizer, tmp_path):
    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(minilm_path, num_labels=3).eval()
    compress(model, Compression(rank=64, sweeps=2), calibration=None)
    model.save_pretrained(tmp_path)
    minilm_tokenizer.save_pretrained(tmp_path)
    (scores,) = pipeline("text-classification", model=str(tmp_path), device="cpu", top_k=None)([TEXTS[0]])
    with torch.no_grad():
        expected = model(**minilm_tokenizer(TEXTS[0], return_tensors="pt")).logits.softmax(-1)[0]
    assert sorted(s["score"] for s in scores) == pytest.approx(sorted(expected.tolist()), abs=1e-5)


@pytest.fixture
def training(make_tiny, minilm_tokenizer, tmp_path):
    """A converted tiny classifier, a learnable data set, and arguments of a stock Trainer."""
    model = make_tiny("bert", BertForSequenceClassification)
    model.resize_token_embeddings(30522)
    compress(model, Compression(rank=8), calibration=None)
    words = {0: "good great fine nice", 1: "bad awful poor dull"}
    rows = [
        {**minilm_tokenizer(f"{words[label].split()[number % 4]} film {number}"), "labels": label}
        for number in range(32) for label in (0, 1)
    ]  # fmt: skip
    arguments = TrainingArguments(
        str(tmp_path / "run"), per_device_train_batch_size=8, num_train_epochs=4, learning_rate=1e-2, seed=1,
        report_to=[], save_steps=16, logging_steps=8, use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    return model, rows, arguments


def test_stock_trainer_trains_saves_and_resumes(training, minilm_tokenizer, tmp_path):
    model, rows, arguments = training
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=DataCollatorWithPadding(minilm_tokenizer))
    before = {name: factors.mixing.clone() for name, factors in read_factors(model).items()}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.75 * losses[0]
    assert all(not torch.equal(before[name], factors.mixing) for name, factors in read_factors(model).items())

    checkpoint = tmp_path / "run" / "checkpoint-16"
    resumed = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    second = Trainer(resumed, arguments, train_dataset=rows, data_collator=DataCollatorWithPadding(minilm_tokenizer))
    second.train(resume_from_checkpoint=str(checkpoint))
    for (name, one), (_, other) in zip(model.named_parameters(), resumed.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_tokenizer_of_the_output_is_the_sources(converted, minilm_tokenizer):
    assert AutoTokenizer.from_pretrained(converted)(TEXTS).input_ids == minilm_tokenizer(TEXTS).input_ids
