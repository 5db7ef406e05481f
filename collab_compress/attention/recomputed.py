"""Training without the scores in memory: what a block of them was is computed again where its gradients are.

    dP = dO Vᵀ    dS = P ⊙ (dP − ⟨dO, O⟩)    dV = Pᵀ dO    dK = Σ_i dS_iᵀ (Q ⊙ m_i)    d(Q ⊙ m_i) = dS_i K

(as in "FlashAttention", Dao et al., 2022, algorithm 4, for a key that all heads share.) Blocks stay in the cache, and
what grows with T·S is gone when a block is done.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from collab_compress.attention.kernels import biases_of, block_probabilities, block_shape, cut, in_float32_on_cpu


@in_float32_on_cpu
def recomputed(
    query: Tensor, key: Tensor, content: Tensor | None, mixing: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float, dropout: float, causal: bool,
) -> Tensor:  # fmt: skip
    """Attend block by block, differentiably but once, and not by the mask, (B, H, T, dv).

    For second derivatives, eager attention keeps all that it computes.
    """
    attend: Any = _Recomputed.apply
    output: Tensor = attend(query, key, content, mixing, value, mask, scaling, dropout, causal)
    return output


def _blocks(inputs: tuple[Any, ...], scaling: float, causal: bool) -> Any:
    """Cut what `inputs` hold into blocks, with buffers that all of them share."""
    query, key, content, mixing, _, mask = inputs
    (batch, length, rank), keys, heads = query.shape, key.shape[1], mixing.shape[0]
    shape = (batch, heads, length, keys)
    block = block_shape(batch, heads, length, max(keys, rank) * query.element_size())
    biases = biases_of(content, mask, scaling, shape, query.dtype)
    return block[0] * block[1] * block[2], cut(shape, block, biases, query, causal)


class _Dropout:
    """Which probabilities are dropped: the same for the same seed, block by block in the same order.

    Bits are drawn 64 at once, 16 for each probability, ten times faster than `bernoulli_` draws.

    Args:
        share: to drop, to 16 bits.
        seed: of all draws; None drops nothing.
    """

    def __init__(self, share: float, seed: int | None) -> None:
        self.source = None if seed is None else torch.Generator().manual_seed(seed)
        self.lowest = round(share * 2**16) - 2**15
        self.factor = 1.0 if seed is None else 2**16 / (2**15 - self.lowest)

    def keep(self, probs: Tensor) -> Tensor | None:
        """Draw a one for each probability that stays, a zero for each other; multiply what comes by `factor` too."""
        if self.source is None:
            return None
        bits = torch.empty(-(-probs.numel() // 4), dtype=torch.int64)
        bits.random_(-(2**63), 2**63 - 1, generator=self.source)
        return (bits.view(torch.int16)[: probs.numel()].view(probs.shape) >= self.lowest).to(probs.dtype)


class _Recomputed(torch.autograd.Function):
    """Attention as `recomputed`; what is kept has no more numbers than its inputs and outputs."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        inputs, (scaling, dropout, causal) = arguments[:6], arguments[6:]
        query, key, _, mixing, value, _ = inputs
        seed = int(torch.randint(2**62, ())) if dropout > 0 else None
        drop, scaled_mixing = _Dropout(dropout, seed), (mixing * scaling).unsqueeze(1)
        output: Tensor = value.new_empty(query.shape[0], query.shape[1], mixing.shape[0], value.shape[-1])
        most, blocks = _blocks(inputs, scaling, causal)
        buffers = (query.new_empty(most * query.shape[2]), query.new_empty(most * key.shape[1]))
        for b, h, t, seen, added in blocks:
            _, probs = block_probabilities(query[b, t], key[b, :seen], scaled_mixing[h], added, buffers)
            keep = drop.keep(probs)
            output[b, t, h] = ((probs if keep is None else probs.mul_(keep)) @ value[b, h, :seen]).transpose(1, 2)
        if drop.factor != 1:
            output *= drop.factor
        ctx.save_for_backward(*inputs, output)
        ctx.options = (scaling, dropout, causal, seed)
        return output.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, output = ctx.saved_tensors
        query, key, content, mixing, value, _ = inputs
        scaling, dropout, causal, seed = ctx.options
        drop, scaled_mixing = _Dropout(dropout, seed), (mixing * scaling).unsqueeze(1)
        for_query, for_key, for_mixing, for_value = (torch.zeros_like(each) for each in (query, key, mixing, value))
        for_content = None if content is None else torch.zeros_like(content)
        dots = (gradient.transpose(1, 2) * output).sum(-1).transpose(1, 2).unsqueeze(-1)  # ⟨dO, O⟩, (B, H, T, 1)
        most, blocks = _blocks(tuple(inputs), scaling, causal)
        buffers = (query.new_empty(most * query.shape[2]), query.new_empty(most * key.shape[1]))
        other = query.new_empty(most * key.shape[1])
        for b, h, t, seen, added in blocks:
            mixed, probs = block_probabilities(query[b, t], key[b, :seen], scaled_mixing[h], added, buffers)
            above = gradient[b, h, t] * drop.factor  # (b, h, t, dv)
            slopes = other[: probs.numel()].view(probs.shape)
            torch.matmul(above, value[b, h, :seen].mT, out=slopes)
            keep = drop.keep(probs)
            if keep is None:
                for_value[b, h, :seen] += probs.mT @ above
            else:
                slopes.mul_(keep)
                for_value[b, h, :seen] += keep.mul_(probs).mT @ above
            slopes.sub_(dots[b, h, t]).mul_(probs)  # of the scores
            if for_content is not None:
                for_content[b, :seen, h] += slopes.sum(2).mT * scaling
            joined = slopes.flatten(1, 2)  # (b, h·t, S)
            for_key[b, :seen].baddbmm_(joined.mT, mixed)
            torch.bmm(joined, key[b, :seen], out=mixed)
            for_mixed = mixed.view(*probs.shape[:3], -1)  # (b, h, t, R), without the scale
            for_query[b, t] += (for_mixed * scaled_mixing[h]).sum(1)
            for_mixing[h] += for_mixed.mul_(query[b, t].unsqueeze(1)).sum((0, 2)) * scaling
        return for_query, for_key, for_content, for_mixing, for_value, None, None, None, None
