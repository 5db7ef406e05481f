"""The command, as a person types it."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from collab_compress_cli import compress as command
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    BertForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from collab_compress import Compression, compress, read_factors
from collab_compress.analysis import Plan, Row
from collab_compress.checkpoint.pretrained import SHORT_NAMES
from collab_compress.errors import CollabCompressError


@pytest.fixture
def fails(run, tmp_path):
    def run_and_fail(*arguments):
        """Run a command that must fail with one line and leave nothing behind; return the line."""
        before = sorted(os.listdir(tmp_path))
        code, _, error = run(*arguments)
        assert code == 2
        lines = [line for line in error.splitlines() if line.strip()]
        assert len(lines) == 1, error
        assert sorted(os.listdir(tmp_path)) == before
        return lines[0]

    return run_and_fail


def test_converts_a_classifier_and_says_how_to_load_it(run, loaded, model_dir, tmp_path):
    output = tmp_path / "out"
    report_file = tmp_path / "report.json"
    code, printed, error = run(model_dir, "--dk", 8, "--output", output, "--json", report_file)
    assert code == 0, error
    for part in ("bert.encoder.layer.1.attention.self", "log probabilities move by", "import collab_compress"):
        assert part in printed
    model = loaded(printed)
    assert type(model) is BertForSequenceClassification
    assert len(read_factors(model)) == 2
    assert (output / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()
    stored = json.loads(report_file.read_text(encoding="utf-8"))
    assert stored == json.loads((output / "collab_compress.json").read_text(encoding="utf-8"))
    assert stored["compression"]["dk"] == 8
    assert len(stored["report"]["modules"]) == 2


def test_values_too_and_what_that_saves(run, loaded, model_dir, tmp_path):
    code, printed, error = run(model_dir, "--dk", 12, "--dv", 12, "--output", tmp_path / "out")
    assert code == 0, error
    assert "dv output error weight error" in " ".join(printed.split())
    assert "Value/output parameters 2,352 → 1,176 (-50%)." in printed
    assert "Attention parameters" in printed
    model = loaded(printed)
    assert model.bert.encoder.layer[0].attention.self.value_form.dv == 12
    code, printed, error = run(model_dir, "--dv", 12, "--output", tmp_path / "values")
    assert code == 0, error
    assert "Query/key" not in printed
    assert not read_factors(loaded(printed))


def test_a_share_to_keep_is_reported_as_widths(run, loaded, model_dir, tmp_path):
    output = tmp_path / "out"
    code, printed, error = run(model_dir, "--keep", 0.6, "--length", 8, "--sequences", 32, "--output", output)
    assert code == 0, error
    assert printed.startswith("Whole model: ")
    assert "\nKept " in printed
    stored = json.loads((output / "collab_compress.json").read_text(encoding="utf-8"))["compression"]
    widths = {name: stored[name] for name in ("dk", "dv", "dff") if stored[name] is not None}
    assert ", ".join(f"{name} {width}" for name, width in widths.items()) + "." in printed
    assert "operations at 8 tokens" in printed
    assert loaded(printed).num_parameters() < 0.999 * AutoModel.from_pretrained(model_dir).num_parameters()


def test_a_stock_model_needs_no_package(run, model_dir, tmp_path, fails, stock_python):
    assert "the head width of a stock BertForSequenceClassification" in fails(
        model_dir, "--dk", 12, "--dv", 12, "--stock", "--output", tmp_path / "out"
    )
    for widths in (("--dk", 12), ("--dk", 12, "--dff", 16), ("--dv", 12, "--dff", 16), ("--keep", 0.6)):
        message = fails(model_dir, *widths, "--stock", "--output", tmp_path / "out")
        assert "--stock takes --dff N or --layers N, or --dk N and --dv N together, and neither --keep" in message
    assert run(model_dir, "--dff", 16, "--stock", "--output", tmp_path / "blocks")[0] == 0
    done = stock_python(
        "from transformers import AutoModel; AutoModel.from_pretrained(sys.argv[1])", tmp_path / "blocks"
    )
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    config = T5Config(vocab_size=61, d_model=24, d_kv=8, num_heads=3, d_ff=32, num_layers=2, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    code, printed, error = run(
        tmp_path / "t5", "--dk", 12, "--dv", 12, "--stock", "--calibration", "none", "--output", tmp_path / "narrow"
    )
    assert code == 0, error
    assert "import collab_compress" not in printed
    code = """
from transformers import AutoModelForSeq2SeqLM
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])
assert model.config.d_kv == 4, model.config
"""
    done = stock_python(code, tmp_path / "narrow")
    assert done.returncode == 0, done.stderr


def test_fewer_layers_make_a_model_that_needs_no_package(run, model_dir, tmp_path, stock_python):
    output = tmp_path / "shallow"
    code, printed, error = run(model_dir, "--layers", 1, "--dff", 16, "--stock", "--output", output)
    assert code == 0, error
    removed = json.loads((output / "collab_compress.json").read_text(encoding="utf-8"))["report"]["removed_layers"]
    assert len(removed) == 1
    assert f"Without {removed[0]}; " in printed
    assert f"Layers of the source that were removed: {removed[0]} (" in (output / "README.md").read_text("utf-8")
    code = "from transformers import AutoModel; assert len(AutoModel.from_pretrained(sys.argv[1]).encoder.layer) == 1"
    done = stock_python(code, output)
    assert done.returncode == 0, done.stderr


def test_the_amount_of_calibration_data_is_an_option_and_reported(run, model_dir, tmp_path, caplog):
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"text number {n} of a user\n" for n in range(30)), encoding="utf-8")
    options = ("--dk", 8, "--calibration", texts, "--sequences", 24, "--length", 6, "--seed", 2)
    code, printed, error = run(model_dir, *options, "--output", tmp_path / "out")
    assert code == 0, error
    assert "Calibrated on 21 sequences; each module saw at least 126 vectors." in printed
    assert "calibration uses 24 of 30 texts, drawn at random" in caplog.messages
    assert "24 of 24 texts are longer than 6 tokens and are cut there" in caplog.messages
    stored = json.loads((tmp_path / "out" / "collab_compress.json").read_text(encoding="utf-8"))
    assert stored["calibration_options"] == {"sequences": 24, "length": 6}
    assert len(stored["report"]["warnings"]) == 2
    assert [module["vectors"] for module in stored["report"]["modules"]] == [[126, 126]] * 2


def test_heads_of_a_width(run, loaded, model_dir, tmp_path):
    code, printed, error = run(model_dir, "--dk", 13, "--head-dim", 5, "--output", tmp_path / "out")
    assert code == 0, error
    factors = read_factors(loaded(printed))
    assert {count for each in factors.values() for count in each.mixing.count_nonzero(1).tolist()} == {4}
    stored = json.loads((tmp_path / "out" / "collab_compress.json").read_text(encoding="utf-8"))
    assert stored["compression"]["head_dim"] == 5
    assert {(module["dk"], module["head_dim"]) for module in stored["report"]["modules"]} == {(13, 5)}


def test_the_whole_model_comes_first_with_its_time_beside_dense(run, model_dir, tmp_path):
    _, printed, _ = run(model_dir, "--dk", 13, "--length", 8, "--output", tmp_path / "long")
    lines = printed.splitlines()
    assert lines[0].startswith("Whole model: ")
    assert lines[1].startswith("Time at 8 tokens")
    assert "of dense" in lines[1]
    assert "Wherever it is loaded: pip install collab-compress." in lines


def test_same_as_the_python_api(run, model_dir, tmp_path):
    code, *_ = run(model_dir, "--dk", 8, "--calibration", "none", "--output", tmp_path / "out")
    assert code == 0
    model = BertForSequenceClassification.from_pretrained(model_dir)
    compress(model, Compression(dk=8), calibration=None)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


def test_dtype_is_kept(run, make_tiny, tmp_path):
    make_tiny("bert").to(torch.bfloat16).save_pretrained(tmp_path / "tiny")
    code, *_ = run(tmp_path / "tiny", "--dk", 8, "--calibration", "none", "--output", tmp_path / "out")
    assert code == 0
    saved = load_file(tmp_path / "out" / "model.safetensors")
    channels = {name for name, tensor in saved.items() if tensor.dtype != torch.bfloat16}
    assert all(name.endswith(".mixing_channels") for name in channels)


def test_calibration_file_and_modules(run, model_dir, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("one\ntwo\nthree\n", encoding="utf-8")
    options = ("--calibration", texts, "--modules", "*layer.0*")
    code, printed, error = run(model_dir, "--dk", 8, *options, "--output", tmp_path / "out")
    assert code == 0, error
    assert "layer.1" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dk", "0"], "dk is 0; expected at least 1"),
        (["--dk", "8", "--damping", "1e308"], "damping is 1e+308; expected 0 or more, up to 1e+06"),
        (["--dk", "8", "--seed", str(2**64)], "seed is 18446744073709551616; expected at most 4,294,967,295"),
        (["--dk", "8", "--sequences", "0"], "sequences is 0; expected at least 1"),
        (["--dk", "8", "--length", "0"], "length is 0; expected at least 1"),
        (["--dk", "25"], "pass dk between 1 and 24"),
        (
            ["--dv", "8", "--head-dim", "5"],
            "head_dim, solver and sweeps apply to queries and keys",
        ),
        (["--dk", "8", "--calibration", "nowhere.txt"], "cannot read calibration texts from nowhere.txt"),
        (["--dk", "8", "--modules", "nothing"], "matches 'nothing'"),
        (["--dk", "8", "--device", "abacus"], "device 'abacus' cannot be used"),
        (["--dff", "8", "--recover"], "--recover trains converted attention"),
        (["--layers", "1", "--dk", "8", "--recover"], "leave out --layers or --recover"),
        (["--layers", "2"], "layers is 2, and the deepest stack of BertForSequenceClassification has 2"),
    ],
)
def test_bad_arguments(fails, model_dir, tmp_path, arguments, message):
    line = fails(model_dir, "--output", tmp_path / "out", *arguments)
    assert message in line


def test_output_that_exists(fails, model_dir):
    line = fails(model_dir, "--dk", 8, "--output", model_dir)
    assert "exists; choose another output" in line


def changed_config(**entries):
    def spoil(folder):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, **entries}), encoding="utf-8")

    return spoil


def changed_weights(change):
    def spoil(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def truncated(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


QUERY = "bert.encoder.layer.0.attention.self.query.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot read"),
        (truncated, "cannot load weights"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot load weights"),
        (
            changed_weights(lambda tensors: tensors[QUERY].fill_(float("nan"))),
            f"{QUERY} holds NaN or infinite values",
        ),
        (
            changed_weights(lambda tensors: tensors["classifier.bias"].fill_(float("inf"))),
            "classifier.bias holds NaN",
        ),
        (changed_weights(lambda tensors: tensors.pop("classifier.bias")), "lacks weights"),
        (changed_config(quantization_config={"quant_method": "gptq", "bits": 4}), "is quantized (gptq)"),
        (changed_config(architectures=["ClassOfSomeoneElse"]), "is not run"),
        (lambda folder: (folder / "modules.json").write_text('[{"idx": 0}]'), "modules.json"),
        (lambda folder: (folder / "modules.json").write_text("{"), "modules.json"),
        (lambda folder: (folder / "modules.json").write_text('[{"path": "../elsewhere"}]'), "modules.json"),
    ],
)
def test_damaged_models_are_refused(fails, model_dir, spoil, message):
    spoil(model_dir)
    assert message in fails(model_dir, "--dk", 8)


def test_names_that_cannot_be_a_model(fails):
    assert "is not a directory" in fails("./nowhere", "--dk", 8)
    assert "neither a directory nor a model" in fails("a/b/c", "--dk", 8)


def test_an_already_converted_model(run, fails, model_dir, tmp_path):
    assert run(model_dir, "--dk", 8, "--output", tmp_path / "out")[0] == 0
    assert "already converted" in fails(tmp_path / "out", "--dk", 4)


@pytest.mark.parametrize("name", ["bert-base", "some-org/some-model"])
def test_an_unreachable_hub(fails, monkeypatch, tmp_path, name):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    line = fails(name, "--dk", 8)
    assert "the hub cannot be reached" in line
    assert SHORT_NAMES.get(name, name) in line
    assert "minilm" in line


INTERRUPTIBLE = """
import runpy
runpy.run_module("collab_compress_cli.compress", run_name="__main__")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sees in /proc how far the command is")
def test_an_interrupt_leaves_no_output(python, minilm_path, tmp_path):
    options = ("--dk", 128, "--output", "out", "--sweeps", 100000)
    process = python.start(INTERRUPTIBLE, "minilm", *options, folder=tmp_path)
    weights, deadline = str(minilm_path / "model.safetensors"), time.monotonic() + 60
    try:
        while weights not in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8"):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(1)  # at work on the first module
        assert os.listdir(tmp_path) == []  # so that a kill leaves nothing either
        process.send_signal(signal.SIGINT)
        error = process.ended(seconds=60).stderr
    finally:
        process.kill()  # it would go on for hours
    assert process.returncode == 130
    assert os.listdir(tmp_path) == []
    assert "nothing half-written is left" in error
    assert "Traceback" not in error


def test_sentence_transformers_files_travel_along(run, tmp_path, minilm_path):
    code, shown, _ = run("minilm", "--dk", 384, "--output", tmp_path / "out", "--calibration", "none")
    assert code == 0
    assert "from sentence_transformers import SentenceTransformer" in shown
    assert f'model = SentenceTransformer("{tmp_path / "out"}")' in shown
    assert 'model = SentenceTransformer("out")' in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (minilm_path / name).read_bytes()
    assert AutoModel.from_pretrained(tmp_path / "out").config.model_type == "bert"
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert data.library_name == "sentence-transformers"


def test_a_report_without_a_place(fails, model_dir, tmp_path):
    for place, message in ((model_dir, "exists"), (tmp_path / "out" / "report.json", "lies in --output")):
        line = fails(model_dir, "--dk", 8, "--output", tmp_path / "out", "--json", place)
        assert message in line


def test_a_model_without_tokenizer_needs_no_calibration(fails, make_tiny, tmp_path):
    make_tiny("bert").save_pretrained(tmp_path / "tiny")
    assert "calibration 'none'" in fails(tmp_path / "tiny", "--dk", 8)


def test_a_config_that_names_no_class_is_loaded_bare(run, model_dir, tmp_path):
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    del config["architectures"]
    (model_dir / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, printed, _ = run(model_dir, "--dk", 8, "--calibration", "none", "--output", tmp_path / "out")
    assert code == 0
    assert "BertModel.from_pretrained" in printed


def test_a_card_and_the_licence_travel_along(run, model_dir, tmp_path):
    (model_dir / "README.md").write_text("# Theirs\n", encoding="utf-8")
    (model_dir / "LICENSE").write_text("do as you like", encoding="utf-8")
    (model_dir / "customers.csv").write_text("secret", encoding="utf-8")
    code, printed, error = run(model_dir, "--dk", 8, "--output", tmp_path / "out")
    assert code == 0, error
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.library_name == "transformers"
    for part in (
        "# out",
        "made from `tiny`",
        "R = 8",
        "calibrated on the texts that come with",
        'from_pretrained("out")',
    ):
        assert part in card.content
    assert str(tmp_path) not in card.content
    assert (tmp_path / "out" / "LICENSE").read_text(encoding="utf-8") == "do as you like"
    assert not (tmp_path / "out" / "customers.csv").exists()
    assert f"Not copied from {model_dir}: customers.csv." in printed


@pytest.mark.parametrize("name", ["texts.txt", "link", "pipe", "/dev/null"])
def test_a_report_replaces_nothing(fails, monkeypatch, model_dir, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("one\ntwo\n", encoding="utf-8")
    Path("link").symlink_to("texts.txt")
    os.mkfifo("pipe")
    line = fails("tiny", "--dk", 8, "--calibration", "texts.txt", "--json", name)
    assert f"{name} exists; choose another output" in line
    assert Path("texts.txt").read_text(encoding="utf-8") == "one\ntwo\n"


@pytest.mark.parametrize("option", ["--output", "--json"])
def test_nothing_is_written_into_the_model(fails, model_dir, option):
    before = sorted(os.listdir(model_dir))
    assert "which is read" in fails(model_dir, "--dk", 8, option, model_dir / "out")
    assert sorted(os.listdir(model_dir)) == before


def test_a_full_disk(fails, monkeypatch, model_dir, tmp_path):
    def save(self, directory, **_):
        (directory / "model.safetensors").write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(BertForSequenceClassification, "save_pretrained", save)
    line = fails(model_dir, "--dk", 8, "--output", tmp_path / "out", "--json", tmp_path / "report.json")
    assert "cannot write" in line
    assert "No space left on device" in line


def test_arguments_that_cannot_be_read_are_one_line(fails, model_dir):
    assert "--dk: expected INT, got 'abc'" in fails(model_dir, "--dk", "abc")
    assert "Unrecognized options: --colour" in fails(model_dir, "--dk", 8, "--colour", 3)
    assert "missing MODEL" in fails("--dk", 8)


def test_the_model_is_on_the_requested_device(run, monkeypatch, model_dir, tmp_path):
    moved = []
    monkeypatch.setattr(BertForSequenceClassification, "to", lambda self, device: moved.append(device))
    code, _, error = run(model_dir, "--dk", 8, "--device", "cpu", "--output", tmp_path / "out")
    assert code == 0, error
    assert moved == ["cpu"]


def test_a_plan_is_printed_and_nothing_is_converted(run, model_dir, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    options = ("--length", 8, "--sequences", 32)
    code, printed, error = run(model_dir, "--plan", *options, "--json", "plan.json")
    assert code == 0, error
    header, first, *_ = printed.splitlines()
    assert header.split()[:3] == ["part", "width", "operations"]
    assert first.split()[0] == "dk"
    rows = json.loads((empty / "plan.json").read_text(encoding="utf-8"))["rows"]
    assert {row["part"] for row in rows} == {"dk", "dv", "dff"}
    assert [path.name for path in empty.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    "options",
    [
        *(["--dk", 8], ["--mix"], ["--recover"], ["--push-to-hub", "a/b"]),
        *(["--output", "widths"], ["--modules", "*0*"], ["--sweeps", 3]),
    ],
)
def test_a_plan_takes_no_conversion(options, fails, model_dir):
    assert f"--plan converts nothing; leave out {options[0]}" in fails(model_dir, "--plan", *options)


def test_a_plan_has_a_place_before_it_is_made(fails, model_dir, monkeypatch):
    monkeypatch.setattr(command, "plan", lambda *_, **__: pytest.fail("it was planned"))
    assert "config.json exists" in fails(model_dir, "--plan", "--json", model_dir / "config.json")
    assert "which is read" in fails(model_dir, "--plan", "--json", model_dir / "plan.json")


def test_a_plan_that_cannot_be_written_is_printed(run, model_dir, tmp_path, monkeypatch):
    def full_disk(*_):
        raise CollabCompressError("No space left on device")

    monkeypatch.setattr(command, "plan", lambda *_, **__: Plan((Row("dk", 8, 0.1, 0.9, 0.5),), 8, {}))
    monkeypatch.setattr(command, "write_new", full_disk)
    code, printed, error = run(model_dir, "--plan", "--length", 8, "--json", tmp_path / "plan.json")
    assert (code, "No space left on device" in error) == (2, True)
    assert printed.split()[:3] == ["part", "width", "operations"]


def test_steps_of_recovery_are_checked_before_conversion(fails, model_dir, monkeypatch):
    monkeypatch.setattr(command, "compress", lambda *_, **__: pytest.fail("it was converted"))
    assert "recovery takes 0 steps; expected at least 1" in fails(
        model_dir, "--dk", 8, "--recover", 0, "--calibration", "synthetic"
    )


def test_narrower_feed_forward_blocks_need_no_package(run, model_dir, tmp_path):
    code, printed, error = run(model_dir, "--dff", 16, "--output", tmp_path / "out")
    assert code == 0, error
    assert "import collab_compress" not in printed
