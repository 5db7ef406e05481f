"""Count, divide, sample and hold back the sequences of batches."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from collab_compress.calibration.gather import Batch

BATCH_SIZE = 16  # sequences, at most
MAX_TOKENS_PER_BATCH = 4096  # padding counts; a longer sequence is a batch by itself
HELD_BACK = 8  # one sequence in this many
MOST_HELD_BACK = 64  # sequences

Item = TypeVar("Item")


def batch_size(length: int) -> int:
    """Return how many sequences of `length` tokens a batch holds."""
    return max(1, min(BATCH_SIZE, MAX_TOKENS_PER_BATCH // max(1, length)))


def sequence_count(batch: Batch) -> int:
    """Return the number of sequences, or images, of a batch."""
    return next((len(value) for value in _tensors(batch)), 0)


def is_divisible(batch: Batch) -> bool:
    """Return whether the first dimension of all tensors of a batch is its sequences."""
    return len({len(value) for value in _tensors(batch)}) == 1


def slice_batch(batch: Batch, part: slice | Tensor) -> Batch:
    """Return some of the sequences of a batch that `is_divisible`, by a slice or a mask."""
    return {
        name: value[part] if isinstance(value, Tensor) and value.dim() else value for name, value in batch.items()
    }


def in_parts(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches in parts of up to 16 sequences and 4,096 tokens, where they can be divided."""
    parts: list[Batch] = []
    for batch in batches:
        count = sequence_count(batch)
        size = batch_size(max((len(ids[0]) for name, ids in batch.items() if _holds_tokens(name, ids)), default=1))
        whole = count <= size or not is_divisible(batch)
        starts = range(0, count, size)
        parts += [batch] if whole else [slice_batch(batch, slice(start, start + size)) for start in starts]
    return parts


def sample_sequences(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Return about `count` sequences, evenly spaced, in the parts that `in_parts` makes."""
    parts = in_parts(batches)
    total = max(1, sum(map(sequence_count, parts)))
    return evenly_spaced(parts, max(1, len(parts) * count // total))


def draw_sequences(batches: Sequence[Batch], count: int, seed: int) -> list[Batch]:
    """Draw `count` sequences at random, or all if there are no more; batches stay in their order."""
    sizes = list(map(sequence_count, batches))
    drawn = torch.zeros(sum(sizes), dtype=torch.bool, device="cpu")
    drawn[shuffled(range(sum(sizes)), seed, count)] = True
    masks = zip(batches, drawn.split(sizes), strict=True)
    return [slice_batch(batch, mask) for batch, mask in masks if bool(mask.any())]


def split_held_back(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Hold back one sequence in eight, from 1 to 64, evenly spaced; or whole batches, if one cannot be divided."""
    parts = split_each(batches)
    return [batch for used, _ in parts for batch in used], [batch for _, held_back in parts for batch in held_back]


def split_each(batches: Sequence[Batch]) -> list[tuple[list[Batch], list[Batch]]]:
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


def evenly_spaced(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` of the items, evenly spaced; all if there are no more."""
    count = min(count, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def shuffled(items: Sequence[Item], seed: int, count: int | None = None) -> list[Item]:
    """Draw at most `count` items, or all for None, in random order."""
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed), device="cpu")
    return [items[index] for index in order[:count].tolist()]


def _tensors(batch: Batch) -> list[Tensor]:
    return [value for value in batch.values() if isinstance(value, Tensor) and value.dim()]


def _holds_tokens(name: str, value: Any) -> bool:
    """Return whether an argument holds token ids or their embeddings, (B, T, …)."""
    return isinstance(value, Tensor) and value.dim() > 1 and len(value) > 0 and name.endswith(("ids", "embeds"))
