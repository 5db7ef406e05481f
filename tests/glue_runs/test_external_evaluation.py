"""Stand-ins for mteb and lm_eval; tests/extras runs the packages themselves."""

import json
import shutil
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from collab_compress_glue_runs.commands import evaluate as command
from collab_compress_glue_runs.commands import start
from collab_compress_glue_runs.external_evaluation import lm_eval_scores, mteb_scores
from commands import ran
from tiny_words import word_tokenizer
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from collab_compress import Compression, compress
from collab_compress.errors import DataError, install

UNREACHABLE = Mock(side_effect=ConnectionError("Couldn't reach the hub"))


@pytest.fixture
def run(capsys):
    return lambda *arguments: ran(start.evaluate, arguments, capsys)


def module(monkeypatch, name, **content):
    """Install a module for the time of a test."""
    made = ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def mteb(monkeypatch):
    """Install an MTEB with one task, which scores a model by the length of its embedding."""
    calls = []

    def get_task(name):
        if name != "Local":
            raise KeyError(f"KeyError: '{name}' not found. Did you mean: Local?")
        return SimpleNamespace(metadata=SimpleNamespace(name=name, main_score="cosine_spearman"))

    def evaluate(model, task, **options):
        calls.append(options)
        size = len(model.encode(["a text"])[0]) / 1000
        return SimpleNamespace(task_results=[SimpleNamespace(get_score=lambda: size)])

    module(monkeypatch, "mteb", get_task=get_task, evaluate=evaluate)
    return calls


@pytest.fixture
def lm_eval(monkeypatch):
    """Install a harness with one task; return its recorded calls."""
    calls = {}

    def model(**options):
        calls["model"] = options
        return "harnessed"

    def simple_evaluate(model, **options):
        calls["evaluate"] = {**options, "model": model}
        metrics = {"alias": "after", "acc,none": 0.25, "acc_stderr,none": 0.0625}
        metrics |= {"exact,strict": 1, "exact_stderr,strict": "N/A"}
        return {"results": {"after": metrics}, "groups": {"all": {"acc,none": 0.5, "acc_stderr,none": "N/A"}}}

    def task_manager(include_path):
        calls["include"] = include_path
        return SimpleNamespace(all_tasks=["after", "piqa"])

    harness = module(monkeypatch, "lm_eval", simple_evaluate=simple_evaluate)
    module(monkeypatch, "lm_eval.models")
    module(monkeypatch, "lm_eval.models.huggingface", HFLM=model)
    module(monkeypatch, "lm_eval.tasks", TaskManager=task_manager)
    return calls, harness


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """Return a tiny converted decoder, and its tokenizer, which appends an end token."""
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    sizes = {"n_embd": 24, "n_head": 3, "n_layer": 1, "n_positions": 40}
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=2, eos_token_id=3, **sizes)
    model = GPT2LMHeadModel(config).eval()
    compress(model, Compression(dk=6), calibration=None)
    folder = tmp_path_factory.mktemp("models") / "decoder"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_mteb(mteb, run, minilm_path, tmp_path):
    code, printed, error = run(minilm_path, "--mteb", "Local", "--json", tmp_path / "out.json", "--batch-size", 4)
    assert (code, error) == (0, "")
    assert printed.splitlines()[1].split() == ["Local", "cosine_spearman", "0.3840"]
    [options] = mteb
    assert options["encode_kwargs"] == {"batch_size": 4}
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["scores"] == [{"task": "Local", "metric": "cosine_spearman", "value": 0.384, "error": None}]


def test_mteb_without_the_task_or_its_data(mteb, monkeypatch):
    with pytest.raises(DataError, match=r"mteb has no task 'Elsewhere': .*Did you mean: Local"):
        mteb_scores(None, ["Elsewhere"])

    monkeypatch.setattr(sys.modules["mteb"], "evaluate", UNREACHABLE)
    with pytest.raises(DataError, match="mteb cannot run Local: Couldn't reach the hub; its data come from the hub"):
        mteb_scores(None, ["Local"])


def test_how_it_pools_is_not_guessed(mteb, run, decoder):
    code, _, error = run(decoder, "--mteb", "Local")
    assert code == 2
    assert "has no modules.json, so its pooling is unknown" in error


def test_a_model_of_another_kind_is_not_pooled(mteb, run, minilm_path, tmp_path):
    shutil.copytree(minilm_path, tmp_path / "splade")
    settings = tmp_path / "splade" / "config_sentence_transformers.json"
    settings.write_text(json.dumps({"model_type": "SparseEncoder"}), encoding="utf-8")
    code, _, error = run(tmp_path / "splade", "--mteb", "Local")
    assert code == 2
    assert "splade is a SparseEncoder; --mteb scores SentenceTransformers, so score it by mteb itself" in error


def test_lm_eval(lm_eval, run, decoder, tmp_path):
    calls, _ = lm_eval
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    options = ("--shots", 2, "--limit", 9, "--include", tasks, "--batch-size", 4, "--json", tmp_path / "out.json")
    code, printed, error = run(decoder, "--lm-eval", "after", *options)
    assert (code, error) == (0, "")
    lines = [" ".join(line.split()) for line in printed.splitlines()[1:]]
    assert lines == ["after acc 0.2500 0.0625", "after exact (strict) 1.0000", "all acc 0.5000"]
    assert calls["model"]["pretrained"].transformer.h[0].attn.qk
    assert calls["model"]["batch_size"] == 4
    assert calls["model"]["add_bos_token"] is False  # its tokenizer ends every text
    assert calls["include"] == str(tasks)
    expected = {"model": "harnessed", "tasks": ["after"], "num_fewshot": 2, "limit": 9}
    assert calls["evaluate"].items() >= expected.items()
    record = json.loads((tmp_path / "out.json").read_text())
    assert (record["shots"], record["limit"], len(record["scores"])) == (2, 9, 3)


def test_lm_eval_without_the_task_its_data_or_a_decoder(lm_eval, monkeypatch, minilm_path):
    _, harness = lm_eval
    tokenizer, model = word_tokenizer(), GPT2LMHeadModel(GPT2Config(n_embd=6, n_head=1, n_layer=1))
    with pytest.raises(DataError, match=r"lm_eval has no task 'pika'; close to it: piqa$"):
        lm_eval_scores(model, tokenizer, ["pika"])

    monkeypatch.setattr(harness, "simple_evaluate", UNREACHABLE)
    with pytest.raises(DataError, match="lm_eval cannot run after: Couldn't reach the hub; its data come from the"):
        lm_eval_scores(model, tokenizer, ["after"])
    with pytest.raises(DataError, match="GPT2LMHeadModel has no tokenizer; lm_eval takes a decoder"):
        lm_eval_scores(model, None, ["after"])
    encoder = BertModel(BertConfig(hidden_size=6, num_attention_heads=1, num_hidden_layers=1, intermediate_size=6))
    with pytest.raises(DataError, match="BertModel predicts no tokens; lm_eval takes a decoder"):
        lm_eval_scores(encoder, tokenizer, ["after"])


@pytest.mark.parametrize(
    ("package", "arguments"), [("mteb", ("--mteb", "STSBenchmark")), ("lm_eval", ("--lm-eval", "piqa"))]
)
def test_missing_packages_are_named(run, monkeypatch, package, arguments):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(command, "load_source", None)  # before anything is loaded
    code, _, error = run("minilm", *arguments)
    assert code == 2
    assert error == f"collab-evaluate: {package} is not installed; {install('eval')}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of --mteb TASK and --lm-eval TASK"),
        (("--mteb", "A", "--lm-eval", "B"), "give one of --mteb TASK"),
        (("--mteb", "A", "--limit", "3"), "--limit is for --lm-eval; leave it out"),
        (("--lm-eval", "A", "--limit", "0"), "limit is 0; expected at least 1"),
        (("--mteb", "A", "--batch-size", "0"), "batch_size is 0; expected at least 1"),
        (
            ("--lm-eval", "A", "--include", "nosuch"),
            "--include nosuch: expected a folder of the harness's YAML files",
        ),
    ],
)
def test_arguments_that_do_not_go_together(run, arguments, message):
    code, _, error = run("minilm", *arguments)
    assert code == 2
    assert message in error
