"""Convert a model one numbered layer after the other, on all calibration data.

For each layer, the dense one runs on the hidden states that the dense model has there. From the inputs of its
projections follow its new scores and values. Then what it adds to the residual stream is refitted (`fit`) on the
hidden states that the converted model has there, so that each layer also repairs what those below it lost. Hidden
states of both models then move on to the next layer.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_compress.architectures import AttentionSite, DenseSite
from collab_compress.attention import install_
from collab_compress.calibration import Batch, gather_moments
from collab_compress.calibration.batches import evenly_spaced, in_parts, sequence_count
from collab_compress.calibration.gather import InputMoments, batch_masks, masks_of, unpadded
from collab_compress.conversion.chain import (
    LayerCall,
    Room,
    by_layer,
    capture,
    layer_of,
    numbered_layers,
    plain_stack,
    undivided,
)
from collab_compress.conversion.feed_forward import FeedForward
from collab_compress.conversion.fit import Fit, Refitted, as_read, install_refits, solve
from collab_compress.conversion.maps import (
    ENOUGH,
    RUNNING,
    HeadWeights,
    Planned,
    Progress,
    SiteMoments,
    Task,
    head_weights,
    replacement,
    silent,
)
from collab_compress.conversion.writers import Writer, stream_of
from collab_compress.devices import float64_device
from collab_compress.errors import CalibrationError, UnsupportedModelError
from collab_compress.factorization.least_squares import ResidualMoments
from collab_compress.factorization.narrowing import CONSTANT

NONE: Mapping[str, ResidualMoments] = {}


class Gathered(NamedTuple):
    """What the dense model's attention maps are converted by.

    Args:
        moments: for each task, of the inputs of its projections; None for one that needs none.
        head_weights: path of a module → weight of each head's score error, (H,).
        mean_squares: path of a module → mean of the squares of these weights, before they are normalised.
    """

    moments: Sequence[SiteMoments]
    head_weights: Mapping[str, Tensor | None] = {}
    mean_squares: Mapping[str, float] = {}


@dataclass(frozen=True)
class Parts:
    """What of a model is to be converted.

    Args:
        tasks: attention maps.
        writers: layers to refit, in the order of calls; none to refit nothing.
        blocks: feed-forward blocks to make narrower.
        dff: number of neurons that those keep.
        removed: paths of layers that the converted model lacks.
        targets: path of the last writer before a gap → the writer to whose dense stream it is fitted.
        in_layers: whether the model's numbered layers can be called alone (`single_layers`).
    """

    tasks: Sequence[Task] = ()
    writers: Sequence[Writer] = ()
    blocks: Sequence[FeedForward] = ()
    dff: int = 0
    removed: Collection[str] = ()
    targets: Mapping[str, Writer] = field(default_factory=dict)
    in_layers: bool = True


@torch.no_grad()
def convert_layers_(
    converted: PreTrainedModel,
    dense: PreTrainedModel,
    parts: Parts,
    used: Sequence[Batch],
    held_back: Sequence[Batch],
    *,
    same_inputs: bool = True,
    length: int = 128,
    progress: Progress = silent,
) -> tuple[list[Planned], list[Refitted]]:
    """Convert the layers of a model in place; return the maps, in the order of `parts.tasks`, and the refits.

    Args:
        converted: a copy of the dense model, without the removed layers, or a converted one that is only to be
            refitted.
        dense: the dense model; another object, which may share tensors.
        parts: what is to be converted.
        used: batches to fit to.
        held_back: batches to choose dampings and to measure errors on.
        same_inputs: whether what lies before the first layer is the same in both models.
        length: tokens for which reports count multiply-accumulates.
        progress: called with what is being done, how many layers are done, and how many there are, or None.

    Raises:
        CalibrationError: batches take different ways through the model, or a module saw no token.
        CompressionError: a map cannot be decomposed.
    """
    used, held_back = in_parts(used), in_parts(held_back)
    planned: dict[tuple[str, type], Planned] = {}
    refits: list[Refitted] = []

    def replace_maps(tasks: Sequence[Task], gathered: Gathered) -> None:
        for task, moments in zip(tasks, gathered.moments, strict=True):
            item = replacement(task, moments, gathered.head_weights.get(task.site.name), length)
            planned[task.site.name, type(task.site)] = item
            install_maps_(converted, [item])

    exact = [task for task in parts.tasks if task.is_exact]
    replace_maps(exact, Gathered([None] * len(exact)))
    tasks = [task for task in parts.tasks if not task.is_exact]
    with undivided(dense), undivided(converted), Room() as room:
        states = States(dense, converted, room, parts.removed)
        if parts.in_layers and (tasks or parts.writers):
            progress(RUNNING, 0, None)
            states.capture(used, held_back if parts.writers else [])
        layers = states.layers
        elsewhere = [task for task in tasks if layer_of(task.site.name) not in layers]
        if elsewhere:
            progress(f"fitting {', '.join(task.site.name for task in elsewhere)}", 0, None)
            moments = gather_moments(dense, [task.site for task in elsewhere], used)
            replace_maps(elsewhere, Gathered(moments, head_weights(dense, _weighed(elsewhere), used)))
        for done, layer in enumerate(layers):
            progress(f"fitting {layer}", done, len(layers))
            stays = layer not in parts.removed
            if not stays and states.reached > states.layers[layer].start:  # the gap is crossed already
                continue
            states.enter(layer, same_inputs)
            of_layer = [task for task in tasks if layer_of(task.site.name) == layer]
            writers = [writer for writer in parts.writers if writer.layer == layer and stays]
            gathered = states.run_dense(of_layer, writers)
            states.cross_gap(writers, parts.targets)
            replace_maps(of_layer, gathered)
            for writer in writers:
                neurons = parts.dff if writer.name in {block.down for block in parts.blocks} else None
                module: Any = converted.get_submodule(writer.name)
                refits.append(solve(states.fit(writer), writer, module, neurons, states.sequences))
                install_refits(converted, refits[-1:], parts.blocks)
            if parts.writers and stays:
                states.run_converted()
        progress("fitted all layers", len(layers), len(layers))
    return [planned[task.site.name, type(task.site)] for task in parts.tasks], refits


def install_maps_(model: PreTrainedModel, planned: Sequence[Planned]) -> None:
    """Install replacements of attention maps in a model or in its copy, in place."""
    for item in planned:
        name = item.site.name
        install_(model.get_submodule(name), item.map, item.layers, model.get_submodule(name.rpartition(".")[0]))


def _weighed(tasks: Sequence[Task]) -> list[AttentionSite]:
    """Return the modules whose score errors are weighted by head."""
    return [task.site for task in tasks if isinstance(task.site, DenseSite) and not task.is_exact]


class States:
    """The hidden states of both models on all batches, before one of their layers.

    A layer that is called several times in turn (ALBERT) is entered once. What is fitted to each of its calls then
    starts from the dense model's hidden states, so that errors do not add up.

    Args:
        dense: the dense model.
        converted: the converted model.
        room: where hidden states are kept.
        removed: paths of layers that the converted model lacks.
    """

    def __init__(
        self, dense: PreTrainedModel, converted: PreTrainedModel, room: Room, removed: Collection[str] = ()
    ) -> None:
        self.dense, self.converted, self.keep, self.removed = dense, converted, room.keep, removed
        self.layers: Mapping[str, range] = {}
        self.reached = 0  # number of calls that the dense model has made

    def capture(self, used: Sequence[Batch], held_back: Sequence[Batch]) -> None:
        """Run the dense model on all batches, and keep the calls of its layers."""
        self.batches, self.used = [*used, *held_back], range(len(used))
        self.sequences = sum(map(sequence_count, used))
        self.masks = [batch_masks(self.dense, batch) for batch in self.batches]
        self._numbered = numbered_layers(self.dense)
        self._plain = plain_stack(self.dense, self._numbered, self.batches[0])
        self.calls = self.converted_calls = self._captured(self.dense)
        self.layers = by_layer(self.calls[0])

    def _captured(self, model: PreTrainedModel) -> list[list[LayerCall]]:
        numbered = self._numbered if model is self.dense else [n for n in self._numbered if n not in self.removed]
        calls = [capture(model, numbered, batch, self.keep, self._plain) for batch in self.batches]
        if len({tuple(call.name for call in of_batch) for of_batch in calls}) > 1:
            raise CalibrationError("batches take different ways through the model; pass batches of one kind")
        return calls

    def enter(self, layer: str, same_inputs: bool) -> None:
        """Go on to a layer. Where it begins a stack, both models run up to there."""
        self.places = self.layers[layer]
        first = self.places.start
        if self.calls[0][first].hidden is None:
            return
        if first or not same_inputs:
            captured = [iter(calls) for calls in self._captured(self.converted)]
            self.converted_calls = [  # by the same numbers; those of removed layers are never made
                [call if self._is_removed(number) else next(others) for number, call in enumerate(calls)]
                for calls, others in zip(self.calls, captured, strict=True)
            ]
            kept = next(number for number in range(first, len(self.calls[0])) if not self._is_removed(number))
            self.converted_hidden = _read_by(self.converted_calls, kept)
        else:
            self.converted_hidden = _read_by(self.calls, first)
        self.hidden = _read_by(self.calls, first)

    def _is_removed(self, number: int) -> bool:
        return self.calls[0][number].name in self.removed

    def run_dense(
        self, tasks: Sequence[Task], writers: Sequence[Writer], neurons: Mapping[str, ResidualMoments] = NONE
    ) -> Gathered:
        """Run the dense layer on all batches; gather what its maps need, and keep the stream after each writer.

        Of a layer that is called several times, what each call reads is kept too.

        Args:
            tasks: maps of the layer.
            writers: of the layer.
            neurons: path of a writer → moments of its inputs, to which those are added.
        """
        self.reached, self.across = self.places.stop, set[str]()
        gathered = InputMoments([task.site for task in tasks])
        self.inputs: list[list[Tensor]] = [[] for _ in self.batches]
        self.targets: list[list[dict[str, Tensor]]] = [[] for _ in self.batches]
        sites = _weighed(tasks)
        weighed = evenly_spaced(self.used, max(1, len(self.used) * ENOUGH // self.sequences)) if sites else []
        with written_by(self.dense, writers) as written:

            def run(number: int) -> None:
                for place in self.places:
                    if len(self.places) > 1:
                        self.inputs[number].append(self.hidden[number])
                    output = self.calls[number][place].run(self.dense, self.hidden[number])
                    self.targets[number].append({name: self.keep(call.stream) for name, call in written.items()})
                    for writer in writers:
                        if writer.name in neurons and number in self.used:
                            mask = masks_of(writer.site, self.masks[number]).query
                            inputs = unpadded(written[writer.name].inputs, mask)
                            neurons[writer.name].add(inputs, inputs.new_zeros(len(inputs), len(writer.gain)))
                    written.clear()
                    self.hidden[number] = self.keep(output)

            with gathered:
                with HeadWeights(sites) as weights:
                    for number in weighed:
                        gathered.masks = weights.masks = self.masks[number]
                        run(number)
                for number in self.used:
                    if number not in weighed:
                        gathered.masks = self.masks[number]
                        run(number)
            for number in range(len(self.used), len(self.batches)):
                run(number)
        return Gathered(gathered.moments(), weights.weights(), weights.mean_squares())

    def cross_gap(self, writers: Sequence[Writer], targets: Mapping[str, Writer]) -> None:
        """Run the dense layers behind the one that is entered which the converted model lacks.

        A writer among the keys of `targets` is then to be fitted to the dense stream after that other one.
        """
        while self.reached < len(self.calls[0]):
            call, stack = self.calls[0][self.reached], self.calls[0][self.places.start].name.rpartition(".")[0]
            if not self._is_removed(self.reached) or call.name.rpartition(".")[0] != stack:
                return
            across = {writer.name: targets[writer.name] for writer in writers if writer.name in targets}
            here = {name: target for name, target in across.items() if target.layer == call.name}
            self.across |= here.keys()
            with written_by(self.dense, list(here.values())) as written:
                for number, calls in enumerate(self.calls):
                    self.hidden[number] = self.keep(calls[self.reached].run(self.dense, self.hidden[number]))
                    for name, target in here.items():
                        self.targets[number][-1][name] = self.keep(written.pop(target.name).stream)
            self.reached += 1

    def variance(self, writer: Writer) -> float:
        """Return the variance of the dense residual stream after a writer, E‖x − mean‖²; 0 where it is rounding."""
        total, squares, count = torch.zeros((), device="cpu"), 0.0, 0
        for number, masks in enumerate(self.masks):
            for streams in self.targets[number]:
                stream = unpadded(streams[writer.name], masks_of(writer.site, masks).query)
                stream = stream.to(float64_device(stream.device), torch.float64)
                total = total + stream.sum(0)
                squares += float(stream.square().sum())
                count += len(stream)
        variance = squares / count - float((total / count).square().sum())
        return variance if variance > CONSTANT * squares / count else 0.0

    def fit(self, writer: Writer) -> Fit:
        """Run the converted layer on all batches up to a writer, and gather what it is to be fitted to."""
        gathered = Fit()
        with written_by(self.converted, [writer], stop=True) as written:
            for number, masks in enumerate(self.masks):
                mask = masks_of(writer.site, masks).query
                starts = self.inputs[number] or [self.converted_hidden[number]]
                for place, start, targets in zip(self.places, starts, self.targets[number], strict=True):
                    with suppress(_Written):
                        self.converted_calls[number][place].run(self.converted, start)
                    if writer.name not in written or writer.name not in targets:
                        raise CalibrationError(f"{writer.name} is not called with every batch; pass batches alike")
                    call, target = written.pop(writer.name), targets[writer.name]
                    if writer.name in self.across:
                        target = as_read(self.converted, writer, call.stream, target)
                    gathered.add(call.inputs, call.stream, target, writer, mask, number in self.used)
        return gathered

    def run_converted(self) -> None:
        """Run the converted layer on all batches, unless nothing reads what it returns."""
        if self.reached == len(self.calls[0]) or self.calls[0][self.reached].hidden is not None:
            return
        for number, calls in enumerate(self.converted_calls):
            hidden = self.converted_hidden[number]
            for place in self.places:
                hidden = calls[place].run(self.converted, hidden)
            self.converted_hidden[number] = self.keep(hidden)


def _read_by(calls: list[list[LayerCall]], number: int) -> list[Tensor]:
    """Return the hidden states that the first layer of a stack read on each batch."""
    read = [of_batch[number].hidden for of_batch in calls]
    return [hidden for hidden in read if hidden is not None]


class WriterCall(NamedTuple):
    """One call of a writer: its inputs (B, T, N), and the residual stream (B, T, D) after it."""

    inputs: Tensor
    stream: Tensor


class _Written(Exception):
    """Raised in a layer when its writer has written."""


@contextmanager
def written_by(
    model: PreTrainedModel, writers: Sequence[Writer], stop: bool = False
) -> Iterator[dict[str, WriterCall]]:
    """Record the call of each writer by its path; stop the layer after the last of them, if asked for.

    Raises:
        UnsupportedModelError: a writer is called again before its call has been taken.
    """
    calls: dict[str, WriterCall] = {}
    pending: dict[str, tuple[Tensor, Tensor]] = {}  # inputs and outputs of writers whose outputs are not added yet

    def on_call(name: str, _: nn.Module, args: Any, output: Tensor) -> None:
        if name in calls or name in pending:
            raise UnsupportedModelError(f"{name} is called several times in its layer, so it cannot be refitted")
        pending[name] = args[0], output

    def on_stream(at: tuple[str, str], values: object) -> None:
        for writer in writers:
            if (writer.at, writer.shown) != at or writer.name not in pending:
                continue
            inputs, output = pending[writer.name]
            stream = stream_of(values, output.shape)
            if stream is not None:
                del pending[writer.name]
                calls[writer.name] = WriterCall(inputs, stream.clone())
        if stop and len(calls) == len(writers):
            raise _Written

    def on_inputs(at: tuple[str, str], _: nn.Module, args: Any, kwargs: Any) -> None:
        on_stream(at, (*args, *kwargs.values()))

    def on_outputs(at: tuple[str, str], _: nn.Module, __: Any, output: object) -> None:
        on_stream(at, output)

    with ExitStack() as hooks:
        for writer in writers:
            layer = model.get_submodule(writer.name)
            hooks.enter_context(layer.register_forward_hook(partial(on_call, writer.name)))
        for at in dict.fromkeys((writer.at, writer.shown) for writer in writers):
            module = model.get_submodule(at[0])
            if at[1] == "inputs":
                hooks.enter_context(module.register_forward_pre_hook(partial(on_inputs, at), with_kwargs=True))
            else:
                hooks.enter_context(module.register_forward_hook(partial(on_outputs, at)))
        yield calls
