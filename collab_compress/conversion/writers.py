"""Find the layers that write to the residual stream by running the model, whatever its architecture."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import AttentionSite, find_attention
from collab_compress.attention.values import output_dim
from collab_compress.calibration import Batch, run_batch
from collab_compress.calibration.batches import is_divisible, sequence_count, slice_batch
from collab_compress.heads.sharding import refuse_computed

PROBED = 2  # sequences that show where a layer writes to
SMALL = 1e-2  # of the stream's standard deviation: a smaller change of it would be lost in rounding
EXACT, ROUNDED = 1e-3, 5e-2  # relative error of a sum that counts as linear, in float32 and in half precision


@dataclass(frozen=True)
class Writer:
    """A linear layer whose outputs are added to the residual stream, as they are or normalised first.

    Args:
        name: path of the layer.
        at: path of the first module that reads or returns the sum; the layer itself if its outputs are normalised
            first, as those are what can be compared.
        shown: whether the sum is among the module's "inputs" or "outputs".
        gain: factor of each channel before outputs are added, (D,).
        site: attention module of the same layer, whose masks say what is padding.
        shared: whether the layer is called more than once in a forward pass, as in ALBERT.
    """

    name: str
    at: str
    shown: str
    gain: Tensor
    site: AttentionSite
    shared: bool = False


def find_writers(model: PreTrainedModel, batch: Batch) -> list[Writer]:
    """Find the layers that write to the residual stream, in the order in which they are called.

    Candidates are the output projections of attention, and linear layers of the same width inside numbered layers. A
    candidate writes to the stream if a change of its outputs appears unchanged, or times a constant for each channel,
    in what a later module reads or returns, added to something else. So does one whose outputs a normalisation reads,
    as in Gemma 3.

    Args:
        model: in evaluation mode.
        batch: to run it on.

    Raises:
        UnsupportedModelError: a candidate's weight is no parameter of it, so that it could not be refitted.
    """
    batch = probe_batch(batch)
    writers = []
    for name, site, calls in _candidates(model, batch):
        target = _find_sum(model, name, batch)
        if target is not None:
            writers.append(Writer(name, *target, site, calls > 1))
    return writers


def _candidates(model: PreTrainedModel, batch: Batch) -> list[tuple[str, AttentionSite, int]]:
    """Return the linear layers that may write to the stream, in the order of calls.

    Returns:
        Path, the attention module called before (or after, if none is), and the number of calls.
    """
    sites = find_attention(model)
    outputs = [site.path(site.family.output) for site in sites]
    projections: list[Any] = [model.get_submodule(path) for path in outputs]
    widths = {width_out(getattr(layer, "proj", layer)) for layer in projections} - {0}  # mixed heads wrap it
    inside_attention = tuple(f"{site.name}." for site in sites)
    calls: dict[str, int] = {}
    nearest: dict[str, AttentionSite] = {}
    latest = sites[0]

    def attended(site: AttentionSite, *_: Any) -> None:
        nonlocal latest
        latest = site

    def count(name: str, *_: Any) -> None:
        calls[name] = calls.get(name, 0) + 1
        nearest.setdefault(name, latest)

    with ExitStack() as hooks:
        for site in sites:
            hooks.enter_context(site.module.register_forward_pre_hook(partial(attended, site)))
        for name, module in model.named_modules():
            is_numbered = any(part.isdecimal() for part in name.split("."))
            may_write = name in outputs or (is_numbered and not name.startswith(inside_attention))
            if may_write and width_out(module) in widths:
                refuse_computed(name, module)
                hooks.enter_context(module.register_forward_hook(partial(count, name)))
        run_batch(model, batch)
    return [(name, nearest[name], number) for name, number in calls.items()]


def probe_batch(batch: Batch) -> Batch:
    """Return the first sequences of a batch, enough to see how a model is built; all if it cannot be divided."""
    return slice_batch(batch, slice(PROBED)) if sequence_count(batch) > PROBED and is_divisible(batch) else batch


def width_out(layer: Any) -> int:
    """Return the number of outputs of a linear layer, parametrized or plain; 0 for any other module."""
    kind = type_before_parametrizations(layer)
    return int(layer.weight.shape[1 - output_dim(layer)]) if kind in (nn.Linear, Conv1D) else 0


class _Seen(NamedTuple):
    """A tensor among a module's "inputs" or "outputs"."""

    name: str
    shown: str
    value: Tensor


def _find_sum(model: PreTrainedModel, layer_name: str, batch: Batch) -> tuple[str, str, Tensor] | None:
    """Return where the outputs of a layer have been added to something: path, "inputs" or "outputs", and gain."""
    layer = model.get_submodule(layer_name)
    with _watched(model, layer) as unchanged:
        run_batch(model, batch)
    if not unchanged:
        return None
    outputs = unchanged[0].value
    generator = torch.Generator().manual_seed(0)
    size = torch.rand(outputs.shape[:-1], generator=generator, device="cpu")[..., None] + 0.5
    noise = torch.randn(outputs.shape, generator=generator, device="cpu")
    spread = torch.stack([seen.value.float().std() for seen in unchanged])
    scale = torch.maximum(spread[0], SMALL * spread.median()).item() or 1.0
    change = (noise * size * scale).to(outputs)
    with _watched(model, layer, change) as changed:
        run_batch(model, batch)
    tolerance = ROUNDED if outputs.dtype in (torch.float16, torch.bfloat16) else EXACT
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
    return (layer_name, "outputs", torch.ones_like(added[0])) if normalised else None


@contextmanager
def _watched(model: PreTrainedModel, layer: nn.Module, change: Tensor | None = None) -> Iterator[list[_Seen]]:
    """Record the first outputs of `layer`, to which `change` is added, and what modules read and return after it."""
    recorded: list[_Seen] = []

    def begin(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        if recorded:
            return None
        recorded.append(_Seen("", "", output.clone()))
        return None if change is None else output + change

    def record(name: str, shown: str, values: Any) -> None:
        stream = stream_of(values, recorded[0].value.shape) if recorded else None
        if stream is not None:
            recorded.append(_Seen(name, shown, stream.clone()))

    def on_inputs(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        record(name, "inputs", (*args, *kwargs.values()))

    def on_outputs(name: str, _: nn.Module, __: Any, output: Any) -> None:
        record(name, "outputs", output)

    with ExitStack() as hooks:
        hooks.enter_context(layer.register_forward_hook(begin))
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(on_inputs, name), with_kwargs=True))
            if module is not layer:
                hooks.enter_context(module.register_forward_hook(partial(on_outputs, name)))
        yield recorded


def stream_of(values: Any, shape: torch.Size) -> Tensor | None:
    """Return the first tensor with as many vectors of this width among a module's inputs or outputs."""
    if isinstance(values, Tensor):
        values = (values,)
    elif isinstance(values, Mapping):
        values = tuple(values.values())
    if not isinstance(values, tuple | list):
        return None
    floats = (value for value in values if isinstance(value, Tensor) and value.is_floating_point())
    return next((v for v in floats if v.shape[-1:] == shape[-1:] and v.numel() == shape.numel()), None)
