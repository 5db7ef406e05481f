"""Measure how far a conversion moved the model's outputs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.calibration.batches import is_divisible, sequence_count, slice_batch
from collab_compress.calibration.gather import batch_masks
from collab_compress.conversion.report import Drift
from collab_compress.errors import CalibrationError
from collab_compress.factorization import has_float64

HELD_BACK = 8  # one sequence in this many


def split_held_back(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Split batches into those to calibrate on and those to measure drift on: one sequence in eight, at least one.

    A batch is divided where that is needed and its tensors have one row for each sequence. A single sequence is not
    held back, and no drift is measured.
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
        The drift; None without batches, or where no output is other than 0 and padding.

    Raises:
        CalibrationError: an output is not finite.
    """
    return _pooled([_measured(model, batch, converted) for batch in batches])


def drift_of(model: PreTrainedModel, dense: PreTrainedModel, batches: Sequence[Batch]) -> Drift | None:
    """Compare the main output of a converted model with that of the dense one, which is another object.

    Args:
        model: converted.
        dense: what it was converted from.
        batches: as for `measure`.

    Returns:
        The drift; None without batches, or where no output is other than 0 and padding.

    Raises:
        CalibrationError: an output is not finite, or the two are of different shapes.
    """
    measured = []
    for batch in batches:
        (name, old), (_, new) = main_output(dense, batch), main_output(model, batch)
        if old.shape != new.shape:
            raise CalibrationError(
                f"{type(dense).__name__} gives {name} of shape {tuple(old.shape)}, {type(model).__name__} one of "
                f"{tuple(new.shape)}; pass the dense model that was converted"
            )
        measured.append(_compared(model, batch, name, old, new))
    return _pooled(measured)


Measured: TypeAlias = tuple[str, int, float, float]
"""An output's name, how many sequences it has, the square of its difference, and its own."""


def _pooled(measured: Sequence[Measured]) -> Drift | None:
    if not any(norm for *_, norm in measured):
        return None
    names, sequences, differences, norms = zip(*measured, strict=True)
    return Drift(names[0], (sum(differences) / sum(norms)) ** 0.5, sum(sequences))


def _measured(
    model: PreTrainedModel, batch: Batch, converted: Callable[[], AbstractContextManager[None]]
) -> Measured:
    name, old = main_output(model, batch)
    with converted():
        _, new = main_output(model, batch)
    return _compared(model, batch, name, old, new)


def _compared(model: PreTrainedModel, batch: Batch, name: str, old: Tensor, new: Tensor) -> Measured:
    mask = _mask(model, batch, name, old)
    difference = norm = 0.0
    for row in range(len(old)):  # one sequence at a time is held in float64
        real = slice(None) if mask is None else mask[row]
        was, now = (_exact(output[row][real]) for output in (old, new))
        difference += float((now - was).square().sum())
        norm += float(was.square().sum())
    return name, len(old), difference, norm


def main_output(model: PreTrainedModel, batch: Batch) -> tuple[str, Tensor]:
    """Run the model on one batch; give the name and value of its logits, or else of its first output but a loss.

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


def _mask(model: PreTrainedModel, batch: Batch, name: str, output: Tensor) -> Tensor | None:
    """Return which tokens of an output (B, T, …) are no padding; None where all count."""
    mask = batch_masks(model, batch)["decoder"].query  # that of the only tokens, where there is no decoder
    by_token = output.dim() > 2 or name in ("start_logits", "end_logits")
    if mask is None or not by_token or mask.shape != output.shape[:2]:
        return None
    return mask.to(output.device)


def _exact(values: Tensor) -> Tensor:
    return values.double() if has_float64(values.device) else values.cpu().double()
