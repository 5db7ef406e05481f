"""Decoding on CPUs: one new token, in inference, beside keys and values as a cache holds them.

They are read in key groups of the head width d, (B, P, S, d), whichever heads they belong to:

    scores_i = Σ_p q_ip · K_pᵀ        outputs_ip = softmax(scores_i) · V_p

The only memory that grows with the cache is the scores. There are few calls, because beside a short cache a call
takes longer than what it computes.
"""

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


def probabilities(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Mask the scores (B, H, S) of one token in place, (·, ·, 1, S), and return their probabilities."""
    if mask is not None and mask.dtype == torch.bool:
        scores.unsqueeze(2).masked_fill_(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores.unsqueeze(2).add_(mask)
    return scores.softmax(-1)


def weighted_values(probs: Tensor, value: Tensor, heads: int, size: int) -> Tensor:
    """Return the outputs of all heads side by side, (B, H·s).

    Args:
        probs: attention probabilities (B, H, S).
        value: (B, P, S, d), as in the cache.
        heads: number of heads of values; each serves as many heads, one after the other.
        size: channels s of each head of values, side by side.
    """
    (batch, _, keys), (groups, width) = probs.shape, (value.shape[1], value.shape[-1])
    outputs: Tensor
    if width % size == 0 and groups * width == heads * size:  # whole heads in each key group: one product
        outputs = torch.bmm(probs.view(batch * groups, -1, keys), value.flatten(0, 1)).unflatten(0, (batch, groups))
    else:
        used = range(-(-heads * size // width))
        products = [torch.bmm(probs, value[:, group]) for group in used]
        outputs = torch.cat(products, -1)[:, None, :, : heads * size]
    together = outputs.shape[-1] // size  # heads of values in each product, of which a head reads its own
    if together == 1:
        return outputs.reshape(batch, -1)
    outputs = outputs.unflatten(-1, (together, size)).unflatten(2, (together, -1))  # (B, ·, m, group, m, s)
    outputs = outputs.diagonal(dim1=2, dim2=4).movedim(-1, 2)  # (B, ·, m, group, s)
    return outputs.reshape(batch, -1)
