"""Costs against the paper's Table 1 and against counting; reports as text and as tables."""

import pytest
import torch

from collab_compress import Compression, compress
from collab_compress.attention import SharedConfig
from collab_compress.conversion.cost import dense_macs


def shared(heads, head_width, dk, content, reads=None):
    return SharedConfig(heads, head_width, dk, content, reads or dk)


@pytest.mark.parametrize("tokens", [1, 128, 4096])
def test_heads_as_wide_as_dense_ones_cost_less_at_any_length(tokens):
    """With a mixing weight for each channel that they read, which only few tokens feel."""
    dense = dense_macs((96, 96), (96, 96), tokens)
    assert shared(6, 16, 48, True, reads=15).macs((96, 96), tokens) < dense
    assert (shared(6, 16, 48, False).macs((96, 96), tokens) < dense) == (tokens == 1)  # which read all channels


def test_a_report_prints_itself_and_becomes_a_table(make_tiny):
    tokens = torch.randint(3, 61, (4, 9), generator=torch.Generator().manual_seed(0))
    report = compress(make_tiny("bert"), Compression(dk=8, dv=12, dff=16), [{"input_ids": tokens}] * 4)
    frame = report.to_frame()
    assert (
        list(zip(frame["part"], frame["width"], strict=True))
        == [("dk", 8)] * 2 + [("dv", 12)] * 2 + [("dff", 16)] * 2
    )
    assert list(frame["macs_after"][:2]) == [module.macs_after for module in report.of("dk")]
    words = str(report)
    assert f"{report.parameters_after:,} parameters" in words
    assert "dk=8 in 2 modules\ndv=12 in 2 modules\ndff=16 in 2 modules" in words
    assert all(warning in words for warning in report.warnings)
