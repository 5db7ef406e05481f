"""Forward passes for attention modules whose stock one computes its scores itself, where nothing can be exchanged.

While something of ours is in such a module, its class is a subclass of the stock one, of the same name, with a
forward pass from the table here. It does what modules on Transformers' attention interface do: project, lay out in
pieces of the head width, write to the cache, attend by `collab_sdpa`, or `collab_eager` where probabilities are asked
for, and project the outputs. It returns what the stock forward pass returns. Modules without anything of ours in them
stay as they are. A further family is a row of `FORWARDS`, and a function where its arguments differ.
"""

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache

from collab_compress.attention.projections import Layout, QKVProjection
from collab_compress.errors import UnsupportedModelError
from collab_compress.transformers_parts import ALL_ATTENTION_FUNCTIONS


def heads_of(projected: Tensor, head_width: int) -> Tensor:
    """Lay projected tokens (B, T, n·d) out in pieces of the head width, (B, n, T, d)."""
    pieces: Tensor = projected.unflatten(-1, (-1, head_width))
    return pieces.transpose(1, 2)


def fused_heads(layer: Any, x: Tensor, layout: Layout) -> list[Tensor]:
    """Project x (B, T, D) to queries, keys and values by a stock fused layer or by what is in its place, laid out."""
    if isinstance(layer, QKVProjection):
        parts = [layer.query(x), layer.key(x), layer.value(x)]
    else:
        parts = layout.split(layer(x), -1)
    return [heads_of(part, layout.head_width) for part in parts]


def attended(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, probs: bool, share: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend, heads side by side afterwards.

    Args:
        module: the attention module.
        query: in pieces, (B, n, T, d); keys and values likewise.
        mask: boolean (True = attend) or additive, broadcastable to (B, H, T, S), or None.
        probs: whether probabilities are wanted.
        share: of the probabilities to drop in training.
        bias: added to the scores, broadcastable to (B, H, T, S), or None.

    Returns:
        Head outputs (B, T, H·dv), and probabilities (B, H, T, S) or None.
    """
    function = ALL_ATTENTION_FUNCTIONS["collab_eager" if probs else "collab_sdpa"]
    outputs, probabilities = function(
        module, query, key, value, mask, dropout=share if module.training else 0.0, scaling=module.scaling,
        is_causal=False, position_bias=bias,
    )  # fmt: skip
    return outputs.flatten(2), probabilities


def keys_and_values(
    module: Any, layers: tuple[Any, Any], own: Tensor, others: Tensor | None, cache: Any, number: int | None
) -> tuple[Tensor, Tensor]:
    """Project keys and values, laid out, with those that a cache holds.

    Args:
        module: the attention module.
        layers: that project keys and values.
        own: tokens that queries come from, (B, T, D).
        others: tokens of an encoder to attend to instead, (B, S, D), or None.
        cache: of Transformers', or None. It keeps those of an encoder from the first time on.
        number: of the layer in the cache.
    """
    if isinstance(cache, EncoderDecoderCache) and others is None:
        cache = cache.self_attention_cache
    elif isinstance(cache, EncoderDecoderCache):
        updated, cache.is_updated[number] = cache.is_updated.get(number), True
        cache = cache.cross_attention_cache
        if updated:
            return cache.layers[number].keys, cache.layers[number].values
    width = module.head_dim if hasattr(module, "head_dim") else module.attention_head_size
    key, value = (heads_of(layer(own if others is None else others), width) for layer in layers)
    return (key, value) if cache is None else cache.update(key, value, number)


def mpnet(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, position_bias: Tensor | None = None,
    output_attentions: bool = False, **_: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Attend with a relative position bias that all layers share, (B, H, T, T)."""
    width = module.attention_head_size
    query, key, value = (heads_of(layer(hidden_states), width) for layer in (module.q, module.k, module.v))
    outputs, probs = attended(
        module, query, key, value, attention_mask, probs=output_attentions, share=module.dropout.p, bias=position_bias
    )
    return (module.o(outputs), probs) if output_attentions else (module.o(outputs),)


def bloom(
    module: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor | None,
    layer_past: Any = None, use_cache: bool = False, output_attentions: bool = False, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend with biases linear in the key's place (ALiBi), (B·H, 1, S), and add the residual."""
    layout = Layout(module.num_heads, module.head_dim, interleaved=True)
    query, key, value = fused_heads(module.query_key_value, hidden_states, layout)
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    bias = alibi.unflatten(0, (-1, module.num_heads))
    outputs, probs = attended(
        module,
        query,
        key,
        value,
        attention_mask,
        probs=output_attentions,
        share=module.attention_dropout.p,
        bias=bias,
    )
    return residual + nn.functional.dropout(module.dense(outputs), module.hidden_dropout, module.training), probs


def mpt(
    module: Any, hidden_states: Tensor, position_bias: Tensor, past_key_values: Any = None,
    attention_mask: Tensor | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend with ALiBi, (H, 1, most tokens), its last columns being those of the keys; a true mask hides."""
    layout = Layout(module.n_heads, module.head_dim)
    query, key, value = fused_heads(module.Wqkv, hidden_states, layout)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    bias = None if position_bias is None else position_bias[None, :, :, -key.shape[2] :].to(query.dtype)
    seen = None if attention_mask is None else attention_mask.logical_not()
    outputs, probs = attended(module, query, key, value, seen, probs=True, share=module.attn_dropout_p, bias=bias)
    return module.out_proj(outputs), probs  # type: ignore[return-value]


def xglm(
    module: Any, hidden_states: Tensor, key_value_states: Tensor | None = None, past_key_values: Any = None,
    attention_mask: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend to the tokens themselves, or to `key_value_states`, by four projections."""
    wanted = bool(options.get("output_attentions"))
    query = heads_of(module.q_proj(hidden_states), module.head_dim)
    layers = (module.k_proj, module.v_proj)
    key, value = keys_and_values(module, layers, hidden_states, key_value_states, past_key_values, module.layer_idx)
    outputs, probs = attended(module, query, key, value, attention_mask, probs=wanted, share=module.dropout)
    return module.out_proj(outputs), probs


def trocr(
    module: Any, hidden_states: Tensor, key_value_states: Tensor | None = None, past_key_values: Any = None,
    attention_mask: Tensor | None = None, output_attentions: bool | None = False, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend as `xglm` does."""
    return xglm(
        module, hidden_states, key_value_states, past_key_values, attention_mask, output_attentions=output_attentions
    )


def bert(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None, past_key_values: Any = None, output_attentions: bool | None = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend to the tokens themselves, or to `encoder_hidden_states`; outputs are projected by another module."""
    query = heads_of(module.query(hidden_states), module.attention_head_size)
    layers, number = (module.key, module.value), getattr(module, "layer_idx", None)
    key, value = keys_and_values(module, layers, hidden_states, encoder_hidden_states, past_key_values, number)
    wanted = bool(output_attentions)
    return attended(module, query, key, value, attention_mask, probs=wanted, share=module.dropout.p)


def visual_bert(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
) -> tuple[Tensor | None, ...]:
    """Attend as `bert` does, in an encoder."""
    outputs, probs = bert(module, hidden_states, attention_mask, output_attentions=output_attentions)
    return (outputs, probs) if output_attentions else (outputs,)


def tapas(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None, past_key_values: Any = None, output_attentions: bool = False,
    **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Attend as `bert` does; a decoder hands its cache on."""
    outputs, probs = bert(
        module, hidden_states, attention_mask, encoder_hidden_states, past_key_values, output_attentions
    )
    found = (outputs, probs) if output_attentions else (outputs,)
    return (*found, past_key_values) if module.is_decoder else found


def blip_text(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None, encoder_attention_mask: Tensor | None = None,
    past_key_values: Any = None, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend as `bert` does, with a mask of its own for `encoder_hidden_states`; probabilities are always given."""
    mask = attention_mask if encoder_hidden_states is None else encoder_attention_mask
    return bert(module, hidden_states, mask, encoder_hidden_states, past_key_values, output_attentions=True)


def blip_vision(module: Any, hidden_states: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Attend to all patches."""
    query, key, value = fused_heads(module.qkv, hidden_states, Layout(module.num_heads, module.head_dim))
    wanted = bool(options.get("output_attentions"))
    outputs, probs = attended(module, query, key, value, None, probs=wanted, share=module.dropout.p)
    return module.projection(outputs), probs


def table_transformer(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, object_queries: Tensor | None = None,
    key_value_states: Tensor | None = None, spatial_position_embeddings: Tensor | None = None,
    output_attentions: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend by inputs to which positions are added, to values of inputs to which they are not; true masks hide."""
    placed = hidden_states if object_queries is None else hidden_states + object_queries
    seen, keyed = (hidden_states, placed) if key_value_states is None else (key_value_states, key_value_states)
    if key_value_states is not None and spatial_position_embeddings is not None:
        keyed = key_value_states + spatial_position_embeddings
    projected = (module.q_proj(placed), module.k_proj(keyed), module.v_proj(seen))
    query, key, value = (heads_of(each, module.head_dim) for each in projected)
    mask = attention_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.logical_not()
    outputs, probs = attended(module, query, key, value, mask, probs=output_attentions, share=module.dropout)
    return module.out_proj(outputs), probs


def mvp(
    module: Any, hidden_states: Tensor, key_value_states: Tensor | None = None, past_key_values: Any = None,
    attention_mask: Tensor | None = None, attn_prompt: Any = None, output_attentions: bool = False, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend as `xglm` does.

    Raises:
        UnsupportedModelError: there are prompts, which are keys and values of dense heads.
    """
    if attn_prompt is not None:
        raise UnsupportedModelError(
            "edited MvpAttention cannot read prompts (use_prompt=True), which are keys and values of dense heads; "
            "use the model without them"
        )
    return xglm(
        module, hidden_states, key_value_states, past_key_values, attention_mask, output_attentions=output_attentions
    )


def xlm(
    module: Any, input: Tensor, mask: Tensor, kv: Tensor | None = None, cache: Any = None,
    output_attentions: bool = False, **_: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Attend with a mask (B, S) or (B, T, S), true where something is to be seen."""
    query = heads_of(module.q_lin(input), module.head_dim)
    layers = (module.k_lin, module.v_lin)
    key, value = keys_and_values(module, layers, input, kv, cache, module.layer_id)
    seen = (mask != 0)[:, None] if mask.dim() == 3 else (mask != 0)[:, None, None]
    outputs, probs = attended(module, query, key, value, seen, probs=output_attentions, share=module.dropout)
    projected = module.out_lin(outputs)
    return (projected, probs) if output_attentions else (projected,)


class Forward(NamedTuple):
    """How a class of attention modules attends while something of ours is in it.

    Args:
        run: what takes the place of its `forward`.
        scaling: what the module multiplies scores by; None where it has `scaling` to say so.
    """

    run: Callable[..., Any]
    scaling: Callable[[Any], float] | None = None


def _root(module: Any) -> float:
    return float(module.attention_head_size**-0.5)


def _head_root(module: Any) -> float:
    return float(module.head_dim**-0.5)


def _norm_factor(module: Any) -> float:
    return float(module.inv_norm_factor)


def _scale(module: Any) -> float:
    return float(module.scale)


def _softmax_scale(module: Any) -> float:
    return float(module.softmax_scale)


FORWARDS: dict[str, Forward] = {
    "blip.BlipAttention": Forward(blip_vision, _scale),
    "blip.BlipTextSelfAttention": Forward(blip_text, _root),
    "bloom.BloomAttention": Forward(bloom, _norm_factor),
    "flaubert.MultiHeadAttention": Forward(xlm, _head_root),
    "megatron_bert.MegatronBertSelfAttention": Forward(bert, _root),
    "mpnet.MPNetSelfAttention": Forward(mpnet, _root),
    "mpt.MptAttention": Forward(mpt, _softmax_scale),
    "mvp.MvpAttention": Forward(mvp),
    "rembert.RemBertSelfAttention": Forward(bert, _root),
    "table_transformer.TableTransformerAttention": Forward(table_transformer),
    "tapas.TapasSelfAttention": Forward(tapas, _root),
    "trocr.TrOCRAttention": Forward(trocr),
    "visual_bert.VisualBertSelfAttention": Forward(visual_bert, _root),
    "xglm.XGLMAttention": Forward(xglm),
    "xlm.MultiHeadAttention": Forward(xlm, _head_root),
}
"""Folder in Transformers and name of the stock class → its forward pass."""


def place_of(kind: Any) -> str:
    """Name a class as `FORWARDS` does."""
    return f"{kind.__module__.split('.')[-2:][0]}.{kind.__name__}"


def has_own_forward(module: Any) -> bool:
    """Whether the stock forward pass of a module computes scores itself."""
    return place_of(type(module)) in FORWARDS


def take_over_(module: Any) -> None:
    """Replace the forward pass of a module that computes scores itself, in place, unless it is replaced already."""
    stock: Any = type(module)
    if not hasattr(stock, "stock_class"):
        own = FORWARDS[place_of(stock)]
        _change_class_(module, edited_class(stock))
        if own.scaling is not None:
            module.scaling = own.scaling(module)


def hand_back_(module: Any) -> None:
    """Undo `take_over_`, in place."""
    stock = getattr(type(module), "stock_class", None)
    if stock is not None:
        _change_class_(module, stock)
        if FORWARDS[place_of(stock)].scaling is not None:
            del module.scaling


def _change_class_(module: Any, new: Any) -> None:
    """Change the class of a module in place, also under Accelerate's wrapper of its forward pass."""
    module.__class__ = new
    if "_old_forward" in vars(module):
        module._old_forward = MethodType(new.forward, module)


@cache
def edited_class(stock: Any) -> Any:
    """Make a subclass of a stock class, of the same name, with our forward pass."""
    own = {"forward": FORWARDS[place_of(stock)].run, "__reduce_ex__": _reduced, "stock_class": stock}
    return type(stock.__name__, (stock,), {**own, "__module__": stock.__module__, "__doc__": stock.__doc__})


def _reduced(module: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle and copy as the stock class, because no file defines the subclass."""
    _, _, *rest = tuple(object.__reduce_ex__(module, protocol))
    return _blank, (module.stock_class,), *rest


def _blank(stock: Any) -> Any:
    """Make a module without anything in it, which a pickle or copy then fills."""
    made = edited_class(stock)
    return made.__new__(made)
