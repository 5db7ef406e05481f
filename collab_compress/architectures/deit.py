"""DeiT (Touvron et al., 2021): laid out like ViT."""

from dataclasses import replace

from collab_compress.architectures.vit import VIT

DEIT = replace(VIT, name="DeiT", model_types=("deit",), attention_classes=("DeiTAttention",))
