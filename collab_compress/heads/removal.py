"""Attention modules with fewer heads as a model edit: how heads are cut out, and how a checkpoint does it again."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from collab_compress.attention.collaborative import CollaborativeSpec, is_collaborative
from collab_compress.attention.per_head import PerHeadSpec, ownership

# What some families keep beside the number of heads: H·d.
JOINT_WIDTHS = ("all_head_size",)


@dataclass(frozen=True)
class KeptHeads:
    """Which heads of one attention module are left, and where its parts are.

    Args:
        kept: heads that stay, ascending, counted as before the removal.
        before: number of heads before.
        head_width: width d of one head's queries and keys.
        value_width: width dv of one head's values.
        heads: attribute of the attention module that counts heads.
        query: attribute path of the query projection in the attention module.
        key: attribute path of the key projection.
        value: attribute path of the value projection.
        output: path inside the base model of the output projection.
    """

    kept: tuple[int, ...]
    before: int
    head_width: int
    value_width: int
    heads: str
    query: str
    key: str
    value: str
    output: str


@dataclass(frozen=True)
class Cut:
    """One attribute to be set: what remains of a parameter, or a size that follows from it."""

    owner: Any
    name: str
    value: Any


@dataclass(frozen=True)
class PrunedEdit:
    """Attention modules that have lost heads.

    Heads are counted as they were when the edit was made, so several such edits are replayed in their order.

    Args:
        modules: path of each module inside the base model → which of its heads are left.
    """

    modules: dict[str, KeptHeads]
    kind: ClassVar[str] = "pruned"
    implementations: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Describe the edit in JSON types."""
        return {"modules": {name: {**asdict(kept), "kept": list(kept.kept)} for name, kept in self.modules.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PrunedEdit":
        """Rebuild the edit from what `to_dict` gave."""
        return cls(
            {name: KeptHeads(**{**kept, "kept": tuple(kept["kept"])}) for name, kept in data["modules"].items()}
        )

    def apply_(self, model: PreTrainedModel) -> None:
        """Cut the heads out of `model` in place; its weights may still be empty."""
        for cut in plan_removal(model, self):
            setattr(cut.owner, cut.name, cut.value)

    def finish_(self, model: PreTrainedModel) -> None:
        """Do nothing: what is left of a projection is loaded like any other weight."""


def plan_removal(model: PreTrainedModel, edit: PrunedEdit) -> list[Cut]:
    """Compute what the edit changes, without changing it; modules that have not as many heads as before are done."""
    cuts = []
    for name, kept in edit.modules.items():
        module = model.base_model.get_submodule(name)
        if getattr(module, kept.heads) == kept.before:
            cuts += _module_cuts(module, model.base_model.get_submodule(kept.output), kept)
    return cuts


def _module_cuts(module: Any, output: Any, kept: KeptHeads) -> list[Cut]:
    values = _channels(kept.kept, kept.value_width)
    cuts = _output_cuts(module.get_submodule(kept.value), values) + _input_cuts(output, values)
    if is_collaborative(module):
        cuts += _collaborative_cuts(module, kept.kept)
    else:
        channels = _channels(kept.kept, kept.head_width)
        cuts += _output_cuts(module.get_submodule(kept.query), channels)
        cuts += _output_cuts(module.get_submodule(kept.key), channels)
    cuts.append(Cut(module, kept.heads, len(kept.kept)))
    cuts += [Cut(module, name, len(kept.kept) * kept.head_width) for name in JOINT_WIDTHS if hasattr(module, name)]
    return cuts


def _collaborative_cuts(module: Any, kept: Sequence[int]) -> list[Cut]:
    """Cut rows of the mixing matrix, and the channels of the shared key that hold content biases."""
    spec: CollaborativeSpec = module.collaborative
    if isinstance(spec, PerHeadSpec):
        return _per_head_cuts(module, spec, kept)
    smaller = replace(spec, heads=len(kept))
    query, key = module.get_submodule(spec.query), module.get_submodule(spec.key)
    cuts = [Cut(module, "mixing", _remaining(module.mixing, 0, kept)), Cut(module, "collaborative", smaller)]
    if spec.content_bias:
        channels = [*range(spec.rank), *(spec.rank + head for head in kept)]
        cuts += _output_cuts(key.proj, channels)
    widths = ((query, spec.rank), (key, spec.rank + smaller.content_channels))
    return [*cuts, *(Cut(projection, "padding", -width % smaller.multiple) for projection, width in widths)]


def _per_head_cuts(module: Any, spec: PerHeadSpec, kept: Sequence[int]) -> list[Cut]:
    """Cut the channels of heads that share none, and their content biases."""
    sizes = tuple(spec.sizes[head] for head in kept)
    smaller = replace(spec, heads=len(kept), rank=sum(sizes), sizes=sizes)
    owner = [head for head, size in enumerate(spec.sizes) for _ in range(size)]
    own = [channel for channel, head in enumerate(owner) if head in kept]
    content = [spec.rank + head for head in kept] if spec.content_bias else []
    fixed = ownership(sizes, module.mixing.device, module.mixing.dtype)
    cuts = [Cut(module, "mixing", nn.Buffer(fixed, persistent=False)), Cut(module, "collaborative", smaller)]
    for path, channels in ((spec.query, own), (spec.key, own + content)):
        projection = module.get_submodule(path)
        cuts += _output_cuts(projection.proj, channels)
        # heads without channels are left with zeros, for there must be something to lay out as heads
        cuts.append(Cut(projection, "padding", -len(channels) % smaller.multiple if channels else smaller.multiple))
    return cuts


def _channels(heads: Sequence[int], width: int) -> list[int]:
    return [head * width + channel for head in heads for channel in range(width)]


def _output_cuts(linear: Any, channels: Sequence[int]) -> list[Cut]:
    cuts = [
        Cut(linear, name, _remaining(parameter, 0, channels))
        for name, parameter in (("weight", linear.weight), ("bias", linear.bias))
        if parameter is not None
    ]
    return [*cuts, Cut(linear, "out_features", len(channels))]


def _input_cuts(linear: Any, channels: Sequence[int]) -> list[Cut]:
    return [Cut(linear, "weight", _remaining(linear.weight, 1, channels)), Cut(linear, "in_features", len(channels))]


def _remaining(parameter: nn.Parameter, dim: int, indices: Sequence[int]) -> nn.Parameter:
    index = torch.tensor(indices, dtype=torch.int64, device=parameter.device)
    return nn.Parameter(parameter.detach().index_select(dim, index), parameter.requires_grad)
