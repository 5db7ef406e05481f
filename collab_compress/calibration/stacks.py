"""Find the numbered layers of a model by running it: lists of modules that pass on hidden states, one by one.

Nothing of a layer has to be known, so this holds for every architecture.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import AttentionSite
from collab_compress.calibration.batches import is_divisible, sequence_count, slice_batch
from collab_compress.calibration.gather import (
    AttentionMasks,
    Batch,
    MaskKind,
    evaluation_mode,
    masks_of,
    run_batch,
)

PROBE_SEQUENCES = 2  # that show how a model is built


class StreamMask(NamedTuple):
    """Which attention mask says what of hidden states is padding, where no attention module says it."""

    kind: MaskKind
    appends: bool  # whether the model appends padding of its own to the tokens, up to whole windows (Longformer)

    def of(self, masks: Mapping[MaskKind, AttentionMasks], values: Tensor) -> Tensor | None:
        """Return which vectors of `values` (B, T, D) are no padding; None where the mask has another shape."""
        mask = masks[self.kind].query
        if mask is not None and self.appends and mask.shape[1] < values.shape[1]:
            mask = nn.functional.pad(mask, (0, values.shape[1] - mask.shape[1]))
        return mask if mask is not None and mask.shape == values.shape[:2] else None


@dataclass(frozen=True)
class Stack:
    """A list of numbered layers.

    Args:
        path: path of the list.
        layers: paths of the layers.
        shape: of the hidden states that the first layer reads, (…, D).
        mask: which attention mask says what is padding; None where hidden states are not ordered by sequence.
    """

    path: str
    layers: Sequence[str]
    shape: torch.Size
    mask: StreamMask | None


class HiddenArgument(NamedTuple):
    """The argument of a layer that holds hidden states, the first or the one of that name."""

    value: Any
    keyword: str  # empty for the first positional argument

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "HiddenArgument":
        """Return the argument of a call."""
        if args:
            return cls(args[0], "")
        keyword = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs), "")
        return cls(kwargs.get(keyword), keyword)


def returned_states(output: Any) -> Any:
    """Return the hidden states that a layer returns, alone or first; None if it returns no tensor."""
    while not isinstance(output, Tensor):
        if isinstance(output, Mapping):
            output = tuple(output.values())
        if not isinstance(output, tuple | list) or not output:
            return None
        output = output[0]
    return output


def probe_of(batch: Batch) -> Batch:
    """Return the first sequences of a batch, enough to show how a model is built."""
    if sequence_count(batch) > PROBE_SEQUENCES and is_divisible(batch):
        return slice_batch(batch, slice(PROBE_SEQUENCES))
    return batch


def layer_of(path: str, layers: Collection[str]) -> str:
    """Return which of these layers holds the module at `path`; empty if none does."""
    parts = path.split(".")
    starts = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((start for start in starts if start in layers), "")


def find_stacks(model: PreTrainedModel, batch: Batch) -> list[Stack]:
    """Find the lists of numbered layers of a model, in the model's order.

    These are the lists of modules with linear layers inside, of which each is called, in the order of their numbers,
    and returns hidden states as wide as those that it reads. Lists inside the layers of another one do not count.

    Args:
        model: stock or edited; left in the mode it was in.
        batch: keyword arguments for the model, of which two sequences are run.
    """
    lists = {
        path: [f"{path}.{name}" for name, _ in module.named_children()]
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(map(_may_be_layer, module))
    }
    shapes: dict[str, torch.Size | None] = {}  # path of a called layer → shape of what it reads; None for no layer
    read: dict[str, torch.Size] = {}

    def before(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = HiddenArgument.of(args, kwargs).value
        read[name] = hidden.shape if isinstance(hidden, Tensor) and hidden.is_floating_point() else torch.Size()

    def after(name: str, _: nn.Module, __: Any, output: Any) -> None:
        states = returned_states(output)
        same_width = isinstance(states, Tensor) and 1 < states.dim() == len(read[name])
        same_width = same_width and states.shape[-1] == read[name][-1]
        shapes.setdefault(name, read[name] if same_width else None)

    probe = probe_of(batch)
    with ExitStack() as hooks:
        for name in [name for names in lists.values() for name in names]:
            module = model.get_submodule(name)
            hooks.enter_context(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(after, name)))
        with evaluation_mode(model):
            run_batch(model, probe)
    stacks: list[Stack] = []
    for path, names in lists.items():
        inside = any(path.startswith(f"{stack.path}.") for stack in stacks)
        if inside or [name for name in shapes if name in names] != names or any(not shapes[name] for name in names):
            continue
        shape = shapes[names[0]] or torch.Size()
        is_decoder = model.config.is_encoder_decoder and _holds(_decoder_of(model), model.get_submodule(path))
        mask = None
        if shape[0] == sequence_count(probe):
            ids = "decoder_input_ids" if is_decoder else "input_ids"
            appends = _appends_padding(model, probe, ids, names[0], shape)
            mask = StreamMask("decoder" if is_decoder else "encoder", appends)
        stacks.append(Stack(path, names, shape, mask))
    return stacks


def _appends_padding(model: PreTrainedModel, probe: Batch, name: str, layer: str, shape: torch.Size) -> bool:
    """Return whether a stack's first layer reads the tokens of an argument, and then more: no token moves those."""
    ids = probe.get(name)
    if ids is None or ids.dim() != 2 or len(shape) != 3 or shape[1] <= ids.shape[1]:
        return False
    read: list[Tensor] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        read.append(HiddenArgument.of(args, kwargs).value.clone())

    swapped = ids.clone()
    swapped[:, [0, -1]] = ids[:, [-1, 0]]
    module = model.get_submodule(layer)
    with evaluation_mode(model), module.register_forward_pre_hook(note, with_kwargs=True):
        for tokens in (ids, swapped):
            run_batch(model, {**probe, name: tokens})
    moved = (read[0] != read[-1]).any(-1).any(0)  # (T,)
    return moved.nonzero().flatten().tolist() == [0, ids.shape[1] - 1]


def _may_be_layer(module: nn.Module) -> bool:
    """Return whether a module may be a layer of a model: one with linear layers inside."""
    linear = (nn.Linear, Conv1D)
    if isinstance(module, (nn.ModuleList, *linear)):
        return False
    return any(isinstance(part, linear) for part in module.modules())


def _decoder_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the decoder of a model; None if it does not say which it is."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return decoder if isinstance(decoder, nn.Module) else None


def _holds(module: nn.Module | None, part: nn.Module) -> bool:
    return module is not None and any(inner is part for inner in module.modules())


def stream_mask(
    site: AttentionSite | None,
    mask: StreamMask | None,
    masks: Mapping[MaskKind, AttentionMasks],
    values: Tensor,
) -> Tensor | None:
    """Return which vectors of `values` (…, D) in a layer are no padding; None if nothing says it.

    An attention module says it, or, where none is described, the mask of the stack.
    """
    if site is not None:
        return masks_of(site, masks).query
    return None if mask is None else mask.of(masks, values)
