"""Projections of converted attention: padded to whole heads, separate or fused."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers.pytorch_utils import Conv1D

from collab_compress.errors import CheckpointError


class Replacement(nn.Module):
    """A module in place of a linear layer, which refuses the weights of that layer where a state dict holds them."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}weight" in state_dict:  # as Trainer resumes, which would ignore it
            raise CheckpointError(
                f"the state dict is a dense model's: it holds {prefix}weight, which this model has converted; load "
                "it before converting, or take a checkpoint of the converted model"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


class PaddedProjection(Replacement):
    """A projection x ↦ [x·W + b, x·vᵀ, 0] in place of that of H concatenated heads.

    Queries and keys that heads share are R channels wide, values dv. Keys of a model with content biases v (H, D)
    have H further channels v_i·y, so that a key cache keeps both. v is a parameter of its own, `content_bias`:
    optimizers exempt it from weight decay by its name, like the query bias it comes from.

    Transformers' attention splits the output of a projection into heads of width d, so the output is padded with
    zeros; the attention functions of this package remove them again.

    Args:
        in_features: input width D.
        width: R or dv.
        multiple: the number of output channels is padded to a multiple of this: the head width d, or H·d.
        bias: whether the projection has a bias b, as values may.
        content_biases: number of content biases, H or 0.

    Example:
        >>> projection = PaddedProjection(in_features=24, width=10, multiple=8)
        >>> projection(torch.randn(2, 6, 24)).shape
        torch.Size([2, 6, 16])
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        multiple: int,
        bias: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        content_biases: int = 0,
    ) -> None:
        super().__init__()
        self.proj = nn.Linear(in_features, width, bias=bias, device=device, dtype=dtype)
        self.content_bias: nn.Parameter | None = None
        if content_biases:
            self.content_bias = nn.Parameter(torch.empty(content_biases, in_features, device=device, dtype=dtype))
        self.padding = -self.channels % multiple

    @property
    def weight(self) -> Tensor:
        """Weight (width, D), which stock models initialise."""
        return self.proj.weight

    @property
    def bias(self) -> Tensor:
        """Bias (width,), or an empty tensor, which stock models initialise."""
        return self.proj.weight.new_empty(0) if self.proj.bias is None else self.proj.bias

    @property
    def channels(self) -> int:
        """Number of output channels without padding: R, R + H, or dv."""
        return self.proj.out_features + (0 if self.content_bias is None else len(self.content_bias))

    @property
    def width(self) -> int:
        """Number of output channels with padding."""
        return self.channels + self.padding

    def forward(self, x: Tensor) -> Tensor:
        """Project x (B, T, D) to (B, T, channels + padding)."""
        projected: Tensor = self.proj(x)
        if self.content_bias is None:
            return pad(projected, (0, self.padding)) if self.padding else projected
        return torch.cat([projected, pad(linear(x, self.content_bias), (0, self.padding))], -1)


class Layout(NamedTuple):
    """How a fused layer holds queries, keys and values in its output channels.

    Args:
        heads: number of query heads H.
        head_width: width d of one head.
        interleaved: whether each head's queries, keys and values lie together, (H, 3, d), instead of in three blocks,
            of which that of the queries is H·d wide and the other two share the rest.
        even: whether the module views queries, keys and values as equally many heads, so that all are padded to the
            width of the widest.

    Example:
        >>> query, key, value = Layout(heads=3, head_width=8).split(torch.randn(2, 6, 72), dim=-1)
        >>> query.shape
        torch.Size([2, 6, 24])
    """

    heads: int
    head_width: int
    interleaved: bool = False
    even: bool = False

    def split(self, channels: Tensor, dim: int) -> list[Tensor]:
        """Split fused queries, keys and values along a dimension, each with its heads side by side."""
        dim %= channels.dim()
        if self.interleaved:
            parts = channels.unflatten(dim, (self.heads, 3, self.head_width)).unbind(dim + 1)
            return [part.flatten(dim, dim + 1) for part in parts]
        query = self.heads * self.head_width
        other = (channels.shape[dim] - query) // 2
        return list(channels.split([query, other, other], dim))

    def join(self, parts: list[Tensor]) -> Tensor:
        """Undo `split` along the first dimension."""
        if not self.interleaved:
            return torch.cat(parts)
        heads = [part.unflatten(0, (self.heads, self.head_width)) for part in parts]
        return torch.stack(heads, 1).flatten(0, 2)


class QKVProjection(Replacement):
    """Separate queries, keys and values in place of a fused layer, because some of them are converted.

    Args:
        query: D → q channels, padding included.
        key: D → k channels.
        value: D → v channels.
        layout: of the stock layer.
        transposed: whether the stock layer is a `Conv1D`.
    """

    def __init__(
        self, query: nn.Module, key: nn.Module, value: nn.Module, *, layout: Layout, transposed: bool
    ) -> None:
        super().__init__()
        self.query, self.key, self.value = query, key, value
        self.layout, self.transposed = layout, transposed

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        """Queries, keys and values."""
        return self.query, self.key, self.value

    @property
    def weight(self) -> Tensor:
        """Weight of the values, (v, D), which stock models initialise."""
        weight: Tensor = self.parts[2].weight
        return weight

    @property
    def bias(self) -> None:
        """None: stock models initialise no bias then."""

    @property
    def widths(self) -> list[int]:
        """Channels q, k and v, by which the module splits the output."""
        return [part.width if isinstance(part, PaddedProjection) else part.out_features for part in self.parts]

    def forward(self, x: Tensor) -> Tensor:
        """Project x (B, T, D) to (B, T, q + k + v): three blocks, or as the stock layer lays them out."""
        parts = [part(x) for part in self.parts]
        if self.layout.even:
            widest = max(part.shape[-1] for part in parts)
            parts = [pad(part, (0, widest - part.shape[-1])) for part in parts]
            if self.layout.interleaved:
                heads = [part.unflatten(-1, (-1, self.layout.head_width)) for part in parts]
                return torch.stack(heads, -2).flatten(-3)
        return torch.cat(parts, dim=-1)


def fused_layer(module: Any, path: str) -> Conv1D | nn.Linear | QKVProjection | None:
    """Return the fused layer that holds the projection at `path`, or None if the projection is a separate layer."""
    parent = module.get_submodule(path.rpartition(".")[0])
    return parent if isinstance(parent, Conv1D | nn.Linear | QKVProjection) else None


def dense_projection(module: Any, path: str) -> tuple[Tensor, int]:
    """Return the weight that holds the projection at `path`, fused or not, and the width of its inputs."""
    layer = fused_layer(module, path)
    if layer is None or isinstance(layer, QKVProjection):
        layer = module.get_submodule(path)
    return layer.weight, width_in(layer)


def width_in(layer: Any) -> int:
    """Return the input width of a linear layer."""
    return int(layer.nx if isinstance(layer, Conv1D) else layer.in_features)


def replace_(module: Any, projections: Mapping[str, Any], layout: Layout) -> None:
    """Install projections in an attention module, path → projection, in place.

    A fused layer of queries, keys and values becomes three layers, or one layer again if all three are dense.

    Args:
        module: the attention module.
        projections: path → projection, or an object that holds the old fused layer as `layer`.
        layout: of the fused layer, if the stock module has one.
    """
    for path, projection in projections.items():
        if hasattr(projection, "layer"):
            _set_fused_(module, path, projection.layer)
            continue
        layer = fused_layer(module, path)
        if layer is not None and not isinstance(layer, QKVProjection):
            layer = QKVProjection(*_split_layer(layer, layout), layout=layout, transposed=isinstance(layer, Conv1D))
            _set_fused_(module, path, layer)
        module.set_submodule(path, projection.train(module.training))
        if layer is not None:
            is_dense = all(isinstance(part, nn.Linear) for part in layer.parts)
            _set_fused_(module, path, _join_layers(layer) if is_dense else layer)


def _set_fused_(module: Any, path: str, layer: nn.Module) -> None:
    """Replace the fused layer that holds the projection at `path`."""
    module.set_submodule(path.rpartition(".")[0], layer.train(module.training))
    if isinstance(layer, Conv1D):
        module.split_size = layer.nf // 3  # GPT-2 splits by this
    elif isinstance(layer, QKVProjection) and layer.transposed:
        module.split_size = layer.widths


def _split_layer(layer: nn.Linear | Conv1D, layout: Layout) -> list[nn.Linear]:
    """Copy the parts of a fused layer into separate layers; device, dtype and frozenness are kept."""
    weight: Tensor = layer.weight
    weights = layout.split(weight.T if isinstance(layer, Conv1D) else weight, 0)
    biases: list[Any] = [None] * 3 if layer.bias is None else layout.split(layer.bias, 0)
    parts = []
    for part_weight, bias in zip(weights, biases, strict=True):
        width, in_features = part_weight.shape
        part = nn.Linear(in_features, width, bias is not None, device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            part.weight.copy_(part_weight)
            if bias is not None:
                part.bias.copy_(bias)
        parts.append(part.requires_grad_(weight.requires_grad))
    return parts


def _join_layers(projections: QKVProjection) -> nn.Linear | Conv1D:
    """Fuse three projections into one layer, as in the stock model; missing biases become zeros."""
    parts, join = projections.parts, projections.layout.join
    weight = join([part.weight for part in parts])
    layer: nn.Linear | Conv1D
    if projections.transposed:
        with weight.device:  # it takes no device
            layer = Conv1D(weight.shape[0], weight.shape[1]).to(weight)
    else:
        has_bias = any(part.bias is not None for part in parts)
        layer = nn.Linear(weight.shape[1], weight.shape[0], has_bias, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight.T if projections.transposed else weight)
        if layer.bias is not None:
            biases = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias for part in parts]
            layer.bias.copy_(join(biases))
    return layer.requires_grad_(projections.weight.requires_grad)


def add_pre_hook_(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Register a forward pre-hook that takes keyword arguments, in place, unless it is registered."""
    if hook not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(hook, with_kwargs=True)


def remove_pre_hook_(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Undo `add_pre_hook_`, in place."""
    for number in [number for number, other in module._forward_pre_hooks.items() if other is hook]:
        del module._forward_pre_hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)
