"""Collaborative attention for pretrained Transformers models.

Importing the package lets stock `from_pretrained` rebuild converted checkpoints.
"""

from collab_compress.attention import MAP_KINDS, MapEdit, register_attention
from collab_compress.checkpoint import EDITS, register_checkpoint
from collab_compress.conversion.compress import compress
from collab_compress.conversion.expand import describe, expand, is_converted, read_factors
from collab_compress.conversion.from_scratch import FromScratch, from_config
from collab_compress.conversion.report import Agreement, OutputError, PartReport, Report
from collab_compress.errors import (
    CalibrationError,
    CheckpointError,
    CollabCompressError,
    CompressionError,
    UnsupportedModelError,
)
from collab_compress.factorization import Factors
from collab_compress.heads.alphas import AlphasEdit, alphas_of, merge_alphas_, mix_heads_
from collab_compress.heads.hooks import HeadMask
from collab_compress.heads.importance import head_importance
from collab_compress.heads.pruning import PrunedEdit, prune_heads_
from collab_compress.options import CalibrationOptions, Compression, Solver
from collab_compress.vocabulary import VocabularyReport, trim_vocabulary_

# What makes stock `from_pretrained` rebuild converted models.
EDITS.update({edit.kind: edit for edit in (AlphasEdit, PrunedEdit)} | dict.fromkeys(MAP_KINDS, MapEdit))
register_attention()
register_checkpoint()

__version__ = "0.1.0"

__all__ = [
    "Agreement",
    "CalibrationError",
    "CalibrationOptions",
    "CheckpointError",
    "CollabCompressError",
    "Compression",
    "CompressionError",
    "Factors",
    "FromScratch",
    "HeadMask",
    "OutputError",
    "PartReport",
    "Report",
    "Solver",
    "UnsupportedModelError",
    "VocabularyReport",
    "alphas_of",
    "compress",
    "describe",
    "expand",
    "from_config",
    "head_importance",
    "is_converted",
    "merge_alphas_",
    "mix_heads_",
    "prune_heads_",
    "read_factors",
    "trim_vocabulary_",
]
