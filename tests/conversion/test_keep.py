"""The share of attention to keep, turned into widths and a form."""

import copy

import pytest

from collab_compress import Compression, compress
from collab_compress.architectures import FAMILIES, find_attention
from collab_compress.conversion.keep import choose
from collab_compress.errors import CompressionError


def parameters(model):
    """Numbers in all projections and mixing matrices, but for the bias that outputs have in any form."""
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
    report = compress(model, Compression(keep=keep, sweeps=2, length=8), calibration=None)
    chosen = report.compression
    assert parameters(model) <= keep * parameters(dense)
    wider = copy.deepcopy(dense)
    more = Compression(dk=min(24, chosen.dk + 3), dv=min(24, chosen.dv + 3), form=chosen.form)
    compress(wider, more, calibration=None)
    assert parameters(wider) > keep * parameters(dense)
    assert f"dk {chosen.dk} and dv {chosen.dv}" in report.choice


def test_long_inputs_get_channels_of_each_heads_own(make_tiny):
    short, _ = choose(make_tiny("bert"), Compression(keep=0.7, length=4))
    long, why = choose(make_tiny("bert"), Compression(keep=0.7, length=4000))
    assert (short.form, long.form) == ("shared", "per-head")
    assert choose(make_tiny("bert"), Compression(keep=0.7, length=4000, sweeps=3))[0].sweeps is None
    assert "per head, for at 4000 tokens shared scores would take more operations than dense ones" in why


def test_the_length_is_that_of_the_texts(make_tiny, calibration):
    _, why = choose(make_tiny("bert"), Compression(keep=0.7), calibration)
    real = sum(float(batch["attention_mask"].sum()) for batch in calibration)
    rows = sum(len(batch["attention_mask"]) for batch in calibration)
    assert f"at {round(real / rows)} tokens" in why
    assert "at 128 tokens" in choose(make_tiny("bert"), Compression(keep=0.7))[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0.5, "dk": 8}, "keep chooses dk, dv and form; leave those out"),
        ({"keep": 0.5, "form": "per-head"}, "keep chooses dk, dv and form"),
        ({"keep": 1.5}, "keep is 1.5; expected a number between 0 and 1"),
        ({"keep": "half"}, "keep is 'half'; expected a number"),
        ({}, "none of dk, dv and keep is given"),
    ],
)
def test_what_cannot_be_asked(options, message):
    with pytest.raises(CompressionError, match=message):
        Compression(**options)


def test_too_small_a_share(make_tiny):
    with pytest.raises(CompressionError, match=r"keep is 0.01, and one channel a head keeps 0\.\d\d already"):
        compress(make_tiny("bert"), Compression(keep=0.01), calibration=None)
