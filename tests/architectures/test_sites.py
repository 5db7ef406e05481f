import pytest
import torch
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaModel,
    GPTNeoConfig,
    GPTNeoModel,
    PhiConfig,
    PhiModel,
    Qwen3Config,
    Qwen3Model,
)

from collab_compress.architectures import find_dense_attention
from collab_compress.errors import UnsupportedModelError


def test_heads_are_those_the_model_uses(family, make_tiny):
    site = find_dense_attention(make_tiny(family))[0]
    x = torch.randn(5, site.query.in_features)
    stock = (site.query(x)).view(5, site.heads, site.head_width)
    for head in range(site.heads):
        torch.testing.assert_close(x @ site.query_heads()[head] + site.query_bias()[head], stock[:, head])


def test_glob_selects_modules_and_names_them_where_none_matches(make_tiny):
    (site,) = find_dense_attention(make_tiny("bert"), "*layer.1.*")
    assert site.name == "encoder.layer.1.attention.self"
    with pytest.raises(
        UnsupportedModelError,
        match=r"no BertSelfAttention or BertCrossAttention .* matches 'nowhere'.*encoder\.layer\.0",
    ):
        find_dense_attention(make_tiny("bert"), "nowhere")


def test_refuses_unknown_family_and_names_where_the_others_are():
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "vocab_size": 11, "max_position_embeddings": 8}
    model = GPTNeoModel(GPTNeoConfig(attention_types=[[["global"], 1]], **sizes))
    with pytest.raises(UnsupportedModelError, match=r"'gpt_neo' .*h\.0\.attn \(GPTNeoAttention\).*docs/families"):
        find_dense_attention(model)


SIZES = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 11, "intermediate_size": 8}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: PhiModel(PhiConfig(**SIZES, qk_layernorm=True)),
            r"layers\.0\.self_attn\.q_layernorm \(LayerNorm\): .*QK-norm",
        ),
        (
            lambda: Qwen3Model(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=4)),
            r"layers\.0\.self_attn \(Qwen3Attention\): .*QK-norm.* narrow values \(dv\)",
        ),
        (
            lambda: GemmaModel(GemmaConfig(**SIZES, num_key_value_heads=4, head_dim=4)),
            r"layers\.0\.self_attn: got 4 heads of keys and values for 2 of queries; expected a divisor of 2",
        ),
    ],
)
def test_refuses_what_cannot_be_converted(model, message):
    with pytest.raises(UnsupportedModelError, match=message):
        find_dense_attention(model())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda attention: setattr(attention, "rotary_emb", nn.Identity()),
            r"self\.rotary_emb \(Identity\): .*a rotary embedding",
        ),
        (lambda attention: delattr(attention, "key"), r"encoder\.layer\.1\.attention\.self .* no attribute 'key'"),
        (
            lambda attention: setattr(attention, "query", nn.Identity()),
            r"self\.query: got Identity, expected a plain Linear",
        ),
        (
            lambda attention: setattr(attention, "query", nn.Linear(24, 23)),
            r"got 23 output channels; expected 3 heads × 8 = 24",
        ),
        (
            lambda attention: setattr(attention, "num_attention_heads", 3.0),
            r"self\.num_attention_heads: got float, expected int; the BERT description does not fit this model",
        ),
    ],
    ids=["undescribed rotary embedding", "missing attribute", "wrong type", "wrong width", "wrong type of number"],
)
def test_refuses_a_module_that_its_description_does_not_fit(make_tiny, change, message):
    model = make_tiny("bert")
    change(model.encoder.layer[1].attention.self)
    with pytest.raises(UnsupportedModelError, match=message):
        find_dense_attention(model)
