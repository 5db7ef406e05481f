"""Collaborative attention from scratch: fresh models whose heads share queries and keys from the first step."""

import copy
import logging
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from collab_compress.architectures import DenseSite, find_dense_attention
from collab_compress.architectures.sites import score_terms
from collab_compress.attention import ConvertedMap, MapConfig, SharedConfig, install_
from collab_compress.attention.maps import Layers
from collab_compress.conversion.cost import qk_config
from collab_compress.conversion.maps import record_maps_, rounded_widths
from collab_compress.errors import CompressionError
from collab_compress.options import check_counts

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FromScratch:
    """Untrained collaborative attention for a fresh model."""

    dk: int
    """Shared width R, at least 1; it may exceed H·d. Every head reads all R channels."""

    train_mixing: bool = True
    """Whether the mixing matrix, which starts by giving each head R/H channels of its own (remaining ones go to the
    first heads), is trained. If not, heads stay R/H wide, which is the paper's narrow-head baseline, and scores are
    scaled by √(H/R) in place of the model's 1/√d; with a rotary embedding heads keep their width and scale."""

    def __post_init__(self) -> None:
        check_counts(self, CompressionError, "dk")


def from_config(
    config: PretrainedConfig, attention: FromScratch, model_class: type[PreTrainedModel]
) -> PreTrainedModel:
    """Return a freshly initialised model with collaborative attention in all its modules.

    Args:
        config: of a stock model.
        attention: width and start of the shared attention.
        model_class: the class to build, such as `BertForMaskedLM`.

    Returns:
        A model that trains, saves and reloads like a converted one. Projections start normally distributed, with the
        standard deviation of those they replace; content biases start at zero. Draws from torch's global generator.

    Raises:
        CompressionError: the config is not a stock model's.
        UnsupportedModelError: the model, or a module of it, cannot have collaborative attention.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise CompressionError("the config describes a converted or quantized model; pass a stock model's config")
    model = model_class(copy.deepcopy(config))  # the edit is recorded in the config, which may be used again
    configs: list[tuple[nn.Module, MapConfig]] = []
    for site in find_dense_attention(model):
        made, layers = _build(site, attention)
        install_(site.module, made, layers, site.parent)
        configs.append((site.module, made.config))
    record_maps_(model, configs)
    for warning in rounded_widths([config for _, config in configs], attention.dk):
        _logger.warning(warning)
    return model


def _build(site: DenseSite, attention: FromScratch) -> tuple[ConvertedMap, Layers]:
    """Return untrained shared queries and keys of a module, and their projections."""
    dk = attention.dk
    config = replace(qk_config(site, dk, dk), train_mixing=attention.train_mixing)
    if isinstance(config, SharedConfig):
        scale = sqrt(site.heads / (dk * score_terms(site.module, site.family)))
        config = replace(config, scale=None if config.train_mixing else scale)
        start = concatenate_heads(site.heads, dk)
    elif dk > site.key_value_width:
        raise CompressionError(
            f"{site.name}: dk of rotary heads is at most {site.key_value_width} there; got dk {dk}"
        )
    else:
        real = concatenate_heads(site.key_value_heads, config.rank // site.head_width)  # (G, P)
        real = real.repeat_interleave(site.head_width // 2, 1)
        start = torch.cat([real, torch.zeros_like(real)], 1)
    made: Any
    made, layers = config.module.build(config, site.module, site.parent)
    with torch.no_grad():
        for layer, dense in zip(layers.values(), (site.query, site.key), strict=True):
            layer.weight.normal_(std=float(dense.weight.std()))
            if layer.bias is not None:
                layer.bias.zero_()
        layers[site.paths.key].weight[config.rank :].zero_()  # content biases
        made.mixing.copy_(start)
    return made, layers


def concatenate_heads(heads: int, dk: int) -> Tensor:
    """Return blocks of ones, (H, R): each channel belongs to one head, and widths differ by at most one."""
    owner = torch.arange(dk, device="cpu") * heads // dk if dk >= heads else torch.arange(dk, device="cpu")
    return torch.nn.functional.one_hot(owner, heads).T.float()
