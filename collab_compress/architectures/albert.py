"""ALBERT (Lan et al., 2020): one attention module serves every layer of its group."""

from collab_compress.architectures.family import AttentionFamily

ALBERT = AttentionFamily(
    name="ALBERT",
    model_types=("albert",),
    attention_classes=("AlbertAttention",),
    query="query",
    key="key",
    value="value",
    output="dense",
    heads="num_attention_heads",
    head_width="attention_head_size",
)
