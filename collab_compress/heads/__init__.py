"""Read, mask, drop, mix, swap and remove attention heads."""

from collab_compress.heads.alphas import alphas_of, merge_alphas_, mix_heads_
from collab_compress.heads.drophead import DropHead
from collab_compress.heads.gates import HeadGates
from collab_compress.heads.hooks import PARTS, HeadMask, HeadRecord, Part, Recorder, masks_without
from collab_compress.heads.importance import average_distance, confidence, head_importance, least_important
from collab_compress.heads.pruning import prune_heads_
from collab_compress.heads.rotation import RotationEvent, RotationOptions, Rotator
from collab_compress.heads.swap import swap_heads_

__all__ = [
    "PARTS",
    "DropHead",
    "HeadGates",
    "HeadMask",
    "HeadRecord",
    "Part",
    "Recorder",
    "RotationEvent",
    "RotationOptions",
    "Rotator",
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
