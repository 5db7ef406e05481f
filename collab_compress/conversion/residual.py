"""Find the linear layers whose outputs are added to the residual stream, whatever a model's architecture.

Each numbered layer of the model is called alone, with and without a change of what a linear layer in it returns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import AttentionSite, find_attention
from collab_compress.attention.projections import input_dim
from collab_compress.conversion.layers import SingleLayers
from collab_compress.errors import UnsupportedModelError
from collab_compress.heads.sharding import refuse_computed

LEAST_CHANGE = 1e-2  # of the stream's standard deviation: a smaller change would be lost in rounding
LINEAR_RTOL, LINEAR_RTOL_HALF = 1e-3, 5e-2  # error of a sum that counts as linear, in float32 and in half precision


@dataclass(frozen=True)
class ResidualLinear:
    """A linear layer whose outputs are added to the residual stream; `at` is itself if they are normalised first."""

    name: str  # path of the linear layer
    layer: str  # path of the numbered layer that holds it
    at: str  # path of the first module that reads or returns the sum
    shown: str  # where the sum is: in the "inputs" or "outputs" of that module
    gain: Tensor  # factor of each channel before outputs are added, (D,)
    site: AttentionSite  # attention module called before it, whose masks say what is padding


def find_residual_linears(model: PreTrainedModel, layers: SingleLayers) -> list[ResidualLinear]:
    """Find the linear layers whose outputs are added to the residual stream, in the order of calls.

    These are output projections of attention, and layers of the same width, of which a change appears in a later
    module of the numbered layer, added to something else, as it is or times a constant for each channel; or a
    norm reads it.
    """
    sites = find_attention(model)
    return [
        ResidualLinear(name, layer, *target, site)
        for layer, run in layers.items()
        for name, site in _candidates(model, sites, layer, run)
        if (target := _find_sum(model, layer, name, run)) is not None
    ]


def _candidates(
    model: PreTrainedModel, sites: Sequence[AttentionSite], layer: str, run: Callable[[], Tensor]
) -> list[tuple[str, AttentionSite]]:
    """Return the linear layers of a numbered layer that may write to the stream, in the order of calls."""
    outputs = [site.path(site.paths.output) for site in sites]
    projections: list[Any] = [model.get_submodule(path) for path in outputs]
    widths = {width_out(getattr(projection, "proj", projection)) for projection in projections} - {0}  # mixed heads
    inside_attention = tuple(f"{site.name}." for site in sites)
    own = [site for site in sites if site.name.startswith(f"{layer}.")]
    latest = (own or sites)[0]
    found: dict[str, AttentionSite] = {}

    def attended(site: AttentionSite, *_: Any) -> None:
        nonlocal latest
        latest = site

    def note(name: str, *_: Any) -> None:
        if name in found:
            raise UnsupportedModelError(f"{name} is called several times in its layer, so it cannot be refitted")
        found[name] = latest

    with ExitStack() as hooks:
        for site in own:
            hooks.enter_context(site.module.register_forward_pre_hook(partial(attended, site)))
        for name, module in model.get_submodule(layer).named_modules(prefix=layer):
            if width_out(module) in widths and (name in outputs or not name.startswith(inside_attention)):
                refuse_computed(name, module)
                hooks.enter_context(module.register_forward_hook(partial(note, name)))
        run()
    return list(found.items())


def width_out(layer: Any) -> int:
    """Return the number of outputs of a linear layer, parametrized or plain; 0 for any other module."""
    kind = type_before_parametrizations(layer)
    return int(layer.weight.shape[1 - input_dim(layer)]) if kind in (nn.Linear, Conv1D) else 0


class _Seen(NamedTuple):
    """A tensor among a module's "inputs" or "outputs"."""

    name: str
    shown: str
    value: Tensor


def _find_sum(
    model: PreTrainedModel, layer: str, name: str, run: Callable[[], Tensor]
) -> tuple[str, str, Tensor] | None:
    """Return where the outputs of a linear layer have been added to something: path, "inputs" or "outputs", gain."""
    with _watched(model, layer, name) as unchanged:
        run()
    outputs = unchanged[0].value
    generator = torch.Generator().manual_seed(0)
    size = torch.rand(outputs.shape[:-1], generator=generator, device="cpu")[..., None] + 0.5
    noise = torch.randn(outputs.shape, generator=generator, device="cpu")
    spread = torch.stack([seen.value.float().std() for seen in unchanged])
    scale = torch.maximum(spread[0], LEAST_CHANGE * spread.median()).item() or 1.0
    change = (noise * size * scale).to(outputs)
    with _watched(model, layer, name, change) as changed:
        run()
    tolerance = LINEAR_RTOL_HALF if outputs.dtype in (torch.float16, torch.bfloat16) else LINEAR_RTOL
    added = change.float().flatten(0, -2)
    normalised = False
    for before, after in zip(unchanged[1:], changed[1:], strict=False):
        if before[:2] != after[:2] or before.value.shape != after.value.shape:  # a router sent tokens elsewhere
            return None
        difference = (after.value.float() - before.value.float()).reshape(added.shape)
        gain = (difference * added).sum(0) / added.square().sum(0)
        residual = (difference - gain * added).norm()
        others = before.value.float().reshape(added.shape) - gain * outputs.float().flatten(0, -2)
        if not bool(difference.any()) or residual > tolerance * difference.norm():
            continue
        if others.norm() > tolerance * before.value.float().norm():
            return before.name, before.shown, gain
        class_name = type(model.get_submodule(before.name)).__name__
        normalised |= before.shown == "inputs" and "norm" in class_name.lower()
    return (name, "outputs", torch.ones_like(added[0])) if normalised else None


@contextmanager
def _watched(model: PreTrainedModel, layer: str, linear: str, change: Tensor | None = None) -> Iterator[list[_Seen]]:
    """Record the first outputs of a linear layer, with `change` added, and what its layer's modules see after it."""
    recorded: list[_Seen] = []

    def begin(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        if recorded:
            return None
        recorded.append(_Seen("", "", output.clone()))
        return None if change is None else output + change

    def record(name: str, shown: str, values: object) -> None:
        stream = stream_of(values, recorded[0].value.shape) if recorded else None
        if stream is not None:
            recorded.append(_Seen(name, shown, stream.clone()))

    with ExitStack() as hooks:
        hooks.enter_context(model.get_submodule(linear).register_forward_hook(begin))
        for name, module in model.get_submodule(layer).named_modules(prefix=layer):
            for shown in ("inputs", "outputs") if name != linear else ("inputs",):
                hooks.enter_context(watch(module, shown, partial(record, name, shown)))
        yield recorded


def watch(module: nn.Module, shown: str, act: Callable[[object], None]) -> RemovableHandle:
    """Call `act` with the "inputs" or the "outputs" of each call of a module; return the handle of the hook."""
    if shown == "inputs":
        return module.register_forward_pre_hook(
            lambda _, args, kwargs: act((*args, *kwargs.values())), with_kwargs=True
        )
    return module.register_forward_hook(lambda _, __, output: act(output))


def stream_of(values: object, shape: torch.Size) -> Tensor | None:
    """Return the first tensor with as many vectors of this width among a module's inputs or outputs."""
    if isinstance(values, Tensor):
        values = (values,)
    elif isinstance(values, Mapping):
        values = tuple(values.values())
    if not isinstance(values, tuple | list):
        return None
    floats = (value for value in values if isinstance(value, Tensor) and value.is_floating_point())
    return next((v for v in floats if v.shape[-1:] == shape[-1:] and v.numel() == shape.numel()), None)
