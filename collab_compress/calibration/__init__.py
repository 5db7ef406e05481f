"""Data-aware conversion: what to run the model on, and the moments of its attention inputs."""

from collab_compress.calibration.batches import Batch, Calibration, calibration_batches
from collab_compress.calibration.gather import evaluation_mode, gather_moments, run_batch

__all__ = ["Batch", "Calibration", "calibration_batches", "evaluation_mode", "gather_moments", "run_batch"]
