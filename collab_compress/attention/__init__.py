"""The collaborative form inside a live model: projections, attention functions, kernels."""

from collab_compress.attention.collaborative import (
    CollaborativeParts,
    CollaborativeSpec,
    build_parts,
    install_,
    is_collaborative,
    load_parts_,
    read_parts,
    uninstall_,
)
from collab_compress.attention.functions import register_attention

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
