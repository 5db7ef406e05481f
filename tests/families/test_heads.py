"""Acting on heads in every family: reading, masking, swapping, mixing, removing."""

import copy

import pytest
import torch
from forms import randomise_
from tiny_families import build, build_low, inputs, run
from transformers import AutoModel

from collab_compress import (
    Compression,
    HeadMask,
    Solver,
    compress,
    expand,
    is_converted,
    merge_alphas_,
    mix_heads_,
    prune_heads_,
)
from collab_compress.architectures import find_attention
from collab_compress.errors import HeadError
from collab_compress.heads import Recorder, masks_without, swap_heads_

KEEP_HEADS = {
    "beit": "BEiT, because its position bias has a column",
    "detr": "DETR, because its modules do not count",
    "mpnet": "MPNet, because all layers share one",
    "t5": "T5, because all layers share one",
    "umt5": "UMT5, because its position bias has a column",
    **dict.fromkeys(("llama", "phi"), ".*, because its config has one number of heads"),
}


@pytest.fixture(params=["dense", "converted"])
def model(request, kin):
    """Return a dense model, or one whose queries, keys and values are narrower."""
    if request.param == "dense":
        return build(kin)
    model = build_low(kin)
    compress(model, Compression(dv=9, solver=Solver(refit=False)), calibration=None)
    return model


def outputs_of(model, batch, site):
    with Recorder(model, kinds=[site.kind]) as recorder:
        run(model, batch)
        return next(reading.outputs for reading in recorder.take() if reading.site.name == site.name)


@pytest.mark.structures
def test_heads_are_swapped_masked_mixed_and_removed(kin, model):
    batch, sites = inputs(kin), find_attention(model)
    if kin != "beit":  # whose position bias belongs to a head's place and stays there
        swapped = copy.deepcopy(model)
        if kin == "mpnet":
            torch.nn.init.zeros_(swapped.encoder.relative_attention_bias.weight)
        kind = "cross" if kin in ("t5", "umt5") else None  # the same, but for cross-attention
        site = next(site for site in find_attention(swapped) if kind in (None, site.kind))
        expected = outputs_of(swapped, batch, site)[:, :, [2, 1, 0]]
        swap_heads_(swapped, [((site.name, 0), (site.name, 2))])
        torch.testing.assert_close(outputs_of(swapped, batch, site), expected, atol=1e-5, rtol=1e-4)

    heads = {site.name: [1] for site in sites}
    before = run(model, batch)
    with HeadMask(model, masks_without(model, heads)):
        masked = run(model, batch)
    assert not torch.allclose(masked, before, atol=1e-3)

    mixed = copy.deepcopy(model)
    mix_heads_(mixed)
    randomise_(mixed)
    expected = run(mixed, batch)
    assert not torch.allclose(expected, before, atol=1e-3)
    merge_alphas_(mixed)
    torch.testing.assert_close(run(mixed, batch), expected, atol=2e-5, rtol=1e-4)

    if kin in KEEP_HEADS:
        with pytest.raises(HeadError, match=f"heads cannot be removed from {KEEP_HEADS[kin]}"):
            prune_heads_(model, heads)
        return
    if kin == "gpt2" and is_converted(model):
        with pytest.raises(HeadError, match="GPT-2 has one layer for queries, keys and values; remove heads first"):
            prune_heads_(model, heads)
        return
    prune_heads_(model, heads)
    torch.testing.assert_close(run(model, batch), masked, atol=2e-5, rtol=1e-4)


def test_gpt2_with_fewer_heads_in_one_layer_reloads_converts_and_expands(tmp_path):
    model, batch = build("gpt2"), inputs("gpt2")
    heads = {find_attention(model)[0].name: [0, 2]}
    with HeadMask(model, masks_without(model, heads)):
        expected = run(model, batch)
    prune_heads_(model, heads)
    attention = model.h[0].attn
    assert (attention.c_attn.nf, attention.c_attn.weight.shape, attention.c_proj.nx) == (24, (24, 24), 8)
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path).eval()
    compress(again, Compression(dk=24, modules="h.1.*"), calibration=None)
    for loaded in (model, again):
        torch.testing.assert_close(run(loaded, batch), expected, atol=2e-5, rtol=1e-4)
    compress(again, Compression(dk=8, modules="h.0.*"), calibration=None)
    expand(again)
    torch.testing.assert_close(run(again, batch), expected, atol=2e-5, rtol=1e-4)


def test_opt_keeps_room_for_its_shared_keys():
    model = build("opt")
    compress(model, Compression(dk=15, solver=Solver(sweeps=20)), calibration=None)
    with pytest.raises(
        HeadError, match=r"self_attn cannot work with 2 heads: got dk 15 .* pass dk up to 14; or remove"
    ):
        prune_heads_(model, {"decoder.layers.0.self_attn": [0]})
