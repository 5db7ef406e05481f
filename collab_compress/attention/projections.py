"""The query and key projections that all heads of a collaborative attention share."""

import torch
from torch import Tensor, nn


class SharedQuery(nn.Module):
    """Shared query projection x ↦ x·W̃q of width R, in place of H concatenated per-head ones.

    Transformers' attention splits what a projection returns into pieces of the head width d, so the output is
    padded with zeros to a multiple of d; the collaborative attention function takes the first R channels.

    Args:
        in_features: input width D.
        rank: shared width R.
        head_width: width d of one head in the model around it.
    """

    def __init__(
        self,
        in_features: int,
        rank: int,
        head_width: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.proj = nn.Linear(in_features, rank, bias=False, device=device, dtype=dtype)
        self.padding = -rank % head_width
        self.register_buffer("weight", _never_matching(device, dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Project x (B, T, D) to (B, T, R + padding)."""
        shared: Tensor = self.proj(x)
        return nn.functional.pad(shared, (0, self.padding)) if self.padding else shared


class SharedKey(nn.Module):
    """Shared key projection y ↦ y·W̃k of width R, followed by the content biases v_i·y of the H heads.

    The content biases ride in H further channels of the key, so that a key cache keeps them too.

    Args:
        in_features: input width D.
        rank: shared width R.
        heads: number of heads H.
        head_width: width d of one head in the model around it.
        content_bias: whether the model has query biases, hence content biases.
    """

    def __init__(
        self,
        in_features: int,
        rank: int,
        heads: int,
        head_width: int,
        content_bias: bool,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.proj = nn.Linear(in_features, rank, bias=False, device=device, dtype=dtype)
        self.content = nn.Linear(in_features, heads, bias=False, device=device, dtype=dtype) if content_bias else None
        self.padding = -(rank + heads * content_bias) % head_width
        self.register_buffer("weight", _never_matching(device, dtype))

    def forward(self, y: Tensor) -> Tensor:
        """Project y (B, S, D) to (B, S, R + H + padding)."""
        shared: Tensor = self.proj(y)
        if self.content is not None:
            shared = torch.cat([shared, self.content(y)], dim=-1)
        return nn.functional.pad(shared, (0, self.padding)) if self.padding else shared


def _never_matching(device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
    """Return the empty tensor saved under the stock weight's name.

    Its shape can never be the stock one, so loading the checkpoint into a stock model fails instead of leaving
    its query and key weights silently random.
    """
    return torch.empty(0, device=device, dtype=dtype)
