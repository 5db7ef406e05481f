"""ViT (Dosovitskiy et al., 2021): images as sequences of patches."""

from collab_compress.architectures.family import AttentionFamily

VIT = AttentionFamily(
    name="ViT",
    model_types=("vit",),
    attention_classes=("ViTAttention",),
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="o_proj",
    heads="num_attention_heads",
    head_width="head_dim",
)
