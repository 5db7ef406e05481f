"""Timing: which calls, and how many."""

import time

import pytest
import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration, MarianModel

from collab_compress import Compression, Solver, compress
from collab_compress.analysis import model_latency, module_latency
from collab_compress.architectures import find_attention
from collab_compress.errors import CalibrationError


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
        site.part(site.paths.output).register_forward_hook(lambda _, args, out: widths.append(args[0].shape[-1]))
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
