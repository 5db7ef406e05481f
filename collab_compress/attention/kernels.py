"""Ways to compute collaborative attention; `choice` says which is for what.

    score_i(x, y) = s · [ ((x W̃q) ⊙ m_i) · (y W̃k) + v_i · y ]

where s is the model's own scale, m_i row i of the mixing matrix, v_i the content bias of head i
("Multi-Head Attention: Collaborate Instead of Concatenate", eqs. 7 and 13).
Shapes: query (B, T, R), key (B, S, R), content (B, S, H) or None, mixing (H, R), value (B, H, S, dv), mask
boolean (True = attend) or additive, broadcastable to (B, H, T, S), or None. `causal` hides key y from query x < y.

Scores of bfloat16 and float16 inputs are kept in float32, as PyTorch's fused kernels keep theirs: on CPUs all is
computed so, elsewhere the softmax is.
"""

import functools
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention

from collab_compress.attention.choice import HALVES

Kernel = TypeVar("Kernel", bound=Callable[..., Tensor])
CACHE_BYTES = 1 << 20  # scores of one block for each thread: one core's L2; half and double are as fast


def in_float32_on_cpu(kernel: Kernel) -> Kernel:
    """Wrap a kernel so that it computes half precision in float32 on CPUs; results have the queries' dtype."""

    @functools.wraps(kernel)
    def run(query: Tensor, *others: Any, **options: Any) -> Tensor:
        parts = [query, *others, *options.values()]
        if query.device.type != "cpu" or not any(isinstance(part, Tensor) and part.dtype in HALVES for part in parts):
            return kernel(query, *others, **options)
        wide = [_widened(part) for part in (query, *others)]
        named = {name: _widened(part) for name, part in options.items()}
        if not torch.is_autocast_enabled("cpu"):
            return kernel(*wide, **named).to(query.dtype)
        with torch.autocast("cpu", enabled=False):
            return kernel(*wide, **named).to(query.dtype)

    return run  # type: ignore[return-value]


def _widened(part: Any) -> Any:
    return part.float() if isinstance(part, Tensor) and part.dtype in HALVES else part


@in_float32_on_cpu
def folded(
    query: Tensor, key: Tensor, content: Tensor | None, mixing: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float, dropout: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Attend with all scores in memory, (B, H, T, dv): differentiable, by the mask too, compilable, any dtypes."""
    probabilities = attention_probabilities(query, key, content, mixing, mask, scaling, causal)
    return drop(probabilities, p=dropout) @ value


@in_float32_on_cpu
def attention_probabilities(
    query: Tensor, key: Tensor, content: Tensor | None, mixing: Tensor, mask: Tensor | None, scaling: float,
    causal: bool,
) -> Tensor:  # fmt: skip
    """Softmax of the scores over keys, (B, H, T, S)."""
    return softmax(attention_scores(query, key, content, mixing, mask, scaling, causal))


def softmax(scores: Tensor) -> Tensor:
    """Softmax over keys, in float32 at least."""
    return scores.softmax(-1, dtype=torch.float32).to(scores.dtype) if scores.dtype in HALVES else scores.softmax(-1)


def attention_scores(
    query: Tensor, key: Tensor, content: Tensor | None, mixing: Tensor, mask: Tensor | None, scaling: float,
    causal: bool,
) -> Tensor:  # fmt: skip
    """Compute masked scores (B, H, T, S) by one product with the shared key, heads folded into rows."""
    batch, length, rank = query.shape
    mixed = query.unsqueeze(1) * (mixing * scaling).unsqueeze(1)  # (B, H, T, R)
    scores = torch.bmm(mixed.view(batch, -1, rank), key.transpose(1, 2))  # (B, H·T, S)
    scores = scores.view(batch, mixing.shape[0], length, -1)  # (B, H, T, S)
    if content is not None:
        scores = scores + _content_scores(content, scaling)
    return masked(scores, mask, causal)


def masked(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Hide from queries the keys of the future and of a boolean mask, or add an additive one, (B, H, T, S)."""
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask


@in_float32_on_cpu
def blocked(
    query: Tensor, key: Tensor, content: Tensor | None, mixing: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Attend block by block through buffers that stay in cache, (B, H, T, dv); inference only.

    More than one block: the result is a view of a contiguous (B, T, H, dv) tensor, so undoing the transpose is free.
    """
    (batch, length, rank), keys, heads = query.shape, key.shape[1], mixing.shape[0]
    scaled_mixing = (mixing * scaling).unsqueeze(1)  # (H, 1, R)
    biases = biases_of(content, mask, scaling, (batch, heads, length, keys), query.dtype)
    block = block_shape(batch, heads, length, max(keys, rank) * query.element_size())
    if block == (batch, heads, length) and (not causal or length == keys):  # slicing costs more than it saves
        corner = future_of(query, length, keys) if causal else None
        probs = block_probabilities(query, key, scaled_mixing, (*biases, corner))[1]
        return probs @ value
    output = value.new_empty(batch, length, heads, value.shape[-1])
    # Shared by all blocks: fresh memory costs more in page faults than the work done in it.
    most = block[0] * block[1] * block[2]
    buffers = (query.new_empty(most * rank), query.new_empty(most * keys))
    for b, h, t, seen, added in cut((batch, heads, length, keys), block, biases, query, causal):
        probs = block_probabilities(query[b, t], key[b, :seen], scaled_mixing[h], added, buffers)[1]
        output[b, t, h].copy_((probs @ value[b, h, :seen]).transpose(1, 2))
    return output.transpose(1, 2)


Added = tuple[Tensor | None, Tensor | None, Tensor | None]
"""What is added to the scores of a block (b, h, t, S): one for all queries (b, h, 1, S), one for each (b, h, t, S),
and one for the last few keys only (t, S')."""


def future_of(like: Tensor, length: int, keys: int, start: int = 0) -> Tensor:
    """Return the causal mask of queries `start`, `start` + 1, …, to be added to scores, (T, S)."""
    return like.new_full((length, keys), torch.finfo(like.dtype).min).triu_(start + 1)


def cut(
    shape: tuple[int, int, int, int], block: tuple[int, int, int], biases: tuple[Tensor | None, Tensor | None],
    like: Tensor, causal: bool,
) -> Iterator[tuple[slice, slice, slice, int, Added]]:  # fmt: skip
    """Cut samples, heads and queries into blocks, always in the same order.

    Args:
        shape: B, H, T and S.
        block: the most samples, heads and queries of one.
        biases: what is added to all scores, as `biases_of` gives it.
        like: has the scores' dtype.
        causal: whether the future is to be hidden.

    Returns:
        Samples, heads, queries, how many keys any of them sees, and what is added to their scores.
    """
    *sizes, keys = shape
    row_bias, bias = biases
    corner = future_of(like, block[2], block[2]) if causal else None
    slices = [
        [slice(start, min(start + step, size)) for start in range(0, size, max(step, 1))]
        for size, step in zip(sizes, block, strict=True)
    ]
    for b, h, t in product(*slices):
        seen = min(t.stop, keys) if causal else keys  # keys beyond are in every query's future
        yield b, h, t, seen, (
            None if row_bias is None else row_bias[b, h, :, :seen],
            None if bias is None else bias[b, h, t, :seen],
            None if corner is None else corner[: t.stop - t.start, : max(seen - t.start, 0)],
        )  # fmt: skip


def block_probabilities(
    query: Tensor, key: Tensor, scaled_mixing: Tensor, added: Added, buffers: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Compute probabilities within one block, overwriting its scores in place.

    Args:
        query: (b, t, R).
        key: (b, S, R).
        scaled_mixing: (h, 1, R).
        added: to the scores.
        buffers: at least b·h·t·R numbers for the mixed queries, and b·h·t·S for the scores.

    Returns:
        Mixed and scaled queries (b, h·t, R), and probabilities (b, h, t, S).
    """
    (samples, count, rank), keys, heads = query.shape, key.shape[1], scaled_mixing.shape[0]
    rows = samples * heads * count
    mixed, scores = None, None
    if buffers is not None:
        mixed = buffers[0][: rows * rank].view(samples, heads, count, rank)
        scores = buffers[1][: rows * keys].view(samples, heads * count, keys)
    mixed = torch.mul(query.unsqueeze(1), scaled_mixing, out=mixed).flatten(1, 2)
    scores = torch.bmm(mixed, key.transpose(1, 2), out=scores).view(samples, heads, count, keys)
    row_bias, bias, corner = added
    if row_bias is not None:
        scores.add_(row_bias)
    if bias is not None:
        scores.add_(bias)
    if corner is not None:
        scores[..., keys - corner.shape[1] :].add_(corner)
    return mixed, torch.softmax(scores, -1, out=scores)


def sdpa(
    query: Tensor, key: Tensor, content: Tensor | None, mixing: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float, dropout: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Attend through `scaled_dot_product_attention`, (B, H, T, dv).

    The content bias becomes H more channels, which head i reads through a one-hot query; so masks and
    `is_causal` stay what they are. Channels are padded to a multiple of 8, which fused kernels want.
    """
    heads = mixing.shape[0]
    mixed = query.unsqueeze(1) * mixing.unsqueeze(1)  # (B, H, T, R)
    if content is not None:
        picks = torch.eye(heads, dtype=query.dtype, device=query.device)
        mixed = torch.cat([mixed, picks[:, None].expand(*mixed.shape[:3], heads)], dim=-1)  # (B, H, T, R+H)
        key = torch.cat([key, content], dim=-1)  # (B, S, R+H)
    padding = -mixed.shape[-1] % 8
    mixed, key = (torch.nn.functional.pad(part, (0, padding)) for part in (mixed, key))
    shared = key.unsqueeze(1).expand(-1, heads, -1, -1)
    return scaled_dot_product_attention(
        mixed, shared, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scaling
    )


def _content_scores(content: Tensor, scaling: float) -> Tensor:
    """Scores of the content biases, (B, H, 1, S), laid out for adding to rows of scores."""
    return (content.transpose(1, 2).contiguous() * scaling).unsqueeze(2)


def biases_of(
    content: Tensor | None, mask: Tensor | None, scaling: float, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Gather what is added to scores: the same for all queries (B, H, 1, S), and the rest (B, H, T, S)."""
    row_bias = None if content is None else _content_scores(content, scaling)
    if mask is None:
        return row_bias, None
    if mask.dtype == torch.bool:  # adding is ten times faster than filling
        mask = mask.logical_not().to(dtype).mul_(torch.finfo(dtype).min)
    mask = mask.expand(shape)
    if mask.stride(2) != 0 and shape[2] > 1:
        return row_bias, mask
    mask = mask[:, :, :1]
    return mask if row_bias is None else row_bias + mask, None


def block_shape(batch: int, heads: int, length: int, row_bytes: int) -> tuple[int, int, int]:
    """Choose how many samples, heads and queries make up a block: queries first, so that products stay tall."""
    rows = max(torch.get_num_threads() * CACHE_BYTES // max(row_bytes, 1), 1)
    queries = min(rows, length)
    group = min(rows // max(queries, 1), heads)
    samples = min(rows // max(queries * group, 1), batch) if group == heads else 1
    return max(samples, 1), group, queries
