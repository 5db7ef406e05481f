"""Attention of edited modules as functions of Transformers' attention interface.

Each serves every module alike: converted or dense underneath, with or without something acting on its heads.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from collab_compress.attention.decoding import probabilities_, reads_cache, weighted_values
from collab_compress.attention.form import scaling_of
from collab_compress.attention.install import FORMS_AT, HeadCall, for_each_head, head_hooks
from collab_compress.attention.kernels import softmax
from collab_compress.errors import UnsupportedModelError
from collab_compress.transformers_parts import sdpa_attention_forward

# Arguments of stock attention functions that say which keys are read, and those that change the scores.
CHOOSE_KEYS = frozenset(("block_indices", "indices"))
CHANGE_SCORES = frozenset(("s_aux", "sinks", "softcap"))


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
        kwargs: `position_bias`, added to the scores, broadcastable to (B, H, T, S), or None. Others are
            ignored, as stock attention functions ignore them, unless they would change the scores.

    Returns:
        Head outputs (B, T, H, dv), or side by side, (B, T, 1, H·dv), and None in place of the probabilities.

    Raises:
        UnsupportedModelError: the module passes a paged cache, or an argument that changes the scores and is not
            implemented here.
    """
    if any(hook.needs_probs for hook in head_hooks(module)):
        outputs, _ = collab_eager(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
        return outputs, None
    _refuse_unsupported(module, kwargs, CHOOSE_KEYS | CHANGE_SCORES)
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
    stock_scores = getattr(module, "score_form", None) is None
    _refuse_unsupported(module, kwargs, CHOOSE_KEYS if stock_scores else CHOOSE_KEYS | CHANGE_SCORES)
    value = _of_heads(module, value)
    causal = _causal(module, is_causal, attention_mask, query.shape[2])
    wanted = any(hook.needs_probs for hook in head_hooks(module))
    form = getattr(module, "score_form", None)
    if form is not None:
        mask, causal = _biased(attention_mask, kwargs.get("position_bias"), causal)
        scale = _scaling(module, scaling)
        probs = form.probabilities(module, query, key, mask, scaling=scale, causal=causal)
        outputs = None
    else:
        mask = _additive(attention_mask, query, key, causal)
        stock = getattr(sys.modules[type(module).__module__], "eager_attention_forward", _eager)
        # It would return probs after dropout; hooks need them before.
        outputs, probs = stock(
            module, query, key, value, mask, scaling=scaling, dropout=0.0 if wanted else dropout, **kwargs
        )
    probabilities = probs
    if outputs is None or (wanted and dropout > 0 and module.training):
        probabilities = nn.functional.dropout(probs, p=dropout, training=module.training)
        outputs = (probabilities @ for_each_head(value, probs.shape[1])).transpose(1, 2).contiguous()
    return _acted(outputs, HeadCall(module, query, key, value, probs)), probabilities


def _decoded(
    module: Any, query: Tensor, key: Tensor, value: Tensor, added: tuple[Tensor | None, ...], scaling: float
) -> Tensor:
    """Attend with one new token to keys and values as they lie in a cache, (B, 1, 1, dv of all heads)."""
    scores, values = (getattr(module, name, None) for name in FORMS_AT)
    if scores is None:
        own = query.reshape(*key.shape[:2], -1, key.shape[-1])  # (B, Hkv, H/Hkv, d)
        probs = ((own * scaling) @ key.mT).flatten(1, 2)
    else:
        probs = scores.cached_scores(module, query, key, scaling)
    probs = probabilities_(probs, *added)
    sizes = (value.shape[-1],) * value.shape[1] if values is None else values.sizes
    return weighted_values(probs, value, sizes, probs.shape[1] // len(sizes)).view(len(query), 1, 1, -1)


def _of_heads(module: Any, value: Tensor) -> Tensor:
    """Split narrow values into heads, (B, ⌈dv/d⌉, S, d) to (B, Hkv, S, s)."""
    form = getattr(module, "value_form", None)
    return value if form is None else form.unpack(value)


def _eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None,
    dropout: float, position_bias: Tensor | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend as stock eager attention does, for modules whose family has no function for it."""
    scores = (query * _scaling(module, scaling)) @ key.mT
    for added in (position_bias, mask):
        scores = scores if added is None else scores + added
    probs = nn.functional.dropout(softmax(scores), p=dropout, training=module.training)
    return (probs @ value).transpose(1, 2).contiguous(), probs


def _refuse_unsupported(module: Any, kwargs: dict[str, Any], names: frozenset[str]) -> None:
    """Raise UnsupportedModelError for a paged cache, and for arguments of these names."""
    if kwargs.get("cache") is not None:
        raise UnsupportedModelError(
            f"edited {type(module).__name__} cannot read a paged cache (generate_batch, continuous batching); "
            "use generate"
        )
    passed = sorted(name for name in names if kwargs.get(name) is not None)
    if passed:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(passed)} to its attention, which changes the scores "
            "and is not implemented for edited modules; use the dense model"
        )


def _acted(outputs: Tensor, call: HeadCall) -> Tensor:
    """Run the hooks on the module's head outputs, (B, T, H, s), and return the changed outputs.

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
    """Return whether the kernel must apply the causal mask itself; an attention mask already contains it."""
    wanted = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    return wanted and mask is None and queries > 1


def _biased(mask: Tensor | None, bias: Tensor | None, causal: bool) -> tuple[Tensor | None, bool]:
    """Add a position bias to the attention mask, which then includes the causal mask."""
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
        mask = query.new_ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)


def register_attention() -> None:
    """Make both functions known to Transformers' attention interface."""
    AttentionInterface.register("collab_sdpa", collab_sdpa)
    AttentionInterface.register("collab_eager", collab_eager)
