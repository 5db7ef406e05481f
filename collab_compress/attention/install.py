"""Put the form of a map into an attention module, and take it out again.

Key caches of fixed size hold converted attention only where its keys take as much room as its values.
"""

from typing import Any

from collab_compress.attention.form import MapForm
from collab_compress.attention.view import FORMS_AT, redirect_, restore_
from collab_compress.errors import UnsupportedModelError

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
    """Put dense projections back into a module that `install_` changed, also half-way, in place.

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
    """Let a module that views exactly H heads view as many pieces as its queries, keys and values fill, in place.

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
        setattr(module, pieces, max(1, *(-(-part.proj.out_features // width) for part in parts)))
    elif STOCK_HEADS in module.__dict__:
        setattr(module, pieces, module.__dict__.pop(STOCK_HEADS))
    for part in parts:
        part.padding = getattr(module, pieces) * width - part.proj.out_features


def watch_cache_(module: Any) -> None:
    """Let `module` refuse, from now on, a static cache that its keys and values do not fit, in place."""
    if _refuse_static_cache not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_refuse_static_cache, with_kwargs=True)


def unwatch_cache_(module: Any) -> None:
    """Undo `watch_cache_`, in place."""
    for number in [number for number, hook in module._forward_pre_hooks.items() if hook is _refuse_static_cache]:
        del module._forward_pre_hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)


def _refuse_static_cache(module: Any, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a static cache, which allocates values by the number of pieces that keys come in."""
    cache = kwargs.get("past_key_values", kwargs.get("layer_past"))
    if cache is None or not getattr(cache, "is_compileable", False):
        return
    scores, values = (getattr(module, name, None) for name in FORMS_AT)
    if any(form is not None and form.even for form in (scores, values)):
        return
    dense = next(form.dense_key_width for form in (scores, values) if form is not None)
    key = dense if scores is None else module.get_submodule(scores.key).width
    value = dense if values is None else module.get_submodule(values.value).width
    if key != value:
        raise UnsupportedModelError(
            f"a static key cache has room for keys as wide as values; this converted {type(module).__name__} has "
            f"keys {key} and values {value} wide; generate with the default, dynamic cache"
        )
