"""Pegasus (Zhang et al., 2020): laid out like Marian."""

from dataclasses import replace

from collab_compress.architectures.marian import MARIAN

PEGASUS = replace(MARIAN, name="Pegasus", model_types=("pegasus",), attention_classes=("PegasusAttention",))
