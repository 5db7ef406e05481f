"""The commands that write a model from an edited one: expand, merge, prune."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import change_weights
from collab_compress_cli import start
from collab_compress_cli.arguments import Inputs
from collab_compress_cli.data import load_data
from collab_compress_cli.model import load_source
from collab_compress_cli.pretrained import load_model
from commands import ran
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from collab_compress import Compression, mix_heads_
from collab_compress import compress as convert
from collab_compress.heads.importance import confidence, end_tokens

pytestmark = pytest.mark.usefixtures("few_texts")


@pytest.fixture(scope="module")
def folder(minilm_tokenizer, tmp_path_factory):
    """A tiny classifier with a tokenizer, converted exactly, converted, and mixed."""
    folder = tmp_path_factory.mktemp("models")

    def save(model, name):
        model.save_pretrained(folder / name)
        minilm_tokenizer.save_pretrained(folder / name)

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=30522, max_position_embeddings=64, initializer_range=0.4, **sizes)
    dense = BertForSequenceClassification(config).eval()
    save(dense, "dense")
    for name, dk in (("exact", 24), ("small", 5)):
        model = BertForSequenceClassification.from_pretrained(folder / "dense")
        convert(model, Compression(dk), calibration=None)
        save(model, name)
    model = BertForSequenceClassification.from_pretrained(folder / "dense")
    mix_heads_(model)
    for name, parameter in model.named_parameters():
        if name.endswith("alphas"):
            torch.nn.init.normal_(parameter, std=0.5)
    save(model, "mixed")
    (folder / "texts.txt").write_text("".join(f"text number {n} of a user\n" for n in range(30)), encoding="utf-8")
    return folder


@pytest.fixture
def run(folder, tmp_path, capsys, monkeypatch):
    def run_command(command, *arguments):
        """Run a command in the folder of the models; return exit code, standard output and standard error."""
        monkeypatch.chdir(tmp_path)
        words = [folder / word if (folder / str(word)).exists() else word for word in arguments]
        return ran(getattr(start, command), words, capsys)

    return run_command


def outputs(path):
    ids = torch.arange(20).reshape(2, 10) + 1000
    with torch.no_grad():
        return load_model(path, edited=True)(input_ids=ids).logits


def test_expanding_an_exact_conversion_gives_the_dense_model(run, folder, tmp_path):
    code, printed, error = run("expand", "exact", "--json", "out.json")
    assert (code, error) == (0, "")
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["model"].endswith("exact")
    assert record == json.loads((tmp_path / "exact-dense" / "collab_compress.json").read_text())
    assert "computes the same, up to rounding" in printed
    assert "import collab_compress" not in printed
    torch.testing.assert_close(outputs(tmp_path / "exact-dense"), outputs(folder / "dense"), atol=1e-4, rtol=1e-3)
    config = json.loads((tmp_path / "exact-dense" / "config.json").read_text())
    assert "quantization_config" not in config
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "exact-dense")
    assert "expanded to dense projections" in (tmp_path / "exact-dense" / "README.md").read_text(encoding="utf-8")


def test_merging(run, folder, tmp_path):
    code, printed, error = run("merge", "mixed", "--quiet")
    assert (code, printed, error) == (0, "", "")
    torch.testing.assert_close(outputs(tmp_path / "mixed-merged"), outputs(folder / "mixed"), atol=1e-5, rtol=1e-4)
    assert "quantization_config" not in json.loads((tmp_path / "mixed-merged" / "config.json").read_text())


def test_pruning_named_heads(run, tmp_path):
    name = "bert.encoder.layer.1.attention.self"
    code, printed, error = run("prune", "dense", "--heads", f"{name}=2,0", f"{name}=2")
    assert (code, error) == (0, "")
    assert f"{name}: 0, 2" in printed
    assert "2 attention heads were removed" in printed
    record = json.loads((tmp_path / "dense-pruned" / "collab_compress.json").read_text())
    assert record["pruned_heads"] == {name: [0, 2]}
    assert record["parameters_after"] < record["parameters_before"]
    assert outputs(tmp_path / "dense-pruned").isfinite().all()


def test_pruning_a_share_by_texts(run, folder, tmp_path):
    code, printed, error = run("prune", "small", "--share", "0.3", "--data", "texts.txt", "--output", "out")
    assert (code, error) == (0, "")
    assert "the least important by confidence on sentences of texts.txt" in printed
    record = json.loads((tmp_path / "out" / "collab_compress.json").read_text())
    heads = sum(map(len, record["importance"].values()))
    assert sum(map(len, record["pruned_heads"].values())) == round(0.3 * heads)
    source = load_source("small", folder / "small", edited=True)
    batches = load_data(Inputs(folder / "texts.txt"), source.model, source.tokenizer, 0).batches
    expected = confidence(source.model, batches, exclude=end_tokens(source.model, source.tokenizer))
    assert record["importance"] == {name: pytest.approx(head.tolist(), rel=1e-4) for name, head in expected.items()}


def test_tensors_that_are_ignored_are_named_in_one_line(run, folder, tmp_path):
    shutil.copytree(folder / "dense", tmp_path / "more")
    change_weights(tmp_path / "more", other=torch.ones(1))
    outcome = run("prune", "more", "--heads", "bert.encoder.layer.1.attention.self=0", "--quiet")
    ignored = "more: ignored 1 tensors that BertForSequenceClassification does not use, such as other"
    assert outcome == (0, "", f"collab-prune: {ignored}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["expand", "dense"], "has no converted attention to expand"),
        (["merge", "dense"], "has no alphas to merge"),
        (["prune", "dense"], "say which heads to remove"),
        (["prune", "dense", "--share", 0.3], "--share ranks heads by data"),
        (["prune", "dense", "--share", 1.5, "--data", "texts.txt"], "expected a number above 0 and below 1"),
        (["prune", "dense", "--heads", "layer"], "expected MODULE=H,H"),
        (["expand", "exact", "--revision", "main"], "is a local model without revisions"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(fails, arguments, message):
    error = fails(*arguments)
    assert error.startswith(f"collab-{arguments[0]}: ")
    assert message in error


def test_narrower_feed_forward_blocks_are_a_stock_model(succeeds, fails, tmp_path):
    printed = succeeds("compress", "dense", "--dff", 16, "--calibration", "texts.txt", "--device", "cpu")
    assert "Feed-forward parameters" in printed
    assert "2 feed-forward blocks have 16 neurons each." in printed
    assert re.search(r"Refitted 4 layers .* after the last of them [0-9.]+%\.", printed)
    assert "pip install" not in printed
    output = tmp_path / "dense-dff16"
    config = json.loads((output / "config.json").read_text())
    assert config["intermediate_size"] == 16
    assert "quantization_config" not in config
    assert "feed-forward blocks keep 16 neurons each" in (output / "README.md").read_text(encoding="utf-8")
    assert "no converted attention to expand; removed neurons and refitted" in fails("expand", "dense-dff16")


def test_expanding_says_what_does_not_come_back(succeeds):
    succeeds("compress", "dense", "--dk", 5, "--dff", 16, "--calibration", "texts.txt", "--output", "both")
    printed = succeeds("expand", "both", "--output", "back")
    for text in (printed, Path("back", "README.md").read_text("utf-8")):
        assert "feed-forward blocks with fewer neurons, stay as they are" in text
    Path("both", "collab_compress.json").write_text('{"report": ', encoding="utf-8")  # cut off
    succeeds("expand", "both", "--output", "again")
    fewer = ("--dk", 5, "--layers", 1, "--refit", "False", "--calibration", "texts.txt", "--output", "shallow")
    succeeds("compress", "dense", *fewer)
    assert "removed layers do not come back" in succeeds("expand", "shallow")


def test_random_tokens_alone_are_warned_of(run):
    options = ("--calibration", "synthetic", "--sequences", 32, "--length", 16, "--device", "cpu")
    _, printed, error = run("compress", "dense", "--dff", 16, *options, "--output", "neurons")
    assert error.count("neurons were chosen on random tokens alone") == 1
    assert "Converted on random inputs alone" not in printed
    assert re.search(
        r"Calibrated on 28 sequences; each module saw at least \d+ vectors\.\nConverted in \S+ s on \d+ threads?\.\n",
        printed,
    )
    _, printed, error = run("compress", "dense", "--dk", 5, *options, "--output", "scores")
    assert "Converted on random inputs alone" in printed
    assert error == ""
