r"""Remove whole layers from each stack of numbered layers, so that a stock model with fewer layers comes out.

**Which layers.** One after the other goes the layer without which the last hidden states of its stack move least:
each token is divided by its length, each channel by its spread. That is measured on the held-back sequences, with the
gap refitted on up to 256 others. Layers run alone, from hidden states that are kept before each. So removing
one layer from a stack of L takes about L/2 passes of the held-back sequences through the stack, and two of the
sequences that gaps are refitted to.

**Across a gap.** The last layer that writes to the residual stream before a gap is refitted towards the dense stream
behind the gap, in closed form (`fit`; where a LayerNorm follows, towards what that leaves of it). What its numbered
layer does behind that writer (the last norm, where norms come last) is taken from the last removed layer. Where a
stack begins with a gap, later refits repair what they can.

**The config** follows: numbers of layers, and lists with an entry for each. A stock model of that config must have
the same layers as the model; if it has not (where every second layer is of another kind), the model is refused.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from collab_compress.calibration import Batch, evaluation_mode
from collab_compress.calibration.batches import in_parts, sample_sequences
from collab_compress.calibration.gather import masks_of, unpadded
from collab_compress.checkpoint import edits_of
from collab_compress.checkpoint.edits import configs_inside, copy_configs_
from collab_compress.conversion.chain import SAME, Room, SingleLayers, layer_of, numbered_layers
from collab_compress.conversion.copies import sharing_copy
from collab_compress.conversion.fit import Fit, as_read, install_refits, solve
from collab_compress.conversion.layers import States, written_by
from collab_compress.conversion.maps import Progress
from collab_compress.conversion.widths import MEASURED
from collab_compress.conversion.writers import Writer
from collab_compress.errors import CompressionError, UnsupportedModelError, one_line

COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layers",
    "n_layer",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
)
"""Attributes of configs that may be the number of layers of a stack."""
READERS = ("Backbone", "DPT", "Segmentation", "DepthEstimation")
"""Parts of the names of classes that read the hidden states of some layers by number."""
WRITTEN, ADDED = "written", "added"  # events among the names of modules that are called


class End(NamedTuple):
    """The end of a numbered layer.

    Args:
        writer: the last of its linear layers that write to the residual stream.
        behind: paths of its modules with parameters that are called after that.
    """

    writer: Writer
    behind: Sequence[str]


class Kept(NamedTuple):
    """The layers that stay in one stack.

    Args:
        numbers: of these layers in the dense model.
        total: number of layers in the dense model.
    """

    numbers: Sequence[int]
    total: int


class _Gapped(nn.ModuleList):
    """A list whose modules keep their names where others are removed."""

    def _get_abs_string_index(self, idx: int) -> str:
        return [*self._modules][idx]


@dataclass(frozen=True)
class Depth:
    """The layers that a model loses, and what follows from that.

    Args:
        stacks: path of each list of numbered layers that loses some → those that stay.
        removed: paths of the layers that go, in the model's order.
        targets: path of the last writer before a gap → the last one in the gap, to whose dense stream it is fitted.
        moved: path of a module in the layer before a gap → path of the module that takes its place.
        attributes: path of a module and name of an attribute → its value in the shallower model.
    """

    stacks: Mapping[str, Kept]
    removed: Sequence[str]
    targets: Mapping[str, Writer]
    moved: Mapping[str, str]
    attributes: Mapping[tuple[str, str], Any]

    def drop_(self, model: PreTrainedModel) -> None:
        """Remove the layers in place. The others keep the names that they have in the dense model."""
        copy_configs_(model)
        by_config = _by_config(model, self.stacks)
        held = [config for module in model.modules() for config in vars(module).values()]
        parts = [part for one in held if isinstance(one, PretrainedConfig) for part in configs_inside(one)]
        for config in {id(part): part for part in parts}.values():
            _shorten_(config, by_config)
        for name, source in self.moved.items():
            model.set_submodule(name, model.get_submodule(source))
        for (name, attribute), value in self.attributes.items():
            setattr(model.get_submodule(name), attribute, value)
        for name in self.removed:
            path, _, number = name.rpartition(".")
            layers = model.get_submodule(path)
            layers.__class__ = _Gapped
            del layers._modules[number]

    def renumber_(self, model: PreTrainedModel) -> None:
        """Number the remaining layers from 0, in place."""
        for path in self.stacks:
            layers = model.get_submodule(path)
            layers.__class__, modules = nn.ModuleList, list(layers._modules.values())
            layers._modules.clear()
            layers._modules.update({str(number): module for number, module in enumerate(modules)})

    def renamed(self, name: str) -> str:
        """Return the path that a module has in the shallower model."""
        path, _, number = layer_of(name).rpartition(".")
        if path not in self.stacks or int(number) not in self.stacks[path].numbers:
            return name
        return f"{path}.{self.stacks[path].numbers.index(int(number))}{name.removeprefix(f'{path}.{number}')}"


def deep_stacks(model: PreTrainedModel, layers: int) -> dict[str, list[str]]:
    """Return the lists of numbered layers that have more than `layers`: path → paths of the layers.

    Raises:
        CompressionError: none has more, or the model is edited.
        UnsupportedModelError: the layers of a stack cannot be removed.
    """
    class_name, values = type(model).__name__, model.config.to_dict()
    if edits_of(model):
        raise CompressionError(
            f"{class_name} is edited already; pass layers with the first widths, or start from the dense checkpoint"
        )
    stacks: dict[str, list[str]] = {}
    for name in numbered_layers(model):
        stacks.setdefault(name.rpartition(".")[0], []).append(name)
    most = max(map(len, stacks.values()), default=0)
    calls = max((values[name] for name in COUNTS if isinstance(values.get(name), int)), default=0)
    if most == 1 < calls:
        raise UnsupportedModelError(
            f"{class_name} calls one layer {calls} times, so that none can be removed; leave out layers"
        )
    if most <= layers:
        raise CompressionError(
            f"layers is {layers}, and the deepest stack of {class_name} has {most}; pass fewer than that"
        )
    stacks = {path: names for path, names in stacks.items() if len(names) > layers}
    for path in stacks:
        around = [type(module).__name__ for module in _around(model, path)]
        reasons = [f"{name} reads some of them by number" for name in around if any(one in name for one in READERS)]
        if values.get("scale_attn_by_inverse_layer_idx"):
            reasons.append("attention is scaled by their numbers")
        if reasons:
            raise UnsupportedModelError(f"layers of {path} cannot be removed: {reasons[0]}; leave out layers")
    return stacks


def _around(model: PreTrainedModel, path: str) -> list[nn.Module]:
    """Return the modules that hold the one at a path, the outermost first."""
    parts = path.split(".")
    return [model.get_submodule(".".join(parts[:end])) for end in range(len(parts))]


def ends_of(model: PreTrainedModel, layers: SingleLayers, writers: Sequence[Writer]) -> dict[str, End]:
    """Return the end of each numbered layer that writes to the residual stream, by its path.

    Args:
        model: dense, in evaluation mode.
        layers: of the model, as `single_layers` returns them.
        writers: of the model, in the order of calls.
    """
    last = {writer.layer: writer for writer in writers}
    return {layer: End(writer, _behind(model, writer, layers[layer])) for layer, writer in last.items()}


def _behind(model: PreTrainedModel, writer: Writer, run: Callable[[], Tensor]) -> list[str]:
    """Return the modules of a layer that are called only after a writer's outputs have been added to the stream."""
    calls: list[str] = []
    with ExitStack() as hooks:

        def note(register: Callable[..., Any], event: str) -> None:
            hooks.enter_context(register(lambda *_: calls.append(event)))

        at = model.get_submodule(writer.at)
        note(model.get_submodule(writer.name).register_forward_hook, WRITTEN)
        note(at.register_forward_pre_hook if writer.shown == "inputs" else at.register_forward_hook, ADDED)
        for name, module in model.get_submodule(writer.layer).named_modules(prefix=writer.layer):
            if module._parameters:
                note(module.register_forward_pre_hook, name)
        run()
    added = [*calls, ADDED].index(ADDED, calls.index(WRITTEN))
    return [name for name in dict.fromkeys(calls[added + 1 :]) if name not in (*calls[:added], ADDED)]


def _are_alike(model: PreTrainedModel, one: End | None, other: End | None) -> bool:
    """Return whether the stream behind one layer's last writer can stand for that behind another's."""
    if one is None or other is None or one.writer.at == one.writer.name:  # the latter's outputs are normalised first
        return False

    def description(end: End) -> list[Any]:
        names = [name.removeprefix(end.writer.layer) for name in (end.writer.name, end.writer.at, *end.behind)]
        return [names, end.writer.shown, [_shapes(model.get_submodule(name)) for name in end.behind]]

    return description(one) == description(other)


def _shapes(module: nn.Module, recurse: bool = True) -> dict[str, tuple[int, ...]]:
    tensors = module.state_dict()
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if recurse or "." not in name}


def depth_of(
    model: PreTrainedModel, stacks: Mapping[str, Sequence[str]], removed: Sequence[str], ends: Mapping[str, End]
) -> Depth:
    """Return what follows from the removal of some layers of a dense model.

    Args:
        model: dense.
        stacks: as `deep_stacks` returns them.
        removed: paths of the layers that go.
        ends: of the layers, as `ends_of` returns them; none if nothing is refitted.

    Raises:
        UnsupportedModelError: no stock model has the remaining layers.
    """
    kept = {
        path: Kept([number for number, name in enumerate(names) if name not in removed], len(names))
        for path, names in stacks.items()
    }
    targets: dict[str, Writer] = {}
    moved: dict[str, str] = {}
    for path, (numbers, total) in kept.items():
        for number, following in zip(numbers, (*numbers[1:], total), strict=True):
            before, end = (ends.get(stacks[path][place]) for place in (number, following - 1))
            if before is not end and before is not None and end is not None and _are_alike(model, before, end):
                targets[before.writer.name] = end.writer
                moved.update(zip(before.behind, end.behind, strict=True))
    depth = Depth(kept, removed, targets, moved, {})
    return replace(depth, attributes=_changed_attributes(model, depth))


def _by_config(model: PreTrainedModel, stacks: Mapping[str, Kept]) -> dict[type, list[Kept]]:
    """Return stacks by the class of the innermost config around them."""
    by_config: dict[type, list[Kept]] = {}
    for path, kept in stacks.items():
        configs = [getattr(module, "config", None) for module in _around(model, path)]
        innermost = [config for config in configs if isinstance(config, PretrainedConfig)][-1]
        by_config.setdefault(type(innermost), []).append(kept)
    return by_config


def _shorten_(config: PretrainedConfig, stacks: Mapping[type, Sequence[Kept]]) -> None:
    """Set the numbers of layers in a config, and shorten its lists with an entry for each layer, in place."""
    of_config = stacks.get(type(config), ())
    for name, value in config.to_dict().items() if of_config else ():
        if name in COUNTS and isinstance(value, int):
            setattr(config, name, min(value, len(of_config[0].numbers)))
        elif "layer" in name and isinstance(value, list | tuple):
            for kept in of_config:
                if len(value) == kept.total:
                    setattr(config, name, type(value)(value[number] for number in kept.numbers))
                    break
    if of_config and getattr(config, "stage_names", None):  # which only backbones read; those are refused
        count = len(of_config[0].numbers)
        config.stage_names = config.stage_names[: count + 1]
        config._out_features, config._out_indices = config.stage_names[-1:], [count]


def _changed_attributes(model: PreTrainedModel, depth: Depth) -> dict[tuple[str, str], Any]:
    """Build stock models before and after the removal; return the attributes of modules that differ.

    These are numbers of layers, and dropout that depends on them.

    Raises:
        UnsupportedModelError: anything else differs.
    """
    config, class_name = copy.deepcopy(model.config), type(model).__name__
    by_config = _by_config(model, depth.stacks)
    for part in list(configs_inside(config)):
        _shorten_(part, by_config)
    layers = len(next(iter(depth.stacks.values())).numbers)

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
    if any(_shapes(model.get_submodule(path)) != _shapes(dense.get_submodule(path)) for path in depth.stacks):
        raise UnsupportedModelError(f"the layers of {class_name} are not those of its config; leave out layers")
    others, changed = dict(shallow.named_modules()), {}
    for path, module in dense.named_modules():
        layer = layer_of(path)
        if layer in depth.removed:
            continue
        name = depth.renamed(path)
        other = others.pop(name, None)
        if (
            other is None
            or type(other).__name__ != type(module).__name__
            or _shapes(module, False) != _shapes(other, False)
        ):
            raise refusal(f"its {name} is another than {path}")
        shift = 0 if name == path else int(layer.rpartition(".")[2]) - int(layer_of(name).rpartition(".")[2])
        for attribute, value in vars(module).items():
            new = vars(other).get(attribute, None if layer else value)
            if not isinstance(value, int | float | str | None) or attribute.startswith("_") or new == value:
                continue
            is_number = type(value) is type(new) is int and value - new in (shift, 0 if layer else value - layers)
            if not is_number and "drop" not in attribute:
                raise refusal(f"{attribute} of its {name} is {new!r}, that of {path} {value!r}")
            changed[path, attribute] = new
    if others:
        raise refusal(f"it has {next(iter(others))}")
    return changed


def choose_layers(
    model: PreTrainedModel,
    stacks: Mapping[str, Sequence[str]],
    layers: int,
    ends: Mapping[str, End],
    used: Sequence[Batch],
    held_back: Sequence[Batch],
    *,
    refit: bool,
    progress: Progress,
) -> list[str]:
    """Return the layers to remove: those without which the last hidden states of their stack move least.

    Args:
        model: dense.
        stacks: as `deep_stacks` returns them.
        layers: number of layers that each keeps.
        ends: of the layers, as `ends_of` returns them.
        used: batches to refit to, of which up to 256 sequences are.
        held_back: batches to measure on.
        refit: whether gaps are refitted.
        progress: called with a stack's name, how many of its layers are removed, and how many are to be.

    Raises:
        UnsupportedModelError: a layer does not read what the one before it returned, or must stay.
        CalibrationError: batches take different ways through the model.
    """
    trial, removed = sharing_copy(model), set()
    with evaluation_mode(trial), Room() as room:
        states = States(model, trial, room)
        states.capture(in_parts(sample_sequences(used, MEASURED)), in_parts(held_back))
        for path, names in stacks.items():
            search, count = _Search(states, names, ends, refit), len(names) - layers
            if len(search.fixed) > layers:
                raise UnsupportedModelError(
                    f"{len(search.fixed)} of the {len(names)} layers of {path} are unlike the others, and must stay; "
                    "pass more layers, or leave out layers"
                )
            for done in range(count):
                progress(path, done, count)
                removed.add(search.remove_one())
    return [name for names in stacks.values() for name in names if name in removed]


class _Search:
    """A stack from which one layer after the other is removed, and the hidden states before each that remains."""

    def __init__(self, states: States, names: Sequence[str], ends: Mapping[str, End], refit: bool) -> None:
        self.states, self.names, self.ends, self.refit = states, names, [ends.get(name) for name in names], refit
        self.model, self.batches = states.converted, range(len(states.calls))
        self.held_back = self.batches[len(states.used) :]
        self.first = states.layers[names[0]].start
        for number, name in enumerate(names):
            if states.layers[name] != range(self.first + number, self.first + number + 1):
                raise UnsupportedModelError(f"{name} is called several times; leave out layers")
        shapes = [str(_shapes(self.model.get_submodule(name))) for name in names]
        usual = Counter(reversed(shapes)).most_common(1)[0][0]  # of two, the second: often the first has a part more
        self.fixed = {number for number, own in enumerate(shapes) if own != usual}
        self.kept = list(range(len(names) + 1))  # numbers of the remaining layers, and that of the stack's end
        starts = (calls[self.first].hidden for calls in states.calls)
        self.before: dict[int, list[Tensor]] = {0: [hidden for hidden in starts if hidden is not None]}
        self.streams: list[list[Tensor]] = [[] for _ in names]  # of the dense model, after the last writer
        for number, end in enumerate(self.ends):
            with written_by(self.model, [] if end is None else [end.writer]) as written:
                self.before[number + 1] = []
                for batch in self.batches:
                    returned = self._run(number, batch, self.before[number][batch])
                    read = None if number + 1 == len(names) else states.calls[batch][self.first + number + 1].hidden
                    if read is not None and bool((read.to(returned) - returned).norm() > SAME * returned.norm()):
                        raise UnsupportedModelError(
                            f"{names[number + 1]} does not read what the layer before it returned; leave out layers"
                        )
                    self.before[number + 1].append(states.keep(returned))
                    self.streams[number] += [states.keep(call.stream) for call in written.values()]
                    written.clear()
        sites = [end.writer.site for end in self.ends if end is not None]
        if not sites:
            raise UnsupportedModelError(f"{names[0]} writes to no residual stream; leave out layers")
        self.site = sites[0]
        self.dense = [self._directions(batch, self.before[len(names)][batch]) for batch in self.held_back]
        self.variance = torch.cat(self.dense).var(0, correction=0).clamp(min=1e-12)

    def _run(self, number: int, batch: int, hidden: Tensor) -> Tensor:
        return self.states.calls[batch][self.first + number].run(self.model, hidden)

    def _directions(self, batch: int, hidden: Tensor) -> Tensor:
        """Return hidden states (n, D) at unpadded tokens, each divided by its length."""
        tokens = unpadded(hidden.to(self.model.device), masks_of(self.site, self.states.masks[batch]).query).float()
        directions: Tensor = tokens / tokens.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        return directions

    def remove_one(self) -> str:
        """Remove the layer without which the last hidden states move least; return its path."""
        places = [place for place, number in enumerate(self.kept[:-1]) if number not in self.fixed]
        trials = {place: self._moved_without(place) for place in places}
        place = min(trials, key=lambda place: trials[place][0])
        self.model.set_submodule(self.names[self.kept[max(place - 1, 0)]], trials[place][1])
        number = self.kept.pop(place)
        hidden = self.before.pop(number)
        if place == 0:
            self.before[self.kept[0]] = hidden
        for layer, following in pairwise(self.kept[max(place - 1, 0) :]):
            runs = (self._run(layer, batch, self.before[layer][batch]) for batch in self.batches)
            self.before[following] = [self.states.keep(hidden) for hidden in runs]
        return self.names[number]

    def _moved_without(self, place: int) -> tuple[float, nn.Module]:
        """Return by how much the last hidden states move without a layer, and the one before it, refitted.

        Args:
            place: of the layer among those that remain. Before the first there is none, and it is returned itself.
        """
        first, error = max(place - 1, 0), torch.zeros_like(self.variance)
        name = self.names[self.kept[first]]
        layer, refitted = self.model.get_submodule(name), self._refitted(place)
        self.model.set_submodule(name, refitted)
        for dense, batch in zip(self.dense, self.held_back, strict=True):
            hidden = self.before[self.kept[first]][batch]
            for number in (*self.kept[first:place], *self.kept[place + 1 : -1]):
                hidden = self._run(number, batch, hidden)
            error += (self._directions(batch, hidden) - dense).square().sum(0)
        self.model.set_submodule(name, layer)
        return float((error / self.variance).mean()), refitted

    def _refitted(self, place: int) -> nn.Module:
        """Return a copy of the layer before a gap, fitted to the dense stream behind it; itself if nothing is."""
        number, last = self.kept[max(place - 1, 0)], self.kept[place + 1] - 1
        layer: nn.Module = self.model.get_submodule(self.names[number])
        before, end = self.ends[number], self.ends[last]
        if not (place and self.refit and before and end and _are_alike(self.model, before, end)):
            return layer
        writer, gathered = before.writer, Fit()
        with written_by(self.model, [writer]) as written:
            for batch in self.batches:
                self._run(number, batch, self.before[number][batch])
                call = written.pop(writer.name)
                mask = masks_of(writer.site, self.states.masks[batch]).query
                target = as_read(self.model, writer, call.stream, self.streams[last][batch])
                gathered.add(call.inputs, call.stream, target, writer, mask, batch in self.states.used)
        fitted = solve(gathered, writer, self.model.get_submodule(writer.name), None, self.states.sequences)
        copied: nn.Module = copy.deepcopy(
            layer, {id(tensor): tensor for tensor in layer.state_dict(keep_vars=True).values()}
        )
        self.model.set_submodule(self.names[number], copied)
        install_refits(self.model, [fitted])
        for name, source in zip(before.behind, end.behind, strict=True):
            self.model.set_submodule(name, self.model.get_submodule(source))
        return copied
