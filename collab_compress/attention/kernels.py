"""Kernels of collaborative attention, and the table of which is for what.

    score_i(x, y) = s · [ ((x W̃q) ⊙ m_i) · (y W̃k) + v_i · y ]

where s is the model's own scale, m_i row i of the mixing matrix, v_i the content bias of head i
("Multi-Head Attention: Collaborate Instead of Concatenate", eqs. 7 and 13).
Shapes: query (B, T, R), key (B, S, R), content (B, S, H) or None, mixing (H, R), value (B, H, S, dv), mask
boolean (True = attend) or additive, broadcastable to (B, H, T, S), or None. `causal` hides key y from query x < y.

Scores of bfloat16 and float16 inputs are kept in float32, as PyTorch's fused kernels keep theirs: on CPUs all is
computed so, elsewhere the softmax is.

`TABLE` was measured on CPUs by `benchmarks/speed.py`, on GPUs by `make bench-gpu`. "recomputed" stores no scores for
training: it computes each block of them again in the backward pass, where

    dP = dO Vᵀ    dS = P ⊙ (dP − ⟨dO, O⟩)    dV = Pᵀ dO    dK = Σ_i dS_iᵀ (Q ⊙ m_i)    d(Q ⊙ m_i) = dS_i K

("FlashAttention", Dao et al., 2022, algorithm 4, for a key that all heads share.)
"""

import functools
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention

HALVES = (torch.bfloat16, torch.float16)
Mode = Literal["inference", "training", "general"]
Case = Literal["one token", "equal widths"]


class Choice(NamedTuple):
    """A row of the table; the first that fits counts.

    Args:
        kernel: name of a function: `decoded` of `functions`, or one that the form's own module calls.
        form: of the queries and keys; None for all, dense ones included.
        cpu: whether it is for CPUs, or for all other devices.
        mode: None for all. "inference" is where nothing is recorded, traced or dropped, and dtypes agree; "training"
            where something is recorded or dropped, and dtypes agree; "general" is the rest: traced or compiled calls,
            transforms of torch.func, mixed dtypes, masks that are trained.
        case: what else a call has to be: of one new token, or of heads that are all as wide as their values.
        most: scores B·T·S of one head up to which it is for; None for any number.
    """

    kernel: str
    form: str | None
    cpu: bool
    mode: Mode | None = None
    case: Case | None = None
    most: int | None = None


TABLE = (
    Choice("decoded", None, cpu=True, mode="inference", case="one token"),
    Choice("blocked", "shared", cpu=True, mode="inference"),
    Choice("recomputed", "shared", cpu=True, mode="training"),
    Choice("folded", "shared", cpu=True),
    Choice("sdpa", "shared", cpu=False),
    Choice("side_by_side", "per-head", cpu=True, mode="inference", case="equal widths", most=2**15),
    Choice("padded", "per-head", cpu=True, mode="inference", most=2**12),
    Choice("one_by_one", "per-head", cpu=True, mode="inference"),
    Choice("padded", "per-head", cpu=True),
    Choice("padded", "per-head", cpu=False),
)


def kernel_for(form: str | None, mode: Mode, query: Tensor, *, case: Case | None = None, scores: int = 0) -> str:
    """Name the kernel for a call; "stock" where the table has none.

    Args:
        form: of the queries and keys.
        mode: as `mode_of` says.
        query: on the device in question.
        case: what the call is, if it is anything special.
        scores: B·T·S.
    """
    for row in TABLE:
        fits = row.form in (None, form) and row.cpu == query.is_cpu and row.mode in (None, mode)
        if fits and row.case in (None, case) and (row.most is None or scores <= row.most):
            return row.kernel
    return "stock"


def mode_of(dropout: float, query: Tensor, *others: Tensor | None) -> Mode:
    """Return the mode of a call, by what records it and by its dtypes: all the same, in float32 at least."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        return "general"
    if torch._C._are_functorch_transforms_active():  # "recomputed" has no rules for torch.func
        return "general"
    dtype = torch.float32 if query.dtype in HALVES else query.dtype
    if dtype not in (torch.float32, torch.float64):
        return "general"
    recorded = query.requires_grad
    for tensor in others:
        if tensor is not None:
            own = tensor.dtype
            if own not in (dtype, torch.bool) and not (own in HALVES and dtype == torch.float32):
                return "general"
            recorded = recorded or tensor.requires_grad
    return "training" if dropout > 0 or (recorded and torch.is_grad_enabled()) else "inference"


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
