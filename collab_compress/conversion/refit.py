r"""Refit the layers that write to the residual stream, in closed form, towards the dense model: no labels, no steps.

For each such layer y = W a + b (the output projection of attention, the second layer of a feed-forward block), in the
order of the forward pass,

$$\min_{W', b'}\ \mathbb{E}\,\|(h + y)_\text{dense} - (h' + W' a' + b')\|^2 + \lambda\,\|W' - W\|^2$$

where h is what y is added to, and ' marks the converted model, whose lower layers are refitted already. So each layer
also repairs what those below it lost.
"""

import ctypes
import sys
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

from collab_compress.architectures import transformers_model
from collab_compress.attention.projections import width_in
from collab_compress.attention.values import fill_
from collab_compress.calibration import Batch, Calibration, calibration_batches, evaluation_mode, run_batch
from collab_compress.calibration.batches import token_count
from collab_compress.calibration.gather import batch_masks, masks_of, unpadded
from collab_compress.calibration.stepwise import Passes, current_pass
from collab_compress.conversion.drift import split_held_back
from collab_compress.conversion.feed_forward import FeedForward, cut_
from collab_compress.conversion.report import RefitReport
from collab_compress.conversion.writers import Writer, find_writers, remove_hooks, stream_of, width_out
from collab_compress.distributed import process_state
from collab_compress.errors import CalibrationError, HeadError
from collab_compress.factorization.least_squares import ResidualMoments, choice_moments, choose_neurons, fit

Progress = Callable[[str, int, int], None]
DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0)  # shares of the inputs' mean variance, of which held-back data choose
ROUNDING = 1e-5  # relative error of the stream that is none
ROOM = 2 * 2**30  # bytes that hidden states of both models may take together


@dataclass(frozen=True)
class Refitted:
    """New weights of one layer, and what they change.

    Args:
        report: path of the layer, errors, vectors.
        weight: in the layer's own layout and dtype.
        bias: likewise, or None where the layer has none.
        kept: neurons that it goes on reading, in ascending order; None for all.
    """

    report: RefitReport
    weight: Tensor
    bias: Tensor | None
    kept: Tensor | None = None


class _Solution(NamedTuple):
    """What comes of fitting a layer: its change Δᵀ (N, D) and δ (D,), None for none, and what it becomes."""

    change: Tensor | None
    shift: Tensor | None
    result: Refitted


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
        values = (here["inputs"], (stream - own) / gain, stream / gain)
        return cls(*(unpadded(value, mask) for value in values))


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
    *,
    narrower: Mapping[str, int] | None = None,
) -> list[Refitted]:
    """Compute new weights for the layers that write to the residual stream; neither model is changed.

    Each layer is fitted with the damping that leaves the smallest error on the held-back sequences, and stays as it
    is where none makes that smaller than it was. Of the neurons that the second layer of a feed-forward block reads,
    those are kept whose loss would cost most.

    Args:
        model: converted.
        dense: what it was converted from; another object, which may share tensors.
        used: batches to fit to.
        held_back: batches to choose the damping and to measure errors on.
        progress: called with a layer's name, how many are done, and how many there are.
        narrower: path of the second layer of a feed-forward block → how many neurons to keep.

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
        counts = narrower or {}
        with (
            _stopping(model, writers, inputs=True),
            _stopping(dense, writers),
            Passes([partial(_run, dense, batch) for batch in batches[:last]]) as targets,
            Passes([partial(_run, model, batch) for batch in batches]) as passes,
        ):
            while True:
                places = {*targets.go_on(), *passes.go_on()}
                _give_back()
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
                    solution = _solved(fits[place], writer, layer, counts.get(writer.name))
                    results[place] = solution.result
                    for here, _ in notes[:last]:
                        _apply(here, writer, solution.change, solution.shift)
                    fits[place] = _Fit()
        for place, writer in enumerate(writers):
            if writer.shared and fits[place].used.count:
                layer = model.get_submodule(writer.name)
                results[place] = _solved(fits[place], writer, layer, counts.get(writer.name)).result
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
    for role, part in (("converted", model), ("dense", dense)):
        check_finite(part, role)
    batches = calibration_batches(calibration, dense, tokenizer, sequences=sequences, length=length, seed=seed)
    results = refit(model, dense, *split_held_back(batches), progress)
    install_refits(model, results)
    return tuple(result.report for result in results)


def check_finite(model: PreTrainedModel, role: str) -> None:
    """Raise HeadError where the converted or the dense model, as `role` says, has values that are not finite."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise HeadError(f"{name} of the {role} model holds NaN or infinite values; load it again")


def _that_fit(model: PreTrainedModel, writers: Sequence[Writer], batches: Sequence[Batch]) -> list[Batch]:
    """Return as many batches, evenly spaced, as have room for their hidden states in both models."""
    layers: list[Any] = [model.get_submodule(writer.name) for writer in writers]
    numbers = max((width_in(layer) + 4 * width_out(layer) for layer in layers), default=1)
    vectors = [token_count(batch) for batch in batches]
    most = ROOM / (2 * numbers * model.dtype.itemsize)
    step = max(1, -(-sum(vectors) // int(max(most, max(vectors)))))
    return list(batches[::step])


def _check_same(writers: Sequence[Writer], model: PreTrainedModel, dense: PreTrainedModel) -> None:
    theirs = dict(dense.named_modules())
    for writer in writers:
        layer, other = model.get_submodule(writer.name), theirs.get(writer.name)
        if width_out(layer) != width_out(other):
            raise HeadError(
                f"{writer.name} has {width_out(layer)} outputs, and {width_out(other) or 'none'} in the dense "
                "model; pass the dense model that was converted"
            )


def _give_back() -> None:
    """Give memory that was freed to the system: of hidden states in many threads glibc would keep as much again."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in musl
        if trim is not None:
            trim(0)


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
            found = stream_of(values, passing.notes[place]["shape"])
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
        remove_hooks(handles)


def _solved(fit_of: _Fit, writer: Writer, layer: Any, count: int | None = None) -> _Solution:
    """Fit a layer with the damping that held-back sequences like best.

    Args:
        fit_of: what was gathered of it.
        writer: the layer's place.
        layer: the layer itself.
        count: how many of its inputs it is to go on reading; all if not given, and then it may stay as it is.
    """
    used, held_back, biased = fit_of.used, fit_of.held_back, layer.bias is not None
    weight = layer.weight.detach() if isinstance(layer, Conv1D) else layer.weight.detach().mT  # (N, D)
    before, scale = held_back.squared / held_back.count, max(fit_of.spread / held_back.count, 1e-30)
    exact = weight.to(used.place, torch.float64)
    kept, best = None, before
    if count is not None:
        kept, best = _kept(used, exact, writer, biased, count), torch.inf
        used, held_back = used.narrowed(exact, kept), held_back.narrowed(exact, kept)
    change, shift = None, None
    for damping in DAMPINGS if kept is not None or before > ROUNDING**2 * scale else ():
        try:
            found = fit(used, damping, biased)
        except ValueError:
            continue
        error = held_back.squared_error(*found)
        if error < best:
            best, (change, shift) = error, found
    if kept is not None and change is None:
        raise CalibrationError(f"{writer.name}: the data cannot say which neurons to keep; pass more of them")
    if kept is not None and change is not None:
        change = (-exact).index_copy(0, kept, change)
    bias = layer.bias.detach() if biased else None
    if change is not None:
        weight = (exact + change).to(weight)
        if bias is not None and shift is not None:
            bias = (bias.to(shift) + shift).to(bias)
    if kept is not None:
        weight = weight[kept.to(weight.device)]
    weight = (weight if isinstance(layer, Conv1D) else weight.mT).contiguous()
    without = before * held_back.count if writer.shared else fit_of.unfitted
    errors = (without / held_back.count / scale) ** 0.5, (best / scale) ** 0.5
    report = RefitReport(writer.name, *errors, fit_of.used.count)
    return _Solution(change, shift, Refitted(report, weight, bias, kept))


def _kept(moments: ResidualMoments, weight: Tensor, writer: Writer, biased: bool, count: int) -> Tensor:
    """Choose which inputs a layer goes on reading, by what its outputs add to the stream."""
    try:
        return choose_neurons(*choice_moments(moments, weight, writer.gain, DAMPINGS[0], biased), count)
    except ValueError as error:
        raise CalibrationError(f"{writer.name}: {error}") from error


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
        kept = None if result.kept is None else broadcast(result.kept.to(device)).to(result.kept.device)
        sent.append(Refitted(result.report, weight, bias, kept))
    return sent


@contextmanager
def refitted(
    model: PreTrainedModel, results: Sequence[Refitted], blocks: Sequence[FeedForward] = ()
) -> Iterator[None]:
    """Give the model its refitted layers for a while."""
    names = [*(result.report.name for result in results), *(name for block in blocks for name in block.ups)]
    layers: list[Any] = [model.get_submodule(name) for name in names]
    before = [dict(layer.__dict__, _parameters=dict(layer._parameters)) for layer in layers]
    install_refits(model, results, blocks)
    try:
        yield
    finally:
        for layer, state in zip(layers, before, strict=True):
            layer.__dict__.update(state)


def install_refits(model: PreTrainedModel, results: Sequence[Refitted], blocks: Sequence[FeedForward] = ()) -> None:
    """Give the model its refitted layers, in place; parameters are replaced, so that those of others stay.

    Args:
        model: the model.
        results: what its layers become.
        blocks: feed-forward blocks, of which those get narrower that a result keeps some neurons of.
    """
    by_name = {block.down: block for block in blocks}
    for result in results:
        layer: Any = model.get_submodule(result.report.name)
        if result.kept is not None:
            cut_(model, by_name[result.report.name], result.kept)
        bias = None if result.bias is None else nn.Parameter(result.bias, layer.bias.requires_grad)
        fill_(layer, nn.Parameter(result.weight, layer.weight.requires_grad), bias)
