"""Queries, keys and values in one layer: taken apart, and put together again."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures.families import AttentionFamily, Layout, Paths
from collab_compress.architectures.sites import fused_slice
from collab_compress.attention.projections import (
    PaddedProjection,
    QKVProjection,
    fused_layer,
    replace_,
)

HEADS, WIDTH, IN = 3, 4, 10
PARTS = ("qkv.query", "qkv.key", "qkv.value")


class Attention(nn.Module):
    def __init__(self, kind, bias):
        super().__init__()
        self.heads, self.width, self.split_size = HEADS, WIDTH, HEADS * WIDTH
        self.qkv = Conv1D(3 * HEADS * WIDTH, IN) if kind == "Conv1D" else nn.Linear(IN, 3 * HEADS * WIDTH, bias)
        if self.qkv.bias is not None:
            nn.init.normal_(self.qkv.bias)


def family(interleaved):
    paths = Paths(*PARTS, "", "heads", "width", fused="qkv")
    return AttentionFamily("Some", ("some",), ("Attention",), paths, layout=Layout(interleaved=interleaved))


def expected(x, channels, interleaved):
    """Return queries, keys and values, (T, H·d) each, copied channel by channel in the layout's order."""
    parts = [torch.empty(len(x), HEADS * WIDTH) for _ in range(3)]
    for place in range(3):
        for head in range(HEADS):
            for channel in range(WIDTH):
                at = (head * 3 + place) * WIDTH if interleaved else (place * HEADS + head) * WIDTH
                parts[place][:, head * WIDTH + channel] = channels[:, at + channel]
    return parts


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["Conv1D", "Linear"])
def test_split_layers_equal_the_fused_one_and_fuse_back(kind, bias, interleaved):
    module, x = Attention(kind, bias), torch.randn(5, IN)
    module.family = family(interleaved)
    fused = module.qkv
    weights = {name: tensor.clone() for name, tensor in fused.state_dict().items()}
    parts = expected(x, fused(x), interleaved)
    slices = [fused_slice(module, module.family, path) for path in PARTS]
    for part, one in zip(parts, slices, strict=True):
        torch.testing.assert_close(nn.functional.linear(x, one.weight, one.bias), part)
        assert (one.in_features, one.out_features) == (IN, HEADS * WIDTH)
        assert set(dict(one.named_parameters())) == set(weights)

    narrow = PaddedProjection(nn.Linear(IN, 7), 1)
    replace_(module, {PARTS[1]: narrow}, WIDTH)
    assert isinstance(module.qkv, QKVProjection)
    torch.testing.assert_close(module.qkv.query(x), parts[0])
    torch.testing.assert_close(module.qkv.value(x), parts[2])
    torch.testing.assert_close(module.qkv.key(x), narrow(x))
    dense = nn.Linear(IN, HEADS * WIDTH, slices[1].bias is not None)
    dense.load_state_dict(dict(slices[1].named_parameters()))
    replace_(module, {PARTS[1]: dense}, WIDTH)
    assert type(module.qkv) is type(fused)
    assert module.qkv.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in module.qkv.state_dict().items())


def test_a_layer_of_another_kind_or_width_is_no_fused_one():
    module = Attention("Linear", True)
    assert fused_slice(module, family(False), "somewhere.else") is None
    assert fused_layer(module, "query") is None
    module.heads = 4
    assert fused_slice(module, family(False), PARTS[0]) is None
    module.qkv = nn.Identity()
    assert fused_slice(module, family(False), PARTS[0]) is None
