"""Measure how far a conversion moved the model's outputs."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.calibration import Batch, running
from collab_compress.conversion.report import Drift

HELD_BACK = 8  # one batch in this many


def split_held_back(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Split batches into those to calibrate on and those to measure drift on (the last one in eight).

    A single batch serves both purposes.
    """
    held_back = max(1, len(batches) // HELD_BACK) if batches else 0
    used = list(batches[: len(batches) - held_back]) or list(batches)
    return used, list(batches[len(batches) - held_back :])


def outputs(model: PreTrainedModel, batches: Sequence[Batch]) -> list[tuple[str, Tensor]]:
    """Run the model and keep the main output of each batch: logits, or else the first floating output."""
    results = []
    with running(model):
        for batch in batches:
            output = model(**{name: value.to(model.device) for name, value in batch.items()})
            named = {name: value for name, value in output.items() if isinstance(value, Tensor)}
            named.pop("loss", None)
            name = "logits" if "logits" in named else next(iter(named))
            results.append((name, named[name].float().cpu()))
    return results


def compare(
    before: Sequence[tuple[str, Tensor]], after: Sequence[tuple[str, Tensor]], batches: Sequence[Batch]
) -> Drift | None:
    """Compare outputs over real tokens, or over everything where the output has no token axis."""
    if not before:
        return None
    difference = norm = 0.0
    for (_, old), (_, new), batch in zip(before, after, batches, strict=True):
        mask = batch.get("attention_mask", torch.ones(0)).cpu()
        real = mask.bool() if mask.shape == old.shape[:2] and old.dim() == 3 else slice(None)
        difference += float((new[real] - old[real]).double().square().sum())
        norm += float(old[real].double().square().sum())
    sequences = sum(len(next(iter(batch.values()))) for batch in batches)
    return Drift(before[0][0], (difference / norm) ** 0.5 if norm else 0.0, sequences)
