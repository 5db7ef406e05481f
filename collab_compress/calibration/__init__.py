"""Calibration data, and the moments of attention inputs on them."""

from collab_compress.calibration.gather import Batch, as_batch, evaluation_mode, gather_moments, run_batch
from collab_compress.calibration.source import Calibration, calibration_batches

__all__ = [
    "Batch",
    "Calibration",
    "as_batch",
    "calibration_batches",
    "evaluation_mode",
    "gather_moments",
    "run_batch",
]
