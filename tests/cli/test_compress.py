"""The command, as a person types it."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import change_json, change_weights
from collab_compress_cli import compress as command
from collab_compress_cli.pretrained import SHORT_NAMES
from huggingface_hub import ModelCard
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModel, BertForSequenceClassification, T5Config, T5Model

from collab_compress import Compression, PartReport, Report, compress, read_factors
from collab_compress.analysis import Plan, Row
from collab_compress.errors import CollabCompressError

COLOURS = r"\x1b\[[0-9;]*m"
pytestmark = pytest.mark.usefixtures("few_texts")


def test_converts_a_classifier_and_says_how_to_load_it(succeeds, loaded, model_dir, tmp_path):
    output = tmp_path / "out"
    report_file = tmp_path / "report.json"
    printed = succeeds(model_dir, "--dk", 8, "--output", output, "--json", report_file)
    for part in ("bert.encoder.layer.*.attention.self:\n", "import collab_compress"):
        assert part in printed
    assert "Output error" not in printed
    assert "Embed" not in printed
    lines = printed.splitlines()
    assert lines[0].startswith("Whole model: ")
    assert lines[1].startswith("Time at ")
    assert "of the dense model's" in lines[1]
    assert "Wherever it is loaded: pip install . in a checkout of collab-compress." in lines
    model = loaded(printed)
    assert type(model) is BertForSequenceClassification
    assert len(read_factors(model)) == 2
    assert (output / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()
    stored = json.loads(report_file.read_text(encoding="utf-8"))
    assert stored == json.loads((output / "collab_compress.json").read_text(encoding="utf-8"))
    assert stored["compression"]["dk"] == 8
    assert len(stored["report"]["parts"]) == 2
    agreement = stored["report"]["agreement"]
    words = f"{agreement['finding'][:-1]} (calibrated on "
    assert lines[2].startswith(words)
    assert lines[2].endswith(f"). {agreement['meaning']}")
    assert agreement["kind"] == "classes"
    assert f"| {agreement['finding']} |" in (output / "README.md").read_text(encoding="utf-8")


def test_the_index_of_embeddings_can_stay_at_a_share_of_neighbours(succeeds, model_dir, tmp_path):
    model = BertForSequenceClassification.from_pretrained(model_dir)
    model.bert.save_pretrained(model_dir)
    printed = succeeds(model_dir, "--dk", 8, "--sequences", 64, "--output", tmp_path / "out")
    assert "Embeddings have changed" not in printed
    shares = r"texts (\d+%) of the ten nearest among \d+ texts stay; (\d+%) where only queries are converted"
    rebuilt, kept = re.search(shares, printed).groups()
    assert f"index can stay for queries of this model ({kept}), or be rebuilt ({rebuilt}): docs/guides/" in printed


def test_nothing_is_said_of_an_index_where_no_neighbours_were_compared(succeeds, model_dir, tmp_path):
    model = BertForSequenceClassification.from_pretrained(model_dir)
    model.bert.save_pretrained(model_dir)
    options = ("--dk", 8, "--calibration", "synthetic", "--sequences", 64)
    printed = succeeds(model_dir, *options, "--output", tmp_path / "out")
    assert "Output error: its last_hidden_state move by" in printed
    assert "Embeddings have changed: score searches before you keep an index of the dense model." in printed


def test_a_terminal_of_80_columns_shows_each_module_in_one_line(monkeypatch):
    """The numbers are those of BERT-large."""
    costs = {"parameters_before": 2_099_200, "parameters_after": 1_181_184}
    costs |= {"macs_before": 285_212_672, "macs_after": 153_092_096}
    errors = {"weight_error": 0.1234, "data_error": 0.0123, "seconds": 1.0, "vectors": (4096, 4096)}
    solved = {"part": "dk", "width": 512, "head_dim": 64, "sweeps": 3, "converged": True}
    names = [f"encoder.layer.{number}.attention.self" for number in range(24)]
    modules = tuple(PartReport(name, **costs, **errors, **solved) for name in names)
    whole = {"parameters_before": 335_141_888, "parameters_after": 313_109_504, "output_error": None}
    report = Report(modules, length=128, seconds=1, threads=1, **whole)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(Console, "_environ", os.environ)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = command._report_lines(report, "builtin", None, embeds=True)
    lines = lines[lines.index("Queries and keys of encoder.layer.*.attention.self:") + 1 :]
    rows = [re.sub(COLOURS, "", line).split() for line in lines]
    assert len(rows) == 3 + 24  # below a header of two lines and a rule
    assert [row[0] for row in rows[3:]] == [str(number) for number in range(24)]


def test_values_too_and_what_that_saves(succeeds, loaded, model_dir, tmp_path):
    options = ("--dk", 12, "--dv", 12, "--sequences", 64)
    printed = succeeds(model_dir, *options, "--output", tmp_path / "out")
    assert "dv output error weight error" in " ".join(printed.split())
    assert "Value/output parameters 2,352 → 1,176 (-50%)." in printed
    assert "Attention parameters" in printed
    model = loaded(printed)
    assert model.bert.encoder.layer[0].attention.self.ov.config.dv == 12


def test_a_share_to_keep_is_reported_as_widths(succeeds, loaded, model_dir, tmp_path):
    output = tmp_path / "out"
    printed = succeeds(model_dir, "--keep", 0.6, "--length", 8, "--sequences", 32, "--output", output)
    assert printed.startswith("Whole model: ")
    assert "\nKept " in printed
    stored = json.loads((output / "collab_compress.json").read_text(encoding="utf-8"))["compression"]
    widths = {name: stored[name] for name in ("dk", "dv", "dff") if stored[name] is not None}
    assert ", ".join(f"{name} {width}" for name, width in widths.items()) + "." in printed
    assert "operations at 8 tokens" in printed
    assert loaded(printed).num_parameters() < 0.999 * AutoModel.from_pretrained(model_dir).num_parameters()


def test_a_stock_model_needs_no_package(succeeds, model_dir, tmp_path, fails, stock_python):
    assert "the head width of a stock BertForSequenceClassification" in fails(
        model_dir, "--dk", 12, "--dv", 12, "--stock", "--output", tmp_path / "out"
    )
    for widths in (("--dk", 12), ("--dk", 12, "--dff", 16), ("--dv", 12, "--dff", 16), ("--keep", 0.6)):
        message = fails(model_dir, *widths, "--stock", "--output", tmp_path / "out")
        assert "--stock takes --dff N or --layers N, or --dk N and --dv N together, and neither --keep" in message
    options = ("--dff", 16, "--stock", "--sequences", 64)
    succeeds(model_dir, *options, "--output", tmp_path / "blocks")
    code = "from transformers import AutoModel; AutoModel.from_pretrained(sys.argv[1])"
    done = stock_python(code, tmp_path / "blocks")
    assert done.returncode == 0, done.stderr


def test_fewer_layers_make_a_model_that_needs_no_package(succeeds, model_dir, tmp_path, stock_python):
    output = tmp_path / "shallow"
    printed = succeeds(model_dir, "--layers", 1, "--dff", 16, "--stock", "--output", output)
    removed = json.loads((output / "collab_compress.json").read_text(encoding="utf-8"))["report"]["removed_layers"]
    assert len(removed) == 1
    assert f"Without {removed[0]}; " in printed
    card = (output / "README.md").read_text("utf-8")
    assert f"Layers of the source that were removed: {removed[0]} (" in card
    assert all("Adapters (LoRA) of the " in text for text in (printed, card))
    code = "from transformers import AutoModel; assert len(AutoModel.from_pretrained(sys.argv[1]).encoder.layer) == 1"
    done = stock_python(code, output)
    assert done.returncode == 0, done.stderr


def test_the_amount_of_calibration_data_is_an_option_and_reported(succeeds, model_dir, tmp_path, caplog):
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"text number {n} of a user\n" for n in range(30)), encoding="utf-8")
    options = ("--dk", 8, "--calibration", texts, "--sequences", 24, "--length", 6, "--seed", 2)
    printed = succeeds(model_dir, *options, "--modules", "*layer.0*", "--output", tmp_path / "out")
    rows = printed.partition("attention.self:\n")[2].partition("\n\n")[0].splitlines()
    assert [row.split()[0] for row in rows] == ["layer", "0"]
    vectors = int(re.search(r"Calibrated on 21 sequences; each module saw at least (\d+) vectors\.", printed)[1])
    assert "calibration uses 24 of 30 texts, drawn at random" in caplog.messages
    assert "24 of 24 texts are longer than 6 tokens and are read in passages of that length" in caplog.messages
    stored = json.loads((tmp_path / "out" / "collab_compress.json").read_text(encoding="utf-8"))
    assert stored["calibration_options"] == {"sequences": 24, "length": 6}
    assert len(stored["report"]["warnings"]) == 2
    assert [module["vectors"] for module in stored["report"]["parts"]] == [[vectors, vectors]]


def test_several_sources_of_calibration_data(succeeds, model_dir, tmp_path):
    (tmp_path / "docs.txt").write_text("".join(f"text number {n}\n" for n in range(30)), encoding="utf-8")
    options = ("--dk", 8, "--calibration", tmp_path / "docs.txt", "synthetic", "--sequences", 16)
    printed = succeeds(model_dir, *options, "--output", tmp_path / "out")
    assert "Calibrated on 28 sequences" in printed
    assert "held-back rows; " in printed
    assert " on average (calibrated on texts (docs.txt) and random tokens). " in printed
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "calibrated on texts (docs.txt) and random tokens" in card
    stored = json.loads((tmp_path / "out" / "collab_compress.json").read_text(encoding="utf-8"))
    assert stored["calibration"] == [str(tmp_path / "docs.txt"), "synthetic"]


def test_same_as_the_python_api(succeeds, model_dir, tmp_path):
    BertForSequenceClassification.from_pretrained(model_dir).bfloat16().save_pretrained(model_dir)
    options = ("--dk", 13, "--head-dim", 5, "--calibration", "none")
    succeeds(model_dir, *options, "--output", tmp_path / "out")
    model = BertForSequenceClassification.from_pretrained(model_dir, dtype="auto")
    compress(model, Compression(dk=13, head_dim=5), calibration=None)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(saved[name], tensor)
        assert tensor.dtype == torch.bfloat16 or name.endswith(".qk.channels")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dk", "8", "--length", "0"], "length is 0; expected at least 1"),
        (
            ["--head-dim", "4"],
            "--head-dim 4 is a width of queries and keys, which without widths are chosen",
        ),
        (["--dk", "25"], "pass dk between 1 and 24"),
        (["--dk", "8", "--calibration", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--dk", "8", "--modules", "nothing"], "matches 'nothing'"),
        (["--dk", "8", "--device", "abacus"], "device 'abacus' cannot be used"),
        (["--dff", "8", "--calibration", "none"], "dff takes calibration data"),
        (["--dff", "8", "--refit", "False"], "leave out refit"),
        (["--mix", "--sweeps", "9"], "--sweeps belongs to a conversion; pass --dk, --dv, --dff or --layers too"),
        (["--layers", "2"], "layers is 2, and the deepest stack of BertForSequenceClassification has 2"),
    ],
)
def test_bad_arguments(fails, model_dir, tmp_path, arguments, message):
    assert message in fails(model_dir, "--output", tmp_path / "out", *arguments)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["./nowhere"], "is not a directory"),
        (["~nouser/x"], "~nouser/x is not a directory"),
        (["tiny/config.json"], "tiny/config.json is not a directory"),
        (["x" * 300], "is neither a directory nor a model on the hub"),
        ([""], ". has no config.json"),
        (["tiny", "--output", "tiny"], "tiny exists; choose another output"),
        (["tiny", "--output", "out", "--json", "out/report.json"], "lies in --output"),
        (["tiny", "--output", "tiny/out"], "which is read"),
        (["tiny", "--json", "tiny/out"], "which is read"),
    ],
)
def test_places_that_cannot_be_read_or_written(words, message, fails, model_dir):
    before = sorted(os.listdir(model_dir))
    assert message in fails(*words, "--dk", 8)
    assert sorted(os.listdir(model_dir)) == before


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantized (gptq)"),
        ({"architectures": ["ClassOfSomeoneElse"]}, "is not run"),
        ({"architectures": ["pipeline"]}, "needs the class pipeline, which is no model"),
        ({"architectures": ["T5Model"]}, "names T5Model, which takes a T5Config, but describes a bert"),
        ({"architectures": [3]}, "architectures is [3]; expected names of classes"),
        ({"model_type": "roberta"}, "which takes a BertConfig, but describes a roberta"),
        ({"model_type": "odd"}, "odd"),
        ({"attn_implementation": "magic"}, "attn_implementation is 'magic'"),
        ({"hidden_act": "magic"}, "magic"),
        ({"hidden_size": 48}, "has shape"),
        ({"num_hidden_layers": 3}, "lacks weights"),
        ({"id2label": ["a"]}, "a setting has a value of the wrong kind"),
    ],
)
def test_configs_that_do_not_fit_are_refused(fails, model_dir, entries, message):
    change_json(model_dir / "config.json", **entries)
    assert message in fails(model_dir, "--dk", 8)


QUERY = "bert.encoder.layer.0.attention.self.query.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (QUERY, torch.full((24, 24), float("nan")), f"{QUERY} holds NaN or infinite values"),
        (QUERY, torch.ones(24, 24, dtype=torch.int8), f"{QUERY} is quantized (I8)"),
        ("classifier.bias", None, "lacks weights"),
    ],
)
def test_unusable_weights_are_refused(fails, model_dir, name, tensor, message):
    change_weights(model_dir, **{name: tensor})
    assert message in fails(model_dir, "--dk", 8)


@pytest.mark.parametrize(
    ("name", "message"), [("config.json", "tiny/config.json: "), ("model.safetensors", "cannot load weights from ")]
)
def test_damaged_files_are_refused(fails, model_dir, name, message):
    (model_dir / name).write_bytes(b"[" * 100_000)
    assert message in fails(model_dir, "--dk", 8)


def test_an_already_converted_model(succeeds, fails, model_dir, tmp_path):
    succeeds(model_dir, "--dk", 8, "--calibration", "none", "--output", tmp_path / "out")
    assert "already converted" in fails(tmp_path / "out", "--dk", 4)


def test_an_unreachable_hub(fails, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    line = fails("bert-base", "--dk", 8)
    assert "the hub cannot be reached" in line
    assert SHORT_NAMES["bert-base"] in line
    assert "minilm" in line


def test_sentence_transformers_files_travel_along(succeeds, tmp_path, minilm_path):
    shown = succeeds("minilm", "--mix", "--output", tmp_path / "out")
    assert "from sentence_transformers import SentenceTransformer" in shown
    assert f'model = SentenceTransformer("{tmp_path / "out"}")' in shown
    assert 'model = SentenceTransformer("out")' in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (minilm_path / name).read_bytes()
    assert AutoModel.from_pretrained(tmp_path / "out").config.model_type == "bert"
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert data.library_name == "sentence-transformers"


def test_a_model_without_tokenizer_needs_no_calibration(fails, make_tiny, tmp_path):
    make_tiny("bert").save_pretrained(tmp_path / "tiny")
    assert "calibration 'none'" in fails(tmp_path / "tiny", "--dk", 8)


def test_a_config_that_names_no_class_is_loaded_bare(succeeds, model_dir, tmp_path):
    change_json(model_dir / "config.json", architectures=None)
    printed = succeeds(model_dir, "--dk", 8, "--sequences", 32, "--output", tmp_path / "out")
    assert "BertModel.from_pretrained" in printed
    assert "of the ten nearest among " in printed
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "calibrated on the texts that come with collab_compress)" in card


def test_the_card_is_a_new_one(succeeds, model_dir):
    (model_dir / "README.md").write_text("# Theirs\n", encoding="utf-8")
    succeeds(model_dir, "--dk", 8, "--output", model_dir.parent / "out")
    card = ModelCard.load("out/README.md")
    assert card.data.library_name == "transformers"
    for part in ("# out", "made from `tiny`", "on the texts that come with collab_compress and random tokens"):
        assert part in card.content
    assert str(model_dir.parent) not in card.content


@pytest.mark.parametrize("words", [("--dk", "abc"), ("--dk", 8, "--colour", 3), ()])
def test_arguments_that_cannot_be_read(run, model_dir, words):
    code, printed, error = run(*([model_dir, *words] if words else []))
    assert (code, printed) == (2, "")
    assert "collab-compress --help" in error


def test_a_plan_is_printed_and_nothing_is_converted(succeeds, model_dir):
    printed = succeeds("tiny", "--plan", "--length", 8, "--sequences", 32, "--json", "plan.json")
    base, header, first, *_ = printed.splitlines()
    assert base.endswith("are those of the whole model.")
    assert header.split()[:3] == ["part", "width", "parameters"]
    assert first.split()[0] == "dk"
    rows = json.loads(Path("plan.json").read_text(encoding="utf-8"))["rows"]
    assert {row["part"] for row in rows} == {"dk", "dv", "dff"}
    assert sorted(os.listdir()) == ["plan.json", "tiny"]


@pytest.mark.parametrize("options", [["--dk", 8], ["--push-to-hub", "a/b"], ["--modules", "*0*"], ["--sweeps", 3]])
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
    assert printed.splitlines()[1].split()[:3] == ["part", "width", "parameters"]


def test_a_stock_model_with_narrower_heads(succeeds, model_dir, tmp_path):
    """Heads of queries and keys get the width of the values' if none is given."""
    torch.manual_seed(0)
    sizes = {"d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 3, "decoder_start_token_id": 0}
    T5Model(T5Config(vocab_size=30522, **sizes)).save_pretrained(tmp_path / "t5")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "t5" / name).write_bytes((model_dir / name).read_bytes())
    options = ("--dk", 12, "--dv", 12, "--stock", "--calibration", "none", "--output", tmp_path / "out")
    succeeds(tmp_path / "t5", *options)
    assert AutoModel.from_pretrained(tmp_path / "out").config.d_kv == 4
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("full", ["output", "json"])
def test_a_full_disk_is_reported_for_the_file_on_it(full, run, model_dir, tmp_path, monkeypatch):
    write = Path.write_text

    def write_text(path, *args, **options):
        if tmp_path / full in path.parents:
            raise OSError(28, "No space left on device", str(path))
        return write(path, *args, **options)

    monkeypatch.setattr(Path, "write_text", write_text)
    places = {"output": tmp_path / "output" / "model", "json": tmp_path / "json" / "report.json"}
    options = [word for name, place in places.items() for word in (f"--{name}", place)]
    code, _, error = run(model_dir, "--dk", 8, "--calibration", "none", *options)
    assert code == 2
    assert f"cannot write {places[full]}: No space left on device" in error
    assert not any(place.exists() for place in places.values())
