"""Key caches of fixed size hold collaborative attention only where its keys take as much room as its values."""

from typing import Any

from collab_compress.errors import UnsupportedModelError


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
    spec = module.collaborative
    key = module.get_submodule(spec.key)
    if key.width != spec.heads * spec.head_width:
        raise UnsupportedModelError(
            f"a static key cache has room for keys as wide as values, {spec.heads} × {spec.head_width}, and the keys "
            f"of this converted {type(module).__name__} are {key.width} wide; generate with the default, dynamic "
            "cache"
        )
