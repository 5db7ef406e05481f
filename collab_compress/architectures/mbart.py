"""mBART (Liu et al., 2020): laid out like Marian."""

from dataclasses import replace

from collab_compress.architectures.marian import MARIAN

MBART = replace(MARIAN, name="mBART", model_types=("mbart",), attention_classes=("MBartAttention",))
