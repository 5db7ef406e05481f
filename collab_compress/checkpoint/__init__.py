"""Save edited models so that stock `from_pretrained` rebuilds them."""

from collab_compress.checkpoint.edits import (
    EDITS,
    EditConfig,
    ModelEdit,
    all_or_nothing,
    edits_of,
    forget_edits_,
    is_edits,
    is_quantized,
    models_in,
    path_in_base,
    record_edit_,
)
from collab_compress.checkpoint.quantizer import register_checkpoint

__all__ = [
    "EDITS",
    "EditConfig",
    "ModelEdit",
    "all_or_nothing",
    "edits_of",
    "forget_edits_",
    "is_edits",
    "is_quantized",
    "models_in",
    "path_in_base",
    "record_edit_",
    "register_checkpoint",
]
