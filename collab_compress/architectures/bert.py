"""BERT (Devlin et al., 2019): an encoder, or a decoder that may also attend to what another model encoded."""

from collab_compress.architectures.family import AttentionFamily

BERT = AttentionFamily(
    name="BERT",
    model_types=("bert",),
    attention_classes=("BertSelfAttention", "BertCrossAttention"),
    query="query",
    key="key",
    value="value",
    output="..output.dense",
    heads="num_attention_heads",
    head_width="attention_head_size",
    cross="crossattention",
)
