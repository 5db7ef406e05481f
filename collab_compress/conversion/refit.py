"""Refit a converted model towards the dense one, in closed form."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.architectures import transformers_model
from collab_compress.calibration import Batch, Calibration, calibration_batches
from collab_compress.calibration.batches import in_parts, split_held_back
from collab_compress.checkpoint import all_or_nothing
from collab_compress.conversion.copies import sharing_copy
from collab_compress.conversion.inventory import Inventory, check_weights
from collab_compress.conversion.maps import Progress, silent
from collab_compress.conversion.report import RefitReport
from collab_compress.conversion.residual import width_out
from collab_compress.conversion.sequential import Parts, Refit, convert_layers_, install_refits
from collab_compress.errors import CalibrationError, HeadError


@torch.inference_mode(False)
def refit_(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    calibration: Calibration,
    *,
    sequences: int | None = None,
    length: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[RefitReport, ...]:
    """Refit the layers of a converted model that write to the residual stream, in place, without labels.

    Args:
        model: converted, in any form.
        dense: the model it was converted from; another object, which may share tensors.
        tokenizer: of both; as for `compress`.
        calibration: texts, batches or others, as for `compress`; an eighth is held back to choose the damping.
        sequences: number of sequences; all texts by default.
        length: where texts are cut, or tokens of a random sequence.
        seed: of random tokens and samples.
        progress: called with what is being done, how many layers are done, and how many there are, or None.

    Returns:
        Errors of the residual stream after each layer, in the order of the forward pass.

    Raises:
        UnsupportedModelError: the model's layers cannot be called alone.
        CalibrationError: the data are missing or unusable, or fewer than two sequences.
        HeadError: a model holds weights that are offloaded or not finite, or the two have different layers.
    """
    model, dense = transformers_model(model), transformers_model(dense)
    for role, part in (("converted", model), ("dense", dense)):
        weights = ((f"{name} of the {role} model", weight) for name, weight in part.named_parameters())
        check_weights(weights, HeadError)
    batches = calibration_batches(calibration, dense, tokenizer, sequences=sequences, length=length, seed=seed)
    used, held_back = map(in_parts, split_held_back(batches))
    results = refit(model, dense, used, held_back, progress or silent)
    with all_or_nothing(model):
        install_refits(model, results)
    return tuple(result.report for result in results)


def refit(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    used: Sequence[Batch],
    held_back: Sequence[Batch],
    progress: Progress = silent,
) -> list[Refit]:
    """Compute new weights for the residual linear layers; neither model is changed."""
    if not held_back:
        raise CalibrationError("refitting takes at least two sequences, one of them held back; pass more data")
    refitted = sharing_copy(model)
    inventories = [Inventory(one, used[0]) for one in (refitted, dense)]
    counts = [sum(len(stack.layers) for stack in inventory.stacks) for inventory in inventories]
    if counts[0] != counts[1]:
        raise HeadError(
            f"{type(model).__name__} has {counts[0]} layers, and {counts[1]} in the dense model; pass the dense "
            "model that was converted, or leave refitting out where layers were removed, which refitted the others"
        )
    linears, layers = inventories[0].residual_linears, list(inventories[0].layers)
    dense_modules = dict(dense.named_modules())
    for linear in linears:
        width, dense_width = width_out(refitted.get_submodule(linear.name)), width_out(dense_modules.get(linear.name))
        if width != dense_width:
            raise HeadError(
                f"{linear.name} has {width} outputs, and {dense_width or 'none'} in the dense model; pass the dense "
                "model that was converted"
            )
    parts = Parts(linears=linears, layers=layers)
    _, results, _ = convert_layers_(
        refitted, sharing_copy(dense), parts, used, held_back, same_inputs=False, progress=progress
    )
    return results
