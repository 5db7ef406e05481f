"""Models made of models: two put together, or two towers; each part is described by its own family."""

import copy

import pytest
import torch
import transformers
from tiny_families import TINIES, build, inputs, run
from transformers import (
    BertConfig,
    CLIPConfig,
    CLIPModel,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    EsmConfig,
    EsmModel,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    ViTConfig,
    Wav2Vec2Config,
)

from collab_compress import Compression, Solver, compress, expand, read_factors
from collab_compress.architectures import find_attention, find_dense_attention
from collab_compress.errors import UnsupportedModelError
from collab_compress.heads import Recorder

ENCODERS = {
    "EncoderDecoder": ("bert", BertConfig),
    "VisionEncoderDecoder": ("vit", ViTConfig),
    "SpeechEncoderDecoder": ("wav2vec2", Wav2Vec2Config),
}
KINDS = ("encoder",) * 2 + ("decoder", "cross") * 2


@pytest.fixture(
    params=["EncoderDecoder", "VisionEncoderDecoder", pytest.param("SpeechEncoderDecoder", marks=pytest.mark.slow)]
)
def joined(request):
    """Return a model composed of two, and a batch for it."""
    name, encoder = ENCODERS[request.param]
    config = getattr(transformers, f"{request.param}Config").from_encoder_decoder_configs(
        encoder(**TINIES[name].settings), BertConfig(**TINIES["bert-cross"].settings)
    )
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 0, 1
    torch.manual_seed(0)
    model = getattr(transformers, f"{request.param}Model")(config=config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(("query.bias", "q_proj.bias")):
                parameter.normal_(std=0.5)
    target = {name: part for name, part in inputs("marian").items() if name.startswith("decoder")}
    return model, inputs(name) | target


def test_one_part_or_both_are_converted(joined, tmp_path, load_cleanly):
    dense, batch = joined
    assert tuple(site.kind for site in find_dense_attention(dense)) == KINDS
    part = copy.deepcopy(dense)
    compress(part, Compression(dk=9, modules="encoder.*", solver=Solver(sweeps=3)), calibration=[batch, batch])
    assert len(read_factors(part)) == 2
    with Recorder(part) as recorder:
        run(part, batch)
        assert len(recorder.take()) == len(KINDS)
    model = copy.deepcopy(dense)
    compress(model, Compression(dk=24, dv=24), calibration=None)
    torch.testing.assert_close(run(model, batch), run(dense, batch), atol=5e-5, rtol=1e-4)
    source = {name: part for name, part in batch.items() if not name.startswith("decoder")}
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(**source, **options), dense.generate(**source, **options))
    expand(model)
    assert model.state_dict().keys() == dense.state_dict().keys()
    compress(model, Compression(dk=9, dv=12, solver=Solver(sweeps=3)), calibration=[batch, batch])
    model.save_pretrained(tmp_path)
    loaded = load_cleanly(type(model), tmp_path)
    assert len(read_factors(loaded)) == len(KINDS)
    assert torch.equal(run(loaded, batch), run(model, batch))


def llava():
    """Return a model whose images are read without a rotary embedding and whose text with one, and batches for it."""
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **TINIES["clip"].settings["vision_config"]},
        text_config=LlamaConfig(**TINIES["llama"].settings),
        image_token_index=60,
        vision_feature_layer=-1,
    )
    batches = [images_and_texts(seed) for seed in range(4)]
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config).eval(), batches


def images_and_texts(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 50, (2, 12), generator=generator)
    ids[:, 1:5] = 60  # one for each patch
    return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}


def rotary_encoder():
    """Return an encoder with a rotary embedding and a decoder without, put together, and batches for them."""
    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        EsmConfig(**TINIES["esm"].settings), BertConfig(**TINIES["bert-cross"].settings)
    )
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 0, 1
    torch.manual_seed(0)
    return EncoderDecoderModel(config=config).eval(), [inputs("marian", seed) for seed in range(4)]


@pytest.mark.parametrize("make", [llava, rotary_encoder])
def test_keep_narrows_scores_except_those_of_rotary_parts(make):
    model, batches = make()
    rotary = {site.name for site in find_attention(model) if site.family.rotary}
    report = compress(model, Compression(keep=0.6, solver=Solver(sweeps=2)), batches)
    names = {values.name for values in report.of("dv")}
    assert rotary < names
    assert {module.name for module in report.of("dk")} == names - rotary
    assert f"dk {min(module.width for module in report.of('dk'))}" in report.choice


def test_a_part_is_converted_whatever_the_other_does_to_queries():
    text = {"model_type": "gemma3_text", "head_dim": 8, **TINIES["llama"].settings}
    image = {"model_type": "siglip_vision_model", **TINIES["clip"].settings["vision_config"]}
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=image, mm_tokens_per_image=4))
    with pytest.raises(UnsupportedModelError, match=r"language_model.*normalised"):
        compress(model, Compression(dk=9), calibration=None)
    compress(model, Compression(dk=9, modules="*vision*"), calibration=None)
    assert all("vision" in name for name in read_factors(model))


def test_a_part_without_the_rotary_embedding_of_its_family_is_refused_beside_one_with_it():
    model, _ = rotary_encoder()
    model.decoder = EsmModel(EsmConfig(**TINIES["esm"].settings | {"position_embedding_type": "absolute"}))
    with pytest.raises(UnsupportedModelError, match="EsmModel has no rotary embedding"):
        compress(model, Compression(dk=24), calibration=None)
    compress(model, Compression(dk=24, modules="encoder.*"), calibration=None)


def test_towers_may_differ_in_width(tmp_path):
    settings = copy.deepcopy(TINIES["clip"].settings)
    settings["vision_config"] |= {"hidden_size": 32, "num_attention_heads": 2}
    torch.manual_seed(0)
    model, batch = CLIPModel(CLIPConfig(**settings)).eval(), inputs("clip")
    assert [(site.heads, site.head_width) for site in find_attention(model)] == [(3, 8), (2, 16)]
    dense = copy.deepcopy(model)
    compress(model, Compression(dk=24, modules="text_model.*"), calibration=None)
    compress(model, Compression(dk=32, dv=32, modules="vision_model.*"), calibration=None)
    torch.testing.assert_close(run(model, batch), run(dense, batch), atol=2e-5, rtol=1e-4)
    model.save_pretrained(tmp_path)
    assert torch.equal(run(CLIPModel.from_pretrained(tmp_path), batch), run(model, batch))


def test_each_tower_has_masks_of_its_own():
    """The mask of five tokens does not mark any of the five patches as padding."""
    model, batch = build("clip"), inputs("clip")
    batch = {name: part[:, :5] if part.dim() == 2 else part for name, part in batch.items()}
    batch["attention_mask"][0, 3:] = 0
    with Recorder(model) as recorder:
        run(model, batch)
        real = {reading.site.kind: reading.masks.query for reading in recorder.take()}
    assert real["encoder"] is None
    assert real["decoder"].sum() < 15


def test_a_tower_without_description_is_named_and_can_be_left_out():
    audio = {"patch_embeds_hidden_size": 8, "depths": [1, 1], "num_attention_heads": [2, 2], "hidden_size": 16}
    audio |= {"spec_size": 64, "num_mel_bins": 16, "window_size": 2}
    text = TINIES["clap_text_model"].settings
    config = transformers.ClapConfig(text_config=text, audio_config=audio, projection_dim=8)
    model = transformers.ClapModel(config)
    with pytest.raises(
        UnsupportedModelError,
        match=r"audio_model\..*: model type 'clap_audio_model' has no description; leave it out .*modules",
    ):
        compress(model, Compression(dk=9), calibration=None)
    compress(model, Compression(dk=9, modules="text_model.*"), calibration=None)
    assert len(read_factors(model)) == 2
