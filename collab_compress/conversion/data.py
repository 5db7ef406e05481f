"""Calibration data as a conversion takes them: read, and split into what is used and what is held back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.architectures import find_attention
from collab_compress.calibration import Batch, Calibration, evaluation_mode, run_batch
from collab_compress.calibration.batches import in_parts, is_divisible, sample_sequences, sequence_count, slice_batch
from collab_compress.calibration.gather import batch_masks
from collab_compress.calibration.source import in_random_order, mixed, resolve
from collab_compress.errors import CalibrationError, check_type
from collab_compress.options import CalibrationOptions

DEFAULT_LENGTH = 128  # tokens, if nothing says how long inputs are
HELD_BACK = 8  # one sequence in this many
MOST_HELD_BACK = 64  # sequences
LENGTH_QUANTILE = 0.9  # share of the calibration sequences that are no longer than the length that counts


@dataclass(frozen=True, eq=False)
class Data:
    """Calibration data as a conversion takes them."""

    used: Sequence[Batch]
    held_back: Sequence[Batch]  # to measure errors on
    notes: Sequence[str]  # on data that were left out
    refit: bool  # by default: not to random tokens alone
    length: int  # tokens for which costs count
    real_used: Sequence[Batch]  # those of `used` that are no random tokens
    real_held_back: Sequence[Batch]

    def sample(self, count: int) -> list[Batch]:
        """Return about `count` of the sequences to calibrate on, evenly spaced."""
        return sample_sequences(self.used, count)


def read(
    model: PreTrainedModel,
    calibration: Calibration,
    tokenizer: PreTrainedTokenizerBase | None,
    options: CalibrationOptions | None,
    seed: int,
) -> Data:
    """Read calibration data for `model`, and hold an eighth back."""
    options = CalibrationOptions() if options is None else options
    check_type("calibration_options", options, CalibrationOptions, CalibrationError)
    notes: list[str] = []
    sources = resolve(calibration, model, tokenizer, options, seed)
    parts = [source.batches(notes) for source in sources]
    batches = mixed(model, parts, seed, notes)
    real = [batch for source, part in zip(sources, parts, strict=True) if not source.is_random for batch in part]
    length = typical_length(options, model, real)
    is_random = [[source.is_random] * len(part) for source, part in zip(sources, parts, strict=True)]
    groups: tuple[list[Batch], list[Batch]] = [], []
    real_groups: tuple[list[Batch], list[Batch]] = [], []
    for pair, random in zip(_split(batches), in_random_order(is_random, seed), strict=True):
        for group, real_group, part in zip(groups, real_groups, map(in_parts, pair), strict=True):
            group += part
            real_group += [] if random else part
    return Data(*groups, list(dict.fromkeys(notes)), bool(real), length, *real_groups)


def split_held_back(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Hold back one sequence in eight, from 1 to 64, evenly spaced; or whole batches, if one cannot be divided."""
    parts = _split(batches)
    return [batch for used, _ in parts for batch in used], [batch for _, held_back in parts for batch in held_back]


def _split(batches: Sequence[Batch]) -> list[tuple[list[Batch], list[Batch]]]:
    """Return the part of each batch to calibrate on, and the part to measure errors on; one may be empty."""
    divisible = all(map(is_divisible, batches))
    sizes = [sequence_count(batch) if divisible else 1 for batch in batches]
    sequences, items = sum(map(sequence_count, batches)), sum(sizes)
    if items < 2:
        return [([batch], []) for batch in batches]
    count = max(1, items * min(sequences // HELD_BACK, MOST_HELD_BACK) // sequences)
    is_held_back = torch.zeros(items, dtype=torch.bool, device="cpu")
    for place in range(count):
        is_held_back[(2 * place + 1) * items // (2 * count)] = True
    masks = zip(batches, is_held_back.split(sizes), strict=True)
    return [(_chosen(batch, ~mask), _chosen(batch, mask)) for batch, mask in masks]


def _chosen(batch: Batch, mask: Tensor) -> list[Batch]:
    """Return the sequences of a batch that a mask chooses, as a batch; the batch itself for all, nothing for none."""
    if bool(mask.all()):
        return [batch]
    return [slice_batch(batch, mask)] if bool(mask.any()) else []


def typical_length(options: CalibrationOptions, model: PreTrainedModel, batches: Sequence[Batch] = ()) -> int:
    """Return for how many tokens costs count: `length`, or what nine in ten sequences do not exceed, or 128."""
    masks = [batch_masks(model, batch)["encoder"].query for batch in batches]  # refuses those of other shapes
    lengths = [mask.sum(1).float().cpu() for mask in masks if mask is not None]
    if options.length is None and lengths:
        return max(1, int(torch.cat(lengths).quantile(LENGTH_QUANTILE, interpolation="lower")))
    if options.length is None and batches and model.main_input_name != "input_ids":
        return _positions(model, batches[0])
    return options.length or DEFAULT_LENGTH


def _positions(model: PreTrainedModel, batch: Batch) -> int:
    """Return the number of positions that the first attention module of a model reads."""
    positions: list[int] = []

    def read_shape(_: Any, args: Any, kwargs: Any) -> None:
        positions.append((args[0] if args else kwargs["hidden_states"]).shape[-2])

    first = find_attention(model)[0].module
    with evaluation_mode(model), first.register_forward_pre_hook(read_shape, with_kwargs=True):
        run_batch(model, in_parts([batch])[0])
    return positions[0]
