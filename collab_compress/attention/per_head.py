"""Attention whose heads have channels of their own, each head as many as it needs: M one-hot, never multiplied by.

    score_i(x, y) = s · [ (x W̃q_i) · (y W̃k_i) + v_i · y ]

where W̃q_i and W̃k_i are the rᵢ columns of head i (figure 2b of "Multi-Head Attention: Collaborate Instead of
Concatenate", with heads of different sizes). Shapes: query (B, T, R) and key (B, S, R) with the heads' channels side
by side, content (B, S, H) or None, value (B, H, S, dv), mask and `causal` as in `kernels`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PreTrainedModel

from collab_compress.attention.kernels import in_float32_on_cpu, softmax
from collab_compress.attention.shared import (
    CollaborativeEdit,
    CollaborativeParts,
    CollaborativeSpec,
    build_parts,
    install_,
)


@in_float32_on_cpu
def attend_separately(
    query: Tensor, key: Tensor, content: Tensor | None, sizes: Sequence[int], value: Tensor, mask: Tensor | None,
    scaling: float, dropout: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Compute head outputs (B, H, T, dv) by PyTorch's fused kernel, heads padded to the width of the values.

    Fused kernels want queries, keys and values of one width, so narrower heads would not be faster; only where a
    head fills that width already do the values get wider, by zeros.
    """
    width = value.shape[-1]
    wider = max(0, max(sizes) + (content is not None) - width)
    total = width + (-(-wider // 8)) * 8
    heads_query, heads_key = separated(query, key, content, sizes, total)
    if wider:
        value = pad(value, (0, total - width))
    outputs = scaled_dot_product_attention(
        heads_query, heads_key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scaling
    )
    return outputs[..., :width]


@in_float32_on_cpu
def separate_probabilities(
    query: Tensor, key: Tensor, content: Tensor | None, sizes: Sequence[int], mask: Tensor | None, scaling: float,
    causal: bool,
) -> Tensor:  # fmt: skip
    """Softmax of the scores over keys, (B, H, T, S)."""
    heads_query, heads_key = separated(query, key, content, sizes, 0)
    scores = (heads_query * scaling) @ heads_key.transpose(2, 3)
    lowest = torch.finfo(scores.dtype).min
    if causal:
        future = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, lowest)
    if mask is not None:
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    return softmax(scores)


def separated(
    query: Tensor, key: Tensor, content: Tensor | None, sizes: Sequence[int], least: int
) -> tuple[Tensor, Tensor]:
    """Give every head its own queries and keys, of one width that is at least `least`.

    The content bias becomes one more channel, which the query reads with a one.

    Returns:
        Queries (B, H, T, w) and keys (B, H, S, w).
    """
    width = max(max(sizes) + (content is not None), least)
    queries, keys = list(query.split(list(sizes), -1)), list(key.split(list(sizes), -1))
    left = [width - size for size in sizes]
    if content is not None:
        left = [count - 1 for count in left]
        one = query.new_ones(1).expand(*query.shape[:2], 1)
        biases = content.split(1, -1)
        queries = [part for head in queries for part in (head, one)]
        keys = [part for pair in zip(keys, biases, strict=True) for part in pair]
    return _filled(queries, left), _filled(keys, left)


def _filled(parts: list[Tensor], left: list[int]) -> Tensor:
    """Join the parts of each head, as many for one as for another, and fill each head up with zeros, (B, H, L, w)."""
    batch, length, _ = parts[0].shape
    each = len(parts) // len(left)
    zeros = parts[0].new_zeros(1).expand(batch, length, sum(left)).split(left, -1)
    filled = [part for head, rest in enumerate(zeros) for part in (*parts[head * each : (head + 1) * each], rest)]
    return torch.cat(filled, -1).view(batch, length, len(left), -1).transpose(1, 2)


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
