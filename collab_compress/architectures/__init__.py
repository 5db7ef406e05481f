"""Where attention is in each family of models.

`FAMILIES` is the one table: `config.model_type` → description.
"""

from collab_compress.architectures.albert import ALBERT
from collab_compress.architectures.bert import BERT
from collab_compress.architectures.dense import DenseSite, find_dense_attention, split_heads
from collab_compress.architectures.distilbert import DISTILBERT
from collab_compress.architectures.family import AttentionFamily
from collab_compress.architectures.marian import MARIAN
from collab_compress.architectures.padding import RealTokens, forward_arguments, real_tokens
from collab_compress.architectures.sites import KINDS, AttentionSite, Kind, find_attention

FAMILIES: dict[str, AttentionFamily] = {
    model_type: family for family in (BERT, ALBERT, DISTILBERT, MARIAN) for model_type in family.model_types
}

__all__ = [
    "FAMILIES",
    "KINDS",
    "AttentionFamily",
    "AttentionSite",
    "DenseSite",
    "Kind",
    "RealTokens",
    "find_attention",
    "find_dense_attention",
    "forward_arguments",
    "real_tokens",
    "split_heads",
]
