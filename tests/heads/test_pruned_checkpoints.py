"""Models without some of their heads, saved and loaded by stock means, with the package and without."""

import ast
import copy
import json
import pickle
from collections import Counter

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from collab_compress import Compression, compress, expand, make_standalone_, mix_heads_, prune_heads_, read_factors
from collab_compress.architectures import FAMILIES, find_attention
from collab_compress.checkpoint import EditConfig, edits_of
from collab_compress.checkpoint.standalone import modelling_code
from collab_compress.heads.pruning import PrunedEdit

HISTORIES = ["pruned", "pruned twice", "converted, pruned", "pruned, converted", "converted, pruned, expanded", "all"]


def live(model, history, dk=5):
    """Put a model through a history of edits."""
    names = [site.name for site in find_attention(model, FAMILIES)]
    whole = {"all": "pruned, converted, pruned, mixed", "pruned twice": "pruned, pruned"}
    for step in whole.get(history, history).split(", "):
        if step == "pruned":
            last = {name: [site.heads - 1] for name, site in zip(names, find_attention(model, FAMILIES), strict=True)}
            prune_heads_(model, last | {names[0]: [0]})
        elif step == "converted":
            compress(model, Compression(dk=dk), calibration=None)
        elif step == "expanded":
            expand(model)
        else:
            mix_heads_(model)
    return model


def outputs(model, batch):
    with torch.no_grad():
        return model(**batch)[0]


@pytest.mark.parametrize("history", HISTORIES)
def test_comes_back_as_it_was(family, history, make_tiny, batch, tmp_path, load_cleanly):
    model = live(make_tiny(family), history)
    model.save_pretrained(tmp_path / "one")
    loaded = load_cleanly(AutoModel, tmp_path / "one")
    assert torch.equal(outputs(loaded, batch), outputs(model, batch))
    assert [site.heads for site in find_attention(loaded, FAMILIES)] == [
        site.heads for site in find_attention(model, FAMILIES)
    ]
    loaded.save_pretrained(tmp_path / "two")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(outputs(other, batch), outputs(model, batch))


@pytest.mark.parametrize("history", ["pruned", "converted, pruned"])
def test_every_auto_class(family, auto_class, history, make_tiny, batch, tmp_path, load_cleanly, capfd):
    torch.manual_seed(0)
    model = live(auto_class.from_config(make_tiny(family).config).eval(), history)
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(load_cleanly(auto_class, tmp_path), batch), outputs(model, batch))
    assert "collab" not in capfd.readouterr().err.lower()


def test_body_and_head_exchange_checkpoints(make_tiny, batch, tmp_path):
    torch.manual_seed(0)
    classifier = live(AutoModelForSequenceClassification.from_config(make_tiny("bert").config).eval(), "pruned twice")
    classifier.save_pretrained(tmp_path / "classifier")
    body = AutoModel.from_pretrained(tmp_path / "classifier")
    assert torch.equal(outputs(body, batch), outputs(classifier.bert, batch))
    body.save_pretrained(tmp_path / "body")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "body")
    assert torch.equal(outputs(again.bert.eval(), batch), outputs(body, batch))


@pytest.mark.parametrize("history", ["pruned", "converted, pruned"])
def test_a_loaded_model_goes_on(family, history, make_tiny, batch, tmp_path):
    """It is pruned again, converted or expanded, saved and loaded as one that was never saved."""
    model = live(make_tiny(family), history, dk=24)
    model.save_pretrained(tmp_path / "one")
    loaded = AutoModel.from_pretrained(tmp_path / "one")
    name = find_attention(model, FAMILIES)[0].name
    for one in (model, loaded):
        prune_heads_(one, {name: [0]})
        expand(one) if read_factors(one) else compress(one, Compression(dk=8), calibration=None)
    assert torch.equal(outputs(loaded, batch), outputs(model, batch))
    loaded.save_pretrained(tmp_path / "two")
    assert torch.equal(outputs(AutoModel.from_pretrained(tmp_path / "two"), batch), outputs(model, batch))


@pytest.mark.parametrize("history", ["pruned", "converted, pruned"])
def test_half_precision_shards_and_device_map(family, history, make_tiny, batch, tmp_path, load_cleanly):
    model = live(make_tiny(family).to(torch.bfloat16), history)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = load_cleanly(AutoModel, tmp_path, dtype="auto", device_map="cpu")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(outputs(loaded, batch), outputs(model, batch))


def test_size_on_disk_is_that_of_what_is_left(family, make_tiny, tmp_path):
    model = make_tiny(family)
    model.save_pretrained(tmp_path / "whole")
    live(model, "pruned").save_pretrained(tmp_path / "pruned")
    whole, pruned = ((tmp_path / kind / "model.safetensors").stat().st_size for kind in ("whole", "pruned"))
    assert pruned < whole


def test_the_stored_form(make_tiny, tmp_path):
    live(make_tiny("bert"), "pruned").save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert [edit["kind"] for edit in stored["edits"]] == ["pruned"]
    assert stored["edits"][0]["modules"]["encoder.layer.1.attention.self"] == {
        "kept": [0, 1], "before": 3, "head_width": 8, "value_width": 8, "heads": "num_attention_heads",
        "query": "query", "key": "key", "value": "value", "output": "..output.dense",
    }  # fmt: skip
    assert EditConfig(stored["edits"]).to_dict() == stored


def test_applying_again_changes_nothing(family, make_tiny):
    model = live(make_tiny(family), "pruned twice")
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    assert edits_of(model)
    for edit in edits_of(model):
        assert isinstance(edit, PrunedEdit)
        edit.apply_(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before


@pytest.mark.parametrize("history", ["pruned", "converted, pruned"])
def test_without_the_package_loading_fails_and_never_gives_random_weights(
    family, history, make_tiny, tmp_path, stock_reload
):
    live(make_tiny(family), history).save_pretrained(tmp_path)
    done = stock_reload(tmp_path, tmp_path / "two", trust=False)
    assert "LOADED" not in done.stdout
    assert done.returncode != 0
    assert "pip-install-collab-compress-0.1.0-and-import-collab_compress" in done.stderr


@pytest.mark.parametrize(
    ("family", "history"), [("bert", "pruned"), ("albert", "all"), ("distilbert", "all"), ("marian", "all")]
)
def test_loads_and_saves_without_the_package_where_the_code_is_shipped(
    family, history, make_tiny, batch, tmp_path, stock_reload
):
    model = live(make_tiny(family), history)
    make_standalone_(model)
    model.save_pretrained(tmp_path / "one")
    torch.save(batch, tmp_path / "one" / "batch.pt")
    done = stock_reload(tmp_path / "one", tmp_path / "two", trust=True)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "two" / "output.pt", weights_only=True)  # perhaps by another number of threads
    torch.testing.assert_close(found, outputs(model, batch), atol=1e-5, rtol=1e-5)


def test_no_name_of_the_shipped_code_is_defined_twice():
    """The parts are joined into one file, where a later definition would replace an earlier one."""
    defined = ast.FunctionDef | ast.ClassDef
    names = Counter(node.name for node in ast.parse(modelling_code()).body if isinstance(node, defined))
    assert [name for name, count in names.items() if count > 1] == []
