"""Quantized weights under a converted model: what torchao does to it in memory, and what is refused."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModel, TorchAoConfig

from collab_compress import Compression, Solver, compress

pytest.importorskip("torchao")
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)

TEXTS = ["A man is playing a guitar.", "The quick brown fox jumps over the lazy dog, twice, and then it rests.", "x"]
FIRST = "encoder.layer.0.attention.self"
INT4_VALUES = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))


@pytest.fixture
def converted(minilm):
    compress(minilm, Compression(dk=128, solver=Solver(sweeps=5)), calibration=None)
    return minilm


@pytest.fixture
def embed(minilm_tokenizer):
    batch = minilm_tokenizer(TEXTS, padding=True, return_tensors="pt")

    def embed(model):
        """Mean-pooled embeddings of unit length, (B, D)."""
        with torch.no_grad():
            states, mask = model(**batch).last_hidden_state.float(), batch["attention_mask"][..., None]
        return nn.functional.normalize((states * mask).sum(1), dim=1)

    return embed


def quantized(model, config):
    model = copy.deepcopy(model)
    quantize_(model, config)
    return model


def least_cosine(one, other):
    return (one * other).sum(1).min().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "least"), [(Int8WeightOnlyConfig(), 0.997), (Int8DynamicActivationInt8WeightConfig(), 0.97)]
)
def test_int8(config, least, dtype, converted, embed):
    expected = embed(converted)
    model = quantized(converted.to(dtype), config)
    assert least_cosine(embed(model), expected) > least
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linear) == 6 * 4 + 1  # joined projections, output and two of the feed-forward; the pooler
    assert all(isinstance(module.weight, Int8Tensor) for module in linear)
    others = {id(p) for p in model.parameters()} - {id(module.weight) for module in linear}
    assert all(type(p) is nn.Parameter and p.dtype == dtype for p in model.parameters() if id(p) in others)
    assert type(model.get_submodule(FIRST).qk.mixing) is nn.Parameter


def test_int4_values_cost_what_they_cost_the_dense_model(minilm, embed):
    """Four-bit weights are stored in eight bits, the only format that torchao has for CPUs."""
    dense = copy.deepcopy(minilm)
    compress(minilm, Compression(dk=128, solver=Solver(sweeps=5)), calibration=None)
    one, other = (least_cosine(embed(quantized(model, INT4_VALUES)), embed(model)) for model in (dense, minilm))
    assert other > one - 0.05
    assert other > 0.85


def test_quantized_while_it_is_loaded(converted, embed, tmp_path):
    converted.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    for name, module in converted.named_modules():
        if isinstance(module, nn.Linear):
            assert isinstance(loaded.get_submodule(name).weight, Int8Tensor), name
    assert torch.equal(embed(loaded), embed(quantized(converted, Int8WeightOnlyConfig())))
