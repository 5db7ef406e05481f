"""Heads that share channels: W̃q and W̃k serve all of them, a mixing matrix M says how much each uses of which.

    score_i(x, y) = s · [ ((x W̃q) ⊙ m_i) · (y W̃k) + v_i · y ]

("Multi-Head Attention: Collaborate Instead of Concatenate", eqs. 7 and 13; costs as in section 3.4.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from collab_compress.attention.form import HeadRows, ScoreForm
from collab_compress.attention.kernels import (
    attention_probabilities,
    blocked,
    folded,
    kernel_for,
    mode_of,
    recomputed,
    sdpa,
)


def attend(
    query: Tensor, key: Tensor, content: Tensor | None, mixing: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float, dropout: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Compute head outputs (B, H, T, dv) by the kernel of the table; shapes as in `kernels`."""
    mode = mode_of(dropout, query, key, content, mixing, value, mask)
    if mode == "training" and mask is not None and mask.requires_grad:
        mode = "general"
    kernel = kernel_for("shared", mode, query)
    if kernel == "blocked":
        return blocked(query, key, content, mixing, value, mask, scaling, causal)
    function = {"recomputed": recomputed, "folded": folded, "sdpa": sdpa}[kernel]
    return function(query, key, content, mixing, value, mask, scaling, dropout, causal)


@dataclass(frozen=True)
class SharedScores(ScoreForm):
    """The collaborative form: every head reads all R channels, each by its row m_i of the mixing matrix."""

    kind: ClassVar[str] = "collaborative"
    option: ClassVar[str] = "shared"
    title: ClassVar[str] = "shared attention"
    space: ClassVar[str] = "a shared query/key space"
    solvers: ClassVar[tuple[str, ...]] = ("als", "parafac")

    def build_mixing(self, trained: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Make an empty parameter."""
        empty = torch.empty(self.heads, self.rank, device=device, dtype=dtype)
        return nn.Parameter(empty, self.train_mixing and trained)

    def finish_(self, module: Any) -> None:
        """Freeze the mixing matrix again if it is not trained."""
        module.mixing.requires_grad_(self.train_mixing)

    def trained(self, module: Any) -> list[nn.Parameter]:
        """List shared projections and mixing matrix."""
        return [*super().trained(module), module.mixing]

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float,
        dropout: float, causal: bool,
    ) -> Tensor:  # fmt: skip
        """Attend by `attend`."""
        shared_query, shared_key, content = self.unpack(module, query, key, scaling)
        return attend(
            shared_query, shared_key, content, module.mixing, value, mask, scaling=scaling, dropout=dropout,
            causal=causal,
        )  # fmt: skip

    def probabilities(
        self, module: Any, query: Tensor, key: Tensor, mask: Tensor | None, *, scaling: float, causal: bool
    ) -> Tensor:
        """Attend by `kernels.attention_probabilities`."""
        shared_query, shared_key, content = self.unpack(module, query, key, scaling)
        return attention_probabilities(
            shared_query, shared_key, content, module.mixing, mask, scaling=scaling, causal=causal
        )

    def head_rows(self) -> list[HeadRows]:
        """A head owns its row of the mixing matrix and its content bias."""
        return [HeadRows.of("mixing", [1] * self.heads), *self.content_rows()]

    def without(self, kept: Sequence[int]) -> Self:
        """Keep all shared channels."""
        return replace(self, heads=len(kept))

    def parameters(self, width: int) -> int:
        """(2D + H)·R, and H·D for content biases."""
        return (2 * width + self.heads) * self.rank + width * self.content_channels

    def macs(self, width: int, length: int) -> int:
        """2·T·D·R + T·H·R + T²·H·R, and T·D·H for v·y."""
        work = (2 * length * width + length * self.heads + length**2 * self.heads) * self.rank
        return work + length * width * self.content_channels

    def break_even(self, width: int) -> float:
        """T* = [2D(H·d − R) − H·R − (H·D if content biases)] / (H·R − H·d); infinite for R ≤ d."""
        dense, heads = self.heads * self.head_width, self.heads
        saved = 2 * width * (dense - self.rank) - heads * self.rank - width * self.content_channels
        growth = heads * self.rank - dense
        if growth <= 0:
            return inf if saved >= 0 else 0.0
        return max(0.0, saved / growth)
