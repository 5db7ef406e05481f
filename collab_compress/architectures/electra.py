"""ELECTRA (Clark et al., 2020): laid out like BERT."""

from dataclasses import replace

from collab_compress.architectures.bert import BERT

ELECTRA = replace(
    BERT,
    name="ELECTRA",
    model_types=("electra",),
    attention_classes=("ElectraSelfAttention", "ElectraCrossAttention"),
)
