"""Attention whose heads have channels of their own, each head as many as it needs: M one-hot, never multiplied by.

    score_i(x, y) = s · [ (x W̃q_i) · (y W̃k_i) + v_i · y ]

where W̃q_i and W̃k_i are the rᵢ columns of head i (figure 2b of "Multi-Head Attention: Collaborate Instead of
Concatenate", with heads of different sizes). Shapes: query (B, T, R) and key (B, S, R) with the heads' channels side
by side, content (B, S, H) or None, value (B, H, S, dv), mask and `causal` as in `kernels`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from collab_compress.attention.form import Cut, HeadRows, ScoreForm
from collab_compress.attention.kernels import (
    CACHE_BYTES,
    biases_of,
    future_of,
    in_float32_on_cpu,
    kernel_for,
    masked,
    mode_of,
    softmax,
)


@in_float32_on_cpu
def attend_separately(
    query: Tensor, key: Tensor, content: Tensor | None, sizes: Sequence[int], value: Tensor, mask: Tensor | None,
    scaling: float, dropout: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Compute head outputs (B, H, T, dv) by the kernel of the table."""
    mode = mode_of(dropout, query, key, content, value, mask)
    scores = query.shape[0] * query.shape[1] * key.shape[1]
    even = set(sizes) == {value.shape[-1]}
    kernel = kernel_for("per-head", mode, query, case="equal widths" if even else None, scores=scores)
    if kernel == "padded":
        return padded(query, key, content, sizes, value, mask, scaling, dropout, causal)
    function = {"side_by_side": side_by_side, "one_by_one": one_by_one}[kernel]
    return function(query, key, content, sizes, value, mask, scaling, causal)


def padded(
    query: Tensor, key: Tensor, content: Tensor | None, sizes: Sequence[int], value: Tensor, mask: Tensor | None,
    scaling: float, dropout: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Attend by PyTorch's fused kernel, (B, H, T, dv), for any mode.

    Fused kernels want queries, keys and values of one width, so heads are padded to that of the values; only where a
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


def side_by_side(
    query: Tensor, key: Tensor, content: Tensor | None, sizes: Sequence[int], value: Tensor, mask: Tensor | None,
    scaling: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Attend by PyTorch's fused kernel with heads as wide as their values, (B, H, T, dv); inference only.

    Nothing is laid out anew; content biases are a part of the mask, one row for all queries.
    """
    heads_query, heads_key = separated(query, key, None, sizes, 0)
    shape = (*value.shape[:2], query.shape[1], key.shape[1])
    added = [each for each in biases_of(content, mask, scaling, shape, query.dtype) if each is not None]
    if added and causal:
        added.append(future_of(query, shape[2], shape[3]))
    outputs: Tensor = scaled_dot_product_attention(
        heads_query, heads_key, value, attn_mask=sum(added[1:], added[0]) if added else None,
        is_causal=causal and not added, scale=scaling,
    )  # fmt: skip
    return outputs


def one_by_one(
    query: Tensor, key: Tensor, content: Tensor | None, sizes: Sequence[int], value: Tensor, mask: Tensor | None,
    scaling: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Attend head by head, each as wide as it is, scores in a buffer that stays in cache, (B, H, T, dv).

    Nothing is padded or laid out anew. The result is a view of a contiguous (B, T, H, dv) tensor.
    """
    batch, heads, keys, width = value.shape
    length = query.shape[1]
    row_bias, bias = biases_of(content, mask, scaling, (batch, heads, length, keys), query.dtype)
    output = value.new_empty(batch, length, heads, width)
    rows = max(torch.get_num_threads() * CACHE_BYTES // (max(keys, 1) * query.element_size()), 1)
    queries = min(rows, length)
    samples = max(min(rows // max(queries, 1), batch), 1)
    buffer = query.new_empty(samples * queries * keys)
    zero = query.new_zeros(1)
    own = list(zip(query.split(list(sizes), -1), key.split(list(sizes), -1), strict=True))
    for first in range(0, batch, samples):
        b = slice(first, min(first + samples, batch))
        for start in range(0, length, max(queries, 1)):
            t = slice(start, min(start + queries, length))
            seen = min(t.stop, keys) if causal else keys  # keys beyond are in every query's future
            shape = (b.stop - b.start, t.stop - t.start, seen)
            scores = buffer[: shape[0] * shape[1] * shape[2]].view(shape)
            future = future_of(query, shape[1], seen, start) if causal else None
            for head, (q, k) in enumerate(own):
                added = zero if row_bias is None else row_bias[b, head, :, :seen]
                torch.baddbmm(added, q[b, t], k[b, :seen].transpose(1, 2), alpha=scaling, out=scores)
                if bias is not None:
                    scores.add_(bias[b, head, t, :seen])
                if future is not None:
                    scores.add_(future)
                output[b, t, head] = torch.softmax(scores, -1, out=scores) @ value[b, head, :seen]
    return output.transpose(1, 2)


@in_float32_on_cpu
def separate_probabilities(
    query: Tensor, key: Tensor, content: Tensor | None, sizes: Sequence[int], mask: Tensor | None, scaling: float,
    causal: bool,
) -> Tensor:  # fmt: skip
    """Softmax of the scores over keys, (B, H, T, S)."""
    heads_query, heads_key = separated(query, key, content, sizes, 0)
    return softmax(masked((heads_query * scaling) @ heads_key.transpose(2, 3), mask, causal))


def separated(
    query: Tensor, key: Tensor, content: Tensor | None, sizes: Sequence[int], least: int
) -> tuple[Tensor, Tensor]:
    """Split queries and keys into heads of one common width, at least `least`.

    The content bias becomes one more channel, which the query reads with a one.

    Returns:
        Queries (B, H, T, w) and keys (B, H, S, w).
    """
    width = max(max(sizes) + (content is not None), least)
    if min(sizes) == max(sizes):
        own_query, own_key = (part.unflatten(-1, (len(sizes), sizes[0])) for part in (query, key))
        if content is not None:
            own_query = pad(own_query, (0, 1), value=1.0)
            own_key = torch.cat([own_key, content.unsqueeze(-1)], -1)
        if own_query.shape[-1] < width:
            own_query, own_key = (pad(part, (0, width - part.shape[-1])) for part in (own_query, own_key))
        return own_query.transpose(1, 2), own_key.transpose(1, 2)
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


def ownership(sizes: Sequence[int], device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Mixing matrix (H, R) of heads whose channels lie side by side: 1 where the head owns the channel, else 0."""
    owners = [head for head, size in enumerate(sizes) for _ in range(size)]
    rows = [[float(owner == head) for owner in owners] for head in range(len(sizes))]
    return torch.tensor(rows, device=device, dtype=dtype)


@dataclass(frozen=True)
class PerHeadScores(ScoreForm):
    """The per-head form: channels lie side by side, head by head, and no head reads another's.

    The mixing matrix of zeros and ones that says so is neither trained nor saved nor multiplied by.

    Args:
        sizes: how many of the R channels each head has; empty as long as only their sum is known.
    """

    sizes: tuple[int, ...] = ()

    kind: ClassVar[str] = "per-head"
    option: ClassVar[str] = "per-head"
    title: ClassVar[str] = "smaller heads"
    space: ClassVar[str] = "query/key channels of each head's own"
    solvers: ClassVar[tuple[str, ...]] = ("per-head",)

    @classmethod
    def of(cls, site: Any, rank: int, content_bias: bool, sizes: Sequence[int] | None = None) -> Self:
        """Describe what is to replace the projections of a module; arguments as for `ScoreForm.of`."""
        return replace(super().of(site, rank, content_bias), train_mixing=False, sizes=tuple(sizes or ()))

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what stored fields must hold, as `MapForm.rules`."""
        yield from super().rules()
        yield "sizes", len(self.sizes) == self.heads, f"{self.heads} numbers, one a head"
        yield "sizes", max(self.sizes) <= self.head_width, f"at most {self.head_width} for a head"
        yield "sizes", sum(self.sizes) == self.rank, f"{self.rank} in all"

    @property
    def head_sizes(self) -> tuple[int, ...] | None:
        """Channels of each head."""
        return self.sizes

    def build_mixing(self, trained: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Make a buffer that is not saved."""
        fixed: Tensor = nn.Buffer(ownership(self.sizes, device, dtype), persistent=False)
        return fixed

    def finish_(self, module: Any) -> None:
        """Fill in the mixing matrix, which is not in the checkpoint."""
        with torch.no_grad():
            module.mixing.copy_(ownership(self.sizes))

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float,
        dropout: float, causal: bool,
    ) -> Tensor:  # fmt: skip
        """Attend by `attend_separately`."""
        own_query, own_key, content = self.unpack(module, query, key, scaling)
        return attend_separately(
            own_query, own_key, content, self.sizes, value, mask, scaling=scaling, dropout=dropout, causal=causal
        )

    def probabilities(
        self, module: Any, query: Tensor, key: Tensor, mask: Tensor | None, *, scaling: float, causal: bool
    ) -> Tensor:
        """Attend by `separate_probabilities`."""
        own_query, own_key, content = self.unpack(module, query, key, scaling)
        return separate_probabilities(own_query, own_key, content, self.sizes, mask, scaling=scaling, causal=causal)

    def head_rows(self) -> list[HeadRows]:
        """A head owns its channels of queries and keys, and its content bias."""
        channels = [HeadRows.of(f"{path}.proj.weight", self.sizes) for path in (self.query, self.key)]
        return [*channels, *self.content_rows()]

    def without(self, kept: Sequence[int]) -> Self:
        """Keep the channels of the given heads."""
        sizes = tuple(self.sizes[head] for head in kept)
        return replace(self, heads=len(kept), rank=sum(sizes), sizes=sizes)

    def keep_heads(self, module: Any, kept: Sequence[int]) -> list[Cut]:
        """Compute what remains of `module` with these heads only, their fixed mixing matrix included."""
        mixing = self.without(kept).build_mixing(False, module.mixing.device, module.mixing.dtype)
        return [*super().keep_heads(module, kept), Cut(module, "mixing", mixing)]

    def parameters(self, width: int) -> int:
        """2D·R, and H·D for content biases."""
        return 2 * width * self.rank + width * self.content_channels

    def macs(self, width: int, length: int) -> int:
        """2·T·D·R + T²·R, and T·D·H for v·y."""
        return (2 * length * width + length**2) * self.rank + length * width * self.content_channels

    def break_even(self, width: int) -> float:
        """Infinite, for there are fewer channels than dense ones; 0 where content biases outweigh what that saves."""
        saved = 2 * width * (self.heads * self.head_width - self.rank)
        return inf if saved >= width * self.content_channels else 0.0
