"""Attention of edited modules as functions of Transformers' attention interface.

Each serves every module alike: converted or dense underneath, with or without something acting on its heads.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from collab_compress.attention.decoding import probabilities_, reads_cache, weighted_values
from collab_compress.attention.form import scaling_of
from collab_compress.attention.kernels import softmax
from collab_compress.attention.view import FORMS_AT, HeadCall, for_each_head, head_hooks
from collab_compress.errors import UnsupportedModelError

# What models, batches under `generate` and continuous batching pass along, and stock attention leaves unread.
UNREAD = frozenset(
    (
        "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "decoder_attention_mask", "decoder_input_ids",
        "deterministic", "labels", "logits_indices", "logits_processor_args", "max_length_k", "max_length_q",
        "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits", "position_ids",
        "return_dict", "return_loss", "sliding_window", "special_tokens_mask", "token_type_ids", "use_cache",
    )
)  # fmt: skip
# What comes with a paged cache.
PAGED = frozenset(("block_table", "cache", "read_index", "write_index"))
KNOWN = UNREAD | PAGED | {"position_bias"}


def collab_sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend without returning probabilities, by the fastest kernel for the shapes at hand.

    Args:
        module: the attention module; a converted one says by `module.score_form` how it attends.
        query: per-head query (B, H, T, d), or that of a converted module in pieces, (B, ⌈R/d⌉, T, d).
        key: per-head key (B, H, S, d), or that of a converted module, content biases included, (B, ⌈(R+H)/d⌉, S, d).
        value: (B, H, S, dv).
        attention_mask: boolean (True = attend) or additive, broadcastable to (B, H, T, S), or None.
        kwargs: `position_bias`, added to the scores, broadcastable to (B, H, T, S), or None; `cache`, the paged one
            of continuous batching, with its indices.

    Returns:
        Head outputs (B, T, H, dv), or side by side, (B, T, 1, H·dv), and None in place of the probabilities.

    Raises:
        UnsupportedModelError: the module passes something that would be left out of the scores, or its keys do not
            fit into the paged cache.
    """
    if any(hook.needs_rows for hook in head_hooks(module)):
        outputs, _ = collab_eager(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
        return outputs, None
    key, value, kwargs = _received(module, key, value, kwargs)
    form = getattr(module, "score_form", None)
    bias = kwargs.get("position_bias")
    if not head_hooks(module) and reads_cache(query, key, value, dropout, attention_mask, bias):
        return _decoded(module, query, key, value, (attention_mask, bias), _scaling(module, scaling)), None
    value = _of_heads(module, value)
    if form is None:
        left = query.shape[-1] - value.shape[-1]  # fused kernels want queries, keys and values of one width
        outputs, _ = sdpa_attention_forward(
            module, query, key, pad(value, (0, left)) if left > 0 else value, attention_mask, dropout=dropout,
            scaling=scaling, is_causal=is_causal, **kwargs,
        )  # fmt: skip
        outputs = outputs[..., : value.shape[-1]]
    else:
        causal = _causal(module, is_causal, attention_mask, query.shape[2])
        mask, causal = _biased(attention_mask, bias, causal)
        scale = _scaling(module, scaling)
        outputs = form.attend(
            module, query, key, for_each_head(value, form.heads), mask, scaling=scale, dropout=dropout, causal=causal
        ).transpose(1, 2).contiguous()  # fmt: skip
    return _acted(outputs, HeadCall(module, query, key, value, None)), None


def collab_eager(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attend step by step and return the probabilities too; shapes as in `collab_sdpa`.

    Returns:
        Head outputs (B, T, H, dv) and probabilities after dropout (B, H, T, S), as stock eager attention does.
    """
    key, value, kwargs = _received(module, key, value, kwargs)
    value = _of_heads(module, value)
    causal = _causal(module, is_causal, attention_mask, query.shape[2])
    wanted = any(hook.needs_rows for hook in head_hooks(module))
    form = getattr(module, "score_form", None)
    if form is not None:
        mask, causal = _biased(attention_mask, kwargs.get("position_bias"), causal)
        scale = _scaling(module, scaling)
        rows = form.probabilities(module, query, key, mask, scaling=scale, causal=causal)
        outputs = None
    else:
        mask = _additive(attention_mask, query, key, causal)
        stock = getattr(sys.modules[type(module).__module__], "eager_attention_forward", _eager)
        # It would return rows after dropout; hooks need them before.
        outputs, rows = stock(
            module, query, key, value, mask, scaling=scaling, dropout=0.0 if wanted else dropout, **kwargs
        )
    probabilities = rows
    if outputs is None or (wanted and dropout > 0 and module.training):
        probabilities = nn.functional.dropout(rows, p=dropout, training=module.training)
        outputs = (probabilities @ for_each_head(value, rows.shape[1])).transpose(1, 2).contiguous()
    return _acted(outputs, HeadCall(module, query, key, value, rows)), probabilities


def _decoded(
    module: Any, query: Tensor, key: Tensor, value: Tensor, added: tuple[Tensor | None, ...], scaling: float
) -> Tensor:
    """Attend with one new token to keys and values as they lie in a cache, (B, 1, 1, dv of all heads)."""
    scores, values = (getattr(module, name, None) for name in FORMS_AT)
    if scores is None:
        own = query.reshape(*key.shape[:2], -1, key.shape[-1])  # (B, Hkv, H/Hkv, d)
        rows = ((own * scaling) @ key.mT).flatten(1, 2)
    else:
        rows = scores.cached_scores(module, query, key, scaling)
    rows = probabilities_(rows, *added)
    sizes = (value.shape[-1],) * value.shape[1] if values is None else values.sizes
    return weighted_values(rows, value, sizes, rows.shape[1] // len(sizes)).view(len(query), 1, 1, -1)


def _of_heads(module: Any, value: Tensor) -> Tensor:
    """Give every head of values its own where they are narrow, (B, ⌈dv/d⌉, S, d) to (B, Hkv, S, s)."""
    form = getattr(module, "value_form", None)
    return value if form is None else form.unpack(value)


def _eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None,
    dropout: float, position_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend as stock eager attention does, for modules whose family has no function for it."""
    scores = (query * _scaling(module, scaling)) @ key.mT
    for added in (position_bias, mask):
        scores = scores if added is None else scores + added
    rows = nn.functional.dropout(softmax(scores), p=dropout, training=module.training)
    return (rows @ value).transpose(1, 2).contiguous(), rows


def _received(
    module: Any, key: Tensor, value: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Check what came along with a call, and write keys and values to a paged cache, which returns those before too.

    Returns:
        Keys, values as they lie in the cache, and what else the scores need; the cache is not passed on, for it has
        been written to.
    """
    strange = sorted(name for name, passed in kwargs.items() if passed is not None and name not in KNOWN)
    if strange:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(strange)} to its attention, which this package does not know "
            "and would leave out; call the model without, or use the dense model"
        )
    cache = kwargs.get("cache")
    if cache is not None:
        if kwargs.get("block_table") is not None:
            raise UnsupportedModelError(
                f"edited {type(module).__name__} cannot read a paged cache by block tables; pass "
                "ContinuousBatchingConfig(max_blocks_per_request=0)"
            )
        key, value = _paged(module, cache, key, value, kwargs)
    return key, value, {"position_bias": kwargs["position_bias"]} if "position_bias" in kwargs else {}


def _paged(module: Any, cache: Any, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Write keys and values to a paged cache and read all of theirs; what it has too many heads for is zero.

    Its room is that of the dense model, or of the widest keys (`GuardedConfig.num_key_value_heads`).
    """
    room = cache.layer_to_allocator[module.layer_idx]
    heads, width = room.num_key_value_heads, room.head_dim
    for name, part in (("keys", key), ("values", value)):
        if part.shape[1] > heads or part.shape[3] != width:
            raise UnsupportedModelError(
                f"the {name} of {type(module).__name__} take {part.shape[1]} × {part.shape[3]} numbers a token, and "
                f"the paged cache has room for {heads} × {width}; use generate in place of generate_batch"
            )
    pieces = (key.shape[1], value.shape[1])
    filled = [pad(part, (0, 0, 0, 0, 0, heads - part.shape[1])) for part in (key, value)]
    read = cache.update(key_states=filled[0], value_states=filled[1], layer_idx=module.layer_idx, kwargs=dict(kwargs))
    return read[0][:, : pieces[0]], read[1][:, : pieces[1]]


def _acted(outputs: Tensor, call: HeadCall) -> Tensor:
    """Let everything that acts on the module's heads see and change their outputs, (B, T, H, s).

    Returns:
        Outputs as the module lays them side by side, (B, T, H, s), or (B, T, 1, dv) where heads differ in width.
    """
    for hook in head_hooks(call.module):
        outputs = hook(outputs, call)
    form = getattr(call.module, "value_form", None)
    return outputs if form is None else form.pack(outputs)


def _scaling(module: Any, scaling: float | None) -> float:
    return scaling_of(module) if scaling is None else float(scaling)


def _causal(module: Any, is_causal: bool | None, mask: Tensor | None, queries: int) -> bool:
    """Say whether the kernel must mask the future itself; a mask that is given already does."""
    wanted = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    return wanted and mask is None and queries > 1


def _biased(mask: Tensor | None, bias: Tensor | None, causal: bool) -> tuple[Tensor | None, bool]:
    """Put a position bias into the mask; then the mask hides the future too, and the kernel need not."""
    if bias is None:
        return mask, causal
    if causal:
        mask = bias.new_ones(bias.shape[-2:], dtype=torch.bool).tril()
    if mask is not None and mask.dtype != torch.bool:
        return mask + bias, False
    return bias if mask is None else bias.masked_fill(~mask, torch.finfo(bias.dtype).min), False


def _additive(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Tensor | None:
    """Turn a mask made for SDPA into the additive one that eager attention takes."""
    if causal:
        mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)


def register_attention() -> None:
    """Make both functions known to Transformers' attention interface."""
    AttentionInterface.register("collab_sdpa", collab_sdpa)
    AttentionInterface.register("collab_eager", collab_eager)
