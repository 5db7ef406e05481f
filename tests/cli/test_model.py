"""Which class is loaded, outputs that collide, devices, and the progress bar."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import change_json, change_weights
from collab_compress_cli import model as command_model
from collab_compress_cli.model import check_outputs, device_of, load_source
from collab_compress_cli.pretrained import load_model, sentence_class, sentence_length
from collab_compress_cli.progress import Progress
from tiny_words import word_tokenizer
from transformers import BertForSequenceClassification, BertModel, MPNetConfig, MPNetModel

from collab_compress.errors import CheckpointError, CollabCompressError, CompressionError


def test_weights_without_the_head_that_the_config_names_are_the_base_model(tmp_path, caplog):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 32}
    stored = MPNetModel(MPNetConfig(vocab_size=60, **sizes))
    stored.save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", architectures=["MPNetForMaskedLM"])
    model = load_model(tmp_path)
    assert type(model) is MPNetModel
    assert all(value.equal(stored.state_dict()[name]) for name, value in model.state_dict().items())
    assert "the config names MPNetForMaskedLM, but no weights of its head are stored" in caplog.text
    assert "such as lm_head.bias; loaded as MPNetModel" in caplog.text


def test_a_pooler_without_weights_is_left_out_where_nothing_reads_it(tmp_path, make_tiny, caplog):
    for model_class in (BertModel, BertForSequenceClassification):
        stored, folder = make_tiny("bert", model_class), tmp_path / model_class.__name__
        stored.save_pretrained(folder)
        change_weights(folder, **{name: None for name in stored.state_dict() if "pooler." in name})
    model = load_model(tmp_path / "BertModel")
    assert type(model) is BertModel
    assert model.pooler is None
    assert "no weights of the pooler are stored; BertModel has none" in caplog.text
    with pytest.raises(CheckpointError, match=r"needs, such as bert\.pooler\.dense\.bias"):
        load_model(tmp_path / "BertForSequenceClassification")


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"--output": "out", "--json": "out"}, "--output and --json are both out"),
        ({"--output": "out", "--json": "new/../out"}, "--output and --json are both"),
        ({"--json": "out/report.json", "--output": "out"}, "--json out/report.json lies in --output out"),
        ({"--pages": "a", "--records": "a/b/c"}, "--records a/b/c lies in --pages a"),
        ({"--output": "read/out", "--json": None}, "read/out lies in read, which is read"),
        ({"--json": "link"}, "link exists"),
        ({"--json": "/dev/null"}, "/dev/null exists"),
    ],
)
def test_places_that_collide(tmp_path, monkeypatch, outputs, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "read").mkdir()
    Path("link").symlink_to("read/text")
    paths = {option: None if path is None else Path(path) for option, path in outputs.items()}
    with pytest.raises(CollabCompressError, match=message):
        check_outputs(paths, Path("read"), None)
    check_outputs({"--output": Path("out"), "--json": Path("out.json"), "--pages": None}, Path("read"))


@pytest.mark.parametrize(
    ("device", "accelerator", "alone", "second_of_two"),
    [
        ("cpu", "cuda", "cpu", "cpu"),
        ("cuda", "cuda", "cuda", "cuda:1"),
        ("auto", None, "cpu", "cpu"),
        ("auto", "cuda", "cuda", "cuda:1"),
        ("cuda:0", "cuda", "cuda:0", CompressionError("'cuda:0' would hold all 2 processes; pass cuda")),
    ],
)
def test_each_process_has_its_own_device(monkeypatch, device, accelerator, alone, second_of_two):
    found = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    for number, expected in ((1, alone), (2, second_of_two)):
        state = SimpleNamespace(num_processes=number, local_process_index=1)
        monkeypatch.setattr(command_model, "process_state", lambda state=state: state)
        if isinstance(expected, str):
            assert device_of(device) == expected
        else:
            with pytest.raises(CompressionError, match=str(expected)):
                device_of(device)


def test_a_progress_bar_shows_each_kind_of_work_and_goes_away(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    progress = Progress()
    progress("energy", 1, 3)
    assert capsys.readouterr().err == ""  # the command has not begun, or is quiet
    progress.begin("collab-analyze")
    for name, done, total in (("energy", 1, 3), ("energy", 3, 3), ("cost", 0, None), ("cost", 2, None)):
        progress(name, done, total)
    progress.clear()
    shown = capsys.readouterr().err
    assert "energy" in shown
    assert "1/3" in shown
    assert "cost" in shown
    assert shown.endswith("\r")
    assert "\n" not in shown


@pytest.mark.parametrize(("rank", "count"), [("0", 2), ("1", 0)])
def test_steps_that_go_on_have_another_line_after_some_seconds(monkeypatch, capsys, rank, count):
    monkeypatch.setenv("RANK", rank)
    seconds = iter([0.0, 1.0, 2.0, 7.0, 8.0])
    monkeypatch.setattr("collab_compress_cli.progress.monotonic", lambda: next(seconds))
    progress = Progress()
    progress.begin("collab-analyze")
    for done in range(4):
        progress("measuring heads", done, 4)
    lines = [
        "collab-analyze: 1 s: measuring heads (0 of 4 done)",
        "collab-analyze: 7 s: measuring heads (2 of 4 done)",
    ]
    assert capsys.readouterr().err.splitlines() == lines[:count]


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"max_seq_length": 9, "do_lower_case": False}, 9),
        ({"max_seq_length": 90}, 40),  # the tokenizer's is smaller
        ({"max_seq_length": 9, "tokenizer_args": {"model_max_length": 7}}, 7),
        ({"processor_kwargs": {"model_max_length": 7}}, 7),
        ({"max_seq_length": None}, 40),
        ({"max_seq_length": "9", "processor_kwargs": 3}, 40),
        ([9], 40),
    ],
)
def test_texts_are_read_up_to_where_sentence_transformers_cuts_them(settings, length, make_tiny, tmp_path):
    make_tiny("bert").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = load_source("tiny", tmp_path).tokenizer
    assert tokenizer.model_max_length == length


def test_a_damaged_file_of_sentence_transformers_says_nothing(tmp_path):
    (tmp_path / "sentence_roberta_config.json").write_text("{", encoding="utf-8")
    assert sentence_length(tmp_path) is None


def test_minilm_reads_as_many_tokens_as_sentence_transformers_does(minilm_path):
    library = pytest.importorskip("sentence_transformers")
    expected = library.SentenceTransformer(str(minilm_path), device="cpu").max_seq_length
    assert load_source("minilm", minilm_path).tokenizer.model_max_length == expected == 256


@pytest.mark.parametrize(
    ("settings", "loaded_by"),
    [
        ({}, "SentenceTransformer"),
        ({"model_type": "SentenceTransformer"}, "SentenceTransformer"),
        ({"model_type": "SparseEncoder"}, "SparseEncoder"),
        ({"model_type": "CrossEncoder"}, "CrossEncoder"),
        ({"model_type": "MultiVectorEncoder"}, "MultiVectorEncoder"),
        ({"model_type": "ColBERT"}, "MultiVectorEncoder"),
        ({"model_type": "SparseEncoder; import os"}, "SentenceTransformer"),  # a line of code is printed
        ({"model_type": ["SparseEncoder"]}, "SentenceTransformer"),
    ],
)
def test_the_class_that_loads_a_folder_of_sentence_transformers(settings, loaded_by, tmp_path):
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings), encoding="utf-8")
    assert sentence_class(tmp_path) is None
    (tmp_path / "modules.json").write_text("[]", encoding="utf-8")
    assert sentence_class(tmp_path) == loaded_by
