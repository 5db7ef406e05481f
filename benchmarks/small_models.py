"""A small random model of almost every type that Transformers has, and what it reads.

A default config is shrunk by the names of its settings. Settings that depend on each other in a way of their own then
no longer fit, so that some types cannot be built like this; those say nothing of what can be converted.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PretrainedConfig,
    PreTrainedModel,
)

VOCABULARY, POSITIONS, LAYERS, WIDTH, HEADS, GROUPS, NEURONS = 101, 128, 3, 32, 4, 2, 64
MOST_PARAMETERS = 2_000_000
SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|^n_words$|vocab_sizes?$", VOCABULARY),
    (r"first_k_dense_replace", 1),
    (r"(^|_)(num_)?(hidden_|text_|encoder_|decoder_)?(layers|blocks|layer)$|^depth$|^n_layer$", LAYERS),
    (r"n_group|topk_group|expert_group", 1),
    (r"experts_per_tok|top_?k|^moe_k$|num_selected", 2),
    (r"mamba_n(um)?_heads", 2 * HEADS),
    (r"experts?$", 4),
    (r"(key_value|kv)_heads$|n_head_kv|num_kv|multi_query_group", GROUPS),
    (r"rope_head_dim|rotary_dim|rotary_ndims|qk_rope", WIDTH // HEADS),
    (r"head_dim|dim_head|d_kv|kv_channels|d_head|head_size|qkv_dim|nope_head|v_head", WIDTH // HEADS),
    (r"heads?$|_heads_", HEADS),
    (r"lora_rank|_rank$", 8),
    (r"intermediate|ffn|dim_ff|^d_ff$|inner|mlp_dim|feedforward|feed_forward|^dff$|^filter_size$", NEURONS),
    (
        r"hidden_size|d_model|n_embd|embed_dim|emb_dim|^dim$|embedding_size|^width$|hidden_dim|lru_width|d_embed|_dim$",
        WIDTH,
    ),
    (r"max_position|n_positions|max_seq|^n_ctx$|context|position_embeddings$|max_.*positions", POSITIONS),
    (r"^window_size$", 2),
    (r"attention_window|sliding_window|window|chunk_size|block_size", 8),
    (r"image_size", 32),
    (r"patch_size|tubelet", 8),
)
"""Names of settings → their value in a small model, the first that fits."""
COMPUTED = ("out_features", "out_indices", "_out_features", "_out_indices", "stage_names", "qk_head_dim")
"""Settings that models compute from others."""


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """Return a config of the same type with small sizes, also of the configs inside."""
    values = config.to_dict()
    numbers = {name: value for name, value in values.items() if type(value) is int}
    deep = {value for name, value in numbers.items() if _size(name) == LAYERS}
    for name in COMPUTED:
        values.pop(name, None)
    heads = {value for name, value in numbers.items() if _size(name) == HEADS}
    for name, value in values.items():
        inside = getattr(config, name, None)
        if isinstance(inside, PretrainedConfig):
            values[name] = shrunk(inside).to_dict()
        elif type(value) is int and name.endswith(("token_id", "token_index", "_idx", "_token_ids")):
            values[name] = min(value, VOCABULARY - 1) if value >= 0 else value
        elif type(value) is int and (size := _size(name)) is not None:
            size = HEADS if size == GROUPS and value in heads else size  # not grouped
            values[name] = LAYERS if size == LAYERS else min(value, size)
        elif isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
            size = _size(name)
            short = value[:LAYERS] if len(value) in deep else value
            values[name] = [one if size is None else size if size == HEADS else min(one, size) for one in short]
        elif isinstance(value, list | tuple) and len(value) in deep:
            values[name] = value[:LAYERS]
        elif isinstance(value, Mapping) and name == "rope_parameters":
            values[name] = {**value, "mrope_section": [1, 1, 2]}  # of three axes
    return type(config).from_dict(values)


def _size(name: str) -> int | None:
    return next((size for pattern, size in SIZES if re.search(pattern, name)), None)


def small_model(model_type: str) -> PreTrainedModel:
    """Return a random model of a type, with a head for language modelling if it has one, in evaluation mode."""
    torch.manual_seed(0)
    config = shrunk(CONFIG_MAPPING[model_type]())
    config.pad_token_id = getattr(config, "pad_token_id", None) or 0
    for auto_class in (AutoModelForCausalLM, AutoModelForMaskedLM, AutoModel):
        if type(config) in auto_class._model_mapping:
            with torch.device("meta"):
                count = auto_class.from_config(config, attn_implementation="eager").num_parameters()
            if count > MOST_PARAMETERS:
                raise ValueError(f"{count:,} parameters")
            model: PreTrainedModel = auto_class.from_config(config, attn_implementation="eager").eval()
            return model
    raise ValueError("no model")


def small_batch(model: PreTrainedModel, kinds: str, seed: int = 0, length: int = 16) -> dict[str, Tensor]:
    """Return padded random tokens, images, or both ("tokens", "images", "tokens and images"), four of each."""
    generator = torch.Generator().manual_seed(seed)
    batch: dict[str, Tensor] = {}
    if "images" in kinds:
        configs = (model.config, getattr(model.config, "vision_config", None))
        size = next((found for config in configs if (found := getattr(config, "image_size", None))), 32)
        sides = [*size] if isinstance(size, list | tuple) else [size, size]
        batch["pixel_values"] = torch.randn(4, getattr(model.config, "num_channels", 3), *sides, generator=generator)
    if "tokens" in kinds:
        ids = torch.randint(8, VOCABULARY - 8, (4, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, length - 4 :] = 0
        batch |= {"input_ids": ids, "attention_mask": mask}
        if model.config.is_encoder_decoder:
            batch |= {"decoder_input_ids": ids.flip(0), "decoder_attention_mask": mask.flip(0)}
    return batch


def undescribed_types(described: Mapping[str, Any]) -> list[str]:
    """Return the types of models without those described, and without those made of models of other types."""
    auto = transformers.models.auto.modeling_auto
    mappings = (
        auto.MODEL_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )
    types = {name for mapping in mappings for name in mapping} - described.keys()
    return sorted(name for name in types if name in CONFIG_MAPPING and not CONFIG_MAPPING[name].sub_configs)
