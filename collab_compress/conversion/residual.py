"""Find the linear layers whose outputs are added to the residual stream, whatever a model's architecture.

Each numbered layer of the model is called alone, with and without a change of what a linear layer in it returns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import AttentionSite, find_attention
from collab_compress.attention.projections import input_dim
from collab_compress.calibration.gather import AttentionMasks, MaskKind
from collab_compress.calibration.stacks import Stack, StreamMask, stream_mask
from collab_compress.conversion.layers import SingleLayers
from collab_compress.devices import forked_rng
from collab_compress.errors import UnsupportedModelError
from collab_compress.heads.sharding import refuse_computed

LEAST_CHANGE = 1e-2  # of the stream's standard deviation: a smaller change would be lost in rounding
NORM_RTOL = 5e-2  # relative change of a norm's outputs when its inputs are halved: not 0, because of its eps
LINEAR_RTOL, LINEAR_RTOL_HALF = 1e-3, 5e-2  # error of a sum that counts as linear, in float32 and in half precision


@dataclass(frozen=True)
class ResidualLinear:
    """A linear layer whose outputs are added to the residual stream; `at` is itself if they are normalised first."""

    name: str  # path of the linear layer
    layer: str  # path of the numbered layer that holds it
    at: str  # path of the first module that reads or returns the sum
    shown: str  # where the sum is: in the "inputs" or "outputs" of that module
    gain: Tensor  # factor of each channel before outputs are added, (D,)
    site: AttentionSite | None = None  # attention module called before it, whose masks say what is padding, if any
    stack_mask: StreamMask | None = None  # which says it where no attention module does
    normalised: bool = False  # whether a norm divides the sum, or the outputs, by their size before they go on

    def mask(self, masks: Mapping[MaskKind, AttentionMasks], values: Tensor) -> Tensor | None:
        """Return which vectors of its inputs or outputs (…, D) are no padding; None if nothing says it."""
        return stream_mask(self.site, self.stack_mask, masks, values)


def find_residual_linears(
    model: PreTrainedModel, stacks: Sequence[Stack], layers: SingleLayers
) -> list[ResidualLinear]:
    """Find the linear layers whose outputs are added to the residual stream, in the order of calls.

    Candidates are the output projections of attention and linear layers that have as many outputs, or, where no
    attention is described, as many as the hidden states have channels. Such a layer is found if a change of its
    outputs appears in a later module of the numbered layer as part of a sum, as it is or times a constant for each
    channel, or after a norm.
    """
    sites, linears = find_attention(model, optional=True), []
    stack_masks = {layer: stack.mask for stack in stacks for layer in stack.layers}
    for layer, run in layers.items():
        normalised = _ends_in_norm(model, layer, run)
        for name, site in _candidates(model, sites, layer, run):
            target = _find_sum(model, layer, name, run)
            if target is not None:
                of_norm = normalised or target[0] == name
                linears.append(ResidualLinear(name, layer, *target, site, stack_masks[layer], of_norm))
    return linears


def _ends_in_norm(model: PreTrainedModel, layer: str, run: Callable[[], Tensor]) -> bool:
    """Return whether a layer ends in a norm: a module whose outputs do not change with the size of its inputs."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            calls.append((module, args[0].clone(), output.clone()))

    with ExitStack() as hooks:
        for module in model.get_submodule(layer).modules():
            if not any(module.children()):
                hooks.enter_context(module.register_forward_hook(note, with_kwargs=True))
        states = run()
    ends = [(module, inputs) for module, inputs, output in calls if torch.equal(output, states)]
    return any((module(inputs / 2) - states).norm() < NORM_RTOL * states.norm() for module, inputs in ends)


def _candidates(
    model: PreTrainedModel, sites: Sequence[AttentionSite], layer: str, run: Callable[[], Tensor]
) -> list[tuple[str, AttentionSite | None]]:
    """Return the linear layers of a numbered layer that may write to the stream, in the order of calls."""
    own = [site for site in sites if site.name.startswith(f"{layer}.")]
    outputs = [site.path(site.paths.output) for site in own]
    projections: list[Any] = [model.get_submodule(path) for path in outputs]
    widths = {width_out(getattr(projection, "proj", projection)) for projection in projections} - {0}  # mixed heads
    inside_attention = tuple(f"{site.name}." for site in own)
    latest = own[0] if own else None
    found: dict[str, AttentionSite | None] = {}
    repeated: set[str] = set()

    def attended(site: AttentionSite, *_: Any) -> None:
        nonlocal latest
        latest = site

    def note(name: str, *_: Any) -> None:
        if name in found:
            repeated.add(name)
        found[name] = latest

    with ExitStack() as hooks:
        for site in own:
            hooks.enter_context(site.module.register_forward_pre_hook(partial(attended, site)))
        for name, module in model.get_submodule(layer).named_modules(prefix=layer):
            if width_out(module) and (name in outputs or not name.startswith(inside_attention)):
                hooks.enter_context(module.register_forward_hook(partial(note, name)))
        states = run()
    widths = widths or {states.shape[-1]}
    candidates = [(name, site) for name, site in found.items() if width_out(model.get_submodule(name)) in widths]
    for name, _ in candidates:
        refuse_computed(name, model.get_submodule(name))
        if name in repeated:
            raise UnsupportedModelError(f"{name} is called several times in its layer, so it cannot be refitted")
    return candidates


def width_out(layer: Any) -> int:
    """Return the number of outputs of a linear layer, parametrized or plain; 0 for any other module."""
    kind = type_before_parametrizations(layer)
    return int(layer.weight.shape[1 - input_dim(layer)]) if _is_linear(kind) else 0


@cache
def _is_linear(kind: Any) -> bool:
    """Return whether a class of modules is a linear layer, or computes what `nn.Linear` does, as Falcon's."""
    if kind in (nn.Linear, Conv1D) or not issubclass(kind, nn.Linear):
        return kind in (nn.Linear, Conv1D)
    cpu = torch.device("cpu")
    try:
        with forked_rng(cpu), cpu:
            layer = kind(2, 3).float()
        inputs = torch.tensor([[1.0, 2.0], [3.0, -1.0]], device=cpu)
        outputs = nn.functional.linear(inputs, layer.weight, layer.bias)
        return bool(torch.allclose(layer(inputs), outputs))
    except Exception:  # whatever a layer of another kind raises
        return False


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
    alone = outputs.float().flatten(0, -2)
    norms: dict[str, tuple[Tensor, Tensor] | None] = {}  # path of a norm that reads them → its outputs, their change
    for before, after in zip(unchanged[1:], changed[1:], strict=False):
        if before[:2] != after[:2] or before.value.shape != after.value.shape:  # a router sent tokens elsewhere
            return None
        difference = (after.value.float() - before.value.float()).reshape(added.shape)
        value = before.value.float().reshape(added.shape)
        for of_norm in filter(None, norms.values()):
            if _share(value, difference, *of_norm, tolerance) is not None:
                return name, "outputs", torch.ones_like(added[0])
        if before.shown == "outputs" and norms.get(before.name, value) is None:
            norms[before.name] = value, difference
        gain = _share(value, difference, alone, added, tolerance)
        if gain is not None:
            return before.name, before.shown, gain
        is_norm = "norm" in type(model.get_submodule(before.name)).__name__.lower()
        if before.shown == "inputs" and is_norm and _gain(difference, added, tolerance) is not None:
            norms[before.name] = None
    return None


def _gain(difference: Tensor, change: Tensor, tolerance: float) -> Tensor | None:
    """Return the factor (D,) of each channel by which a change (n, D) makes a difference (n, D), or None."""
    gain = (difference * change).sum(0) / change.square().sum(0)
    is_linear = bool(difference.any()) and (difference - gain * change).norm() <= tolerance * difference.norm()
    return gain if is_linear else None


def _share(value: Tensor, difference: Tensor, part: Tensor, change: Tensor, tolerance: float) -> Tensor | None:
    """Return the gain of a part of a sum (n, D), of which a change makes a difference; None if it is no such sum."""
    gain = _gain(difference, change, tolerance)
    others = None if gain is None else value - gain * part
    return gain if others is not None and others.norm() > tolerance * value.norm() else None


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
