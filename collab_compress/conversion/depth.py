"""Remove whole layers from each stack of numbered layers, so that a stock model with fewer layers comes out.

`layer_search` chooses them.

**Across a gap.** The last residual linear layer before a gap is refitted towards the dense residual stream behind the
gap, in closed form (`sequential`). What its numbered layer does behind that linear (the last norm of a post-norm
model) is taken from the last removed layer. Where a stack begins with a gap, later refits repair what they can.

**The config** follows: numbers of layers, and lists with an entry for each. A stock model of that config must have
the same layers as the model; if it has not (where every second layer is of another kind), the model is refused.
"""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from collab_compress.calibration.stacks import Stack, layer_lists, layer_of
from collab_compress.checkpoint import edits_of
from collab_compress.checkpoint.edits import configs_inside, configs_of
from collab_compress.conversion.copies import sharing_copy
from collab_compress.conversion.residual import ResidualLinear
from collab_compress.errors import CompressionError, UnsupportedModelError, one_line
from collab_compress.heads.pruning import renumber_alignment_heads_

OF_TWO = ("encoder_layers", "decoder_layers")
COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", *OF_TWO, *(f"num_{name}" for name in OF_TWO))
"""Attributes of configs that may be the number of layers of a stack."""
DEPTHS = re.compile("depths|sizes|layers")
"""Parts of the names of lists with the numbers of layers of several stacks."""
TOKENS = re.compile("(ids?|tokens)$")
"""Ends of the names of lists of tokens, which may be as long as a stack is deep."""
LAYER_NUMBERS = re.compile(
    r"(feature_layers?|layer_ids|(layer|block|visual|attn)s?_(idxs?|index|indexes|indices)|dola_layers)$"
)
"""Names of settings that name layers by number."""
READERS = ("Backbone", "DPT", "Segmentation", "DepthEstimation")
"""Parts of the names of classes that read the hidden states of some layers by number."""
Kept: TypeAlias = Mapping[str, Sequence[int]]
"""Path of each list of numbered layers that loses some → the numbers of those that stay, ascending."""


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
    stacks: Sequence[Stack] = ()  # all lists of numbered layers of the dense model
    all_lists: bool = False  # whether lists of configs have an entry for each layer whatever their name

    def move_(self, model: PreTrainedModel) -> None:
        """Let the layers before gaps end as the last removed layers do, in place."""
        for name, source in self.moved.items():
            model.set_submodule(name, model.get_submodule(source))

    def drop_(self, model: PreTrainedModel, configs: Iterable[PretrainedConfig]) -> str:
        """Remove the layers and number the others from 0, in place, as the model's configs then say.

        Return a note for the report or "".
        """

        def renumbered(layer: int, name: str, head: int) -> tuple[int, int] | None:
            place = self._place_of(name)
            return None if layer_of(name, self.removed) else (place[1] if place else layer, head)

        note = renumber_alignment_heads_(model, renumbered)
        _shorten_(configs, model, self)
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
        if (place := self._place_of(name)) is None:
            return name
        layer, number = place
        return f"{layer.rpartition('.')[0]}.{number}{name.removeprefix(layer)}"

    def _place_of(self, name: str) -> tuple[str, int] | None:
        """Return the path of the layer that holds a module, and the layer's new number; None for other modules."""
        numbers = {f"{path}.{old}": new for path, kept in self.kept.items() for new, old in enumerate(kept)}
        layer = layer_of(name, numbers)
        return (layer, numbers[layer]) if layer else None


def _keep_layers_(model: nn.Module, kept: Kept) -> None:
    """Keep some layers, numbered from 0, in place."""
    for path, numbers in kept.items():
        layers = model.get_submodule(path)
        children = list(layers.children())
        layers._modules = {str(number): children[old] for number, old in enumerate(numbers)}


def refuse_shallower(model: PreTrainedModel, layers: int) -> None:
    """Refuse a model whose layers cannot be numbered anew, or whose lists of layers hold no more than `layers`."""
    class_name = type(model).__name__
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
    lists = layer_lists(model)
    nested = any(path.startswith(f"{other}.") for path in lists for other in lists)
    if lists and not nested:  # nested ones may hold parts of a layer, or be stages
        _check_count(model, max(map(len, lists.values())), layers)


def deep_stacks(model: PreTrainedModel, stacks: Sequence[Stack], layers: int) -> list[Stack]:
    """Return the lists of numbered layers that have more than `layers`."""
    class_name, values = type(model).__name__, model.config.to_dict()
    most = max((len(stack.layers) for stack in stacks), default=0)
    calls = max((values[name] for name in COUNTS if isinstance(values.get(name), int)), default=0)
    if 0 < most < calls:
        called = "one layer" if most == 1 else f"{most} layers in turn,"
        raise UnsupportedModelError(
            f"{class_name} calls {called} {calls} times, so that none can be removed; leave out layers"
        )
    _check_count(model, most, layers)
    deep = [stack for stack in stacks if len(stack.layers) > layers]
    configs = [*configs_inside(model.config)]
    for stack in deep:
        if reason := _why_fixed(model, stack.path, configs):
            raise UnsupportedModelError(f"layers of {stack.path} cannot be removed: {reason}; leave out layers")
    return deep


def _check_count(model: PreTrainedModel, most: int, layers: int) -> None:
    if most <= layers:
        raise CompressionError(
            f"layers is {layers}, and the deepest stack of {type(model).__name__} has {most}; pass fewer than that"
        )


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


def kind_of(module: nn.Module, recurse: bool = True) -> str:
    """Return the class of a module, and the names and shapes of its parameters."""
    shapes = [(name, *parameter.shape) for name, parameter in module.named_parameters(recurse=recurse)]
    return f"{type(module).__name__} {shapes}"


def _shorten_(configs: Iterable[PretrainedConfig], model: PreTrainedModel, depth: Depth) -> None:
    """Set the numbers of layers in configs of a model, and shorten lists with an entry for each layer, in place."""
    by_config: dict[type, list[tuple[int, Sequence[int]]]] = {}  # of the innermost config: depth of each stack, kept
    for stack in depth.stacks:
        around = [getattr(module, "config", None) for module in _holders(model, stack.path)]
        innermost = [config for config in around if isinstance(config, PretrainedConfig)][-1]
        count = len(stack.layers)
        by_config.setdefault(type(innermost), []).append((count, depth.kept.get(stack.path, range(count))))
    for config in [config for config in configs if type(config) in by_config]:
        of_config = by_config[type(config)]
        depths = [count for count, _ in of_config]
        kept = {count: numbers for count, numbers in reversed(of_config) if len(numbers) < count}
        if not kept:
            continue
        count = max(map(len, kept.values()))
        for name, value in config.to_dict().items():
            if name in COUNTS and isinstance(value, int):
                setattr(config, name, min(value, count))
            elif DEPTHS.search(name) and value in ([*depths], tuple(depths)):
                setattr(config, name, type(value)(len(numbers) for _, numbers in of_config))
            elif isinstance(value, list | tuple) and (
                "layer" in name or (depth.all_lists and not TOKENS.search(name))
            ):
                numbers = kept.get(len(value), range(len(value)))
                setattr(config, name, type(value)(value[number] for number in numbers))
        if getattr(config, "stage_names", None):  # which only backbones read; those are refused
            config.stage_names = config.stage_names[: count + 1]
            config._out_features, config._out_indices = config.stage_names[-1:], [count]


def changed_attributes(model: PreTrainedModel, depth: Depth) -> dict[tuple[str, str], Any]:
    """Return in which numbers of layers and dropout a stock model without the layers differs; refuse all else."""
    config, class_name = copy.deepcopy(model.config), type(model).__name__
    _shorten_(configs_inside(config), model, depth)
    layers = len(next(iter(depth.kept.values())))

    def refusal(reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"no {class_name} has the {layers} layers that would stay: {reason}; pass another number, or leave out "
            "layers"
        )

    for before, after in zip(configs_inside(model.config), configs_inside(config), strict=True):
        kinds, left = (str(getattr(one, "layer_types", "")) for one in (before, after))
        if "attention" in kinds and "attention" not in left:
            raise refusal("none of them would have attention, without which its cache does not work")
    try:
        with torch.device("meta"):
            dense, shallow = (type(model)(type(one).from_dict(one.to_dict())) for one in (model.config, config))
    except Exception as error:  # whatever a config or a model raises
        raise refusal(one_line(error)) from error
    if any(kind_of(model.get_submodule(path)) != kind_of(dense.get_submodule(path)) for path in depth.kept):
        raise UnsupportedModelError(f"the layers of {class_name} are not those of its config; leave out layers")
    _keep_layers_(dense, depth.kept)
    places = {f"{path}.{new}": old - new for path, kept in depth.kept.items() for new, old in enumerate(kept)}
    modules, others, changed = dict(dense.named_modules()), dict(shallow.named_modules()), {}
    for name, module in modules.items():
        other = others.get(name)
        if other is None or kind_of(other, recurse=False) != kind_of(module, recurse=False):
            raise refusal(f"its {name} is of another kind" if name else f"{class_name} has weights for each layer")
        layer = layer_of(name, places)
        for attribute, value in vars(module).items():
            new = vars(other).get(attribute, None if layer else value)
            if not isinstance(value, int | float | str | None) or attribute.startswith("_") or new == value:
                continue
            is_number = type(value) is type(new) is int and new == (value - places[layer] if layer else layers)
            if not is_number and "drop" not in attribute:
                raise refusal(f"{attribute} of its {name or class_name} is {new!r}, and not {value!r}")
            changed[name, attribute] = new
    if more := next((name for name in others if name not in modules), ""):
        raise refusal(f"it has {more} too")
    return changed
