"""Families without a description: blocks, layers and the vocabulary of any model with numbered layers."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from tiny_families import NUMBERED, TINIES, build, inputs, numbered_layers, run
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from collab_compress import (
    CalibrationError,
    Compression,
    CompressionError,
    UnsupportedModelError,
    compress,
    trim_vocabulary_,
)
from collab_compress.analysis import plan
from collab_compress.architectures import FAMILIES
from collab_compress.calibration.gather import batch_masks
from collab_compress.calibration.stacks import find_stacks
from collab_compress.conversion.inventory import Inventory, find_feed_forward
from collab_compress.conversion.residual import _is_linear
from collab_compress.heads import HeadMask, Recorder

NO_WIDTH = {"bloom", "swin"}  # of blocks, in the config: four times the model's
NARROWED = sorted(NUMBERED.keys() - NO_WIDTH)
UNLIKE = {"recurrent_gemma"}  # every third layer is another
TEXTS = sorted(name for name, tiny in NUMBERED.items() if "vocab_size" in tiny.settings)


def data(name, count=4):
    return [inputs(name, seed) for seed in range(count)]


def assert_reloads(model, batch, folder):
    model.save_pretrained(folder)
    assert "quantization_config" not in (folder / "config.json").read_text()
    loaded, problems = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(problems.values())
    torch.testing.assert_close(run(loaded.eval(), batch), run(model, batch), rtol=0, atol=1e-6)


def test_they_have_no_description():
    assert not NUMBERED.keys() & FAMILIES.keys()


@pytest.mark.parametrize("name", NARROWED)
def test_a_narrower_model_is_a_stock_model(name, tmp_path):
    model, batches = build(name), data(name)
    layers, width = numbered_layers(model, batches[0]), find_feed_forward(model, batches[0])[0].width
    assert width == 32
    report = compress(model, Compression(dff=16), batches)
    assert len(report.of("dff")) == len(report.parts) == len(layers)
    assert {part.width for part in report.parts} == {16}
    saved = report.parameters_before - report.parameters_after
    assert saved == sum(part.parameters_before - part.parameters_after for part in report.parts) > 0
    assert len(report.refits) >= len(layers)
    assert_reloads(model, batches[0], tmp_path)


@pytest.mark.parametrize("name", NARROWED)
def test_more_neurons_lose_less_and_all_lose_nothing(name):
    dense, batches = build(name), data(name, 32 if name == "led" else 8)  # few of LED's tokens are no padding
    errors = []
    for dff in (2, 16, 30, 32):
        model = copy.deepcopy(dense)
        errors.append(compress(model, Compression(dff=dff), batches).output_error.relative_error)
    torch.testing.assert_close(run(model, batches[0]), run(dense, batches[0]), rtol=1e-4, atol=1e-4)
    assert errors[0] > errors[1] > errors[2] > errors[3]


@pytest.mark.parametrize("name", sorted(NUMBERED.keys() - UNLIKE))
def test_a_shallower_model_is_a_stock_model(name, tmp_path):
    model, batches = build(name), data(name)
    stacks = find_stacks(model, batches[0])
    report = compress(model, Compression(layers=1), batches)
    assert len(report.removed_layers) == len(stacks)
    assert {len(stack.layers) for stack in find_stacks(model, batches[0])} == {1}
    assert report.refits
    assert report.output_error.relative_error < 1
    assert_reloads(model, batches[0], tmp_path)


def test_layers_and_neurons_go_together(tmp_path):
    model, batches = build("gptj"), data("gptj")
    report = compress(model, Compression(layers=1, dff=16), batches)
    assert [part.name for part in report.parts] == ["h.0.mlp.fc_out"]
    assert_reloads(model, batches[0], tmp_path)


@pytest.mark.parametrize("name", ["convbert", "gpt_bigcode", "xlnet", "internvl_vision"])
def test_keep_spends_its_budget_on_neurons_alone(name, tmp_path):
    model, batches = build(name), data(name)
    report = compress(model, calibration=batches)  # half by default
    assert {part.width for part in report.parts} == {16}
    assert report.choice.startswith("Kept 50% of the operations of feed-forward blocks at ")
    assert f"attention modules stay as they are: {'layer' if name == 'xlnet' else ''}" in report.choice
    assert f"model type {name!r} has no description" in report.choice
    assert_reloads(model, batches[0], tmp_path)


def test_a_plan_is_of_neurons_alone():
    model, batches = build("gptj"), data("gptj")
    result = plan(model, batches, shares=(1 / 2,))
    assert [(row.part, row.width) for row in result.rows] == [("dff", 16)]
    assert all("'gptj' has no description" in result.left_out[part] for part in ("dk", "dv"))
    assert " tokens, without attention) are those of the whole model." in str(result)


@pytest.mark.parametrize("name", ["big_bird", "gptj", "recurrent_gemma", "internvl_vision"])
def test_all_that_acts_on_heads_is_refused(name):
    model, batches = build(name), data(name)
    expected = run(model, batches[0])
    for call in (
        lambda: compress(model, Compression(dk=8), batches),
        lambda: compress(model, Compression(dv=8, dff=16), batches),
        lambda: compress(model, Compression(dff=16, modules="*.0.*"), batches),
        lambda: HeadMask(model),
        lambda: Recorder(model),
    ):
        with pytest.raises(UnsupportedModelError) as error:
            call()
        assert f"model type {name!r} has no description; its first attention module is " in str(error.value)
        assert "feed-forward blocks (dff), layers and the vocabulary need none" in str(error.value)
    assert torch.equal(run(model, batches[0]), expected)


def test_what_cannot_be_right_is_refused():
    for name, compression, message in (
        ("bloom", Compression(dff=16), "no attribute of BloomConfig sets the width of all 2 feed-forward blocks"),
        (
            "bloom",
            Compression(keep=0.5),
            "has nothing whose width keep could choose .*no description; feed-forward blocks",
        ),
        ("swin", Compression(dff=16), "no attribute of SwinConfig"),
        ("recurrent_gemma", Compression(layers=2), "layers.* are unlike the others|would stay"),
    ):
        model = build(name)
        with pytest.raises(UnsupportedModelError, match=message):
            compress(model, compression, data(name))
    with pytest.raises(CompressionError, match="the deepest stack of BloomModel has 2; pass fewer"):
        compress(build("bloom"), Compression(layers=2), data("bloom"))


def test_layers_that_pass_on_two_streams_are_refused():
    """LUKE's pass on tokens and entities; without entities they pass on hidden states alone."""
    model = build("luke")
    batches = [
        batch
        | {"entity_ids": batch["input_ids"][:, :3] % 10, "entity_position_ids": batch["input_ids"][:, :3, None] % 9}
        for batch in data("luke")
    ]
    with pytest.raises(UnsupportedModelError, match=r"layer\.0 of LukeModel passes on more than hidden states"):
        compress(model, Compression(dff=16), batches)


def test_models_without_a_list_of_layers_are_refused():
    """SqueezeBERT's layers are convolutions; XLM has one list of attention modules and one of blocks."""
    squeezed = TINIES["bert"].settings | {"embedding_size": 24, **{f"{part}_groups": 1 for part in "qkv"}}
    squeezed |= dict.fromkeys(("post_attention_groups", "intermediate_groups", "output_groups"), 1)
    model = transformers.SqueezeBertModel(transformers.SqueezeBertConfig(**squeezed)).eval()
    for compression in (Compression(dff=16), Compression(layers=1)):
        with pytest.raises(UnsupportedModelError, match="SqueezeBertModel has no list of numbered layers"):
            compress(model, compression, data("bloom"))
    model = transformers.XLMModel(transformers.XLMConfig(vocab_size=61, emb_dim=24, n_layers=2, n_heads=3)).eval()
    with pytest.raises(UnsupportedModelError, match=r"attentions\.0 and the layers behind it are not called in turn"):
        compress(model, Compression(layers=1), data("bloom"))
    with pytest.raises(UnsupportedModelError, match="XLMModel has no feed-forward block"):
        compress(model, Compression(dff=16), data("bloom"))


@pytest.mark.parametrize("name", ["big_bird", "gpt_bigcode", "led", "longformer", "luke", "xlnet"])
def test_padding_does_not_count(name):
    one, other, batches = build(name), build(name), data(name)
    changed = [dict(batch) for batch in batches]
    for batch in changed:
        for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
            if ids in batch:
                batch[ids] = batch[ids].where(batch[mask].bool(), 7)
    compress(one, Compression(dff=16), batches)
    compress(other, Compression(dff=16), changed)
    for (path, before), after in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(before, after, rtol=1e-3, atol=1e-4, msg=path)


@pytest.mark.parametrize("name", ["led", "gptj", "xlnet"])
def test_masks_are_those_of_the_batch_in_the_order_of_hidden_states(name):
    """XLNet's begin with the tokens, even where these are as many as the sequences."""
    model, batch = build(name), inputs(name)
    square = {part: value[:, :3] for part, value in batch.items()}
    for tokens in (batch, square):
        masks = batch_masks(model, tokens)
        for linear in Inventory(model, batch).residual_linears:
            expected = tokens["decoder_attention_mask" if "decoder" in linear.name else "attention_mask"].bool()
            ordered = expected.T if name == "xlnet" else expected
            assert torch.equal(linear.mask(masks, torch.zeros(*ordered.shape, 24)), ordered)
            assert torch.equal(linear.mask(masks, torch.zeros(expected.numel(), 24)), ordered)


def test_hidden_states_in_windows_have_no_mask():
    model, batch = build("swin"), inputs("swin")
    masks = batch_masks(model, batch)
    assert all(
        linear.mask(masks, torch.zeros(3, 9, 24)) is None for linear in Inventory(model, batch).residual_linears
    )


@pytest.mark.parametrize("length", [9, 11, 12, 13])
def test_padding_that_a_model_appends_does_not_count(length):
    """Longformer reads whole windows of four tokens, and counts positions without padding."""
    model, generator = build("longformer"), torch.Generator().manual_seed(0)
    ids = torch.randint(3, 61, (3, length), generator=generator)
    ids[:, -3:] = model.config.pad_token_id
    (stack,) = find_stacks(model, {"input_ids": ids, "attention_mask": (ids != model.config.pad_token_id).long()})
    assert stack.shape[1] == -(-length // 4) * 4
    later = inputs("longformer")
    mask = stack.mask.of(batch_masks(model, later), torch.zeros(3, 12, 24))
    assert torch.equal(mask[:, :9], later["attention_mask"].bool())
    assert not mask[:, 9:].any()


def test_an_encoder_alone_has_its_own_mask():
    model = build("led").encoder
    assert model.get_decoder() is model
    assert [stack.mask.kind for stack in find_stacks(model, inputs("longformer"))] == ["encoder"]


@pytest.fixture
def captioner():
    """Return a model that reads five positions of an image before the tokens, and padded batches."""
    vision = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = transformers.GitConfig(
        vision_config={**vision, "image_size": 8, "patch_size": 4},
        vocab_size=61,
        max_position_embeddings=40,
        **vision,
    )
    torch.manual_seed(0)
    images = {"pixel_values": torch.randn(3, 3, 8, 8)}
    return transformers.GitModel(config).eval(), [inputs("bloom", seed) | images for seed in range(4)]


def test_padding_at_unknown_places_is_refused(captioner):
    model, batches = captioner
    with pytest.raises(CalibrationError, match=r"\(.*, 14, 24\).* mask .*, 9\).* pass batches without padding"):
        compress(copy.deepcopy(model), Compression(dff=16), batches)
    whole = [batch | {"attention_mask": torch.ones(3, 9, dtype=torch.long)} for batch in batches]
    report = compress(model, Compression(dff=16), whole)
    assert {refit.vectors // report.sequences for refit in report.refits} == {5, 14}


@pytest.mark.parametrize("length", [5, 9])
def test_an_image_tower_has_no_mask(captioner, length):
    """Its five positions are no tokens, be these as many or not."""
    model, (batch, *_) = captioner
    tokens = {name: value if name == "pixel_values" else value[:, :length] for name, value in batch.items()}
    tower, texts = find_stacks(model, tokens)
    assert tower.path.startswith("image_encoder.")
    assert tower.shape[:2] == (2, 5)
    assert tower.mask is None
    assert texts.mask is not None


@pytest.mark.parametrize("name", ["big_bird", "falcon", "gptj", "internvl_vision", "led", "recurrent_gemma"])
def test_attention_is_no_feed_forward_block(name):
    """Its outputs are made channel by channel of values too, but of those of other tokens."""
    model, batch = build(name), inputs(name)
    downs = [block.down for block in find_feed_forward(model, batch)]
    assert len(downs) == len(numbered_layers(model, batch))
    assert not any("att" in name or "temporal" in name for name in downs)


def test_lists_that_are_no_layers_do_not_count():
    """The convolutions of wav2vec 2.0, Swin's stages, and the networks in MobileBERT's layers."""
    paths = {
        name: [stack.path for stack in find_stacks(build(name), inputs(name))]
        for name in ("wav2vec2", "swin", "mobilebert", "albert", "detr")
    }
    assert paths == {
        "wav2vec2": ["encoder.layers"],
        "swin": ["encoder.layers.0.blocks", "encoder.layers.1.blocks"],
        "mobilebert": ["encoder.layer"],
        "albert": ["encoder.albert_layer_groups"],
        "detr": ["encoder.layers", "decoder.layers"],
    }


@pytest.mark.parametrize("name", TEXTS)
def test_the_vocabulary_is_trimmed(name, tmp_path):
    letters = "abcdefghijklmnop"
    tokens = ["[PAD]", "[EOS]", "[BOS]", "[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    tokens += [first + second for first in letters for second in letters][: 61 - len(tokens)]
    inner = Tokenizer(models.WordPiece({token: number for number, token in enumerate(tokens)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "eos_token": "[EOS]", "bos_token": "[BOS]", "unk_token": "[UNK]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    model, batch = build(name), inputs(name)
    ids = {part: value % 36 if part.endswith("input_ids") else value for part, value in batch.items()}  # that stay
    expected = run(model, ids)
    report = trim_vocabulary_(model, tokenizer, ["ab ac ad aa", "ba bc abab"] * 8, tokens=48)
    assert report.tokens_after <= 48 + len(NUMBERED)
    assert report.parameters_after < report.parameters_before
    torch.testing.assert_close(run(model, ids), expected, rtol=1e-4, atol=1e-5)
    assert_reloads(model, ids, tmp_path)


@pytest.fixture
def half_described():
    """Return a model of a described image tower and an undescribed text tower, and batches for both."""
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        transformers.ViTConfig(**TINIES["vit"].settings),
        transformers.BigBirdConfig(**NUMBERED["big_bird"].settings),
        projection_dim=8,
    )
    torch.manual_seed(0)
    model = transformers.VisionTextDualEncoderModel(config).eval()
    return model, [inputs("vit", seed) | inputs("big_bird", seed) for seed in range(4)]


def test_described_attention_beside_undescribed_is_converted(half_described, tmp_path):
    dense, batches = half_described
    with pytest.raises(UnsupportedModelError, match=r"text_model\..*'big_bird' has no description; leave it out"):
        compress(dense, Compression(dk=12), batches)
    for compression in (Compression(keep=0.5), Compression(dk=12, dff=16, modules="vision_model.*")):
        model = copy.deepcopy(dense)
        report = compress(model, compression, batches)
        assert all(part.name.startswith("vision_model") for part in report.of("dk"))
        assert len(report.of("dk")) == 2
        assert len(report.of("dff")) == 4
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        torch.testing.assert_close(run(loaded, batches[0]), run(model, batches[0]))
        if compression.keep is not None:
            assert "some attention modules stay as they are: text_model." in report.choice


def test_only_the_width_of_the_blocks_changes():
    """Other numbers that equal the width, and factors, stay."""
    factors = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1}
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.GraniteConfig(
        vocab_size=61, intermediate_size=64, max_position_embeddings=64, pad_token_id=0, **sizes, **factors
    )
    model = transformers.GraniteForCausalLM(config).eval()
    before = model.config.to_dict()
    compress(model, Compression(dff=32), [{"input_ids": torch.randint(1, 61, (4, 9))} for _ in range(4)])
    after = model.config.to_dict()
    assert {name for name, value in after.items() if before[name] != value} == {"intermediate_size"}


def test_a_model_that_changes_its_own_weights_is_refused():
    sizes = {"hidden_size": 24, "attention_hidden_size": 24, "num_hidden_layers": 4, "context_length": 64}
    model = transformers.RwkvModel(transformers.RwkvConfig(vocab_size=61, rescale_every=2, **sizes)).eval()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    batches = [{"input_ids": torch.randint(0, 61, (3, 9))} for _ in range(4)]
    for call in (lambda: compress(model, Compression(layers=2), batches), lambda: plan(model, batches)):
        with pytest.raises(UnsupportedModelError, match="set rescale_every of its config to 0"):
            call()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_attention_stays_where_a_model_has_any(monkeypatch):
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = ["conv", "full_attention", "conv", "conv"]
    config = transformers.Lfm2Config(vocab_size=61, num_hidden_layers=4, layer_types=kinds, **sizes)
    model = transformers.Lfm2ForCausalLM(config).eval()
    batches = [{"input_ids": torch.randint(1, 61, (4, 9))} for _ in range(4)]
    monkeypatch.setattr("collab_compress.conversion.layer_search.choose_layers", lambda *_: ["model.layers.1"])
    with pytest.raises(UnsupportedModelError, match="none of them would have attention"):
        compress(model, Compression(layers=3), batches)


def test_keep_says_that_a_family_needs_a_newer_version(monkeypatch):
    model, batches = build("bert"), data("bert")
    monkeypatch.setitem(FAMILIES, "bert", replace(FAMILIES["bert"], since="99.0"))
    report = compress(model, Compression(keep=0.5), batches)
    assert {part.part for part in report.parts} == {"dff"}
    assert "models of type 'bert' can be converted with Transformers 99.0 and newer versions" in report.choice


def test_trying_a_linear_layer_of_its_own_class_draws_no_random_numbers():
    model, batches = build("falcon"), data("falcon")
    _is_linear.cache_clear()
    before = torch.get_rng_state()
    assert find_feed_forward(model, batches[0])
    assert _is_linear.cache_info().misses
    assert torch.equal(torch.get_rng_state(), before)
