"""Find the numbered layers of a model by running it: lists of modules that pass on hidden states, one by one.

Nothing of a layer has to be known, so this holds for every architecture.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
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
    ForwardEnded,
    MaskKind,
    evaluation_mode,
    masks_of,
    run_batch,
)
from collab_compress.errors import CalibrationError

PROBE_SEQUENCES = 2  # that show how a model is built


class StreamMask(NamedTuple):
    """The attention mask that says which hidden states of a stack are padding.

    It is used in layers where no attention module is described. Hidden states may be laid out differently from the
    mask, (B, T); the fields say how, as found by running the model.
    """

    kind: MaskKind
    time_first: bool = False  # hidden states are (T, B, D), as in XLNet
    appends: bool = False  # hidden states are longer: the model fills its last window with padding (Longformer)

    def of(self, masks: Mapping[MaskKind, AttentionMasks], values: Tensor) -> Tensor | None:
        """Return which vectors of `values` (B, T, D), (T, B, D) or (B·T, D) are no padding; None if none is.

        Raises:
            CalibrationError: some tokens are padding, and the mask cannot be matched to the vectors.
        """
        mask = masks[self.kind].query
        if mask is None:
            return None
        positions = values.shape[0 if self.time_first else 1]
        if self.appends and values.dim() > 2 and mask.shape[1] < positions:
            mask = nn.functional.pad(mask, (0, positions - mask.shape[1]))
        shape, mask = mask.shape, mask.T if self.time_first else mask
        if values.dim() == 2 and len(values) == mask.numel():
            return mask
        for layout in (mask, mask.T):  # a layer may transpose what it reads
            if layout.shape == values.shape[:2]:
                return layout
        if bool(mask.all()):
            return None
        raise CalibrationError(
            f"hidden states have shape {tuple(values.shape)}, and the mask of the batch has shape {tuple(shape)}, so "
            "it does not say what is padding; pass batches without padding"
        )


@dataclass(frozen=True)
class Stack:
    """A list of numbered layers.

    Args:
        path: path of the list.
        layers: paths of the layers.
        shape: of the hidden states that the first layer reads, (…, D).
        mask: which attention mask says what is padding. None where no mask can say it, as in a tower that reads only
            images, or where hidden states are in windows: then all vectors count, padding too.
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


def layer_lists(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return the lists of modules with linear layers inside, by path, with the paths of these modules."""
    return {
        path: [f"{path}.{name}" for name, _ in module.named_children()]
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(map(_may_be_layer, module))
    }


def find_stacks(model: PreTrainedModel, batch: Batch) -> list[Stack]:
    """Find the lists of numbered layers of a model, in the model's order.

    These are the lists of modules with linear layers inside, of which each is called, in the order of their numbers,
    and returns hidden states as wide as those that it reads. Lists inside the layers of another one do not count.

    Args:
        model: stock or edited; left in the mode it was in.
        batch: keyword arguments for the model, of which two sequences are run.
    """
    lists = layer_lists(model)
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
    found: dict[str, list[str]] = {}
    for path, names in lists.items():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if not inside and [name for name in shapes if name in names] == names and all(shapes[name] for name in names):
            found[path] = names
    decoder = _decoder_of(model) if model.config.is_encoder_decoder else None
    firsts: dict[MaskKind, dict[str, torch.Size]] = {"encoder": {}, "decoder": {}}
    for path, (first, *_) in found.items():
        kind: MaskKind = "decoder" if _holds(decoder, model.get_submodule(path)) else "encoder"
        firsts[kind][first] = shapes[first] or torch.Size()
    masks = {
        first: mask for kind in firsts for first, mask in _stream_masks(model, probe, kind, firsts[kind]).items()
    }
    return [Stack(path, names, shapes[names[0]] or torch.Size(), masks[names[0]]) for path, names in found.items()]


def _read_by(model: PreTrainedModel, batch: Batch, layers: Collection[str]) -> dict[str, Tensor]:
    """Run the model until these layers have been called; return the hidden states that each of them reads first."""
    read: dict[str, Tensor] = {}

    def note(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        value = HiddenArgument.of(args, kwargs).value
        if isinstance(value, Tensor):
            read.setdefault(name, value.clone())
        if len(read) == len(layers):
            raise ForwardEnded

    with ExitStack() as hooks, evaluation_mode(model), suppress(ForwardEnded):
        for name in layers:
            module = model.get_submodule(name)
            hooks.enter_context(module.register_forward_pre_hook(partial(note, name), with_kwargs=True))
        run_batch(model, batch)
    return read


def _stream_masks(
    model: PreTrainedModel, probe: Batch, kind: MaskKind, layers: Mapping[str, torch.Size]
) -> dict[str, StreamMask | None]:
    """Return for each first layer of a stack, given with the shape that it reads, which mask says what is padding.

    The model is run on the probe without padding, and once more with another last token in the first sequence. What
    this moves shows whether a layer reads the tokens at all, and whether sequences come first in its hidden states.
    """
    count = sequence_count(probe)
    by_sequence: dict[str, StreamMask | None] = {
        name: StreamMask(kind) if len(shape) == 3 and shape[0] == count else None for name, shape in layers.items()
    }
    name = "decoder_input_ids" if kind == "decoder" else "input_ids"
    ids = probe.get(name)
    if not layers or ids is None or ids.dim() != 2 or not ids.numel():
        return by_sequence
    length = ids.shape[1]
    try:
        moved = _moved_by_last_token(model, probe, name, length, layers)
    except CalibrationError:  # the model does not take these tokens, such as too few for its images
        return {layer: mask if layers[layer][1:2] == (length,) else None for layer, mask in by_sequence.items()}
    masks: dict[str, StreamMask | None] = dict.fromkeys(layers)
    for layer, shape in layers.items():
        vectors = moved.get(layer)
        if vectors is None or vectors.dim() != 2 or not bool(vectors.any()):
            continue
        if shape[0] == count and not bool(vectors[1:].any()):
            masks[layer] = StreamMask(kind, appends=_appends_padding(model, probe, name, layer, moved))
        elif shape[1] == count and not bool(vectors[:, 1:].any()):
            masks[layer] = StreamMask(kind, time_first=True)
    return masks


def _appends_padding(
    model: PreTrainedModel, probe: Batch, name: str, layer: str, moved: Mapping[str, Tensor]
) -> bool:
    """Return whether the model fills its last window with padding before a stack's first layer.

    The hidden states are then longer than the tokens, and the last token moves its own position and none behind it.
    Where the tokens of the probe fill whole windows, as many as the hidden states, one token fewer is tried.
    """
    length = probe[name].shape[1]
    if moved[layer].shape[1] == length and length > 1:
        length -= 1
        try:
            moved = _moved_by_last_token(model, probe, name, length, [layer])
        except CalibrationError:
            return False
    vectors = moved.get(layer)
    if vectors is None or vectors.dim() != 2 or vectors.shape[1] <= length:
        return False
    return bool(vectors[0, length - 1]) and not bool(vectors[:, length:].any())


def _moved_by_last_token(
    model: PreTrainedModel, probe: Batch, name: str, length: int, layers: Collection[str]
) -> dict[str, Tensor]:
    """Return which vectors that each layer reads move with the last token of the first sequence, (B, T).

    The probe is cut to `length` tokens. Ordinary tokens replace its padding, by which some models count positions.
    """
    ids, mask_name = probe[name], name.replace("input_ids", "attention_mask")
    mask = probe.get(mask_name)
    pads = {getattr(config, "pad_token_id", None) for config in (model.config, model.config.get_text_config())}
    is_padding = sum((ids == pad for pad in pads if isinstance(pad, int)), torch.zeros_like(ids, dtype=torch.bool))
    batch = dict(probe)
    if mask is not None and mask.shape == ids.shape:
        is_padding = is_padding | (mask == 0).to(ids.device)
        batch[mask_name] = torch.ones_like(mask)
    present = ids[~is_padding].flip(0).tolist()  # the last first: images often stand before texts
    one, other = [token for token in dict.fromkeys((*present, 0, 1, 2, 3, 4)) if token not in pads][:2]
    batch[name] = ids.masked_fill(is_padding, one)
    for part, value in batch.items():
        if isinstance(value, Tensor) and value.shape[:2] == ids.shape:
            batch[part] = value[:, :length]
    changed = batch[name].clone()
    changed[0, -1] = one if int(changed[0, -1]) != one else other
    before, after = (_read_by(model, tokens, layers) for tokens in (batch, {**batch, name: changed}))
    return {
        layer: ~states.isclose(after[layer], equal_nan=True).all(-1)
        for layer, states in before.items()
        if layer in after and states.shape == after[layer].shape
    }


def _may_be_layer(module: nn.Module) -> bool:
    """Return whether a module may be a layer of a model: one with linear layers inside."""
    linear = (nn.Linear, Conv1D)
    if isinstance(module, (nn.ModuleList, *linear)):
        return False
    return any(isinstance(part, linear) for part in module.modules())


def _decoder_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the decoder in a model; None if it does not say which it is, or names itself (an encoder alone does)."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return decoder if isinstance(decoder, nn.Module) and decoder is not model else None


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
