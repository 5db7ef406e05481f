"""Heads of different sizes that share no channels: the per-head form, in a module and in a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_compress.attention.collaborative import CollaborativeParts, CollaborativeSpec, build_parts, install_
from collab_compress.attention.edit import CollaborativeEdit


@dataclass(frozen=True)
class PerHeadSpec(CollaborativeSpec):
    """All that is needed to rebuild one attention module in per-head form, weights aside.

    It is the collaborative form with a mixing matrix of zeros and ones: channels lie side by side, head by head.
    That matrix is neither trained nor saved nor multiplied by.

    Args:
        sizes: how many of the R channels each head has.
    """

    sizes: tuple[int, ...] = ()


def ownership(sizes: Sequence[int], device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Mixing matrix (H, R) of heads whose channels lie side by side: 1 where the head owns the channel, else 0."""
    owners = [head for head, size in enumerate(sizes) for _ in range(size)]
    rows = [[float(owner == head) for owner in owners] for head in range(len(sizes))]
    return torch.tensor(rows, device=device, dtype=dtype)


def build_per_head_parts(module: Any, spec: PerHeadSpec) -> CollaborativeParts:
    """Make uninitialised projections for `module`, as `build_parts` does, and its fixed mixing matrix."""
    parts = build_parts(module, spec)
    fixed: Any = nn.Buffer(ownership(spec.sizes, parts.mixing.device, parts.mixing.dtype), persistent=False)
    return replace(parts, mixing=fixed)


@dataclass(frozen=True)
class PerHeadEdit(CollaborativeEdit):
    """Attention modules in per-head form; paths as in `CollaborativeEdit`."""

    kind: ClassVar[str] = "per-head"

    def to_dict(self) -> dict[str, Any]:
        """Describe the edit in JSON types."""
        return {
            "modules": {name: {**asdict(spec), "sizes": list(_sizes(spec))} for name, spec in self.modules.items()}
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PerHeadEdit":
        """Rebuild the edit from what `to_dict` gave."""
        specs = {name: {**spec, "sizes": tuple(spec["sizes"])} for name, spec in data["modules"].items()}
        return cls({name: PerHeadSpec(**spec) for name, spec in specs.items()})

    def apply_(self, model: PreTrainedModel) -> None:
        """Put empty per-head attention into `model` in place, for weights to be loaded into."""
        for name, spec in self.modules.items():
            module = model.base_model.get_submodule(name)
            if not hasattr(module, "collaborative") and isinstance(spec, PerHeadSpec):
                install_(module, spec, build_per_head_parts(module, spec))

    def finish_(self, model: PreTrainedModel) -> None:
        """Fill in, in place, the mixing matrices, which are not in the checkpoint."""
        for name in self.modules:
            module: Any = model.base_model.get_submodule(name)
            with torch.no_grad():
                module.mixing.copy_(ownership(_sizes(module.collaborative)))


def _sizes(spec: CollaborativeSpec) -> tuple[int, ...]:
    assert isinstance(spec, PerHeadSpec)
    return spec.sizes
