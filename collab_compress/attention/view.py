"""How a module's attention is redirected to this package's functions, and what acts on its heads there.

Transformers looks up an attention function by `module.config._attn_implementation` and calls it with the module, its
queries, keys and values. An edited module holds a view of its config in which that name is ours; masks, stock
modules and `set_attn_implementation` go on reading the model's own config. A module that looks up nothing gets
another forward pass (`forwards`).
"""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

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
