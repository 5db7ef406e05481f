"""Conversions that need no data: random tokens for whoever reads tokens, noise for whoever reads images."""

import io
import wave
from types import SimpleNamespace

import pytest
import torch
from tiny_families import build, inputs
from transformers import (
    CLIPImageProcessorPil,
    CLIPProcessor,
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
    Wav2Vec2FeatureExtractor,
)

from collab_compress import CalibrationError, CalibrationOptions, Compression, Solver, compress
from collab_compress.calibration import calibration_batches
from collab_compress.calibration.batches import noted_batches
from collab_compress.calibration.gather import attention_masks


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
    assert report.drift.sequences == 2
    assert 0 < report.drift.relative_error < 2
    assert all(0 < module.data_error < 1 for module in report.modules)


def test_images_need_no_tokenizer_and_follow_the_seed():
    one, same, other = (calibration_batches("synthetic", build("vit"), seed=seed) for seed in (0, 0, 1))
    pixels = torch.cat([batch["pixel_values"] for batch in one])
    assert pixels.shape == (128, 3, 8, 8)
    assert pixels.mean().abs() < 0.1
    assert pixels.std() == pytest.approx(1, abs=0.05)
    assert pixels.unfold(2, 4, 4).mean(-1).std() > 0.5  # patches differ in their means too
    assert torch.equal(one[0]["pixel_values"], same[0]["pixel_values"])
    assert not torch.equal(one[0]["pixel_values"], other[0]["pixel_values"])


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


def test_padded_sound_is_left_out_of_the_moments():
    """A mask over samples also masks the positions that are computed from them."""
    model = build("wav2vec2")
    real = attention_masks(model, (), (), inputs("wav2vec2"))["encoder"].query
    assert real.sum(1).tolist() == model._get_feat_extract_output_lengths(torch.tensor([120, 90, 60])).tolist()


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


def test_an_unknown_image_size_is_asked_for():
    model = SimpleNamespace(main_input_name="pixel_values", config=SimpleNamespace(num_channels=3))
    with pytest.raises(
        CalibrationError, match="does not say image_size and num_channels; pass batches of pixel_values"
    ):
        calibration_batches("synthetic", model)


@pytest.fixture
def pictures(tmp_path):
    """Create a folder of images, and a file that is no image."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "pictures" / "cats"
    folder.mkdir(parents=True)
    for number in range(5):
        pixels = torch.randint(256, (20, 30, 3), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
        image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    (folder / "notes.txt").write_text("no image", encoding="utf-8")
    return folder.parent


@pytest.fixture
def sounds(tmp_path):
    """Create a folder of sounds of two lengths."""
    folder = tmp_path / "sounds"
    folder.mkdir()
    for number in range(4):
        samples = torch.randint(-9999, 9999, (400 + 100 * (number % 2),), dtype=torch.int16)
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, len(samples), "NONE", ""))
            file.writeframes(samples.numpy().tobytes())
    return folder


def saved_with(processor, model, path):
    """Return the model as loaded from a directory that holds its processor."""
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return type(model).from_pretrained(path)


def test_a_folder_of_images(pictures, tokenizer, tmp_path):
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    model = saved_with(processor, build("vit"), tmp_path / "vit")
    batches, notes, _ = noted_batches(pictures, model, None, sequences=3, length=None, seed=0)
    assert [batch["pixel_values"].shape for batch in batches] == [(3, 3, 8, 8)]
    assert notes == ["calibration uses 3 of 5 files, drawn at random"]
    assert compress(model, Compression(dk=7, solver=Solver(sweeps=1)), str(pictures)).drift.relative_error > 0
    clip = saved_with(CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=8), build("clip"), tmp_path / "clip")
    both = CLIPProcessor(CLIPImageProcessorPil(), tokenizer)
    (batch,) = calibration_batches(pictures, clip, both, length=9)
    shapes = {name: tuple(part.shape) for name, part in batch.items()}
    assert shapes == {"pixel_values": (5, 3, 8, 8), "input_ids": (5, 9), "attention_mask": (5, 9)}


def test_a_folder_of_sounds(sounds, tmp_path):
    extractor = Wav2Vec2FeatureExtractor(return_attention_mask=True)
    model = saved_with(extractor, build("wav2vec2"), tmp_path / "model")
    (batch,) = calibration_batches(sounds, model)
    assert batch["input_values"].shape == (4, 500)
    assert sorted(batch["attention_mask"].sum(1).tolist()) == [400, 400, 500, 500]
    with wave.open(str(sounds / "9.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 1, "NONE", ""))
        file.writeframes(b"\0\0")
    with pytest.raises(
        CalibrationError, match=r"9\.wav has 16 bits a sample and 8000 samples a second; expected 16 and"
    ):
        calibration_batches(sounds, model)


@pytest.mark.parametrize(
    ("family", "file"),
    [
        ("vit", '{"image_processor_type": "Evil", "auto_map": {"AutoImageProcessor": "evil.Evil"}}'),
        ("wav2vec2", '{"feature_extractor_type": "Evil", "auto_map": {"AutoFeatureExtractor": "evil.Evil"}}'),
        ("vit", "[1]"),
        ("vit", '{"image_processor_type": 3}'),
    ],
)
def test_code_of_a_processor_is_not_run(family, file, pictures, sounds, tmp_path, monkeypatch):
    build(family).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text(file)
    (tmp_path / "model" / "evil.py").write_text("open('executed', 'w')\nclass Evil: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    model = type(build(family)).from_pretrained(tmp_path / "model")
    with pytest.raises(CalibrationError, match="has no processor at"):
        calibration_batches(pictures if family == "vit" else sounds, model)
    assert not (tmp_path / "executed").exists()


def test_damaged_files_of_a_folder(pictures, sounds, tmp_path, monkeypatch):
    model = saved_with(Wav2Vec2FeatureExtractor(), build("wav2vec2"), tmp_path / "wav2vec2")
    content = (sounds / "0.wav").read_bytes()
    (sounds / "0.wav").write_bytes(content[:-1])
    with pytest.raises(CalibrationError, match=r"0\.wav ends in the middle of a sample"):
        calibration_batches(sounds, model)
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 100)
    model = saved_with(ViTImageProcessorPil(), build("vit"), tmp_path / "vit")
    with pytest.raises(CalibrationError, match=r"cannot read the image .*decompression bomb"):
        calibration_batches(pictures, model)


def test_folders_that_cannot_be_read_are_named(pictures, sounds):
    with pytest.raises(CalibrationError, match="holds no images for ViTModel; expected files that end in"):
        calibration_batches(sounds, build("vit"))
    model = saved_with(ViTImageProcessorPil(), build("vit"), pictures.parent / "vit")
    (pictures / "broken.png").write_bytes(b"no image")
    with pytest.raises(CalibrationError, match=r"cannot read the image .*broken\.png"):
        calibration_batches(pictures, model)
    with pytest.raises(CalibrationError, match=r"ViTModel has no processor at '' .*; save it there"):
        calibration_batches(pictures, build("vit"))
