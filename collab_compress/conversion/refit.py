r"""Refit the layers that write to the residual stream, in closed form, towards the dense model: no labels, no steps.

For each such layer y = W a + b (the output projection of attention, the second layer of a feed-forward block), in the
order of the forward pass,

$$\min_{W', b'}\ \mathbb{E}\,\|(h + y)_\text{dense} - (h' + W' a' + b')\|^2 + \lambda\,\|W' - W\|^2$$

where h is what y is added to, and ' marks the converted model, whose lower layers are refitted already. So each layer
also repairs what those below it lost. Half of the heads' channels then cost a classifier about as much as none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from accelerate.utils import broadcast
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import FAMILIES, AttentionSite, find_attention, transformers_model
from collab_compress.calibration import Batch, Calibration, calibration_batches, evaluation_mode, run_batch
from collab_compress.calibration.batches import positions_of, rows, rows_of
from collab_compress.calibration.gather import batch_masks, fitted, masks_of
from collab_compress.calibration.stepwise import Passes, current_pass
from collab_compress.conversion.drift import split_held_back
from collab_compress.conversion.report import RefitReport
from collab_compress.distributed import process_state
from collab_compress.errors import CalibrationError, HeadError
from collab_compress.factorization.least_squares import ResidualMoments, fit

Progress = Callable[[str, int, int], None]
DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0)  # shares of the inputs' mean variance, of which held-back data choose
ROUNDING = 1e-5  # relative error of the stream that is none
ROOM = 2 * 2**30  # bytes that hidden states of both models may take together
PROBED = 2  # sequences on which is found out where a layer writes to
EXACT, ROUNDED = 1e-3, 5e-2  # how far from linear a sum may look, in float32 and in halves


@dataclass(frozen=True)
class Writer:
    """A linear layer whose outputs are added to the residual stream.

    Args:
        name: path of the layer in the model.
        at: path of the first module that shows the sum.
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


@dataclass(frozen=True)
class Refitted:
    """New weights of one layer, and what they change.

    Args:
        report: path of the layer, errors, vectors.
        weight: in the layer's own layout and dtype.
        bias: likewise, or None where the layer has none.
    """

    report: RefitReport
    weight: Tensor
    bias: Tensor | None


def find_writers(model: PreTrainedModel, batch: Batch) -> list[Writer]:
    """Find the layers that write to the residual stream, in the order in which they are called.

    Candidates are the output projections of attention, and linear layers as wide of its layers. One of them writes to
    the stream if a change of its outputs appears unchanged, or times a constant for each channel, in what a later
    module reads or returns, beside something else.

    Args:
        model: in evaluation mode.
        batch: to run it on.
    """
    count = min(PROBED, rows_of(batch))
    batch = rows(batch, slice(0, count)) if count < rows_of(batch) else batch
    writers = []
    for name, site, calls in _candidates(model, batch):
        found = _sum_of(model, model.get_submodule(name), batch)
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
    widths = {_width_out(model.get_submodule(path)) for path in outputs.values()}
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
        own = name in outputs.values()
        numbered = any(part.isdecimal() for part in name.split("."))
        if own or (numbered and _width_out(module) in widths and not name.startswith(inside)):
            handles.append(module.register_forward_hook(partial(count, name)))
    try:
        run_batch(model, batch)
    finally:
        _remove(handles)
    return [(name, near[name], times) for name, times in calls.items()]


def _width_out(layer: Any) -> int:
    """Return how many outputs a plain linear layer has; 0 for any other module."""
    if type(layer) not in (nn.Linear, Conv1D):
        return 0
    return int(layer.weight.shape[1 if isinstance(layer, Conv1D) else 0])


def _sum_of(model: PreTrainedModel, layer: nn.Module, batch: Batch) -> tuple[str, str, Tensor] | None:
    """Find where the outputs of a layer have been added to something: path, "inputs" or "outputs", and gain."""
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
    for (name, where, before), (_, _, after) in zip(shown[1:], changed[1:], strict=True):
        difference = (after.float() - before.float()).reshape(given.shape)
        gain = (difference * given).sum(0) / given.square().sum(0)
        lacking = (difference - gain * given).norm()
        beside = before.float().reshape(given.shape) - gain * outputs.float().flatten(0, -2)
        if not bool(difference.any()) or lacking > tolerance * difference.norm():
            continue
        if beside.norm() > tolerance * before.float().norm():
            return name, where, gain
    return None


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
        found = _stream(values, shown[0][2].shape) if shown else None
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
        _remove(handles)


def _stream(values: Any, shape: torch.Size) -> Tensor | None:
    """Return the first tensor of as many vectors of this width among what a module reads or returns."""
    if isinstance(values, Tensor):
        values = (values,)
    elif isinstance(values, Mapping):
        values = tuple(values.values())
    if not isinstance(values, tuple | list):
        return None
    floats = (value for value in values if isinstance(value, Tensor) and value.is_floating_point())
    return next((v for v in floats if v.shape[-1:] == shape[-1:] and v.numel() == shape.numel()), None)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


class _Seen(NamedTuple):
    """What one batch shows of a writer, padding left out, in the units of its outputs.

    Args:
        inputs: a', (n, N).
        residuals: what the stream lacks, (n, D).
        stream: of the dense model, (n, D).
    """

    inputs: Tensor
    residuals: Tensor
    stream: Tensor

    @classmethod
    def of(cls, here: Any, there: Any, writer: Writer, mask: Tensor | None) -> Self:
        stream, own = (_vectors(notes["sum"]).float() for notes in (there, here))
        gain = torch.where(writer.gain == 0, torch.inf, writer.gain).to(stream)
        values = (_vectors(here["inputs"]), (stream - own) / gain, stream / gain)
        positions = len(stream) // len(mask) if mask is not None else 0
        real = fitted(mask, positions)
        if real is None or real.numel() != len(stream):
            return cls(*values)
        chosen = real.flatten().to(stream.device)
        return cls(*(value[chosen] for value in values))


def _vectors(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


@dataclass
class _Fit:
    """What is gathered of one layer: moments of the sequences to fit to, and of those held back."""

    used: ResidualMoments = field(default_factory=ResidualMoments)
    held_back: ResidualMoments = field(default_factory=ResidualMoments)
    unfitted: float = 0.0  # squared error on held-back sequences where no layer is refitted
    spread: float = 0.0  # of the dense stream on held-back sequences, Σ‖x − mean‖²

    def add(self, seen: _Seen, group: str) -> None:
        """Add what a batch shows: one that is "used", one "held back", or one held back with nothing refitted."""
        if group == "used":
            self.used.add(seen.inputs, seen.residuals)
        elif group == "held back":
            self.held_back.add(seen.inputs, seen.residuals)
            self.spread += float((seen.stream - seen.stream.mean(0)).square().sum())
        else:
            self.unfitted += float(seen.residuals.square().sum())


def refit(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    used: Sequence[Batch],
    held_back: Sequence[Batch],
    progress: Progress | None = None,
) -> list[Refitted]:
    """Compute new weights for the layers that write to the residual stream; neither model is changed.

    Each layer is fitted with the damping that leaves the smallest error on the held-back sequences, and stays as it
    is where none makes that smaller than it was.

    Args:
        model: converted.
        dense: what it was converted from; another object, which may share tensors.
        used: batches to fit to.
        held_back: batches to choose the damping and to measure errors on.
        progress: called with a layer's name, how many are done, and how many there are.

    Raises:
        CalibrationError: there are no batches, or they take different ways through the model.
        HeadError: the dense model lacks a layer of the other, or has it in another width.
    """
    if not used or not held_back:
        raise CalibrationError("refitting takes at least two sequences, one of them held back; pass more data")
    with evaluation_mode(model), evaluation_mode(dense):
        writers = find_writers(model, used[0])
        _check_same(writers, model, dense)
        used = _that_fit(model, writers, used)
        batches = [*used, *held_back, *held_back]  # the last as they are without any refit
        fitted_to, last = len(used), len(batches) - len(held_back)
        masks = [batch_masks(model, batch) for batch in batches]
        fits = [_Fit() for _ in writers]
        results: dict[int, Refitted] = {}
        with (
            _stopping(model, writers, inputs=True),
            _stopping(dense, writers),
            Passes([partial(_run, dense, batch) for batch in batches[:last]]) as targets,
            Passes([partial(_run, model, batch) for batch in batches]) as passes,
        ):
            while True:
                places = {*targets.go_on(), *passes.go_on()}
                if len(places) != 1:
                    raise CalibrationError("batches take different ways through the model; pass batches of one kind")
                (place,) = places
                if place is None:
                    break
                writer = writers[place]
                layer = model.get_submodule(writer.name)
                if progress is not None:
                    progress(writer.name, len(results), len(writers))
                others = [*targets.all, *targets.all[fitted_to:]]
                notes = [
                    (here.notes[place], there.notes[place]) for here, there in zip(passes.all, others, strict=True)
                ]
                for number, (here, there) in enumerate(notes):
                    seen = _Seen.of(here, there, writer, masks_of(writer.site, masks[number]).query)
                    fits[place].add(seen, "used" if number < fitted_to else "held back" if number < last else "")
                if writer.shared:  # its other calls show it the dense model's stream, so that errors do not add up
                    for here, there in notes[:last]:
                        here["sum"].copy_(there["sum"])
                else:
                    change, shift, results[place] = _solved(fits[place], writer, layer)
                    for here, _ in notes[:last]:
                        _apply(here, writer, change, shift)
                    fits[place] = _Fit()
        for place, writer in enumerate(writers):
            if writer.shared and fits[place].used.count:
                _, _, results[place] = _solved(fits[place], writer, model.get_submodule(writer.name))
    return [results[place] for place in sorted(results)]


def refit_(
    model: PreTrainedModel,
    dense: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    calibration: Calibration,
    *,
    sequences: int | None = None,
    length: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[RefitReport, ...]:
    """Refit the layers of a converted model that write to the residual stream, in place, without labels.

    Args:
        model: converted, in whatever form.
        dense: the model it was converted from; another object, which may share tensors.
        tokenizer: of both; as for `compress`.
        calibration: texts, batches or others, as for `compress`; an eighth is held back to choose the damping.
        sequences: how many; all texts if not given.
        length: where texts are cut, or tokens of a random sequence.
        seed: of what is drawn.
        progress: called with a layer's name, how many are done, and how many there are.

    Returns:
        Errors of the residual stream behind each layer, in the order of the forward pass.

    Raises:
        CalibrationError: the data are missing or unusable, or fewer than two sequences.
        HeadError: a model holds values that are not finite, or the two have other layers.
    """
    model, dense = transformers_model(model), transformers_model(dense)
    batches = calibration_batches(calibration, dense, tokenizer, sequences=sequences, length=length, seed=seed)
    results = refit(model, dense, *split_held_back(batches), progress)
    install_refits(model, results)
    return tuple(result.report for result in results)


def _that_fit(model: PreTrainedModel, writers: Sequence[Writer], batches: Sequence[Batch]) -> list[Batch]:
    """Return as many batches, evenly spaced, as have room for their hidden states in both models."""
    layers: list[Any] = [model.get_submodule(writer.name) for writer in writers]
    numbers = max((layer.weight.numel() // _width_out(layer) + 4 * _width_out(layer) for layer in layers), default=1)
    vectors = [positions_of(batch) for batch in batches]
    most = ROOM / (2 * numbers * model.dtype.itemsize)
    step = max(1, -(-sum(vectors) // int(max(most, max(vectors)))))
    return list(batches[::step])


def _check_same(writers: Sequence[Writer], model: PreTrainedModel, dense: PreTrainedModel) -> None:
    theirs = dict(dense.named_modules())
    for writer in writers:
        layer, other = model.get_submodule(writer.name), theirs.get(writer.name)
        if _width_out(layer) != _width_out(other):
            raise HeadError(
                f"{writer.name} has {_width_out(layer)} outputs, and {_width_out(other) or 'none'} in the dense "
                "model; pass the dense model that was converted"
            )


def _run(model: PreTrainedModel, batch: Batch) -> None:
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        run_batch(model, batch)


@contextmanager
def _stopping(model: PreTrainedModel, writers: Sequence[Writer], inputs: bool = False) -> Iterator[None]:
    """Make passes of `model` stop where a writer's outputs have been added."""

    def wrote(place: int, _: nn.Module, args: Any, output: Tensor) -> None:
        passing = current_pass()
        if passing is not None:
            passing.notes[place] = {"shape": output.shape, "inputs": args[0] if inputs else None}

    def stop(at: tuple[str, str], values: Any) -> None:
        passing = current_pass()
        if passing is None:
            return
        for place in sorted(passing.notes):
            found = _stream(values, passing.notes[place]["shape"])
            if (writers[place].at, writers[place].shown) == at and found is not None:
                passing.notes[place]["sum"] = found
                passing.stop(place)
                del passing.notes[place]

    def before(at: tuple[str, str], _: nn.Module, args: Any, kwargs: Any) -> None:
        stop(at, (*args, *kwargs.values()))

    def after(at: tuple[str, str], _: nn.Module, __: Any, output: Any) -> None:
        stop(at, output)

    handles: list[Any] = []
    for place, writer in enumerate(writers):
        handles.append(model.get_submodule(writer.name).register_forward_hook(partial(wrote, place)))
    for at in dict.fromkeys((writer.at, writer.shown) for writer in writers):
        module = model.get_submodule(at[0])
        if at[1] == "inputs":
            handles.append(module.register_forward_pre_hook(partial(before, at), with_kwargs=True))
        else:
            handles.append(module.register_forward_hook(partial(after, at)))
    try:
        yield
    finally:
        _remove(handles)


def _solved(fit_of: _Fit, writer: Writer, layer: Any) -> tuple[Tensor | None, Tensor | None, Refitted]:
    """Return the change of a layer that held-back sequences like best, None for none, and what it makes."""
    held_back = fit_of.held_back
    best, change, shift = held_back.squared / held_back.count, None, None
    before, scale = best, max(fit_of.spread / held_back.count, 1e-30)
    for damping in DAMPINGS if before > ROUNDING**2 * scale else ():
        try:
            found = fit(fit_of.used, damping, layer.bias is not None)
        except ValueError:
            continue
        error = held_back.squared_error(*found)
        if error < best:
            best, (change, shift) = error, found
    without = fit_of.unfitted or before * held_back.count
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    if change is not None:
        turned = change if isinstance(layer, Conv1D) else change.mT
        weight = (weight.double().to(turned.device) + turned).to(weight)
        if bias is not None and shift is not None:
            bias = (bias.double().to(shift.device) + shift).to(bias)
    errors = (without / held_back.count / scale) ** 0.5, (best / scale) ** 0.5
    return change, shift, Refitted(RefitReport(writer.name, *errors, fit_of.used.count), weight, bias)


def _apply(notes: dict[str, Any], writer: Writer, change: Tensor | None, shift: Tensor | None) -> None:
    """Change the stream of one pass to what the refitted layer makes of it."""
    inputs, stream = notes["inputs"], notes["sum"]
    if change is None:
        return
    added = inputs.to(torch.float32) @ change.to(inputs.device, torch.float32)
    if shift is not None:
        added += shift.to(added)
    stream.add_((added * writer.gain.to(added)).to(stream.dtype).view(stream.shape))


def of_first_process(results: Sequence[Refitted]) -> list[Refitted]:
    """Return what the first of several processes has computed; all of them must call this with as many layers."""
    device = process_state().device
    sent: list[Refitted] = []
    for result in results:
        weight = broadcast(result.weight.to(device)).to(result.weight.device)
        bias = None if result.bias is None else broadcast(result.bias.to(device)).to(result.bias.device)
        sent.append(Refitted(result.report, weight, bias))
    return sent


@contextmanager
def refitted(model: PreTrainedModel, results: Sequence[Refitted]) -> Iterator[None]:
    """Give the model its refitted layers for a while."""
    layers = [model.get_submodule(result.report.name) for result in results]
    before = [(layer.weight, layer.bias) for layer in layers]
    install_refits(model, results)
    try:
        yield
    finally:
        for layer, (weight, bias) in zip(layers, before, strict=True):
            layer.weight, layer.bias = weight, bias


def install_refits(model: PreTrainedModel, results: Sequence[Refitted]) -> None:
    """Give the model its refitted layers, in place; parameters are replaced, so that those of others stay."""
    for result in results:
        layer: Any = model.get_submodule(result.report.name)
        layer.weight = nn.Parameter(result.weight, layer.weight.requires_grad)
        if result.bias is not None:
            layer.bias = nn.Parameter(result.bias, layer.bias.requires_grad)
