"""Measure how far a conversion moves the model's outputs."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.calibration.gather import batch_masks
from collab_compress.conversion.report import OutputError
from collab_compress.devices import has_float64
from collab_compress.errors import CalibrationError

Outputs: TypeAlias = dict[str, Tensor]
"""Outputs of a model on one batch by their names, without the loss; the first is the main one but for logits."""

Watch: TypeAlias = Callable[[Batch, Outputs, Outputs], None]
"""Called with a batch, and with the dense and the converted model's outputs on it."""


def measure_output_error(
    model: PreTrainedModel, dense: PreTrainedModel, batches: Sequence[Batch], watch: Watch | None = None
) -> OutputError | None:
    """Return the relative error of the logits, as log probabilities, or of the first output; padding is left out.

    The outputs of one batch are in memory at a time, and `watch` reads them too.
    """
    measured = [_squared_errors(model, dense, batch, watch) for batch in batches]
    if not any(norm for *_, norm in measured):
        return None
    names, sequences, differences, norms = zip(*measured, strict=True)
    return OutputError(names[0], (sum(differences) / sum(norms)) ** 0.5, sum(sequences))


def _squared_errors(
    model: PreTrainedModel, dense: PreTrainedModel, batch: Batch, watch: Watch | None
) -> tuple[str, int, float, float]:
    """Return an output's name, its number of sequences, and the squared norms of its change and of itself."""
    before, after = read_outputs(dense, batch), read_outputs(model, batch)
    (name, old), (_, new) = _main(dense, before), _main(model, after)
    if old.shape != new.shape:
        raise CalibrationError(
            f"{type(dense).__name__} gives {name} of shape {tuple(old.shape)}, {type(model).__name__} one of "
            f"{tuple(new.shape)}; pass the dense model that was converted"
        )
    if watch is not None:
        watch(batch, before, after)
    mask = token_mask(dense, batch, name, old)
    has_classes = name.endswith("logits") and old.dim() <= 3 and old.shape[-1] > 1  # not pixels of images
    are_probabilities = has_classes and dense.config.problem_type not in ("regression", "multi_label_classification")
    difference = norm = 0.0
    for index in range(len(old)):  # one sequence at a time in float64
        tokens = slice(None) if mask is None else mask[index]
        one, other = (_float64(output[index][tokens]) for output in (old, new))
        if are_probabilities and one.numel():
            one, other = one.log_softmax(-1), other.log_softmax(-1)
        difference += float((other - one).square().sum())
        if are_probabilities and one.numel():
            one = one - one.mean(-1, keepdim=True)
        norm += float(one.square().sum())
    return "log probabilities" if are_probabilities else name, len(old), difference, norm


def main_output(model: PreTrainedModel, batch: Batch) -> tuple[str, Tensor]:
    """Run the model on one batch, and return the name and value of its logits, or of its first output but a loss."""
    return _main(model, read_outputs(model, batch))


def read_outputs(model: PreTrainedModel, batch: Batch) -> Outputs:
    """Run the model on one batch, and return its outputs."""
    with evaluation_mode(model):
        output = run_batch(model, batch)
    if not isinstance(output, Mapping):  # of a class that takes no return_dict
        values = output if isinstance(output, tuple) else (output,)
        output = {f"output {number}": value for number, value in enumerate(values)}
    return {name: value for name, value in output.items() if isinstance(value, Tensor) and name != "loss"}


def _main(model: PreTrainedModel, outputs: Outputs) -> tuple[str, Tensor]:
    """Return the name and value of the logits, or of the first output, or raise if they are not finite."""
    name = "logits" if "logits" in outputs else next(iter(outputs))
    if not bool(torch.isfinite(outputs[name]).all()):
        raise CalibrationError(f"{name} of {type(model).__name__} is not finite on the calibration data")
    return name, outputs[name]


def token_mask(model: PreTrainedModel, batch: Batch, name: str, output: Tensor) -> Tensor | None:
    """Return the attention mask of an output (B, T, …); None if there is none, or no token dimension."""
    mask = batch_masks(model, batch)["decoder"].query  # of the only tokens, if there is no decoder
    by_token = output.dim() > 2 or name in ("start_logits", "end_logits")
    if mask is None or not by_token or mask.shape != output.shape[:2]:
        return None
    return mask.to(output.device)


def _float64(values: Tensor) -> Tensor:
    return values.double() if has_float64(values.device) else values.cpu().double()
