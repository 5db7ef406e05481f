"""Measure how far a conversion moves the model's outputs."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.calibration.batches import is_divisible, sequence_count, slice_batch
from collab_compress.calibration.gather import batch_masks
from collab_compress.conversion.report import Drift
from collab_compress.devices import has_float64
from collab_compress.errors import CalibrationError

HELD_BACK = 8  # one sequence in this many


def split_held_back(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Split batches into those to calibrate on and those to measure drift on: one sequence in eight, at least one.

    A batch is divided if needed, and if the first dimension of its tensors is the sequences. A single sequence is not
    held back.
    """
    used, held_back = list(batches), []
    wanted = max(1, sum(map(sequence_count, batches)) // HELD_BACK)
    while wanted > 0 and used:
        count = sequence_count(used[-1])
        if count > wanted and is_divisible(used[-1]):
            batch = used.pop()
            held_back.append(slice_batch(batch, slice(count - wanted, None)))
            used.append(slice_batch(batch, slice(count - wanted)))
        elif len(used) > 1 and (count <= wanted or not held_back):
            held_back.append(used.pop())
        else:
            break
        wanted -= count
    return used, held_back[::-1]


def drift_of(model: PreTrainedModel, dense: PreTrainedModel, batches: Sequence[Batch]) -> Drift | None:
    """Return the relative error of the main output of a converted model: logits, or the first output but a loss.

    Padding does not count. The outputs of one batch are in memory at a time.

    Args:
        model: converted.
        dense: the model it was converted from; another object.
        batches: keyword arguments for both models.

    Returns:
        The drift; None without batches, or if the dense output is 0 everywhere but at padding.

    Raises:
        CalibrationError: an output is not finite, or the two have different shapes.
    """
    measured = [_squared_errors(model, dense, batch) for batch in batches]
    if not any(norm for *_, norm in measured):
        return None
    names, sequences, differences, norms = zip(*measured, strict=True)
    return Drift(names[0], (sum(differences) / sum(norms)) ** 0.5, sum(sequences))


def _squared_errors(model: PreTrainedModel, dense: PreTrainedModel, batch: Batch) -> tuple[str, int, float, float]:
    """Return an output's name, its number of sequences, and the squared norms of its change and of itself."""
    (name, old), (_, new) = main_output(dense, batch), main_output(model, batch)
    if old.shape != new.shape:
        raise CalibrationError(
            f"{type(dense).__name__} gives {name} of shape {tuple(old.shape)}, {type(model).__name__} one of "
            f"{tuple(new.shape)}; pass the dense model that was converted"
        )
    mask = token_mask(dense, batch, name, old)
    difference = norm = 0.0
    for place in range(len(old)):  # one sequence at a time in float64
        tokens = slice(None) if mask is None else mask[place]
        before, after = (_float64(output[place][tokens]) for output in (old, new))
        difference += float((after - before).square().sum())
        norm += float(before.square().sum())
    return name, len(old), difference, norm


def main_output(model: PreTrainedModel, batch: Batch) -> tuple[str, Tensor]:
    """Run the model on one batch, and return the name and value of its logits, or of its first output but a loss.

    Raises:
        CalibrationError: the output is not finite.
    """
    with evaluation_mode(model):
        output = run_batch(model, batch)
    named = {name: value for name, value in output.items() if isinstance(value, Tensor) and name != "loss"}
    name = "logits" if "logits" in named else next(iter(named))
    if not bool(torch.isfinite(named[name]).all()):
        raise CalibrationError(f"{name} of {type(model).__name__} is not finite on the calibration data")
    return name, named[name]


def token_mask(model: PreTrainedModel, batch: Batch, name: str, output: Tensor) -> Tensor | None:
    """Return the attention mask of an output (B, T, …); None if there is none, or no token dimension."""
    mask = batch_masks(model, batch)["decoder"].query  # of the only tokens, if there is no decoder
    by_token = output.dim() > 2 or name in ("start_logits", "end_logits")
    if mask is None or not by_token or mask.shape != output.shape[:2]:
        return None
    return mask.to(output.device)


def _float64(values: Tensor) -> Tensor:
    return values.double() if has_float64(values.device) else values.cpu().double()
