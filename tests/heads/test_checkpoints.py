"""Models whose heads are mixed or removed, saved and loaded by stock means, with the package and without."""

import copy
import json
import pickle

import pytest
import torch
from forms import outputs, randomise_
from transformers import AutoModel

from collab_compress import (
    Compression,
    alphas_of,
    compress,
    expand,
    merge_alphas_,
    mix_heads_,
    prune_heads_,
    read_factors,
)
from collab_compress.architectures import find_attention
from collab_compress.checkpoint import EditConfig, edits_of
from collab_compress.heads.alphas import AlphasEdit
from collab_compress.heads.pruning import PrunedEdit

MIXED = ["mixed", "mixed, converted", "converted, mixed", "narrow, mixed"]
PRUNED = ["pruned", "pruned, pruned", "converted, pruned", "pruned, converted", "converted, pruned, expanded"]
LONGEST = "pruned, converted, pruned, mixed"
HISTORIES = [*MIXED, *PRUNED, LONGEST]


def edited(model, history, dk=5):
    """Put a model through a history of edits."""
    names = [site.name for site in find_attention(model)]
    for step in history.split(", "):
        if step == "pruned":
            last = {name: [site.heads - 1] for name, site in zip(names, find_attention(model), strict=True)}
            prune_heads_(model, last | {names[0]: [0]})
        elif step == "mixed":
            mix_heads_(model)
            randomise_(model)
        elif step == "expanded":
            expand(model)
        else:
            compress(model, Compression(dv=6) if step == "narrow" else Compression(dk=dk), calibration=None)
    return model


@pytest.mark.parametrize(
    ("family", "history"),
    [
        *(("bert", history) for history in HISTORIES),
        *((family, LONGEST) for family in ("albert", "distilbert", "marian")),
    ],
)
def test_comes_back_as_it_was(family, history, make_tiny, batch, tmp_path, load_cleanly):
    model = edited(make_tiny(family), history)
    model.save_pretrained(tmp_path / "one")
    loaded = load_cleanly(AutoModel, tmp_path / "one")
    assert torch.equal(outputs(loaded, batch), outputs(model, batch))
    heads, loaded_heads = ([site.heads for site in find_attention(network)] for network in (model, loaded))
    assert heads == loaded_heads
    assert all(alphas.requires_grad for alphas in alphas_of(loaded).values())
    copied = copy.deepcopy(model)
    for folder, same in (("two", loaded), ("three", copied)):
        same.save_pretrained(tmp_path / folder)
        for name in ("config.json", "model.safetensors"):
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / folder / name).read_bytes()
    for same in (copied, pickle.loads(pickle.dumps(model))):
        assert torch.equal(outputs(same, batch), outputs(model, batch))


@pytest.mark.parametrize(
    ("family", "history"), [("bert", "pruned"), ("albert", "converted, pruned"), ("marian", "converted, pruned")]
)
def test_a_loaded_model_goes_on(family, history, make_tiny, batch, tmp_path):
    model = edited(make_tiny(family), history, dk=24)
    model.save_pretrained(tmp_path / "one")
    loaded = AutoModel.from_pretrained(tmp_path / "one")
    name = find_attention(model)[0].name
    for one in (model, loaded):
        prune_heads_(one, {name: [0]})
        expand(one) if read_factors(one) else compress(one, Compression(dk=8), calibration=None)
    assert torch.equal(outputs(loaded, batch), outputs(model, batch))
    loaded.save_pretrained(tmp_path / "two")
    assert torch.equal(outputs(AutoModel.from_pretrained(tmp_path / "two"), batch), outputs(model, batch))


@pytest.mark.parametrize(
    ("family", "history", "dtype"),
    [
        ("bert", "mixed", torch.float16),
        ("bert", "pruned", torch.bfloat16),
        *((family, LONGEST, torch.bfloat16) for family in ("albert", "marian")),
    ],
)
def test_half_precision_shards_and_device_map(family, history, dtype, make_tiny, batch, tmp_path, load_cleanly):
    model = edited(make_tiny(family).to(dtype), history)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = load_cleanly(AutoModel, tmp_path, dtype="auto", device_map="cpu")
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert torch.equal(outputs(loaded, batch), outputs(model, batch))


def test_offloaded_weights_are_fetched(make_tiny, batch):
    """Hooks that load weights are on the modules that hold them, the inner projection included."""
    from accelerate import cpu_offload

    model = edited(make_tiny("bert"), "mixed")
    before = outputs(model, batch)
    cpu_offload(model, torch.device("cpu"))
    assert model.encoder.layer[0].attention.output.dense.proj.weight.is_meta
    assert torch.equal(outputs(model, batch), before)


def test_a_merged_model_is_a_stock_one(make_tiny, batch, tmp_path, stock_reload):
    model = edited(make_tiny("albert"), "mixed")
    before = outputs(model, batch)
    merge_alphas_(model)
    model.save_pretrained(tmp_path)
    torch.save(batch, tmp_path / "batch.pt")
    assert "collab" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    done = stock_reload(tmp_path, tmp_path / "again")
    assert done.returncode == 0, done.stderr
    reloaded = torch.load(tmp_path / "again" / "output.pt", weights_only=True)
    torch.testing.assert_close(reloaded, before, atol=1e-5, rtol=1e-5)


def test_the_stored_form(make_tiny, tmp_path):
    model = edited(make_tiny("bert"), "pruned")
    mix_heads_(model)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    pruned, mixed = stored["edits"]
    assert pruned["kind"] == "pruned"
    assert pruned["modules"]["encoder.layer.1.attention.self"] == {
        "kept": [0, 1],
        "before": 3,
        "head_width": 8,
        "value_width": 8,
        "heads": "num_attention_heads",
        "query": "query",
        "key": "key",
        "value": "value",
        "output": "..output.dense",
    }
    paths = [f"encoder.layer.{layer}.attention.output.dense" for layer in (0, 1)]
    assert mixed == {"kind": "alphas", "modules": dict.fromkeys(paths, 2)}
    assert EditConfig(stored["edits"]).to_dict() == stored
    assert AlphasEdit.from_dict(mixed).to_dict() == {"modules": mixed["modules"]}


def test_applying_again_changes_nothing(make_tiny):
    model = edited(make_tiny("bert"), "pruned, pruned, mixed")
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    edits = edits_of(model)
    assert [type(edit) for edit in edits] == [PrunedEdit, PrunedEdit, AlphasEdit]
    for edit in edits:
        edit.apply_(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
