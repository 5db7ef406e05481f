"""XLM-RoBERTa (Conneau et al., 2020): laid out like BERT."""

from dataclasses import replace

from collab_compress.architectures.bert import BERT

XLM_ROBERTA = replace(
    BERT,
    name="XLM-RoBERTa",
    model_types=("xlm-roberta",),
    attention_classes=("XLMRobertaSelfAttention", "XLMRobertaCrossAttention"),
)
