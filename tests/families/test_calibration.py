"""Conversions on random tokens for whoever reads tokens alone, and on batches for whoever reads more."""

import pytest
from tiny_families import build, inputs

from collab_compress import CalibrationError, CalibrationOptions, Compression, Solver, compress
from collab_compress.analysis import plan
from collab_compress.calibration.source import reads_tokens_alone

LACKS_STATES = ("bert-cross", "musicgen_decoder")


@pytest.mark.structures
def test_random_tokens_suffice_for_models_of_tokens_alone(kin, tokenizer):
    model = build(kin)
    compression, options = Compression(dk=7, solver=Solver(sweeps=3, refit=False)), CalibrationOptions(sequences=16)
    message = "pass batches of your processor"
    if kin in LACKS_STATES:
        message = r"(crossattention\.self|encoder_attn) saw no token .*encoder_hidden_states"
    if kin in LACKS_STATES or not reads_tokens_alone(model):
        with pytest.raises(CalibrationError, match=message):
            compress(model, compression, "synthetic", tokenizer, calibration_options=options)
        return
    report = compress(model, compression, "synthetic", tokenizer, calibration_options=options)
    assert report.output_error.sequences == 2
    assert 0 < report.output_error.relative_error < 2
    assert all(0 < module.data_error < 1 for module in report.of("dk"))


@pytest.mark.parametrize("widths", [{"keep": 0.5}, {"dk": 12}, {"dv": 12}, {"dff": 16}, {"layers": 1}], ids=str)
def test_nothing_is_made_up_for_a_model_of_images(widths):
    model = build("vit")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for refused in (lambda: compress(model, Compression(**widths)), lambda: plan(model)):
        with pytest.raises(CalibrationError, match="ViTModel reads pixel_values; pass batches of your processor"):
            refused()
    assert all((tensor == before[name]).all() for name, tensor in model.state_dict().items())
    assert compress(model, Compression(**widths), [inputs("vit", seed) for seed in range(8)]).output_error is not None
