"""Conversions that need no data: random tokens for whoever reads tokens, noise for whoever reads images."""

import pytest
import torch
from tiny_families import build
from transformers import ViTConfig, ViTModel

from collab_compress import CalibrationError, CalibrationOptions, Compression, Solver, compress
from collab_compress.analysis import plan
from collab_compress.calibration import calibration_batches


@pytest.mark.structures
def test_synthetic_data_suffices(kin, tokenizer):
    model = build(kin)
    if kin in ("detr", "segformer"):
        with pytest.raises(CalibrationError, match="does not say image_size and num_channels; pass batches"):
            compress(model, Compression(dk=7), "synthetic", tokenizer)
        return
    if kin in ("bert-cross", "musicgen_decoder"):
        with pytest.raises(
            CalibrationError, match=r"(crossattention\.self|encoder_attn) saw no token .*encoder_hidden_states"
        ):
            compress(model, Compression(dk=7), "synthetic", tokenizer)
        return
    compression, options = Compression(dk=7, solver=Solver(sweeps=3, refit=False)), CalibrationOptions(sequences=16)
    report = compress(model, compression, "synthetic", tokenizer, calibration_options=options)
    assert report.output_error.sequences == 2
    assert 0 < report.output_error.relative_error < 2
    assert all(0 < module.data_error < 1 for module in report.of("dk"))


@pytest.mark.parametrize("widths", [{"keep": 0.5}, {"dff": 16}, {"layers": 1}], ids=str)
def test_noise_chooses_nothing_unless_it_is_asked_for(widths, caplog):
    model = build("vit")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for refused in (lambda: compress(model, Compression(**widths)), lambda: plan(model)):
        with pytest.raises(CalibrationError, match=r"ViTModel reads pixel_values, .*'synthetic' for noise"):
            refused()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    options = CalibrationOptions(sequences=16)
    compress(model, Compression(**widths), "synthetic", calibration_options=options)
    assert "chosen on noise alone, after which a model may be useless" in caplog.text


def test_more_noise_than_fits_is_refused():
    with pytest.raises(CalibrationError, match=r"1000000000 images or sounds .* numbers; at most 1e.09 fit"):
        calibration_batches("synthetic", build("vit"), sequences=10**9)


def test_images_may_be_oblong():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    model = ViTModel(ViTConfig(image_size=[8, 12], patch_size=4, num_channels=1, **sizes))
    batch = calibration_batches("synthetic", model, sequences=2)[0]
    assert batch["pixel_values"].shape == (2, 1, 8, 12)
    assert model(**batch)[0].isfinite().all()


@pytest.mark.parametrize("calibration", [["a dog"], "a dog ran " * 30])
def test_texts_are_not_for_image_models(calibration, tokenizer):
    with pytest.raises(CalibrationError, match="ViTModel reads pixel_values, not texts; pass batches"):
        calibration_batches(calibration, build("vit"), tokenizer)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("vit", {"pixel_values": (128, 3, 8, 8)}),
        ("wav2vec2", {"input_values": (128, 64 * 10)}),  # 64 positions of 5 · 2 samples
        ("audio-spectrogram-transformer", {"input_values": (128, 12, 8)}),
        ("whisper", {"input_features": (128, 8, 24), "decoder_input_ids": (128, 64)}),
        ("speech_to_text", {"input_features": (128, 128, 8), "decoder_input_ids": (128, 64)}),
        ("videomae", {"pixel_values": (128, 4, 3, 8, 8)}),
        ("clip", {"pixel_values": (128, 3, 8, 8), "input_ids": (128, 64)}),
        ("siglip2", {"pixel_values": (128, 9, 48), "spatial_shapes": (128, 2), "input_ids": (128, 64)}),
    ],
)
def test_noise_has_the_shape_of_what_processors_make(name, shapes, tokenizer):
    model = build(name)
    batches = calibration_batches("synthetic", model, tokenizer)
    noise = {part: torch.cat([batch[part] for batch in batches]) for part in batches[0]}
    assert shapes.items() <= {part: tuple(tensor.shape) for part, tensor in noise.items()}.items()
    with torch.no_grad():
        assert model(**batches[0])[0].isfinite().all()
    for part, tensor in noise.items():
        if tensor.is_floating_point():
            assert tensor.mean().abs() < 0.1
            assert tensor.std() == pytest.approx(
                1 if tensor.dim() == 2 or part == "pixel_values" else 0.5, rel=0.1
            ) or (name == "speech_to_text")
    same, other = (calibration_batches("synthetic", model, tokenizer, seed=seed) for seed in (0, 1))
    for part in batches[0]:
        assert torch.equal(same[0][part], batches[0][part])
        if batches[0][part].is_floating_point():
            assert not torch.equal(other[0][part], batches[0][part])


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("clip", "CLIPModel reads tokens beside pixel_values, and there is no tokenizer; save its processor beside"),
        ("patchtst", "PatchTSTModel reads past_values, not texts; pass batches of them"),
    ],
)
def test_what_random_inputs_lack_must_be_passed(family, message):
    with pytest.raises(CalibrationError, match=message):
        calibration_batches("synthetic", build(family))
