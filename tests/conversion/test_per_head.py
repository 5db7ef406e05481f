"""Models whose heads share no channels: the same contracts as the shared form keeps."""

import copy
import json
import math
import pickle

import pytest
import torch
from forms import hidden
from transformers import AutoConfig, AutoModel, BertForSequenceClassification, BertLMHeadModel

from collab_compress import (
    Compression,
    CompressionError,
    HeadMask,
    Solver,
    compress,
    expand,
    make_standalone_,
    prune_heads_,
    read_factors,
)
from collab_compress.architectures import find_attention
from collab_compress.checkpoint import EditConfig
from collab_compress.heads import masks_without
from collab_compress.heads.swap import swap_heads_

FULL = 24
FIRST = "encoder.layer.0.attention.self"
EACH_IMPLEMENTATION = [
    ("bert", "eager"),
    ("bert", "sdpa"),
    ("albert", "eager"),
    ("distilbert", "sdpa"),
    ("marian", "eager"),
]


def converted(model, dk, calibration=None):
    return model, compress(model, Compression(dk=dk, form="per-head", solver=Solver(refit=False)), calibration)


@pytest.mark.parametrize(("family", "implementation"), EACH_IMPLEMENTATION)
def test_full_rank_equals_dense(family, implementation, make_tiny, batch, calibration):
    dense = make_tiny(family)
    dense.set_attn_implementation(implementation)
    model, report = converted(copy.deepcopy(dense), FULL, calibration)
    torch.testing.assert_close(hidden(model, batch), hidden(dense, batch), atol=2e-5, rtol=1e-4)
    assert all(module.sizes == (8, 8, 8) for module in report.modules)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dk", [2, 5, 13])
def test_low_rank_follows_the_formula_at_the_models_own_scale(dk, implementation, make_tiny, calibration):
    """score_i(x, y) = [(x W̃q_i) · (y W̃k_i) + v_i · y] / √d, one position pair at a time."""
    model, report = converted(make_tiny("bert"), dk, calibration)
    model.double().set_attn_implementation(implementation)
    module, f = model.get_submodule(FIRST), read_factors(model)[FIRST]
    sizes = report.modules[0].sizes
    x = torch.randn(6, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = module.value(x).view(6, 3, 8)
    heads = []
    for head in range(3):
        channels = slice(sum(sizes[:head]), sum(sizes[: head + 1]))
        scores = torch.empty(6, 6, dtype=torch.float64)
        for a, xa in enumerate(x):
            for b, yb in enumerate(x):
                scores[a, b] = (xa @ f.query[:, channels]) @ (yb @ f.key[:, channels]) + f.content_bias[head] @ yb
        heads.append((scores / math.sqrt(8)).softmax(-1) @ values[:, head])
    torch.testing.assert_close(module(x[None])[0][0], torch.cat(heads, -1))


def test_report(family, make_tiny, calibration):
    dense = make_tiny(family)
    before = dense.num_parameters()
    model, report = converted(dense, 8, calibration)
    assert (report.parameters_before, report.parameters_after) == (before, model.num_parameters())
    saved = sum(module.parameters_before - module.parameters_after for module in report.modules)
    assert before - report.parameters_after == saved
    for module in report.modules:
        assert sum(module.sizes) == module.dk == 8
        assert module.macs_after < module.macs_before
        assert module.break_even_length == math.inf
    assert json.loads(json.dumps(report.to_dict()))["modules"][0]["sizes"] == list(report.modules[0].sizes)


def test_shared_channels_have_the_smaller_error(make_tiny, calibration):
    apart = converted(make_tiny("bert"), 8, calibration)[1].modules[0]
    shared = compress(make_tiny("bert"), Compression(dk=8), calibration).modules[0]
    assert shared.sizes is None
    assert shared.data_error <= apart.data_error


@pytest.mark.parametrize("dk", [5, FULL])
def test_comes_back_as_it_was(family, dk, make_tiny, batch, tmp_path, load_cleanly, capfd):
    model, report = converted(make_tiny(family), dk)
    model.save_pretrained(tmp_path / "one")
    stored = AutoConfig.from_pretrained(tmp_path / "one").quantization_config
    assert stored["version"] == 2
    assert EditConfig(stored["edits"]).to_dict() == stored
    (edit,) = stored["edits"]
    assert edit["kind"] == "per-head"
    assert {name: spec["sizes"] for name, spec in edit["modules"].items()} == {
        module.name: list(module.sizes) for module in report.modules
    }
    loaded = load_cleanly(AutoModel, tmp_path / "one")
    assert "collab" not in capfd.readouterr().err.lower()
    assert torch.equal(hidden(loaded, batch), hidden(model, batch))
    assert read_factors(loaded).keys() == read_factors(model).keys()
    assert all(torch.equal(f.mixing, read_factors(model)[name].mixing) for name, f in read_factors(loaded).items())
    loaded.save_pretrained(tmp_path / "two")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(hidden(other, batch), hidden(model, batch))


def test_loads_without_the_package(make_tiny, batch, tmp_path, stock_reload):
    model, _ = converted(make_tiny("bert"), 5)
    make_standalone_(model)
    model.save_pretrained(tmp_path / "one")
    torch.save(batch, tmp_path / "one" / "batch.pt")
    with torch.no_grad():
        expected = model(**batch)[0]
    done = stock_reload(tmp_path / "one", tmp_path / "two", True)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "two" / "output.pt", weights_only=True), expected)


def test_under_a_head_and_in_half_precision(make_tiny, batch, tmp_path, load_cleanly):
    model, _ = converted(make_tiny("bert", BertForSequenceClassification).to(torch.bfloat16), 5)
    model.save_pretrained(tmp_path)
    loaded = load_cleanly(BertForSequenceClassification, tmp_path, dtype="auto")
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    body = AutoModel.from_pretrained(tmp_path, dtype="auto")
    assert torch.equal(hidden(body, batch), hidden(model.bert, batch))


@pytest.mark.parametrize(
    ("family", "dk"), [*(("bert", dk) for dk in (2, 5, 13, FULL)), ("albert", 5), ("distilbert", 5), ("marian", 5)]
)
def test_expands_exactly(family, dk, make_tiny, batch, calibration):
    """A head has no more channels than the dense one, so dense heads can always hold it."""
    model, _ = converted(make_tiny(family), dk, calibration)
    expected = hidden(model, batch)
    assert expand(model).exact
    assert read_factors(model) == {}
    assert model.config.to_dict() == make_tiny(family).config.to_dict()
    torch.testing.assert_close(hidden(model, batch), expected, atol=5e-5, rtol=1e-3)


def test_training_reaches_all_but_the_mixing_matrix(family, make_tiny, batch):
    model, _ = converted(make_tiny(family), 8)
    model.train()
    model(**batch).last_hidden_state.square().sum().backward()
    for name in read_factors(model):
        parameters = dict(model.get_submodule(name).named_parameters())
        assert "mixing" not in parameters
        reached = [name for name in parameters if name.endswith("proj.weight")]
        assert len(reached) >= 2
        assert all(parameters[name].grad.abs().sum() > 0 for name in reached)


def test_compiles_without_graph_breaks(make_tiny, batch):
    model, _ = converted(make_tiny("bert"), 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(hidden(compiled, batch), hidden(model, batch), atol=1e-5, rtol=1e-4)


def test_a_cache_holds_no_more_than_in_the_shared_form(make_tiny):
    config = make_tiny("bert").config
    config.is_decoder = True
    torch.manual_seed(0)
    dense = BertLMHeadModel(config).eval()
    prompt = torch.tensor([[7, 8, 9]])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    model, _ = converted(copy.deepcopy(dense), FULL)
    assert torch.equal(model.generate(prompt, **options), dense.generate(prompt, **options))
    model, _ = converted(copy.deepcopy(dense), 12)
    with torch.no_grad():
        cache = model(prompt, use_cache=True).past_key_values
    assert cache.layers[0].keys.shape == (1, 2, 3, 8)  # R + H = 15 numbers a token, rounded up to 16, of 24


@pytest.mark.parametrize(("family", "implementation"), EACH_IMPLEMENTATION)
def test_pruning_equals_masking(family, implementation, make_tiny, batch, calibration, tmp_path, load_cleanly):
    model, _ = converted(make_tiny(family), 10, calibration)
    model.set_attn_implementation(implementation)
    gone = {site.name: {place % 3} for place, site in enumerate(find_attention(model))}
    with HeadMask(model, masks_without(model, gone)):
        expected = hidden(model, batch)
    prune_heads_(model, gone)
    torch.testing.assert_close(hidden(model, batch), expected, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = load_cleanly(AutoModel, tmp_path, attn_implementation=implementation)
    assert torch.equal(hidden(loaded, batch), hidden(model, batch))
    assert expand(model).exact
    torch.testing.assert_close(hidden(model, batch), expected, atol=5e-5, rtol=1e-3)


def test_a_head_without_channels_can_stay_alone(make_tiny, batch):
    model = make_tiny("bert")
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.query.weight[8:16] = 0.0
    model, report = converted(model, 3)
    assert all(module.sizes[1] == 0 for module in report.modules)
    gone = {name: {0, 2} for name in read_factors(model)}
    with HeadMask(model, masks_without(model, gone)):
        expected = hidden(model, batch)
    prune_heads_(model, gone)
    torch.testing.assert_close(hidden(model, batch), expected, atol=1e-5, rtol=1e-5)


def test_heads_of_one_size_swap(make_tiny, batch):
    model, _ = converted(make_tiny("bert"), FULL)
    expected = hidden(model, batch)
    swap_heads_(model, [((FIRST, 0), (FIRST, 2))])
    changed = hidden(model, batch)
    assert not torch.allclose(changed, expected)
    output = model.encoder.layer[0].attention.output.dense.weight
    with torch.no_grad():
        output.copy_(torch.cat([output[:, 16:], output[:, 8:16], output[:, :8]], 1))
    torch.testing.assert_close(hidden(model, batch), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{"method": "parafac"}, {"sweeps": 5}, {"tolerance": 1e-3}])
def test_solver_options_are_refused_for_a_closed_form(options):
    with pytest.raises(CompressionError, match="solved in closed form; leave out solver, sweeps, tolerance"):
        Compression(dk=8, form="per-head", solver=Solver(**options))


def test_an_unknown_form_is_refused():
    with pytest.raises(CompressionError, match="unknown form 'square'; expected one of shared, per-head"):
        Compression(dk=8, form="square")


def test_converting_twice_is_refused(make_tiny):
    model, _ = converted(make_tiny("bert"), 8)
    with pytest.raises(CompressionError, match="already converted"):
        compress(model, Compression(dk=8), calibration=None)


def test_heads_that_lose_most_of_their_energy_are_named(make_tiny, calibration):
    model = make_tiny("bert")
    report = compress(model, Compression(dk=3, form="per-head", equal_heads=True), calibration)
    for module in report.modules:
        energy = torch.tensor(module.head_energy)
        assert bool(((energy > 0) & (energy < 1)).all())
    assert any("heads keep less than 50% of the energy of their scores; head" in line for line in report.warnings)
    wide = compress(make_tiny("bert"), Compression(dk=21, form="per-head", equal_heads=True), calibration)
    assert min(min(module.head_energy) for module in wide.modules) > 0.5
    assert not any("energy of their scores" in line for line in wide.warnings)


def test_only_equal_heads_are_to_be_left_out(make_tiny, calibration):
    for equal in (False, True):
        report = compress(make_tiny("bert"), Compression(dk=3, form="per-head", equal_heads=equal), calibration)
        assert any("energy of their scores" in line for line in report.warnings)
        assert any("leave out equal heads" in line for line in report.warnings) == equal


def test_equal_heads_without_a_refit_are_warned_of(make_tiny, calibration):
    def warned(data, dk=12, **options):
        compression = Compression(dk=dk, form="per-head", solver=Solver(refit=options.pop("refit", None)), **options)
        return any(
            "heads are equally wide" in line for line in compress(make_tiny("bert"), compression, data).warnings
        )

    assert warned(None, equal_heads=True)
    assert warned(calibration, equal_heads=True, refit=False)
    assert not warned(calibration, equal_heads=True)
    assert not warned(None)
    assert not warned(None, dk=24, equal_heads=True)  # exact
