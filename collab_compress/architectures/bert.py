"""BERT (Devlin et al., 2019)."""

from collab_compress.architectures.family import AttentionFamily

BERT = AttentionFamily(
    name="BERT",
    model_types=("bert",),
    attention_class="BertSelfAttention",
    query="query",
    key="key",
    value="value",
    output="..output.dense",
    heads="num_attention_heads",
    head_width="attention_head_size",
)
