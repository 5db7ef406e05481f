"""OPT (Zhang et al., 2022): scales queries itself, and lays queries and keys out as exactly H heads."""

from collab_compress.architectures.family import AttentionFamily

OPT = AttentionFamily(
    name="OPT",
    model_types=("opt",),
    attention_classes=("OPTAttention",),
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="out_proj",
    heads="num_heads",
    head_width="head_dim",
    fixed_heads=True,
)
