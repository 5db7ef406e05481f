"""BART (Lewis et al., 2020): laid out like Marian."""

from dataclasses import replace

from collab_compress.architectures.marian import MARIAN

BART = replace(MARIAN, name="BART", model_types=("bart",), attention_classes=("BartAttention",))
