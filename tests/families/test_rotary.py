"""Shared rotary heads: what they compute, by a formula of its own, grouped queries too; caches; refusals."""

import copy

import pytest
import torch
from tiny_families import ROTARY, WAYS, generated, make_rotary
from tiny_families import ROTARY_SIZES as SIZES
from transformers import EsmConfig, EsmModel, GemmaConfig, GemmaModel, LlamaForCausalLM

from collab_compress import Compression, FromScratch, Solver, compress, expand, from_config
from collab_compress.analysis import part_costs
from collab_compress.analysis.sharing import score_factors
from collab_compress.architectures import find_dense_attention
from collab_compress.attention import rotary
from collab_compress.attention.projections import family_of, input_paths
from collab_compress.attention.run import add_head_hook_
from collab_compress.conversion import to_stock
from collab_compress.errors import CompressionError, UnsupportedModelError
from collab_compress.transformers_parts import CACHE_NAME

DISTINCT = ["cohere", "ernie4_5", "esm", "glm4", "gpt_neox", "granite", "helium", "jina_embeddings_v3", "llama"]
DISTINCT += ["mixtral", "modernbert", "nemotron", "nomic_bert", "phi", "phimoe", "qwen2", "smollm3"]


@pytest.fixture
def model():
    """Return what makes a model by name, such as "llama" or "llama-grouped"."""

    def make(name):
        made = make_rotary(name.removesuffix("-grouped"), grouped=name.endswith("-grouped"))
        with torch.no_grad():
            for path, parameter in made.named_parameters():
                if path.endswith((".key.weight", "k_proj.weight")):  # frequencies differ in what they are worth
                    parameter.view(-1, 8, 32)[:, [0, 4]] *= 3
        return made

    return make


def batch(seed=0, length=9):
    ids = torch.randint(5, 61, (3, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, 7:], mask[2, 5:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def run(model, batch):
    with torch.no_grad():
        return model(**batch)[0][batch["attention_mask"].bool()]


def channel_pairs(form):
    """Return the channel pairs that are rotated together, followed by those without rotation."""
    width, rotated = form.head_width, form.rotated
    if form.pairs != "halves":
        return [(j, j + 1) for j in range(0, width, 2)]
    half, rest = rotated // 2, (width - rotated) // 2
    return [(j, j + half) for j in range(half)] + [(rotated + j, rotated + rest + j) for j in range(rest)]


class Slow:
    """Recomputes head outputs pair by pair: explicit rotations by the distance of two tokens.

    Which keys a query sees is taken from the model's probabilities; how strongly it sees them is not. Frequencies are
    the angles by which the model rotates the second token.
    """

    needs_probs = True

    def __init__(self, model, tolerance):
        self.checked, self.read, self.tables, self.tolerance = 0, {}, {}, tolerance
        self.real = batch()["attention_mask"].bool()
        self.scaled_before = model.config.model_type == "esm"
        for module in model.modules():
            if hasattr(module, "qk"):
                add_head_hook_(module, self)
                key = module.get_submodule(family_of(module).key)
                key.register_forward_pre_hook(lambda _, args, at=module: self.read.__setitem__(at, args[0]))
                module.register_forward_pre_hook(self.tables_of, with_kwargs=True)

    def tables_of(self, module, args, kwargs):
        self.tables[module] = kwargs["position_embeddings"]

    def frequency(self, module, frequency):
        form = module.qk.config
        if frequency >= form.rotated // 2:
            return 0.0
        at = 2 * frequency if form.pairs == "neighbours, tables too" else frequency
        cos, sin = (table[0, :, at].double() for table in self.tables[module])
        return float(torch.atan2(sin[1], cos[1]) - torch.atan2(sin[0], cos[0]))

    def __call__(self, outputs, call):
        module, form, x = call.module, call.module.qk.config, self.read[call.module]
        queries, keys = (module.get_submodule(path).proj(x) for path in input_paths(module)[:2])
        d, length, pairs = form.head_width, x.shape[1], channel_pairs(form)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        group = form.heads // form.key_heads
        scale = getattr(module, "scaling", d**-0.5) * (d**-0.5 if self.scaled_before else 1)
        for head in range(form.heads):
            scores = torch.zeros(len(x), length, length, dtype=x.dtype)
            for place, frequency in enumerate(form.frequencies):
                one, two = (place // (d // 2) * d + channel for channel in pairs[place % (d // 2)])
                k = torch.complex(keys[..., one], keys[..., two])
                one, two = (head * d + channel for channel in pairs[frequency])
                q = torch.complex(queries[..., one], queries[..., two])
                row = module.qk.mixing[head // group]
                q = q * torch.complex(row[place], row[place + len(form.frequencies)])
                angle = (distance * self.frequency(module, frequency)).to(x)
                rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1)
                rotated = (
                    rotation.unflatten(-1, (2, 2)) @ torch.view_as_real(q)[:, :, None, :, None]
                )  # (B, T, S, 2, 1)
                scores += (rotated[..., 0] * torch.view_as_real(k)[:, None]).sum(-1)
            scores = (scale * scores).masked_fill(call.probs[:, head] == 0, -torch.inf)
            expected = scores.softmax(-1) @ call.value[:, head // (form.heads // call.value.shape[1])]
            torch.testing.assert_close(
                outputs[:, :, head][self.real], expected[self.real], atol=self.tolerance, rtol=10 * self.tolerance
            )
        self.checked += 1
        return outputs


@pytest.mark.parametrize(
    ("name", "dk"),
    [
        *(("esm", dk) for dk in (8, 24)),
        *(("llama", dk) for dk in (16, 24)),
        *((name, 8) for name in ("llama-grouped", "mistral-grouped", "phi")),
        ("phi-grouped", 8),
    ],
)
def test_fewer_heads_follow_the_formula_and_expand(name, dk, model):
    converted = model(name)
    compression = Compression(dk=dk, dv=9, solver=Solver(sweeps=20, refit=False))
    report = compress(converted, compression, [batch(seed) for seed in range(3)])
    assert all(module.width == dk and 0 < module.data_error < 1 for module in report.of("dk"))
    expanded = copy.deepcopy(converted)
    before = run(expanded, batch())
    expand(expanded)  # mixed keys are dense keys
    torch.testing.assert_close(run(expanded, batch()), before, atol=5e-5, rtol=1e-3)
    slow = Slow(converted.double(), 3e-5)
    with torch.no_grad():
        converted(**batch())
    assert slow.checked == 2
    frequencies = [module.qk.config.frequencies for module in converted.modules() if hasattr(module, "qk")]
    assert all(len(pairs) == dk // 2 for pairs in frequencies)
    assert dk > 8 or any(pairs != (0, 1, 2, 3) for pairs in frequencies)  # some places hold another frequency


@pytest.mark.parametrize("name", ["llama", "mistral-grouped", "phi-grouped"])
def test_generation(name, model):
    dense = model(name)
    converted, narrow = copy.deepcopy(dense), copy.deepcopy(dense)
    compress(converted, Compression(dk=8 * dense.config.num_key_value_heads), calibration=None)
    for way, options in WAYS.items():
        assert torch.equal(generated(converted, batch(), **options), generated(dense, batch(), **options)), way
    static = {"cache_implementation": "static", "disable_compile": True, "do_sample": False}
    assert torch.equal(generated(converted, batch(), **static), generated(dense, batch(), do_sample=False))
    for widths in (Compression(dk=8, solver=Solver(sweeps=3)), Compression(dv=8)):
        compress(narrow, widths, calibration=None)
        expected = generated(narrow, batch(), do_sample=False)
        assert torch.equal(generated(narrow, batch(), do_sample=False, use_cache=False), expected)
        assert torch.equal(generated(narrow, batch(), **static), expected)


@pytest.mark.parametrize("name", ["llama", "mistral-grouped"])
def test_key_caches_hold_the_shared_heads(name, model):
    converted = model(name)
    compress(converted, Compression(dk=8, solver=Solver(sweeps=3)), calibration=None)
    with torch.no_grad():
        layers = getattr(converted(batch()["input_ids"], use_cache=True), CACHE_NAME).layers
    assert {layer.keys.shape[1] for layer in layers} == {1}
    assert [cost.cache_after for cost in part_costs(converted) if cost.part == "dk"] == [8 * 4] * 2


def test_widths_are_whole_heads(model):
    converted = model("llama-grouped")
    report = compress(converted, Compression(dk=11, solver=Solver(sweeps=3)), calibration=None)
    assert {module.width for module in report.of("dk")} == {16}
    assert any("dk 11 was rounded up to 16" in warning for warning in report.warnings)
    with pytest.raises(CompressionError, match="dk is 17, but 2 key–value heads × 8 = 16 is exact already"):
        compress(model("llama-grouped"), Compression(dk=17), calibration=None)


@pytest.mark.parametrize(
    ("compression", "message"),
    [
        (Compression(dk=8, head_dim=4), "heads with a rotary embedding keep their width; leave out head_dim"),
        (Compression(dk=8, solver=Solver(method="parafac")), "other solvers do not apply to rotary"),
    ],
)
def test_what_rotary_models_lack_is_refused_at_once(compression, message, model):
    with pytest.raises(CompressionError, match=message):
        compress(model("llama"), compression, calibration=None)
    with pytest.raises(UnsupportedModelError, match="so the scores do not use Wq·Wkᵀ"):
        score_factors(model("llama"))


def test_a_converted_model_needs_angles_and_has_no_stock_form(model):
    converted = model("llama")
    compress(converted, Compression(dk=16, solver=Solver(refit=False)), calibration=[batch()] * 2)
    with pytest.raises(
        CompressionError, match=r"heads of LlamaForCausalLM are rotated .* no narrower ones; .* or expand it"
    ):
        to_stock(converted)
    attention = converted.model.layers[0].self_attn
    if attention.k_proj.rotates:
        with pytest.raises(UnsupportedModelError, match="needs position_embeddings"):
            attention.k_proj(torch.randn(1, 3, 32))


@pytest.mark.parametrize("name", ROTARY)
def test_every_rotary_family_is_exact_at_full_width(name):
    dense = make_rotary(name)
    site = find_dense_attention(dense)[0]
    assert site.key_value_heads == (2 if site.paths.key_value_heads else 4)
    full = copy.deepcopy(dense)
    compress(full, Compression(dk=site.key_value_width, dv=site.key_value_width), calibration=None)
    expected = run(dense, batch())
    for implementation in ("eager", "sdpa"):
        full.set_attn_implementation(implementation)
        torch.testing.assert_close(run(full, batch()), expected, atol=5e-5, rtol=1e-4)
    if dense.can_generate():
        assert torch.equal(generated(full, batch(), do_sample=False), generated(dense, batch(), do_sample=False))
    expand(full)
    torch.testing.assert_close(run(full, batch()), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "name", [name if name in DISTINCT else pytest.param(name, marks=pytest.mark.slow) for name in ROTARY]
)
def test_fewer_channels_are_saved_trained_and_generated_with(name, tmp_path, load_cleanly):
    """As the formula says."""
    low = make_rotary(name)
    narrow = Compression(dk=8, dv=9, solver=Solver(sweeps=5, refit=False))
    compress(low, narrow, calibration=[batch(seed) for seed in range(3)])
    assert all(parameter.is_contiguous() for parameter in low.parameters())
    expected = run(low, batch())
    low.save_pretrained(tmp_path)
    assert torch.equal(run(load_cleanly(type(low), tmp_path), batch()), expected)
    low(**batch())[0].square().sum().backward()
    for module in low.modules():
        if hasattr(module, "qk"):
            projections = [module.get_submodule(path) for path in input_paths(module)[:2]]
            trained = [module.qk.mixing, *(parameter for part in projections for parameter in part.parameters())]
            assert all(parameter.grad.abs().sum() > 0 for parameter in trained)
    if low.can_generate():
        cached, anew = (generated(low, batch(), do_sample=False, use_cache=cache) for cache in (True, False))
        assert torch.equal(cached, anew)
    slow = Slow(low, 2e-4)
    with torch.no_grad():
        low(**batch())
    assert slow.checked == 2


@pytest.mark.parametrize("mixed", [False, True])
def test_untrained_models_start_with_shared_heads(mixed, tmp_path, load_cleanly, caplog):
    config = make_rotary("llama").config
    made = from_config(config, FromScratch(dk=8), LlamaForCausalLM).eval()
    shared = [module for module in made.modules() if hasattr(module, "qk")]
    assert {module.qk.config.kind for module in shared} == {"rotary"}
    for module in shared if mixed else ():
        torch.nn.init.uniform_(module.qk.mixing)
    made.save_pretrained(tmp_path)
    assert torch.equal(run(load_cleanly(LlamaForCausalLM, tmp_path), batch()), run(made, batch()))
    slow = Slow(made.double(), 3e-5)
    with torch.no_grad():
        made(**batch())
    assert slow.checked == 2
    from_config(config, FromScratch(dk=9), LlamaForCausalLM)
    assert "dk 9 was rounded up to 16" in caplog.text
    with pytest.raises(CompressionError, match="dk of rotary heads is at most 16 there; got dk 17"):
        from_config(config, FromScratch(dk=17), LlamaForCausalLM)


def test_esm_without_a_rotary_embedding_is_refused():
    with pytest.raises(UnsupportedModelError, match="EsmModel has no rotary embedding, which the ESM description"):
        compress(EsmModel(EsmConfig(**SIZES)), Compression(dk=8), calibration=None)


def test_gemma_has_a_width_of_its_own():
    torch.manual_seed(0)
    dense = GemmaModel(GemmaConfig(**SIZES, num_key_value_heads=4, head_dim=6)).eval()
    converted = copy.deepcopy(dense)
    compress(converted, Compression(dk=24), calibration=None)
    torch.testing.assert_close(run(converted, batch()), run(dense, batch()), atol=3e-5, rtol=1e-4)


def test_frequencies_are_copied_to_the_device_once(monkeypatch):
    model = make_rotary("llama")
    compress(model, Compression(dk=16), calibration=None)
    ids = torch.tensor([[5, 7, 9, 11]])
    expected = model(ids).logits

    class WithoutTensor:
        def __getattr__(self, name):
            assert name != "tensor", "a tensor was made from a list"
            return getattr(torch, name)

    monkeypatch.setattr(rotary, "torch", WithoutTensor())
    assert torch.equal(model(ids).logits, expected)
    cache = model(ids, use_cache=True)[CACHE_NAME]
    assert torch.isfinite(model(ids[:, :1], **{CACHE_NAME: cache}).logits).all()


def test_frequencies_are_filled_in_where_a_checkpoint_is_loaded(tmp_path):
    model = make_rotary("phi")
    compress(model, Compression(dk=12), calibration=None)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    buffers = {name: value for name, value in model.named_buffers() if name.endswith("slots")}
    assert buffers
    for name, value in buffers.items():
        assert torch.equal(loaded.get_buffer(name), value)
        assert name not in model.state_dict()
