"""How converted and hooked attention runs: what a module passes, what is done with it, how it is installed.

The tensors of one call, for B sequences of T tokens that attend to S, H heads of width d, R shared channels, dv
channels of values; n·d is R, or R + H with content biases, or dv, rounded up:

    |                          | query, key, value                            | heads                             |
    |--------------------------|----------------------------------------------|-----------------------------------|
    | dense                    | (B, H, T, d), twice (B, H, S, d)             | the same                          |
    | converted, our forward   | (B, 1, T, R), (B, 1, S, R + H), (B, 1, S, dv)| (B, H, T, w), twice (B, H, S, ·)  |
    | the same, without a cache| the joined product (B, 1, T, ·), three times | the same                          |
    | converted, stock forward | (B, n, T, d), (B, n, S, d), (B, n, S, d)     | the same                          |

Keys and values are what a cache holds: channels that heads share, not those of each head. Where the forward pass is
ours (`forward`), they are channels and nothing else. A stock forward pass views what its projections return as heads
of width d; there projections are padded to whole heads, and `channels_of` puts those side by side again. Maps then
make ordinary heads of them, and any attention function of Transformers can attend with these.

Transformers looks up a function by `module.config._attn_implementation`. A module that is converted or hooked holds a
view of its config in which that name is "collab", and gets `attend`; masks, stock modules and
`set_attn_implementation` go on reading the model's own config. Hooks on heads run on the outputs.
"""

import sys
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import dropout, pad
from transformers import AttentionInterface, PretrainedConfig

from collab_compress.architectures.sites import STOCK_HEADS
from collab_compress.attention.decoding import HALVES, cached_scores, can_decode, probabilities, weighted_values
from collab_compress.attention.forward import hand_back_, take_over_
from collab_compress.attention.maps import ConvertedMap, Layers
from collab_compress.attention.projections import (
    PaddedProjection,
    Weights,
    add_pre_hook_,
    family_of,
    fill_,
    join_,
    remove_pre_hook_,
    replace_,
    rows_of,
    separate_,
)
from collab_compress.attention.shared import WIDTH_MULTIPLE, QKMap, scaling_of
from collab_compress.attention.values import NarrowOV, output_of
from collab_compress.errors import UnsupportedModelError
from collab_compress.transformers_parts import ALL_ATTENTION_FUNCTIONS, find_cache

IMPLEMENTATIONS = ("eager", "sdpa")  # under which heads can be hooked
LAZY_VALUES = "_lazy_values_ready"  # attribute of a cache whose layers are all prepared

# Arguments of stock attention functions that choose the keys to read, and those that change the scores.
CHOOSE_KEYS = frozenset(("block_indices", "indices"))
CHANGE_SCORES = frozenset(("s_aux", "sinks", "softcap"))
UNSUPPORTED = CHOOSE_KEYS | CHANGE_SCORES
LEAST_WIDTH = 16  # of heads, as flex attention takes them on a GPU


class HeadCall(NamedTuple):
    """One call of `attend`, with values of each head (B, Hkv, S, s).

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


def maps_of(module: nn.Module) -> tuple[QKMap | None, NarrowOV | None]:
    """Return the converted maps of an attention module, None for a dense one."""
    children: dict[str, Any] = module._modules
    qk = children.get(QKMap.at)
    if qk is not None and not hasattr(qk, "config"):  # PEFT wraps what holds the mixing weights
        qk = qk.get_base_layer()
    return qk, children.get(NarrowOV.at)


def is_converted(module: nn.Module) -> bool:
    """Return whether a map of this attention module is converted.

    Example:
        >>> from collab_compress import Compression, compress
        >>> module = model.encoder.layer[0].attention.self
        >>> is_converted(module)
        False
        >>> report = compress(model, Compression(dk=12), calibration=None)
        >>> is_converted(module)
        True
    """
    return any(converted is not None for converted in maps_of(module))


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


def for_each_head(part: Tensor, heads: int) -> Tensor:
    """Repeat the keys or values of each group for its heads, (B, Hkv, S, d) to (B, H, S, d)."""
    group = heads // part.shape[1]
    return part if group == 1 else part.repeat_interleave(group, 1)


# Attention.


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    implementation: str | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend by an attention implementation of Transformers, and run the hooks on the head outputs.

    Args:
        module: the attention module, with its converted maps.
        query: as the table above has it; likewise `key` and `value`.
        attention_mask: for "eager" and "sdpa" boolean (True = attend) or additive, broadcastable to (B, H, T, S), or
            None; else what the implementation takes.
        implementation: "eager", which returns probabilities too, "sdpa" for PyTorch's fused attention, or another
            that Transformers knows; by default the model's.
        options: `dropout`, `scaling` (default: the module's), `is_causal` (default: the module's), and
            `position_bias`, added to the scores, broadcastable to (B, H, T, S), or `positions` that make it
            (`attention.relative`). Others are ignored, as in stock attention functions; an UnsupportedModelError is
            raised for those that change the scores.

    Returns:
        Head outputs (B, T, H, dv), or side by side, (B, T, 1, H·dv), and probabilities after dropout (B, H, T, S), or
        None in their place.
    """
    if implementation is None:
        implementation = stock_config(module)._attn_implementation
    hooks, parts = head_hooks(module), (query, key, value)
    needs_probs = any(hook.needs_probs for hook in hooks)
    is_fused = implementation == "sdpa" and not needs_probs
    _refuse_unsupported(module, options, is_stock=not is_fused and maps_of(module)[0] is None)
    if implementation not in IMPLEMENTATIONS:
        return _attend_stock(implementation, module, parts, attention_mask, options), None
    if not is_fused:
        outputs, probs = _attend_eager(module, parts, attention_mask, options, needs_probs)
        return outputs, probs if implementation == "eager" else None
    p, scaling, heads = options.get("dropout", 0.0), _scaling(module, options), None
    if options.get("positions") is not None:
        heads = _ordinary_heads(module, parts, scaling)
        options["position_bias"] = options["positions"].scores(*heads[:2], scaling)
    mask, causal = _whole_mask(module, attention_mask, query.shape[2], options)
    if heads is None:
        if not hooks and not p and key is not query and can_decode(query, key, value, mask):
            return _attend_to_cache(module, parts, mask, scaling), None
        heads = _ordinary_heads(module, parts, scaling)
    width, (query, key, value) = _value_width(module, heads[2]), _one_width(heads, 0)
    if causal and key.shape[2] > query.shape[2]:  # the room of a static cache that is still empty
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    key, value = (for_each_head(part, query.shape[1]) for part in (key, value))
    outputs = functional.scaled_dot_product_attention(query, key, value, mask, p, causal, scale=scaling)
    outputs = outputs.transpose(1, 2)[..., :width]
    if hooks:
        outputs = _run_hooks(outputs, HeadCall(module, *parts[:2], heads[2][..., :width], None))
    return outputs, None


def _attend_eager(
    module: Any,
    parts: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    options: dict[str, Any],
    needs_probs: bool,
) -> tuple[Tensor, Tensor]:
    """Attend step by step."""
    query, key, _ = parts
    qk, _ = maps_of(module)
    p = options.pop("dropout", 0.0)
    if _is_causal(module, options.pop("is_causal", None), mask, query.shape[2]):
        mask = query.new_ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:  # made for SDPA; eager attention takes an additive one
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    query, key, value = _ordinary_heads(module, parts, _scaling(module, options))
    if qk is not None and qk.values is not None:  # what fused kernels are padded with
        query, key = query[..., : qk.config.width], key[..., : qk.config.width]
    if options.get("positions") is not None:
        options["position_bias"] = options["positions"].scores(query, key, _scaling(module, options))
    heads = query, key, value[..., : _value_width(module, value)]
    # Stock functions of some families scale by the width of a head, which a converted one does not have.
    stock = None if qk else getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    # They return probabilities after dropout; hooks need them before.
    outputs, probs = (stock or _eager)(module, *heads, mask, dropout=0.0 if needs_probs else p, **options)
    dropped = probs
    if needs_probs and p > 0 and module.training:
        dropped = dropout(probs, p=p, training=True)
        outputs = (dropped @ for_each_head(heads[2], probs.shape[1])).transpose(1, 2).contiguous()
    return _run_hooks(outputs, HeadCall(module, *parts[:2], heads[2], probs)), dropped


def _attend_stock(
    name: str, module: Any, parts: tuple[Tensor, Tensor, Tensor], mask: Any, options: dict[str, Any]
) -> Tensor:
    """Attend by the stock function of another attention implementation, as flex or flash attention."""
    if head_hooks(module) or name not in ALL_ATTENTION_FUNCTIONS:
        reason = "has hooks on its heads" if head_hooks(module) else "is edited"
        raise wrong_implementation(f"{type(module).__name__} {reason}", name)
    options["scaling"] = _scaling(module, options)
    heads = _ordinary_heads(module, parts, options["scaling"])
    view = _StockView(module, heads[0].shape[1] == heads[1].shape[1])
    outputs: Tensor = ALL_ATTENTION_FUNCTIONS[name](view, *_one_width(heads, LEAST_WIDTH), mask, **options)[0]
    return outputs[..., : _value_width(module, heads[2])]


class _StockView:
    """A view of an edited attention module as stock functions read it: the config of its model, keys of each head."""

    def __init__(self, module: Any, has_key_per_head: bool) -> None:
        self.module, self.config = module, stock_config(module)
        if has_key_per_head:
            self.num_key_value_groups = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _one_width(heads: tuple[Tensor, Tensor, Tensor], least: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad queries, keys and values with zeros to one width, as fused kernels want them."""
    query, key, value = heads
    width, other = query.shape[-1], value.shape[-1]
    if width == other and not least:
        return heads
    common = -(-max(least, width, other) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    if width < common:
        query, key = pad(query, (0, common - width)), pad(key, (0, common - width))
    return query, key, pad(value, (0, common - other)) if other < common else value


def _ordinary_heads(
    module: Any, parts: tuple[Tensor, Tensor, Tensor], scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of ordinary heads, (B, H, T, w), (B, G, S, w) and (B, G, S, s).

    G is H, or the number of groups of heads that share keys and values.
    """
    query, key, value = parts
    qk, ov = maps_of(module)
    if key is query and qk is not None:
        joint: tuple[Tensor, Tensor, Tensor] = module.qk("joint_heads", query)
        return joint
    if ov is not None:
        value = ov.heads(value)
    if qk is not None:
        query, key = module.qk("heads", query, key, scaling_of(module, scaling) / scaling)
        if ov is None and "widths" in module.__dict__:  # dense heads are side by side too
            value = _split(value, qk.config.heads)
        value = for_each_head(value, key.shape[1])
    elif ov is not None and "widths" in module.__dict__:
        query, key = (_split(part, ov.config.heads) for part in (query, key))
    return query, key, value


def _value_width(module: Any, value: Tensor) -> int:
    """Return the width of a head's values, behind which there may be channels that do not count."""
    qk, _ = maps_of(module)
    return value.shape[-1] if qk is None or qk.values is None else qk.values[1]


def _split(part: Tensor, heads: int) -> Tensor:
    """Split channels of heads side by side, (B, 1, L, H·d), into heads, (B, H, L, d)."""
    split: Tensor = part.squeeze(1).unflatten(-1, (heads, -1)).transpose(1, 2)
    return split


def _whole_mask(
    module: Any, mask: Tensor | None, queries: int, options: dict[str, Any]
) -> tuple[Tensor | None, bool]:
    """Return the mask with the position bias, if there is one, and whether the future is still to be hidden."""
    bias, causal = options.get("position_bias"), _is_causal(module, options.get("is_causal"), mask, queries)
    if bias is None:
        return mask, causal
    if causal:
        mask = bias.new_ones(bias.shape[-2:], dtype=torch.bool).tril()
    if mask is None:
        return bias, False
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, torch.finfo(bias.dtype).min), False
    return mask + bias, False


def _attend_to_cache(
    module: Any, parts: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, scaling: float
) -> Tensor:
    """Attend with one new token to keys and values as they lie in a cache, (B, 1, 1, dv of all heads)."""
    query, key, value = parts
    qk, ov = maps_of(module)
    is_joined = "widths" in module.__dict__
    if qk is None:
        if is_joined and ov is not None:
            query, key = (_split(part, ov.config.heads) for part in (query, key))
        grouped = query.reshape(*key.shape[:2], -1, key.shape[-1])  # (B, Hkv, H/Hkv, d)
        probs = ((grouped * scaling) @ key.mT).flatten(1, 2)  # (B, H, S)
    else:
        probs = _cached_scores(module, qk, query, key, scaling)
    probs = probabilities(probs, mask)
    if ov is not None:
        count, size = ov.config.key_value_heads, ov.config.size
    elif is_joined and qk is not None:
        count, size = qk.config.heads, value.shape[-1] // qk.config.heads
    else:
        count, size = value.shape[1], value.shape[-1]
    return weighted_values(probs, value, count, size).view(len(query), 1, 1, -1)


def _cached_scores(module: Any, qk: QKMap, query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Return the scores of one token, (B, H, S), from shared keys as they lie in a cache."""
    rank, content = qk.config.rank, qk.config.key_channels
    query = module.qk("head_queries", query * scaling).squeeze(1)  # (B, H, R)
    query = pad(query, (0, key.shape[1] * key.shape[3] - rank))
    if content > rank:  # content biases, which a module that scales its queries does not scale
        query[..., rank:content].diagonal(0, 1, 2).fill_(scaling_of(module))
    return cached_scores(query, key)


def _run_hooks(outputs: Tensor, call: HeadCall) -> Tensor:
    """Run the hooks on the module's head outputs, (B, T, H, s), and return them."""
    for hook in head_hooks(call.module):
        outputs = hook(outputs, call)
    return outputs


def _eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attend as stock eager attention does, with converted scores, or in a family that has no function for it."""
    scores = (query * _scaling(module, options)) @ for_each_head(key, query.shape[1]).mT
    for added in (options.get("position_bias"), mask):
        if added is not None:
            scores = scores + added
    probs = scores.softmax(-1, dtype=torch.float32 if scores.dtype in HALVES else None).to(scores.dtype)
    probs = dropout(probs, p=options["dropout"], training=module.training)
    outputs = probs @ for_each_head(value, query.shape[1])
    return outputs.transpose(1, 2).contiguous(), probs


def _refuse_unsupported(module: Any, options: dict[str, Any], is_stock: bool) -> None:
    """Raise UnsupportedModelError for a paged cache, and for arguments that only stock functions implement."""
    _refuse_paged_cache(module, options)
    names = CHOOSE_KEYS if is_stock else UNSUPPORTED
    passed = sorted(name for name in names if options.get(name) is not None)
    if passed:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(passed)} to its attention, which changes the scores "
            "and is not implemented for edited modules; use the dense model"
        )


def _refuse_paged_cache(module: Any, options: dict[str, Any]) -> None:
    """Raise UnsupportedModelError if these keyword arguments of attention come from continuous batching."""
    if "read_index" in options:
        raise UnsupportedModelError(
            f"edited {type(module).__name__} cannot read a paged cache (generate_batch, continuous batching); "
            "use generate"
        )


def _scaling(module: Any, options: dict[str, Any]) -> float:
    scaling = options.get("scaling")
    return scaling_of(module) if scaling is None else float(scaling)


def _is_causal(module: Any, is_causal: bool | None, mask: Tensor | None, queries: int) -> bool:
    """Return whether the kernel must apply the causal mask itself; an attention mask already contains it."""
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", False))
    return is_causal and mask is None and queries > 1


def register_attention() -> None:
    """Register `attend` with Transformers' attention interface."""
    AttentionInterface.register("collab", attend)


# Installing.


class AttentionConfig:
    """A view of the model's config in which every attention implementation means `attend`."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.__dict__["stock"] = config

    _attn_implementation = "collab"

    def __getattr__(self, name: str) -> Any:
        if name == "stock" or name.startswith("__"):  # while this view is copied or pickled
            raise AttributeError(name)
        return getattr(self.stock, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.stock, name, value)


def stock_config(module: Any) -> Any:
    """Return the model's own config as an attention module holds it; None if it holds none."""
    config = getattr(module, "config", None)
    return config.stock if isinstance(config, AttentionConfig) else config


def wrong_implementation(reason: str, implementation: Any) -> UnsupportedModelError:
    """Return the error of a module that cannot run with an attention implementation."""
    return UnsupportedModelError(
        f"{reason}, so it runs with attn_implementation 'eager' or 'sdpa', got {implementation!r}; call "
        "model.set_attn_implementation('sdpa')"
    )


def redirect_(module: Any) -> None:
    """Make `module` call `attend`, in place: by our forward pass, or by a view of its config."""
    form = family_of(module).forward
    if form == "scores" or (form == "plain" and is_converted(module)):
        take_over_(module)
        if isinstance(getattr(module, "config", None), AttentionConfig):
            module.config = module.config.stock
    elif not isinstance(module.config, AttentionConfig):
        module.config = AttentionConfig(module.config)


def restore_(module: Any) -> None:
    """Make `module` call the stock attention functions again, in place, unless another edit still needs ours."""
    if is_converted(module):
        return
    hand_back_(module)
    if isinstance(getattr(module, "config", None), AttentionConfig):
        module.config = module.config.stock
    if head_hooks(module):
        redirect_(module)


def add_head_hook_(module: Any, hook: HeadHook, *, first: bool = False) -> None:
    """Register `hook` on the head outputs of `module`, after or before the present hooks, in place."""
    if family_of(module).forward != "scores":  # those take any attention implementation
        implementation = stock_config(module)._attn_implementation
        if implementation not in IMPLEMENTATIONS:
            raise wrong_implementation(f"{type(module).__name__} has hooks on its heads", implementation)
    module.head_hooks = PresentHooks((hook, *head_hooks(module)) if first else (*head_hooks(module), hook))
    redirect_(module)


def remove_head_hook_(module: Any, hook: HeadHook) -> None:
    """Undo `add_head_hook_`, in place; a module without any edit is a stock one again."""
    remaining_hooks = tuple(other for other in head_hooks(module) if other is not hook)
    if remaining_hooks:
        module.head_hooks = PresentHooks(remaining_hooks)
    else:
        module.__dict__.pop("head_hooks", None)
    restore_(module)


def install_(module: Any, converted: ConvertedMap, layers: Layers, parent: Any) -> None:
    """Install a converted map in `module`, in place.

    Args:
        module: the attention module.
        converted: the map.
        layers: its projections, as `ConvertedMap.build` makes them; they stay as they are.
        parent: the module that holds `module`.

    Example:
        >>> from collab_compress.architectures import find_dense_attention
        >>> from collab_compress.attention import SharedConfig, SharedQK
        >>> site = find_dense_attention(model)[0]
        >>> config = SharedConfig.of(site, rank=12, head_dim=None, content_bias=True)
        >>> install_(site.module, *SharedQK.build(config, site.module, site.parent), site.parent)  # without weights
        >>> site.module.qkv  # 12 queries, 12 keys, 3 content biases, 24 values
        Linear(in_features=24, out_features=51, bias=True)
    """
    family = family_of(module)
    module.add_module(converted.at, converted.train(module.training))  # first, so that `uninstall_` can undo a part
    redirect_(module)
    projections = _put_outputs_(module, layers, parent)
    if family.forward != "stock":
        join_(module, projections, cross=converted.config.cross)
        prepare_(module)
    else:
        padded = {path: converted.wrap(path, layer, module) for path, layer in projections.items()}
        replace_(module, padded, converted.config.head_width)
        prepare_(module)
        add_pre_hook_(module, _prepare_cache)
    converted.put_in_(module)


def uninstall_(module: Any, at: str, dense: Layers, parent: Any) -> None:
    """Restore the dense projections of a map that `install_` changed, in place.

    Args:
        module: the attention module.
        at: "qk" or "ov".
        dense: the dense projections, as `ConvertedMap.to_dense` makes them.
        parent: the module that holds `module`.

    Example:
        >>> from collab_compress.architectures import find_dense_attention
        >>> from collab_compress.attention import SharedConfig, SharedQK
        >>> site = find_dense_attention(model)[0]
        >>> config = SharedConfig.of(site, rank=12, head_dim=None, content_bias=True)
        >>> install_(site.module, *SharedQK.build(config, site.module, site.parent), site.parent)
        >>> uninstall_(site.module, "qk", {"query": site.query, "key": site.key}, site.parent)
        >>> site.module.query is site.query
        True
    """
    converted: Any = module._modules.pop(at, None)
    if converted is None:
        return
    converted.take_out_(module)
    projections = _put_outputs_(module, dense, parent)
    if family_of(module).forward == "stock":
        replace_(module, projections, converted.config.head_width)
        lay_out_(module)
        if not is_converted(module):
            remove_pre_hook_(module, _prepare_cache)
    elif is_converted(module):
        join_(module, projections, cross=converted.config.cross)
        prepare_(module)
    else:
        separate_(module, projections)
        module.__dict__.pop("widths", None)
    restore_(module)


def _put_outputs_(module: Any, layers: Layers, parent: Any) -> dict[str, nn.Linear]:
    """Fill the output projection if the layers have parameters for it; return the others."""
    for new in layers.values():
        if isinstance(new, Weights):
            fill_(output_of(module, parent), *new)
    return {path: layer for path, layer in layers.items() if not isinstance(layer, Weights)}


def prepare_(module: Any) -> None:
    """Prepare a converted module for its forward pass, in place; also after heads have moved or gone."""
    if family_of(module).forward == "stock":
        lay_out_(module)
        return
    rows, qk = rows_of(module), maps_of(module)[0]
    module.widths = [stop - start for _, start, stop in rows.values()]
    if qk is not None:
        _, start, stop = rows[family_of(module).paths.value]
        qk.join_((start, (stop - start) // qk.config.heads) if "qkv" in module._modules else None)


# Stock forward passes: what their modules view as heads.


def lay_out_(module: Any) -> None:
    """Pad a module's projections to what it views as whole heads, in place.

    A module that views exactly H heads may take its number from an attribute (`Layout.head_count_attr`). Where both
    maps are converted, that becomes the number of key groups in use, as the module lays both out alike; otherwise
    projections stay padded to H·d.
    """
    family, layout = family_of(module), family_of(module).layout
    configs = [converted.config for converted in maps_of(module) if converted is not None]
    count = layout.head_count_attr
    if count and STOCK_HEADS in module.__dict__:
        setattr(module, count, module.__dict__.pop(STOCK_HEADS))
    if not configs:
        return
    width = configs[0].head_width
    projections: dict[str, PaddedProjection] = {path: module.get_submodule(path) for path in rows_of(module)}
    if count and len(configs) == 2:
        setattr(module, STOCK_HEADS, getattr(module, count))
        widest = max(projection.proj.out_features for projection in projections.values())
        setattr(module, count, max(1, -(-widest // width)))
    for path, projection in projections.items():
        heads = 1
        if count:
            heads = getattr(module, count)
        elif layout.fixed_head_count:
            heads = configs[-1 if path == family.paths.value else 0].key_value_heads
        whole = heads * width
        channels = projection.proj.out_features
        projection.padding = -channels % whole if channels else whole
    if family.paths.fused:
        fused: Any = module.get_submodule(family.paths.fused)
        if fused.transposed:
            module.split_size = fused.widths


def _prepare_cache(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make a static cache allocate values in their own shape; stock caches give them as many heads as keys."""
    _refuse_paged_cache(module, kwargs)
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
    if family_of(module).layout.equal_widths:
        return
    config = next(converted.config for converted in maps_of(module) if converted is not None)
    dense = config.key_value_heads * config.head_width
    key, value = (
        module.get_submodule(path).width if path in rows_of(module) else dense
        for path in (family_of(module).paths.key, family_of(module).paths.value)
    )
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
