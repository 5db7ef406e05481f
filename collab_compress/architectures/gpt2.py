"""GPT-2 (Radford et al., 2019): queries, keys and values come out of one transposed layer."""

from collab_compress.architectures.family import AttentionFamily

GPT2 = AttentionFamily(
    name="GPT-2",
    model_types=("gpt2",),
    attention_classes=("GPT2Attention",),
    query="c_attn.query",
    key="c_attn.key",
    value="c_attn.value",
    output="c_proj",
    heads="num_heads",
    head_width="head_dim",
    cross="crossattention",
    fused="c_attn",
    keeps_heads="it keeps queries, keys and values in one layer, c_attn",
    undescribed={"cross": "it keeps queries in one layer and keys and values together in another"},
)
