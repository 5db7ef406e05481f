"""What projects the inputs of converted attention: padded to what modules view as heads, alone or side by side."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class PaddedProjection(nn.Module):
    """A projection x ↦ x·W + b whose channels are no whole heads, in place of H concatenated ones.

    Queries that all heads share have width R. Keys have width R, and where the model has content biases v_i·y, H
    further channels hold them, so that one product computes both and a key cache keeps both. Values have width dv.

    Transformers' attention splits what a projection returns into pieces of the head width d, so the output is
    padded with zeros; the collaborative attention functions take it apart again.

    Args:
        in_features: input width D.
        width: R, R + H, or dv.
        multiple: what the width is padded to a multiple of: the head width d, or H·d.
        bias: whether it has one, as values may.
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        multiple: int,
        bias: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.proj = nn.Linear(in_features, width, bias=bias, device=device, dtype=dtype)
        self.padding = -width % multiple

    @property
    def weight(self) -> Tensor:
        """Weight (width, D), which stock models look for when they initialise."""
        return self.proj.weight

    @property
    def bias(self) -> Tensor:
        """Bias (width,), or one of no channels, which stock models that initialise their projections look for."""
        return self.proj.weight.new_empty(0) if self.proj.bias is None else self.proj.bias

    @property
    def width(self) -> int:
        """How many channels leave, zeros included."""
        return self.proj.out_features + self.padding

    def forward(self, x: Tensor) -> Tensor:
        """Project x (B, T, D) to (B, T, width + padding)."""
        projected: Tensor = self.proj(x)
        return nn.functional.pad(projected, (0, self.padding)) if self.padding else projected


class QKVProjection(nn.Module):
    """Queries, keys and values of their own, returned side by side as the stock layer does, for some are converted.

    Args:
        query: D → q channels, padding included.
        key: D → k channels.
        value: D → v channels.
    """

    def __init__(self, query: nn.Module, key: nn.Module, value: nn.Module) -> None:
        super().__init__()
        self.query, self.key, self.value = query, key, value

    @property
    def widths(self) -> list[int]:
        """q, k and v: how the module around it splits what this returns."""
        parts: tuple[Any, ...] = (self.query, self.key, self.value)
        return [part.width if isinstance(part, PaddedProjection) else part.out_features for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        """Project x (B, T, D) to (B, T, q + k + v)."""
        return torch.cat([self.query(x), self.key(x), self.value(x)], dim=-1)


def joint_layer(module: Any, path: str) -> Conv1D | QKVProjection | None:
    """Find the layer that holds the projection at `path` together with others, or None where it stands alone."""
    parent = module.get_submodule(path.rpartition(".")[0])
    return parent if isinstance(parent, Conv1D | QKVProjection) else None


def replace_(module: Any, projections: Mapping[str, nn.Module]) -> None:
    """Put projections into an attention module, path → projection, in place.

    Where the module keeps queries, keys and values in one layer, all three stand side by side afterwards, or are one
    layer again if all are dense.
    """
    for path, projection in projections.items():
        layer = joint_layer(module, path)
        if isinstance(layer, Conv1D):
            layer = QKVProjection(*_thirds(layer))
            module.set_submodule(path.rpartition(".")[0], layer.train(module.training))
        module.set_submodule(path, projection.train(module.training))
        if layer is not None:
            parts = (layer.query, layer.key, layer.value)
            dense = all(isinstance(part, nn.Linear) for part in parts)
            whole: Any = _join(*parts).train(module.training) if dense else layer
            module.set_submodule(path.rpartition(".")[0], whole)
            module.split_size = whole.weight.shape[1] // 3 if dense else whole.widths


def put_back_(module: Any, projections: Mapping[str, Any]) -> None:
    """Put stock projections back in place of what `replace_` put there, in place.

    Args:
        module: the attention module.
        projections: path → projection, or something that holds the old joint layer as `whole`.
    """
    for path, projection in projections.items():
        if not hasattr(projection, "whole"):
            replace_(module, {path: projection})
        else:
            module.set_submodule(path.rpartition(".")[0], projection.whole)
            module.split_size = projection.whole.weight.shape[1] // 3


def _thirds(layer: Conv1D) -> list[nn.Linear]:
    """Copy the parts of a joint layer into layers of their own; device, dtype and frozenness are kept."""
    weight, width = layer.weight, layer.weight.shape[1] // 3
    thirds = []
    for start in range(0, 3 * width, width):
        third = nn.Linear(weight.shape[0], width, device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            third.weight.copy_(weight[:, start : start + width].T)
            third.bias.copy_(layer.bias[start : start + width])
        thirds.append(third.requires_grad_(weight.requires_grad))
    return thirds


def _join(*parts: Any) -> Conv1D:
    """Put three projections into one transposed layer, as the stock model has it; a missing bias is zero."""
    query, key, value = parts
    biases = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias for part in parts]
    layer = Conv1D(sum(part.out_features for part in parts), value.in_features).to(value.weight)
    with torch.no_grad():
        layer.weight.copy_(torch.cat([query.weight, key.weight, value.weight]).T)
        layer.bias.copy_(torch.cat(biases))
    return layer.requires_grad_(value.weight.requires_grad)
