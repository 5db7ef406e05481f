r"""Refit the layers that write to the residual stream, in closed form, towards the dense model: no labels, no steps.

For each such layer y = W a + b (the output projection of attention, the second layer of a feed-forward block), in the
order of the forward pass,

$$\min_{W', b'}\ \mathbb{E}\,\|(h + y)_\text{dense} - (h' + W' a' + b')\|^2 + \lambda\,\|W' - W\|^2$$

where h is what y is added to, and ' marks the converted model, whose lower layers are refitted already. So each layer
also repairs what those below it lost.

The models run on all batches side by side: each forward pass waits in a thread at every layer to be refitted, and
then continues with the refitted layer. So the data pass through each model once, whatever its architecture.
"""

import ctypes
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import transformers_model
from collab_compress.attention.projections import width_in
from collab_compress.attention.values import fill_
from collab_compress.calibration import Batch, Calibration, calibration_batches, evaluation_mode, run_batch
from collab_compress.calibration.batches import is_divisible, sequence_count, slice_batch, token_count
from collab_compress.calibration.gather import batch_masks, masks_of, unpadded
from collab_compress.calibration.tokenization import sampled
from collab_compress.checkpoint import all_or_nothing
from collab_compress.conversion.drift import split_held_back
from collab_compress.conversion.feed_forward import FeedForward, cut_
from collab_compress.conversion.plan import Progress
from collab_compress.conversion.report import RefitReport
from collab_compress.conversion.writers import Writer, find_writers, probe_batch, stream_of, width_out
from collab_compress.distributed import process_state
from collab_compress.errors import CalibrationError, CollabCompressError, CompressionError, HeadError
from collab_compress.factorization.least_squares import ResidualMoments, choice_moments, choose_neurons, fit

DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0)  # shares of the inputs' mean variance, chosen by held-back data
ROUNDING = 1e-5  # relative error of the stream that is rounding alone
ROOM = 2 * 2**30  # bytes of hidden states to fit to, of both models together; a quarter more for those held back
MOST = 512  # batches to fit to: each has two threads
PASSES_PER_TRIM = 8  # forward passes that run between two calls of malloc_trim, which takes milliseconds

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refitted:
    """New weights of one layer, in its own layout and dtype."""

    report: RefitReport
    weight: Tensor
    bias: Tensor | None
    kept: Tensor | None = None  # neurons that it still reads, ascending; None for all


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
    is if none lowers that error. A feed-forward block keeps the neurons whose loss would cost most.

    Args:
        model: converted.
        dense: the model it was converted from; another object, which may share tensors.
        used: batches to fit to.
        held_back: batches to choose the damping and to measure errors on.
        progress: as for `refit_`.
        narrower: path of the second layer of a feed-forward block → number of neurons to keep.

    Raises:
        CalibrationError: there are no batches, or they take different ways through the model.
        HeadError: the dense model lacks a layer of the other, or has it in another width.
    """
    if not held_back:
        raise CalibrationError("refitting takes at least two sequences, one of them held back; pass more data")
    with evaluation_mode(model), evaluation_mode(dense):
        writers = find_writers(model, used[0])
        _check_same(writers, model, dense)
        held_back = _fit_memory(model, writers, held_back, ROOM // 4)
        unfitted = [] if narrower else held_back  # batches that run without any refit too
        used = _fit_memory(model, writers, used, ROOM)
        sequences = sum(map(sequence_count, used))
        release = _can_release(dense, writers, used[0])
        batches = [*used, *held_back]
        masks = [batch_masks(model, batch) for batch in batches]
        fits = [_Fit() for _ in writers]
        results: dict[int, Refitted] = {}

        def solve(place: int) -> "_Solution":
            _trim_memory()
            writer = writers[place]
            layer, neurons = model.get_submodule(writer.name), (narrower or {}).get(writer.name)
            solution = _solve(fits[place], writer, layer, neurons, sequences)
            results[place] = solution.result
            fits[place] = _Fit()  # gives its memory back
            return solution

        def refit_writer(place: int) -> None:
            writer, gathered = writers[place], fits[place]
            calls = [forward.calls[place] for forward in passes]
            targets = [forward.calls[place] for forward in dense_passes]
            for number, (call, target) in enumerate(zip(calls, targets, strict=True)):
                mask = masks_of(writer.site, masks[number]).query
                residuals, stream = _residuals(call, target, writer, mask)
                is_held_back = number >= len(used)
                moments = gathered.held_back if is_held_back else gathered.used
                moments.add(unpadded(call.inputs, mask), residuals)
                if is_held_back:
                    gathered.spread += float((stream - stream.mean(0)).square().sum())
                if is_held_back and unfitted:
                    if not writer.shared:
                        other = unfitted_passes[number - len(used)].calls[place]
                        residuals, _ = _residuals(other, target, writer, mask)
                    gathered.unfitted = (gathered.unfitted or 0.0) + float(residuals.square().sum())
            solution = None if writer.shared else solve(place)
            for call, target in zip(calls, targets, strict=True):
                if solution is None:  # other calls start from the dense stream, so that errors do not add up
                    call.stream.copy_(target.stream)
                else:
                    _apply(call, writer, solution)

        with (
            _stops_at(model, writers),
            _stops_at(dense, writers),
            _forward_passes(dense, batches, release) as dense_passes,
            _forward_passes(model, batches, release, keep_inputs=True) as passes,
            _forward_passes(model, unfitted, release) as unfitted_passes,
        ):
            all_passes = [*dense_passes, *passes, *unfitted_passes]
            while len(results) < len(writers) and (place := _advance(all_passes)) is not None:
                if progress is not None:
                    progress(writers[place].name, len(results), len(writers))
                refit_writer(place)
        for place, writer in enumerate(writers):
            if writer.shared and fits[place].used.count:
                solve(place)
    return [results[place] for place in sorted(results)]


@torch.inference_mode(False)
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
        model: converted, in any form.
        dense: the model it was converted from; another object, which may share tensors.
        tokenizer: of both; as for `compress`.
        calibration: texts, batches or others, as for `compress`; an eighth is held back to choose the damping.
        sequences: number of sequences; all texts by default.
        length: where texts are cut, or tokens of a random sequence.
        seed: of random tokens and samples.
        progress: called with a layer's name, how many are done, and how many there are.

    Returns:
        Errors of the residual stream after each layer, in the order of the forward pass.

    Raises:
        CalibrationError: the data are missing or unusable, or fewer than two sequences.
        HeadError: a model holds weights that are offloaded or not finite, or the two have different layers.
    """
    model, dense = transformers_model(model), transformers_model(dense)
    check_models(model, dense)
    batches = calibration_batches(calibration, dense, tokenizer, sequences=sequences, length=length, seed=seed)
    used, held_back = split_held_back(batches)
    results = refit(model, dense, used, held_back, progress)
    with all_or_nothing(model):
        install_refits(model, results)
    for note in notes_on(results, used):
        _logger.warning(note)
    return tuple(result.report for result in results)


def notes_on(results: Sequence[Refitted], used: Sequence[Batch]) -> tuple[str, ...]:
    """Return a note if `refit` fitted layers to some of the sequences only."""
    count = sum(map(sequence_count, used))
    fitted = results[0].report.sequences if results else count
    if fitted == count:
        return ()
    return (
        f"layers were refitted to {fitted} of {count} calibration sequences, drawn at random: they come in at most "
        f"{MOST} batches, and their hidden states take at most {ROOM / 2**30:g} GiB",
    )


def check_weights(weights: Iterable[tuple[str, Tensor]], error: type[CollabCompressError] = CompressionError) -> None:
    """Raise `error` for the first of the weights, given by their names, that is offloaded or not finite."""
    for name, weight in weights:
        if weight.is_meta:
            raise error(f"{name} is offloaded; load the model into memory")
        if not bool(torch.isfinite(weight).all()):
            raise error(f"{name} holds NaN or infinite values; the checkpoint is damaged")


def check_models(model: PreTrainedModel, dense: PreTrainedModel) -> None:
    """Raise HeadError if the converted or the dense model has weights that are offloaded or not finite."""
    for role, part in (("converted", model), ("dense", dense)):
        weights = ((f"{name} of the {role} model", weight) for name, weight in part.named_parameters())
        check_weights(weights, HeadError)


def _fit_memory(
    model: PreTrainedModel, writers: Sequence[Writer], batches: Sequence[Batch], room: int
) -> list[Batch]:
    """Return as many batches, drawn at random, as have hidden states that fit into `room` bytes; one at least.

    The number of sequences depends on their mean length, so that more of them never leave fewer.

    While a token waits at a writer, both models hold the embeddings, the inputs of the layer, what the writer adds to
    and the sum; the converted model holds the writer's inputs too.
    """
    layers: list[Any] = [model.get_submodule(writer.name) for writer in writers]
    numbers = max((width_in(layer) + 8 * width_out(layer) for layer in layers), default=1)  # for each token
    tokens = room // (numbers * model.dtype.itemsize)
    sequences = sum(map(sequence_count, batches))
    wanted = sequences * tokens // max(1, sum(map(token_count, batches)))
    if wanted >= sequences and len(batches) <= MOST:
        return list(batches)
    fitted: list[Batch] = []
    for batch in sampled(batches, MOST, seed=0):
        if not fitted or wanted > 0:
            fitted.append(slice_batch(batch, slice(max(1, wanted))) if is_divisible(batch) else batch)
        wanted -= sequence_count(batch)
    return fitted


def _check_same(writers: Sequence[Writer], model: PreTrainedModel, dense: PreTrainedModel) -> None:
    dense_modules = dict(dense.named_modules())
    for writer in writers:
        width, dense_width = width_out(model.get_submodule(writer.name)), width_out(dense_modules.get(writer.name))
        if width != dense_width:
            raise HeadError(
                f"{writer.name} has {width} outputs, and {dense_width or 'none'} in the dense model; pass the dense "
                "model that was converted"
            )


class _Pass:
    """A forward pass in a thread of its own, which a hook can stop; one pass runs at a time."""

    running = threading.local()

    def __init__(self, run: Callable[[], Any], release: bool, keep_inputs: bool) -> None:
        self.release = release  # whether to release what writers return, and what they read if it is not to be kept
        self.keep_inputs = keep_inputs
        self.place: int | None = None  # of the writer at which the pass waits; None when it is done
        self.calls: dict[int, _Call] = {}  # the latest of each writer
        self.pending: set[int] = set()  # writers whose outputs are not added yet
        self._run = run
        self._error: BaseException | None = None
        self._ended = self._done = False
        self._may_run, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._target, daemon=True)

    def _target(self) -> None:
        _Pass.running.current = self
        self._may_run.acquire()
        try:
            if not self._ended:
                self._run()
        except _Ended:
            pass
        except BaseException as error:  # raised again by `go_on`
            self._error = error
        self.place, self._done = None, True
        self._waits.release()

    def go_on(self) -> None:
        """Run to the next stop or to the end; raise what the forward pass raises."""
        if self._done:
            return
        if self._thread.ident is None:
            self._thread.start()
        self._may_run.release()
        self._waits.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def stop(self, place: int) -> None:
        """Wait, in the thread of the pass, until it is to go on."""
        self.place = place
        self._waits.release()
        self._may_run.acquire()
        if self._ended:
            raise _Ended

    def end(self) -> None:
        """End the pass where it waits."""
        self._ended = True
        if self._thread.ident is not None:
            self._may_run.release()
            self._thread.join()


class _Ended(BaseException):
    """Raised in a pass that is to end."""


@dataclass
class _Call:
    """One call of a writer: its outputs, its inputs if kept, and the stream that the outputs were added to."""

    outputs: Tensor
    inputs: Any
    stream: Any = None


def _current_pass() -> _Pass | None:
    return getattr(_Pass.running, "current", None)


@contextmanager
def _forward_passes(
    model: PreTrainedModel, batches: Sequence[Batch], release: bool, keep_inputs: bool = False
) -> Iterator[list[_Pass]]:
    """Yield a forward pass for each batch, not begun yet, and end them all afterwards."""

    def run(batch: Batch) -> None:
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
            run_batch(model, batch)

    passes = [_Pass(partial(run, batch), release, keep_inputs) for batch in batches]
    try:
        yield passes
    finally:
        for forward in passes:
            forward.end()


def _advance(passes: Sequence[_Pass]) -> int | None:
    """Run all passes to their next stop, one after the other, and return which writer that is; None at the end."""
    for number, forward in enumerate(passes):
        forward.go_on()
        if number % PASSES_PER_TRIM == 0:
            _trim_memory()
    _trim_memory()
    places = {forward.place for forward in passes}
    if len(places) != 1:
        raise CalibrationError("batches take different ways through the model; pass batches of one kind")
    return places.pop()


def _trim_memory() -> None:
    """Return freed memory to the system; glibc keeps as much as the hidden states of many threads."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in musl
        if trim is not None:
            trim(0)


def _release_(tensor: Tensor) -> None:
    """Free the memory of a tensor that the frames of a waiting pass hold, and that nothing reads again."""
    tensor.data = tensor.new_empty(0)


def _can_release(model: PreTrainedModel, writers: Sequence[Writer], batch: Batch) -> bool:
    """Return whether a pass runs if it releases tensors, which MobileBERT's bottlenecks would read again."""
    with _stops_at(model, writers), _forward_passes(model, [probe_batch(batch)], release=True) as passes:
        try:
            while _advance(passes) is not None:
                pass
        except CalibrationError:
            return False
    return True


@contextmanager
def _stops_at(model: PreTrainedModel, writers: Sequence[Writer]) -> Iterator[None]:
    """Make passes of `model` stop where a writer's outputs have been added."""

    def on_call(place: int, _: nn.Module, args: Any, output: Tensor) -> None:
        current = _current_pass()
        if current is None:
            return
        current.calls[place] = _Call(output, args[0] if current.keep_inputs else None)
        current.pending.add(place)
        if current.release and not current.keep_inputs and args[0].shape[-1] > output.shape[-1]:  # not the stream
            _release_(args[0])

    def on_stream(at: tuple[str, str], values: Any) -> None:
        current = _current_pass()
        if current is None:
            return
        for place in sorted(current.pending):
            call = current.calls[place]
            stream = stream_of(values, call.outputs.shape)
            if (writers[place].at, writers[place].shown) == at and stream is not None:
                call.stream = stream
                if current.release and call.outputs.data_ptr() != stream.data_ptr():
                    _release_(call.outputs)
                current.pending.remove(place)
                current.stop(place)
                del current.calls[place]

    def on_inputs(at: tuple[str, str], _: nn.Module, args: Any, kwargs: Any) -> None:
        on_stream(at, (*args, *kwargs.values()))

    def on_outputs(at: tuple[str, str], _: nn.Module, __: Any, output: Any) -> None:
        on_stream(at, output)

    with ExitStack() as hooks:
        for place, writer in enumerate(writers):
            layer = model.get_submodule(writer.name)
            hooks.enter_context(layer.register_forward_hook(partial(on_call, place)))
        for at in dict.fromkeys((writer.at, writer.shown) for writer in writers):
            module = model.get_submodule(at[0])
            if at[1] == "inputs":
                hooks.enter_context(module.register_forward_pre_hook(partial(on_inputs, at), with_kwargs=True))
            else:
                hooks.enter_context(module.register_forward_hook(partial(on_outputs, at)))
        yield


@dataclass
class _Fit:
    """What is gathered for one layer."""

    used: ResidualMoments = field(default_factory=ResidualMoments)  # of the sequences to fit to
    held_back: ResidualMoments = field(default_factory=ResidualMoments)
    unfitted: float | None = None  # squared error on the held-back sequences if no layer is refitted
    spread: float = 0.0  # of the dense stream on the held-back sequences, Σ‖x − mean‖²


def _residuals(call: _Call, target: _Call, writer: Writer, mask: Tensor | None) -> list[Tensor]:
    """Return what the stream lacks, and the dense stream, (n, D), without padding.

    Both are divided by the gain, so that they are in the units of the layer's outputs.
    """
    stream = target.stream.reshape(-1, target.stream.shape[-1]).float()
    converted = call.stream.reshape(-1, call.stream.shape[-1]).float()
    gain = torch.where(writer.gain == 0, torch.inf, writer.gain).to(stream)
    return [unpadded(value, mask) for value in ((stream - converted) / gain, stream / gain)]


class _Solution(NamedTuple):
    """The change of a layer, None for no change, and its new weights."""

    change: Tensor | None  # Δᵀ (N, D)
    shift: Tensor | None  # δ (D,)
    result: Refitted


def _solve(gathered: _Fit, writer: Writer, layer: Any, neurons: int | None, sequences: int) -> _Solution:
    """Fit a layer with the damping that has the smallest error on held-back sequences.

    It reads all its inputs, and then may stay as it is, or keeps as many neurons as given.
    """
    used, held_back, biased = gathered.used, gathered.held_back, layer.bias is not None
    if not held_back.count:
        raise CalibrationError(
            f"{writer.name} saw no token of the sequences held back, which are padding alone; pass more data"
        )
    weight = layer.weight.detach() if isinstance(layer, Conv1D) else layer.weight.detach().mT  # (N, D)
    exact = weight.to(used.place, torch.float64)
    before, scale = held_back.squared / held_back.count, max(gathered.spread / held_back.count, 1e-30)
    kept, best = None, before
    if neurons is not None:
        try:
            kept = choose_neurons(*choice_moments(used, exact, writer.gain, DAMPINGS[0], biased), neurons)
        except ValueError as error:
            raise CalibrationError(f"{writer.name}: {error}") from error
        best = torch.inf
        used, held_back = used.narrowed(exact, kept), held_back.narrowed(exact, kept)
    change, shift = None, None
    for damping in DAMPINGS if kept is not None or before > ROUNDING**2 * scale else ():
        try:
            candidate = fit(used, damping, biased)
        except ValueError:
            continue
        candidate_error = held_back.squared_error(*candidate)
        if candidate_error < best:
            best, (change, shift) = candidate_error, candidate
    if kept is not None:
        if change is None:
            raise CalibrationError(f"{writer.name}: the data cannot say which neurons to keep; pass more of them")
        change = (-exact).index_copy(0, kept, change)
    bias = layer.bias.detach() if biased else None
    if change is not None:
        weight = (exact + change).to(weight)
        if bias is not None and shift is not None:
            bias = (bias.to(shift) + shift).to(bias)
    if kept is not None:
        weight = weight[kept.to(weight.device)]
    weight = (weight if isinstance(layer, Conv1D) else weight.mT).contiguous()
    unfitted = gathered.unfitted
    report = RefitReport(
        name=writer.name,
        error_before=None if unfitted is None else (unfitted / held_back.count / scale) ** 0.5,
        error_after=(best / scale) ** 0.5,
        vectors=gathered.used.count,
        sequences=sequences,
    )
    return _Solution(change, shift, Refitted(report, weight, bias, kept))


def _apply(call: _Call, writer: Writer, solution: _Solution) -> None:
    """Change the stream of one pass, in place, to that of the refitted layer."""
    if solution.change is None:
        return
    added = call.inputs.to(torch.float32) @ solution.change.to(call.inputs.device, torch.float32)
    if solution.shift is not None:
        added += solution.shift.to(added)
    call.stream.add_((added * writer.gain.to(added)).to(call.stream.dtype).view(call.stream.shape))


def of_first_process(results: Sequence[Refitted]) -> list[Refitted]:
    """Return the results of the first of several processes; all must call this with as many layers."""
    device = process_state().device

    def sent(tensor: Tensor | None) -> Any:
        return None if tensor is None else broadcast(tensor.to(device)).to(tensor.device)

    return [Refitted(result.report, sent(result.weight), sent(result.bias), sent(result.kept)) for result in results]


def install_refits(model: PreTrainedModel, results: Sequence[Refitted], blocks: Sequence[FeedForward] = ()) -> None:
    """Install refitted layers in place, in narrower blocks if results keep some neurons only.

    Parameters are replaced, so that models that share them keep theirs.
    """
    by_name = {block.down: block for block in blocks}
    for result in results:
        layer: Any = model.get_submodule(result.report.name)
        if result.kept is not None:
            cut_(model, by_name[result.report.name], result.kept)
        bias = None if result.bias is None else nn.Parameter(result.bias, layer.bias.requires_grad)
        fill_(layer, nn.Parameter(result.weight, layer.weight.requires_grad), bias)
