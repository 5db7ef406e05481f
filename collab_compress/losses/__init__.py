"""Losses on heads' vectors, attention rows and mixing matrices: pure tensor mathematics.

Vectors are (B, T, H, d), attention rows (B, H, T, S), masks (B, T) bool with True at real tokens.
"""

from collab_compress.losses.agreement import agreement, agreement_rows
from collab_compress.losses.bhattacharyya import bhattacharyya
from collab_compress.losses.hsic import hsic
from collab_compress.losses.kl_divergence import kl_divergence
from collab_compress.losses.nuclear import nuclear_growth, nuclear_norm
from collab_compress.losses.orthogonality import orthogonality

__all__ = [
    "agreement",
    "agreement_rows",
    "bhattacharyya",
    "hsic",
    "kl_divergence",
    "nuclear_growth",
    "nuclear_norm",
    "orthogonality",
]
