"""Recipes whose data lie on disk, in batches of so many tokens: as in memory, killed or not, by one or two."""

import json

import datasets
import pytest
import torch
from collab_compress_glue_runs.experiments import read_recipe, run
from collab_compress_glue_runs.tasks import encode_translation, load_task, train_tokenizer
from safetensors.torch import load_file
from tiny_words import sentences as draw_sentences
from two_processes import run_both

from collab_compress.errors import DataError, RecipeError
from collab_compress.training import HeadSeq2SeqTrainer

FRESH = {"layers": 1, "width": 8, "heads": 2, "dropout": 0.0, "tokenizer": "word", "max_length": 32}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def overrides(folder, output, passes=1, **more):
    """Training is in float32, so a large ε keeps Adam from turning rounding errors into steps."""
    arguments = {
        "gradient_accumulation_steps": passes,
        "logging_steps": 1,
        "adam_epsilon": 1e-3,
        "disable_tqdm": True,
    }
    settings = {
        "task": "parallel",
        "data_dir": str(folder),
        "output": str(folder / output),
        "translation": {"source": "aa", "target": "bb", "beams": 1, "max_length": 12},
        "max_length": 24,
        "num_proc": 1,
        "fresh": FRESH,
        "heads": {"loss_normalization": "mean"},
        "tuning": {"epochs": 3, "learning_rate": 1e-2, "batch_tokens": 60, "arguments": arguments},
        "trackers": [],
        "progress": False,
        **more,
    }
    return [f"{name}={json.dumps(value)}" for name, value in settings.items()]


def both(rank, settings):
    run(read_recipe(overrides=settings))


def trained(folder):
    """Return the losses of all steps, and the weights."""
    log = json.loads((folder / "tuned" / "log.json").read_text())
    losses = [entry["loss"] for entry in log["history"] if "loss" in entry]
    return losses, load_file(folder / "tuned" / "model" / "model.safetensors")


def test_two_processes_train_as_one(sentences):
    run(read_recipe(overrides=overrides(sentences, "one", passes=2)))
    run_both(both, overrides(sentences, "two"))
    (losses, weights), (theirs, others) = (trained(sentences / name) for name in ("one", "two"))
    assert len(losses) >= 9  # in each of three epochs several steps
    assert theirs == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=1e-4, atol=1e-5)
    records = [json.loads((sentences / name / "tuned" / "result.json").read_text()) for name in ("one", "two")]
    perplexities = [record["metrics"]["test"]["perplexity"] for record in records]
    assert perplexities[1] == pytest.approx(perplexities[0], rel=1e-4)


def test_on_disk_as_in_memory(sentences):
    run(read_recipe(overrides=overrides(sentences, "disk")))
    run(read_recipe(overrides=overrides(sentences, "memory", num_proc=None)))
    (losses, weights), (theirs, others) = (trained(sentences / name) for name in ("disk", "memory"))
    assert losses == theirs
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_an_interrupted_run_ends_as_an_uninterrupted_one(sentences, monkeypatch):
    settings = overrides(sentences, "whole", passes=2)
    saving = ["tuning.arguments.save_strategy=steps", "tuning.arguments.save_steps=2"]
    run(read_recipe(overrides=[*settings, *saving]))
    step, stock = [0], HeadSeq2SeqTrainer.training_step

    def training_step(self, *arguments, **more):
        step[0] += 1
        if step[0] == 10:  # in the second epoch, after the checkpoint of its first step
            raise KeyboardInterrupt
        return stock(self, *arguments, **more)

    settings = [*overrides(sentences, "stopped", passes=2), *saving]
    with monkeypatch.context() as patch:
        patch.setattr(HeadSeq2SeqTrainer, "training_step", training_step)
        with pytest.raises(KeyboardInterrupt):
            run(read_recipe(overrides=settings))
    assert list((sentences / "stopped/tuned/checkpoints").glob("checkpoint-4"))
    run(read_recipe(overrides=settings))
    (losses, weights), (theirs, others) = (trained(sentences / name) for name in ("whole", "stopped"))
    assert losses == theirs
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_rows_that_have_no_room_are_refused(sentences):
    with pytest.raises(RecipeError, match="batch_tokens is 9, which leaves 4 for a batch"):
        run(read_recipe(overrides=[*overrides(sentences, "out", passes=2), "tuning.batch_tokens=9"]))
    for field in ("num_proc", "tuning.batch_tokens"):
        with pytest.raises(RecipeError, match="is 0; expected a number from 1 to"):
            read_recipe(overrides=[*overrides(sentences, "out"), f"{field}=0"])


def load(folder, **options):
    return load_task("parallel", folder, source="aa", target="bb", num_proc=1, **options)


def test_files_are_read_once_until_they_change(sentences, cache):
    first = load(sentences)
    files = [file["filename"] for rows in first.values() for file in rows.cache_files]
    assert len(files) == 3
    assert all(file.startswith(str(cache)) for file in files)
    assert [file["filename"] for rows in load(sentences).values() for file in rows.cache_files] == files
    for split, rows in load_task("parallel", sentences, source="aa", target="bb").items():
        assert not rows.cache_files
        assert rows.to_list() == first[split].to_list()
    for language in ("aa", "bb"):
        path = sentences / "parallel" / f"train.{language}"
        path.write_text("one more\n" + path.read_text())
    again = load(sentences)
    assert len(again["train"]) == len(first["train"]) + 1
    assert again["train"][0]["source"] == "one more"
    assert [file["filename"] for file in again["test"].cache_files] == files[-1:]


def test_what_is_malformed_is_named_as_in_memory(sentences):
    (sentences / "parallel" / "train.bb").write_text("one line\n")
    with pytest.raises(DataError, match=r"train.aa, line 2: no counterpart: train.aa has 24 sentences and train.bb"):
        load(sentences)


def test_a_cache_that_cannot_be_written_is_named(sentences, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "inner")
    with pytest.raises(
        DataError, match=r"cannot be read into .*inner.*; set HF_DATASETS_CACHE to a folder with room"
    ):
        load(sentences)


def test_several_processes_tokenize_as_one(tmp_path):
    folder = tmp_path / "parallel"
    folder.mkdir()
    for split, rows in (("train", 20_000), ("valid", 5), ("test", 5)):
        for language in ("aa", "bb"):
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in draw_sentences(rows, 0)))
    texts = load(tmp_path)
    tokenizer = train_tokenizer(texts["test"]["source"], None, "word")
    both = encode_translation(texts, tokenizer, num_proc=2)
    assert len(both["train"].cache_files) == 2
    one = encode_translation(load_task("parallel", tmp_path, source="aa", target="bb"), tokenizer)
    assert one["train"].data.to_pydict() == both["train"].data.to_pydict()
