"""Timing of modules: what is called with what, and in which numbers; not how fast a machine is."""

import pytest
import torch
from torch import nn

from collab_compress import Compression, Solver, compress
from collab_compress.analysis import model_latency, module_latency
from collab_compress.architectures import FAMILIES, find_attention
from collab_compress.errors import CalibrationError, HeadError


@pytest.fixture
def two(family, make_tiny, calibration):
    dense, converted = make_tiny(family), make_tiny(family)
    compress(converted, Compression(dk=24, solver=Solver(sweeps=1)), calibration=None)
    return dense, converted


def test_every_module_is_timed_at_every_length(two):
    dense, converted = two
    found = module_latency(dense, converted, (4, 9), rounds=3)
    names = [site.name for site in find_attention(dense, FAMILIES)]
    assert [(each.length, each.name) for each in found] == [(length, name) for length in (4, 9) for name in names]
    for each in found:
        assert each.rounds == 3
        assert 0 < each.low <= each.ratio <= each.high
        assert each.dense_ms > 0
        assert each.converted_ms > 0


def test_both_get_what_the_dense_model_gives_its_own(two):
    """At full rank both give the same, so hooks that note what they give see equal pairs."""
    dense, converted = two
    given = {id(model): {} for model in two}
    for model in two:
        for site in find_attention(model, FAMILIES):
            site.module.register_forward_hook(
                lambda _, args, out, model=model, name=site.name: given[id(model)].setdefault(name, []).append(out[0])
            )
    module_latency(dense, converted, (6,), rounds=2, batch_size=2)
    for name, ours in given[id(converted)].items():
        assert len(ours) == 3  # one for warming up
        assert ours[0].shape[:2] == (2, 6)
        for each in ours:
            torch.testing.assert_close(each, given[id(dense)][name][-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dv", [12, 10])
def test_output_projections_are_timed_too(family, dv, make_tiny):
    dense, converted = make_tiny(family), make_tiny(family)
    compress(converted, Compression(dv=dv), calibration=None)
    widths = []
    for site in find_attention(converted, FAMILIES):
        site.part(site.family.output).register_forward_hook(lambda _, args, out: widths.append(args[0].shape[-1]))
    found = module_latency(dense, converted, (6,), rounds=2)
    assert widths == [dv] * 3 * len(found)


def test_own_inputs_progress_and_modes(make_tiny, batch):
    dense, converted = make_tiny("bert").train(), make_tiny("bert")
    compress(converted, Compression(dk=9, solver=Solver(sweeps=1)), calibration=None)
    told, lengths = [], []

    def inputs(length):
        lengths.append(length)
        return batch

    found = module_latency(
        dense, converted, (9, 5), inputs=inputs, rounds=2, progress=lambda *step: told.append(step)
    )
    assert lengths == [9, 5]
    assert told == [(1, 2), (2, 2)]
    assert len(found) == 4
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


def test_whole_models_run_in_turns_on_the_same_batch(make_tiny):
    dense, converted = make_tiny("bert"), make_tiny("bert")
    lengths = {id(model): [] for model in (dense, converted)}
    for model in (dense, converted):
        model.register_forward_pre_hook(
            lambda module, args, kwargs: lengths[id(module)].append(tuple(kwargs["input_ids"].shape)),
            with_kwargs=True,
        )
    found = model_latency(dense, converted, 6, batch_size=3, seconds=0)
    assert (found.name, found.length, found.rounds) == ("", 6, 4)
    assert lengths[id(dense)] == lengths[id(converted)] == [(3, 6)] * 6  # one to plan by, one to warm up
    assert 0 < found.low <= found.ratio <= found.high
