"""RoBERTa (Liu et al., 2019): laid out like BERT."""

from dataclasses import replace

from collab_compress.architectures.bert import BERT

ROBERTA = replace(
    BERT,
    name="RoBERTa",
    model_types=("roberta",),
    attention_classes=("RobertaSelfAttention", "RobertaCrossAttention"),
)
