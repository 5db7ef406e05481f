"""Where attention is in each family of models, and in a live model."""

from collab_compress.architectures.families import FAMILIES, AttentionFamily
from collab_compress.architectures.sites import (
    AttentionSite,
    DenseSite,
    FusedSlice,
    ValueSite,
    find_attention,
    find_dense_attention,
    find_dense_values,
    refuse_hooks,
    refuse_kept_attention,
    split_heads,
    tokenizer_of,
    transformers_model,
)
from collab_compress.options import KINDS, Kind

__all__ = [
    "FAMILIES",
    "KINDS",
    "AttentionFamily",
    "AttentionSite",
    "DenseSite",
    "FusedSlice",
    "Kind",
    "ValueSite",
    "find_attention",
    "find_dense_attention",
    "find_dense_values",
    "refuse_hooks",
    "refuse_kept_attention",
    "split_heads",
    "tokenizer_of",
    "transformers_model",
]
