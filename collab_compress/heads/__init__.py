"""Acting on attention heads: reading them, dropping, mixing, moving, masking and removing them."""

from collab_compress.heads.alphas import alphas_of, merge_alphas_, mix_heads_
from collab_compress.heads.drophead import DropHead
from collab_compress.heads.importance import average_distance, confidence, head_importance
from collab_compress.heads.mask import HeadMask, masks_without
from collab_compress.heads.pruning import least_important, prune_heads_
from collab_compress.heads.rotation import RotationEvent, RotationOptions, Rotator
from collab_compress.heads.swap import swap_heads_
from collab_compress.heads.tap import PARTS, Part, Reading, Tap

__all__ = [
    "PARTS",
    "DropHead",
    "HeadMask",
    "Part",
    "Reading",
    "RotationEvent",
    "RotationOptions",
    "Rotator",
    "Tap",
    "alphas_of",
    "average_distance",
    "confidence",
    "head_importance",
    "least_important",
    "masks_without",
    "merge_alphas_",
    "mix_heads_",
    "prune_heads_",
    "swap_heads_",
]
