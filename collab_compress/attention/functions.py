"""Attention of edited modules as functions of Transformers' attention interface.

Two functions serve every module alike: scores and values converted or dense, with or without hooks on its heads. The
third hands heads of their own channels to a stock function, such as flex or flash attention.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad
from transformers import AttentionInterface

from collab_compress.attention.form import scaling_of
from collab_compress.attention.install import HeadCall, for_each_head, head_hooks, wrong_implementation
from collab_compress.attention.kernels import Inputs, can_decode, probabilities_, softmax, weighted_values
from collab_compress.attention.per_head import separated
from collab_compress.errors import UnsupportedModelError
from collab_compress.transformers_parts import ALL_ATTENTION_FUNCTIONS, sdpa_attention_forward

# Arguments of stock attention functions that choose the keys to read, and those that change the scores.
CHOOSE_KEYS = frozenset(("block_indices", "indices"))
CHANGE_SCORES = frozenset(("s_aux", "sinks", "softcap"))
LEAST_WIDTH, WIDTH_MULTIPLE = 16, 8  # of heads, as flex attention (the least) and flash attention take them on a GPU


def collab_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend without returning probabilities, by the fastest kernel for the shapes.

    Args:
        module: the attention module, with its forms in `score_form` and `value_form` if it is converted.
        query: (B, H, T, d); of converted scores (B, ⌈R/d⌉, T, d).
        key: (B, H, S, d); of converted scores (B, ⌈(R+H)/d⌉, S, d), content biases included.
        value: (B, H, S, d); of converted values (B, ⌈dv/d⌉, S, d).
        attention_mask: boolean (True = attend) or additive, broadcastable to (B, H, T, S), or None.
        options: `dropout`, `scaling` (default: the module's), `is_causal` (default: the module's), and
            `position_bias`, added to the scores, broadcastable to (B, H, T, S). Others are ignored, as in stock
            attention functions, unless they change the scores.

    Returns:
        Head outputs (B, T, H, dv), or side by side, (B, T, 1, H·dv), and None in place of the probabilities.

    Raises:
        UnsupportedModelError: the module passes a paged cache, or an argument that changes the scores and is not
            implemented here.
    """
    hooks, form = head_hooks(module), getattr(module, "score_form", None)
    if any(hook.needs_probs for hook in hooks):
        return collab_eager(module, query, key, value, attention_mask, **options)[0], None
    _refuse_unsupported(module, options, CHOOSE_KEYS | CHANGE_SCORES)
    inputs = _inputs(module, query, key, value, attention_mask, options)
    if not hooks and can_decode(inputs):
        return _attend_to_cache(module, inputs), None
    value = _split_heads(module, value)
    if form is None:
        padding = max(0, query.shape[-1] - value.shape[-1])  # fused kernels want one width
        padded = pad(value, (0, padding)) if padding else value
        options.update(is_causal=inputs.causal, position_bias=None)  # older versions ignore it: it is in the mask
        outputs, _ = sdpa_attention_forward(module, query, key, padded, inputs.mask, **options)
        outputs = outputs[..., : value.shape[-1]]
    else:
        outputs = form.attend(module, inputs._replace(value=for_each_head(value, form.heads)))
        outputs = outputs.transpose(1, 2).contiguous()  # (B, T, H, dv)
    return _run_hooks(outputs, HeadCall(module, query, key, value, None)), None


def collab_eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attend step by step and return the probabilities too; arguments and errors as in `collab_sdpa`.

    Returns:
        Head outputs as in `collab_sdpa`, and probabilities after dropout (B, H, T, S), as stock eager attention.
    """
    form = getattr(module, "score_form", None)
    _refuse_unsupported(module, options, CHOOSE_KEYS if form is None else CHOOSE_KEYS | CHANGE_SCORES)
    needs_probs = any(hook.needs_probs for hook in head_hooks(module))
    p, value = options.pop("dropout", 0.0), _split_heads(module, value)
    if form is None:
        causal = _is_causal(module, options.pop("is_causal", None), attention_mask, query.shape[2])
        mask = _additive(attention_mask, query, key, causal)
        stock = getattr(sys.modules[type(module).__module__], "eager_attention_forward", _eager)
        # It returns probabilities after dropout; hooks need them before.
        outputs, probs = stock(module, query, key, value, mask, dropout=0.0 if needs_probs else p, **options)
    else:
        probs = form.probabilities(module, _inputs(module, query, key, value, attention_mask, options))
    dropped = probs
    if form is not None or (needs_probs and p > 0 and module.training):
        dropped = dropout(probs, p=p, training=module.training)
        outputs = (dropped @ for_each_head(value, probs.shape[1])).transpose(1, 2).contiguous()
    return _run_hooks(outputs, HeadCall(module, query, key, value, probs)), dropped


def collab_stock(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attend by the stock function of the model's attention implementation, as flex or flash attention.

    Queries, keys and values of all heads are padded with zeros to one width. Arguments are those of `collab_sdpa`,
    but the mask is the one that the implementation takes.

    Returns:
        Head outputs as in `collab_sdpa`, and None in place of the probabilities.

    Raises:
        UnsupportedModelError: heads share channels, or have hooks; or as `collab_sdpa`.
    """
    name, form = module.config.stock._attn_implementation, getattr(module, "score_form", None)
    refusals = {
        "has hooks on its heads": bool(head_hooks(module)),
        "shares channels between its heads": form is not None and not form.head_sizes,
        "is edited": name not in ALL_ATTENTION_FUNCTIONS,
    }
    for reason, holds in refusals.items():
        if holds:
            raise wrong_implementation(f"{type(module).__name__} {reason}", name)
    _refuse_unsupported(module, options, CHOOSE_KEYS if form is None else CHOOSE_KEYS | CHANGE_SCORES)
    options["scaling"], value = _scaling(module, options), _split_heads(module, value)
    width, of_heads = value.shape[-1], (query, key)
    if form is not None:
        value = for_each_head(value, form.heads)
        of_heads = separated(form.unpack(module, Inputs(query, key, value, scaling=options["scaling"])))
    widest = max(LEAST_WIDTH, width, of_heads[0].shape[-1])
    common = -(-widest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    padded = (pad(part, (0, common - part.shape[-1])) for part in (*of_heads, value))
    outputs, *_ = ALL_ATTENTION_FUNCTIONS[name](_WithStockConfig(module), *padded, attention_mask, **options)
    return _run_hooks(outputs[..., :width], HeadCall(module, query, key, value, None)), None


class _WithStockConfig:
    """A view of an edited attention module with the config of its model, which stock functions read."""

    def __init__(self, module: Any) -> None:
        self.module, self.config = module, module.config.stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _inputs(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Inputs:
    """Return the inputs of a kernel; a position bias becomes a part of the mask, which then hides the future too."""
    bias, causal = options.get("position_bias"), _is_causal(module, options.get("is_causal"), mask, query.shape[2])
    if bias is not None:
        if causal:
            mask, causal = bias.new_ones(bias.shape[-2:], dtype=torch.bool).tril(), False
        if mask is None:
            mask = bias
        elif mask.dtype == torch.bool:
            mask = bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
        else:
            mask = mask + bias
    return Inputs(query, key, value, mask, _scaling(module, options), options.get("dropout", 0.0), causal)


def _attend_to_cache(module: Any, inputs: Inputs) -> Tensor:
    """Attend with one new token to keys and values as they lie in a cache, (B, 1, 1, dv of all heads)."""
    query, key, value = inputs.query, inputs.key, inputs.value
    scores, values = getattr(module, "score_form", None), getattr(module, "value_form", None)
    if scores is None:
        grouped = query.reshape(*key.shape[:2], -1, key.shape[-1])  # (B, Hkv, H/Hkv, d)
        probs = ((grouped * inputs.scaling) @ key.mT).flatten(1, 2)  # (B, H, S)
    else:
        probs = scores.cached_scores(module, query, key, inputs.scaling)
    probs = probabilities_(probs, inputs.mask)
    sizes = (value.shape[-1],) * value.shape[1] if values is None else values.sizes
    return weighted_values(probs, value, sizes, probs.shape[1] // len(sizes)).view(len(query), 1, 1, -1)


def _split_heads(module: Any, value: Tensor) -> Tensor:
    """Split narrow values into heads, (B, ⌈dv/d⌉, S, d) to (B, Hkv, S, s)."""
    form = getattr(module, "value_form", None)
    return value if form is None else form.unpack(value)


def _run_hooks(outputs: Tensor, call: HeadCall) -> Tensor:
    """Run the hooks on the module's head outputs, (B, T, H, s).

    Returns:
        Outputs as the module lays them side by side, (B, T, H, s), or (B, T, 1, dv) where heads differ in width.
    """
    for hook in head_hooks(call.module):
        outputs = hook(outputs, call)
    form = getattr(call.module, "value_form", None)
    return outputs if form is None else form.pack(outputs)


def _eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attend as stock eager attention does, for modules whose family has no function for it."""
    scores = (query * _scaling(module, options)) @ key.mT
    for added in (options.get("position_bias"), mask):
        if added is not None:
            scores = scores + added
    probs = dropout(softmax(scores), p=options["dropout"], training=module.training)
    return (probs @ value).transpose(1, 2).contiguous(), probs


def _refuse_unsupported(module: Any, options: dict[str, Any], names: frozenset[str]) -> None:
    """Raise UnsupportedModelError for a paged cache, and for arguments of these names."""
    if options.get("cache") is not None:
        raise UnsupportedModelError(
            f"edited {type(module).__name__} cannot read a paged cache (generate_batch, continuous batching); "
            "use generate"
        )
    passed = sorted(name for name in names if options.get(name) is not None)
    if passed:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(passed)} to its attention, which changes the scores "
            "and is not implemented for edited modules; use the dense model"
        )


def _scaling(module: Any, options: dict[str, Any]) -> float:
    scaling = options.get("scaling")
    return scaling_of(module) if scaling is None else float(scaling)


def _is_causal(module: Any, is_causal: bool | None, mask: Tensor | None, queries: int) -> bool:
    """Return whether the kernel must apply the causal mask itself; an attention mask already contains it."""
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", False))
    return is_causal and mask is None and queries > 1


def _additive(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Tensor | None:
    """Turn a mask made for SDPA into the additive one that eager attention takes."""
    if causal:
        mask = query.new_ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)


def register_attention() -> None:
    """Register the functions with Transformers' attention interface."""
    AttentionInterface.register("collab_sdpa", collab_sdpa)
    AttentionInterface.register("collab_eager", collab_eager)
    AttentionInterface.register("collab_stock", collab_stock)
