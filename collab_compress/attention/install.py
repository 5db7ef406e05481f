"""Install the form of a map in an attention module, and remove it."""

from typing import Any

from collab_compress.attention.form import MapForm
from collab_compress.attention.static_cache import unwatch_cache_, watch_cache_
from collab_compress.attention.view import FORMS_AT, redirect_, restore_

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
