"""Measure how far a conversion moved the model's outputs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.calibration import Batch, run_batch, running
from collab_compress.conversion.report import Drift
from collab_compress.errors import CalibrationError
from collab_compress.factorization import has_float64

HELD_BACK = 8  # one batch in this many


def split_held_back(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Split batches into those to calibrate on and those to measure drift on (the last one in eight).

    A single batch is split by rows; a single sequence is not held back, and no drift is measured.
    """
    if len(batches) == 1:
        sizes = {len(value) for value in batches[0].values() if isinstance(value, Tensor) and value.dim()}
        rows = max(sizes, default=1)
        if len(sizes) != 1 or rows == 1:
            return list(batches), []
        kept = rows - max(1, rows // HELD_BACK)
        return [_rows(batches[0], slice(kept))], [_rows(batches[0], slice(kept, None))]
    held_back = max(1, len(batches) // HELD_BACK) if batches else 0
    return list(batches[: len(batches) - held_back]), list(batches[len(batches) - held_back :])


def measure(
    model: PreTrainedModel, batches: Sequence[Batch], converted: Callable[[], AbstractContextManager[None]]
) -> Drift | None:
    """Compare a model's main output, logits or else the first output but a loss, with that of its converted self.

    Real tokens count, or everything where the output has no token axis. The outputs of one batch are held at a time.

    Args:
        model: the dense model.
        batches: what to run it on.
        converted: makes the model the converted one as long as the context lasts.

    Returns:
        The drift; None without batches.

    Raises:
        CalibrationError: an output is not finite.
    """
    name, sequences, difference, norm = "", 0, 0.0, 0.0
    for batch in batches:
        name, old = main_output(model, batch)
        with converted():
            _, new = main_output(model, batch)
        mask = _mask(batch, old)
        for row in range(len(old)):  # one sequence at a time is held in float64
            real = slice(None) if mask is None else mask[row]
            was, now = (_exact(output[row][real]) for output in (old, new))
            difference += float((now - was).square().sum())
            norm += float(was.square().sum())
        sequences += len(old)
    return Drift(name, (difference / norm) ** 0.5 if norm else 0.0, sequences) if sequences else None


def main_output(model: PreTrainedModel, batch: Batch) -> tuple[str, Tensor]:
    """Run the model on one batch; give the name and value of its logits, or else of its first output but a loss.

    Raises:
        CalibrationError: the output is not finite.
    """
    with running(model):
        output = run_batch(model, batch)
    named = {name: value for name, value in output.items() if isinstance(value, Tensor) and name != "loss"}
    name = "logits" if "logits" in named else next(iter(named))
    if not bool(torch.isfinite(named[name]).all()):
        raise CalibrationError(f"{name} of {type(model).__name__} is not finite on the calibration data")
    return name, named[name]


def _mask(batch: Batch, output: Tensor) -> Tensor | None:
    """Say which tokens of an output (B, T, …) are real; None where all count."""
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    if not isinstance(mask, Tensor) or mask.shape != output.shape[:2] or output.dim() != 3:
        return None
    return mask.to(output.device).bool()


def _exact(values: Tensor) -> Tensor:
    return values.double() if has_float64(values.device) else values.cpu().double()


def _rows(batch: Batch, rows: slice) -> Batch:
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in batch.items()}
