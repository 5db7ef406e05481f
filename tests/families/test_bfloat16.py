"""Products in bfloat16 while layers are converted: families can, or are refused in one line."""

import pytest
import torch
from tiny_families import build, inputs

from collab_compress import Compression, Solver, UnsupportedModelError, compress
from collab_compress.conversion import sequential

NOT_REFITTED = "segformer"

pytestmark = pytest.mark.usefixtures("set_bfloat16")


@pytest.mark.structures
def test_widths_are_converted(kin, monkeypatch):
    if kin == NOT_REFITTED:
        return
    monkeypatch.setattr(sequential, "HEAD_WEIGHT_SEQUENCES", 2)  # the others run in bfloat16
    model, data = build(kin), [inputs(kin, seed) for seed in range(4)]
    dtypes = {parameter.dtype for parameter in model.parameters()}
    compress(model, Compression(dk=8, dv=9, dff=16, solver=Solver(sweeps=1, bf16=True)), data)
    assert {parameter.dtype for parameter in model.parameters()} == dtypes
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


@pytest.mark.parametrize(("name", "widths"), [("xmod", {"dk": 8}), ("deberta", {"dff": 16})])
def test_models_that_cannot_are_refused(name, widths):
    settings = Compression(**widths, solver=Solver(bf16=True))
    with pytest.raises(UnsupportedModelError, match=r"cannot multiply in bfloat16 \(.*\); leave out bf16"):
        compress(build(name), settings, [inputs(name), inputs(name)])


def test_a_model_in_half_precision_is_converted_as_before():
    model, plain = (build("bert").to(torch.bfloat16) for _ in range(2))
    data = [inputs("bert", seed) for seed in range(4)]
    report = compress(model, Compression(dff=16, solver=Solver(bf16=True)), data)
    assert any(warning.startswith("bf16 changed nothing") for warning in report.warnings)
    compress(plain, Compression(dff=16), data)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_without_data_the_report_says_that_it_changed_nothing():
    settings, data = Compression(dk=8, solver=Solver(bf16=True)), [inputs("bert"), inputs("bert")]
    reports = [compress(build("bert"), settings, calibration) for calibration in (None, data)]
    told = [any(warning.startswith("bf16 changed nothing") for warning in report.warnings) for report in reports]
    assert told == [True, False]


def test_where_it_is_only_emulated_float32_goes_on(set_bfloat16):
    set_bfloat16(False)
    data = [inputs("bert", seed) for seed in range(4)]
    models = [build("bert") for _ in range(2)]
    reports = [
        compress(model, Compression(dff=16, solver=Solver(bf16=bf16)), data)
        for model, bf16 in zip(models, (True, False), strict=True)
    ]
    assert "bf16 changed nothing: this processor only emulates bfloat16" in reports[0].warnings[0]
    assert not any("bf16" in warning for warning in reports[1].warnings)
    torch.testing.assert_close(*(model.state_dict() for model in models), rtol=0, atol=0)
