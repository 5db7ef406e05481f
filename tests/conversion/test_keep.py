"""The share of attention to keep, turned into widths and a form."""

import copy

import pytest
import torch
from transformers import CLIPConfig, CLIPModel

from collab_compress import CalibrationOptions, Compression, Solver, compress
from collab_compress.architectures import FAMILIES, find_attention
from collab_compress.conversion.keep import typical_length
from collab_compress.errors import CompressionError


def parameters(model):
    """Count numbers in all projections and mixing matrices, but for the bias that outputs have in any form."""
    found = {}
    for site in find_attention(model, FAMILIES):
        output = site.part(site.family.output)
        parts = [site.part(path) for path in (site.family.query, site.family.key, site.family.value)]
        inside = [each for part in parts for each in part.parameters()] + [output.weight]
        found |= {id(each): each.numel() for each in inside}
        if hasattr(site.module, "mixing"):
            found[id(site.module.mixing)] = site.module.mixing.numel()
    return sum(found.values())


@pytest.mark.parametrize("keep", [0.9, 0.6, 0.5])
def test_keeps_at_most_the_share_and_one_channel_a_head_more_would_be_too_much(family, keep, make_tiny):
    dense = make_tiny(family)
    model = copy.deepcopy(dense)
    compression = Compression(keep=keep, solver=Solver(sweeps=2))
    report = compress(model, compression, None, calibration_options=CalibrationOptions(length=8))
    chosen = report.compression
    assert parameters(model) <= keep * parameters(dense)
    wider = copy.deepcopy(dense)
    more = Compression(dk=min(24, chosen.dk + 3), dv=min(24, chosen.dv + 3), form=chosen.form)
    compress(wider, more, calibration=None)
    assert parameters(wider) > keep * parameters(dense)
    assert f"dk {chosen.dk}, dv {chosen.dv}" in report.choice


@pytest.mark.parametrize("length", [4, 128, 4000])
@pytest.mark.parametrize("keep", [0.95, 0.7, 0.4])
def test_costs_no_more_than_dense_attention_at_the_length(keep, length, make_tiny):
    model = make_tiny("bert")
    compression = Compression(keep=keep, solver=Solver(effort="fast"))
    report = compress(model, compression, None, calibration_options=CalibrationOptions(length=length))
    assert report.length == length
    assert all(module.macs_after <= module.macs_before for module in (*report.modules, *report.values))


def test_modules_have_widths_of_their_own():
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config={
            "vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "max_position_embeddings": 40, "bos_token_id": 1, "eos_token_id": 2,
        },
        vision_config={
            "hidden_size": 96, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 6,
            "image_size": 8, "patch_size": 4,
        },
        projection_dim=16,
    )  # fmt: skip
    model = CLIPModel(config).eval()
    report = compress(model, Compression(keep=0.7), calibration=None)
    for scores, values in zip(report.modules, report.values, strict=True):
        after = scores.parameters_after + values.parameters_after
        assert 0.6 < after / (scores.parameters_before + values.parameters_before) <= 0.7
    assert len({module.dk for module in report.modules}) == 2
    assert report.compression == Compression(keep=0.7)
    assert "dk 22 to 66, dv 22 to 66" in report.choice


def test_the_length_is_one_that_nine_in_ten_texts_do_not_exceed():
    mask = torch.zeros(10, 30)
    for row, tokens in enumerate((3, 4, 5, 5, 6, 7, 7, 8, 9, 30)):
        mask[row, :tokens] = 1
    batches = [{"attention_mask": mask[:6]}, {"attention_mask": mask[6:]}]
    assert typical_length(CalibrationOptions(), batches) == 9
    assert typical_length(CalibrationOptions(length=12), batches) == 12
    assert typical_length(CalibrationOptions()) == 128


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0.5, "dk": 8}, "keep chooses dk, dv and form; leave those out"),
        ({"keep": 0.5, "form": "per-head"}, "keep chooses dk, dv and form"),
        ({"keep": 1.5}, "keep is 1.5; expected a number between 0 and 1"),
        ({"keep": "half"}, "keep is 'half'; expected a number"),
        ({}, "none of dk, dv, dff and keep is given"),
    ],
)
def test_what_cannot_be_asked(options, message):
    with pytest.raises(CompressionError, match=message):
        Compression(**options)


def test_too_small_a_share(make_tiny):
    with pytest.raises(CompressionError, match=r"keep is 0.01, and one channel a head keeps 0\.\d\d already"):
        compress(make_tiny("bert"), Compression(keep=0.01), calibration=None)
