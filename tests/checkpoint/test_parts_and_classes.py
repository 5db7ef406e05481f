"""Parts of converted models saved by themselves, and checkpoints loaded as other classes than those saved."""

import copy
import json

import pytest
import torch
from forms import randomise_
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    CLIPConfig,
    CLIPModel,
    CLIPTextModel,
    CLIPVisionConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GPTNeoXConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MarianModel,
)

from collab_compress import (
    CheckpointError,
    Compression,
    FromScratch,
    Solver,
    compress,
    from_config,
    mix_heads_,
    prune_heads_,
)
from collab_compress.checkpoint import edits_of
from collab_compress.checkpoint.quantizer import GUARD

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "initializer_range": 0.4,
}
TEXT = {**SIZES, "vocab_size": 61, "max_position_embeddings": 40}
IMAGE = {**SIZES, "image_size": 8, "patch_size": 4}
IDS = torch.randint(5, 60, (2, 7), generator=torch.Generator().manual_seed(0))


def output(model, **inputs):
    with torch.no_grad():
        return model.eval()(**inputs)[0]


def clip():
    return CLIPModel(CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=16))


def encoder_decoder():
    decoder = BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    return EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**TEXT), decoder))


def llava_config(text_config):
    return LlavaConfig(vision_config=CLIPVisionConfig(**IMAGE), text_config=text_config, image_token_index=60)


def llava():
    return LlavaForConditionalGeneration(llava_config(LlamaConfig(**TEXT)))


def mixed(model):
    mix_heads_(model)
    randomise_(model)


def pruned(model):
    first, last = "encoder.encoder.layer.0.attention.self", "decoder.bert.encoder.layer.1.attention.self"
    prune_heads_(model, {first: [1], last: [0]})


EDITS = {
    "shared": lambda model: compress(model, Compression(dk=16, solver=Solver(sweeps=3)), calibration=None),
    "narrow": lambda model: compress(model, Compression(dk=16, dv=12, solver=Solver(sweeps=3)), calibration=None),
    "alphas": mixed,
    "pruned": pruned,
}


@pytest.fixture
def shared():
    torch.manual_seed(0)
    return EDITS["shared"]


@pytest.mark.parametrize("edit", sorted(EDITS))
@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_parts_of_every_edit_are_saved_by_themselves(edit, part, tmp_path, load_cleanly):
    torch.manual_seed(0)
    model = encoder_decoder()
    EDITS[edit](model)
    inner = getattr(model, part)
    inner.save_pretrained(tmp_path)
    loaded = load_cleanly(type(inner), tmp_path)
    assert edits_of(loaded) == edits_of(inner) != []
    assert torch.equal(output(loaded, input_ids=IDS), output(inner, input_ids=IDS))


@pytest.mark.parametrize("edit", sorted(EDITS))
def test_an_edited_body_under_another_head_is_saved(edit, batch, tmp_path, load_cleanly):
    torch.manual_seed(0)
    model = encoder_decoder()
    EDITS[edit](model)
    head = BertForSequenceClassification(BertConfig(**TEXT)).eval()
    head.bert = model.encoder
    head.save_pretrained(tmp_path)
    assert edits_of(head) == edits_of(model.encoder)
    loaded = load_cleanly(BertForSequenceClassification, tmp_path)
    assert torch.equal(output(loaded, **batch), output(head, **batch))
    assert not hasattr(head.config, "quantization_config")


def test_a_tower_that_was_edited_by_itself_is_described_in_the_whole(shared, tmp_path):
    model = clip()
    shared(model.text_model)
    model.save_pretrained(tmp_path)
    expected = output(model.text_model, input_ids=IDS)
    assert torch.equal(output(CLIPTextModel.from_pretrained(tmp_path), input_ids=IDS), expected)
    assert torch.equal(output(CLIPModel.from_pretrained(tmp_path).text_model, input_ids=IDS), expected)


def test_each_stored_config_that_describes_edits_has_the_guard(shared, tmp_path, stock_python):
    model = clip()
    compress(model, Compression(dk=16, modules="text_model.*"), calibration=None)
    model.save_pretrained(tmp_path)
    CLIPModel.from_pretrained(tmp_path).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    configs = (stored, stored["text_config"], stored["vision_config"])
    guards = [config.get("transformers_weights") for config in configs]
    assert guards == [GUARD, GUARD, None]
    done = stock_python(
        "from transformers import CLIPTextModel; CLIPTextModel.from_pretrained(sys.argv[1])", tmp_path
    )
    assert GUARD in done.stderr


def test_fewer_layers(make_tiny, batch, tmp_path):
    model = make_tiny("bert")
    compress(model, Compression(dk=5), calibration=None)
    model.save_pretrained(tmp_path)
    loaded = BertModel.from_pretrained(tmp_path, num_hidden_layers=1)
    del model.encoder.layer[1]
    assert torch.equal(output(loaded, **batch), output(model, **batch))
    assert edits_of(loaded) == edits_of(model)


@pytest.mark.parametrize("modules", ["*", "*vision*"])
def test_models_of_images_and_text(modules, tmp_path, load_cleanly):
    torch.manual_seed(0)
    model = llava()
    compress(model, Compression(dk=16, modules=modules, solver=Solver(sweeps=3)), calibration=None)
    model.config.get_text_config().update({"num_key_value_heads": 3})
    model.save_pretrained(tmp_path)
    loaded = load_cleanly(type(model), tmp_path)
    assert torch.equal(output(loaded, input_ids=IDS), output(model, input_ids=IDS))
    assert edits_of(loaded) == edits_of(model)
    text = model.base_model.get_decoder()
    text.save_pretrained(tmp_path / "text")
    loaded = load_cleanly(type(text), tmp_path / "text")
    assert torch.equal(output(loaded, input_ids=IDS), output(text, input_ids=IDS))
    assert len(edits_of(loaded)) == (modules == "*")


@pytest.mark.parametrize(
    "text", [LlamaConfig(**TEXT, num_key_value_heads=3), GPTNeoXConfig(**TEXT)], ids=["llama", "gpt_neox"]
)
def test_forms_mixed_from_scratch_are_told_apart(text, tmp_path, load_cleanly):
    model = from_config(llava_config(text), FromScratch(dk=16), LlavaForConditionalGeneration)
    assert {edit.kind for edit in edits_of(model)} == {"collaborative", "rotary"}
    model.save_pretrained(tmp_path)
    loaded = load_cleanly(type(model), tmp_path)
    assert torch.equal(output(loaded, input_ids=IDS), output(model, input_ids=IDS))


def test_edits_without_their_weights_are_refused(make_tiny, tmp_path):
    model = make_tiny("bert")
    compress(model, Compression(dk=5), calibration=None)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = "encoder.layer.1.attention.self.qkv.weight"
    save_file({name: tensor for name, tensor in weights.items() if name != lost}, tmp_path / "model.safetensors")
    advice = "its weights are not those that config.json was saved with, so save the model again"
    with pytest.raises(CheckpointError, match=rf"converted attention, but holds no {lost}; {advice}"):
        BertModel.from_pretrained(tmp_path)
    make_tiny("bert").save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=advice):
        BertModel.from_pretrained(tmp_path)


def test_attention_whose_edits_have_other_paths_is_never_left_random(shared, make_tiny, tmp_path):
    model = make_tiny("marian")
    shared(model)
    model.encoder.save_pretrained(tmp_path)
    message = r"MarianModel: .* but holds no decoder\.layers\.0.*; load it as MarianEncoder"
    with pytest.raises(CheckpointError, match=message):
        MarianModel.from_pretrained(tmp_path)


def test_a_copy_has_edits_of_its_own(make_tiny):
    model = make_tiny("bert")
    compress(model, Compression(dk=5), calibration=None)
    other = copy.deepcopy(model)
    mix_heads_(other)
    assert [edit.kind for edit in edits_of(model)] == ["collaborative"]
    assert [edit.kind for edit in edits_of(other)] == ["collaborative", "alphas"]
