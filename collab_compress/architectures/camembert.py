"""CamemBERT (Martin et al., 2020): laid out like BERT."""

from dataclasses import replace

from collab_compress.architectures.bert import BERT

CAMEMBERT = replace(
    BERT,
    name="CamemBERT",
    model_types=("camembert",),
    attention_classes=("CamembertSelfAttention", "CamembertCrossAttention"),
)
