"""Costs against counts of the live model's parameters and products; timing: which calls, and how many."""

import pytest
import torch
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, MarianModel

from collab_compress import CalibrationOptions, Compression, Solver, compress
from collab_compress.analysis import MapCost, model_latency, module_costs, module_latency
from collab_compress.architectures import find_attention
from collab_compress.attention import SharedScores
from collab_compress.conversion.report import dense_macs, dense_parameters
from collab_compress.errors import CalibrationError, HeadError


def live_parameters(site):
    """Count the parameters that compute a module's scores."""
    query, key = (site.part(getattr(site.family, side)) for side in ("query", "key"))
    count = sum(parameter.numel() for part in (query, key) for _, parameter in part.named_parameters())
    return count + (site.module.mixing.numel() if hasattr(site.module, "mixing") else 0)


def test_parameters_and_cache_are_those_of_the_live_model(family, make_tiny, calibration):
    model = make_tiny(family)
    planned = module_costs(model, dk=9)
    for site, cost in zip(find_attention(model), planned, strict=True):
        assert cost.name == site.name
        assert cost.scores.dense.parameters == live_parameters(site)
    options = CalibrationOptions(length=128)  # the length for which costs are counted
    compression = Compression(dk=9, solver=Solver(sweeps=3, refit=False))
    report = compress(model, compression, calibration[:2], calibration_options=options)
    assert module_costs(model, dk=99) == planned
    for cost, module in zip(planned, report.modules, strict=True):
        counted = (module.parameters_before, module.parameters_after, module.macs_before, module.macs_after)
        predicted = (
            cost.scores.dense.parameters,
            cost.scores.converted.parameters,
            cost.scores.dense.macs,
            cost.scores.converted.macs,
        )
        assert predicted == counted
    widths = {}
    for site, cost in zip(find_attention(model), planned, strict=True):
        assert cost.scores.converted.parameters == live_parameters(site)
        site.part(site.family.key).register_forward_hook(
            lambda _, args, out, name=site.name: widths.update({name: out.shape[-1]})
        )
    with torch.no_grad():
        model(**calibration[0])
    for cost in planned:
        cached = 4 * widths[cost.name] if cost.kind != "encoder" else 0
        assert cost.scores.converted.cache_bytes == cached
        assert cost.scores.dense.cache_bytes == (4 * 24 if cost.kind != "encoder" else 0)


def live_value_parameters(site):
    """Count the parameters of a module's values and outputs, without the output bias."""
    value, output = site.part(site.family.value), site.part(site.family.output)
    return sum(parameter.numel() for _, parameter in value.named_parameters()) + output.weight.numel()


@pytest.mark.parametrize(("dk", "dv"), [(None, 12), (9, 9)])
def test_values_and_their_cache_are_those_of_the_live_model(family, dk, dv, make_tiny, calibration):
    model = make_tiny(family)
    planned = module_costs(model, 7, dk=dk, dv=dv)
    for site, cost in zip(find_attention(model), planned, strict=True):
        assert cost.values.dense.parameters == live_value_parameters(site)
    report = compress(
        model, Compression(dk=dk, dv=dv, solver=Solver(sweeps=3 if dk else None, refit=False)), calibration[:2]
    )
    assert module_costs(model, 7, dv=99) == planned
    widths = {}
    for site, cost, module in zip(find_attention(model), planned, report.values, strict=True):
        assert cost.values.width == dv
        assert cost.values.converted.parameters == live_value_parameters(site) == module.parameters_after
        assert cost.values.dense.parameters == module.parameters_before
        assert cost.values.converted.macs == 7 * dv * (24 + 24 + 7)
        assert cost.values.dense.macs == 7 * 24 * (24 + 24 + 7)
        site.part(site.family.value).register_forward_hook(
            lambda _, args, out, name=site.name: widths.update({name: out.shape[-1]})
        )
    with torch.no_grad():
        model(**calibration[0])
    for cost in planned:
        assert cost.values.converted.cache_bytes == (4 * widths[cost.name] if cost.kind != "encoder" else 0)
        assert cost.values.dense.cache_bytes == (4 * 24 if cost.kind != "encoder" else 0)


def test_without_a_rank_a_dense_module_has_one_form(bert):
    cost = module_costs(bert, 64)[0]
    assert cost.scores == MapCost(None, cost.scores.dense, cost.scores.dense)
    assert cost.values == MapCost(None, cost.values.dense, cost.values.dense)
    assert cost.scores.dense.macs == 2 * 64 * 24 * 24 + 64 * 64 * 24


def test_half_precision_halves_the_cache(make_tiny):
    sizes = [
        sum(cost.scores.dense.cache_bytes for cost in module_costs(model))
        for model in (make_tiny("marian"), make_tiny("marian").to(torch.bfloat16))
    ]
    assert sizes[0] == 2 * sizes[1] == 4 * 4 * 24  # four modules, four bytes, H·d numbers


@pytest.mark.parametrize(
    ("width", "heads", "dk", "printed"),
    [(512, 8, 128, (1.05, 0.66, 1.51, 1.09)), (768, 12, 256, (2.36, 1.58, 3.27, 2.65))],
)
def test_a_layer_costs_what_table_1_of_the_paper_says(width, heads, dk, printed):
    """Millions of parameters and hundreds of millions of products, dense and converted, without content biases."""
    length, widths = 128, (width, width)
    form = SharedScores(heads, width // heads, "", "", dk, content_bias=False, reads=dk)
    parameters = dense_parameters(widths, widths, (False, False)), form.parameters(widths)
    macs = dense_macs(widths, widths, length), form.macs(widths, length)
    assert macs[1] == 2 * length * width * dk + heads * length * dk + heads * length * length * dk
    values = 2 * width * width, (2 * width + length) * length * width
    counted = [(count + values[0]) / 1e6 for count in parameters] + [(count + values[1]) / 1e8 for count in macs]
    assert [round(number, 2) for number in counted] == list(printed)


def test_what_cannot_be_counted_is_refused(bert):
    with pytest.raises(HeadError, match="got length 0"):
        module_costs(bert, 0)
    with pytest.raises(HeadError, match="dk 0"):
        module_costs(bert, dk=0)
    with pytest.raises(HeadError, match="got length 128, dv 0; expected at least 1"):
        module_costs(bert, dv=0)


@pytest.fixture
def two(family, make_tiny, calibration):
    dense, converted = make_tiny(family), make_tiny(family)
    compress(converted, Compression(dk=24, solver=Solver(sweeps=1)), calibration=None)
    return dense, converted


def test_every_module_is_timed_at_every_length(two):
    dense, converted = two
    timings = module_latency(dense, converted, (4, 9), rounds=3)
    names = [site.name for site in find_attention(dense)]
    assert [(timing.length, timing.name) for timing in timings] == [
        (length, name) for length in (4, 9) for name in names
    ]
    for timing in timings:
        assert timing.rounds == 3
        assert 0 < timing.low <= timing.ratio <= timing.high
        assert timing.dense_ms > 0
        assert timing.converted_ms > 0


def test_both_modules_are_timed_on_the_dense_model_s_inputs(two):
    """At full rank both models return the same, so hooks record equal outputs."""
    dense, converted = two
    outputs = {id(model): {} for model in two}
    for model in two:
        for site in find_attention(model):
            site.module.register_forward_hook(
                lambda _, args, out, model=model, name=site.name: (
                    outputs[id(model)].setdefault(name, []).append(out[0])
                )
            )
    module_latency(dense, converted, (6,), rounds=2, batch_size=2)
    for name, ours in outputs[id(converted)].items():
        assert len(ours) == 3  # one is the warm-up
        assert ours[0].shape[:2] == (2, 6)
        for states in ours:
            torch.testing.assert_close(states, outputs[id(dense)][name][-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dv", [12, 9])
def test_output_projections_are_timed_too(family, dv, make_tiny):
    dense, converted = make_tiny(family), make_tiny(family)
    compress(converted, Compression(dv=dv), calibration=None)
    widths = []
    for site in find_attention(converted):
        site.part(site.family.output).register_forward_hook(lambda _, args, out: widths.append(args[0].shape[-1]))
    timings = module_latency(dense, converted, (6,), rounds=2)
    assert widths == [dv] * 3 * len(timings)


def test_own_inputs_progress_and_modes(make_tiny, batch):
    dense, converted = make_tiny("bert").train(), make_tiny("bert")
    compress(converted, Compression(dk=9, solver=Solver(sweeps=1)), calibration=None)
    steps, lengths = [], []

    def inputs(length):
        lengths.append(length)
        return batch

    timings = module_latency(
        dense, converted, (9, 5), inputs=inputs, rounds=2, progress=lambda *step: steps.append(step)
    )
    assert lengths == [9, 5]
    assert steps == [(1, 2), (2, 2)]
    assert len(timings) == 4
    assert dense.training
    assert not converted.training


def test_what_cannot_be_timed_is_refused(make_tiny):
    bert, distilbert = make_tiny("bert"), make_tiny("distilbert")
    with pytest.raises(HeadError, match="got 1 rounds"):
        module_latency(bert, bert, rounds=1)
    with pytest.raises(HeadError, match="no attention module of the same path"):
        module_latency(bert, distilbert)
    with pytest.raises(CalibrationError, match="cannot run"):
        module_latency(bert, bert, (41,), rounds=2)
    bert.forward = nn.Identity().forward
    with pytest.raises(HeadError, match="reads no tokens; pass inputs="):
        module_latency(bert, bert, (4,), rounds=2)


def test_random_tokens_are_known_to_the_model(make_tiny):
    """A config for several parts names no vocabulary of its own, and a decoder may have a smaller one."""
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 32}
    text = {"model_type": "llama", "vocab_size": 61, **sizes}
    vision = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, "projection_dim": 8, **sizes}
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text)).eval()
    assert model_latency(model, model, 6, seconds=0).dense_ms > 0
    config = make_tiny("marian").config
    config.update({"decoder_vocab_size": 5, "pad_token_id": 0, "share_encoder_decoder_embeddings": False})
    model = MarianModel(config).eval()
    assert model_latency(model, model, 6, seconds=0).dense_ms > 0


def test_whole_models_run_in_turns_on_the_same_batch(make_tiny):
    dense, converted = make_tiny("bert"), make_tiny("bert")
    lengths = {id(model): [] for model in (dense, converted)}
    for model in (dense, converted):
        model.register_forward_pre_hook(
            lambda module, args, kwargs: lengths[id(module)].append(tuple(kwargs["input_ids"].shape)),
            with_kwargs=True,
        )
    timing = model_latency(dense, converted, 6, batch_size=3, seconds=0)
    assert (timing.name, timing.length, timing.rounds) == ("", 6, 10)
    # Ten rounds, after one call to choose their number and one to warm up.
    assert lengths[id(dense)] == lengths[id(converted)] == [(3, 6)] * 12
    assert 0 < timing.low <= timing.ratio <= timing.high
