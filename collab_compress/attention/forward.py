"""The forward pass of attention modules that do no more than project, attend and project the outputs.

While such a module is converted, its class is a subclass of the stock one, of the same name, with this forward pass.
One product makes queries, keys, content biases and values of one input, and nothing is padded to look like heads of
the dense width. Arguments and outputs are those of the stock forward pass. Families that do more in between keep
their own (`AttentionFamily.forward`). Modules that compute their scores themselves run this forward pass also while
their heads are only hooked.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import EncoderDecoderCache

from collab_compress.architectures.sites import default_scaling
from collab_compress.attention.projections import BY_CLASS, input_paths, refuse_dense, rows_of
from collab_compress.attention.relative import Positions, read_positions, without_unused
from collab_compress.attention.shared import scaling_of
from collab_compress.transformers_parts import ALL_ATTENTION_FUNCTIONS, find_cache

STATES = ("encoder_hidden_states", "key_value_states")  # what cross-attention reads keys and values from
DROPOUTS = ("attention_dropout", "dropout", "dropout_prob")
MAY_OMIT_PROBS = ("MPNetSelfAttention", "VisualBertSelfAttention")  # return no None in place of probabilities


def named_arguments(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of one call of a module, stock or edited, by their names."""
    stock: Any = type(module)
    names: tuple[str, ...] = getattr(module, "argument_names", None) or _argument_names(stock)
    return {**dict(zip(names, args, strict=False)), **kwargs}


@cache
def _argument_names(stock: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(stock.forward).parameters)[1:]


def forward(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Attend as the stock forward pass of the module, by this package's attention function."""
    call = named_arguments(module, args, kwargs)
    hidden_states = call.pop("hidden_states")
    states = [call.pop(name, None) for name in STATES]
    mask, cache = call.pop("attention_mask", None), find_cache(call.values())
    if cache is not None:
        call = {name: value for name, value in call.items() if value is not cache}
    parts = _projected(module, hidden_states, next((part for part in states if part is not None), None), cache)
    if module.family.relative is not None:
        mask, call["positions"] = mask.bool(), _projected_positions(module, call)
    implementation = None
    if module.family.forward == "scores":
        implementation = "eager" if call.get("output_attentions") else "sdpa"
    outputs, probs = ALL_ATTENTION_FUNCTIONS["collab"](
        module,
        *parts,
        mask,
        implementation=implementation,
        dropout=_dropout(module) if module.training else 0.0,
        scaling=scaling_of(module),
        **call,
    )
    outputs = outputs.flatten(2)
    if module.output_name:
        outputs = getattr(module, module.output_name)(outputs)
    return (outputs,) if probs is None and type(module).__name__ in MAY_OMIT_PROBS else (outputs, probs)


def _projected(
    module: Any, hidden_states: Tensor, encoder_states: Tensor | None, cache: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with those that the cache holds, as a cache holds them, (B, n, S, ·).

    Converted, n is 1: channels of all heads side by side.
    """
    index = getattr(module, "layer_idx", None)
    if "qkv" in module._modules:
        product = module.qkv(hidden_states).unsqueeze(1)
        if cache is None and "qk" in module._modules:
            return product, product, product  # which gathers all at once
        query, key, value = product.split(module.widths, -1)
    else:
        to_query, to_key, to_value = input_paths(module)
        count = 1 if rows_of(module) else module.num_attention_heads
        query = _viewed(module._modules[to_query](hidden_states), count)
        if isinstance(cache, EncoderDecoderCache) and encoder_states is not None:
            if cache.is_updated.get(index):  # the encoder's keys and values are kept from the first call on
                layer = cache.cross_attention_cache.layers[index]
                return query, layer.keys, layer.values
            cache.is_updated[index] = True
            cache = cache.cross_attention_cache
        states = hidden_states if encoder_states is None else encoder_states
        if "kv" in module._modules:
            key, value = module.kv(states).unsqueeze(1).split(module.widths[1:], -1)
        else:
            key, value = (_viewed(module._modules[path](states), count) for path in (to_key, to_value))
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if cache is not None:
        key, value = cache.update(key, value, index)
    return query, key, value


def _projected_positions(module: Any, call: Mapping[str, Any]) -> Positions | None:
    """Return the relative embeddings of a call, with their heads; None if no term needs any."""
    positions, relative = read_positions(module, call), module.family.relative
    if positions is None:
        return None
    positions = without_unused(positions)
    embeddings = getattr(module, relative.dropout)(positions.embeddings)
    if "qkv" in module._modules and getattr(module, relative.shared):
        query, key, _ = module.qkv(embeddings).split(module.widths, -1)
    else:
        paths = input_paths(module)[:2] if getattr(module, relative.shared) else relative.projections
        layers: list[Any] = [module._modules.get(path) for path in paths]
        query, key = (None if layer is None else layer(embeddings) for layer in layers)
    if "qk" in module._modules:
        query, key = module.qk("heads", query.unsqueeze(1), key.unsqueeze(1), 1.0)
    else:
        heads = getattr(module, module.family.paths.heads)
        query, key = (None if part is None else _viewed(part, heads) for part in (query, key))
    return positions._replace(query=query, key=key)


def _viewed(projected: Tensor, count: int) -> Tensor:
    return projected.unsqueeze(1) if count == 1 else projected.unflatten(-1, (count, -1)).transpose(1, 2)


def _dropout(module: Any) -> float:
    dropout = next(getattr(module, name) for name in DROPOUTS if hasattr(module, name))
    return float(getattr(dropout, "p", dropout))


def take_over_(module: Any) -> None:
    """Replace the forward pass of a module, in place, if that is not done yet."""
    stock: Any = type(module)
    if not hasattr(stock, "stock_class"):
        _change_class_(module, edited_class(stock))
        if not hasattr(module, "scaling") and not hasattr(module, "scale"):
            module.scaling = default_scaling(module, module.family)
            module.made_scaling = True


def hand_back_(module: Any) -> None:
    """Undo `take_over_`, in place."""
    stock = getattr(type(module), "stock_class", None)
    if stock is not None:
        _change_class_(module, stock)
        if module.__dict__.pop("made_scaling", False):
            del module.scaling


def _change_class_(module: Any, new: type[nn.Module]) -> None:
    """Change the class of a module in place, also under Accelerate's wrapper of its forward pass."""
    module.__class__ = new
    if "_old_forward" in vars(module):
        module._old_forward = MethodType(new.forward, module)


@cache
def edited_class(stock: Any) -> type[nn.Module]:
    """Return a subclass of a stock class, of the same name, with our forward pass."""
    family = BY_CLASS[stock.__name__]
    attributes = {
        "forward": forward,
        "argument_names": _argument_names(stock),
        "family": family,
        "head_hooks": None,
        "output_name": "" if family.paths.output.startswith("..") else family.paths.output,
        "stock_class": stock,
        "_load_from_state_dict": _load_from_state_dict,
        "__reduce_ex__": _reduce,
        "__module__": stock.__module__,
        "__doc__": stock.__doc__,
    }
    for path in (family.paths.query, family.paths.key, family.paths.value):
        attributes[path] = _layer_at(path)
    return type(stock.__name__, (stock,), attributes)


def _layer_at(path: str) -> property:
    """Return a property for a projection, which is the layer that it is joined to; stock models initialise that."""

    def layer(module: Any) -> Any:
        modules = module._modules
        if path in modules:
            return modules[path]
        if path in rows_of(module):
            return modules[rows_of(module)[path].layer]
        raise AttributeError(path)

    return property(layer)


def _load_from_state_dict(module: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Refuse the weights of joined layers where a state dict holds them."""
    for path, rows in rows_of(module).items():
        if rows.layer != path:
            refuse_dense(state_dict, f"{prefix}{path}.weight")
    nn.Module._load_from_state_dict(module, state_dict, prefix, *args)


def _reduce(module: Any, protocol: int) -> tuple[Any, ...]:
    """Pickle and copy by the stock class, because no file defines the subclass."""
    _, _, *rest = tuple(object.__reduce_ex__(module, protocol))
    return _blank, (module.stock_class,), *rest


def _blank(stock: Any) -> nn.Module:
    """Return an edited module without attributes, which a pickle or copy then fills."""
    kind = edited_class(stock)
    return kind.__new__(kind)
