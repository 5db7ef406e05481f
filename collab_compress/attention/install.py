"""Install a form into an attention module and remove it: the redirected attention, hooks on heads, static caches.

Transformers looks up an attention function by `module.config._attn_implementation` and calls it with the module, its
queries, keys and values. An edited module holds a view of its config in which that name is ours; masks, stock
modules and `set_attn_implementation` go on reading the model's own config. A module that looks up nothing gets
another forward pass (`forwards`).
"""

from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import PretrainedConfig

from collab_compress.attention.form import MapForm, ScoreForm
from collab_compress.attention.forwards import hand_back_, has_own_forward, take_over_
from collab_compress.attention.projections import add_pre_hook_, remove_pre_hook_
from collab_compress.attention.values import NarrowValues
from collab_compress.errors import UnsupportedModelError
from collab_compress.transformers_parts import find_cache

IMPLEMENTATIONS = ("eager", "sdpa")
STOCK_HEADS = "stock_heads"  # attribute: H, where the module's own attribute holds the number of key groups
LAZY_VALUES = "_lazy_values_ready"  # attribute of a cache whose layers are all prepared


class HeadCall(NamedTuple):
    """One call of an attention function, as `collab_sdpa` gets it, with values of each head (B, Hkv, S, s).

    `probs` are attention probabilities before dropout (B, H, T, S), or None where no hook needs them.
    """

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    probs: Tensor | None


class HeadHook(Protocol):
    """A hook on the head outputs of an attention module, which may change them."""

    @property
    def needs_probs(self) -> bool:
        """Whether attention probabilities must be computed."""

    def __call__(self, outputs: Tensor, call: HeadCall) -> Tensor:
        """Return the head outputs (B, T, H, dv) to continue with."""
        ...


def wrong_implementation(reason: str, implementation: Any) -> UnsupportedModelError:
    """Return the error of a module that cannot run with an attention implementation."""
    return UnsupportedModelError(
        f"{reason}, so it runs with attn_implementation 'eager' or 'sdpa', got {implementation!r}; call "
        "model.set_attn_implementation('sdpa')"
    )


def refuse_paged_cache(module: Any, options: dict[str, Any]) -> None:
    """Raise UnsupportedModelError if these keyword arguments of attention come from continuous batching."""
    if "read_index" in options:
        raise UnsupportedModelError(
            f"edited {type(module).__name__} cannot read a paged cache (generate_batch, continuous batching); "
            "use generate"
        )


def for_each_head(part: Tensor, heads: int) -> Tensor:
    """Repeat the keys or values of each group for its heads, (B, Hkv, S, d) to (B, H, S, d).

    Example:
        >>> for_each_head(torch.randn(2, 3, 6, 8), heads=12).shape
        torch.Size([2, 12, 6, 8])
    """
    group = heads // part.shape[1]
    return part if group == 1 else part.repeat_interleave(group, 1)


class AttentionConfig:
    """A view of the model's config in which attention implementations mean this package's functions."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.__dict__["stock"] = config

    @property
    def _attn_implementation(self) -> str:
        implementation = self.stock._attn_implementation
        if str(implementation).startswith("paged|"):  # set by continuous batching
            raise UnsupportedModelError(f"edited attention cannot read paged caches ({implementation}); use generate")
        return f"collab_{implementation}" if implementation in IMPLEMENTATIONS else "collab_stock"

    def __getattr__(self, name: str) -> Any:
        if name == "stock" or name.startswith("__"):  # while this view is copied or pickled
            raise AttributeError(name)
        return getattr(self.stock, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.stock, name, value)


def redirect_(module: Any) -> None:
    """Make `module` call this package's attention functions, in place."""
    if has_own_forward(module):
        take_over_(module)
    elif not isinstance(module.config, AttentionConfig):
        module.config = AttentionConfig(module.config)


def restore_(module: Any) -> None:
    """Make `module` call the stock attention functions again, in place, unless another edit still needs ours."""
    if head_hooks(module) or is_converted(module):
        return
    if has_own_forward(module):
        hand_back_(module)
    elif isinstance(module.config, AttentionConfig):
        module.config = module.config.stock


class PresentHooks:
    """The hooks on the heads of one module; a copy of it, as in a copy or a pickle of the module, holds none."""

    def __init__(self, hooks: tuple[HeadHook, ...] = ()) -> None:
        self.hooks = hooks

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the hooks."""
        return PresentHooks, ()


def head_hooks(module: Any) -> tuple[HeadHook, ...]:
    """Return the hooks on the heads of `module`, in order."""
    # By getattr: a compiled model notices attributes that come and go, not entries of the module's `__dict__`.
    present: PresentHooks | None = getattr(module, "head_hooks", None)
    return () if present is None else present.hooks


def add_head_hook_(module: Any, hook: HeadHook, *, first: bool = False) -> None:
    """Register `hook` on the head outputs of `module`, after or before the present hooks, in place.

    Raises:
        UnsupportedModelError: hooks do not work with the model's attention implementation.
    """
    module.head_hooks = PresentHooks((hook, *head_hooks(module)) if first else (*head_hooks(module), hook))
    redirect_(module)
    if has_own_forward(module):  # any attention implementation
        return
    implementation = module.config.stock._attn_implementation
    if implementation not in IMPLEMENTATIONS:
        remove_head_hook_(module, hook)
        raise wrong_implementation(f"{type(module).__name__} has hooks on its heads", implementation)


def remove_head_hook_(module: Any, hook: HeadHook) -> None:
    """Undo `add_head_hook_`, in place; a module without any edit is a stock one again."""
    remaining_hooks = tuple(other for other in head_hooks(module) if other is not hook)
    if remaining_hooks:
        module.head_hooks = PresentHooks(remaining_hooks)
    else:
        module.__dict__.pop("head_hooks", None)
    restore_(module)


def forms_of(module: nn.Module) -> tuple[ScoreForm | None, NarrowValues | None]:
    """Return the forms of an attention module's scores and values, None for a dense map."""
    return getattr(module, ScoreForm.at, None), getattr(module, NarrowValues.at, None)


def is_converted(module: nn.Module) -> bool:
    """Return whether the scores or values of this attention module are in another form than the dense one.

    Example:
        >>> from collab_compress import Compression, compress
        >>> module = model.encoder.layer[0].attention.self
        >>> is_converted(module)
        False
        >>> report = compress(model, Compression(dk=12), calibration=None)
        >>> is_converted(module)
        True
    """
    return any(form is not None for form in forms_of(module))


def install_(module: Any, form: MapForm, parts: Any) -> None:
    """Replace the projections of one map of `module` by `parts`, as the form builds them, in place.

    Example:
        >>> from collab_compress.architectures import find_dense_attention
        >>> from collab_compress.attention import SharedScores
        >>> site = find_dense_attention(model)[0]
        >>> form = SharedScores.of(site, rank=12, head_dim=None, content_bias=True)
        >>> install_(site.module, form, form.build(site.module, site.parent))  # without weights
        >>> site.module.query
        PaddedProjection(
          (proj): Linear(in_features=24, out_features=12, bias=False)
        )
    """
    setattr(module, form.at, form)  # first, so that `uninstall_` can undo a part
    redirect_(module)
    form.put_in_(module, parts)
    lay_out_(module, form.pieces)
    add_pre_hook_(module, _prepare_cache)


def uninstall_(module: Any, at: str, dense: Any) -> None:
    """Restore the dense projections of a module that `install_` changed, also if it failed half-way, in place.

    Args:
        module: the attention module.
        at: `MapForm.at` of the form to take out.
        dense: the dense projections, as `MapForm.take_out_` takes them.

    Example:
        >>> from collab_compress.architectures import find_dense_attention
        >>> from collab_compress.attention import SharedScores
        >>> site = find_dense_attention(model)[0]
        >>> form = SharedScores.of(site, rank=12, head_dim=None, content_bias=True)
        >>> install_(site.module, form, form.build(site.module, site.parent))
        >>> uninstall_(site.module, form.at, (site.query, site.key))
        >>> site.module.query is site.query
        True
    """
    form: MapForm | None = module.__dict__.pop(at, None)
    if form is None:
        return
    form.take_out_(module, dense)
    lay_out_(module, form.pieces)
    if not is_converted(module):
        remove_pre_hook_(module, _prepare_cache)
    restore_(module)


def lay_out_(module: Any, pieces: str) -> None:
    """Set the head count by which a module reshapes, its attribute `pieces`, to the key groups in use, in place.

    That requires both maps to be converted, because the module lays them out alike; otherwise projections stay
    padded to H·d. Nothing is done if the module has no such attribute.
    """
    if not pieces:
        return
    scores, values = forms_of(module)
    forms = [form for form in (scores, values) if form is not None]
    projections = [module.get_submodule(path) for form in forms for path in form.dense_widths]
    width = forms[0].head_width if forms else 0
    if scores and values:
        if STOCK_HEADS not in module.__dict__:
            setattr(module, STOCK_HEADS, getattr(module, pieces))
        groups = [-(-projection.channels // width) for projection in projections]
        setattr(module, pieces, max(1, *groups))
    elif STOCK_HEADS in module.__dict__:
        setattr(module, pieces, module.__dict__.pop(STOCK_HEADS))
    for projection in projections:
        projection.padding = getattr(module, pieces) * width - projection.channels


def _prepare_cache(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make a static cache allocate values in their own shape; stock caches give them as many heads as keys.

    Raises:
        UnsupportedModelError: the cache is paged, or is already allocated and its values do not fit.
    """
    refuse_paged_cache(module, kwargs)
    cache = find_cache((*kwargs.values(), *args))
    if cache is None or hasattr(cache, LAZY_VALUES) or not getattr(cache, "is_compileable", False):
        return
    inner = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    layers = [layer for part in (*inner, cache) for layer in getattr(part, "layers", ())]
    for layer in layers:
        if not layer.is_initialized:
            layer.lazy_initialization = partial(_allocate, layer)
    if all("lazy_initialization" in vars(layer) for layer in layers):
        setattr(cache, LAZY_VALUES, True)  # every attention module checks this at every token
        return
    scores, values = forms_of(module)
    forms = [form for form in (scores, values) if form is not None]
    if any(form.even for form in forms):
        return
    dense = forms[0].dense_key_width
    key = dense if scores is None else module.get_submodule(scores.key).width
    value = dense if values is None else module.get_submodule(values.value).width
    if key != value:
        raise UnsupportedModelError(
            f"this static cache was allocated for keys as wide as values; this converted {type(module).__name__} has "
            f"keys {key} and values {value} wide; leave out early_initialization, and the cache allocates both widths"
        )


def _allocate(layer: Any, keys: Tensor, values: Tensor) -> None:
    """Allocate a layer as its own class does, with values as wide as they are."""
    allocate = type(layer).lazy_initialization
    if keys.shape[1] == values.shape[1]:
        allocate(layer, keys, values)
        return
    allocate(layer, values, values)
    value_room = layer.values
    allocate(layer, keys, values)
    layer.values = value_room
