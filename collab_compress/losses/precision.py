"""What the losses share: enough precision, checked shapes, means over real positions and over pairs."""

from __future__ import annotations

import torch
from torch import Tensor


def full_precision(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or in its own dtype if that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def no_autocast(tensor: Tensor) -> torch.autocast:
    """Return a context in which products of such tensors keep their dtype, whatever the caller's autocast."""
    return torch.autocast(tensor.device.type, enabled=False)


def check(name: str, tensor: Tensor, layout: str, mask: Tensor | None, positions: tuple[int, int]) -> None:
    """Refuse a tensor or a mask that a loss would misread.

    Args:
        name: of the argument, for the message.
        tensor: to have four axes.
        layout: names of the four axes, for the message.
        mask: (B, T) bool, or None.
        positions: the axes of the tensor that are B and T.

    Raises:
        ValueError: the tensor has not four axes, or the mask is not bool or does not fit.
    """
    if tensor.ndim != 4:
        raise ValueError(f"{name} has the wrong shape: got {tuple(tensor.shape)}, expected {layout}")
    expected = tuple(tensor.shape[axis] for axis in positions)
    if mask is not None and (tuple(mask.shape) != expected or mask.dtype != torch.bool):
        raise ValueError(
            f"mask does not fit {name} {layout}: got {tuple(mask.shape)} of {mask.dtype}, expected {expected} "
            "of torch.bool, True at real tokens"
        )


def mean_over_real(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over real positions, 0 if there is none.

    Args:
        values: one value a position, (B, T).
        mask: True at real positions, (B, T), or None for all.

    Returns:
        A scalar.
    """
    if mask is None:
        return values.sum() / max(values.numel(), 1)
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def per_pair(heads: int) -> float:
    r"""Return $1 / (H (H - 1))$: makes a sum over ordered pairs of heads their mean; 0 for one head."""
    return 1.0 / (heads * (heads - 1)) if heads > 1 else 0.0
