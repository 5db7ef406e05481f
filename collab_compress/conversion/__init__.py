"""From dense to converted, and back: compress, recover, expand, start from nothing."""

from collab_compress.conversion.recovery import distil_, recover_, with_copies

__all__ = ["distil_", "recover_", "with_copies"]
