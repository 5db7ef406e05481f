"""Attention of edited modules as functions of Transformers' attention interface.

Converted scores and values are turned into ordinary heads here, which the stock function of the model's attention
implementation attends with. Hooks on heads run on its outputs.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad
from transformers import AttentionInterface

from collab_compress.attention.decoding import HALVES, can_decode, probabilities, weighted_values
from collab_compress.attention.form import scaling_of
from collab_compress.attention.install import (
    HeadCall,
    for_each_head,
    forms_of,
    head_hooks,
    refuse_paged_cache,
    wrong_implementation,
)
from collab_compress.errors import UnsupportedModelError
from collab_compress.transformers_parts import ALL_ATTENTION_FUNCTIONS, sdpa_attention_forward

# Arguments of stock attention functions that choose the keys to read, and those that change the scores.
CHOOSE_KEYS = frozenset(("block_indices", "indices"))
CHANGE_SCORES = frozenset(("s_aux", "sinks", "softcap"))
LEAST_WIDTH = 16  # of heads, as flex attention takes them on a GPU
WIDTH_MULTIPLE = 8  # of heads, as flash attention takes them


def collab_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend without returning probabilities, by PyTorch's fused attention.

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

    Example:
        >>> module, heads = model.encoder.layer[0].attention.self, torch.randn(3, 2, 3, 6, 8)  # queries, keys, values
        >>> outputs, _ = collab_sdpa(module, *heads, attention_mask=None)
        >>> torch.allclose(outputs, collab_eager(module, *heads, attention_mask=None)[0], atol=1e-5)
        True
    """
    hooks = head_hooks(module)
    if any(hook.needs_probs for hook in hooks):
        return collab_eager(module, query, key, value, attention_mask, **options)[0], None
    _refuse_unsupported(module, options, CHOOSE_KEYS | CHANGE_SCORES)
    mask, causal = _whole_mask(module, attention_mask, query.shape[2], options)
    if not hooks and not options.get("dropout") and can_decode(query, key, value, mask):
        return _attend_to_cache(module, query, key, value, mask, _scaling(module, options)), None
    options.update(is_causal=causal, position_bias=None)  # which is in the mask: older versions ignore it
    return _attend(sdpa_attention_forward, module, (query, key, value), mask, options)


def collab_eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attend step by step and return the probabilities too; arguments and errors as in `collab_sdpa`.

    Returns:
        Head outputs as in `collab_sdpa`, and probabilities after dropout (B, H, T, S), as stock eager attention.

    Example:
        >>> module, heads = model.encoder.layer[0].attention.self, torch.randn(3, 2, 3, 6, 8)  # queries, keys, values
        >>> outputs, probs = collab_eager(module, *heads, attention_mask=None)
        >>> outputs.shape, probs.shape
        (torch.Size([2, 6, 3, 8]), torch.Size([2, 3, 6, 6]))
    """
    form, _ = forms_of(module)
    _refuse_unsupported(module, options, CHOOSE_KEYS if form is None else CHOOSE_KEYS | CHANGE_SCORES)
    needs_probs = any(hook.needs_probs for hook in head_hooks(module))
    p = options.pop("dropout", 0.0)
    mask = attention_mask
    if _is_causal(module, options.pop("is_causal", None), attention_mask, query.shape[2]):
        mask = query.new_ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:  # made for SDPA; eager attention takes an additive one
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    heads = _ordinary_heads(module, query, key, value, _scaling(module, options))
    # Stock functions of some families scale by the width of a head, which a converted one does not have.
    stock = None if form else getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    # They return probabilities after dropout; hooks need them before.
    outputs, probs = (stock or _eager)(module, *heads, mask, dropout=0.0 if needs_probs else p, **options)
    dropped = probs
    if needs_probs and p > 0 and module.training:
        dropped = dropout(probs, p=p, training=True)
        outputs = (dropped @ for_each_head(heads[2], probs.shape[1])).transpose(1, 2).contiguous()
    return _run_hooks(outputs, HeadCall(module, query, key, heads[2], probs)), dropped


def collab_stock(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attend by the stock function of the model's attention implementation, as flex or flash attention.

    Arguments are those of `collab_sdpa`, but the mask is the one that the implementation takes.

    Returns:
        Head outputs as in `collab_sdpa`, and None in place of the probabilities.

    Raises:
        UnsupportedModelError: there are hooks on the heads; or as `collab_sdpa`.
    """
    name, (form, _) = module.config.stock._attn_implementation, forms_of(module)
    if head_hooks(module) or name not in ALL_ATTENTION_FUNCTIONS:
        reason = "has hooks on its heads" if head_hooks(module) else "is edited"
        raise wrong_implementation(f"{type(module).__name__} {reason}", name)
    _refuse_unsupported(module, options, CHOOSE_KEYS if form is None else CHOOSE_KEYS | CHANGE_SCORES)
    return _attend(ALL_ATTENTION_FUNCTIONS[name], module, (query, key, value), attention_mask, options)


class _StockView:
    """A view of an edited attention module as stock functions read it: the config of its model, keys of each head."""

    def __init__(self, module: Any, has_key_per_head: bool) -> None:
        config = getattr(module, "config", None)
        self.module, self.config = module, getattr(config, "stock", config)
        if has_key_per_head:
            self.num_key_value_groups = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _attend(
    stock: Any, module: Any, parts: tuple[Tensor, Tensor, Tensor], mask: Any, options: dict[str, Any]
) -> tuple[Tensor, None]:
    """Attend by a stock function with ordinary heads; fused ones want queries, keys and values of one width."""
    options["scaling"] = _scaling(module, options)
    heads = _ordinary_heads(module, *parts, options["scaling"])
    widths = {part.shape[-1] for part in heads}
    width, padded = heads[2].shape[-1], list(heads)
    if len(widths) > 1 or stock is not sdpa_attention_forward:
        common = -(-max(LEAST_WIDTH, *widths) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        padded = [pad(part, (0, common - part.shape[-1])) for part in heads]
    view = _StockView(module, heads[0].shape[1] == heads[1].shape[1])
    outputs, *_ = stock(view, *padded, mask, **options)
    if outputs.shape[-1] > width:
        outputs = outputs[..., :width].contiguous()
    return _run_hooks(outputs, HeadCall(module, *parts[:2], heads[2], None)), None


def _ordinary_heads(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of ordinary heads, (B, H, T, w), (B, G, S, w) and (B, G, S, s).

    G is H, or the number of groups of heads that share keys and values.
    """
    form, value_form = forms_of(module)
    if value_form is not None:
        value = value_form.heads_of(value)
    if form is not None:
        query, key = form.heads_of(module, query, key, scaling)
        value = for_each_head(value, key.shape[1])
    return query, key, value


def _whole_mask(
    module: Any, mask: Tensor | None, queries: int, options: dict[str, Any]
) -> tuple[Tensor | None, bool]:
    """Return the mask with the position bias, if there is one, and whether the future is still to be hidden."""
    bias, causal = options.get("position_bias"), _is_causal(module, options.get("is_causal"), mask, queries)
    if bias is None:
        return mask, causal
    if causal:
        mask = bias.new_ones(bias.shape[-2:], dtype=torch.bool).tril()
    if mask is None:
        return bias, False
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, torch.finfo(bias.dtype).min), False
    return mask + bias, False


def _attend_to_cache(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Attend with one new token to keys and values as they lie in a cache, (B, 1, 1, dv of all heads)."""
    scores, values = forms_of(module)
    if scores is None:
        grouped = query.reshape(*key.shape[:2], -1, key.shape[-1])  # (B, Hkv, H/Hkv, d)
        probs = ((grouped * scaling) @ key.mT).flatten(1, 2)  # (B, H, S)
    else:
        probs = scores.cached_scores(module, query, key, scaling)
    probs = probabilities(probs, mask)
    heads, size = (value.shape[1], value.shape[-1]) if values is None else (values.value_heads, values.size)
    return weighted_values(probs, value, heads, size).view(len(query), 1, 1, -1)


def _run_hooks(outputs: Tensor, call: HeadCall) -> Tensor:
    """Run the hooks on the module's head outputs, (B, T, H, s), and return them."""
    for hook in head_hooks(call.module):
        outputs = hook(outputs, call)
    return outputs


def _eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attend as stock eager attention does, with converted scores, or in a family that has no function for it."""
    scores = (query * _scaling(module, options)) @ for_each_head(key, query.shape[1]).mT
    for added in (options.get("position_bias"), mask):
        if added is not None:
            scores = scores + added
    probs = scores.softmax(-1, dtype=torch.float32 if scores.dtype in HALVES else None).to(scores.dtype)
    probs = dropout(probs, p=options["dropout"], training=module.training)
    outputs = probs @ for_each_head(value, query.shape[1])
    return outputs.transpose(1, 2).contiguous(), probs


def _refuse_unsupported(module: Any, options: dict[str, Any], names: frozenset[str]) -> None:
    """Raise UnsupportedModelError for a paged cache, and for arguments of these names."""
    refuse_paged_cache(module, options)
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


def register_attention() -> None:
    """Register the functions with Transformers' attention interface."""
    AttentionInterface.register("collab_sdpa", collab_sdpa)
    AttentionInterface.register("collab_eager", collab_eager)
    AttentionInterface.register("collab_stock", collab_stock)
