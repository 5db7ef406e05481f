"""How much a loss depends on each head: its gradient in a mask on the head's output."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import transformers_model
from collab_compress.calibration import running
from collab_compress.errors import HeadError
from collab_compress.heads.mask import HeadMask

Loss = Callable[[Any, Mapping[str, Any]], Tensor]


def head_importance(
    model: PreTrainedModel, batches: Iterable[Mapping[str, Any]], loss: Loss | None = None
) -> dict[str, Tensor]:
    """Score heads by how much the loss would change if their outputs were scaled.

        I_h = E_x |∂L(x)/∂ξ_h| at ξ = 1,   then I ← I / ‖I‖₂ within each module

    where ξ_h multiplies the output of head h (Michel et al., "Are Sixteen Heads Really Better than One?", 2019,
    eq. 2 and section 4.1; "Scheduled DropHead" prunes by it). Each sample has masks of its own, so that one backward
    pass gives the gradient of every sample: the loss of a batch is the mean over its B samples, so the gradient in
    the mask of sample b is ∂L_b/∂ξ / B, and is multiplied by B again. Where a loss is a mean over tokens instead, a
    sample counts by its share of tokens. Runs in evaluation mode; gradients of parameters are neither needed nor
    touched.

    Args:
        model: stock or edited, with or without other masks on it.
        batches: arguments of `model` by name, one mapping of tensors (B, …) a batch; read once, one at a time.
        loss: gives the loss from the model's outputs and the batch: a mean over samples, or one loss a sample (B,).
            The model's own loss, for which batches need labels, if not given.

    Returns:
        Path of the attention module → (H,) on the CPU, of norm 1, or all 0 where the loss does not depend on any
        head. A module that serves several layers (ALBERT) sums them before the absolute value.

    Raises:
        UnsupportedModelError: the model's family is not known.
        HeadError: no batches, no loss or one without gradient, a gradient that is not finite.
    """
    model = transformers_model(model)
    with HeadMask(model) as mask, running(model), torch.enable_grad():
        sums = {name: torch.zeros(heads, dtype=torch.float64) for name, heads in mask.heads.items()}
        samples = 0
        for batch in batches:
            moved = {
                key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in batch.items()
            }
            size = _samples(moved)
            gates = {
                name: torch.ones(size, heads, device=model.device, requires_grad=True)
                for name, heads in mask.heads.items()
            }
            mask.set(gates)
            total = _total(model, moved, size, loss)
            gradients = torch.autograd.grad(total, list(gates.values()), allow_unused=True)
            for name, gradient in zip(gates, gradients, strict=True):
                if gradient is not None:  # else this batch did not go through the module
                    sums[name] += gradient.double().abs().sum(0).cpu()
            samples += size
    if not samples:
        raise HeadError("head importance needs at least one batch, got none")
    return {name: _normalised(name, values / samples) for name, values in sums.items()}


def _total(model: PreTrainedModel, batch: Mapping[str, Any], size: int, loss: Loss | None) -> Tensor:
    """Sum of the losses of all samples."""
    outputs = model(**batch, return_dict=True)
    value = getattr(outputs, "loss", None) if loss is None else loss(outputs, batch)
    if value is None:
        raise HeadError(
            f"{type(model).__name__} returned no loss; put labels into the batches, or pass loss=, a function of the "
            "outputs and the batch"
        )
    if not isinstance(value, Tensor) or value.shape not in ((), (1,), (size,)):
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise HeadError(f"the loss is of {got}; expected a mean over samples (), or one loss a sample ({size},)")
    if not value.requires_grad:
        raise HeadError("the loss has no gradient in the heads; compute it from the outputs, without detaching them")
    return value.sum() if value.shape == (size,) else value.sum() * size


def _samples(batch: Mapping[str, Any]) -> int:
    sizes = {len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()}
    if len(sizes) != 1:
        raise HeadError(
            f"cannot tell how many samples a batch has: its tensors begin with sizes {sorted(sizes)}; "
            "expected tensors (batch, …)"
        )
    return sizes.pop()


def _normalised(name: str, values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise HeadError(f"{name}: the gradient of the loss in its heads is not finite; check weights and batches")
    norm = values.norm()
    return (values / norm if norm > 0 else values).float()
