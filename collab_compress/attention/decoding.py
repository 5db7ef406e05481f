"""Attention of one new token to a key cache, on CPUs in inference: keys and values are read as they lie there.

A cache holds keys in pieces of the head width d, (B, P, S, d), whatever heads they belong to, and values alike. So

    scores_i = Σ_p q_ip · K_pᵀ        outputs_ip = softmax(scores_i) · V_p

piece by piece. What grows with the cache is a number for each head and key, the scores themselves, and no copy. Calls
are few: beside a short cache each takes longer than what it computes.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from collab_compress.attention.kernels import CACHE_BYTES, HALVES, kernel_for, mode_of

LONG = 512  # keys from which a product for each piece is faster than one for all, where few heads read it
Readers = tuple[slice, ...]
"""For each piece, in order, the heads that read any of its channels."""


@cache
def readers_of(sizes: Sequence[int], width: int, biases: bool = False) -> Readers:
    """Return which heads have channels in which key group, for channels of heads side by side.

    Args:
        sizes: channels of each head.
        width: channels d of a piece.
        biases: whether each head has one more, its content bias, behind those of all.
    """
    owners = [head for head, size in enumerate(sizes) for _ in range(size)] + list(range(len(sizes))) * biases
    inside = [owners[start : start + width] for start in range(0, len(owners), width)]
    return tuple(slice(min(heads), max(heads) + 1) for heads in inside)


@cache
def places_of(sizes: Sequence[int], width: int, group: int) -> Tensor:
    """Return the indices of each head's channels in the concatenated output of `weighted_values`, (group·dv,)."""
    pieces, offsets, count = readers_of(sizes, width), [], 0
    for heads in pieces:
        offsets.append(count)
        count += (heads.stop - heads.start) * group * width
    found = []
    for head, (first, last) in enumerate(pairwise(accumulate(sizes, initial=0))):
        for member in range(group):
            for channel in range(first, last):
                piece, place = divmod(channel, width)
                row = (head - pieces[piece].start) * group + member
                found.append(offsets[piece] + row * width + place)
    return torch.tensor(found, device="cpu")


def cached_scores(query: Tensor, key: Tensor, readers: Readers | None = None) -> Tensor:
    """Multiply queries of channels as they lie in the cache by its keys.

    Args:
        query: of each head, scaled, (B, H, P·d), zero where a head does not read.
        key: (B, P, S, d).
        readers: of the pieces, where not all heads read all of them.

    Returns:
        (B, H, S).
    """
    batch, pieces, keys, width = key.shape
    heads = query.shape[1]
    by_piece = query.view(batch, heads, pieces, width)
    if readers is not None and keys >= LONG:
        scores = query.new_zeros(batch, heads, keys)
        for place, mine in enumerate(readers):
            scores[:, mine].baddbmm_(by_piece[:, mine, place], key[:, place].mT)
        return scores
    own = by_piece.transpose(1, 2).flatten(0, 1)  # (B·P, H, d)
    found = key.flatten(0, 1).mT
    block = max(CACHE_BYTES // (len(own) * heads * query.element_size()), 1)
    if keys <= block:
        return torch.bmm(own, found).view(batch, pieces, heads, keys).sum(1)
    scores = query.new_empty(batch, heads, keys)
    for start in range(0, keys, block):
        products = torch.bmm(own, found[..., start : start + block]).view(batch, pieces, heads, -1)
        torch.sum(products, 1, out=scores[..., start : start + block])
    return scores


def weighted_values(probs: Tensor, value: Tensor, sizes: Sequence[int], group: int) -> Tensor:
    """Sum cached values by attention probabilities.

    Args:
        probs: probabilities (B, H, S).
        value: (B, P, S, d).
        sizes: channels of each head of values, side by side in the cache.
        group: how many heads share one head of values.

    Returns:
        Outputs of all heads side by side, (B, group·dv).
    """
    (batch, _, keys), width = probs.shape, value.shape[-1]
    readers = readers_of(tuple(sizes), width)
    whole = min(sizes) == max(sizes) and len(readers) * width == sum(sizes) and width % max(sizes) == 0
    # Of equally wide heads each piece has as many, and one product does for all pieces.
    if whole and value.shape[1] == len(readers):
        parts = torch.bmm(probs.view(batch * len(readers), -1, keys), value.flatten(0, 1))
        joined = parts.view(batch, -1)  # (B, P·H/P·d)
    else:
        own = [slice(heads.start * group, heads.stop * group) for heads in readers]
        found = [torch.bmm(probs[:, heads], value[:, place]) for place, heads in enumerate(own)]
        joined = torch.cat([part.flatten(1) for part in found], 1)
    return joined if whole and max(sizes) == width else joined.index_select(1, places_of(tuple(sizes), width, group))


def reads_cache(query: Tensor, key: Tensor, value: Tensor, dropout: float, *added: Tensor | None) -> bool:
    """Whether a call has one new token, in full precision, and the table says that it is decoded."""
    if query.shape[2] != 1 or query.dtype in HALVES:
        return False
    mode = mode_of(dropout, query, key, value, *added)
    return kernel_for(None, mode, query, case="one token") == "decoded" and not torch.is_autocast_enabled("cpu")


def probabilities_(scores: Tensor, *added: Tensor | None) -> Tensor:
    """Turn scores (B, H, S) into probabilities in place.

    Args:
        scores: of one token.
        added: masks, boolean (True = attend) or additive, and biases, broadcastable to (B, H, 1, S), or None.
    """
    rows = scores.unsqueeze(2)
    for part in added:
        if part is not None and part.dtype == torch.bool:
            rows.masked_fill_(~part, torch.finfo(scores.dtype).min)
        elif part is not None:
            rows.add_(part)
    return torch.softmax(scores, -1, out=scores)
