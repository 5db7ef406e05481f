r"""Remove whole layers from each stack of numbered layers, so that a stock model with fewer layers comes out.

**Which layers.** Greedily remove the layer whose removal changes the final hidden states of the stack least: each
token's vector is normalised to length 1, and each channel's error is divided by its variance. That is measured on the
held-back sequences, with the gap refitted on up to 256 others. Layers run alone, from stored hidden states, and only
gaps behind the last removed layer are refitted again.

**Across a gap.** The last residual linear layer before a gap is refitted towards the dense residual stream behind the
gap, in closed form (`sequential`). What its numbered layer does behind that linear (the last norm of a post-norm
model) is taken from the last removed layer. Where a stack begins with a gap, later refits repair what they can.

**The config** follows: numbers of layers, and lists with an entry for each. A stock model of that config must have
the same layers as the model; if it has not (where every second layer is of another kind), the model is refused.
"""

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from collab_compress.architectures import find_attention
from collab_compress.calibration.gather import masks_of, unpadded
from collab_compress.calibration.source import SplitData
from collab_compress.checkpoint import edits_of
from collab_compress.checkpoint.edits import configs_inside, configs_of
from collab_compress.conversion.copies import sharing_copy
from collab_compress.conversion.inventory import Inventory
from collab_compress.conversion.layers import (
    SAME_RTOL,
    HiddenStateStore,
    capture_calls,
    layer_of,
    numbered_layers,
    undivided,
)
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
from collab_compress.errors import CompressionError, UnsupportedModelError, one_line
from collab_compress.heads.pruning import renumber_alignment_heads_

OF_TWO = ("encoder_layers", "decoder_layers")
COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", *OF_TWO, *(f"num_{name}" for name in OF_TWO))
"""Attributes of configs that may be the number of layers of a stack."""
LAYER_NUMBERS = re.compile(
    r"(feature_layers?|layer_ids|(layer|block|visual|attn)s?_(idxs?|index|indexes|indices)|dola_layers)$"
)
"""Names of settings that name layers by number."""
READERS = ("Backbone", "DPT", "Segmentation", "DepthEstimation")
"""Parts of the names of classes that read the hidden states of some layers by number."""
Kept: TypeAlias = Mapping[str, Sequence[int]]
"""Path of each list of numbered layers that loses some → the numbers of those that stay, ascending."""


class End(NamedTuple):
    """The end of a numbered layer."""

    linear: ResidualLinear  # the last of the layer
    behind: Sequence[str]  # paths of modules with parameters that are called behind the sum
    kind: str  # equal at ends whose streams can stand for each other


@dataclass(frozen=True)
class Depth:
    """The layers that a model loses, and what follows from that."""

    kept: Kept = field(default_factory=dict)
    removed: Sequence[str] = ()  # paths of the layers, in the model's order
    # Path of the last residual linear layer before a gap → the one in the gap to whose dense stream it is fitted.
    targets: Mapping[str, ResidualLinear] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)  # path of a module before a gap → of the one it becomes
    # In the shallower model, path of a module and name of an attribute → value.
    attributes: Mapping[tuple[str, str], Any] = field(default_factory=dict)

    def move_(self, model: PreTrainedModel) -> None:
        """Let the layers before gaps end as the last removed layers do, in place."""
        for name, source in self.moved.items():
            model.set_submodule(name, model.get_submodule(source))

    def drop_(self, model: PreTrainedModel, configs: Iterable[PretrainedConfig]) -> str:
        """Remove the layers and number the others from 0, in place, as the model's configs then say.

        Return a note for the report or "".
        """

        def renumbered(_: int, name: str, head: int) -> tuple[int, int] | None:
            layer = layer_of(name)
            return None if layer in self.removed else (int(self.renamed(layer).rpartition(".")[2]), head)

        note = renumber_alignment_heads_(model, renumbered)
        _shorten_(configs, model, self.kept)
        _keep_layers_(model, self.kept)
        for (name, attribute), value in self.attributes.items():
            setattr(model.get_submodule(name), attribute, value)
        return note

    def without(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return a copy of a model that lacks the layers."""
        shallow = sharing_copy(model)
        self.drop_(shallow, configs_of(shallow))
        return shallow

    def renamed(self, name: str) -> str:
        """Return the path that a module has in the shallower model."""
        path, _, number = layer_of(name).rpartition(".")
        kept = self.kept.get(path, ())
        if not number or int(number) not in kept:
            return name
        return f"{path}.{kept.index(int(number))}{name.removeprefix(f'{path}.{number}')}"


def _keep_layers_(model: nn.Module, kept: Kept) -> None:
    """Keep some layers, numbered from 0, in place."""
    for path, numbers in kept.items():
        layers = model.get_submodule(path)
        children = list(layers.children())
        layers._modules = {str(number): children[old] for number, old in enumerate(numbers)}


def deep_stacks(model: PreTrainedModel, layers: int) -> dict[str, list[str]]:
    """Return the lists of numbered layers that have more than `layers`: path → paths of the layers."""
    class_name, values = type(model).__name__, model.config.to_dict()
    by_path = groupby(numbered_layers(model), lambda name: name.rpartition(".")[0])
    stacks = {path: list(names) for path, names in by_path}
    if edits_of(model):
        raise CompressionError(
            f"{class_name} is edited already; pass layers with the first widths, or start from the dense checkpoint"
        )
    adapted = [name for name, module in model.named_modules() if hasattr(module, "adapter_layer_names")]  # of PEFT
    if adapted:
        raise CompressionError(
            f"{adapted[0]} carries an adapter, whose layers would be numbered anew; merge it (merge_and_unload), or "
            "remove layers first and train an adapter on the result"
        )
    most = max(map(len, stacks.values()), default=0)
    calls = max((values[name] for name in COUNTS if isinstance(values.get(name), int)), default=0)
    if 0 < most < calls:
        called = "one layer" if most == 1 else f"{most} layers in turn,"
        raise UnsupportedModelError(
            f"{class_name} calls {called} {calls} times, so that none can be removed; leave out layers"
        )
    if most <= layers:
        raise CompressionError(
            f"layers is {layers}, and the deepest stack of {class_name} has {most}; pass fewer than that"
        )
    stacks = {path: names for path, names in stacks.items() if len(names) > layers}
    configs = [*configs_inside(model.config)]
    for path in stacks:
        if reason := _why_fixed(model, path, configs):
            raise UnsupportedModelError(f"layers of {path} cannot be removed: {reason}; leave out layers")
    return stacks


def _why_fixed(model: PreTrainedModel, path: str, configs: Sequence[PretrainedConfig]) -> str:
    """Return why the layers of a stack depend on their numbers, or ""."""
    for holder in _holders(model, path):
        if any(name in type(holder).__name__ for name in READERS):
            return f"{type(holder).__name__} reads some of them by number"
    if getattr(model.config, "scale_attn_by_inverse_layer_idx", False):
        return "attention is scaled by their numbers"
    last: tuple[Any, ...] = (-1, [-1], (-1,), [], ())  # names no other layer
    for holder in (*configs, getattr(model, "generation_config", None)):
        for name, value in {} if holder is None else vars(holder).items():
            is_here = not name.startswith("vision") or "vision" in path
            if is_here and LAYER_NUMBERS.search(name) and type(value) in (int, list, tuple) and value not in last:
                return f"{name} of the configs names layers by number"
    return ""


def _holders(model: PreTrainedModel, path: str) -> list[nn.Module]:
    """Return the modules that hold the one at a path, the outermost first."""
    parts = path.split(".")
    return [model.get_submodule(".".join(parts[:end])) for end in range(len(parts))]


def find_depth(inventory: Inventory, layers: int, data: SplitData, refits: bool, progress: Progress) -> Depth:
    """Choose the layers to remove so that each stack keeps `layers`, and return them with what follows from that."""
    model = inventory.model
    stacks = deep_stacks(model, layers)
    last = {linear.layer: linear for linear in inventory.residual_linears} if refits else {}
    with undivided(model):
        ends = {layer: _end(model, linear, inventory.layers[layer]) for layer, linear in last.items()}
    return _depth_without(model, stacks, choose_layers(model, stacks, layers, ends, data, progress), ends)


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
    kinds = [_kind(model.get_submodule(name)) for name in behind]
    return End(linear, behind, str((paths, linear.shown, kinds)))


def _kind(module: nn.Module, recurse: bool = True) -> str:
    """Return the class of a module, and the names and shapes of its parameters."""
    shapes = [(name, *parameter.shape) for name, parameter in module.named_parameters(recurse=recurse)]
    return f"{type(module).__name__} {shapes}"


def _depth_without(
    model: PreTrainedModel, stacks: Mapping[str, Sequence[str]], removed: Sequence[str], ends: Mapping[str, End]
) -> Depth:
    """Return what follows from the removal of some layers; without ends, nothing is refitted."""
    kept: dict[str, Sequence[int]] = {}
    targets: dict[str, ResidualLinear] = {}
    moved: dict[str, str] = {}
    for path, names in stacks.items():
        kept[path] = [number for number, name in enumerate(names) if name not in removed]
        for number, following in pairwise((*kept[path], len(names))):
            before, end = ends.get(names[number]), ends.get(names[following - 1])
            if before and end and before is not end and before.kind == end.kind:
                targets[before.linear.name] = end.linear
                moved.update(zip(before.behind, end.behind, strict=True))
    depth = Depth(kept, removed, targets, moved)
    return replace(depth, attributes=_changed_attributes(model, depth))


def _shorten_(configs: Iterable[PretrainedConfig], model: PreTrainedModel, kept: Kept) -> None:
    """Set the numbers of layers in configs of a model, and shorten lists with an entry for each layer, in place."""
    by_config: dict[type, dict[int, Sequence[int]]] = {}  # of the innermost config around it: depth of a stack → kept
    for path, numbers in kept.items():
        around = [getattr(module, "config", None) for module in _holders(model, path)]
        innermost = [config for config in around if isinstance(config, PretrainedConfig)][-1]
        by_config.setdefault(type(innermost), {}).setdefault(len(model.get_submodule(path)), numbers)
    for config in [config for config in configs if type(config) in by_config]:
        of_config = by_config[type(config)]
        count = len(next(iter(of_config.values())))
        for name, value in config.to_dict().items():
            if name in COUNTS and isinstance(value, int):
                setattr(config, name, min(value, count))
            elif "layer" in name and isinstance(value, list | tuple):
                numbers = of_config.get(len(value), range(len(value)))
                setattr(config, name, type(value)(value[number] for number in numbers))
        if getattr(config, "stage_names", None):  # which only backbones read; those are refused
            config.stage_names = config.stage_names[: count + 1]
            config._out_features, config._out_indices = config.stage_names[-1:], [count]


def _changed_attributes(model: PreTrainedModel, depth: Depth) -> dict[tuple[str, str], Any]:
    """Return in which numbers of layers and dropout a stock model without the layers differs; refuse all else."""
    config, class_name = copy.deepcopy(model.config), type(model).__name__
    _shorten_(configs_inside(config), model, depth.kept)
    layers = len(next(iter(depth.kept.values())))

    def refusal(reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"no {class_name} has the {layers} layers that would stay: {reason}; pass another number, or leave out "
            "layers"
        )

    try:
        with torch.device("meta"):
            dense, shallow = (type(model)(type(one).from_dict(one.to_dict())) for one in (model.config, config))
    except Exception as error:  # whatever a config or a model raises
        raise refusal(one_line(error)) from error
    if any(_kind(model.get_submodule(path)) != _kind(dense.get_submodule(path)) for path in depth.kept):
        raise UnsupportedModelError(f"the layers of {class_name} are not those of its config; leave out layers")
    _keep_layers_(dense, depth.kept)
    others, changed = dict(shallow.named_modules()), {}
    for name, module in dense.named_modules():
        other = others.get(name)
        if other is None or _kind(other, recurse=False) != _kind(module, recurse=False):
            raise refusal(f"its {name} is of another kind" if name else f"{class_name} has weights for each layer")
        path, _, number = layer_of(name).rpartition(".")
        shift = depth.kept[path][int(number)] - int(number) if path in depth.kept else 0
        for attribute, value in vars(module).items():
            new = vars(other).get(attribute, None if path else value)
            if not isinstance(value, int | float | str | None) or attribute.startswith("_") or new == value:
                continue
            is_number = type(value) is type(new) is int and new == (value - shift if path else layers)
            if not is_number and "drop" not in attribute:
                raise refusal(f"{attribute} of its {name or class_name} is {new!r}, and not {value!r}")
            changed[name, attribute] = new
    return changed


def choose_layers(
    model: PreTrainedModel,
    stacks: Mapping[str, Sequence[str]],
    layers: int,
    ends: Mapping[str, End],
    data: SplitData,
    progress: Progress,
) -> list[str]:
    """Return the layers to remove: those without which the last hidden states of their stack move least."""
    trial, removed = sharing_copy(model), set()
    with undivided(model), undivided(trial), HiddenStateStore() as store:
        progress(RUNNING, 0, None)
        calls = capture_calls(model, data.sample, data.held_back, store)
        models = Pair(model, trial, calls, store)
        for path, names in stacks.items():
            search, count = _Search(models, names, ends), len(names) - layers
            if len(search.fixed) > layers:
                raise UnsupportedModelError(
                    f"{len(search.fixed)} of the {len(names)} layers of {path} are unlike the others, and must stay; "
                    "pass more layers, or leave out layers"
                )
            for done in range(count):
                progress(f"removing layers of {path}", done, count)
                removed.add(search.remove_one())
    return [name for names in stacks.values() for name in names if name in removed]


class _Search:
    """A stack from which one layer after the other is removed, and the hidden states before each that remains."""

    def __init__(self, models: Pair, names: Sequence[str], ends: Mapping[str, End]) -> None:
        self.models, self.names, self.ends = models, names, [ends.get(name) for name in names]
        self.site = next(site for site in find_attention(models.dense) if layer_of(site.name) in names)
        start = models.calls.layers[names[0]].start
        self.calls = [calls[start : start + len(names)] for calls in models.calls.by_batch]
        if [call.name for call in self.calls[0]] != names:
            raise UnsupportedModelError(
                f"{names[0]} and the layers behind it are not called in turn; leave out layers"
            )
        kinds = [_kind(models.dense.get_submodule(name)) for name in names]
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
        mask = masks_of(self.site, self.models.calls.masks[batch]).query
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
                sums.add(call, target, linear, masks_of(linear.site, calls.masks[batch]).query, batch in calls.used)
        fitted = solve(sums, linear, model.get_submodule(linear.name), calls.sequences)
        tensors = layer.state_dict(keep_vars=True).values()
        copied: nn.Module = copy.deepcopy(layer, {id(tensor): tensor for tensor in tensors})
        model.set_submodule(self.names[number], copied)
        install_refits(model, [fitted])
        for name, source in zip(before.behind, end.behind, strict=True):
            model.set_submodule(name, model.get_submodule(source))
        model.set_submodule(self.names[number], layer)
        return self.refitted.setdefault(gone, copied)
