"""What the kernels of all forms share: inputs, masks, softmax, half precision, blocks; and decoding from a cache.

Scores of bfloat16 and float16 inputs are kept in float32, as PyTorch's fused kernels keep theirs: on CPUs
everything is computed in float32, elsewhere only the softmax is.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, product
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HALVES = (torch.bfloat16, torch.float16)
CACHE_BYTES = 1 << 20  # scores of one block for each thread: one core's L2; half or twice as much is equally fast
LONG = 512  # keys from which one product for each key group is faster than one for all, if few heads read a group


class Inputs(NamedTuple):
    """Inputs of one attention call, as the module lays them out, or after `ScoreForm.unpack`.

    Args:
        query: (B, ⌈R/d⌉, T, d); unpacked (B, T, R).
        key: (B, ⌈(R+H)/d⌉, S, d), content biases included; unpacked (B, S, R).
        value: (B, H, S, dv).
        mask: boolean (True = attend) or additive, broadcastable to (B, H, T, S), or None.
        scaling: factor of the scores.
        dropout: probability of dropping an attention probability.
        causal: whether the kernel must hide key y from query x < y. A mask already hides it.
        content: content biases (B, S, H) where keys are unpacked, or None.
        mixing: mixing matrix (H, R) of heads that share channels.
        sizes: channels of each head, side by side, of heads that share none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    scaling: float = 1.0
    dropout: float = 0.0
    causal: bool = False
    content: Tensor | None = None
    mixing: Tensor | None = None
    sizes: tuple[int, ...] = ()

    def tensors(self) -> list[Tensor]:
        """List the tensors among the inputs."""
        return [part for part in self if isinstance(part, Tensor)]


Kernel = Callable[[Inputs], Tensor]


def mode_of(inputs: Inputs) -> Literal["inference", "training", "general"]:
    """Return "inference" or "training" where a kernel may overwrite buffers, else "general".

    "general" is a traced or compiled call, a transform of torch.func, or mixed dtypes.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return "general"
    if torch._C._are_functorch_transforms_active():
        return "general"
    tensors = inputs.tensors()
    dtypes = {tensor.dtype for tensor in tensors} - {torch.bool}
    if dtypes not in ({torch.float32}, {torch.float64}):
        return "general"
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return "training" if recorded or inputs.dropout > 0 else "inference"


def in_float32_on_cpu(kernel: Kernel) -> Kernel:
    """Wrap a kernel so that it computes half precision in float32 on CPUs; results have the queries' dtype."""

    @functools.wraps(kernel)
    def run(inputs: Inputs) -> Tensor:
        if not inputs.query.is_cpu or not any(tensor.dtype in HALVES for tensor in inputs.tensors()):
            return kernel(inputs)
        widened = (part.float() if isinstance(part, Tensor) and part.dtype in HALVES else part for part in inputs)
        with torch.autocast("cpu", enabled=False):
            return kernel(Inputs(*widened)).to(inputs.query.dtype)  # type: ignore[arg-type]

    return run


def fused_attention(query: Tensor, key: Tensor, value: Tensor, inputs: Inputs) -> Tensor:
    """Attend by PyTorch's fused kernel: heads as given, (B, H, ·, ·), mask, dropout and scaling of `inputs`."""
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=inputs.mask,
        dropout_p=inputs.dropout,
        is_causal=inputs.causal,
        scale=inputs.scaling,
    )


def softmax(scores: Tensor) -> Tensor:
    """Return the softmax over keys, computed in float32 at least."""
    return scores.softmax(-1, dtype=torch.float32).to(scores.dtype) if scores.dtype in HALVES else scores.softmax(-1)


def masked_softmax(scores: Tensor, inputs: Inputs) -> Tensor:
    """Return the attention probabilities of scores (B, H, T, S), with the causal mask and the attention mask."""
    lowest, mask = torch.finfo(scores.dtype).min, inputs.mask
    if inputs.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, lowest)
    if mask is not None:
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    return softmax(scores)


def content_scores(inputs: Inputs) -> Tensor | None:
    """Return the scores of the content biases, (B, H, 1, S), or None."""
    if inputs.content is None:
        return None
    return (inputs.content.transpose(1, 2).contiguous() * inputs.scaling).unsqueeze(2)


def future_mask(like: Tensor, queries: int, keys: int) -> Tensor:
    """Return the additive causal mask (T, S)."""
    return like.new_full((queries, keys), torch.finfo(like.dtype).min).triu_(1)


def biases_of(inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """Return what is added to scores: the same for all queries (B, H, 1, S), and for each query (B, H, T, S)."""
    by_key, mask = content_scores(inputs), inputs.mask
    if mask is None:
        return by_key, None
    dtype, queries = inputs.query.dtype, inputs.query.shape[1]
    if mask.dtype == torch.bool:  # adding is ten times faster than filling
        mask = mask.logical_not().to(dtype).mul_(torch.finfo(dtype).min)
    mask = mask.expand(*inputs.value.shape[:2], queries, inputs.key.shape[1])
    if mask.stride(2) != 0 and queries > 1:
        return by_key, mask
    mask = mask[:, :, :1]
    return mask if by_key is None else by_key + mask, None


class Block(NamedTuple):
    """A part of the scores: samples, heads and queries, and how many keys any of these queries sees."""

    samples: slice
    heads: slice
    queries: slice
    keys: int


def blocks_of(inputs: Inputs, heads: int, row: int) -> tuple[list[Block], int]:
    """Cut samples, heads and queries into blocks that fit into a processor's cache, always in the same order.

    Args:
        inputs: query (B, T, R), key (B, S, R).
        heads: number of heads to cut; 1 if the caller loops over heads.
        row: numbers in memory for one query of one head.

    Returns:
        The blocks, and the most queries of single heads in a block.
    """
    batch, length, keys = inputs.query.shape[0], inputs.query.shape[1], inputs.key.shape[1]
    room = torch.get_num_threads() * CACHE_BYTES // max(row * inputs.query.element_size(), 1)
    queries = max(min(room, length), 1)  # queries first, so that products stay tall
    group = max(min(room // queries, heads), 1)
    samples = max(min(room // (queries * group), batch), 1) if group == heads else 1
    cuts = [
        [slice(start, min(start + step, size)) for start in range(0, size, step)]
        for size, step in ((batch, samples), (heads, group), (length, queries))
    ]
    blocks = [Block(b, h, t, min(t.stop, keys) if inputs.causal else keys) for b, h, t in product(*cuts)]
    return blocks, samples * group * queries


class Biases:
    """What is added to the scores of a block: content biases, attention mask, causal mask."""

    def __init__(self, inputs: Inputs, blocks: Sequence[Block]) -> None:
        self.is_whole = len(blocks) == 1 and blocks[0].keys == inputs.key.shape[1]  # slices would cost time
        self.by_key, self.by_query = biases_of(inputs)
        self.future = None
        if inputs.causal and blocks:
            queries = blocks[0].queries.stop
            self.future = future_mask(inputs.query, queries, queries)

    def add_(self, scores: Tensor, block: Block, head: slice | int | None = None) -> None:
        """Add to the scores of a block (b, h, t, S), or of one head (b, t, S) except `by_key`, in place."""
        b, h, t, keys = block
        is_whole = self.is_whole and head is None
        if self.by_key is not None and head is None:
            scores.add_(self.by_key if is_whole else self.by_key[b, h, :, :keys])
        if self.by_query is not None:
            scores.add_(self.by_query if is_whole else self.by_query[b, h if head is None else head, t, :keys])
        if self.future is not None:
            corner = self.future[: t.stop - t.start, : max(keys - t.start, 0)]
            scores[..., keys - corner.shape[1] :].add_(corner)


# Decoding: one new token and a key-value cache, on CPUs in inference. Keys and values are read as the cache holds
# them, in key groups of the head width d, (B, P, S, d), whichever heads they belong to:
#
#     scores_i = Σ_p q_ip · K_pᵀ        outputs_ip = softmax(scores_i) · V_p
#
# The only memory that grows with the cache is the scores. There are few calls, because beside a short cache a call
# takes longer than what it computes.


def can_decode(inputs: Inputs) -> bool:
    """Return whether a call has one new token, on a CPU, in inference and in full precision."""
    query = inputs.query
    one_token = query.shape[2] == 1 and query.is_cpu and query.dtype not in HALVES
    return one_token and mode_of(inputs) == "inference" and not torch.is_autocast_enabled("cpu")


@functools.cache
def readers_of(sizes: Sequence[int], width: int, content_bias: bool = False) -> tuple[slice, ...]:
    """Return, for each key group of d = `width` channels, the heads that read any of them.

    The channels of the heads lie side by side, by their `sizes`; then each head's content bias, if there are any.
    """
    owners = [head for head, size in enumerate(sizes) for _ in range(size)]
    if content_bias:
        owners += range(len(sizes))
    groups = [owners[start : start + width] for start in range(0, len(owners), width)]
    return tuple(slice(min(heads), max(heads) + 1) for heads in groups)


@functools.cache
def channel_indices(sizes: Sequence[int], width: int, group: int) -> Tensor:
    """Return the indices of each head's channels in the concatenated output of `weighted_values`, (group·dv,)."""
    readers = readers_of(sizes, width)
    offsets = list(accumulate([(heads.stop - heads.start) * group * width for heads in readers], initial=0))
    indices = []
    for head, (first, last) in enumerate(pairwise(accumulate(sizes, initial=0))):
        for member in range(group):
            for channel in range(first, last):
                key_group, place = divmod(channel, width)
                row = (head - readers[key_group].start) * group + member
                indices.append(offsets[key_group] + row * width + place)
    return torch.tensor(indices, device="cpu")


def cached_scores(query: Tensor, key: Tensor, readers: Sequence[slice] = ()) -> Tensor:
    """Return the scores (B, H, S) of one token.

    Args:
        query: of each head, scaled, (B, H, P·d); zero in channels that a head does not read.
        key: (B, P, S, d), as in the cache.
        readers: of `readers_of`; empty if all heads read all key groups.
    """
    (batch, groups, keys, width), heads = key.shape, query.shape[1]
    query = query.view(batch, heads, groups, width)
    if readers and keys >= LONG:
        scores = query.new_zeros(batch, heads, keys)
        for group, reading in enumerate(readers):
            scores[:, reading].baddbmm_(query[:, reading, group], key[:, group].mT)
        return scores
    by_group, key = query.transpose(1, 2).flatten(0, 1), key.flatten(0, 1).mT  # (B·P, H, d), (B·P, d, S)
    step = max(CACHE_BYTES // (len(by_group) * heads * query.element_size()), 1)
    if keys <= step:
        return torch.bmm(by_group, key).view(batch, groups, heads, keys).sum(1)
    scores = query.new_empty(batch, heads, keys)
    for start in range(0, keys, step):
        products = torch.bmm(by_group, key[..., start : start + step]).view(batch, groups, heads, -1)
        torch.sum(products, 1, out=scores[..., start : start + step])
    return scores


def probabilities_(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Turn the scores (B, H, S) of one token into probabilities in place; the mask is as in `Inputs`, with T = 1."""
    if mask is not None and mask.dtype == torch.bool:
        scores.unsqueeze(2).masked_fill_(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores.unsqueeze(2).add_(mask)
    return torch.softmax(scores, -1, out=scores)


def weighted_values(probs: Tensor, value: Tensor, sizes: Sequence[int], group: int) -> Tensor:
    """Return the outputs of all heads side by side, (B, group·dv).

    Args:
        probs: attention probabilities (B, H, S).
        value: (B, P, S, d), as in the cache.
        sizes: channels of each head of values, side by side.
        group: number of heads that share one head of values.
    """
    (batch, _, keys), width = probs.shape, value.shape[-1]
    readers, widest = readers_of(tuple(sizes), width), max(sizes)
    is_even = min(sizes) == widest and len(readers) * width == sum(sizes) and width % widest == 0
    if is_even and value.shape[1] == len(readers):  # as many heads in each key group: one product
        outputs = torch.bmm(probs.view(batch * len(readers), -1, keys), value.flatten(0, 1)).view(batch, -1)
    else:
        products = [
            torch.bmm(probs[:, heads.start * group : heads.stop * group], value[:, place]).flatten(1)
            for place, heads in enumerate(readers)
        ]
        outputs = torch.cat(products, 1)
    if is_even and widest == width:
        return outputs
    return outputs.index_select(1, channel_indices(tuple(sizes), width, group))
