"""Where attention is in each family of models.

`FAMILIES` is the one table: `config.model_type` → description.
"""

from collab_compress.architectures.albert import ALBERT
from collab_compress.architectures.bert import BERT
from collab_compress.architectures.distilbert import DISTILBERT
from collab_compress.architectures.family import AttentionFamily
from collab_compress.architectures.sites import AttentionSite, find_attention, split_heads

FAMILIES: dict[str, AttentionFamily] = {
    model_type: family for family in (BERT, ALBERT, DISTILBERT) for model_type in family.model_types
}

__all__ = ["FAMILIES", "AttentionFamily", "AttentionSite", "find_attention", "split_heads"]
