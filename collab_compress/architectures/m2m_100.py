"""M2M100 (Fan et al., 2021) and NLLB (NLLB Team, 2022): laid out like Marian."""

from dataclasses import replace

from collab_compress.architectures.marian import MARIAN

M2M_100 = replace(MARIAN, name="M2M100/NLLB", model_types=("m2m_100",), attention_classes=("M2M100Attention",))
