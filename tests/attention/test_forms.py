"""What converted queries and keys do: one contract, on a tiny module."""

import pytest
import torch

from collab_compress import Compression, compress, expand
from collab_compress.attention import SharedQK, install_, is_converted, uninstall_

DK, HEADS, HEAD_WIDTH, WIDTH = 10, 3, 8, 24
NAME = "encoder.layer.0.attention.self"


@pytest.fixture(params=[4, None, DK])
def module(request, make_tiny):
    """Return BERT's attention with heads of a width, in float64."""
    model = make_tiny("bert").double()
    compress(model, Compression(dk=DK, head_dim=request.param), calibration=None)
    return model.get_submodule(NAME)


def products(module):
    """Return T̂_i and v_i of every head, (H, D + 1, D)."""
    factors = module.qk.factors(NAME, module)
    slices = (factors.query * factors.mixing[:, None]) @ factors.key.mT  # (H, D, D)
    return torch.cat([slices, factors.content_bias[:, None]], 1).detach()


def test_moves_into_another_module_and_back(module, make_tiny):
    config = module.qk.config
    dense = make_tiny("bert").double()
    other, parent = dense.get_submodule(NAME), dense.get_submodule(NAME.rpartition(".")[0])
    query, key, weights = other.query, other.key, {name: t.clone() for name, t in dense.state_dict().items()}
    qk, layers = SharedQK.build(config, other, parent)
    qk.load_(layers, module.qk.factors(NAME, module))
    install_(other, qk, layers, parent)
    qk.finish_(other)
    assert is_converted(other)
    torch.testing.assert_close(products(other), products(module))
    assert torch.equal(other.qk.channels, module.qk.channels)
    assert other.qk.mixing.requires_grad == module.qk.mixing.requires_grad
    uninstall_(other, "qk", {"query": query, "key": key}, parent)
    assert not is_converted(other)
    assert dense.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in dense.state_dict().items())


def test_a_head_owns_its_rows_and_nothing_else(module):
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    described = module.qk.head_rows(module)
    assert [path for path, _, _ in described] == ["qk.mixing", "qk.channels", "qkv.weight"]
    for head in range(HEADS):
        before = products(module)
        for path, start, size in described:
            with torch.no_grad():
                own = tensors[path][start + head * size : start + (head + 1) * size]
                own.copy_(2 * own if own.is_floating_point() else own.roll(1, 1))
        moved = (products(module) != before).flatten(1).any(1)
        assert moved.tolist() == [other == head for other in range(HEADS)]


@pytest.mark.parametrize("widths", [{"dk": DK}, {"dv": 9}, {"dk": DK, "dv": 9}])
def test_queries_keys_and_values_of_one_input_are_one_product(widths, make_tiny, batch):
    """In self-attention they are one layer, in cross-attention those of the encoder's states are."""
    self_attention = make_tiny("bert")
    compress(self_attention, Compression(**widths), calibration=None)
    module = self_attention.get_submodule(NAME)
    assert {rows.layer for rows in module.rows.values()} == {"qkv"}
    assert sum(isinstance(layer, torch.nn.Linear) for layer in module.modules()) == 1
    both = make_tiny("marian")
    compress(both, Compression(**widths), calibration=None)
    cross = both.get_submodule("decoder.layers.0.encoder_attn")
    assert [rows.layer for rows in cross.rows.values()] == ["q_proj", "kv", "kv"]


def test_biases_that_training_gives_to_shared_channels_are_those_of_a_dense_model(make_tiny, batch):
    model = make_tiny("bert")
    compress(model, Compression(dk=DK, dv=9), calibration=None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("qkv.bias"):
                parameter.normal_()
    expected = model(**batch).last_hidden_state.detach()
    expand(model)
    torch.testing.assert_close(model(**batch).last_hidden_state.detach(), expected, atol=2e-5, rtol=1e-4)
