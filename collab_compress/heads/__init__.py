"""Acting on attention heads: reading them, dropping, mixing, moving, masking and removing them."""

from collab_compress.heads.tap import PARTS, Part, Reading, Tap

__all__ = ["PARTS", "Part", "Reading", "Tap"]
