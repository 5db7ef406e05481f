r"""Remove whole layers from each stack of numbered layers, so that a stock model with fewer layers comes out.

**Which layers.** One after the other goes the layer without which the last hidden states of its stack move least:
each token is divided by its length, each channel by its spread. That is measured on the held-back sequences, with the
gap refitted on up to 256 others. Layers run alone, from hidden states that are kept before each. So removing
one layer from a stack of L takes about L/2 passes of the held-back sequences through the stack, and one of the
sequences that gaps are refitted to: those before the last layer that went are not refitted again.

**Across a gap.** The last layer that writes to the residual stream before a gap is refitted towards the dense stream
behind the gap, in closed form (`fit`; where a LayerNorm follows, towards what that leaves of it). What its numbered
layer does behind that writer (the last norm, where norms come last) is taken from the last removed layer. Where a
stack begins with a gap, later refits repair what they can.

**The config** follows: numbers of layers, and lists with an entry for each. A stock model of that config must have
the same layers as the model; if it has not (where every second layer is of another kind), the model is refused.
"""

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from collab_compress.architectures import find_attention
from collab_compress.calibration.batches import in_parts, sample_sequences
from collab_compress.calibration.gather import masks_of, unpadded
from collab_compress.checkpoint import edits_of
from collab_compress.checkpoint.edits import configs_inside, copy_configs_
from collab_compress.conversion.chain import SAME, Room, layer_of, numbered_layers, undivided
from collab_compress.conversion.copies import sharing_copy
from collab_compress.conversion.data import Data
from collab_compress.conversion.feed_forward import Structure
from collab_compress.conversion.fit import Fit, as_read, install_refits, solve
from collab_compress.conversion.layers import States, written_by
from collab_compress.conversion.maps import RUNNING, Progress
from collab_compress.conversion.widths import MEASURED
from collab_compress.conversion.writers import Writer
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
Numbers: TypeAlias = Sequence[int | None]
"""The new number of each layer of a stack; None if it goes."""


class End(NamedTuple):
    """The end of a numbered layer.

    Args:
        writer: the last of its linear layers that write to the residual stream.
        behind: paths of its modules with parameters that are called when that has been added to the stream.
        kind: equal at ends whose streams can stand for each other.
    """

    writer: Writer
    behind: Sequence[str]
    kind: str


class _Gapped(nn.ModuleList):
    """A list whose modules keep their names where others are removed."""

    def _get_abs_string_index(self, idx: int) -> str:
        return [*self._modules][idx]


@dataclass(frozen=True)
class Depth:
    """The layers that a model loses, and what follows from that.

    Args:
        stacks: path of each list of numbered layers that loses some → their new numbers.
        removed: paths of the layers that go, in the model's order.
        targets: path of the last writer before a gap → the last one in the gap, to whose dense stream it is fitted.
        moved: path of a module in the layer before a gap → path of the module that takes its place.
        attributes: path of a module and name of an attribute → its value in the shallower model.
    """

    stacks: Mapping[str, Numbers]
    removed: Sequence[str]
    targets: Mapping[str, Writer]
    moved: Mapping[str, str]
    attributes: Mapping[tuple[str, str], Any]

    def drop_(self, model: PreTrainedModel) -> str:
        """Remove the layers in place, and return a note for the report or "".

        The others keep the names that they have in the dense model.
        """
        copy_configs_(model)

        def renumbered(_: int, name: str, head: int) -> tuple[int, int] | None:
            layer = layer_of(name)
            return None if layer in self.removed else (int(self.renamed(layer).rpartition(".")[2]), head)

        note = renumber_alignment_heads_(model, renumbered)
        held = [value for module in model.modules() for value in vars(module).values()]
        _shorten_([value for value in held if isinstance(value, PretrainedConfig)], model, self.stacks)
        for name, source in self.moved.items():
            model.set_submodule(name, model.get_submodule(source))
        for (name, attribute), value in self.attributes.items():
            setattr(model.get_submodule(name), attribute, value)
        for name in self.removed:
            path, _, number = name.rpartition(".")
            layers = model.get_submodule(path)
            layers.__class__ = _Gapped
            del layers._modules[number]
        return note

    def renumber_(self, model: PreTrainedModel) -> None:
        """Number the remaining layers from 0, in place."""
        for path in self.stacks:
            layers = model.get_submodule(path)
            layers.__class__ = nn.ModuleList
            layers._modules = {str(number): module for number, module in enumerate(layers.children())}

    def renamed(self, name: str) -> str:
        """Return the path that a module has in the shallower model."""
        path, _, number = layer_of(name).rpartition(".")
        new = self.stacks[path][int(number)] if path in self.stacks else None
        return name if new is None else f"{path}.{new}{name.removeprefix(f'{path}.{number}')}"


def deep_stacks(model: PreTrainedModel, layers: int) -> dict[str, list[str]]:
    """Return the lists of numbered layers that have more than `layers`: path → paths of the layers.

    Raises:
        CompressionError: none has more, or the model is edited or carries adapters.
        UnsupportedModelError: the layers of a stack cannot be removed.
    """
    class_name, values = type(model).__name__, model.config.to_dict()
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
    by_path = groupby(numbered_layers(model), lambda name: name.rpartition(".")[0])
    stacks = {path: list(names) for path, names in by_path}
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
    numbered = _numbered_layers_settings(model)
    for path in stacks:
        around = [type(module).__name__ for module in _around(model, path)]
        reasons = [f"{name} reads some of them by number" for name in around if any(one in name for one in READERS)]
        if values.get("scale_attn_by_inverse_layer_idx"):
            reasons.append("attention is scaled by their numbers")
        reasons += [
            f"{name} of the configs names layers by number"
            for name in numbered
            if not name.startswith("vision") or "vision" in path
        ]
        if reasons:
            raise UnsupportedModelError(f"layers of {path} cannot be removed: {reasons[0]}; leave out layers")
    return stacks


def _numbered_layers_settings(model: PreTrainedModel) -> list[str]:
    """Return the names of the settings that name layers by number, other than the last one."""
    holders: list[Any] = [*configs_inside(model.config), getattr(model, "generation_config", None)]
    settings = [setting for holder in holders if holder is not None for setting in vars(holder).items()]
    last: tuple[Any, ...] = (-1, [-1], (-1,), [], ())
    return [
        name
        for name, value in settings
        if LAYER_NUMBERS.search(name)
        and isinstance(value, int | list | tuple)
        and not isinstance(value, bool)
        and value not in last
    ]


def _around(model: PreTrainedModel, path: str) -> list[nn.Module]:
    """Return the modules that hold the one at a path, the outermost first."""
    parts = path.split(".")
    return [model.get_submodule(".".join(parts[:end])) for end in range(len(parts))]


def find_depth(structure: Structure, layers: int, data: Data, refits: bool, progress: Progress) -> Depth:
    """Choose the layers that go, and return them with what follows from that.

    Args:
        structure: of the dense model.
        layers: number of layers that each stack keeps.
        data: to refit to, up to 256 sequences, and to measure on.
        refits: whether the layers before gaps are refitted.
        progress: called with what is being done, how many layers of a stack are removed, and how many are to be.

    Raises:
        UnsupportedModelError: a layer does not read what the one before it returned, too many must stay, or no stock
            model has those that would.
        CalibrationError: batches take different ways through the model.
    """
    model = structure.model
    stacks, last = deep_stacks(model, layers), {writer.layer: writer for writer in structure.writers if refits}
    with undivided(model):
        ends = {layer: _end(model, writer, structure.layers[layer]) for layer, writer in last.items()}
    return _without(model, stacks, choose_layers(model, stacks, layers, ends, data, progress), ends)


def _end(model: PreTrainedModel, writer: Writer, run: Callable[[], Tensor]) -> End:
    """Return the end of a layer with this last writer, by calling the layer alone."""
    calls: list[tuple[str, str]] = []
    with ExitStack() as hooks:
        for name, module in model.get_submodule(writer.layer).named_modules(prefix=writer.layer):
            read, returned = (lambda *_, call=(name, shown): calls.append(call) for shown in ("inputs", "outputs"))
            hooks.enter_context(module.register_forward_pre_hook(read))
            hooks.enter_context(module.register_forward_hook(returned))
        run()
    added = calls.index((writer.at, writer.shown), calls.index((writer.name, "outputs")))
    before = {name for name, _ in calls[:added]}
    later = dict.fromkeys(name for name, _ in calls[added:] if name not in before)
    behind = [name for name in later if model.get_submodule(name)._parameters]
    if writer.at == writer.name:  # outputs are normalised before they are added: nothing can stand for them
        return End(writer, behind, writer.name)
    paths = [name.removeprefix(writer.layer) for name in (writer.name, writer.at, *behind)]
    kinds = [_kind(model.get_submodule(name)) for name in behind]
    return End(writer, behind, str((paths, writer.shown, kinds)))


def _kind(module: nn.Module, recurse: bool = True) -> str:
    """Return the class of a module, and the names and shapes of its parameters."""
    shapes = [(name, *parameter.shape) for name, parameter in module.named_parameters(recurse=recurse)]
    return f"{type(module).__name__} {shapes}"


def _without(
    model: PreTrainedModel, stacks: Mapping[str, Sequence[str]], removed: Sequence[str], ends: Mapping[str, End]
) -> Depth:
    """Return what follows from the removal of some layers; without ends, nothing is refitted."""
    new_numbers: dict[str, Numbers] = {}
    targets: dict[str, Writer] = {}
    moved: dict[str, str] = {}
    for path, names in stacks.items():
        stay = [number for number, name in enumerate(names) if name not in removed]
        new_numbers[path] = [stay.index(number) if number in stay else None for number in range(len(names))]
        for number, following in pairwise((*stay, len(names))):
            before, end = (ends.get(names[place]) for place in (number, following - 1))
            if before and end and before is not end and before.kind == end.kind:
                targets[before.writer.name] = end.writer
                moved.update(zip(before.behind, end.behind, strict=True))
    depth = Depth(new_numbers, removed, targets, moved, {})
    return replace(depth, attributes=_changed_attributes(model, depth))


def _shorten_(configs: Iterable[PretrainedConfig], model: PreTrainedModel, stacks: Mapping[str, Numbers]) -> None:
    """Set the numbers of layers in configs of a model, and shorten lists with an entry for each layer, in place."""
    by_config: dict[type, list[Numbers]] = {}  # by the class of the innermost config around a stack
    for path, numbers in stacks.items():
        around = [getattr(module, "config", None) for module in _around(model, path)]
        innermost = [config for config in around if isinstance(config, PretrainedConfig)][-1]
        by_config.setdefault(type(innermost), []).append(numbers)
    parts = {id(part): part for config in configs for part in configs_inside(config)}
    for config in [part for part in parts.values() if type(part) in by_config]:
        of_config = by_config[type(config)]
        count = len(of_config[0]) - of_config[0].count(None)
        for name, value in config.to_dict().items():
            if name in COUNTS and isinstance(value, int):
                setattr(config, name, min(value, count))
            elif "layer" in name and isinstance(value, list | tuple):
                numbers = next((numbers for numbers in of_config if len(numbers) == len(value)), range(len(value)))
                kept = [part for part, number in zip(value, numbers, strict=True) if number is not None]
                setattr(config, name, type(value)(kept))
        if getattr(config, "stage_names", None):  # which only backbones read; those are refused
            config.stage_names = config.stage_names[: count + 1]
            config._out_features, config._out_indices = config.stage_names[-1:], [count]


def _changed_attributes(model: PreTrainedModel, depth: Depth) -> dict[tuple[str, str], Any]:
    """Build stock models before and after the removal; return the attributes of modules that differ.

    These are numbers of layers, and dropout that depends on them.

    Raises:
        UnsupportedModelError: anything else differs.
    """
    config, class_name = copy.deepcopy(model.config), type(model).__name__
    _shorten_([config], model, depth.stacks)
    numbers = next(iter(depth.stacks.values()))
    layers = len(numbers) - numbers.count(None)

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
    if any(_kind(model.get_submodule(path)) != _kind(dense.get_submodule(path)) for path in depth.stacks):
        raise UnsupportedModelError(f"the layers of {class_name} are not those of its config; leave out layers")
    others, changed = dict(shallow.named_modules()), {}
    for path, module in dense.named_modules():
        layer = layer_of(path)
        if layer in depth.removed:
            continue
        name = depth.renamed(path)
        other = others.pop(name, None)
        if other is None or _kind(other, recurse=False) != _kind(module, recurse=False):
            raise refusal(
                f"its {name} is another than {path}" if path else f"{class_name} has weights for each layer"
            )
        shift = 0 if name == path else int(layer.rpartition(".")[2]) - int(layer_of(name).rpartition(".")[2])
        for attribute, value in vars(module).items():
            new = vars(other).get(attribute, None if layer else value)
            if not isinstance(value, int | float | str | None) or attribute.startswith("_") or new == value:
                continue
            is_number = type(value) is type(new) is int and value - new in (shift, 0 if layer else value - layers)
            if not is_number and "drop" not in attribute:
                at = f"{attribute} of its {name}" if path else f"its {attribute}"
                raise refusal(f"{at} is {new!r}, that of {path or 'the dense model'} {value!r}")
            changed[path, attribute] = new
    if others:
        raise refusal(f"it has {next(iter(others))}")
    return changed


def choose_layers(
    model: PreTrainedModel,
    stacks: Mapping[str, Sequence[str]],
    layers: int,
    ends: Mapping[str, End],
    data: Data,
    progress: Progress,
) -> list[str]:
    """Return the layers to remove: those without which the last hidden states of their stack move least."""
    trial, removed = sharing_copy(model), set()
    with undivided(trial), Room() as room:
        states = States(model, trial, room)
        progress(RUNNING, 0, None)
        states.capture(in_parts(sample_sequences(data.used, MEASURED)), in_parts(data.held_back))
        for path, names in stacks.items():
            search, count = _Search(states, names, ends), len(names) - layers
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

    def __init__(self, states: States, names: Sequence[str], ends: Mapping[str, End]) -> None:
        self.states, self.names, self.ends = states, names, [ends.get(name) for name in names]
        self.model, self.held_back = states.converted, range(len(states.used), len(states.calls))
        self.site = next(site for site in find_attention(self.model) if layer_of(site.name) in names)
        start = states.layers[names[0]].start
        self.calls = [calls[start : start + len(names)] for calls in states.calls]
        if [call.name for call in self.calls[0]] != names:
            raise UnsupportedModelError(
                f"{names[0]} and the layers behind it are not called in turn; leave out layers"
            )
        kinds = [_kind(self.model.get_submodule(name)) for name in names]
        usual = Counter(reversed(kinds)).most_common(1)[0][0]  # of two, the second: often the first has a part more
        self.fixed = {number for number, kind in enumerate(kinds) if kind != usual}
        self.kept = list(range(len(names) + 1))  # numbers of the remaining layers, and that of the stack's end
        self.before = {0: [calls[0].hidden for calls in self.calls if calls[0].hidden is not None]}
        self.streams: list[list[Tensor]] = [[] for _ in names]  # of the dense model, after the last writer
        self.refitted: dict[int, nn.Module] = {}  # number of a layer → the one before it, fitted to its absence
        for number, end in enumerate(self.ends):
            self.before[number + 1] = []
            with written_by(self.model, [end.writer] if end else []) as written:
                for batch, calls in enumerate(self.calls):
                    hidden, read = self.before[number][batch], calls[number].hidden
                    is_same = read is None or read.shape == hidden.shape
                    if not is_same or (
                        read is not None and bool((read.to(hidden) - hidden).norm() > SAME * hidden.norm())
                    ):
                        raise UnsupportedModelError(
                            f"{names[number]} does not read what the layer before it returned; leave out layers"
                        )
                    output = calls[number].run(self.model, hidden)
                    if output.shape != hidden.shape:
                        raise UnsupportedModelError(
                            f"{names[number]} reads hidden states of shape {tuple(hidden.shape)} and returns "
                            f"{tuple(output.shape)}; expected the same, so that a layer can be removed; leave out "
                            "layers"
                        )
                    self.before[number + 1].append(states.keep(output))
                    self.streams[number] += [states.keep(call.stream) for call in written.values()]
                    written.clear()
        outputs = self.before.pop(len(names))
        self.dense = [self._directions(batch, outputs[batch]) for batch in self.held_back]
        self.variance = torch.cat(self.dense).var(0, correction=0).clamp(min=1e-12)

    def _directions(self, batch: int, hidden: Tensor) -> Tensor:
        """Return hidden states (n, D) at unpadded tokens, each divided by its length."""
        tokens = unpadded(hidden.to(self.model.device), masks_of(self.site, self.states.masks[batch]).query).float()
        return nn.functional.normalize(tokens, dim=-1)

    def remove_one(self) -> str:
        """Remove the layer without which the last hidden states move least; return its path."""
        places = [place for place, number in enumerate(self.kept[:-1]) if number not in self.fixed]
        place = min(places, key=self._moved_without)
        first = max(place - 1, 0)
        self.model.set_submodule(self.names[self.kept[first]], self._refitted(place))
        start, number = self.before[self.kept[first]], self.kept.pop(place)
        self.before[self.kept[first]] = start
        for layer, following in pairwise(self.kept[first:-1]):
            reads = zip(self.calls, self.before[layer], strict=True)
            self.before[following] = [self.states.keep(calls[layer].run(self.model, read)) for calls, read in reads]
        self.refitted = {gone: layer for gone, layer in self.refitted.items() if gone < self.kept[first]}
        return self.names[number]

    def _moved_without(self, place: int) -> float:
        """Return by how much the last hidden states move without a layer, given by its place among the remaining."""
        first, error = max(place - 1, 0), torch.zeros_like(self.variance)
        name = self.names[self.kept[first]]
        layer = self.model.get_submodule(name)
        self.model.set_submodule(name, self._refitted(place))
        for dense, batch in zip(self.dense, self.held_back, strict=True):
            hidden = self.before[self.kept[first]][batch]
            for number in (*self.kept[first:place], *self.kept[place + 1 : -1]):
                hidden = self.calls[batch][number].run(self.model, hidden)
            error += (self._directions(batch, hidden) - dense).square().sum(0)
        self.model.set_submodule(name, layer)
        return float((error / self.variance).mean())

    def _refitted(self, place: int) -> nn.Module:
        """Return a copy of the layer before a gap, fitted to the dense stream behind it; itself if nothing is."""
        number, gone, last = self.kept[max(place - 1, 0)], self.kept[place], self.kept[place + 1] - 1
        layer: nn.Module = self.model.get_submodule(self.names[number])
        before, end = self.ends[number], self.ends[last]
        if not (place and before and end and before.kind == end.kind):
            return layer
        if gone in self.refitted:
            return self.refitted[gone]
        writer, gathered = before.writer, Fit()
        with written_by(self.model, [writer]) as written:
            for batch, hidden in enumerate(self.before[number]):
                self.calls[batch][number].run(self.model, hidden)
                call = written.pop(writer.name)
                mask = masks_of(writer.site, self.states.masks[batch]).query
                target = as_read(self.model, writer, call.stream, self.streams[last][batch])
                gathered.add(call.inputs, call.stream, target, writer, mask, batch in self.states.used)
        fitted = solve(gathered, writer, self.model.get_submodule(writer.name), None, self.states.sequences)
        tensors = layer.state_dict(keep_vars=True).values()
        copied: nn.Module = copy.deepcopy(layer, {id(tensor): tensor for tensor in tensors})
        self.model.set_submodule(self.names[number], copied)
        install_refits(self.model, [fitted])
        for name, source in zip(before.behind, end.behind, strict=True):
            self.model.set_submodule(name, self.model.get_submodule(source))
        self.model.set_submodule(self.names[number], layer)
        return self.refitted.setdefault(gone, copied)
