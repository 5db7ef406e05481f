"""Projections that a model keeps side by side in one transposed layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures.family import AttentionFamily


@dataclass(frozen=True, eq=False)
class FusedSlice:
    """One of the projections in a fused layer, seen as the `nn.Linear` it would be by itself.

    Args:
        whole: the layer, weight (D, 3·H·d) and bias (3·H·d,).
        start: where the projection's channels begin.
        stop: where they end.
    """

    whole: Conv1D
    start: int
    stop: int

    @property
    def in_features(self) -> int:
        """Input width D."""
        return int(self.whole.weight.shape[0])

    @property
    def out_features(self) -> int:
        """Output width H·d."""
        return self.stop - self.start

    @property
    def weight(self) -> Tensor:
        """View of the weight in the layout of `nn.Linear`, (H·d, D)."""
        return self.whole.weight[:, self.start : self.stop].T  # type: ignore[no-any-return]

    @property
    def bias(self) -> Tensor:
        """View of the bias, (H·d,)."""
        return self.whole.bias[self.start : self.stop]  # type: ignore[no-any-return]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield weight and bias, as views."""
        yield "weight", self.weight
        yield "bias", self.bias

    def register_forward_pre_hook(self, hook: Any) -> RemovableHandle:
        """Let `hook` see what the layer reads."""
        return self.whole.register_forward_pre_hook(hook)  # type: ignore[no-any-return]


def fused_slice(module: Any, family: AttentionFamily, path: str) -> FusedSlice | None:
    """Find the part of a stock module's fused layer for which a path of the family stands, or None."""
    parts = (family.query, family.key, family.value)
    whole = getattr(module, family.fused, None) if family.fused and path in parts else None
    width = getattr(module, family.heads, 0) * getattr(module, family.head_width, 0)
    if not isinstance(whole, Conv1D) or whole.weight.shape[1] != 3 * width:
        return None
    start = parts.index(path) * width
    return FusedSlice(whole, start, start + width)
