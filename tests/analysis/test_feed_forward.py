"""What feed-forward blocks cost, against the live model."""

import copy

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel

from collab_compress import Compression, compress
from collab_compress.conversion.cost import block_cost
from collab_compress.conversion.inventory import find_feed_forward

NEURONS = 80  # leave in two rankings: 64, then the others
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": NEURONS}
DISTILBERT = {"dim": 24, "n_heads": 3, "n_layers": 2, "hidden_dim": NEURONS}
GPT2 = {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_inner": NEURONS}
LLAMA = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}
T5 = {"d_model": 24, "d_kv": 8, "num_heads": 3, "d_ff": NEURONS, "num_layers": 2, "decoder_start_token_id": 0}
GATED = T5 | {"feed_forward_proj": "gated-gelu"}
MODELS = {
    "bert": (SIZES, "encoder.layer.{}.output.dense"),
    "distilbert": (DISTILBERT, "transformer.layer.{}.ffn.lin2"),
    "albert": (SIZES | {"embedding_size": 8}, "encoder.albert_layer_groups.0.albert_layers.{}.ffn_output"),
    "gpt2": (GPT2, "h.{}.mlp.c_proj"),
    "llama": (LLAMA, "layers.{}.mlp.down_proj"),
    "t5": (T5, "encoder.block.{}.layer.1.DenseReluDense.wo"),
    "gated t5": (GATED, "encoder.block.{}.layer.1.DenseReluDense.wo"),
}  # model → sizes, and the layers that read the neurons


@pytest.fixture(params=MODELS)
def kind(request):
    return request.param


@pytest.fixture
def model(kind):
    """A tiny model in float64 whose weights and biases all matter."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind.removeprefix("gated ")](vocab_size=20, **MODELS[kind][0])
    model = AutoModel.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def batches(model, count=12):
    """Return padded sequences of two lengths, with decoder inputs where the model has a decoder."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for _ in range(count):
        ids = torch.randint(5, 20, (2, 11), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        batch = {"input_ids": ids, "attention_mask": mask}
        if model.config.is_encoder_decoder:
            batch |= {"decoder_input_ids": ids.flip(1), "decoder_attention_mask": mask}
        result.append(batch)
    return result


def test_costs_are_those_of_the_live_model(kind, model):
    data = batches(model)
    blocks = find_feed_forward(model, data[0])
    narrow = copy.deepcopy(model)
    compress(narrow, Compression(dff=30), data[:2])
    for block in blocks:
        cost, dense = block_cost(model, block, 30, 7), block_cost(model, block, None, 7)
        counted = (cost.parameters_before, cost.macs_before), (cost.parameters_after, cost.macs_after)
        for live, (parameters, macs) in zip((model, narrow), counted, strict=True):
            layers = [live.get_submodule(name) for name in (block.down, *block.ups)]
            assert parameters == sum(part.numel() for layer in layers for part in layer.parameters())
            assert macs == 7 * sum(layer.weight.numel() for layer in layers)
        assert (cost.width, dense.width) == (30, None)
        assert (dense.parameters_after, dense.macs_after) == counted[0]
