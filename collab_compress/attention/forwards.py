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

from torch import Tensor, nn
from transformers import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from collab_compress.attention.projections import Layout, QKVProjection


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
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, rows: bool, share: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend, heads side by side afterwards.

    Args:
        module: the attention module.
        query: in pieces, (B, n, T, d); keys and values likewise.
        mask: boolean (True = attend) or additive, broadcastable to (B, H, T, S), or None.
        rows: whether probabilities are wanted.
        share: of the probabilities to drop in training.
        bias: added to the scores, broadcastable to (B, H, T, S), or None.

    Returns:
        Head outputs (B, T, H·dv), and probabilities (B, H, T, S) or None.
    """
    function = ALL_ATTENTION_FUNCTIONS["collab_eager" if rows else "collab_sdpa"]
    outputs, probabilities = function(
        module, query, key, value, mask, dropout=share if module.training else 0.0, scaling=module.scaling,
        is_causal=False, position_bias=bias,
    )  # fmt: skip
    return outputs.flatten(2), probabilities


def keys_and_values(
    module: Any, layers: tuple[Any, Any], own: Tensor, others: Tensor | None, cache: Any
) -> tuple[Tensor, Tensor]:
    """Project keys and values, laid out, with those that a cache holds.

    Args:
        module: the attention module.
        layers: that project keys and values.
        own: tokens that queries come from, (B, T, D).
        others: tokens of an encoder to attend to instead, (B, S, D), or None.
        cache: of Transformers', or None. It keeps those of an encoder from the first time on.
    """
    if isinstance(cache, EncoderDecoderCache) and others is None:
        cache = cache.self_attention_cache
    elif isinstance(cache, EncoderDecoderCache):
        updated, cache.is_updated[module.layer_idx] = cache.is_updated.get(module.layer_idx), True
        cache = cache.cross_attention_cache
        if updated:
            return cache.layers[module.layer_idx].keys, cache.layers[module.layer_idx].values
    width = module.head_dim if hasattr(module, "head_dim") else module.attention_head_size
    key, value = (heads_of(layer(own if others is None else others), width) for layer in layers)
    return (key, value) if cache is None else cache.update(key, value, module.layer_idx)


def mpnet(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, position_bias: Tensor | None = None,
    output_attentions: bool = False, **_: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Attend with a relative position bias that all layers share, (B, H, T, T)."""
    width = module.attention_head_size
    query, key, value = (heads_of(layer(hidden_states), width) for layer in (module.q, module.k, module.v))
    outputs, rows = attended(
        module, query, key, value, attention_mask, rows=output_attentions, share=module.dropout.p, bias=position_bias
    )
    return (module.o(outputs), rows) if output_attentions else (module.o(outputs),)


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
    outputs, rows = attended(
        module, query, key, value, attention_mask, rows=output_attentions, share=module.attention_dropout.p, bias=bias
    )
    return residual + nn.functional.dropout(module.dense(outputs), module.hidden_dropout, module.training), rows


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
    outputs, rows = attended(module, query, key, value, seen, rows=True, share=module.attn_dropout_p, bias=bias)
    return module.out_proj(outputs), rows  # type: ignore[return-value]


def xglm(
    module: Any, hidden_states: Tensor, key_value_states: Tensor | None = None, past_key_values: Any = None,
    attention_mask: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend to the tokens themselves, or to `key_value_states`, by four projections."""
    wanted = bool(options.get("output_attentions"))
    query = heads_of(module.q_proj(hidden_states), module.head_dim)
    layers = (module.k_proj, module.v_proj)
    key, value = keys_and_values(module, layers, hidden_states, key_value_states, past_key_values)
    outputs, rows = attended(module, query, key, value, attention_mask, rows=wanted, share=module.dropout)
    return module.out_proj(outputs), rows


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
    layers = (module.key, module.value)
    key, value = keys_and_values(module, layers, hidden_states, encoder_hidden_states, past_key_values)
    wanted = bool(output_attentions)
    return attended(module, query, key, value, attention_mask, rows=wanted, share=module.dropout.p)


def visual_bert(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
) -> tuple[Tensor | None, ...]:
    """Attend as `bert` does, in an encoder."""
    outputs, rows = bert(module, hidden_states, attention_mask, output_attentions=output_attentions)
    return (outputs, rows) if output_attentions else (outputs,)


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


def _norm_factor(module: Any) -> float:
    return float(module.inv_norm_factor)


def _softmax_scale(module: Any) -> float:
    return float(module.softmax_scale)


FORWARDS: dict[str, Forward] = {
    "BloomAttention": Forward(bloom, _norm_factor),
    "MegatronBertSelfAttention": Forward(bert, _root),
    "MPNetSelfAttention": Forward(mpnet, _root),
    "MptAttention": Forward(mpt, _softmax_scale),
    "RemBertSelfAttention": Forward(bert, _root),
    "TrOCRAttention": Forward(trocr),
    "VisualBertSelfAttention": Forward(visual_bert, _root),
    "XGLMAttention": Forward(xglm),
}
"""Name of the stock class → its forward pass."""


def has_own_forward(module: Any) -> bool:
    """Whether the stock forward pass of a module computes scores itself."""
    return type(module).__name__ in FORWARDS


def take_over_(module: Any) -> None:
    """Give a module that computes scores itself our forward pass, in place, unless it has it already."""
    stock: Any = type(module)
    if not hasattr(stock, "stock_class"):
        own = FORWARDS[stock.__name__]
        _change_class_(module, edited_class(stock))
        if own.scaling is not None:
            module.scaling = own.scaling(module)


def hand_back_(module: Any) -> None:
    """Undo `take_over_`, in place."""
    stock = getattr(type(module), "stock_class", None)
    if stock is not None:
        _change_class_(module, stock)
        if FORWARDS[stock.__name__].scaling is not None:
            del module.scaling


def _change_class_(module: Any, new: Any) -> None:
    """Let a module be of another class, in place, also under what Accelerate wraps around its forward pass."""
    module.__class__ = new
    if "_old_forward" in vars(module):
        module._old_forward = MethodType(new.forward, module)


@cache
def edited_class(stock: Any) -> Any:
    """Make a subclass of a stock class, of the same name, with our forward pass."""
    own = {"forward": FORWARDS[stock.__name__].run, "__reduce_ex__": _reduced, "stock_class": stock}
    return type(stock.__name__, (stock,), {**own, "__module__": stock.__module__, "__doc__": stock.__doc__})


def _reduced(module: Any, protocol: Any) -> tuple[Any, ...]:
    """Let pickles and copies name the stock class, for no file defines the other."""
    _, _, *rest = tuple(object.__reduce_ex__(module, protocol))
    return _blank, (module.stock_class,), *rest


def _blank(stock: Any) -> Any:
    """Make a module without anything in it, which a pickle or copy then fills."""
    made = edited_class(stock)
    return made.__new__(made)
