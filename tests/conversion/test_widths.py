"""What every width loses, against conversions and least squares, and the widths that keep a share of operations."""

import copy
import math
import re

import pytest
import torch
from recorded import recorded_inputs
from slow_fit import weights_of
from tiny_families import TINIES, build, inputs, make_rotary, run
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPConfig, CLIPModel, LlamaConfig, LlamaModel

from collab_compress import CalibrationOptions, Compression, Solver, compress
from collab_compress.architectures import find_dense_attention, find_dense_values
from collab_compress.calibration.source import SplitData, typical_length
from collab_compress.conversion import inventory
from collab_compress.conversion.inventory import Inventory, find_feed_forward
from collab_compress.conversion.layers import LayerCall
from collab_compress.conversion.residual import find_residual_linears
from collab_compress.conversion.widths import LONG_INPUT, choose_widths, loss_curves
from collab_compress.errors import CompressionError

FAST = Solver(sweeps=2)


def batches(count=6, length=9, vocabulary=61):
    """Batches of two random sequences."""
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(5, vocabulary, (2, length), generator=generator)} for _ in range(count)]


def split(batches, length):
    """Return batches as data to calibrate on, of which one is held back too."""
    return SplitData(batches, batches[:1], batches, [], True, length, batches, batches[:1])


def operations(model, length):
    """Count the operations of products in a model's layers, for one sequence, as PyTorch does."""
    tokens = {"input_ids": torch.full((1, length), 7)}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**tokens)
    counts = counter.get_flop_counts()
    return sum(sum(counts[name].values()) for name in counts if name.endswith(("encoder", ".transformer")))


@pytest.mark.parametrize(("keep", "length"), [(0.9, 16), (0.4, 16), (0.95, 4000), (0.4, 4)])
def test_layers_keep_at_most_the_share_of_operations(keep, length, make_tiny):
    dense = make_tiny("bert")
    dense.set_attn_implementation("eager")
    model = copy.deepcopy(dense)
    options = CalibrationOptions(length=length)
    report = compress(model, Compression(keep=keep, solver=FAST), batches(), calibration_options=options)
    assert report.length == length
    if length == 16:
        share = operations(model, 16) / operations(dense, 16)
        assert keep - 0.15 < share <= keep + 0.02
    parts = report.parts
    assert all(part.macs_after <= part.macs_before for part in parts)
    assert sum(part.macs_after for part in parts) <= keep * sum(part.macs_before for part in parts)
    chosen = report.compression
    widths = {"dk": chosen.dk, "dv": chosen.dv, "dff": chosen.dff}  # attention may stay dense
    assert ", ".join(f"{name} {width}" for name, width in widths.items() if width is not None) in report.choice
    assert model.config.intermediate_size == (chosen.dff or 32)


def slow_choice(dense, keep, length, data):
    """Return the least loss of all widths that keep the share, one by one, and the widths."""
    sites, values = find_dense_attention(dense), find_dense_values(dense)
    blocks = find_feed_forward(dense, data[0])
    losses = loss_curves(Inventory(dense, data[0]), sites, values, blocks, data)
    total = 0
    for site in sites:
        total += 4 * length * site.width**2 + 2 * length**2 * site.width
    total += sum(2 * length * block.width * 24 for block in blocks)
    best = (math.inf, None)
    for dk in [None, *range(3, 24, 3)]:
        for dv in [None, *range(3, 24, 3)]:
            macs = 0
            for _site in sites:
                reads = min(7, dk or 0)  # and a channel for the content bias
                biased = length * 24 * 3 + (length + length**2) * 3 * reads
                macs += 2 * length * 24 * 24 + length**2 * 24 if dk is None else 2 * length * 24 * dk + biased
                macs += (2 * length * 24 + length**2) * (dv or 24)
            neurons = int((keep * total - macs) / (2 * length * 24 * len(blocks)) + 1e-9)
            if neurons < 1:
                continue
            widths = {"dk": dk, "dv": dv, "dff": min(neurons, 32)}
            loss = sum(
                float(curve[widths[part]])
                for part, curves in losses.items()
                if widths[part] is not None
                for curve in curves.values()
            )
            best = min(best, (loss, tuple(widths.values())), key=lambda pair: pair[0])
    return best[1]


@pytest.mark.parametrize("keep", [0.8, 0.4])
def test_the_widths_chosen_lose_least(keep, make_tiny):
    dense, data = make_tiny("bert"), batches(12)
    choice = choose_widths(Inventory(dense, data[0]), Compression(keep=keep), split(data, 16))
    chosen = choice.compression
    dk, dv, dff = slow_choice(dense, keep, 16, data)
    assert (chosen.dk, chosen.dv, chosen.dff or 32) == (dk, dv, dff)


@pytest.mark.parametrize("length", [LONG_INPUT, LONG_INPUT + 1])
def test_long_inputs_make_heads_narrower_too(length, make_tiny):
    """Most operations are those of the scores then, whose number falls with the width of heads alone."""
    structure = Inventory(make_tiny("bert"), batches()[0])
    chosen = choose_widths(structure, Compression(keep=0.4), split(batches(), length)).compression
    assert chosen.dk is not None
    assert chosen.head_dim == (max(2, chosen.dk // 3) if length > LONG_INPUT else None)


def test_one_conversion_follows_one_pass(make_tiny, monkeypatch):
    """However many widths there are, a choice costs one pass of the dense model's layers."""
    calls = []
    monkeypatch.setattr(LayerCall, "run", lambda *args, run=LayerCall.run: calls.append(args[0].name) or run(*args))
    choose_widths(Inventory(make_tiny("bert"), batches()[0]), Compression(keep=0.6), split(batches(), 16))
    assert len(calls) <= 2 * len(batches()) + 60  # the rest finds linears and neurons


@pytest.mark.parametrize("options", [{"keep": 0.4, "solver": FAST}, {"dff": 16, "layers": 1}])
def test_a_conversion_finds_the_structure_of_its_model_once(options, make_tiny, monkeypatch):
    found = []
    monkeypatch.setattr(
        inventory, "find_residual_linears", lambda *args: found.append(args) or find_residual_linears(*args)
    )
    assert compress(make_tiny("bert"), Compression(**options), batches()).refits
    assert len(found) == 1


def test_modules_have_widths_of_their_own():
    settings = copy.deepcopy(TINIES["clip"].settings)
    settings["vision_config"] |= {"hidden_size": 96, "num_attention_heads": 6}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(**settings)).eval()
    data = [inputs("clip", seed) for seed in range(6)]
    report = compress(model, Compression(keep=0.7, solver=FAST), data)
    after = {module.name: module.macs_after for module in report.of("dk")}
    for values in report.of("dv"):
        after[values.name] += values.macs_after
    for scores, values in zip(report.of("dk"), report.of("dv"), strict=True):
        assert after[scores.name] <= scores.macs_before + values.macs_before
    assert len({module.width for module in report.of("dk")}) == 2
    assert report.compression == Compression(keep=0.7, solver=FAST)


def test_queries_and_keys_of_rotary_models_stay_dense():
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=1, intermediate_size=64, initializer_range=0.4)).eval()
    stay = r"\(queries and keys stay as they are: .* rotary embedding .* only dk makes them narrower\)"
    with pytest.raises(
        CompressionError, match=rf"no widths of .* at 128 tokens {stay}; pass more, or dk, dv and dff"
    ):
        compress(model, Compression(keep=0.05, solver=FAST), batches())
    report = compress(model, Compression(keep=0.6, solver=FAST), batches())
    assert report.compression.dk is None
    assert not report.of("dk")
    assert re.search(stay, report.choice)
    assert all(part.macs_after < part.macs_before for part in report.parts)


def test_blocks_whose_neurons_depend_on_each_other_stay_as_they_are(make_tiny):
    model = make_tiny("bert")
    for layer in model.encoder.layer:
        layer.intermediate.intermediate_act_fn = torch.nn.Softmax(-1)
    choice = choose_widths(Inventory(model, batches()[0]), Compression(keep=0.6), split(batches(), 8))
    assert choice.compression.dff is None
    assert 0.4 < int(re.search(r"Kept (\d+)%", choice.reason)[1]) / 100 <= 0.6
    assert "(feed-forward blocks stay as they are: BertModel has no feed-forward block" in choice.reason


def test_the_length_is_one_that_nine_in_ten_texts_do_not_exceed(make_tiny):
    model = make_tiny("bert")
    mask = torch.zeros(10, 30)
    for row, tokens in enumerate((3, 4, 5, 5, 6, 7, 7, 8, 9, 30)):
        mask[row, :tokens] = 1
    batches = [{"attention_mask": mask[:6]}, {"attention_mask": mask[6:]}]
    assert typical_length(CalibrationOptions(), model, batches) == 9
    assert typical_length(CalibrationOptions(length=12), model, batches) == 12
    assert typical_length(CalibrationOptions(), model) == 128
    assert typical_length(CalibrationOptions(), build("vit"), [inputs("vit")]) == 5  # of 2 × 2 patches and [CLS]
    sound, batch = build("wav2vec2"), inputs("wav2vec2")
    positions = run(sound, batch).shape[1]
    assert typical_length(CalibrationOptions(), sound, [batch]) <= positions < batch["attention_mask"].shape[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0.5, "dk": 8}, "keep chooses dk, dv, dff and head_dim; leave those and layers out"),
        ({"keep": 0.5, "dff": 8}, "keep chooses dk, dv, dff and head_dim; leave those and layers out"),
        ({"keep": 1.5}, "keep is 1.5; expected a number between 0 and 1"),
        ({"keep": "half"}, "keep is 'half'; expected a number"),
        ({"keep": 0.5, "solver": Solver(refit=False)}, "dff and keep refit"),
        ({}, "none of dk, dv, dff, layers and keep is given"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(CompressionError, match=message):
        Compression(**options)


def test_keep_that_cannot_be_is_refused(make_tiny):
    model, one = make_tiny("bert"), [{"input_ids": batches()[0]["input_ids"][:1]}]
    before = copy.deepcopy(model.state_dict())
    for keep, data, message in (
        (0.5, None, "pass at least two sequences"),
        (0.5, one, "pass at least two sequences"),
        (0.01, batches(), r"keep is 0.01: no widths of 2 attention modules and 2 feed-forward"),
    ):
        with pytest.raises(CompressionError, match=message):
            compress(model, Compression(keep=keep), data)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


FAMILIES = ["bert", "t5", "gpt2", "vit", "albert"]


def data(name, count=12):
    return [inputs(name, seed) for seed in range(count)]


def curves_of(model, batches):
    structure = Inventory(model, batches[0])
    return loss_curves(structure, find_dense_attention(model), find_dense_values(model), structure.blocks, batches)


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_fall_with_the_width_and_end_at_nothing(name):
    model = build(name)
    before = {path: tensor.clone() for path, tensor in model.state_dict().items()}
    curves = curves_of(model, data(name))
    count = len(find_dense_attention(model))
    assert [len(curves[part]) for part in ("dk", "dv")] == [count, count]
    for part, losses in ((part, losses) for part, modules in curves.items() for losses in modules.values()):
        assert losses.isfinite().all()
        assert (losses[1:] <= losses[:-1] + 1e-9).all() or part == "dff"  # which counts chance too
        assert abs(float(losses[-1])) < 1e-6
        assert losses[0] > 0
    assert all(torch.equal(tensor, before[path]) for path, tensor in model.state_dict().items())


def inputs_of(model, batches, name):
    """Return what a module of BERT reads at unpadded tokens of all batches, (n, D)."""
    module = {name: model.get_submodule(name)}
    calls = [recorded_inputs(model, batch, module)[name][0][batch["attention_mask"].bool()] for batch in batches]
    return torch.cat(calls).double()


def variance_of(stream):
    """Return the variance of a stream (n, D), of tokens that count by the inverse of their mean square."""
    weights = weights_of(stream)[:, None] / weights_of(stream).sum()
    return ((stream - (stream * weights).sum(0)).square() * weights).sum()


@pytest.mark.parametrize("dv", [6, 18])
def test_losses_of_values_are_those_of_a_conversion(dv):
    dense, batches = build("bert"), data("bert")
    curves = curves_of(dense, batches)
    first = "encoder.layer.0.attention"
    model = copy.deepcopy(dense)
    compress(model, Compression(dv=dv, modules="*0*", solver=Solver(refit=False)), batches)
    before, after = (inputs_of(each, batches, f"{first}.output.LayerNorm") for each in (dense, model))
    lost = (after - before).square().sum(1).mean() / variance_of(before)
    # The conversion holds an eighth of the sequences back, and both add a damping.
    assert float(curves["dv"][f"{first}.self"][dv]) == pytest.approx(float(lost), rel=0.25)


def test_losses_of_neurons_are_those_of_the_best_fit_without_them():
    dense, batches = build("bert"), data("bert", 24)
    name = "encoder.layer.0.output.dense"
    with torch.no_grad():  # a neuron that is active for some tokens makes their stream much larger
        dense.get_submodule(name).weight[:, 3] *= 30
    curves = curves_of(dense, batches)
    neurons = inputs_of(dense, batches, name)
    stream = inputs_of(dense, batches, "encoder.layer.0.output.LayerNorm")
    weights = weights_of(stream)[:, None]
    centred = (neurons - (neurons * weights).sum(0) / weights.sum()) * weights.sqrt()
    outputs = centred @ dense.get_submodule(name).weight.detach().double().mT
    weakest = outputs.new_tensor([float("inf")])
    spread, count = variance_of(stream) * weights.sum(), len(neurons)
    assert float(weights.max() / weights.min()) > 20
    for neuron in range(32):  # the best 31 to keep, one by one
        others = centred[:, [other for other in range(32) if other != neuron]]
        fitted = others @ torch.linalg.lstsq(others, outputs).solution
        weakest = torch.minimum(weakest, (outputs - fitted).square().sum() / spread)
    expected = float(weakest) * (count + 31) / (count - 31)
    assert float(curves["dff"][name][31]) == pytest.approx(expected, rel=0.3)  # but for the damping


@pytest.mark.parametrize("factor", [1e-3, 400])
def test_a_stream_of_any_size_is_measured_in_half_precision(factor):
    model = make_rotary("llama").half()
    with torch.no_grad():
        model.get_input_embeddings().weight *= factor
    report = compress(model, Compression(keep=0.6), batches())
    assert report.compression.dff is not None


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_values_that_are_the_same_everywhere_lose_nothing(bias):
    dense, batches = build("bert"), data("bert")
    attention = dense.encoder.layer[0].attention.self
    with torch.no_grad():
        attention.value.weight.zero_()
        attention.value.bias.fill_(bias)
    losses = curves_of(dense, batches)
    assert not losses["dv"]["encoder.layer.0.attention.self"].any()
    assert losses["dv"]["encoder.layer.1.attention.self"][0] > 0


def test_a_stream_that_is_the_same_everywhere_loses_nothing():
    dense, batches = build("detr"), data("detr")  # whose decoder starts from zeros
    losses = curves_of(dense, batches)
    first = "decoder.layers.0.self_attn"
    assert not losses["dk"][first].any()
    assert not losses["dv"][first].any()
    assert all(curve.isfinite().all() for modules in losses.values() for curve in modules.values())
    assert compress(dense, Compression(keep=0.5), batches).refits
