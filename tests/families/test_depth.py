"""Fewer layers in every family: a stock model that reloads to the same outputs, or a refusal of one line."""

import copy

import pytest
import tiny_families
import torch
from tiny_families import KEEPING, ROTARY, TINIES, build, inputs, make_rotary, numbered_layers, run, tokens
from torch import nn

from collab_compress import Compression, Solver, UnsupportedModelError, compress, expand
from collab_compress.architectures import find_attention
from collab_compress.conversion.depth import COUNTS
from collab_compress.conversion.inventory import Inventory, find_feed_forward

REFUSED = {
    "albert": "calls one layer 4 times",
    "dpt": "reads some of them by number",
    "esm": "contact_head",  # reads the attention of all layers
    "yolos": "no YolosModel has the 2 layers",  # position embeddings for each
}
EXACT = ["bart", "bert", "distilbert", "gpt2", "llama", "modernbert", "t5", "vit"]


def deeper(settings):
    """Return the settings of a config with four layers in each stack."""
    changed = {name: deeper(value) if isinstance(value, dict) else value for name, value in settings.items()}
    changed |= {name: 4 for name in COUNTS if name in settings}
    return changed | {name: 2 * settings[name] for name in ("layer_types", "no_rope_layers") if name in settings}


@pytest.fixture
def make_deep(monkeypatch):
    """Return what builds a tiny model of a family with four layers in each stack."""

    def make(name, class_name=""):
        if name not in TINIES:
            return make_rotary(name)
        monkeypatch.setattr(TINIES[name], "settings", deeper(TINIES[name].settings))
        return build(name, class_name)

    for name in ("ROTARY_SIZES", "LAYER_KINDS"):
        monkeypatch.setattr(tiny_families, name, deeper(getattr(tiny_families, name)))
    return make


def read_by(name, seed=0):
    return inputs(name, seed) if name in TINIES else tokens(torch.Generator().manual_seed(seed))


def assert_reloads(model, batch, folder):
    model.save_pretrained(folder)
    assert "quantization_config" not in (folder / "config.json").read_text()
    loaded, problems = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(problems.values())
    assert {name: part.shape for name, part in loaded.named_parameters()} == {
        name: part.shape for name, part in model.named_parameters()
    }
    assert torch.equal(run(loaded.eval(), batch), run(model, batch))


@pytest.mark.structures
def test_a_shallower_model_is_a_stock_model(kin, make_deep, tmp_path):
    model, data = make_deep(kin), [read_by(kin, seed) for seed in range(2)]
    if kin in REFUSED or kin == "segformer":  # numbered are its stages
        return
    stacks = {name.rpartition(".")[0] for name in numbered_layers(model, data[0])}
    before = model.num_parameters()
    report = compress(model, Compression(layers=2, solver=Solver(refit=False)), data)
    assert len(report.removed_layers) == 2 * len(stacks)
    assert len(numbered_layers(model, data[0])) == 2 * len(stacks)
    assert report.parameters_after == model.num_parameters() < before
    assert_reloads(model, data[0], tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_must_stay_are_refused(name, make_deep):
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        compress(make_deep(name), Compression(layers=2), [read_by(name, seed) for seed in range(2)])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*ROTARY, *KEEPING} - {"esm", "smollm3"}))
def test_a_shallower_rotary_model_is_a_stock_model(name, make_deep, tmp_path):
    model, data = make_deep(name), [read_by(name, seed) for seed in range(2)]
    compress(model, Compression(layers=2), data)
    assert_reloads(model, data[0], tmp_path)


def silence_(model, number, batch):
    """Make a layer of each stack compute nothing: it writes 0, and norms behind that change nothing either."""
    layers = [f"{path}.{number}" for path in {name.rpartition(".")[0] for name in numbered_layers(model, batch)}]
    with torch.no_grad():
        for linear in Inventory(model, batch).residual_linears:
            if linear.layer in layers:
                for parameter in model.get_submodule(linear.name).parameters():
                    parameter.zero_()
        for layer in layers:
            path = layer.rpartition(".")[0]
            for module in (
                *model.get_submodule(layer).modules(),
                *model.get_submodule(f"{path}.{number - 1}").modules(),
            ):
                if isinstance(module, nn.LayerNorm) and module.bias is not None:
                    module.weight.fill_(1)
                    module.bias.zero_()
    return sorted(layers)


@pytest.mark.parametrize(
    ("name", "all_neurons"), [*((name, False) for name in EXACT), *((name, True) for name in ("bart", "gpt2"))]
)
def test_a_layer_that_computes_nothing_is_removed_without_a_change(name, all_neurons, make_deep):
    model, data = make_deep(name), [read_by(name, seed) for seed in range(4)]
    silent = silence_(model, 2, data[0])
    expected = run(model, data[0])
    dff = find_feed_forward(model, data[0])[0].width if all_neurons else None
    report = compress(model, Compression(layers=3, dff=dff), data)
    assert sorted(report.removed_layers) == silent
    torch.testing.assert_close(run(model, data[0]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_widths_are_those_of_the_layers_that_stay(name, make_deep, tmp_path):
    model, data = make_deep(name), [read_by(name, seed) for seed in range(4)]
    original = copy.deepcopy(model)
    stacks = len({layer.rpartition(".")[0] for layer in numbered_layers(model, data[0])})
    report = compress(model, Compression(layers=2, dk=12, dv=12, dff=16, solver=Solver(sweeps=3)), data)
    assert (
        len(report.of("dk"))
        == len(report.of("dv"))
        == len(find_attention(model))
        == len(find_attention(original)) / 2
    )
    assert len(report.of("dff")) == 2 * stacks
    for part in (*report.of("dk"), *report.of("dv"), *report.of("dff"), *report.refits):
        model.get_submodule(part.name)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(run(loaded, data[0]), run(model, data[0]))
    expected = run(model, data[0])
    expand(model)
    torch.testing.assert_close(run(model, data[0]), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["bart", "gpt2", "llama", "t5"])
def test_a_shallower_model_generates_with_its_cache(name, make_deep):
    class_name = TINIES[name].generates
    model = make_deep(name, class_name)
    data = [read_by(name, seed) for seed in range(2)]
    compress(model, Compression(layers=2), data)
    attention = find_attention(model)
    assert [getattr(site.module, "layer_idx", None) for site in attention if site.kind != "cross"] in (
        [0, 1],
        [None, None, 0, 1],
        [0, 1, 0, 1],
    )
    prompt = {key: data[0][key][:1] for key in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    cached = model.generate(**prompt, **options)
    assert torch.equal(model.generate(**prompt, **options, use_cache=False), cached)
