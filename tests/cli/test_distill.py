"""`collab-distill`: training towards the dense model, without labels, that goes on where it was interrupted."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from collab_compress_cli import distill, start
from collab_compress_cli.pretrained import load_model
from commands import ran
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    MarianConfig,
    MarianMTModel,
    OPTConfig,
    OPTForCausalLM,
)

from collab_compress import Compression, compress

QUICK = ("--learning-rate", 0.01, "--batch-size", 8, "--epochs", 4, "--device", "cpu")
TEXTS = ("--texts", "texts.txt")
SIZES = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 32}
SIZES |= {"vocab_size": 30522, "max_position_embeddings": 64, "initializer_range": 0.4}


MARIAN = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
MARIAN |= {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "vocab_size": 30522, "init_std": 0.4}
MARIAN |= {"max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 102, "decoder_start_token_id": 0}
OPT = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "ffn_dim": 32, "word_embed_proj_dim": 24}
OPT |= {"vocab_size": 30522, "max_position_embeddings": 64, "init_std": 0.4, "pad_token_id": 0, "bos_token_id": 101}
OPT |= {"eos_token_id": 102}
CLASSES = {
    "dense": (BertForSequenceClassification, BertConfig(**SIZES)),
    "embedder": (BertModel, BertConfig(**SIZES)),
    "writer": (OPTForCausalLM, OPTConfig(**OPT)),
    "translator": (MarianMTModel, MarianConfig(**MARIAN, forced_eos_token_id=102)),
}


@pytest.fixture(scope="module")
def models(minilm_tokenizer, tmp_path_factory):
    """A folder with texts, four tiny models, their conversions, and one of these in bfloat16."""
    folder = tmp_path_factory.mktemp("models")

    def save(model, name):
        model.save_pretrained(folder / name)
        minilm_tokenizer.save_pretrained(folder / name)

    for name, (model_class, config) in CLASSES.items():
        torch.manual_seed(0)
        model = model_class(config).eval()
        save(model, name)
        compress(model, Compression(dk=3, dv=6), calibration=None)
        save(model, f"{name}-small")
    save(load_model(folder / "dense-small", edited=True).bfloat16(), "dense-bf16")
    lines = [f"text {n} " + "of a user who writes more " * (n % 4) + f"in {1900 + n}" for n in range(40)]
    (folder / "texts.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "pairs.txt").write_text("".join(f"{line}\tdas {line}\n" for line in lines), encoding="utf-8")
    (folder / "one.txt").write_text("one text\n", encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def folder(models, tmp_path, monkeypatch):
    """Work in a new folder that shows those models."""
    for path in models.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys):
    return lambda *arguments: ran(start.distill, arguments, capsys)


def error(part):
    return part["output_error"]["relative_error"]


@pytest.mark.parametrize(
    ("teacher", "texts"),
    [("dense", "texts.txt"), ("embedder", "texts.txt"), ("writer", "texts.txt"), ("translator", "pairs.txt")],
)
def test_it_comes_nearer_to_the_dense_model_and_says_so(run, folder, teacher, texts):
    model = f"{teacher}-small"
    code, printed, errors = run(model, teacher, "--texts", texts, *QUICK, "--json", "out.json")
    assert (code, errors) == (0, "")
    output = folder / f"{model}-distilled"
    record = json.loads((folder / "out.json").read_text())
    assert record == json.loads((output / "collab_compress.json").read_text())
    assert (record["model"], record["teacher"], record["texts"]) == (model, teacher, [texts])
    assert error(record["after"]) < 0.8 * error(record["before"])
    assert f"Output error: {error(record['before']):.1%} → {error(record['after']):.1%}" in printed
    assert (record["after"]["agreement"] is not None) == ("Before: " in printed)
    assert "without labels, 4 epochs of 35 texts" in (output / "README.md").read_text()
    assert not (folder / f"{model}-distilled.checkpoints").exists()


def test_a_conversion_on_texts_names_the_command_that_trains_it(run, folder, capsys):
    words = ("dense", "--dk", 3, "--device", "cpu", "--length", 12, "--output", "my model")
    code, printed, _ = ran(start.compress, (*words, "--calibration", "texts.txt"), capsys)
    assert code == 0
    command = shlex.split(printed.partition("without labels: ")[2].partition("\n")[0])
    assert command == ["collab-distill", "my model", "dense", "--texts", "texts.txt", "--length", "12"]
    code, _, warned = run(*command[1:], *QUICK)
    assert code == 0
    assert "texts are longer than 12 tokens and are read in passages" in warned
    assert (folder / "my model-distilled").is_dir()
    _, printed, _ = ran(start.compress, ("dense", "--dk", 3, "--calibration", "synthetic"), capsys)
    assert "Saved to" in printed
    assert "collab-distill" not in printed


def test_the_command_is_named_where_training_was_measured_to_help(run, capsys):
    words = ("--dk", 3, "--device", "cpu")
    for model, texts, named in (("writer", "texts.txt", True), ("translator", "pairs.txt", False)):
        _, printed, _ = ran(start.compress, (model, *words, "--calibration", texts), capsys)
        assert "Saved to" in printed
        assert ("collab-distill" in printed) == named


def test_sources_are_mixed_and_the_teacher_writes_texts(run, monkeypatch):
    """Random tokens and texts that a model writes have no token types, texts that are read have."""
    sizes, read = [], distill.read_calibration

    def spy(model, *args):
        sizes.append(model.num_parameters())
        return read(model, *args)

    monkeypatch.setattr(distill, "read_calibration", spy)
    for teacher, kind in (("dense", "synthetic"), ("writer", "generated")):
        command = (f"{teacher}-small", teacher, "--texts", kind, "texts.txt", "--sequences", 16, "--length", 12)
        assert run(*command, *QUICK)[0] == 0
        assert sizes.pop() == load_model(Path(teacher)).num_parameters()


def test_steps_read_fewer_long_texts(monkeypatch):
    monkeypatch.setattr(distill, "MOST_TOKENS", 12)
    lengths = (1, 3, 1, 2, 20, 2, 5, 3, 4, 1, 30)
    batches = [{"input_ids": torch.ones(1, n, dtype=torch.long)} for n in lengths]
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batches[0]["token_type_ids"] = torch.ones_like(batches[0]["input_ids"])
    groups = distill._of_similar_lengths(batches, 5, seed=0, padding=0)
    assert sum(int(group["token_type_ids"].sum()) for group in groups) == 1
    assert [group["attention_mask"].sum(1).tolist() for group in groups] == [
        [1, 1, 1, 2, 2],
        [3, 3, 4],
        [5],
        [20],
        [30],
    ]


def test_trained_weights_are_saved_in_the_dtype_of_the_model(run):
    assert run("dense-bf16", "dense", *TEXTS, *QUICK)[0] == 0
    before, after = (load_model(Path(name), edited=True) for name in ("dense-bf16", "dense-bf16-distilled"))
    assert before.dtype == after.dtype == torch.bfloat16
    pairs = zip(before.bert.encoder.parameters(), after.bert.encoder.parameters(), strict=True)
    assert not any(torch.equal(one, other) for one, other in pairs)
    assert torch.equal(before.classifier.weight, after.classifier.weight)


@pytest.mark.parametrize("has", [True, False], ids=["avx512", "avx2"])
def test_bfloat16_is_left_out_where_it_is_only_emulated(run, set_bfloat16, monkeypatch, has):
    set_bfloat16(has)
    passed, make = [], distill.TrainingArguments
    monkeypatch.setattr(
        distill, "TrainingArguments", lambda *args, **kwargs: passed.append(make(*args, **kwargs)) or passed[-1]
    )
    code, _, warned = run("dense-small", "dense", *TEXTS, *QUICK, "--bf16")
    assert code == 0
    assert passed[0].bf16 == has
    assert ("bf16 changed nothing: this processor only emulates bfloat16" in warned) != has


def interrupt(monkeypatch, when, after=0):
    """Interrupt a step of the command, after some steps of training."""

    def step(step, done=0, total=None):
        if (step, done) == (when, after):
            raise KeyboardInterrupt

    monkeypatch.setattr(distill, "progress", step)


def test_an_interrupted_run_goes_on_to_the_same_weights(run, folder, monkeypatch):
    words = ("dense-small", "dense", *TEXTS, *QUICK)
    assert run(*words, "--output", "whole")[0] == 0
    with monkeypatch.context() as patch:
        interrupt(patch, "training", after=11)  # of 20; a checkpoint follows every fourth
        code, _, message = run(*words, "--output", "broken")
    assert (code, message.count("\n")) == (130, 1)
    assert "the same command goes on from the last checkpoint in broken.checkpoints" in message
    assert not (folder / "broken").exists()
    code, _, message = run(*words, "--seed", 1, "--output", "broken")
    assert code == 2
    assert "not from an interrupted run of this very command" in message
    (folder / "broken.checkpoints" / "checkpoint-12").mkdir()  # which another interrupt left half-written
    steps = []
    monkeypatch.setattr(distill, "progress", lambda step, done=0, total=None: steps.append((step, done)))
    assert run(*words, "--output", "broken")[0] == 0
    assert [done for step, done in steps if step == "training"] == list(range(9, 21))
    one, other = (load_model(Path(name), edited=True).state_dict() for name in ("whole", "broken"))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not (folder / "broken.checkpoints").exists()


def test_a_run_that_is_interrupted_after_its_last_step_ends_as_another(run, monkeypatch):
    words = ("dense-small", "dense", *TEXTS, *QUICK)
    assert run(*words, "--output", "whole")[0] == 0
    with monkeypatch.context() as patch:
        interrupt(patch, "comparing both models again")
        assert run(*words, "--output", "broken")[0] == 130
    assert run(*words, "--output", "broken")[0] == 0
    one, other = (load_model(Path(name), edited=True).state_dict() for name in ("whole", "broken"))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_run_that_fails_early_leaves_nothing(run, folder, monkeypatch):
    interrupt(monkeypatch, "training", after=1)
    assert run("dense-small", "dense", *TEXTS, *QUICK)[::2] == (
        130,
        "collab-distill: interrupted; nothing half-written is left\n",
    )
    assert not list(folder.glob("*distilled*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dense-small", "dense", "--texts", "one.txt"), "at least two texts"),
        (("dense-small", "dense", "--texts", "none"), "at least two texts"),
        (("dense-small", "missing/dense", *TEXTS), "missing/dense"),
        (("dense-small", "./missing", *TEXTS), "is not a directory"),
        (("dense-small", "embedder", *TEXTS), "pass the dense model that was converted"),
        (("dense", "dense-small", *TEXTS), "the dense model comes second"),
        (("dense-small", "dense", *TEXTS, "--epochs", 0), "--epochs is 0.0; expected a number above 0"),
        (("dense-small", "dense", *TEXTS, "--learning-rate", "nan"), "--learning-rate is nan"),
        (("dense-small", "dense", *TEXTS, "--batch-size", 0), "batch_size is 0"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(run, folder, arguments, message):
    code, printed, errors = run(*arguments)
    assert (code, printed, errors.count("\n")) == (2, "", 1)
    assert message in errors
    assert not list(folder.glob("*distilled*"))


def test_a_folder_of_the_user_in_the_way_is_left_alone(run, folder):
    stored = folder / "out.checkpoints" / "settings.json"
    stored.parent.mkdir()
    stored.write_bytes(b"\xff")
    code, _, message = run("dense-small", "dense", *TEXTS, "--output", "out")
    assert (code, stored.read_bytes()) == (2, b"\xff")
    assert "not from an interrupted run of this very command" in message


def test_a_second_process_at_the_same_output_is_refused(run, folder, monkeypatch):
    words, codes = ("dense-small", "dense", *TEXTS, *QUICK, "--output", "out"), []

    def step(step, done=0, total=None):
        if (step, done) == ("training", 1):
            codes.append(run(*words)[::2])

    monkeypatch.setattr(distill, "progress", step)
    assert run(*words)[0] == 0
    ((code, message),) = codes
    assert code == 2
    assert "another process is at work in out.checkpoints; wait for it" in message
    assert not (folder / "out.checkpoints").exists()


def test_several_processes_are_refused(run, monkeypatch):
    monkeypatch.setattr(distill, "process_state", lambda: SimpleNamespace(num_processes=2))
    assert "runs in one process" in run("dense-small", "dense", *TEXTS)[2]


def test_both_models_must_read_the_same_tokens(run, folder, minilm_tokenizer):
    model = BertForSequenceClassification(BertConfig(**{**SIZES, "vocab_size": 31000}))
    model.save_pretrained("larger")
    minilm_tokenizer.save_pretrained("larger")
    code, _, errors = run("dense-small", "larger", *TEXTS)
    assert code == 2
    assert "dense-small has 30,522 tokens and larger 31,000; both must read the same" in errors
