"""Converted heads by flex attention and by flash attention."""

import pytest
import torch
from tiny_families import build, inputs, make_rotary
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModel, masking_utils
from transformers.integrations import flash_attention
from transformers.integrations import flex_attention as integration

from collab_compress import Compression, HeadMask, UnsupportedModelError, compress
from collab_compress.transformers_parts import CACHE_NAME

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
FORMS = [
    {"dk": 13},
    {"dk": 12, "head_dim": 12},
    {"dv": 9},
    {"dk": 14, "dv": 17, "head_dim": 5},
]


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch):
    """Run flex attention and its masks without compiling them, which takes a minute for each shape."""
    monkeypatch.setattr(
        masking_utils, "create_block_mask", lambda *args, _compile, **options: create_block_mask(*args, **options)
    )
    monkeypatch.setattr(
        integration,
        "compile_friendly_flex_attention",
        lambda *parts, training, **options: flex_attention(*parts, **options),
    )


@pytest.fixture
def flash(monkeypatch):
    """Put a slow function in the place of the flash kernel; return the shapes that it got."""
    shapes = []

    def kernel(query, key, value, mask, *, is_causal, softmax_scale, attn_implementation, **_):
        shapes.append((query.shape, key.shape, value.shape))
        assert attn_implementation == "flash_attention_2"
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        assert query.shape[-1] % 8 == 0
        length, keys = query.shape[1], key.shape[1]
        allowed = torch.ones(length, keys, dtype=torch.bool).tril(keys - length) if is_causal else True
        if mask is not None:
            allowed = allowed & mask.bool()[:, None, None, :]
        parts = (part.transpose(1, 2) for part in (query, key, value))
        allowed = None if allowed is True else allowed
        outputs = scaled_dot_product_attention(*parts, attn_mask=allowed, scale=softmax_scale, enable_gqa=True)
        return outputs.transpose(1, 2)

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", kernel)
    return shapes


def converted(family, widths, make_tiny):
    if family == "gpt2":
        model = build("gpt2", "GPT2LMHeadModel")
    else:
        model = make_rotary("llama") if family == "llama" else make_tiny(family)
    compress(model, Compression(**widths), calibration=None)
    return model


def run(model, batch, implementation):
    model.config._attn_implementation_internal = implementation  # the setter asks for the flash package
    with torch.no_grad():
        return model(**batch)[0]


CASES = [
    (family, widths)
    for family, forms in (
        ("bert", FORMS),
        ("gpt2", FORMS[2:]),
        ("llama", [{"dk": 8}, {"dv": 9}]),
        ("marian", FORMS[:1]),
    )
    for widths in forms
]


@pytest.mark.parametrize(("family", "widths"), CASES)
def test_outputs_are_those_of_eager_attention(family, widths, make_tiny, make_batch, flash):
    model, batch = converted(family, widths, make_tiny), make_batch("bert" if family == "llama" else family)
    batch = {name: part for name, part in batch.items() if name != "token_type_ids" or family == "bert"}
    expected = run(model, batch, "eager")
    mask = batch.get("decoder_attention_mask", batch["attention_mask"])[..., None]
    for implementation in ("flex_attention", "flash_attention_2"):
        found = run(model, batch, implementation)
        torch.testing.assert_close(found * mask, expected * mask, atol=1e-5, rtol=1e-4)
        assert bool(flash) == (implementation == "flash_attention_2")
    if family == "llama" and "dv" in widths:
        assert {(query[2], key[2], value[2]) for query, key, value in flash} <= {(4, 2, 2)}  # heads stay grouped


@pytest.mark.parametrize("family", ["opt", "t5"])  # scales queries itself; adds a position bias to the scores
def test_scaled_queries_and_position_biases(family):
    model = build(family)
    compress(model, Compression(**FORMS[0]), calibration=None)
    batch = {name: part for name, part in inputs(family).items() if not name.endswith("attention_mask")}
    torch.testing.assert_close(run(model, batch, "flex_attention"), run(model, batch, "eager"), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
@pytest.mark.parametrize("widths", [FORMS[0], FORMS[3]])
def test_a_cache_is_read(implementation, widths, make_tiny, flash):
    model = converted("gpt2", widths, make_tiny)
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = run(model, {"input_ids": ids}, "eager")
    past = None
    model.config._attn_implementation_internal = implementation
    with torch.no_grad():
        for part in ids.split(1, 1):
            output = model(input_ids=part, **{CACHE_NAME: past}, use_cache=True)
            past = getattr(output, CACHE_NAME)
    torch.testing.assert_close(output.logits, expected[:, -1:], atol=1e-5, rtol=1e-4)


def test_a_checkpoint_is_loaded_with_flex_attention(make_tiny, batch, tmp_path):
    model = converted("bert", FORMS[3], make_tiny)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, attn_implementation="flex_attention")
    mask = batch["attention_mask"][..., None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch)[0] * mask, model(**batch)[0] * mask, atol=1e-5, rtol=1e-4)


def test_hooks_and_unknown_functions_are_refused(make_tiny):
    model = converted("bert", FORMS[0], make_tiny)
    model.config._attn_implementation_internal = "magic"
    with pytest.raises(UnsupportedModelError, match=r"BertSelfAttention is edited, so it runs with .* got 'magic'"):
        model.encoder.layer[0].attention.self(torch.zeros(1, 3, 24))
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(
        UnsupportedModelError, match=r"has hooks on its heads, so it runs with .* got 'flex_attention'"
    ):
        HeadMask(model)
