"""Marian (Junczys-Dowmunt et al., 2018): encoder–decoder; one class serves all three kinds of attention."""

from collab_compress.architectures.family import AttentionFamily

MARIAN = AttentionFamily(
    name="Marian",
    model_types=("marian",),
    attention_classes=("MarianAttention",),
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="out_proj",
    heads="num_heads",
    head_width="head_dim",
    cross="encoder_attn",
)
