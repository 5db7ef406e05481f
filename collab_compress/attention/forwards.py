"""Forward passes for attention modules whose stock one computes its scores itself.

While such a module is edited, its class is a subclass of the stock one, of the same name, with the forward pass here.
It does what modules on Transformers' attention interface do: project, lay out as key groups, write to the cache,
attend by `collab_sdpa`, or `collab_eager` where probabilities are needed, and project the outputs. It returns what
the stock forward pass returns. A further family is a row of `FORWARDS`.
"""

import inspect
from functools import cache
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import EncoderDecoderCache

from collab_compress.transformers_parts import ALL_ATTENTION_FUNCTIONS, find_cache


class Forward(NamedTuple):
    """How a class of attention modules attends while it is edited.

    Args:
        layers: attributes of the query, key and value projections.
        output: attribute of the output projection; empty if another module projects the outputs.
        may_omit_probs: whether it returns no None in place of probabilities.
    """

    layers: tuple[str, str, str] = ("query", "key", "value")
    output: str = ""
    may_omit_probs: bool = False


FORWARDS: dict[str, Forward] = {
    "MegatronBertSelfAttention": Forward(),
    "MPNetSelfAttention": Forward(("q", "k", "v"), "o", may_omit_probs=True),
    "RemBertSelfAttention": Forward(),
    "VisualBertSelfAttention": Forward(may_omit_probs=True),
}
"""Name of the stock class → its forward pass."""


def forward(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Attend as the stock forward pass of the module, by this package's attention functions."""
    row = FORWARDS[module.stock_class.__name__]
    call = {**dict(zip(module.argument_names, args, strict=False)), **kwargs}
    query, key, value = _projected(module, row, call)
    needs_probs = bool(call.get("output_attentions"))
    outputs, probs = ALL_ATTENTION_FUNCTIONS["collab_eager" if needs_probs else "collab_sdpa"](
        module,
        query,
        key,
        value,
        call.get("attention_mask"),
        dropout=module.dropout.p if module.training else 0.0,
        scaling=module.scaling,
        is_causal=False,
        position_bias=call.get("position_bias"),
    )
    outputs = outputs.flatten(2)
    if row.output:
        outputs = getattr(module, row.output)(outputs)
    return (outputs,) if row.may_omit_probs and probs is None else (outputs, probs)


def _projected(module: Any, row: Forward, call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with those that the cache holds, as key groups (B, n, S, d)."""
    to_query, to_key, to_value = (getattr(module, name) for name in row.layers)
    hidden_states, encoder_states = call["hidden_states"], call.get("encoder_hidden_states")
    cache: Any = find_cache(call.values())
    index = getattr(module, "layer_idx", None)

    def key_groups(projected: Tensor) -> Tensor:
        groups: Tensor = projected.unflatten(-1, (-1, module.attention_head_size))
        return groups.transpose(1, 2)

    query = key_groups(to_query(hidden_states))
    if isinstance(cache, EncoderDecoderCache) and encoder_states is None:
        cache = cache.self_attention_cache
    elif isinstance(cache, EncoderDecoderCache):  # the encoder's keys and values are kept from the first call on
        if cache.is_updated.get(index):
            layer = cache.cross_attention_cache.layers[index]
            return query, layer.keys, layer.values
        cache.is_updated[index] = True
        cache = cache.cross_attention_cache
    states = hidden_states if encoder_states is None else encoder_states
    key, value = key_groups(to_key(states)), key_groups(to_value(states))
    if cache is not None:
        key, value = cache.update(key, value, index)
    return query, key, value


def has_own_forward(module: Any) -> bool:
    """Return whether the stock forward pass of a module computes scores itself."""
    return type(module).__name__ in FORWARDS


def take_over_(module: Any) -> None:
    """Replace the forward pass of a module that computes scores itself, in place, if that is not done yet."""
    stock: Any = type(module)
    if not hasattr(stock, "stock_class"):
        _change_class_(module, edited_class(stock))
        module.scaling = float(module.attention_head_size**-0.5)


def hand_back_(module: Any) -> None:
    """Undo `take_over_`, in place."""
    stock = getattr(type(module), "stock_class", None)
    if stock is not None:
        _change_class_(module, stock)
        del module.scaling


def _change_class_(module: Any, new: type[nn.Module]) -> None:
    """Change the class of a module in place, also under Accelerate's wrapper of its forward pass."""
    module.__class__ = new
    if "_old_forward" in vars(module):
        module._old_forward = MethodType(new.forward, module)


@cache
def edited_class(stock: Any) -> type[nn.Module]:
    """Return a subclass of a stock class, of the same name, with our forward pass."""
    attributes = {
        "forward": forward,
        "argument_names": tuple(inspect.signature(stock.forward).parameters)[1:],
        "stock_class": stock,
        "__reduce_ex__": _reduce,
        "__module__": stock.__module__,
        "__doc__": stock.__doc__,
    }
    return type(stock.__name__, (stock,), attributes)


def _reduce(module: Any, protocol: int) -> tuple[Any, ...]:
    """Pickle and copy by the stock class, because no file defines the subclass."""
    _, _, *rest = tuple(object.__reduce_ex__(module, protocol))
    return _blank, (module.stock_class,), *rest


def _blank(stock: Any) -> nn.Module:
    """Return an edited module without attributes, which a pickle or copy then fills."""
    kind = edited_class(stock)
    return kind.__new__(kind)
