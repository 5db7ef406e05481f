"""Caches of fixed size: room for the keys and the values of converted attention, each in pieces of its own.

Stock ones allocate values in as many heads as the first keys that they see.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from collab_compress.attention.view import FORMS_AT
from collab_compress.errors import UnsupportedModelError

PREPARED = "allocates_as_they_come"  # a cache of which all layers do


def watch_cache_(module: Any) -> None:
    """Make `module` prepare the static caches that it is called with, in place."""
    if _prepare not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_prepare, with_kwargs=True)


def unwatch_cache_(module: Any) -> None:
    """Undo `watch_cache_`, in place."""
    for number in [number for number, hook in module._forward_pre_hooks.items() if hook is _prepare]:
        del module._forward_pre_hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)


def _prepare(module: Any, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make a static cache allocate values in their own shape; refuse one that has allocated them already.

    Raises:
        UnsupportedModelError: the cache was allocated, and its room for values does not fit.
    """
    cache = kwargs.get("past_key_values", kwargs.get("layer_past"))
    if cache is None or hasattr(cache, PREPARED) or not getattr(cache, "is_compileable", False):
        return
    for layer in _layers(cache):
        if not layer.is_initialized:
            layer.lazy_initialization = partial(_allocate, layer)
    if all("lazy_initialization" in vars(layer) for layer in _layers(cache)):
        setattr(cache, PREPARED, True)  # each layer of the model asks at each token
        return
    scores, values = (getattr(module, name, None) for name in FORMS_AT)
    if any(form is not None and form.even for form in (scores, values)):
        return
    dense = next(form.dense_key_width for form in (scores, values) if form is not None)
    key = dense if scores is None else module.get_submodule(scores.key).width
    value = dense if values is None else module.get_submodule(values.value).width
    if key != value:
        raise UnsupportedModelError(
            f"this static cache was allocated for keys as wide as values; this converted {type(module).__name__} has "
            f"keys {key} and values {value} wide; leave out early_initialization, and it allocates what they take"
        )


def _layers(cache: Any) -> Iterator[Any]:
    """Return the layers of a cache, or of both caches of an encoder–decoder."""
    for each in (cache, getattr(cache, "self_attention_cache", None), getattr(cache, "cross_attention_cache", None)):
        yield from getattr(each, "layers", ())


def _allocate(layer: Any, keys: Tensor, values: Tensor) -> None:
    """Allocate a layer as its own class does, with room for values by what they take."""
    allocate = type(layer).lazy_initialization
    if keys.shape[1] == values.shape[1]:
        allocate(layer, keys, values)
        return
    allocate(layer, values, values)
    room = layer.values
    allocate(layer, keys, values)
    layer.values = room
