"""The query and key projections that all heads of a collaborative attention share."""

import torch
from torch import Tensor, nn


class SharedProjection(nn.Module):
    """A projection x ↦ x·W that all heads share, in place of H concatenated per-head ones.

    Queries have width R. Keys have width R, and where the model has content biases v_i·y, H further channels hold
    them, so that one product computes both and a key cache keeps both.

    Transformers' attention splits what a projection returns into pieces of the head width d, so the output is
    padded with zeros; the collaborative attention functions take it apart again.

    Args:
        in_features: input width D.
        width: R, or R + H.
        multiple: what the width is padded to a multiple of: the head width d, or H·d.
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        multiple: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.proj = nn.Linear(in_features, width, bias=False, device=device, dtype=dtype)
        self.padding = -width % multiple

    @property
    def weight(self) -> Tensor:
        """Weight (R or R + H, D), which stock models look for when they initialise."""
        return self.proj.weight

    @property
    def width(self) -> int:
        """How many channels leave, zeros included."""
        return self.proj.out_features + self.padding

    def forward(self, x: Tensor) -> Tensor:
        """Project x (B, T, D) to (B, T, width + padding)."""
        shared: Tensor = self.proj(x)
        return nn.functional.pad(shared, (0, self.padding)) if self.padding else shared
