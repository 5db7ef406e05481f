"""Removals that cannot be done leave the model as it was."""

import pytest
import torch
from torch import nn

from collab_compress import HeadMask, mix_heads_, prune_heads_
from collab_compress.architectures import FAMILIES, find_attention
from collab_compress.checkpoint import edits_of
from collab_compress.errors import HeadError, UnsupportedModelError
from collab_compress.heads import Tap

FIRST, SECOND = "encoder.layer.0.attention.self", "encoder.layer.1.attention.self"


def adapter(model):
    class Adapter(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    model.encoder.layer[0].attention.output.dense = Adapter(24, 24)


def parametrized(model):
    nn.utils.parametrizations.weight_norm(model.encoder.layer[0].attention.self.value)


def tied(model):
    model.encoder.layer[0].attention.self.value.weight = model.encoder.layer[1].attention.self.value.weight


def tied_whole(model):
    model.encoder.layer[0].attention.self.query = model.encoder.layer[1].attention.self.query


def too_narrow(model):
    model.encoder.layer[0].attention.self.key = nn.Linear(24, 16)


def offloaded(model):
    model.encoder.layer[0].attention.self.value.to("meta")


def integers(model):
    weight = model.encoder.layer[0].attention.self.value.weight
    model.encoder.layer[0].attention.self.value.weight = nn.Parameter(weight.to(torch.int8), requires_grad=False)


@pytest.mark.parametrize(
    ("spoil", "heads", "message"),
    [
        (None, {"nowhere": [0]}, r"no attention module 'nowhere'; there are encoder\.layer\.0\.attention\.self"),
        (None, {FIRST: [0, 3]}, r"layer\.0\.attention\.self has no head 3; its heads are 0 to 2"),
        (None, {FIRST: [-1]}, "has no head -1"),
        (None, {FIRST: [0.5]}, r"has no head 0\.5"),
        (None, {FIRST: [0, 1, 2]}, r"removing heads \[0, 1, 2\] leaves none; keep at least one head"),
        (adapter, {FIRST: [0]}, r"attention\.output\.dense: got Adapter, expected a plain nn\.Linear; merge"),
        (parametrized, {FIRST: [0]}, r"self\.value: got ParametrizedLinear, expected a plain nn\.Linear"),
        (integers, {FIRST: [0]}, r"self\.value: .*undo quantization"),
        (tied, {FIRST: [0]}, r"self\.value is shared with another module, .* untie them first"),
        (tied_whole, {FIRST: [0]}, r"self\.query is shared with another module"),
        (too_narrow, {FIRST: [0]}, r"self\.key: got 16 output channels; expected 3 heads × 8 = 24"),
        (offloaded, {FIRST: [0]}, r"self\.value is offloaded; load the model into memory"),
        (mix_heads_, {FIRST: [0]}, r"attention\.output\.dense mixes the heads.*call merge_alphas_ first"),
        (HeadMask, {FIRST: [0]}, "something acts on its heads .* remove that first"),
        (Tap, {FIRST: [0]}, "something acts on its heads .* remove that first"),
    ],
)  # fmt: skip
def test_refusals_change_nothing(spoil, heads, message, make_tiny):
    model = make_tiny("bert")
    if spoil is not None:
        spoil(model)
    before = {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()}
    edits = edits_of(model)
    with pytest.raises(HeadError, match=message):
        prune_heads_(model, {SECOND: [0], **heads} if spoil is not tied_whole else heads)
    assert {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()} == before
    assert edits_of(model) == edits
    assert {site.heads for site in find_attention(model, FAMILIES)} == {3}


def test_quantized_models_and_unknown_families_are_refused(make_tiny):
    model = make_tiny("bert")
    model.config.quantization_config = {"quant_method": "other"}
    with pytest.raises(HeadError, match="BertModel is quantized; remove heads from the unquantized checkpoint"):
        prune_heads_(model, {FIRST: [0]})
    with pytest.raises(UnsupportedModelError, match="Linear is no Transformers model"):
        prune_heads_(nn.Linear(2, 2), {})


@pytest.mark.parametrize("heads", [3, None, [0, 1], {"encoder": 1}])
def test_heads_that_are_no_mapping_are_refused(make_tiny, heads):
    with pytest.raises(HeadError, match="expected module path"):
        prune_heads_(make_tiny("bert"), heads)
