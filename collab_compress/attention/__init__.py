"""The collaborative form inside a live model: projections, attention functions, kernels."""

from collab_compress.attention.functions import register_attention
from collab_compress.attention.shared import (
    CollaborativeParts,
    CollaborativeSpec,
    build_parts,
    install_,
    is_collaborative,
    load_parts_,
    read_parts,
    uninstall_,
)

__all__ = [
    "CollaborativeParts",
    "CollaborativeSpec",
    "build_parts",
    "install_",
    "is_collaborative",
    "load_parts_",
    "read_parts",
    "register_attention",
    "uninstall_",
]
