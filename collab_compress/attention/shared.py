"""The collaborative form of one module: its description, its parts, putting them in and out, and the stored edit."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_compress.attention.projections import FusedProjection, SharedProjection, fuse, fused_layer, value_of
from collab_compress.attention.view import IMPLEMENTATIONS, redirect_, restore_
from collab_compress.errors import CompressionError, UnsupportedModelError


def watch_cache_(module: Any) -> None:
    """Let `module` refuse, from now on, a static cache that its keys do not fit, in place."""
    module.register_forward_pre_hook(_refuse_static_cache, with_kwargs=True)


def unwatch_cache_(module: Any) -> None:
    """Undo `watch_cache_`, in place."""
    for number in [number for number, hook in module._forward_pre_hooks.items() if hook is _refuse_static_cache]:
        del module._forward_pre_hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)


def _refuse_static_cache(module: Any, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a static cache, which allocates values by the number of pieces that keys come in."""
    cache = kwargs.get("past_key_values")
    if cache is None or not getattr(cache, "is_compileable", False):
        return
    spec = module.collaborative
    key = module.get_submodule(spec.key)
    if key.width != spec.heads * spec.head_width:
        raise UnsupportedModelError(
            f"a static key cache has room for keys as wide as values, {spec.heads} × {spec.head_width}, and the keys "
            f"of this converted {type(module).__name__} are {key.width} wide; generate with the default, dynamic "
            "cache"
        )


@dataclass(frozen=True)
class CollaborativeSpec:
    """All that is needed to rebuild one collaborative attention module, weights aside.

    Args:
        query: attribute path of the query projection in the attention module; where the stock model keeps it in a
            fused layer, a child of that layer's path.
        key: attribute path of the key projection.
        heads: number of heads H.
        head_width: width d of one head's keys in the dense model.
        rank: shared width R.
        content_bias: whether the module has content biases v.
        scale: what scores are multiplied by; None keeps the model's own scale.
        train_mixing: whether the mixing matrix is trained.
        fixed_heads: whether the module views queries and keys as exactly H heads.
    """

    query: str
    key: str
    heads: int
    head_width: int
    rank: int
    content_bias: bool
    scale: float | None = None
    train_mixing: bool = True
    fixed_heads: bool = False

    @property
    def content_channels(self) -> int:
        """How many channels behind the shared key hold content biases: H or none."""
        return self.heads if self.content_bias else 0

    @property
    def key_pieces(self) -> int:
        """How many pieces of the head width the shared key and its content biases fill."""
        width = self.rank + self.content_channels
        return (width + -width % self.multiple) // self.head_width

    @property
    def multiple(self) -> int:
        """What the width of shared queries and keys is padded to a multiple of, for the module to view as heads.

        Raises:
            CompressionError: the module views exactly H heads, and they have no room for R and the content biases.
        """
        room = self.heads * self.head_width
        if self.fixed_heads and self.rank + self.content_channels > room:
            raise CompressionError(
                f"got dk {self.rank} and {self.content_channels} content biases for a model that lays keys out as "
                f"exactly {self.heads} heads of {self.head_width}; pass dk up to {room - self.content_channels}"
            )
        return room if self.fixed_heads else self.head_width


@dataclass(frozen=True)
class CollaborativeParts:
    """The parameters of a collaborative attention module, ready to be installed.

    Args:
        query: shared query projection.
        key: shared key projection, content biases included.
        mixing: mixing matrix (H, R).
        value: the model's own values where they were in one layer with query and key, else None.
    """

    query: SharedProjection
    key: SharedProjection
    mixing: nn.Parameter
    value: nn.Linear | None = None


def is_collaborative(module: Any) -> bool:
    """Whether this attention module has been converted."""
    return isinstance(getattr(module, "collaborative", None), CollaborativeSpec)


def build_parts(module: Any, spec: CollaborativeSpec) -> CollaborativeParts:
    """Make uninitialised parameters for `module`: device, dtype and frozenness are those of what they replace.

    Raises:
        CompressionError: as `CollaborativeSpec.multiple`.
    """
    layer: Any = fused_layer(module, spec.query)
    query, key = (
        (layer, layer) if layer is not None else (attrgetter(path)(module) for path in (spec.query, spec.key))
    )
    like: dict[str, Any] = {"device": query.weight.device, "dtype": query.weight.dtype}
    trained = (query.weight.requires_grad, key.weight.requires_grad)
    inputs = (query.weight.shape[0],) * 2 if layer is not None else (query.in_features, key.in_features)
    widths = (spec.rank, spec.rank + spec.content_channels)
    shared = [
        SharedProjection(width_in, width, spec.multiple, **like).requires_grad_(train)
        for width_in, width, train in zip(inputs, widths, trained, strict=True)
    ]
    mixing = nn.Parameter(torch.empty(spec.heads, spec.rank, **like), spec.train_mixing and any(trained))
    return CollaborativeParts(shared[0], shared[1], mixing, None if layer is None else value_of(layer))


def load_parts_(
    parts: CollaborativeParts, query: Tensor, mixing: Tensor, key: Tensor, content: Tensor | None
) -> None:
    """Copy W̃q (D, R), M (H, R), W̃k (D, R) and v (H, D) or None into `parts`, in place, in their dtype."""
    with torch.no_grad():
        parts.query.proj.weight.copy_(query.T)
        parts.mixing.copy_(mixing)
        parts.key.proj.weight.copy_(key.T if content is None else torch.cat([key.T, content]))


def install_(module: Any, spec: CollaborativeSpec, parts: CollaborativeParts) -> None:
    """Replace the query and key projections of `module` by `parts`, in place."""
    module.mixing = parts.mixing
    module.collaborative = spec
    if parts.value is None:
        module.set_submodule(spec.query, parts.query.train(module.training))
        module.set_submodule(spec.key, parts.key.train(module.training))
    else:
        fused = FusedProjection(parts.query, parts.key, parts.value).train(module.training)
        module.set_submodule(spec.query.rpartition(".")[0], fused)
        module.split_size = fused.widths
    redirect_(module)
    watch_cache_(module)
    if spec.scale is not None:
        module.stock_scaling, module.scaling = module.scaling, spec.scale


def uninstall_(module: Any, query: Any, key: Any) -> None:
    """Put dense projections back into a module that `install_` changed, also half-way, in place.

    Args:
        module: the attention module.
        query: its dense query projection; where the stock model has a fused layer, either a projection to be fused
            again, or something that holds the old layer as `whole`.
        key: the same for keys.
    """
    spec = module.__dict__.pop("collaborative", None)  # set by `install_` once `mixing` is there, before all else
    if spec is None:
        return
    layer = fused_layer(module, spec.query)
    if layer is None:
        module.set_submodule(spec.query, query)
        module.set_submodule(spec.key, key)
    else:
        whole = query.whole if hasattr(query, "whole") else fuse(query, key, layer.value)
        module.set_submodule(spec.query.rpartition(".")[0], whole)
        module.split_size = whole.weight.shape[1] // 3
    del module.mixing
    unwatch_cache_(module)
    restore_(module)
    if "stock_scaling" in module.__dict__:
        module.scaling = module.__dict__.pop("stock_scaling")


def read_parts(name: str, module: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Read W̃q (D, R), M (H, R), W̃k (D, R) and v (H, D) or None from the collaborative module called `name`.

    Raises:
        UnsupportedModelError: a projection carries an adapter, is quantized, or is offloaded.
    """
    spec: CollaborativeSpec = module.collaborative
    query, key = (
        _plain_weight(f"{name}.{path}.proj", module.get_submodule(path).proj) for path in (spec.query, spec.key)
    )
    content = key[spec.rank :] if spec.content_bias else None
    return query.T, module.mixing.detach(), key[: spec.rank].T, content


def _plain_weight(path: str, projection: Any) -> Tensor:
    """Read the weight of a projection, if that is all there is to it."""
    plain = isinstance(projection, nn.Linear) and type(projection).forward is nn.Linear.forward
    weight: Tensor = projection.weight
    if not plain or type(weight) not in (Tensor, nn.Parameter):
        kind = type(weight if plain else projection)
        raise UnsupportedModelError(
            f"{path}: got {kind.__module__}.{kind.__qualname__}, expected a plain torch.nn.Linear of floats; merge "
            "adapters and undo quantization first"
        )
    if weight.is_meta:
        raise UnsupportedModelError(f"{path} is offloaded; load the model into memory")
    return weight.detach()


@dataclass(frozen=True)
class CollaborativeEdit:
    """Attention modules in collaborative form.

    Args:
        modules: path of each module inside the base model (so that the checkpoint loads with and without a head)
            → what to rebuild there.
    """

    modules: dict[str, CollaborativeSpec]
    kind: ClassVar[str] = "collaborative"
    implementations: ClassVar[tuple[str, ...]] = IMPLEMENTATIONS

    def to_dict(self) -> dict[str, Any]:
        """Describe the edit in JSON types."""
        return {"modules": {name: asdict(spec) for name, spec in self.modules.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "CollaborativeEdit":
        """Rebuild the edit from what `to_dict` gave."""
        return cls({name: CollaborativeSpec(**spec) for name, spec in data["modules"].items()})

    def apply_(self, model: PreTrainedModel) -> None:
        """Put empty collaborative attention into `model` in place, for weights to be loaded into."""
        base = model.base_model
        for name, spec in self.modules.items():
            module = base.get_submodule(name)
            if not is_collaborative(module):
                install_(module, spec, build_parts(module, spec))

    def finish_(self, model: PreTrainedModel) -> None:
        """Freeze again, in place, the mixing matrices that are not trained."""
        for name, spec in self.modules.items():
            model.base_model.get_submodule(name).mixing.requires_grad_(spec.train_mixing)
