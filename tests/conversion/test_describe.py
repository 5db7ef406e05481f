"""What of a model is converted, and reports that print themselves and become tables."""

import torch

from collab_compress import Compression, compress, describe, expand, is_converted


def test_a_model_says_what_of_it_is_converted(make_tiny):
    model = make_tiny("bert")
    assert describe(model) == {}
    assert not is_converted(model)
    compress(model, Compression(dk=8, modules="*layer.0*"), calibration=None)
    compress(model, Compression(dv=12), calibration=None)
    assert describe(model) == {
        "encoder.layer.0.attention.self": "shared attention, dk=8; narrow values, dv=12",
        "encoder.layer.1.attention.self": "narrow values, dv=12",
    }
    assert is_converted(model)
    expand(model)
    assert not is_converted(model)


def test_a_report_prints_itself_and_becomes_a_table(make_tiny):
    tokens = torch.randint(3, 61, (4, 9), generator=torch.Generator().manual_seed(0))
    report = compress(make_tiny("bert"), Compression(dk=8, dv=12, dff=16), [{"input_ids": tokens}] * 4)
    frame = report.to_frame()
    assert (
        list(zip(frame["part"], frame["width"], strict=True))
        == [("dk", 8)] * 2 + [("dv", 12)] * 2 + [("dff", 16)] * 2
    )
    assert list(frame["macs_after"][:2]) == [module.macs_after for module in report.modules]
    words = str(report)
    assert f"{report.parameters_after:,} parameters" in words
    assert "dk=8 in 2 modules\ndv=12 in 2 modules\ndff=16 in 2 modules" in words
    assert all(warning in words for warning in report.warnings)
