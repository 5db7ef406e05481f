"""What every family must keep after conversion, on the tiniest models."""

import copy

import pytest
import torch
from tiny_families import TINIES, attend_by_, build, build_low, inputs, run
from torch import nn
from transformers import AutoModel, GPT2Model

from collab_compress import (
    Compression,
    FromScratch,
    Solver,
    compress,
    expand,
    from_config,
    read_factors,
)
from collab_compress.analysis import part_costs
from collab_compress.architectures import FAMILIES, find_attention, find_dense_attention
from collab_compress.attention.projections import input_paths
from collab_compress.attention.run import add_head_hook_
from collab_compress.attention.shared import scaling_of
from collab_compress.conversion.agreement import measure_output_error
from collab_compress.conversion.refit import refit
from collab_compress.conversion.sequential import install_refits
from collab_compress.errors import UnsupportedModelError
from collab_compress.report import ReportOptions, make_report


def check_kinds(kin, model):
    sites = find_dense_attention(model)
    assert tuple(site.kind for site in sites) == TINIES[kin].kinds
    for site in sites:
        assert (site.heads, site.head_width) == (3, 8)
        terms = 3 if kin == "deberta-v2" else 1
        scaling = 1.0 if kin == "esm" or "d_kv" in TINIES[kin].settings else (8 * terms) ** -0.5
        assert site.scaling == pytest.approx(scaling)
        for path in (site.paths.query, site.paths.key, site.paths.value, site.paths.output):
            assert site.part(path).weight.numel() >= 24 * 24


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_description_that_does_not_fit_says_where(name):
    model = build(name)
    site = find_attention(model)[0]
    path = site.paths.fused or site.paths.key
    delattr(site.module, path)
    with pytest.raises(
        UnsupportedModelError, match=rf"{site.name} \({type(site.module).__name__}\) has no attribute"
    ):
        find_dense_attention(model)


@pytest.mark.every_family
def test_attention_is_found_and_equals_dense_at_full_width(kin):
    """First with scores alone, then with values too; expanded, the model equals the stock one."""
    dense, batch = build(kin), inputs(kin)
    check_kinds(kin, dense)
    converted, expected = copy.deepcopy(dense), {}
    for implementation in ("eager", "sdpa"):
        attend_by_(dense, implementation)
        expected[implementation] = run(dense, batch)
    for compression in (Compression(dk=TINIES[kin].full), Compression(dv=24)):
        compress(converted, compression, calibration=None)
        for implementation, outputs in expected.items():
            attend_by_(converted, implementation)
            torch.testing.assert_close(run(converted, batch), outputs, atol=2e-5, rtol=1e-4)
    expand(converted)
    torch.testing.assert_close(run(converted, batch), expected["sdpa"], atol=5e-5, rtol=1e-4)
    assert {name: tensor.shape for name, tensor in converted.state_dict().items()} == {
        name: tensor.shape for name, tensor in dense.state_dict().items()
    }


class Reconstruction:
    """Recomputes head outputs from the factors, one head at a time, as its form of attention says.

    Which keys a query sees is taken from the model's probabilities; how strongly it sees them is not.
    """

    needs_probs = True

    def __init__(self, model, bias, queries=...):
        self.bias, self.queries, self.checked, self.read = bias, queries, set(), {}
        self.factors = read_factors(model)
        self.names = {module: name for name, module in model.named_modules() if name in self.factors}
        for module in self.names:
            add_head_hook_(module, self)
            for path in input_paths(module)[:2]:
                layer = module.get_submodule(module.rows[path].layer)
                layer.register_forward_pre_hook(self.noted(module, path))

    def noted(self, module, path):
        def note(_, args):
            self.read.setdefault((module, path), args[0])  # relative embeddings come later, if there are any

        return note

    def __call__(self, outputs, call):
        module, f = call.module, self.factors[self.names[call.module]]
        query, key = (self.read.pop((module, path)) for path in input_paths(module)[:2])
        for head in range(len(f.mixing)):
            scores = scaling_of(module) * (query @ ((f.query * f.mixing[head]) @ f.key.T) @ key.mT)  # (B, T, S)
            if f.content_bias is not None:
                scores = scores + scaling_of(module) * (key @ f.content_bias[head])[:, None]
            if self.bias is not None:
                scores = scores + self.bias(module, scores.shape, query)[:, head]
            scores = scores.masked_fill(call.probs[:, head] == 0, -torch.inf)
            expected = scores.softmax(-1) @ call.value[:, head]
            actual = outputs[:, :, head]
            torch.testing.assert_close(actual[self.queries], expected[self.queries], atol=1e-9, rtol=1e-7)
        self.checked.add(self.names[module])
        return outputs


def t5_bias(model, _):
    """Return T5's score bias: the first block's in all self-attention of a stack, none in cross-attention.

    UMT5 has one in each block.
    """
    first, owners = {}, {}
    for name, module in model.named_modules():
        if hasattr(module, "compute_bias") and "EncDec" not in name and "encoder_decoder" not in name:
            stack = name.partition(".")[0]
            if module.has_relative_attention_bias:
                first[stack] = module
            owners[module] = first[stack]
    return lambda module, shape, _: (
        owners[module].compute_bias(*shape[1:]) if module in owners else torch.zeros(1, 3, 1, 1)
    )


def mpnet_bias(model, _):
    """Return MPNet's score bias, one for all layers."""
    return lambda module, shape, _: model.encoder.compute_position_bias(torch.empty(*shape[:2], 1))


def beit_bias(model, _):
    """Return BEiT's score bias, one for each pair of the four patches and the class token."""
    layers = {layer.attention: layer for layer in model.layers}
    return lambda module, *_: layers[module].relative_position_bias((2, 2))


def deberta_bias(model, _):
    """Return DeBERTa's terms with relative embeddings, in which biases of queries and keys take part."""
    embeddings, factors = model.encoder.get_rel_embedding(), read_factors(model)
    names = {module: name for name, module in model.named_modules() if name in factors}

    def bias(module, shape, x):
        f, heads = factors[names[module]], []
        at = model.encoder.get_rel_pos(x)[0] + module.pos_ebd_size
        r = embeddings[at.clamp(0, 2 * module.pos_ebd_size - 1)]  # (T, S, D)
        for mixing, content in zip(f.mixing, f.content_bias, strict=True):
            query = f.query * mixing
            to_position = torch.einsum("btd,tsd->bts", x @ query @ f.key.T, r) + r @ content
            to_content = torch.einsum("tsd,bsd->bts", r @ query @ f.key.T, x) + (x @ content)[:, None]
            heads.append(to_position + to_content + r @ query @ f.key_bias)
        return scaling_of(module) * torch.stack(heads, 1)

    return bias


T5_BIAS = ("t5", "mt5", "umt5", "switch_transformers", "pix2struct_text_model")
BIASES = dict.fromkeys(T5_BIAS, t5_bias) | {"beit": beit_bias, "mpnet": mpnet_bias}
BIASES["deberta-v2"] = deberta_bias


def check_costs(model):
    widths = {"dk": 7, "dv": 9}
    before, planned = model.num_parameters(), part_costs(model, **widths)
    report = compress(model, Compression(**widths, solver=Solver(sweeps=1)), calibration=None)
    parts = [*report.of("dk"), *report.of("dv")]
    assert before - model.num_parameters() == sum(part.parameters_before - part.parameters_after for part in parts)
    assert part_costs(model) == planned
    for part, cost in zip(parts, sorted(planned, key=lambda cost: cost.part), strict=True):
        assert vars(cost).items() <= vars(part).items()
    return report


@pytest.mark.structures
def test_costs_are_those_of_the_model(kin):
    check_costs(build(kin))


def test_cross_attention_counts_the_width_of_each_side():
    model = build("bert-cross")
    attention = model.encoder.layer[0].crossattention.self
    attention.key, attention.value = nn.Linear(32, 24), nn.Linear(32, 24)
    cross = check_costs(model).of("dk")[1]
    assert cross.name.endswith("crossattention.self")
    assert cross.parameters_before == 24 * (24 + 1) + 24 * (32 + 1)
    assert cross.macs_before == 128 * 24 * (24 + 32) + 128**2 * 24
    assert cross.macs_after == 7 * 128 * (24 + 32 + 3 + 128 * 3) + 128 * 32 * 3


@pytest.mark.parametrize(
    "name",
    ["bert-cross", "clip", "gpt2", "llama", "patchtst", "segformer", "siglip2", "t5", "vit", "wav2vec2", "whisper"],
)
def test_patterns_and_cost_of_a_report_are_measured_or_left_out(name):
    """A module is timed on the inputs of its first call; a cache among them would grow with every further call."""
    batches = [inputs(name, seed) for seed in (0, 1)]
    options = ReportOptions(dk=6, lengths=(4, 8), rounds=2)
    report = make_report(build(name), batches, ["patterns", "cost"], options=options)
    assert report.sections.keys() | report.omitted.keys() == {"patterns", "cost"}


def test_low_rank_follows_the_formula(kin):
    model = build_low(kin).double()
    batch = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs(kin).items()}
    queries = batch["attention_mask"].bool() if kin == "deberta-v2" else ...  # whose padding sees all keys alike
    oracle = Reconstruction(model, BIASES[kin](model, batch) if kin in BIASES else None, queries)
    with torch.no_grad():
        model(**batch)
    assert oracle.checked == set(read_factors(model))


def test_saves_loads_trains_and_expands(kin, tmp_path, load_cleanly, set_dropout_):
    model, batch = build_low(kin), inputs(kin)
    compress(model, Compression(dv=9), calibration=None)
    model.save_pretrained(tmp_path)
    loaded = load_cleanly(AutoModel if type(model.config) in AutoModel._model_mapping else type(model), tmp_path)
    # Products round differently where memory is aligned differently.
    torch.testing.assert_close(run(loaded, batch), run(model, batch), atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), atol=0, rtol=0)
    for parameter in (*model.parameters(), *loaded.parameters()):
        assert parameter.is_contiguous()  # fully_shard takes no others
    expand(loaded)  # its heads are no wider than dense ones
    assert read_factors(loaded) == {}
    torch.testing.assert_close(run(loaded, batch), run(model, batch), atol=5e-5, rtol=1e-3)
    for module in set_dropout_(model, 0.0).train().modules():
        if hasattr(module, "layerdrop"):
            module.layerdrop = 0.0
    model(**batch)[0].square().sum().backward()
    sites = find_attention(model)
    trained = [sites[0].part(sites[0].paths.output)]
    for parameter in (*(site.module.qk.mixing for site in sites), *(layer.weight for layer in trained)):
        assert parameter.grad.abs().sum() > 0
    for site in sites:
        for path in input_paths(site.module)[: 3 if site is sites[0] else 2]:
            layer, start, stop = site.module.rows[path]
            assert site.module.get_submodule(layer).weight.grad[start:stop].abs().sum() > 0


@pytest.mark.structures
def test_untrained_models_can_be_made(kin, tmp_path):
    torch.manual_seed(0)
    stock = type(build(kin))
    model = from_config(build(kin).config, FromScratch(dk=7), stock).eval()
    expected = run(model, inputs(kin))
    assert expected.isfinite().all()
    model.save_pretrained(tmp_path)
    assert torch.equal(run(stock.from_pretrained(tmp_path), inputs(kin)), expected)


@pytest.mark.structures
def test_calibrates_on_batches(kin):
    dense, blind, model = build(kin), build(kin), build(kin)
    batches = [inputs(kin, seed) for seed in range(4)]
    compression = Compression(dk=7, solver=Solver(sweeps=3, refit=False))
    report = compress(model, compression, calibration=batches)
    compress(blind, compression, calibration=None)
    errors = [sum(float((run(one, x) - run(dense, x)).norm()) for x in batches) for one in (model, blind)]
    if kin not in FAMILIES or not FAMILIES[kin].rotary:  # one head for three random ones leaves it to chance
        assert errors[0] < errors[1]
    assert all(0 < module.data_error < 1 for module in report.of("dk"))


@pytest.mark.structures
def test_every_output_projection_is_refitted(kin, tmp_path):
    dense, model, batch = build(kin), build_low(kin), inputs(kin)
    results = refit(model, dense, [batch, batch], [batch])
    names = [result.report.name for result in results]
    outputs = {site.path(site.paths.output) for site in find_attention(model)}
    assert outputs < set(names)  # feed-forward blocks too
    assert all(refitted.report.error_after <= refitted.report.error_before * 1.001 for refitted in results)
    before = measure_output_error(model, dense, [batch])
    install_refits(model, results)
    after = measure_output_error(model, dense, [batch])
    assert after.relative_error < before.relative_error
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(run(type(model).from_pretrained(tmp_path), batch), run(model, batch))


def test_cross_attention_of_gpt2_is_refused():
    config = build("gpt2").config
    config.add_cross_attention = True
    model = GPT2Model(config)
    with pytest.raises(UnsupportedModelError, match=r"h\.0\.crossattention: cross attention of GPT-2 cannot be"):
        find_dense_attention(model)
    assert len(find_dense_attention(model, "*.attn")) == 2
