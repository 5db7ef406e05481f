"""Choose the layers that a model loses least by, and refit the layers before the gaps.

Greedily remove the layer whose removal changes the final hidden states of the stack least: each token's vector is
normalised to length 1, and each channel's error is divided by its variance. That is measured on the held-back
sequences, with the gap refitted on up to 256 others. Layers run alone, from stored hidden states, and only gaps
behind the last removed layer are refitted again.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_compress.architectures import find_attention
from collab_compress.calibration.gather import unpadded
from collab_compress.calibration.source import SplitData
from collab_compress.calibration.stacks import Stack, layer_of, stream_mask
from collab_compress.conversion.copies import sharing_copy
from collab_compress.conversion.depth import Depth, changed_attributes, deep_stacks, kind_of
from collab_compress.conversion.inventory import Inventory
from collab_compress.conversion.layers import SAME_RTOL, HiddenStateStore, capture_calls, undivided
from collab_compress.conversion.maps import RUNNING, Progress
from collab_compress.conversion.residual import ResidualLinear, watch
from collab_compress.conversion.sequential import (
    Pair,
    ResidualSums,
    gather_layer,
    install_refits,
    record_streams,
    solve,
    target_across_gap,
)
from collab_compress.errors import UnsupportedModelError


class End(NamedTuple):
    """The end of a numbered layer."""

    linear: ResidualLinear  # the last of the layer
    behind: Sequence[str]  # paths of modules with parameters that are called behind the sum
    kind: str  # equal at ends whose streams can stand for each other


def find_depth(inventory: Inventory, layers: int, data: SplitData, refits: bool, progress: Progress) -> Depth:
    """Choose the layers to remove so that each stack keeps `layers`, and return them with what follows from that."""
    model = inventory.model
    stacks = deep_stacks(model, inventory.stacks, layers)
    last = {linear.layer: linear for linear in inventory.residual_linears} if refits else {}
    with undivided(model):
        ends = {layer: _end(model, linear, inventory.layers[layer]) for layer, linear in last.items()}
    removed = choose_layers(inventory, stacks, layers, ends, data, progress)
    return _depth_without(model, inventory.stacks, layers, removed, ends)


def _end(model: PreTrainedModel, linear: ResidualLinear, run: Callable[[], Tensor]) -> End:
    """Return the end of a layer with this last linear, by calling the layer alone."""
    calls: list[tuple[str, str]] = []

    def note(name: str, shown: str, _: object) -> None:
        calls.append((name, shown))

    with ExitStack() as hooks:
        for name, module in model.get_submodule(linear.layer).named_modules(prefix=linear.layer):
            for shown in ("inputs", "outputs"):
                hooks.enter_context(watch(module, shown, partial(note, name, shown)))
        run()
    added = calls.index((linear.at, linear.shown), calls.index((linear.name, "outputs")))
    before = {name for name, _ in calls[:added]}
    later = dict.fromkeys(name for name, _ in calls[added:] if name not in before)
    behind = [name for name in later if model.get_submodule(name)._parameters]
    if linear.at == linear.name:  # outputs are normalised before they are added: nothing can stand for them
        return End(linear, behind, linear.name)
    paths = [name.removeprefix(linear.layer) for name in (linear.name, linear.at, *behind)]
    kinds = [kind_of(model.get_submodule(name)) for name in behind]
    return End(linear, behind, str((paths, linear.shown, kinds)))


def _depth_without(
    model: PreTrainedModel,
    stacks: Sequence[Stack],
    layers: int,
    removed: Sequence[str],
    ends: Mapping[str, End],
) -> Depth:
    """Return what follows from the removal of some layers; without ends, nothing is refitted."""
    kept: dict[str, Sequence[int]] = {}
    targets: dict[str, ResidualLinear] = {}
    moved: dict[str, str] = {}
    for path, names in ((stack.path, stack.layers) for stack in stacks if len(stack.layers) > layers):
        kept[path] = [number for number, name in enumerate(names) if name not in removed]
        for number, following in pairwise((*kept[path], len(names))):
            before, end = ends.get(names[number]), ends.get(names[following - 1])
            if before and end and before is not end and before.kind == end.kind:
                targets[before.linear.name] = end.linear
                moved.update(zip(before.behind, end.behind, strict=True))
    depth = Depth(kept, removed, targets, moved, stacks=stacks)
    try:
        return replace(depth, attributes=changed_attributes(model, depth))
    except UnsupportedModelError as error:
        depth = replace(depth, all_lists=True)
        with suppress(UnsupportedModelError):
            return replace(depth, attributes=changed_attributes(model, depth))
        raise error


def choose_layers(
    inventory: Inventory,
    stacks: Sequence[Stack],
    layers: int,
    ends: Mapping[str, End],
    data: SplitData,
    progress: Progress,
) -> list[str]:
    """Return the layers to remove: those without which the last hidden states of their stack move least."""
    model = inventory.model
    trial, removed = sharing_copy(model), set[str]()
    with undivided(model), undivided(trial), HiddenStateStore() as store:
        progress(RUNNING, 0, None)
        calls = capture_calls(model, list(inventory.layers), data.sample, data.held_back, store)
        models = Pair(model, trial, calls, store)
        for stack in stacks:
            search, count = _Search(models, stack, ends), len(stack.layers) - layers
            if len(search.fixed) > layers:
                raise UnsupportedModelError(
                    f"{len(search.fixed)} of the {len(stack.layers)} layers of {stack.path} are unlike the others, "
                    "and must stay; pass more layers, or leave out layers"
                )
            for done in range(count):
                progress(f"removing layers of {stack.path}", done, count)
                removed.add(search.remove_one())
    return [name for stack in stacks for name in stack.layers if name in removed]


class _Search:
    """A stack from which one layer after the other is removed, and the hidden states before each that remains."""

    def __init__(self, models: Pair, stack: Stack, ends: Mapping[str, End]) -> None:
        self.models, self.stack, self.names = models, stack, (names := list(stack.layers))
        self.ends = [ends.get(name) for name in names]
        sites = find_attention(models.dense, optional=True)
        self.site = next((site for site in sites if layer_of(site.name, names)), None)
        start = models.calls.layers[names[0]].start
        self.calls = [calls[start : start + len(names)] for calls in models.calls.by_batch]
        if [call.name for call in self.calls[0]] != names:
            raise UnsupportedModelError(
                f"{names[0]} and the layers behind it are not called in turn; leave out layers"
            )
        kinds = [kind_of(models.dense.get_submodule(name)) for name in names]
        usual = Counter(reversed(kinds)).most_common(1)[0][0]  # of two, the second: often the first has a part more
        self.fixed = {number for number, kind in enumerate(kinds) if kind != usual}
        self.kept = list(range(len(names) + 1))  # numbers of the remaining layers, and that of the stack's end
        self.before = {0: models.calls.read_by(start)}  # number of a layer → for each batch, what it reads
        self.streams: dict[int, list[Tensor]] = {}  # of the dense model, after the last linear of each layer
        self.refitted: dict[int, nn.Module] = {}  # number of a layer → the one before it, fitted to its absence
        for number in range(len(names)):
            self.before[number + 1] = self._run_dense(number)
        outputs = self.before.pop(len(names))
        self.dense = [self._directions(batch, outputs[batch]) for batch in models.calls.held_back]
        self.variance = torch.cat(self.dense).var(0, correction=0).clamp(min=1e-12)

    def _run_dense(self, number: int) -> list[Tensor]:
        """Run a layer of the dense model; store the stream after its last linear, and return its outputs."""
        end, name, before = self.ends[number], self.names[number], self.before[number]
        for calls, hidden in zip(self.calls, before, strict=True):
            read = calls[number].hidden
            read = hidden if read is None else read.to(hidden)
            if read.shape != hidden.shape or bool((read - hidden).norm() > SAME_RTOL * hidden.norm()):
                raise UnsupportedModelError(
                    f"{name} does not read what the layer before it returned; leave out layers"
                )
        linears = [end.linear] if end else []
        data = gather_layer(self.models, self.models.calls.layers[name], before, [], linears)
        for hidden, output in zip(before, data.outputs, strict=True):
            if output.shape != hidden.shape:
                raise UnsupportedModelError(
                    f"{name} reads hidden states of shape {tuple(hidden.shape)} and returns {tuple(output.shape)}; "
                    "expected the same, so that a layer can be removed; leave out layers"
                )
        self.streams[number] = [streams[linear.name] for (streams,) in data.streams for linear in linears]
        return data.outputs

    def _directions(self, batch: int, hidden: Tensor) -> Tensor:
        """Return hidden states (n, D) at unpadded tokens, each normalised to length 1."""
        mask = stream_mask(self.site, self.stack.mask, self.models.calls.masks[batch], hidden)
        tokens = unpadded(hidden.to(self.models.dense.device), mask)
        return nn.functional.normalize(tokens.float(), dim=-1)

    def remove_one(self) -> str:
        """Remove the layer without which the last hidden states move least; return its path."""
        model = self.models.converted
        indices = [index for index, number in enumerate(self.kept[:-1]) if number not in self.fixed]
        index = min(indices, key=self._error_without)
        first = max(index - 1, 0)
        model.set_submodule(self.names[self.kept[first]], self._refit_before(index))
        start, number = self.before[self.kept[first]], self.kept.pop(index)
        self.before[self.kept[first]] = start
        for layer, following in pairwise(self.kept[first:-1]):
            reads = zip(self.calls, self.before[layer], strict=True)
            self.before[following] = [self.models.store.keep(calls[layer].run(model, read)) for calls, read in reads]
        self.refitted = {gone: layer for gone, layer in self.refitted.items() if gone < self.kept[first]}
        return self.names[number]

    def _error_without(self, index: int) -> float:
        """Return by how much the last hidden states move without a layer, given by its index in `kept`."""
        model, first = self.models.converted, max(index - 1, 0)
        error, name = torch.zeros_like(self.variance), self.names[self.kept[first]]
        layer = model.get_submodule(name)
        model.set_submodule(name, self._refit_before(index))
        for dense, batch in zip(self.dense, self.models.calls.held_back, strict=True):
            hidden = self.before[self.kept[first]][batch]
            for number in (*self.kept[first:index], *self.kept[index + 1 : -1]):
                hidden = self.calls[batch][number].run(model, hidden)
            error += (self._directions(batch, hidden) - dense).square().sum(0)
        model.set_submodule(name, layer)
        return float((error / self.variance).mean())

    def _refit_before(self, index: int) -> nn.Module:
        """Return a copy of the layer before a gap, refitted to the dense stream behind it; itself if it cannot be."""
        model, calls = self.models.converted, self.models.calls
        number, gone, last = self.kept[max(index - 1, 0)], self.kept[index], self.kept[index + 1] - 1
        layer: nn.Module = model.get_submodule(self.names[number])
        before, end = self.ends[number], self.ends[last]
        if not (index and before and end and before.kind == end.kind):
            return layer
        if gone in self.refitted:
            return self.refitted[gone]
        linear, sums = before.linear, ResidualSums()
        with record_streams(model, [linear]) as recorded:
            for batch, hidden in enumerate(self.before[number]):
                self.calls[batch][number].run(model, hidden)
                call = recorded.pop(linear.name)
                target = target_across_gap(model, linear, call.stream, self.streams[last][batch])
                mask = linear.mask(calls.masks[batch], call.stream)
                sums.add(call, target, linear, mask, batch in calls.used)
        fitted = solve(sums, linear, model.get_submodule(linear.name), calls.sequences)
        tensors = layer.state_dict(keep_vars=True).values()
        copied: nn.Module = copy.deepcopy(layer, {id(tensor): tensor for tensor in tensors})
        model.set_submodule(self.names[number], copied)
        install_refits(model, [fitted])
        for name, source in zip(before.behind, end.behind, strict=True):
            model.set_submodule(name, model.get_submodule(source))
        model.set_submodule(self.names[number], layer)
        return self.refitted.setdefault(gone, copied)
