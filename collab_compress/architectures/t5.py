"""T5 (Raffel et al., 2020): scores are not scaled, and a position bias is added to them."""

from collab_compress.architectures.family import AttentionFamily

T5 = AttentionFamily(
    name="T5",
    model_types=("t5",),
    attention_classes=("T5Attention",),
    query="q",
    key="k",
    value="v",
    output="o",
    heads="n_heads",
    head_width="key_value_proj_dim",
    cross="EncDecAttention",
    keeps_heads="all layers share one position bias with a column for each head",
)
