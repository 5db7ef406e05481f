"""Families whose attention cannot be edited: feed-forward blocks become narrower all the same."""

import pytest
import torch
from tiny_families import BLOCKS_ALONE, build, inputs, run

from collab_compress import Compression, UnsupportedModelError, compress
from collab_compress.architectures import find_attention
from collab_compress.heads import HeadMask, Recorder, prune_heads_


@pytest.mark.parametrize("name", BLOCKS_ALONE)
def test_feed_forward_blocks_are_converted_and_all_else_is_refused(name, tmp_path):
    model, batch = build(name), inputs(name)
    assert tuple(site.kind for site in find_attention(model)) == BLOCKS_ALONE[name].kinds
    expected, count = run(model, batch), model.num_parameters()
    refused = (
        lambda: compress(model, Compression(dk=8), calibration=None),
        lambda: compress(model, Compression(dv=8), calibration=None),
        lambda: HeadMask(model),
        lambda: Recorder(model),
        lambda: prune_heads_(model, {find_attention(model)[0].name: [0]}),
    )
    for call in refused:
        with pytest.raises(
            UnsupportedModelError, match=r"computes its scores itself.*; convert feed-forward .*dff"
        ) as e:
            call()
        assert "\n" not in str(e.value)
    assert torch.equal(run(model, batch), expected)
    report = compress(model, calibration=[batch, inputs(name, seed=1)])  # by default half of the operations
    assert {block.width for block in report.of("dff")} == {16} == {part.width for part in report.parts}
    assert "attention modules stay as they are" in report.choice
    assert "computes its scores itself" in report.choice
    assert model.num_parameters() == report.parameters_after < count
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(run(type(model).from_pretrained(tmp_path), batch), run(model, batch))
