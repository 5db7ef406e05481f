"""Measure how far a conversion moves the model's outputs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.calibration.gather import batch_masks
from collab_compress.conversion.report import OutputError
from collab_compress.devices import has_float64
from collab_compress.errors import CalibrationError


def measure_output_error(
    model: PreTrainedModel, dense: PreTrainedModel, batches: Sequence[Batch]
) -> OutputError | None:
    """Return the relative error of the logits, as log probabilities, or of the first output; padding is left out."""
    measured = [_squared_errors(model, dense, batch) for batch in batches]
    if not any(norm for *_, norm in measured):
        return None
    names, sequences, differences, norms = zip(*measured, strict=True)
    return OutputError(names[0], (sum(differences) / sum(norms)) ** 0.5, sum(sequences))


def _squared_errors(model: PreTrainedModel, dense: PreTrainedModel, batch: Batch) -> tuple[str, int, float, float]:
    """Return an output's name, its number of sequences, and the squared norms of its change and of itself."""
    (name, old), (_, new) = main_output(dense, batch), main_output(model, batch)
    if old.shape != new.shape:
        raise CalibrationError(
            f"{type(dense).__name__} gives {name} of shape {tuple(old.shape)}, {type(model).__name__} one of "
            f"{tuple(new.shape)}; pass the dense model that was converted"
        )
    mask = token_mask(dense, batch, name, old)
    has_classes = name.endswith("logits") and old.dim() <= 3 and old.shape[-1] > 1  # not pixels of images
    are_probabilities = has_classes and dense.config.problem_type not in ("regression", "multi_label_classification")
    difference = norm = 0.0
    for index in range(len(old)):  # one sequence at a time in float64
        tokens = slice(None) if mask is None else mask[index]
        before, after = (_float64(output[index][tokens]) for output in (old, new))
        if are_probabilities and before.numel():
            before, after = before.log_softmax(-1), after.log_softmax(-1)
        difference += float((after - before).square().sum())
        if are_probabilities and before.numel():
            before = before - before.mean(-1, keepdim=True)
        norm += float(before.square().sum())
    return "log probabilities" if are_probabilities else name, len(old), difference, norm


def main_output(model: PreTrainedModel, batch: Batch) -> tuple[str, Tensor]:
    """Run the model on one batch, and return the name and value of its logits, or of its first output but a loss."""
    with evaluation_mode(model):
        output = run_batch(model, batch)
    if not isinstance(output, Mapping):  # of a class that takes no return_dict
        values = output if isinstance(output, tuple) else (output,)
        output = {f"output {number}": value for number, value in enumerate(values)}
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
