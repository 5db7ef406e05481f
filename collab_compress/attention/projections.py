"""The query and key projections that all heads of a collaborative attention share, alone or fused into one layer."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


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


class QKVProjection(nn.Module):
    """Shared query and key projections and the model's own values, returned side by side as the stock layer does.

    Args:
        query: shared queries, padded to q channels.
        key: shared keys and content biases, padded to k channels.
        value: values, D → H·dv.
    """

    def __init__(self, query: SharedProjection, key: SharedProjection, value: nn.Linear) -> None:
        super().__init__()
        self.query, self.key, self.value = query, key, value

    @property
    def widths(self) -> list[int]:
        """q, k and H·dv: how the module around it splits what this returns."""
        return [self.query.width, self.key.width, self.value.out_features]

    def forward(self, x: Tensor) -> Tensor:
        """Project x (B, T, D) to (B, T, q + k + H·dv)."""
        return torch.cat([self.query(x), self.key(x), self.value(x)], dim=-1)


def joint_layer(module: Any, path: str) -> Conv1D | QKVProjection | None:
    """Find the layer that holds the projection at `path` together with others, or None where it stands alone."""
    parent = module.get_submodule(path.rpartition(".")[0])
    return parent if isinstance(parent, Conv1D | QKVProjection) else None


def value_of(layer: Conv1D) -> nn.Linear:
    """Copy the last third of a joint layer into a layer of its own; device, dtype and frozenness are kept."""
    width, weight = layer.weight.shape[1] // 3, layer.weight
    value = nn.Linear(weight.shape[0], width, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        value.weight.copy_(weight[:, 2 * width :].T)
        value.bias.copy_(layer.bias[2 * width :])
    return value.requires_grad_(weight.requires_grad)


def join(query: nn.Linear, key: nn.Linear, value: nn.Linear) -> Conv1D:
    """Put three projections into one transposed layer, as the stock model has it; a missing bias is zero."""
    parts: tuple[Any, ...] = (query, key, value)
    biases = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias for part in parts]
    layer = Conv1D(sum(part.out_features for part in parts), value.in_features).to(value.weight)
    with torch.no_grad():
        layer.weight.copy_(torch.cat([part.weight for part in parts]).T)
        layer.bias.copy_(torch.cat(biases))
    return layer.requires_grad_(value.weight.requires_grad)
