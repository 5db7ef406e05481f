r"""Convert a model one numbered layer after the other, on all calibration data.

    for each layer:
        gather    run the dense layer: moments of the inputs of attention, and the residual stream after each
                  residual linear layer
        convert   solve for narrower queries, keys and values from the moments
        refit     each residual linear layer, in the order of calls; a block that becomes narrower is cut before, to
                  neurons that are chosen on some of the data
        advance   run the converted layer: the hidden states of both models are those before the next layer

A residual linear layer y = W a + b (the output projection of attention, the second layer of a feed-forward block) is
refitted in closed form, without labels or steps:

$$\min_{W', b'}\ \mathbb{E}\,\|(h + y)_\text{dense} - (h' + W' a' + b')\|^2 + \lambda\,\|W' - W\|^2$$

where h is what y is added to, and ' marks the converted model, whose lower layers are refitted already. So each layer
also repairs what the layers below it lost.

Where a layer returns the stream as it is, all tokens count alike. Where it ends in a norm, as in BERT, the norm
divides the error of each token by the size of its stream, so tokens count by the inverse of the stream's mean square.
The first and the last token of a text can be seventy times larger than the others, and would be most of the mean.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures.sites import by_input
from collab_compress.attention import install_
from collab_compress.attention.projections import fill_
from collab_compress.calibration import Batch, gather_moments, run_batch
from collab_compress.calibration.batches import evenly_spaced
from collab_compress.calibration.gather import ForwardEnded, InputMoments, unpadded
from collab_compress.calibration.stacks import layer_of, probe_of
from collab_compress.conversion.cost import block_cost
from collab_compress.conversion.depth import Depth
from collab_compress.conversion.feed_forward import FeedForward, cut_
from collab_compress.conversion.layers import (
    HiddenStateStore,
    LayerCall,
    LayerCalls,
    capture_calls,
    undivided,
)
from collab_compress.conversion.maps import (
    HEAD_WEIGHT_SEQUENCES,
    RUNNING,
    HeadWeights,
    MapTask,
    Progress,
    Replacement,
    SiteMoments,
    head_weights,
    replace_map,
    silent,
    weighted_sites,
)
from collab_compress.conversion.replay import Replay
from collab_compress.conversion.report import PartReport, RefitReport
from collab_compress.conversion.residual import ResidualLinear, stream_of, watch
from collab_compress.devices import float64_device
from collab_compress.errors import CalibrationError, UnsupportedModelError, one_line
from collab_compress.factorization.least_squares import ResidualMoments, choice_moments, choose_neurons, fit
from collab_compress.factorization.narrowing import MIN_VARIANCE_SHARE

CHOICE_VECTORS, LEAST_CHOICE_VECTORS = 8, 8192  # that neurons are chosen by: for each neuron, and in all
DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0)  # shares of the inputs' mean variance; held-back data choose one
EPS = 1e-6  # added to the mean square of tokens, as many norms do
ROUNDING = 1e-5  # relative error of the residual stream that is rounding alone


@dataclass(frozen=True)
class Parts:
    """The parts of a model to convert."""

    tasks: Sequence[MapTask] = ()  # attention maps
    linears: Sequence[ResidualLinear] = ()  # to refit, in the order of calls; none to refit nothing
    blocks: Sequence[FeedForward] = ()  # to make narrower
    dff: int = 0  # number of neurons that the blocks keep
    depth: Depth = field(default_factory=Depth)  # which layers the conversion leaves out
    layers: Sequence[str] = ()  # paths of the numbered layers, where they can be called alone (`single_layers`)


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
    bf16: bool = False,
    progress: Progress = silent,
) -> tuple[list[Replacement], list["Refit"], list[PartReport]]:
    """Convert the layers of a model in place; return new maps, refits, and reports on the maps and narrower blocks.

    Maps are in the order of `parts.tasks`, blocks in that of calls. `converted` is a copy of the dense model, or a
    converted model to refit, where `same_inputs` says whether everything before the first layer is the same in both.
    Removed layers are not run. With `bf16`, layers multiply in bfloat16; sums and solutions stay in their precision.
    """
    replaced: dict[tuple[str, type], Replacement] = {}
    refits: list[Refit] = []
    block_reports: list[PartReport] = []
    blocks, removed = {block.down: block for block in parts.blocks}, parts.depth.removed

    def convert_attention_(
        tasks: Sequence[MapTask], moments: Sequence[SiteMoments], weights: Mapping[str, Tensor | None]
    ) -> None:
        for task, of_task in zip(tasks, moments, strict=True):
            item = replace_map(task, of_task, weights.get(task.site.name), length)
            replaced[task.site.name, type(task.site)] = item
            install_maps_(converted, [item])

    without_data = [task for task in parts.tasks if task.is_exact or not used]
    for done, task in enumerate(without_data):
        progress(f"fitting {task.site.name}", done, len(without_data))
        convert_attention_([task], [None], {})
    tasks = [task for task in parts.tasks if task not in without_data]
    with undivided(dense), undivided(converted), HiddenStateStore() as store:
        calls = None
        if parts.layers and (tasks or parts.linears):
            progress(RUNNING, 0, None)
            calls = capture_calls(dense, parts.layers, used, held_back if parts.linears else [], store)
        layers = {} if calls is None else calls.layers
        by_layer: dict[str, list[MapTask]] = {}
        for task in tasks:
            by_layer.setdefault(layer_of(task.site.name, layers), []).append(task)
        if elsewhere := by_layer.get("", []):  # outside of the layers
            progress(f"fitting {', '.join(task.site.name for task in elsewhere)}", 0, None)
            sites = weighted_sites(elsewhere)
            weights = head_weights(dense, sites, used)
            convert_attention_(elsewhere, gather_moments(dense, [task.site for task in elsewhere], used), weights)
        if calls is not None:
            models = Pair(dense, converted, calls, store, parts, bf16)
            if models.bf16:
                models.refuse_bf16()
            hidden, reached = HiddenStates([], [], []), 0
            for done, (layer, numbers) in enumerate(layers.items()):
                progress(f"fitting {layer}", done, len(layers))
                if reached > numbers.start:  # removed, and passed with the gap before it
                    continue
                if calls.begins_stack(numbers.start):
                    hidden = models.start_stack(numbers.start, same_inputs)
                of_layer = by_layer.get(layer, [])
                linears = [linear for linear in parts.linears if linear.layer == layer and layer not in removed]
                data = gather_layer(models, numbers, hidden.dense, of_layer, linears)
                gap = cross_gap(models, numbers, data.outputs)
                convert_attention_(of_layer, data.moments, data.head_weights)
                with Replay(converted, layer, store) as replay:
                    passes = ConvertedLayer(models, numbers, hidden, data, gap, replay)
                    for linear in linears:
                        block = blocks.get(linear.name)
                        refits.append(passes.refit(linear, block, keep=linear is not linears[-1]))
                        if block is not None:
                            block_reports.append(PartReport(**vars(block_cost(dense, block, parts.dff, length))))
                    reached, hidden = gap.reached, hidden._replace(dense=gap.hidden)
                    if parts.linears and layer not in removed and not calls.begins_stack(reached):
                        hidden = hidden._replace(converted=passes.advance())
                del passes, data  # which hold hidden states
        count = len(layers) or len(without_data)
        progress("fitted all layers", count, count)
    maps = [replaced[task.site.name, type(task.site)] for task in parts.tasks]
    return maps, refits, [*(item.report for item in maps), *block_reports]


def install_maps_(model: PreTrainedModel, replaced: Sequence[Replacement]) -> None:
    """Install replacements of attention maps in a model or in its copy, in place."""
    for item in replaced:
        name = item.site.name
        install_(model.get_submodule(name), item.map, item.layers, model.get_submodule(name.rpartition(".")[0]))


# Two models on the same batches.


class HiddenStates(NamedTuple):
    """The hidden states of both models before a layer, for each batch, and the converted model's calls of layers."""

    dense: list[Tensor]
    converted: list[Tensor]
    converted_calls: list[list[LayerCall]]


@dataclass(frozen=True)
class Pair:
    """A dense model and its conversion, with the calls of the dense model's layers."""

    dense: PreTrainedModel
    converted: PreTrainedModel  # the dense model itself where nothing is converted
    calls: LayerCalls  # of the dense model's layers
    store: HiddenStateStore
    parts: Parts = Parts()
    bf16: bool = False

    @contextmanager
    def products(self) -> Iterator[None]:
        """Multiply in bfloat16 inside a `with` block, if `bf16`."""
        try:
            with torch.autocast(self.dense.device.type, torch.bfloat16, enabled=self.bf16):
                yield
        finally:
            torch.clear_autocast_cache()  # which else holds weights in bfloat16 as long as a block around this one

    def refuse_bf16(self) -> None:
        """Refuse products in bfloat16 if the dense model cannot run with them."""
        try:
            with self.products():
                run_batch(self.dense, probe_of(self.calls.batches[0]))
        except (CalibrationError, RuntimeError) as error:
            reason = one_line(error.__cause__ or error)
            raise UnsupportedModelError(
                f"{type(self.dense).__name__} cannot multiply in bfloat16 ({reason}); leave out bf16"
            ) from error

    def run(self, model: PreTrainedModel, call: LayerCall, hidden: Tensor) -> Tensor:
        """Make one call of a layer of one of the models, on hidden states (B, T, D), whose dtype stays."""
        states = call.run(model, hidden)
        return states.to(hidden.dtype) if self.bf16 else states

    def start_stack(self, first: int, same_inputs: bool) -> HiddenStates:
        """Return the hidden states before the first call of a stack of layers."""
        dense, calls = self.calls.read_by(first), self.calls.by_batch
        if not first and same_inputs:
            return HiddenStates(dense, dense, calls)
        depth = self.parts.depth
        shallow = depth.without(self.converted) if depth.removed else self.converted
        captured = self.calls.capture_again(shallow, depth.removed, self.store)
        kept = next(number for number in range(first, len(calls[0])) if calls[0][number].name not in depth.removed)
        read = [of_batch[kept].hidden for of_batch in captured]
        return HiddenStates(dense, [hidden for hidden in read if hidden is not None], captured)


# The dense layer.


@dataclass(frozen=True, eq=False)
class LayerData:
    """What one run of a dense layer on all batches gives."""

    moments: Sequence[SiteMoments]  # for each task, of the inputs of its projections
    head_weights: Mapping[str, Tensor | None]  # path of a module → weight of each head's score error, (H,)
    mean_squares: Mapping[str, float]  # mean of the squares of these weights, before they are normalised
    inputs: list[list[Tensor]]  # for each batch, the input of each call of the layer; empty if it is called once
    streams: list[list[dict[str, Tensor]]]  # for each batch and call, the residual stream after each linear
    outputs: list[Tensor]  # for each batch, the hidden states behind the layer


def gather_layer(
    models: Pair,
    numbers: range,
    hidden: Sequence[Tensor],
    tasks: Sequence[MapTask],
    linears: Sequence[ResidualLinear],
    neurons: Mapping[str, ResidualMoments] | None = None,
) -> LayerData:
    """Run a dense layer on all batches, and gather what its conversion needs; add inputs of linears to `neurons`."""
    calls = models.calls
    moments = InputMoments([task.site for task in tasks])
    inputs: list[list[Tensor]] = [[] for _ in calls.masks]
    streams: list[list[dict[str, Tensor]]] = [[] for _ in calls.masks]
    outputs = list(hidden)
    weighted = weighted_sites(tasks)
    count = len(calls.used) * HEAD_WEIGHT_SEQUENCES // calls.sequences
    measured = evenly_spaced(calls.used, max(1, count)) if weighted else []
    with record_streams(models.dense, linears) as recorded:

        def run(batch: int) -> None:
            for number in numbers:
                if len(numbers) > 1:  # as in ALBERT: each call is refitted from the dense states, so no errors add up
                    inputs[batch].append(outputs[batch])
                output = models.run(models.dense, calls.by_batch[batch][number], outputs[batch])
                streams[batch].append({name: models.store.keep(call.stream) for name, call in recorded.items()})
                for linear in linears:
                    if neurons and linear.name in neurons and batch in calls.used:
                        values = recorded[linear.name].inputs
                        mask = linear.mask(calls.masks[batch], values)
                        of_tokens = inverse_squares(unpadded(recorded[linear.name].stream, mask))
                        neurons[linear.name].add(unpadded(values, mask), weights=of_tokens)
                recorded.clear()
                outputs[batch] = models.store.keep(output)

        with moments:
            with HeadWeights(weighted) as weights:
                for batch in measured:
                    moments.masks = weights.masks = calls.masks[batch]
                    run(batch)
            with models.products():
                for batch in calls.used:
                    if batch not in measured:
                        moments.masks = calls.masks[batch]
                        run(batch)
        with models.products():
            for batch in calls.held_back:
                run(batch)
    return LayerData(moments.moments(), weights.weights(), weights.mean_squares(), inputs, streams, outputs)


class Gap(NamedTuple):
    """The removed layers behind a layer."""

    reached: int  # number of the first call behind them
    hidden: list[Tensor]  # for each batch, the dense model's hidden states there
    streams: Mapping[str, list[Tensor]]  # path of the last linear before the gap → its target for each batch


def cross_gap(models: Pair, numbers: range, hidden: Sequence[Tensor]) -> Gap:
    """Run the dense layers behind a layer that the conversion leaves out; store streams to refit towards."""
    calls, reached, outputs = models.calls.by_batch, numbers.stop, list(hidden)
    stack = calls[0][numbers.start].name.rpartition(".")[0]
    streams: dict[str, list[Tensor]] = {}
    while reached < len(calls[0]):
        name = calls[0][reached].name
        if name not in models.parts.depth.removed or name.rpartition(".")[0] != stack:
            break
        in_layer = {path: target for path, target in models.parts.depth.targets.items() if target.layer == name}
        streams |= {path: [] for path in in_layer}
        with record_streams(models.dense, list(in_layer.values())) as recorded, models.products():
            for batch, of_batch in enumerate(calls):
                outputs[batch] = models.store.keep(models.run(models.dense, of_batch[reached], outputs[batch]))
                for path, target in in_layer.items():
                    streams[path].append(models.store.keep(recorded.pop(target.name).stream))
        reached += 1
    return Gap(reached, outputs, streams)


def stream_variance(models: Pair, data: LayerData, linear: ResidualLinear) -> float:
    """Return the variance of the dense stream after a linear layer, weighted by `inverse_squares`; 0 if rounding."""
    total, squares, weight = torch.zeros((), device="cpu"), 0.0, 0.0
    for masks, calls in zip(models.calls.masks, data.streams, strict=True):
        for streams in calls:
            stream = unpadded(streams[linear.name], linear.mask(masks, streams[linear.name]))
            stream = stream.to(float64_device(stream.device), torch.float64)
            weights = inverse_squares(stream).to(stream)
            total = total + weights @ stream
            squares += float(weights @ stream.square().sum(1))
            weight += float(weights.sum())
    variance = squares / weight - float((total / weight).square().sum())
    return variance if variance > MIN_VARIANCE_SHARE * squares / weight else 0.0


# Refits.


class ResidualSums:
    """Moments to fit a residual linear layer by: of its inputs, and of the dense minus the converted stream."""

    def __init__(self) -> None:
        self.used = ResidualMoments()  # of the sequences to fit to
        self.held_back = ResidualMoments()
        self.spread = 0.0  # of the dense stream on the held-back sequences, Σ w ‖x − mean‖²

    def add(
        self, call: "StreamCall", target: Tensor, linear: ResidualLinear, mask: Tensor | None, used: bool
    ) -> None:
        """Add one call of the converted layer, without padding; residuals are divided by the layer's gain."""
        wanted = target.to(call.stream.device).reshape(-1, target.shape[-1]).float()
        gain = torch.where(linear.gain == 0, torch.inf, linear.gain).to(wanted)
        lacking = (wanted - call.stream.reshape(wanted.shape).float()) / gain
        weights = inverse_squares(unpadded(wanted, mask)) if linear.normalised else None
        (self.used if used else self.held_back).add(unpadded(call.inputs, mask), unpadded(lacking, mask), weights)
        if not used:
            wanted = unpadded(wanted / gain, mask)
            share = torch.ones_like(wanted[:, 0]) if weights is None else weights
            self.spread += float(share @ (wanted - share @ wanted / share.sum()).square().sum(1))


def inverse_squares(vectors: Tensor) -> Tensor:
    """Return 1 / (mean square + EPS) of each vector (n, D), as float32, (n,)."""
    return 1 / (vectors.float().square().mean(-1) + EPS)


@dataclass(frozen=True)
class ConvertedLayer:
    """A converted layer, which runs once for each fit, and once to go on."""

    models: Pair
    numbers: range  # of its calls
    hidden: HiddenStates
    data: LayerData
    gap: Gap
    replay: Replay

    def refit(self, linear: ResidualLinear, block: FeedForward | None, keep: bool) -> "Refit":
        """Refit a residual linear layer, and install it; cut the block that it ends before, if one is given."""
        models, kept = self.models, None
        layer = models.converted.get_submodule(linear.name)
        if block is not None:
            enough = max(CHOICE_VECTORS * block.width, LEAST_CHOICE_VECTORS)
            sums = self.sums(linear, _some_batches(models.calls.used, self.data.outputs, enough))
            kept = choose(sums.used, linear, layer, models.parts.dff)
            cut_(models.converted, block, kept)
        sums = self.sums(linear, range(len(models.calls.batches)), keep)
        fitted = solve(sums, linear, layer, models.calls.sequences)
        install_refits(models.converted, [fitted])
        return replace(fitted, kept=kept)

    def sums(self, linear: ResidualLinear, batches: Sequence[int], keep: bool = False) -> ResidualSums:
        """Run the layer on some batches, up to a residual linear layer; return the moments to fit that by.

        With `keep`, what computes the inputs of that layer does not run again.
        """
        sums, models, inputs = ResidualSums(), self.models, dict[int, Tensor]()
        keep = keep and len(self.numbers) == 1
        with models.products():
            with record_streams(models.converted, [linear], stop=True) as recorded:
                for batch in batches:
                    for number, streams in zip(self.numbers, self.data.streams[batch], strict=True):
                        with suppress(ForwardEnded):
                            self._run(batch, number)
                        if linear.name not in recorded or linear.name not in streams:
                            raise CalibrationError(
                                f"{linear.name} is not called with every batch; pass batches alike"
                            )
                        call, target = recorded.pop(linear.name), streams[linear.name]
                        if keep:
                            inputs[batch] = models.store.keep(call.inputs)
                        if linear.name in self.gap.streams:
                            behind = self.gap.streams[linear.name][batch]
                            target = target_across_gap(models.converted, linear, call.stream, behind)
                        mask = linear.mask(models.calls.masks[batch], call.stream)
                        sums.add(call, target, linear, mask, batch in models.calls.used)
            if keep:
                self.replay.keep(linear.name, inputs, lambda batch: self._call(batch, self.numbers[0]))
        return sums

    def advance(self) -> list[Tensor]:
        """Run the layer on all batches; return the hidden states behind it."""
        outputs = []
        with self.models.products():
            for batch, states in enumerate(self.hidden.converted):
                for number in self.numbers:
                    states = self._run(batch, number, states)
                outputs.append(self.models.store.keep(states))
        return outputs

    def _run(self, batch: int, number: int, states: Tensor | None = None) -> Tensor:
        """Make one call of the layer, without what was kept for it."""
        with self.replay.batch(batch):
            return self._call(batch, number, states)

    def _call(self, batch: int, number: int, states: Tensor | None = None) -> Tensor:
        """Make one call of the layer, on the hidden states that it is fitted on if none are given."""
        if states is None:
            inputs = self.data.inputs[batch] or [self.hidden.converted[batch]]
            states = inputs[number - self.numbers.start]
        return self.models.run(self.models.converted, self.hidden.converted_calls[batch][number], states)


def target_across_gap(model: PreTrainedModel, linear: ResidualLinear, stream: Tensor, target: Tensor) -> Tensor:
    """Return a target (B, T, D) from behind a gap for the stream (B, T, D) after a layer before it.

    Where a LayerNorm reads the stream, the target gets the mean and the deviation that each token has in the stream:
    the norm removes both, and a linear layer cannot change them token by token.
    """
    if not isinstance(model.get_submodule(linear.at), nn.LayerNorm):
        return target
    stream = stream.float()
    normal = nn.functional.layer_norm(target.to(stream), target.shape[-1:], eps=1e-12)
    return normal * stream.std(-1, correction=0, keepdim=True) + stream.mean(-1, keepdim=True)


@dataclass(frozen=True)
class Refit:
    """New weights of one residual linear layer, in its own layout and dtype."""

    report: RefitReport
    weight: Tensor
    bias: Tensor | None
    kept: Tensor | None = None  # neurons that it still reads, ascending; None for all


def _some_batches(batches: range, outputs: Sequence[Tensor], vectors: int) -> Sequence[int]:
    """Return evenly spaced batches that hold about so many vectors."""
    held = sum(outputs[batch].shape[:-1].numel() for batch in batches)
    return evenly_spaced(batches, -(-len(batches) * vectors // held))


def choose(moments: ResidualMoments, linear: ResidualLinear, module: nn.Linear | Conv1D, count: int) -> Tensor:
    """Return the neurons to keep in a block whose second layer is `module`, ascending, (count,)."""
    weight = by_input(module).to(moments.device, torch.float64)
    try:
        chosen = choice_moments(moments, weight, linear.gain, DAMPINGS[0], module.bias is not None)
        return choose_neurons(*chosen, count)
    except ValueError as error:
        raise CalibrationError(f"{linear.name}: {error}") from error


def solve(sums: ResidualSums, linear: ResidualLinear, module: nn.Linear | Conv1D, sequences: int) -> Refit:
    """Fit a layer by the best damping on held-back data; without gain it stays."""
    used, held_back, biased = sums.used, sums.held_back, module.bias is not None
    if not held_back.count:
        raise CalibrationError(
            f"{linear.name} saw no token of the sequences held back, which are padding alone; pass more data"
        )
    weight, bias = by_input(module), module.bias.detach() if biased else None  # (N, D), (D,)
    before, scale = held_back.mean_square(), max(sums.spread / held_back.weight, 1e-30)
    best, change, shift = before, None, None
    for damping in DAMPINGS if before > ROUNDING**2 * scale else ():
        try:
            candidate = fit(used, damping, biased)
        except ValueError:
            continue
        candidate_error = held_back.squared_error(*candidate)
        if candidate_error < best:
            best, (change, shift) = candidate_error, candidate
    if change is not None:
        weight = (weight.to(change) + change).to(weight)
        if bias is not None and shift is not None:
            bias = (bias.to(shift) + shift).to(bias)
    report = RefitReport(
        name=linear.name,
        error_before=(before / scale) ** 0.5,
        error_after=(best / scale) ** 0.5,
        vectors=used.count,
        sequences=sequences,
    )
    return Refit(report, (weight if isinstance(module, Conv1D) else weight.mT).contiguous(), bias)


def install_refits(model: PreTrainedModel, refits: Sequence[Refit], blocks: Sequence[FeedForward] = ()) -> None:
    """Install refitted layers as new parameters, in place, with narrower blocks where neurons were removed."""
    by_name = {block.down: block for block in blocks}
    for result in refits:
        layer: Any = model.get_submodule(result.report.name)
        if result.kept is not None:
            cut_(model, by_name[result.report.name], result.kept)
        bias = None if result.bias is None else nn.Parameter(result.bias, layer.bias.requires_grad)
        fill_(layer, nn.Parameter(result.weight, layer.weight.requires_grad), bias)


# The residual stream after a linear layer.


class StreamCall(NamedTuple):
    """One call of a residual linear layer: its inputs (B, T, N), and the residual stream (B, T, D) after it."""

    inputs: Tensor
    stream: Tensor


@contextmanager
def record_streams(
    model: PreTrainedModel, linears: Sequence[ResidualLinear], stop: bool = False
) -> Iterator[dict[str, StreamCall]]:
    """Record the call of each residual linear layer by its path; if `stop`, end the layer after the last."""
    calls: dict[str, StreamCall] = {}
    pending: dict[str, tuple[Tensor, Tensor]] = {}  # inputs, and outputs that are not yet added to the stream

    def on_call(name: str, _: nn.Module, args: Any, output: Tensor) -> None:
        if name in calls or name in pending:
            raise UnsupportedModelError(f"{name} is called several times in its layer, so it cannot be refitted")
        pending[name] = args[0], output

    def on_stream(at: tuple[str, str], values: object) -> None:
        for linear in linears:
            if (linear.at, linear.shown) == at and linear.name in pending:
                inputs, output = pending[linear.name]
                stream = stream_of(values, output.shape)
                if stream is not None:
                    del pending[linear.name]
                    calls[linear.name] = StreamCall(inputs, stream.clone())
        if stop and len(calls) == len(linears):
            raise ForwardEnded

    with ExitStack() as hooks:
        for linear in linears:
            layer = model.get_submodule(linear.name)
            hooks.enter_context(layer.register_forward_hook(partial(on_call, linear.name)))
        for at, shown in dict.fromkeys((linear.at, linear.shown) for linear in linears):
            hooks.enter_context(watch(model.get_submodule(at), shown, partial(on_stream, (at, shown))))
        yield calls
