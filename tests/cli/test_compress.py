"""The command, as a person types it."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from collab_compress_cli import compress as command
from collab_compress_cli.pretrained import SHORT_NAMES
from huggingface_hub import ModelCard
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertForSequenceClassification, T5Config, T5Model

from collab_compress import Compression, PartReport, Report, compress, read_factors
from collab_compress.analysis import Plan, Row
from collab_compress.errors import CollabCompressError

COLOURS = r"\x1b\[[0-9;]*m"
pytestmark = pytest.mark.usefixtures("few_texts")


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


def test_the_index_of_embeddings_can_stay_at_a_share_of_neighbours(run, model_dir, tmp_path):
    model = BertForSequenceClassification.from_pretrained(model_dir)
    model.bert.save_pretrained(model_dir)
    code, printed, error = run(model_dir, "--dk", 8, "--sequences", 64, "--output", tmp_path / "out")
    assert code == 0, error
    assert "Embeddings have changed" not in printed
    shares = r"Of the ten nearest of \d+ calibration texts, (\d+%) stay; (\d+%) where only queries are converted"
    rebuilt, kept = re.search(shares, printed).groups()
    assert f"index can stay for queries of this model ({kept}), or be rebuilt ({rebuilt}): docs/guides/" in printed


def test_embeddings_are_to_be_made_anew_where_no_neighbours_were_compared(run, model_dir, tmp_path):
    model = BertForSequenceClassification.from_pretrained(model_dir)
    model.bert.save_pretrained(model_dir)
    options = ("--dk", 8, "--calibration", "synthetic", "--sequences", 64)
    code, printed, error = run(model_dir, *options, "--output", tmp_path / "out")
    assert code == 0, error
    assert "Output error: its last_hidden_state move by" in printed
    assert "Embeddings have changed: embed documents anew." in printed


def test_a_terminal_of_80_columns_shows_each_module_in_one_line(monkeypatch):
    """The numbers are those of BERT-large."""
    costs = {"parameters_before": 2_099_200, "parameters_after": 1_181_184}
    costs |= {"macs_before": 285_212_672, "macs_after": 153_092_096}
    errors = {"weight_error": 0.1234, "data_error": 0.0123, "seconds": 1.0, "vectors": (4096, 4096)}
    solved = {"part": "dk", "width": 512, "head_dim": 64, "sweeps": 3, "converged": True}
    names = [f"encoder.layer.{number}.attention.self" for number in range(24)]
    modules = tuple(PartReport(name, **costs, **errors, **solved) for name in names)
    report = Report(
        modules,
        parameters_before=335_141_888,
        parameters_after=313_109_504,
        length=128,
        output_error=None,
        seconds=1,
        threads=1,
    )
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(Console, "_environ", os.environ)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = command._report_lines(report, "builtin", None, embeds=True)
    rows = [
        re.sub(COLOURS, "", line).split()
        for line in lines[lines.index("Queries and keys of encoder.layer.*.attention.self:") + 1 :]
    ]
    assert len(rows) == 3 + 24  # below a header of two lines and a rule
    assert [row[0] for row in rows[3:]] == [str(number) for number in range(24)]


def test_values_too_and_what_that_saves(run, loaded, model_dir, tmp_path):
    options = ("--dk", 12, "--dv", 12, "--sequences", 64)
    code, printed, error = run(model_dir, *options, "--output", tmp_path / "out")
    assert code == 0, error
    assert "dv output error weight error" in " ".join(printed.split())
    assert "Value/output parameters 2,352 → 1,176 (-50%)." in printed
    assert "Attention parameters" in printed
    model = loaded(printed)
    assert model.bert.encoder.layer[0].attention.self.ov.config.dv == 12


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
    options = ("--dff", 16, "--stock", "--sequences", 64)
    assert run(model_dir, *options, "--output", tmp_path / "blocks")[0] == 0
    done = stock_python(
        "from transformers import AutoModel; AutoModel.from_pretrained(sys.argv[1])", tmp_path / "blocks"
    )
    assert done.returncode == 0, done.stderr


def test_fewer_layers_make_a_model_that_needs_no_package(run, model_dir, tmp_path, stock_python):
    output = tmp_path / "shallow"
    code, printed, error = run(model_dir, "--layers", 1, "--dff", 16, "--stock", "--output", output)
    assert code == 0, error
    removed = json.loads((output / "collab_compress.json").read_text(encoding="utf-8"))["report"]["removed_layers"]
    assert len(removed) == 1
    assert f"Without {removed[0]}; " in printed
    card = (output / "README.md").read_text("utf-8")
    assert f"Layers of the source that were removed: {removed[0]} (" in card
    assert all("Adapters (LoRA) of the " in text for text in (printed, card))
    code = "from transformers import AutoModel; assert len(AutoModel.from_pretrained(sys.argv[1]).encoder.layer) == 1"
    done = stock_python(code, output)
    assert done.returncode == 0, done.stderr


def test_the_amount_of_calibration_data_is_an_option_and_reported(run, model_dir, tmp_path, caplog):
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"text number {n} of a user\n" for n in range(30)), encoding="utf-8")
    options = ("--dk", 8, "--calibration", texts, "--sequences", 24, "--length", 6, "--seed", 2)
    code, printed, error = run(model_dir, *options, "--modules", "*layer.0*", "--output", tmp_path / "out")
    assert code == 0, error
    rows = printed.partition("attention.self:\n")[2].partition("\n\n")[0].splitlines()
    assert [row.split()[0] for row in rows] == ["layer", "0"]
    vectors = int(re.search(r"Calibrated on 21 sequences; each module saw at least (\d+) vectors\.", printed)[1])
    assert "calibration uses 24 of 30 texts, drawn at random" in caplog.messages
    assert "24 of 24 texts are longer than 6 tokens and are read in passages of that length" in caplog.messages
    stored = json.loads((tmp_path / "out" / "collab_compress.json").read_text(encoding="utf-8"))
    assert stored["calibration_options"] == {"sequences": 24, "length": 6}
    assert len(stored["report"]["warnings"]) == 3
    assert [module["vectors"] for module in stored["report"]["parts"]] == [[vectors, vectors]]


def test_several_sources_of_calibration_data(run, model_dir, tmp_path):
    (tmp_path / "docs.txt").write_text("".join(f"text number {n}\n" for n in range(30)), encoding="utf-8")
    options = ("--dk", 8, "--calibration", tmp_path / "docs.txt", "synthetic", "--sequences", 16)
    code, printed, error = run(model_dir, *options, "--output", tmp_path / "out")
    assert code == 0, error
    assert "Calibrated on 28 sequences" in printed
    assert "held-back rows; " in printed
    assert " on average (calibrated on texts (docs.txt) and random tokens). " in printed
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "calibrated on texts (docs.txt) and random tokens" in card
    stored = json.loads((tmp_path / "out" / "collab_compress.json").read_text(encoding="utf-8"))
    assert stored["calibration"] == [str(tmp_path / "docs.txt"), "synthetic"]


def test_same_as_the_python_api(run, model_dir, tmp_path):
    BertForSequenceClassification.from_pretrained(model_dir).bfloat16().save_pretrained(model_dir)
    options = ("--dk", 13, "--head-dim", 5, "--calibration", "none")
    code, *_ = run(model_dir, *options, "--output", tmp_path / "out")
    assert code == 0
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
    line = fails(model_dir, "--output", tmp_path / "out", *arguments)
    assert message in line


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
    ("name", "message"),
    [
        ("./nowhere", "is not a directory"),
        ("~nouser/x", "~nouser/x is not a directory"),
        ("tiny/config.json", "tiny/config.json is not a directory"),
        ("x" * 300, "is neither a directory nor a model on the hub"),
        ("", ". has no config.json"),
    ],
)
def test_names_that_cannot_be_a_model(name, message, fails, model_dir, monkeypatch):
    monkeypatch.chdir(model_dir.parent)
    assert message in fails(name, "--dk", 8)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (truncated, "cannot load weights"),
        (
            changed_weights(lambda tensors: tensors[QUERY].fill_(float("nan"))),
            f"{QUERY} holds NaN or infinite values",
        ),
        (changed_weights(lambda tensors: tensors.pop("classifier.bias")), "lacks weights"),
        (
            changed_weights(lambda tensors: tensors.update({QUERY: tensors[QUERY].to(torch.int8)})),
            f"{QUERY} is quantized (I8)",
        ),
        (changed_config(quantization_config={"quant_method": "gptq", "bits": 4}), "is quantized (gptq)"),
        (changed_config(architectures=["ClassOfSomeoneElse"]), "is not run"),
        (changed_config(architectures=["pipeline"]), "needs the class pipeline, which is no model"),
        (changed_config(architectures=["T5Model"]), "names T5Model, which takes a T5Config, but describes a bert"),
        (changed_config(architectures=[3]), "architectures"),
        (changed_config(model_type="roberta"), "which takes a BertConfig, but describes a roberta"),
        (changed_config(model_type="odd"), "odd"),
        (changed_config(model_type=["bert"]), "config.json"),
        (changed_config(attn_implementation="magic"), "attn_implementation is 'magic'"),
        (changed_config(dtype="float99"), "float99"),
        (changed_config(hidden_act="magic"), "magic"),
        (changed_config(hidden_size="x"), "hidden_size"),
        (changed_config(hidden_size=48), "has shape"),
        (changed_config(num_attention_heads=7), "7"),
        (changed_config(num_hidden_layers=3), "lacks weights"),
        (changed_config(id2label=["a"]), "a setting has a value of the wrong kind"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json"),
    ],
)
def test_damaged_models_are_refused(fails, model_dir, spoil, message):
    spoil(model_dir)
    assert message in fails(model_dir, "--dk", 8)


def test_an_already_converted_model(run, fails, model_dir, tmp_path):
    assert run(model_dir, "--dk", 8, "--calibration", "none", "--output", tmp_path / "out")[0] == 0
    assert "already converted" in fails(tmp_path / "out", "--dk", 4)


def test_an_unreachable_hub(fails, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    line = fails("bert-base", "--dk", 8)
    assert "the hub cannot be reached" in line
    assert SHORT_NAMES["bert-base"] in line
    assert "minilm" in line


def test_sentence_transformers_files_travel_along(run, tmp_path, minilm_path):
    code, shown, _ = run("minilm", "--mix", "--output", tmp_path / "out")
    assert code == 0
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


def test_a_config_that_names_no_class_is_loaded_bare(run, model_dir, tmp_path):
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    del config["architectures"]
    (model_dir / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, printed, _ = run(model_dir, "--dk", 8, "--sequences", 32, "--output", tmp_path / "out")
    assert code == 0
    assert "BertModel.from_pretrained" in printed
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "calibrated on the texts that come with collab_compress)" in card


def test_a_card_and_the_licence_travel_along(run, model_dir, tmp_path):
    (model_dir / "README.md").write_text("# Theirs\n", encoding="utf-8")
    (model_dir / "LICENSE").write_text("do as you like", encoding="utf-8")
    (model_dir / "customers.csv").write_text("secret", encoding="utf-8")
    code, _, error = run(model_dir, "--dk", 8, "--output", tmp_path / "out")
    assert code == 0, error
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.library_name == "transformers"
    for part in (
        "# out",
        "made from `tiny`",
        "R = 8",
        "calibrated on the texts that come with collab_compress and random tokens",
        'from_pretrained("out")',
    ):
        assert part in card.content
    assert str(tmp_path) not in card.content
    assert (tmp_path / "out" / "LICENSE").read_text(encoding="utf-8") == "do as you like"
    assert not (tmp_path / "out" / "customers.csv").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--output", "tiny"), "tiny exists; choose another output"),
        (("--json", "link"), "link exists; choose another output"),
        (("--json", "/dev/null"), "/dev/null exists; choose another output"),
        (("--output", "out", "--json", "out/report.json"), "lies in --output"),
        (("--output", "tiny/out"), "which is read"),
        (("--json", "tiny/out"), "which is read"),
    ],
)
def test_nothing_is_replaced_or_written_into_the_model(options, message, fails, model_dir, monkeypatch):
    monkeypatch.chdir(model_dir.parent)
    Path("link").symlink_to("tiny/config.json")
    before = sorted(os.listdir(model_dir))
    assert message in fails("tiny", "--dk", 8, *options)
    assert sorted(os.listdir(model_dir)) == before


@pytest.mark.parametrize("words", [("--dk", "abc"), ("--dk", 8, "--colour", 3), ()])
def test_arguments_that_cannot_be_read(run, model_dir, words):
    code, printed, error = run(*((model_dir, *words) if words else ("--dk", 8)))
    assert (code, printed) == (2, "")
    assert "collab-compress --help" in error


def test_the_model_is_on_the_requested_device(run, monkeypatch, model_dir, tmp_path):
    moved = []
    monkeypatch.setattr(BertForSequenceClassification, "to", lambda self, device: moved.append(device))
    options = ("--calibration", "none", "--device", "cpu")
    code, _, error = run(model_dir, "--dk", 8, *options, "--output", tmp_path / "out")
    assert code == 0, error
    assert moved == ["cpu"]


def test_a_plan_is_printed_and_nothing_is_converted(run, model_dir, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    options = ("--length", 8, "--sequences", 32)
    code, printed, error = run(model_dir, "--plan", *options, "--json", "plan.json")
    assert code == 0, error
    base, header, first, *_ = printed.splitlines()
    assert base.endswith("are those of the whole model.")
    assert header.split()[:3] == ["part", "width", "parameters"]
    assert first.split()[0] == "dk"
    rows = json.loads((empty / "plan.json").read_text(encoding="utf-8"))["rows"]
    assert {row["part"] for row in rows} == {"dk", "dv", "dff"}
    assert [path.name for path in empty.iterdir()] == ["plan.json"]


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


def test_a_stock_model_with_narrower_heads(run, model_dir, tmp_path):
    """Heads of queries and keys get the width of the values' if none is given."""
    torch.manual_seed(0)
    sizes = {"d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 3, "decoder_start_token_id": 0}
    T5Model(T5Config(vocab_size=30522, **sizes)).save_pretrained(tmp_path / "t5")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "t5" / name).write_bytes((model_dir / name).read_bytes())
    options = ("--dk", 12, "--dv", 12, "--stock", "--calibration", "none", "--output", tmp_path / "out")
    code, _, error = run(tmp_path / "t5", *options)
    assert code == 0, error
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
