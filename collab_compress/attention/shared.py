"""Heads that share channels: W̃q and W̃k serve all of them, a mixing matrix M weights the channels for each head.

    score_i(x, y) = s · [ ((x W̃q) ⊙ m_i) · (y W̃k) + v_i · y ]

where s is the model's own scale, m_i row i of the mixing matrix, and v_i the content bias of head i
("Multi-Head Attention: Collaborate Instead of Concatenate", eqs. 7 and 13; costs as in section 3.4).

Kernels take `Inputs` with query (B, T, R), key (B, S, R) and mixing (H, R), and return head outputs (B, H, T, dv).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout, pad

from collab_compress.attention.form import HeadRows, ScoreForm
from collab_compress.attention.kernels import (
    Biases,
    Block,
    Inputs,
    blocks_of,
    content_scores,
    fused_attention,
    in_float32_on_cpu,
    masked_softmax,
    mode_of,
)


@dataclass(frozen=True)
class SharedScores(ScoreForm):
    """The collaborative form: every head reads all R channels, each by its row m_i of the mixing matrix."""

    kind: ClassVar[str] = "collaborative"
    option: ClassVar[str] = "shared"
    title: ClassVar[str] = "shared attention"
    space: ClassVar[str] = "a shared query/key space"
    solvers: ClassVar[tuple[str, ...]] = ("als", "parafac")

    def attend(self, module: Any, inputs: Inputs) -> Tensor:
        """Return the head outputs, by the fastest kernel for the inputs."""
        return attend(self.unpack(module, inputs))

    def probabilities(self, module: Any, inputs: Inputs) -> Tensor:
        """Return the attention probabilities."""
        return attention_probabilities(self.unpack(module, inputs))

    def head_rows(self) -> list[HeadRows]:
        """Return each head's row of the mixing matrix and its content bias."""
        return [HeadRows.of("mixing", [1] * self.heads), *self.content_rows()]

    def without(self, kept: Sequence[int]) -> Self:
        """Return the form of the kept heads, with all shared channels."""
        return replace(self, heads=len(kept))

    def parameters(self, widths: tuple[int, int]) -> int:
        """(Dq + Dk + H)·R, and H·Dk for content biases."""
        return (sum(widths) + self.heads) * self.rank + widths[1] * self.content_channels

    def macs(self, widths: tuple[int, int], length: int) -> int:
        """T·(Dq + Dk)·R + T·H·R + T²·H·R, and T·Dk·H for v·y."""
        work = (length * sum(widths) + length * self.heads + length**2 * self.heads) * self.rank
        return work + length * widths[1] * self.content_channels


@in_float32_on_cpu
def attend(inputs: Inputs) -> Tensor:
    """Attend by the kernel that `benchmarks/speed.py` (CPUs) and `make bench-gpu` found fastest."""
    if not inputs.query.is_cpu:
        return sdpa(inputs)
    mode = mode_of(inputs)
    if mode == "inference":
        return blocked(inputs)
    if mode == "training" and (inputs.mask is None or not inputs.mask.requires_grad):
        return recomputed(inputs)
    return folded(inputs)


@in_float32_on_cpu
def attention_probabilities(inputs: Inputs) -> Tensor:
    """Return the attention probabilities (B, H, T, S), by one product with the shared key."""
    (batch, length, rank), mixing = inputs.query.shape, _mixing(inputs)
    mixed = inputs.query.unsqueeze(1) * (mixing * inputs.scaling).unsqueeze(1)  # (B, H, T, R)
    scores = torch.bmm(mixed.view(batch, -1, rank), inputs.key.transpose(1, 2))  # (B, H·T, S)
    scores = scores.view(batch, len(mixing), length, -1)  # (B, H, T, S)
    content = content_scores(inputs)
    return masked_softmax(scores if content is None else scores + content, inputs)


def folded(inputs: Inputs) -> Tensor:
    """Attend with all scores in memory: differentiable, by the mask too, compilable, any dtypes."""
    return dropout(attention_probabilities(inputs), p=inputs.dropout) @ inputs.value


def sdpa(inputs: Inputs) -> Tensor:
    """Attend through `scaled_dot_product_attention`.

    The content bias becomes H more channels, which head i reads through a one-hot query; so masks and `is_causal`
    stay unchanged. Channels are padded to a multiple of 8 for fused kernels.
    """
    query, key, mixing = inputs.query, inputs.key, _mixing(inputs)
    mixed = query.unsqueeze(1) * mixing.unsqueeze(1)  # (B, H, T, R)
    if inputs.content is not None:
        one_hot = torch.eye(len(mixing), dtype=query.dtype, device=query.device)
        mixed = torch.cat([mixed, one_hot[:, None].expand(*mixed.shape[:3], -1)], dim=-1)  # (B, H, T, R+H)
        key = torch.cat([key, inputs.content], dim=-1)  # (B, S, R+H)
    padding = -mixed.shape[-1] % 8
    mixed, key = pad(mixed, (0, padding)), pad(key, (0, padding))
    return fused_attention(mixed, key.unsqueeze(1).expand(-1, len(mixing), -1, -1), inputs.value, inputs)


def blocked(inputs: Inputs) -> Tensor:
    """Attend block by block through buffers that stay in the processor's cache; inference only.

    The result is a view of a contiguous (B, T, H, dv) tensor if there is more than one block.
    """
    query, value = inputs.query, inputs.value
    scores = _BlockScores(inputs)
    if scores.biases.is_whole:
        return scores.probabilities(scores.blocks[0])[1] @ value
    output = value.new_empty(query.shape[0], query.shape[1], value.shape[1], value.shape[-1])
    for block in scores.blocks:
        b, h, t, keys = block
        output[b, t, h] = (scores.probabilities(block)[1] @ value[b, h, :keys]).transpose(1, 2)
    return output.transpose(1, 2)


def recomputed(inputs: Inputs) -> Tensor:
    """Attend block by block, differentiably but once, and not by the mask.

    No scores are stored for training: each block of them is computed again in the backward pass, where

        dP = dO Vᵀ    dS = P ⊙ (dP − ⟨dO, O⟩)    dV = Pᵀ dO    dK = Σ_i dS_iᵀ (Q ⊙ m_i)    d(Q ⊙ m_i) = dS_i K

    ("FlashAttention", Dao et al., 2022, algorithm 4, for a key that all heads share). For second derivatives, use
    eager attention, which keeps what it computes.
    """
    output: Tensor = _Recomputed.apply(*inputs)  # type: ignore[no-untyped-call]
    return output


class _BlockScores:
    """Scores of shared heads, computed block by block in buffers that all blocks share.

    Fresh memory for each block would cost more in page faults than the work done in it.
    """

    def __init__(self, inputs: Inputs) -> None:
        rank, keys, mixing = inputs.query.shape[2], inputs.key.shape[1], _mixing(inputs)
        self.query, self.key, self.scaled_mixing = inputs.query, inputs.key, (mixing * inputs.scaling).unsqueeze(1)
        self.blocks, queries = blocks_of(inputs, len(mixing), max(keys, rank))
        self.biases = Biases(inputs, self.blocks)
        self.size = queries * keys
        if not self.biases.is_whole:
            self.mixed, self.scores = self.query.new_empty(queries * rank), self.query.new_empty(self.size)

    def probabilities(self, block: Block) -> tuple[Tensor, Tensor]:
        """Return the mixed and scaled queries (b, h·t, R), and the probabilities (b, h, t, S), of a block."""
        b, h, t, keys = block
        query, key, mixing = self.query, self.key, self.scaled_mixing
        mixed, scores = None, None
        if not self.biases.is_whole:
            query, key, mixing = query[b, t], key[b, :keys], mixing[h]
        (samples, count, rank), heads = query.shape, len(mixing)
        if not self.biases.is_whole:
            rows = samples * heads * count
            mixed = self.mixed[: rows * rank].view(samples, heads, count, rank)
            scores = self.scores[: rows * keys].view(samples, heads * count, keys)
        mixed = torch.mul(query.unsqueeze(1), mixing, out=mixed).flatten(1, 2)
        scores = torch.bmm(mixed, key.transpose(1, 2), out=scores).view(samples, heads, count, keys)
        self.biases.add_(scores, block)
        return mixed, torch.softmax(scores, -1, out=scores)


class _Dropout:
    """Masks of dropout that are the same for the same seed, if drawn block by block in the same order.

    Bits are drawn 64 at once, 16 for each probability, ten times faster than `bernoulli_` draws.

    Args:
        p: probability of dropping, to 16 bits.
        seed: of all draws; None drops nothing.
    """

    def __init__(self, p: float, seed: int | None) -> None:
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.lowest = round(p * 2**16) - 2**15
        self.factor = 1.0 if seed is None else 2**16 / max(1, 2**15 - self.lowest)

    def mask(self, probs: Tensor) -> Tensor | None:
        """Draw a one for each probability to keep, a zero for each other; results are to be scaled by `factor`."""
        if self.generator is None:
            return None
        if self.lowest == 2**15:  # no 16 bits
            return torch.zeros_like(probs)
        bits = torch.empty(-(-probs.numel() // 4), dtype=torch.int64, device="cpu")
        bits.random_(-(2**63), 2**63 - 1, generator=self.generator)
        return (bits.view(torch.int16)[: probs.numel()].view(probs.shape) >= self.lowest).to(probs.dtype)


class _Recomputed(torch.autograd.Function):
    """Attention as `recomputed`; the context keeps no more numbers than inputs and outputs have."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        inputs = Inputs(*arguments)
        query, value = inputs.query, inputs.value
        seed = int(torch.randint(2**62, (), device="cpu")) if inputs.dropout > 0 else None
        drop, scores = _Dropout(inputs.dropout, seed), _BlockScores(inputs)
        output = value.new_empty(query.shape[0], query.shape[1], value.shape[1], value.shape[-1])
        for block in scores.blocks:
            b, h, t, keys = block
            _, probs = scores.probabilities(block)
            mask = drop.mask(probs)
            output[b, t, h] = ((probs if mask is None else probs.mul_(mask)) @ value[b, h, :keys]).transpose(1, 2)
        if drop.factor != 1:
            output *= drop.factor
        ctx.save_for_backward(query, inputs.key, value, inputs.mask, inputs.content, inputs.mixing, output)
        ctx.options, ctx.seed = (inputs.scaling, inputs.dropout, inputs.causal), seed
        return output.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, content, mixing, output = ctx.saved_tensors
        scaling, p, causal = ctx.options
        inputs = Inputs(query, key, value, mask, scaling, p, causal, content, mixing)
        drop, scores = _Dropout(inputs.dropout, ctx.seed), _BlockScores(inputs)
        d_query, d_key, d_mixing, d_value = (torch.zeros_like(part) for part in (query, key, mixing, value))
        d_content = None if content is None else torch.zeros_like(content)
        dots = (gradient.transpose(1, 2) * output).sum(-1).transpose(1, 2).unsqueeze(-1)  # ⟨dO, O⟩, (B, H, T, 1)
        buffer = query.new_empty(scores.size)
        for block in scores.blocks:
            b, h, t, keys = block
            mixed, probs = scores.probabilities(block)
            d_output = gradient[b, h, t] * drop.factor  # (b, h, t, dv)
            d_scores = buffer[: probs.numel()].view(probs.shape)
            torch.matmul(d_output, value[b, h, :keys].mT, out=d_scores)  # dP
            kept = drop.mask(probs)
            if kept is None:
                d_value[b, h, :keys] += probs.mT @ d_output
            else:
                d_scores.mul_(kept)
                d_value[b, h, :keys] += kept.mul_(probs).mT @ d_output
            d_scores.sub_(dots[b, h, t]).mul_(probs)
            if d_content is not None:
                d_content[b, :keys, h] += d_scores.sum(2).mT * inputs.scaling
            joined = d_scores.flatten(1, 2)  # (b, h·t, S)
            d_key[b, :keys].baddbmm_(joined.mT, mixed)
            torch.bmm(joined, key[b, :keys], out=mixed)
            d_mixed = mixed.view(*probs.shape[:3], -1)  # (b, h, t, R), without the scale
            d_query[b, t] += (d_mixed * scores.scaled_mixing[h]).sum(1)
            d_mixing[h] += d_mixed.mul_(query[b, t].unsqueeze(1)).sum((0, 2)) * inputs.scaling
        return d_query, d_key, d_value, None, None, None, None, d_content, d_mixing, None


def _mixing(inputs: Inputs) -> Tensor:
    assert inputs.mixing is not None
    return inputs.mixing
