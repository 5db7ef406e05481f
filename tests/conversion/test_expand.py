import copy

import pytest
import torch
from forms import hidden
from torch.nn.utils.parametrizations import weight_norm
from transformers import AutoModel, BertForSequenceClassification

from collab_compress import (
    Compression,
    CompressionError,
    FromScratch,
    UnsupportedModelError,
    compress,
    describe,
    expand,
    from_config,
    is_converted,
    read_factors,
)
from collab_compress.architectures import find_attention, find_dense_attention


def test_describe_names_forms_and_widths(make_tiny):
    model = make_tiny("bert")
    assert describe(model) == {}
    assert not is_converted(model)
    compress(model, Compression(dk=9, modules="*layer.0*"), calibration=None)
    compress(model, Compression(dv=12), calibration=None)
    assert describe(model) == {
        "encoder.layer.0.attention.self": "shared attention, dk=9; narrow values, dv=12",
        "encoder.layer.1.attention.self": "narrow values, dv=12",
    }
    assert is_converted(model)
    expand(model)
    assert not is_converted(model)


def test_full_rank_comes_back_exactly(make_tiny, batch, tmp_path):
    dense = make_tiny("bert").requires_grad_(False)
    model = copy.deepcopy(dense)
    compress(model, Compression(dk=24), calibration=None)
    expand(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    torch.testing.assert_close(hidden(model, batch), hidden(dense, batch), atol=3e-5, rtol=1e-4)
    assert read_factors(model) == {}
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in dense.state_dict().items()
    }
    model.save_pretrained(tmp_path / "dense")
    assert "collab" not in (tmp_path / "dense" / "config.json").read_text(encoding="utf-8")
    torch.testing.assert_close(hidden(AutoModel.from_pretrained(tmp_path / "dense"), batch), hidden(model, batch))


@pytest.mark.parametrize(
    ("family", "widths"),
    [("albert", {"dk": 5}), ("bert", {"dk": 13}), ("bert", {"dk": 24, "head_dim": 3}), ("marian", {"dk": 5})],
)
def test_heads_no_wider_than_dense_ones_come_back_as_they_are(family, widths, make_tiny, batch, calibration):
    model = make_tiny(family)
    compress(model, Compression(**widths), calibration)
    expected, factors = hidden(model, batch), {name: f.to("cpu") for name, f in read_factors(model).items()}
    expand(model)
    torch.testing.assert_close(hidden(model, batch), expected, atol=5e-5, rtol=1e-3)
    for site in find_dense_attention(model):
        f, matrices = factors[site.name].to(torch.float64), site.query_heads().double() @ site.key_heads().double().mT
        torch.testing.assert_close(matrices, (f.query * f.mixing[:, None]) @ f.key.mT, atol=1e-5, rtol=1e-4)


def test_heads_wider_than_dense_ones_are_refused_by_what_they_would_lose(make_tiny, calibration):
    """Against explicit truncated singular value decompositions of each head's (D+1)×D matrix."""
    model = make_tiny("bert")
    compress(model, Compression(dk=16, head_dim=16), calibration)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    f = next(iter(read_factors(model).values())).to(torch.float64)
    lost = total = 0.0
    for head in range(3):
        context = f.query @ torch.diag(f.mixing[head]) @ f.key.T
        s = torch.linalg.svdvals(torch.cat([context, f.content_bias[head][None]]))
        lost, total = lost + float(s[8:].square().sum()), total + float(s.square().sum())
    words = rf"layer\.0\..*wider than the 8 channels .* move scores by {(lost / total) ** 0.5:.1%}; .* head_dim"
    with pytest.raises(CompressionError, match=words):
        expand(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_scale_of_its_own_goes_into_the_weights(make_tiny, batch):
    torch.manual_seed(0)
    start = FromScratch(dk=12, train_mixing=False)
    model = from_config(
        make_tiny("bert").config, start, AutoModel._model_mapping[type(make_tiny("bert").config)]
    ).eval()
    before = hidden(model, batch)
    expand(model)
    assert model.encoder.layer[0].attention.self.scaling == pytest.approx(8**-0.5)
    torch.testing.assert_close(hidden(model, batch), before, atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize(("converted", "expanded"), [("whole", "body"), ("body", "whole")])
def test_body_and_whole_model_are_one(make_tiny, batch, tmp_path, converted, expanded):
    dense = make_tiny("bert", BertForSequenceClassification)
    model = copy.deepcopy(dense)
    parts = {"whole": model, "body": model.bert}
    compress(parts[converted], Compression(dk=24), calibration=None)
    expand(parts[expanded])
    model.save_pretrained(tmp_path)
    loaded = BertForSequenceClassification.from_pretrained(tmp_path)
    assert read_factors(loaded) == {}
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, dense(**batch).logits, atol=3e-5, rtol=1e-4)


def hook_(layer):
    layer.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("family", "path", "spoil_", "message"),
    [
        ("bert", "qkv", hook_, r"layer\.1\.attention\.self\.qkv .* has a forward hook"),
        ("albert", "query", hook_, r"attention\.query .* has a forward hook"),
        ("albert", "key.proj", hook_, r"attention\.key\.proj .* has a forward hook"),
        ("albert", "value", hook_, r"attention\.value .* has a forward hook"),
        ("albert", "key.proj", weight_norm, r"the weight of .*key\.proj is computed from others"),
        ("bert", "qkv", weight_norm, r"the weight of .*qkv is computed from others"),
        (
            "bert",
            "qk",
            lambda qk: torch.nn.init.constant_(qk.mixing, float("nan")),
            r"^encoder\.layer\.1\.attention\.self: .* Look for NaN in its weights",
        ),
    ],
)
def test_what_cannot_be_expanded_is_refused(family, path, spoil_, message, make_tiny):
    model = make_tiny(family)
    with pytest.raises(CompressionError, match="has no converted attention to expand"):
        expand(model)
    compress(model, Compression(dk=9, dv=12), calibration=None)
    spoil_(find_attention(model)[-1].module.get_submodule(path))
    with pytest.raises((CompressionError, UnsupportedModelError), match=message):
        expand(model)
    assert is_converted(model)
