"""The linear layers of a converted attention module: one for all that reads the same input, or padded ones.

A module whose forward pass is ours has one `nn.Linear` for queries, keys, content biases and values, `qkv`; in
cross-attention queries stay alone, and keys and values are one layer, `kv`. A module with its stock forward pass
views projections as heads of the dense width d, so each stays a layer of its own, padded with zeros to whole heads.

Either way `module.rows` says where the channels of each projection are.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import FAMILIES, AttentionFamily
from collab_compress.architectures.families import Layout
from collab_compress.architectures.sites import fused_slice
from collab_compress.errors import CheckpointError, CollabCompressError, UnsupportedModelError

BY_CLASS = {  # a name can be that of a class that cannot be edited too
    name: row for row in FAMILIES.values() if not row.limits.feed_forward_only for name in row.attention_classes
}


class Rows(NamedTuple):
    """The rows `start` to `stop` of the linear layer at the path `layer` of an attention module."""

    layer: str
    start: int
    stop: int


class Weights(NamedTuple):
    """New parameters for a layer that stays in the model."""

    weight: nn.Parameter
    bias: nn.Parameter | None


def family_of(module: Any) -> AttentionFamily:
    """Return the family that describes an attention module."""
    family: AttentionFamily | None = getattr(module, "family", None)
    return BY_CLASS[type(module).__name__] if family is None else family


def input_paths(module: Any) -> tuple[str, str, str]:
    """Return the paths of a module's projections of queries, keys and values."""
    family = family_of(module)
    return family.paths.query, family.paths.key, family.paths.value


def rows_of(module: Any) -> dict[str, Rows]:
    """Return where the channels of replaced projections are, by the projection's path; empty in a stock module."""
    rows: dict[str, Rows] = module.__dict__.get("rows", {})
    return rows


def plain_weight(path: str, projection: Any, error: type[CollabCompressError] = UnsupportedModelError) -> Tensor:
    """Return the detached weight of the projection at `path`, which must be a parameter of it."""
    stock = next((kind for kind in (nn.Linear, Conv1D) if isinstance(projection, kind)), None)
    is_plain = stock is not None and type(projection).forward is stock.forward
    weight = projection._parameters.get("weight") if is_plain else None
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        kind = type(projection if type(weight) in (nn.Parameter, type(None)) else weight)
        raise error(
            f"{path}: got {kind.__module__}.{kind.__qualname__}, expected a plain torch.nn.Linear of floats; merge "
            "adapters and undo quantization first, and make computed weights plain (torch.nn.utils.prune.remove, "
            "parametrize.remove_parametrizations)"
        )
    if weight.is_meta:
        raise error(f"{path} is offloaded; load the model into memory")
    return weight.detach()


def plain_rows(name: str, module: Any, path: str) -> tuple[Tensor, Tensor | None]:
    """Return weight (n, D) and bias (n,) or None of a replaced projection of the module called `name`, views."""
    layer_path, start, stop = rows_of(module)[path]
    layer = module.get_submodule(layer_path)
    weight = plain_weight(f"{name}.{layer_path}", layer)[start:stop]
    return weight, None if layer.bias is None else layer.bias.detach()[start:stop]


def remaining(parameter: Tensor, dim: int, indices: Sequence[int]) -> nn.Parameter:
    """Return a parameter of some slices of another, frozen if that is."""
    index = torch.tensor(indices, dtype=torch.int64, device=parameter.device)
    return nn.Parameter(parameter.detach().index_select(dim, index), parameter.requires_grad)


def select_channels(x: Tensor, indices: Tensor) -> Tensor:
    """Return some channels of x (…, C), at indices (n,), as (…, n)."""
    vectors = x.flatten(0, -2)  # as a matrix: of three dimensions `index_select` takes four times as long on CPUs
    if torch.onnx.is_in_onnx_export():  # ONNX Runtime copies whole rows, but columns entry by entry
        selected = vectors.mT.index_select(0, indices).mT
    else:
        selected = vectors.index_select(1, indices)
    return selected.view(*x.shape[:-1], len(indices))


def width_in(layer: Any) -> int:
    """Return the input width of a linear layer."""
    return int(layer.nx if isinstance(layer, Conv1D) else layer.in_features)


def input_dim(layer: nn.Linear | Conv1D) -> int:
    """Return the input dimension of a linear layer's weight: 0 in a transposed layer (Conv1D), else 1."""
    return 0 if isinstance(layer, Conv1D) else 1


def fill_(layer: nn.Linear | Conv1D, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
    """Replace the parameters of a linear layer in place; its bias stays if the new one is None."""
    layer.weight = weight
    if bias is not None:
        layer.bias = bias
    setattr(layer, "in_features" if input_dim(layer) else "nx", weight.shape[input_dim(layer)])


class Replacement(nn.Module):
    """A module in place of a linear layer, which refuses the weights of that layer where a state dict holds them."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        refuse_dense(state_dict, f"{prefix}weight")
        super()._load_from_state_dict(state_dict, prefix, *args)


def refuse_dense(state_dict: Mapping[str, Any], name: str) -> None:
    """Raise if a state dict holds a weight that is converted; Trainer, which resumes, would ignore it."""
    if name in state_dict:
        raise CheckpointError(
            f"the state dict is a dense model's: it holds {name}, which this model has converted; load it before "
            "converting, or take a checkpoint of the converted model"
        )


class PaddedProjection(Replacement):
    """A linear layer whose outputs are padded with zeros, for a module that views them as heads of the dense width.

    The attention functions of this package remove the zeros again.
    """

    def __init__(self, proj: nn.Linear, padding: int = 0) -> None:
        super().__init__()
        self.proj, self.padding = proj, padding

    @property
    def weight(self) -> Tensor:
        """Weight (width, D), which stock models initialise."""
        return self.proj.weight

    @property
    def bias(self) -> Tensor:
        """Bias (width,), or an empty tensor, which stock models initialise."""
        return self.proj.weight.new_empty(0) if self.proj.bias is None else self.proj.bias

    @property
    def width(self) -> int:
        """Number of output channels with padding."""
        return self.proj.out_features + self.padding

    def forward(self, x: Tensor) -> Tensor:
        """Project x (B, T, D) to (B, T, channels + padding)."""
        projected: Tensor = self.proj(x)
        return pad(projected, (0, self.padding)) if self.padding else projected


class QKVProjection(Replacement):
    """Separate queries, keys and values in place of a stock module's fused layer, because some are converted."""

    def __init__(self, parts: Sequence[nn.Module], layout: Layout, head_width: int, transposed: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = parts
        self.layout, self.head_width, self.transposed = layout, head_width, transposed

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
        if self.layout.equal_widths:
            widest = max(part.shape[-1] for part in parts)
            parts = [pad(part, (0, widest - part.shape[-1])) for part in parts]
        return self.join(parts, -1)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Put queries, keys and values in one dimension as the stock layer does: in blocks, or head by head."""
        if not self.layout.interleaved:
            return torch.cat(list(parts), dim)
        dim %= parts[0].dim()
        heads = [part.unflatten(dim, (-1, self.head_width)) for part in parts]
        return torch.stack(heads, dim + 1).flatten(dim, dim + 2)


def fused_layer(module: Any, path: str) -> Conv1D | nn.Linear | QKVProjection | None:
    """Return the fused layer that holds the projection at `path`, or None if the projection is a separate layer."""
    parent = module.get_submodule(path.rpartition(".")[0])
    return parent if isinstance(parent, Conv1D | nn.Linear | QKVProjection) else None


def projection_like(module: Any, path: str) -> tuple[Tensor, int]:
    """Return the weight that holds the projection at `path`, fused or not, and the width of its inputs."""
    layer: Any = fused_layer(module, path)
    if path in rows_of(module):
        layer = module.get_submodule(rows_of(module)[path].layer)
    elif layer is None or isinstance(layer, QKVProjection):
        layer = module.get_submodule(path)
    return layer.weight, width_in(layer)


# Layers of a module with its stock forward pass.


def replace_(module: Any, projections: Mapping[str, nn.Module], head_width: int) -> None:
    """Install projections in an attention module, path → projection, in place.

    A fused layer of queries, keys and values becomes three layers, or one layer again if all three are dense.
    """
    rows, family = dict(rows_of(module)), family_of(module)
    for path, projection in projections.items():
        layer = fused_layer(module, path)
        if layer is not None and not isinstance(layer, QKVProjection):
            slices = [fused_slice(module, family, part) for part in input_paths(module)]
            parts = [copied(part.weight, part.bias, layer.weight) for part in slices if part is not None]
            layer = QKVProjection(parts, family.layout, head_width, isinstance(layer, Conv1D))
            _set_fused_(module, path, layer)
        module.set_submodule(path, projection.train(module.training))
        if layer is not None:
            is_dense = all(isinstance(part, nn.Linear) for part in layer.parts)
            _set_fused_(module, path, _join_layers(layer) if is_dense else layer)
        rows.pop(path, None)
        if isinstance(projection, PaddedProjection):
            rows[path] = Rows(f"{path}.proj", 0, projection.proj.out_features)
    _set_rows_(module, rows)


def _set_rows_(module: Any, rows: dict[str, Rows]) -> None:
    if rows:
        module.rows = rows
    else:
        module.__dict__.pop("rows", None)


def _set_fused_(module: Any, path: str, layer: nn.Module) -> None:
    """Replace the fused layer that holds the projection at `path`."""
    module.set_submodule(path.rpartition(".")[0], layer.train(module.training))
    if isinstance(layer, Conv1D):
        module.split_size = layer.nf // 3  # GPT-2 splits by this


def copied(weight: Tensor, bias: Tensor | None, like: Tensor) -> nn.Linear:
    """Return a layer with a copy of weight (n, D) and bias (n,); device, dtype and frozenness are those of `like`."""
    width, in_features = weight.shape
    layer = nn.Linear(in_features, width, bias is not None, device=like.device, dtype=like.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer.requires_grad_(like.requires_grad)


def _join_layers(projections: QKVProjection) -> nn.Linear | Conv1D:
    """Fuse three projections into one layer, as in the stock model; missing biases become zeros."""
    parts = projections.parts
    weight = projections.join([part.weight for part in parts], 0)
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
            layer.bias.copy_(projections.join([_bias(part) for part in parts], 0))
    return layer.requires_grad_(projections.weight.requires_grad)


def _bias(layer: nn.Linear) -> Tensor:
    return layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias


# Layers of a module whose forward pass is ours.


def join_(module: Any, new: Mapping[str, nn.Linear], *, cross: bool) -> None:
    """Join the projections of a module to one layer for each input, in place.

    Where some have a bias, all get one: zeros for the others, whose training changes nothing (a constant of all
    keys) or can be told as a content bias (of the queries).
    """
    query, key, value = input_paths(module)
    parts = _separate(module) | dict(new)
    rows = {}
    for name, paths in ((query, [query]), ("kv", [key, value])) if cross else (("qkv", [query, key, value]),):
        layers, start = [parts[path] for path in paths], 0
        for path, layer in zip(paths, layers, strict=True):
            rows[path] = Rows(name, start, start := start + layer.out_features)
        if len(layers) > 1:
            has_bias = any(layer.bias is not None for layer in layers)
            weight = torch.cat([layer.weight.detach() for layer in layers])
            bias = torch.cat([_bias(layer).detach() for layer in layers]) if has_bias else None
            is_trained = any(layer.weight.requires_grad for layer in layers)
            layers = [copied(weight, bias, weight).requires_grad_(is_trained)]
        module.__dict__.setdefault("stock_children", [*module._modules])
        for path in paths:
            module._modules.pop(path, None)
        module._modules[name] = layers[0].train(module.training)
    module.rows = rows


def separate_(module: Any, dense: Mapping[str, nn.Linear]) -> None:
    """Undo `join_` in place, with dense projections in place of the converted ones."""
    parts = _separate(module) | dict(dense)
    for layer in ("qkv", "kv"):
        module._modules.pop(layer, None)
    for path in input_paths(module):
        module._modules[path] = parts[path].train(module.training)
    for name in module.__dict__.pop("stock_children"):  # in the stock order
        if name in module._modules:
            module._modules[name] = module._modules.pop(name)
    module.__dict__.pop("rows", None)


def _separate(module: Any) -> dict[str, nn.Linear]:
    """Return the three projections of a module, joined or not, as layers of their own."""
    parts, family = {}, family_of(module)
    for path in input_paths(module):
        if path in rows_of(module):
            name, start, stop = rows_of(module)[path]
            layer = module._modules[name]
            if (start, stop) != (0, layer.out_features):
                has_bias = layer.bias is not None and (path != family.paths.key or family.key_bias)
                bias = layer.bias[start:stop] if has_bias else None
                layer = copied(layer.weight[start:stop], bias, layer.weight)
        else:
            layer = module._modules[path]
        parts[path] = layer
    return parts


def add_pre_hook_(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Register a forward pre-hook that takes keyword arguments, in place, unless it is registered."""
    if hook not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(hook, with_kwargs=True)


def remove_pre_hook_(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Undo `add_pre_hook_`, in place."""
    for number in [number for number, other in module._forward_pre_hooks.items() if other is hook]:
        del module._forward_pre_hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)
