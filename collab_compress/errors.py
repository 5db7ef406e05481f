"""Exceptions of this package; every message says what happened, where, and what to do."""

from collab_compress_options.errors import (
    CalibrationError,
    CheckpointError,
    CollabCompressError,
    CompressionError,
    DataError,
    HeadError,
    RecipeError,
    UnsupportedModelError,
    check_number,
    check_type,
    install,
    one_line,
    shown,
)

__all__ = [
    "CalibrationError",
    "CheckpointError",
    "CollabCompressError",
    "CompressionError",
    "DataError",
    "HeadError",
    "RecipeError",
    "UnsupportedModelError",
    "check_number",
    "check_type",
    "install",
    "one_line",
    "shown",
]
