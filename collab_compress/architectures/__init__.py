"""Where attention is in each family of models.

`FAMILIES` is the one table: `config.model_type` → description.
"""

from collab_compress.architectures.albert import ALBERT
from collab_compress.architectures.bart import BART
from collab_compress.architectures.bert import BERT
from collab_compress.architectures.camembert import CAMEMBERT
from collab_compress.architectures.deit import DEIT
from collab_compress.architectures.dense import DenseSite, find_dense_attention, split_heads
from collab_compress.architectures.distilbert import DISTILBERT
from collab_compress.architectures.electra import ELECTRA
from collab_compress.architectures.family import AttentionFamily
from collab_compress.architectures.fused import FusedSlice
from collab_compress.architectures.gpt2 import GPT2
from collab_compress.architectures.m2m_100 import M2M_100
from collab_compress.architectures.marian import MARIAN
from collab_compress.architectures.mbart import MBART
from collab_compress.architectures.model import transformers_model
from collab_compress.architectures.opt import OPT
from collab_compress.architectures.padding import RealTokens, forward_arguments, real_tokens
from collab_compress.architectures.pegasus import PEGASUS
from collab_compress.architectures.roberta import ROBERTA
from collab_compress.architectures.sites import KINDS, AttentionSite, Kind, find_attention
from collab_compress.architectures.t5 import T5
from collab_compress.architectures.vit import VIT
from collab_compress.architectures.xlm_roberta import XLM_ROBERTA

FAMILIES: dict[str, AttentionFamily] = {
    model_type: family
    for family in (
        ALBERT,
        BART,
        BERT,
        CAMEMBERT,
        DEIT,
        DISTILBERT,
        ELECTRA,
        GPT2,
        M2M_100,
        MARIAN,
        MBART,
        OPT,
        PEGASUS,
        ROBERTA,
        T5,
        VIT,
        XLM_ROBERTA,
    )
    for model_type in family.model_types
}

__all__ = [
    "FAMILIES",
    "KINDS",
    "AttentionFamily",
    "AttentionSite",
    "DenseSite",
    "FusedSlice",
    "Kind",
    "RealTokens",
    "find_attention",
    "find_dense_attention",
    "forward_arguments",
    "real_tokens",
    "split_heads",
    "transformers_model",
]
