"""Measure how far a conversion moved the model's outputs."""

from collections.abc import Generator, Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.calibration import Batch, run_batch, running
from collab_compress.conversion.report import Drift
from collab_compress.errors import CalibrationError

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


def outputs(model: PreTrainedModel, batches: Iterable[Batch]) -> Generator[tuple[str, Tensor], None, None]:
    """Run the model and give the main output of each batch: logits, or else the first output but a loss.

    Raises:
        CalibrationError: the output is not finite.
    """
    with running(model):
        for batch in batches:
            output = run_batch(model, batch)
            named = {name: value for name, value in output.items() if isinstance(value, Tensor) and name != "loss"}
            name = "logits" if "logits" in named else next(iter(named))
            if not bool(torch.isfinite(named[name]).all()):
                raise CalibrationError(f"{name} of {type(model).__name__} is not finite on the calibration data")
            yield name, named[name].float().cpu()


def _rows(batch: Batch, rows: slice) -> Batch:
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in batch.items()}


def compare(
    before: Sequence[tuple[str, Tensor]], after: Iterable[tuple[str, Tensor]], batches: Sequence[Batch]
) -> Drift | None:
    """Compare outputs over real tokens, or over everything where the output has no token axis."""
    if not before:
        return None
    difference = norm = 0.0
    for (_, old), (_, new), batch in zip(before, after, batches, strict=True):
        mask = batch.get("decoder_attention_mask", batch.get("attention_mask", torch.ones(0))).cpu()
        real = mask.bool() if mask.shape == old.shape[:2] and old.dim() == 3 else slice(None)
        difference += float((new[real] - old[real]).double().square().sum())
        norm += float(old[real].double().square().sum())
    sequences = sum(len(value) for _, value in before)
    return Drift(before[0][0], (difference / norm) ** 0.5 if norm else 0.0, sequences)
