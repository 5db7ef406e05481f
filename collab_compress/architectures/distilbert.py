"""DistilBERT (Sanh et al., 2019)."""

from collab_compress.architectures.family import AttentionFamily

DISTILBERT = AttentionFamily(
    name="DistilBERT",
    model_types=("distilbert",),
    attention_classes=("DistilBertSelfAttention",),
    query="q_lin",
    key="k_lin",
    value="v_lin",
    output="out_lin",
    heads="n_heads",
    head_width="attention_head_size",
)
