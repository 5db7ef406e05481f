"""Put collaborative attention into an attention module, and read it back."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from collab_compress.attention.projections import SharedProjection
from collab_compress.attention.view import redirect_, restore_


@dataclass(frozen=True)
class CollaborativeSpec:
    """All that is needed to rebuild one collaborative attention module, weights aside.

    Args:
        query: attribute path of the query projection in the attention module.
        key: attribute path of the key projection.
        heads: number of heads H.
        head_width: width d of one head's keys in the dense model.
        rank: shared width R.
        content_bias: whether the module has content biases v.
        scale: what scores are multiplied by; None keeps the model's own scale.
        train_mixing: whether the mixing matrix is trained.
    """

    query: str
    key: str
    heads: int
    head_width: int
    rank: int
    content_bias: bool
    scale: float | None = None
    train_mixing: bool = True

    @property
    def content_channels(self) -> int:
        """How many channels behind the shared key hold content biases: H or none."""
        return self.heads if self.content_bias else 0


@dataclass(frozen=True)
class CollaborativeParts:
    """The parameters of a collaborative attention module, ready to be installed."""

    query: SharedProjection
    key: SharedProjection
    mixing: nn.Parameter


def is_collaborative(module: Any) -> bool:
    """Whether this attention module has been converted."""
    return isinstance(getattr(module, "collaborative", None), CollaborativeSpec)


def build_parts(module: Any, spec: CollaborativeSpec) -> CollaborativeParts:
    """Make uninitialised parameters for `module`: device, dtype and frozenness are those of what they replace."""
    dense_query, dense_key = module.get_submodule(spec.query), module.get_submodule(spec.key)
    like: dict[str, Any] = {"device": dense_query.weight.device, "dtype": dense_query.weight.dtype}
    trained = (dense_query.weight.requires_grad, dense_key.weight.requires_grad)
    query = SharedProjection(dense_query.in_features, spec.rank, spec.head_width, **like)
    key = SharedProjection(dense_key.in_features, spec.rank + spec.content_channels, spec.head_width, **like)
    mixing = nn.Parameter(torch.empty(spec.heads, spec.rank, **like), spec.train_mixing and any(trained))
    return CollaborativeParts(query.requires_grad_(trained[0]), key.requires_grad_(trained[1]), mixing)


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
    module.set_submodule(spec.query, parts.query.train(module.training))
    module.set_submodule(spec.key, parts.key.train(module.training))
    redirect_(module)
    if spec.scale is not None:
        module.stock_scaling, module.scaling = module.scaling, spec.scale


def uninstall_(module: Any, query: nn.Module, key: nn.Module) -> None:
    """Put dense projections back into a module that `install_` changed, also half-way, in place."""
    spec = module.__dict__.pop("collaborative", None)  # set by `install_` once `mixing` is there, before all else
    if spec is None:
        return
    module.set_submodule(spec.query, query)
    module.set_submodule(spec.key, key)
    del module.mixing
    restore_(module)
    if "stock_scaling" in module.__dict__:
        module.scaling = module.__dict__.pop("stock_scaling")


def read_parts(module: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Read W̃q (D, R), M (H, R), W̃k (D, R) and v (H, D) or None from a collaborative module."""
    spec: CollaborativeSpec = module.collaborative
    query = module.get_submodule(spec.query).proj.weight.detach()
    key = module.get_submodule(spec.key).proj.weight.detach()
    content = key[spec.rank :] if spec.content_bias else None
    return query.T, module.mixing.detach(), key[: spec.rank].T, content
