"""Put a form into an attention module and take it out: how the module's attention is redirected, and its caches.

Transformers looks up an attention function by `module.config._attn_implementation` and calls it with the module, its
queries, keys and values. An edited module holds a view of its config in which that name is ours; masks, stock
modules and `set_attn_implementation` go on reading the model's own config. A module that looks up nothing gets
another forward pass (`forwards`).

Stock caches of fixed size allocate values in as many heads as the first keys have; those that an edited module is
called with are prepared to allocate keys and values apart.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from collab_compress.attention.form import MapForm
from collab_compress.attention.forwards import hand_back_, has_own_forward, take_over_
from collab_compress.errors import UnsupportedModelError

FORMS_AT = ("score_form", "value_form")  # attributes of a module that hold the form of one of its maps each
IMPLEMENTATIONS = ("eager", "sdpa")


class HeadCall(NamedTuple):
    """One call of an attention function.

    Args:
        module: the attention module.
        query: (B, H, T, d); in converted modules all heads' channels in pieces.
        key: (B, Hkv, S, d); in converted modules the same as queries, and content biases.
        value: (B, Hkv, S, dv), or of each head.
        probs: attention probabilities before dropout (B, H, T, S), or None where no hook wants them.
    """

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    probs: Tensor | None


def for_each_head(part: Tensor, heads: int) -> Tensor:
    """Repeat the keys or values of each group for its heads, (B, Hkv, S, d) to (B, H, S, d)."""
    group = heads // part.shape[1]
    return part if group == 1 else part.repeat_interleave(group, 1)


class HeadHook(Protocol):
    """Something that sees, and may change, the head outputs of an attention module."""

    needs_probs: bool

    def __call__(self, outputs: Tensor, call: HeadCall) -> Tensor:
        """Return the head outputs (B, T, H, dv) to go on with."""
        ...


class AttentionConfig:
    """A view of the model's config in which `eager` and `sdpa` attention mean this package's functions."""

    def __init__(self, config: Any) -> None:
        self.__dict__["stock"] = config

    @property
    def _attn_implementation(self) -> str:
        implementation = self.stock._attn_implementation
        if str(implementation).startswith("paged|"):  # set by continuous batching
            raise UnsupportedModelError(f"edited attention cannot read paged caches ({implementation}); use generate")
        if implementation not in IMPLEMENTATIONS:
            raise UnsupportedModelError(
                f"edited attention runs with attn_implementation 'eager' or 'sdpa', got {implementation!r}; "
                "call model.set_attn_implementation('sdpa')"
            )
        return f"collab_{implementation}"

    def __getattr__(self, name: str) -> Any:
        if name == "stock" or name.startswith("__"):  # not yet there while being copied; its copying is not ours
            raise AttributeError(name)
        return getattr(self.stock, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.stock, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def redirect_(module: Any) -> None:
    """Make `module` call this package's attention functions, in place."""
    if has_own_forward(module):
        take_over_(module)
    elif not isinstance(module.config, AttentionConfig):
        module.config = AttentionConfig(module.config)


def restore_(module: Any) -> None:
    """Make `module` call the stock attention functions again, in place, unless another edit still needs ours."""
    if head_hooks(module) or any(hasattr(module, name) for name in FORMS_AT):
        return
    if has_own_forward(module):
        hand_back_(module)
    elif isinstance(module.config, AttentionConfig):
        module.config = module.config.stock


def head_hooks(module: Any) -> tuple[HeadHook, ...]:
    """Return what hooks on the heads of `module`, in order."""
    hooks: tuple[HeadHook, ...] = module.__dict__.get("head_hooks", ())
    return hooks


def add_head_hook_(module: Any, hook: HeadHook, *, first: bool = False) -> None:
    """Register `hook` on the head outputs of `module`, after or before the present hooks, in place.

    Raises:
        UnsupportedModelError: the model's attention implementation is not one that hooks work with.
    """
    module.head_hooks = (hook, *head_hooks(module)) if first else (*head_hooks(module), hook)
    redirect_(module)
    if has_own_forward(module):  # whatever the config says
        return
    try:
        module.config._attn_implementation  # noqa: B018 (raises)
    except UnsupportedModelError:
        remove_head_hook_(module, hook)
        raise


def remove_head_hook_(module: Any, hook: HeadHook) -> None:
    """Undo `add_head_hook_`, in place; a module with nothing left in it is a stock one again."""
    left = tuple(other for other in head_hooks(module) if other is not hook)
    if left:
        module.head_hooks = left
    else:
        module.__dict__.pop("head_hooks", None)
    restore_(module)


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


STOCK_HEADS = "stock_heads"  # holds H in converted modules whose own attribute says how many pieces they view


def is_converted(module: Any) -> bool:
    """Whether a map of this attention module, scores or values, is in a form other than the dense one."""
    return any(hasattr(module, name) for name in FORMS_AT)


def install_(module: Any, form: MapForm, parts: Any) -> None:
    """Replace the projections of one map of `module` by `parts`, as the form builds them, in place."""
    setattr(module, form.at, form)  # first, so that `uninstall_` knows of what is there half-way
    redirect_(module)
    form.put_in_(module, parts)
    lay_out_(module, form.pieces)
    watch_cache_(module)


def uninstall_(module: Any, at: str, dense: Any) -> None:
    """Restore the dense projections of a module that `install_` changed, also partly, in place.

    Args:
        module: the attention module.
        at: `MapForm.at` of the form to take out.
        dense: what was there, as `MapForm.take_out_` takes it.
    """
    form: MapForm | None = module.__dict__.pop(at, None)
    if form is None:
        return
    form.take_out_(module, dense)
    lay_out_(module, form.pieces)
    if not is_converted(module):
        unwatch_cache_(module)
    restore_(module)


def lay_out_(module: Any, pieces: str) -> None:
    """Set the head count that a module reshapes by to the key groups that its projections fill, in place.

    That takes all of them to be converted, for it lays them out alike; otherwise they stay filled up to H·d.

    Args:
        module: the attention module.
        pieces: the attribute that says how many heads it views; empty where there is none, and nothing is done.
    """
    if not pieces:
        return
    forms = [getattr(module, name, None) for name in FORMS_AT]
    parts = [module.get_submodule(path) for form in forms if form is not None for path in form.padded]
    width = next((int(form.head_width) for form in forms if form is not None), 0)
    if None not in forms:
        if STOCK_HEADS not in module.__dict__:
            setattr(module, STOCK_HEADS, getattr(module, pieces))
        setattr(module, pieces, max(1, *(-(-part.channels // width) for part in parts)))
    elif STOCK_HEADS in module.__dict__:
        setattr(module, pieces, module.__dict__.pop(STOCK_HEADS))
    for part in parts:
        part.padding = getattr(module, pieces) * width - part.channels
