"""Conversions that need no data: random tokens for whoever reads tokens, noise for whoever reads images."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, ViTConfig, ViTModel, Wav2Vec2Config, Wav2Vec2Model

from collab_compress import CalibrationError, Compression, compress
from collab_compress.calibration import calibration_batches


@pytest.fixture(scope="session")
def tokenizer():
    words = {"[PAD]": 0, "</s>": 1, "<s>": 2, "[UNK]": 3, **{f"w{number}": number for number in range(4, 61)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", eos_token="</s>", bos_token="<s>", unk_token="[UNK]"
    )


def test_synthetic_data_suffices(kin, build, tokenizer):
    model = build(kin)
    if kin in ("blip_vision_model", "detr", "table-transformer"):
        with pytest.raises(CalibrationError, match="does not say image_size and num_channels; pass batches"):
            compress(model, Compression(dk=7), "synthetic", tokenizer)
        return
    if kin in ("bert-cross", "trocr", "blip_text_model"):
        with pytest.raises(
            CalibrationError, match=r"(crossattention\.self|encoder_attn) saw no token .*encoder_hidden_states"
        ):
            compress(model, Compression(dk=7), "synthetic", tokenizer)
        return
    report = compress(model, Compression(dk=7, sweeps=5), "synthetic", tokenizer)
    assert report.drift.sequences == 24
    assert 0 < report.drift.relative_error < 2
    assert all(0 < module.data_error < 1 for module in report.modules)


def test_images_need_no_tokenizer_and_follow_the_seed(build):
    one, same, other = (calibration_batches("synthetic", build("vit"), seed=seed) for seed in (0, 0, 1))
    pixels = torch.cat([batch["pixel_values"] for batch in one])
    assert pixels.shape == (128, 3, 8, 8)
    assert pixels.mean().abs() < 0.1
    assert pixels.std() == pytest.approx(1, abs=0.05)
    assert pixels.unfold(2, 4, 4).mean(-1).std() > 0.5  # patches differ in their means too
    assert torch.equal(one[0]["pixel_values"], same[0]["pixel_values"])
    assert not torch.equal(one[0]["pixel_values"], other[0]["pixel_values"])


def test_images_may_be_oblong():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    model = ViTModel(ViTConfig(image_size=[8, 12], patch_size=4, num_channels=1, **sizes))
    batch = calibration_batches("synthetic", model, sequences=2)[0]
    assert batch["pixel_values"].shape == (2, 1, 8, 12)
    assert model(**batch)[0].isfinite().all()


def test_texts_are_not_for_image_models(build, tokenizer):
    with pytest.raises(CalibrationError, match="ViTModel reads pixel_values, not texts; pass batches"):
        calibration_batches(["a dog"], build("vit"), tokenizer)


def test_sound_needs_data():
    config = Wav2Vec2Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, conv_dim=(8,),
        conv_stride=(5,), conv_kernel=(10,), num_feat_extract_layers=1, num_conv_pos_embedding_groups=2,
        num_conv_pos_embeddings=4,
    )  # fmt: skip
    with pytest.raises(CalibrationError, match="Wav2Vec2Model reads input_values"):
        calibration_batches("synthetic", Wav2Vec2Model(config))


def test_an_unknown_image_size_is_asked_for():
    model = SimpleNamespace(main_input_name="pixel_values", config=SimpleNamespace(num_channels=3))
    with pytest.raises(
        CalibrationError, match="does not say image_size and num_channels; pass batches of pixel_values"
    ):
        calibration_batches("synthetic", model)
