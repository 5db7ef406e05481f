"""Costs against counts of the live model's parameters and products; timing: which calls, and how many."""

import time

import pytest
import torch
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, MarianModel

from collab_compress import CalibrationOptions, Compression, Solver, compress
from collab_compress.analysis import MapCost, model_latency, module_costs, module_latency
from collab_compress.architectures import find_attention
from collab_compress.attention import SharedConfig
from collab_compress.conversion.report import dense_macs, dense_parameters
from collab_compress.errors import CalibrationError, HeadError


def live(model):
    """Return the parameters of each module's scores, and of its values without the output bias."""
    counts = []
    for site in find_attention(model):
        query, key, value, output = (
            site.part(getattr(site.family, part)) for part in ("query", "key", "value", "output")
        )
        scores = sum(parameter.numel() for part in (query, key) for _, parameter in part.named_parameters())
        scores += site.module.qk.mixing.numel() if hasattr(site.module, "qk") else 0
        counts.append((scores, sum(p.numel() for _, p in value.named_parameters()) + output.weight.numel()))
    return counts


def counted(costs):
    return [(cost.parameters, cost.macs) for cost in costs]


@pytest.mark.parametrize(("dk", "dv"), [(9, None), (None, 12), (9, 9)])
def test_costs_and_caches_are_those_of_the_live_model(family, dk, dv, make_tiny, calibration):
    model, length = make_tiny(family), 7
    planned = module_costs(model, length, dk=dk, dv=dv)
    sites = find_attention(model)
    assert [cost.name for cost in planned] == [site.name for site in sites]
    assert [(cost.scores.dense.parameters, cost.values.dense.parameters) for cost in planned] == live(model)
    compression = Compression(dk=dk, dv=dv, solver=Solver(sweeps=3 if dk else None, refit=False))
    options = CalibrationOptions(length=length)  # for which costs are counted
    report = compress(model, compression, calibration[:2], calibration_options=options)
    assert module_costs(model, length, dk=None if dk is None else 99, dv=None if dv is None else 99) == planned
    for part, modules in (("scores", report.modules), ("values", report.values)):
        if modules:
            costs = [getattr(cost, part) for cost in planned]
            before = [(module.parameters_before, module.macs_before) for module in modules]
            after = [(module.parameters_after, module.macs_after) for module in modules]
            assert counted(cost.dense for cost in costs) == before
            assert counted(cost.converted for cost in costs) == after
    assert [(cost.scores.converted.parameters, cost.values.converted.parameters) for cost in planned] == live(model)
    for cost in planned:
        assert cost.values.dense.macs == length * 24 * (24 + 24 + length)
        assert cost.values.converted.macs == length * (dv or 24) * (24 + 24 + length)
        assert cost.values.width == dv

    widths = {}
    for site in sites:
        for part in ("key", "value"):
            path, joined = getattr(site.family, part), site.family.forward != "stock"
            widths[site.name, part] = site.part(path).out_features
            if not joined:  # padded to whole heads
                site.module.get_submodule(path).register_forward_hook(
                    lambda _, args, out, at=(site.name, part): widths.update({at: out.shape[-1]})
                )
    with torch.no_grad():
        model(**calibration[0])
    for cost in planned:
        for cost_of_map, part in ((cost.scores, "key"), (cost.values, "value")):
            cached = 0 if cost.kind == "encoder" else 4  # bytes of a number
            assert cost_of_map.dense.cache_bytes == cached * 24
            assert cost_of_map.converted.cache_bytes == cached * widths[cost.name, part]


def test_without_a_rank_a_dense_module_has_one_form(bert):
    cost = module_costs(bert, 64)[0]
    assert cost.scores == MapCost(None, cost.scores.dense, cost.scores.dense)
    assert cost.values == MapCost(None, cost.values.dense, cost.values.dense)
    assert cost.scores.dense.macs == 2 * 64 * 24 * 24 + 64 * 64 * 24


def test_half_precision_halves_the_cache(make_tiny):
    (*_, cost) = module_costs(make_tiny("marian").to(torch.bfloat16))
    assert cost.scores.dense.cache_bytes == 2 * 24


@pytest.mark.parametrize(
    ("width", "heads", "dk", "printed"),
    [(512, 8, 128, (1.05, 0.66, 1.51, 1.09)), (768, 12, 256, (2.36, 1.58, 3.27, 2.65))],
)
def test_a_layer_costs_what_table_1_of_the_paper_says(width, heads, dk, printed):
    """Millions of parameters and hundreds of millions of products, dense and converted, without content biases."""
    length, widths = 128, (width, width)
    form = SharedConfig(heads, width // heads, dk, content_bias=False, reads=dk)
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


@pytest.mark.parametrize("family", ["albert", "bert", "marian"])
def test_every_module_is_timed_at_every_length_on_the_dense_model_s_inputs(family, make_tiny):
    """At full rank both models return the same, so hooks record equal outputs."""
    dense, converted = make_tiny(family), make_tiny(family)
    compress(converted, Compression(dk=24, solver=Solver(sweeps=1)), calibration=None)
    outputs = {id(model): {} for model in (dense, converted)}
    for model in (dense, converted):
        for site in find_attention(model):
            site.module.register_forward_hook(
                lambda _, args, out, model=model, name=site.name: (
                    outputs[id(model)].setdefault(name, []).append(out[0])
                )
            )
    timings = module_latency(dense, converted, (4, 6), rounds=3, batch_size=2)
    names = [site.name for site in find_attention(dense)]
    expected = [(length, name) for length in (4, 6) for name in names]
    assert [(timing.length, timing.name) for timing in timings] == expected
    for timing in timings:
        assert timing.rounds == 3
        assert 0 < timing.low <= timing.ratio <= timing.high
        assert timing.dense_ms > 0
        assert timing.converted_ms > 0
    for name, ours in outputs[id(converted)].items():
        assert len(ours) == 8  # at each length one is the warm-up
        assert [tuple(states.shape[:2]) for states in ours] == [(2, 4)] * 4 + [(2, 6)] * 4
        for states in ours[4:]:
            torch.testing.assert_close(states, outputs[id(dense)][name][-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "dv"), [("bert", 12), ("marian", 9)])
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
    assert (timing.name, timing.length, timing.rounds, timing.device) == ("", 6, 10, "cpu")
    # Ten rounds, after one call to choose their number and one to warm up.
    assert lengths[id(dense)] == lengths[id(converted)] == [(3, 6)] * 12
    assert 0 < timing.low <= timing.ratio <= timing.high


def test_one_thread_is_timed_by_its_processor_time(make_tiny, set_threads):
    """Waiting for other programs does not count; afterwards all threads are back."""
    set_threads(2)
    model, waiting, threads = make_tiny("bert"), make_tiny("bert"), []
    waiting.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    waiting.register_forward_pre_hook(lambda *_: threads.append(torch.get_num_threads()))
    assert model_latency(model, waiting, 6, seconds=0).ratio < 5  # of the wall time, 10 and more
    assert module_latency(model, model, (6,), rounds=2)
    assert set(threads) == {1}
    assert torch.get_num_threads() == 2
    with pytest.raises(CalibrationError):
        model_latency(model, model, 41)
    assert torch.get_num_threads() == 2
