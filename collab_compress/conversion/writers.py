"""Find the layers that write to the residual stream, by trying, whatever the model's architecture."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import FAMILIES, AttentionSite, find_attention
from collab_compress.attention.values import output_dim
from collab_compress.calibration import Batch, run_batch
from collab_compress.calibration.batches import sequence_count, slice_batch

PROBED = 2  # sequences on which is found out where a layer writes to
EXACT, ROUNDED = 1e-3, 5e-2  # how far from linear a sum may look, in float32 and in halves


@dataclass(frozen=True)
class Writer:
    """A linear layer whose outputs are added to the residual stream, as they are or normalised first.

    Args:
        name: path of the layer in the model.
        at: path of the first module that shows the sum; the layer itself where its outputs are normalised first, for
            then they are what there is to compare.
        shown: whether the sum is among its "inputs" or its "outputs".
        gain: what outputs are multiplied by before they are added, for each channel (D,).
        site: attention of the same layer, whose masks say what is padding.
        shared: whether the layer is called more than once in a pass, as in ALBERT.
    """

    name: str
    at: str
    shown: str
    gain: Tensor
    site: AttentionSite
    shared: bool = False


def find_writers(model: PreTrainedModel, batch: Batch) -> list[Writer]:
    """Find the layers that write to the residual stream, in the order in which they are called.

    Candidates are the output projections of attention, and linear layers as wide of its layers. One of them writes to
    the stream if a change of its outputs appears unchanged, or times a constant for each channel, in what a later
    module reads or returns, beside something else. So does one whose outputs a normalisation reads, as in Gemma 3.

    Args:
        model: in evaluation mode.
        batch: to run it on.
    """
    batch = first_rows(batch)
    writers = []
    for name, site, calls in _candidates(model, batch):
        found = _sum_of(model, name, batch)
        if found is not None:
            writers.append(Writer(name, *found, site, calls > 1))
    return writers


def _candidates(model: PreTrainedModel, batch: Batch) -> list[tuple[str, AttentionSite, int]]:
    """List the linear layers that may write to the stream, in the order of calls.

    Returns:
        Path, attention module called before (or behind, where there is none before), and how often it is called.
    """
    sites = find_attention(model, FAMILIES)
    outputs = {site.name: site.path(site.family.output) for site in sites}
    projections: list[Any] = [model.get_submodule(path) for path in outputs.values()]
    widths = {width_out(getattr(each, "proj", each)) for each in projections} - {0}  # a mixed one has it inside
    inside = tuple(f"{site.name}." for site in sites)
    calls: dict[str, int] = {}
    latest: list[AttentionSite] = [sites[0]]
    near: dict[str, AttentionSite] = {}

    def attended(site: AttentionSite, *_: Any) -> None:
        latest[0] = site

    def count(name: str, *_: Any) -> None:
        calls[name] = calls.get(name, 0) + 1
        near.setdefault(name, latest[0])

    handles = [site.module.register_forward_pre_hook(partial(attended, site)) for site in sites]
    for name, module in model.named_modules():
        numbered = any(part.isdecimal() for part in name.split("."))
        known = name in outputs.values() or (numbered and not name.startswith(inside))
        if known and width_out(module) in widths:
            handles.append(module.register_forward_hook(partial(count, name)))
    try:
        run_batch(model, batch)
    finally:
        remove_hooks(handles)
    return [(name, near[name], times) for name, times in calls.items()]


def first_rows(batch: Batch) -> Batch:
    """Return the first sequences of a batch, as many as show how a model is built."""
    count = min(PROBED, sequence_count(batch))
    return slice_batch(batch, slice(0, count)) if count < sequence_count(batch) else batch


def width_out(layer: Any) -> int:
    """Return how many outputs a plain linear layer has; 0 for any other module."""
    return int(layer.weight.shape[1 - output_dim(layer)]) if type(layer) in (nn.Linear, Conv1D) else 0


def _sum_of(model: PreTrainedModel, layer_name: str, batch: Batch) -> tuple[str, str, Tensor] | None:
    """Find where the outputs of a layer have been added to something: path, "inputs" or "outputs", and gain."""
    layer = model.get_submodule(layer_name)
    shown: list[tuple[str, str, Tensor]] = []
    with _watched(model, layer, shown):
        run_batch(model, batch)
    if not shown:
        return None
    outputs = shown[0][2]
    draws: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), "device": "cpu"}
    size = torch.rand(outputs.shape[:-1], **draws)[..., None] + 0.5
    change = torch.randn(outputs.shape, **draws) * size * (outputs.float().std().item() or 1.0)
    change = change.to(outputs)
    changed: list[tuple[str, str, Tensor]] = []
    with _watched(model, layer, changed, change):
        run_batch(model, batch)
    tolerance = ROUNDED if outputs.dtype in (torch.float16, torch.bfloat16) else EXACT
    given = change.float().flatten(0, -2)
    normalised = False
    for (name, where, before), (*place, after) in zip(shown[1:], changed[1:], strict=False):
        if [name, where] != place or before.shape != after.shape:  # a router sent tokens elsewhere
            return None
        difference = (after.float() - before.float()).reshape(given.shape)
        gain = (difference * given).sum(0) / given.square().sum(0)
        lacking = (difference - gain * given).norm()
        beside = before.float().reshape(given.shape) - gain * outputs.float().flatten(0, -2)
        if not bool(difference.any()) or lacking > tolerance * difference.norm():
            continue
        if beside.norm() > tolerance * before.float().norm():
            return name, where, gain
        normalised |= where == "inputs" and "norm" in type(model.get_submodule(name)).__name__.lower()
    return (layer_name, "outputs", torch.ones_like(given[0])) if normalised else None


@contextmanager
def _watched(
    model: PreTrainedModel, layer: nn.Module, shown: list[tuple[str, str, Tensor]], change: Tensor | None = None
) -> Iterator[None]:
    """Note what the first call of `layer` returns, and what modules read and return after it, of the same shape."""

    def begin(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        if shown:
            return None
        shown.append(("", "", output.clone()))
        return None if change is None else output + change

    def note(name: str, where: str, values: Any) -> None:
        found = stream_of(values, shown[0][2].shape) if shown else None
        if found is not None:
            shown.append((name, where, found.clone()))

    def before(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        note(name, "inputs", (*args, *kwargs.values()))

    def after(name: str, _: nn.Module, __: Any, output: Any) -> None:
        note(name, "outputs", output)

    handles: list[Any] = [layer.register_forward_hook(begin)]
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
        if module is not layer:
            handles.append(module.register_forward_hook(partial(after, name)))
    try:
        yield
    finally:
        remove_hooks(handles)


def stream_of(values: Any, shape: torch.Size) -> Tensor | None:
    """Return the first tensor of as many vectors of this width among what a module reads or returns."""
    if isinstance(values, Tensor):
        values = (values,)
    elif isinstance(values, Mapping):
        values = tuple(values.values())
    if not isinstance(values, tuple | list):
        return None
    floats = (value for value in values if isinstance(value, Tensor) and value.is_floating_point())
    return next((v for v in floats if v.shape[-1:] == shape[-1:] and v.numel() == shape.numel()), None)


def remove_hooks(handles: Sequence[Any]) -> None:
    """Remove hooks."""
    for handle in handles:
        handle.remove()
