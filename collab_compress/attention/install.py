"""Put a form into an attention module, and take it out again.

Key caches of fixed size hold converted attention only where its keys take as much room as its values.
"""

from typing import Any

from collab_compress.attention.form import ScoreForm, ScoreParts
from collab_compress.attention.view import redirect_, restore_
from collab_compress.errors import UnsupportedModelError


def is_converted(module: Any) -> bool:
    """Whether the scores of this attention module are in a form other than the dense one."""
    return hasattr(module, "score_form")


def install_(module: Any, form: ScoreForm, parts: ScoreParts) -> None:
    """Replace the query and key projections of `module` by `parts`, in place."""
    module.score_form = form  # first, so that `uninstall_` knows of what is there half-way
    form.put_in_(module, parts)
    redirect_(module)
    watch_cache_(module)


def uninstall_(module: Any, query: Any, key: Any) -> None:
    """Put dense projections back into a module that `install_` changed, also half-way, in place.

    Args:
        module: the attention module.
        query: its dense query projection, as `ScoreForm.take_out_` takes it.
        key: the same for keys.
    """
    form: ScoreForm | None = module.__dict__.pop("score_form", None)
    if form is None:
        return
    form.take_out_(module, query, key)
    unwatch_cache_(module)
    restore_(module)


def watch_cache_(module: Any) -> None:
    """Let `module` refuse, from now on, a static cache that its keys do not fit, in place."""
    module.register_forward_pre_hook(_refuse_static_cache, with_kwargs=True)


def unwatch_cache_(module: Any) -> None:
    """Undo `watch_cache_`, in place."""
    for number in [number for number, hook in module._forward_pre_hooks.items() if hook is _refuse_static_cache]:
        del module._forward_pre_hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)


def _refuse_static_cache(module: Any, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a static cache, which allocates values by the number of pieces that keys come in."""
    cache = kwargs.get("past_key_values")
    if cache is None or not getattr(cache, "is_compileable", False):
        return
    form: ScoreForm = module.score_form
    key = module.get_submodule(form.key)
    if key.width != form.heads * form.head_width:
        raise UnsupportedModelError(
            f"a static key cache has room for keys as wide as values, {form.heads} × {form.head_width}, and the keys "
            f"of this converted {type(module).__name__} are {key.width} wide; generate with the default, dynamic "
            "cache"
        )
