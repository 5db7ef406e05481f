"""Heads with query/key channels of their own, each head as many as it needs.

    score_i(x, y) = s · [ (x W̃q_i) · (y W̃k_i) + v_i · y ]

where W̃q_i and W̃k_i are the rᵢ columns of head i (figure 2b of "Multi-Head Attention: Collaborate Instead of
Concatenate", with heads of different sizes).

Kernels take `Inputs` with query (B, T, R) and key (B, S, R), the heads' channels side by side as `sizes` says, and
return head outputs (B, H, T, dv).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from collab_compress.attention.form import Cut, HeadRows, ScoreForm
from collab_compress.attention.kernels import (
    Biases,
    Inputs,
    biases_of,
    blocks_of,
    fused_attention,
    future_mask,
    in_float32_on_cpu,
    masked_softmax,
    mode_of,
)


@dataclass(frozen=True)
class PerHeadScores(ScoreForm):
    """The per-head form: channels lie side by side, head by head, and no head reads another's.

    The mixing matrix is one-hot. It is neither trained nor saved, and the attention kernels do not use it.

    Args:
        sizes: how many of the R channels each head has; empty as long as only their sum is known.
    """

    sizes: tuple[int, ...] = ()

    kind: ClassVar[str] = "per-head"
    option: ClassVar[str] = "per-head"
    title: ClassVar[str] = "smaller heads"
    space: ClassVar[str] = "separate query/key channels for each head, with a total width"
    solvers: ClassVar[tuple[str, ...]] = ("per-head",)

    @classmethod
    def of(cls, site: Any, rank: int, content_bias: bool, sizes: Sequence[int] | None = None) -> Self:
        """Return the form for a site; arguments as for `ScoreForm.of`."""
        return replace(super().of(site, rank, content_bias), train_mixing=False, sizes=tuple(sizes or ()))

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what stored fields must hold, as `MapForm.rules`."""
        yield from super().rules()
        yield "sizes", len(self.sizes) == self.heads, f"{self.heads} numbers, one a head"
        yield "sizes", max(self.sizes) <= self.head_width, f"at most {self.head_width} for a head"
        yield "sizes", sum(self.sizes) == self.rank, f"{self.rank} in all"

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Channels of each head."""
        return self.sizes

    def build_mixing(self, trained: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the one-hot mixing matrix, a buffer that is not saved."""
        fixed: Tensor = nn.Buffer(self._one_hot(device, dtype), persistent=False)
        return fixed

    def finish_(self, module: Any) -> None:
        """Fill in the mixing matrix, which is not in the checkpoint."""
        module.mixing.copy_(self._one_hot(module.mixing.device, module.mixing.dtype))

    def _one_hot(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the mixing matrix (H, R): 1 where the head has the channel, else 0."""
        one_hot: Tensor = torch.block_diag(*(torch.ones(1, n, device=device, dtype=dtype) for n in self.sizes))
        return one_hot

    def attend(self, module: Any, inputs: Inputs) -> Tensor:
        """Return the head outputs, by the fastest kernel for the inputs."""
        return attend_separately(self.unpack(module, inputs))

    def probabilities(self, module: Any, inputs: Inputs) -> Tensor:
        """Return the attention probabilities."""
        return separate_probabilities(self.unpack(module, inputs))

    def head_rows(self) -> list[HeadRows]:
        """Return each head's channels of queries and keys, and its content bias."""
        channels = [HeadRows.of(f"{path}.proj.weight", self.sizes) for path in (self.query, self.key)]
        return [*channels, *self.content_rows()]

    def without(self, kept: Sequence[int]) -> Self:
        """Return the form of the kept heads, with their channels."""
        sizes = tuple(self.sizes[head] for head in kept)
        return replace(self, heads=len(kept), rank=sum(sizes), sizes=sizes)

    def keep_heads(self, module: Any, kept: Sequence[int]) -> list[Cut]:
        """Compute what remains of `module` with the kept heads, the fixed mixing matrix included."""
        mixing = self.without(kept).build_mixing(False, module.mixing.device, module.mixing.dtype)
        return [*super().keep_heads(module, kept), Cut(module, "mixing", mixing)]

    def parameters(self, widths: tuple[int, int]) -> int:
        """(Dq + Dk)·R, and H·Dk for content biases."""
        return sum(widths) * self.rank + widths[1] * self.content_channels

    def macs(self, widths: tuple[int, int], length: int) -> int:
        """T·(Dq + Dk)·R + T²·R, and T·Dk·H for v·y."""
        return (length * sum(widths) + length**2) * self.rank + length * widths[1] * self.content_channels


@in_float32_on_cpu
def attend_separately(inputs: Inputs) -> Tensor:
    """Attend by the kernel that `benchmarks/speed.py` (CPUs) and `make bench-gpu` found fastest."""
    if not inputs.query.is_cpu or mode_of(inputs) != "inference":
        return padded(inputs)
    (batch, length, _), keys = inputs.query.shape, inputs.key.shape[1]
    scores = batch * length * keys  # of one head
    if set(inputs.sizes) == {inputs.value.shape[-1]} and scores <= 2**15:
        return side_by_side(inputs)
    return padded(inputs) if scores <= 2**12 else one_by_one(inputs)


def padded(inputs: Inputs) -> Tensor:
    """Attend by PyTorch's fused kernel, in any mode.

    Fused kernels want queries, keys and values of one width, so heads are padded to that of the values; values are
    padded only if a head has as many channels and a content bias.
    """
    width = inputs.value.shape[-1]
    missing = max(0, max(inputs.sizes) + (inputs.content is not None) - width)
    total = width + -(-missing // 8) * 8
    query, key = separated(inputs, total)
    value = pad(inputs.value, (0, total - width)) if missing else inputs.value
    outputs = fused_attention(query, key, value, inputs)
    return outputs[..., :width]


def side_by_side(inputs: Inputs) -> Tensor:
    """Attend by PyTorch's fused kernel with heads as wide as their values; inference only.

    Nothing is copied to another layout; content biases are a part of the mask, one row for all queries.
    """
    query, key = separated(inputs._replace(content=None))
    biases = [bias for bias in biases_of(inputs) if bias is not None]
    if biases and inputs.causal:
        biases.append(future_mask(inputs.query, inputs.query.shape[1], inputs.key.shape[1]))
    mask = sum(biases[1:], biases[0]) if biases else None
    return fused_attention(query, key, inputs.value, inputs._replace(mask=mask, causal=inputs.causal and not biases))


def one_by_one(inputs: Inputs) -> Tensor:
    """Attend head by head, without padding, scores in a buffer that stays in the processor's cache; inference only.

    The result is a view of a contiguous (B, T, H, dv) tensor.
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    output = value.new_empty(query.shape[0], query.shape[1], value.shape[1], value.shape[-1])
    blocks, queries = blocks_of(inputs, 1, key.shape[1])
    biases, buffer, zero = Biases(inputs, blocks), query.new_empty(queries * key.shape[1]), query.new_zeros(1)
    sizes = list(inputs.sizes)
    heads = list(zip(query.split(sizes, -1), key.split(sizes, -1), strict=True))
    for block in blocks:
        b, _, t, keys = block
        shape = (b.stop - b.start, t.stop - t.start, keys)
        scores = buffer[: shape[0] * shape[1] * shape[2]].view(shape)
        for head, (q, k) in enumerate(heads):
            added = zero if biases.by_key is None else biases.by_key[b, head, :, :keys]
            torch.baddbmm(added, q[b, t], k[b, :keys].transpose(1, 2), alpha=inputs.scaling, out=scores)
            biases.add_(scores, block, head)
            output[b, t, head] = torch.softmax(scores, -1, out=scores) @ value[b, head, :keys]
    return output.transpose(1, 2)


@in_float32_on_cpu
def separate_probabilities(inputs: Inputs) -> Tensor:
    """Return the attention probabilities (B, H, T, S)."""
    query, key = separated(inputs)
    return masked_softmax((query * inputs.scaling) @ key.transpose(2, 3), inputs)


def separated(inputs: Inputs, least: int = 0) -> tuple[Tensor, Tensor]:
    """Split queries and keys into heads of one common width w, at least `least`.

    The content bias becomes one more channel, which the query reads with a one.

    Returns:
        Queries (B, H, T, w) and keys (B, H, S, w).
    """
    query, key, content, sizes = inputs.query, inputs.key, inputs.content, inputs.sizes
    width = max(max(sizes) + (content is not None), least)
    if min(sizes) == max(sizes):
        query, key = (part.unflatten(-1, (len(sizes), sizes[0])) for part in (query, key))
        if content is not None:
            query = pad(query, (0, 1), value=1.0)
            key = torch.cat([key, content.unsqueeze(-1)], -1)
        if query.shape[-1] < width:
            query, key = (pad(part, (0, width - part.shape[-1])) for part in (query, key))
        return query.transpose(1, 2), key.transpose(1, 2)
    query_biases: Sequence[Tensor] = ()
    key_biases: Sequence[Tensor] = ()
    if content is not None:
        query_biases = [query.new_ones(1).expand(*query.shape[:2], 1)] * len(sizes)
        key_biases = content.split(1, -1)
    return _padded_heads(query, query_biases, sizes, width), _padded_heads(key, key_biases, sizes, width)


def _padded_heads(channels: Tensor, biases: Sequence[Tensor], sizes: Sequence[int], width: int) -> Tensor:
    """Join each head's channels, of (B, L, R), its bias (B, L, 1) if there are any, and zeros, (B, H, L, w)."""
    batch, length, _ = channels.shape
    missing = [width - size - bool(biases) for size in sizes]
    zeros = channels.new_zeros(1).expand(batch, length, sum(missing)).split(missing, -1)
    columns = [channels.split(list(sizes), -1), *([biases] if biases else []), zeros]
    parts = [part for head_parts in zip(*columns, strict=True) for part in head_parts]
    return torch.cat(parts, -1).view(batch, length, len(sizes), width).transpose(1, 2)
