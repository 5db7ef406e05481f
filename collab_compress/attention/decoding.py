"""Decoding on CPUs: one new token, in inference, beside keys and values as a cache holds them.

They are read in key groups of the head width d, (B, P, S, d), whichever heads they belong to:

    scores_i = Σ_p q_ip · K_pᵀ        outputs_ip = softmax(scores_i) · V_p

The only memory that grows with the cache is the scores. There are few calls, because beside a short cache a call
takes longer than what it computes.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
CACHE_BYTES = 1 << 20  # scores made at a time: one core's L2; half or twice as much is equally fast


def can_decode(query: Tensor, *others: Tensor | None) -> bool:
    """Return whether a call with queries (B, n, T, d) has one new token, on a CPU, in inference, in full precision.

    Traced and compiled calls and transforms of torch.func take the general way.
    """
    if query.shape[2] != 1 or not query.is_cpu or query.dtype in HALVES or torch.is_autocast_enabled("cpu"):
        return False
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    tensors = [query, *(other for other in others if other is not None)]
    dtypes = {tensor.dtype for tensor in tensors} - {torch.bool}
    return len(dtypes) == 1 and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


@functools.cache
def readers_of(sizes: Sequence[int], width: int) -> tuple[slice, ...]:
    """Return the heads that own any channel of each group of d = `width`, by each head's number of channels."""
    owners = [head for head, size in enumerate(sizes) for _ in range(size)]
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


def cached_scores(query: Tensor, key: Tensor) -> Tensor:
    """Return the scores (B, H, S) of one token.

    Args:
        query: of each head, scaled, (B, H, P·d); zero in channels that a head does not read.
        key: (B, P, S, d), as in the cache.
    """
    (batch, groups, keys, width), heads = key.shape, query.shape[1]
    by_group = query.view(batch, heads, groups, width).transpose(1, 2).flatten(0, 1)  # (B·P, H, d)
    key = key.flatten(0, 1).mT  # (B·P, d, S)
    step = max(CACHE_BYTES // (len(by_group) * heads * query.element_size()), 1)
    if keys <= step:
        return torch.bmm(by_group, key).view(batch, groups, heads, keys).sum(1)
    scores = query.new_empty(batch, heads, keys)
    for start in range(0, keys, step):
        products = torch.bmm(by_group, key[..., start : start + step]).view(batch, groups, heads, -1)
        torch.sum(products, 1, out=scores[..., start : start + step])
    return scores


def probabilities_(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Turn the scores (B, H, S) of one token into probabilities in place; the mask is (·, ·, 1, S)."""
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
