"""Batches of rows of similar lengths, of so many rows or tokens, in a seeded order for each epoch.

Transformers' own sampler draws from the global generator. A resumed run would have another order, and so would each
of several processes, which must share one.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from datasets.features import List
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer
from transformers.trainer_pt_utils import get_length_grouped_indices

from collab_compress.errors import RecipeError

CHUNK = 10_000


class ByLength(Sampler[int]):
    """Rows in random order, with similar lengths in each batch.

    Args:
        lengths: of each row.
        batch: rows of one optimizer step.
        seed: of the order.
    """

    def __init__(self, lengths: list[int], batch: int, seed: int) -> None:
        self.lengths, self.batch, self.seed, self.epoch = lengths, batch, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = get_length_grouped_indices(self.lengths, self.batch, generator=generator)
        return iter(order)


class ByTokens(Sampler[list[int]]):
    """One process's batches of about as many tokens, padding included, in random order.

    Rows, sorted by length, fill one batch after another; an epoch draws the order of the batches. Batches are dealt
    to processes in turn. The last step repeats the first batches if it is short, so that every process has as many
    and all epochs have the same number. A process with two passes a step has the batches of two processes with one.

    Args:
        lengths: of each row; (rows,).
        tokens: of a step, all its batches together.
        passes: of each process in a step.
        seed: of the order of batches, and of rows of equal length.
        processes: number of processes that share the batches.
        process: index of this one.

    Raises:
        RecipeError: a batch is too small for the longest row.
    """

    def __init__(
        self, lengths: np.ndarray, tokens: int, passes: int = 1, seed: int = 0, processes: int = 1, process: int = 0
    ) -> None:
        batch_tokens = tokens // (passes * processes)
        if (longest := int(lengths.max(initial=0))) > batch_tokens:
            raise RecipeError(
                f"batch_tokens is {tokens}, which leaves {batch_tokens} for a batch of each of {processes} processes "
                f"with {passes} passes a step, and a row has {longest}; raise it, or lower max_length"
            )
        shuffled = np.random.default_rng(seed).permutation(len(lengths)).astype(np.int32)
        self.rows = shuffled[np.argsort(lengths[shuffled], kind="stable")]
        self.ends = _batch_ends(lengths[self.rows], batch_tokens)
        self.share = passes * processes
        self.seed, self.processes, self.process, self.epoch = seed, processes, process, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.ends) // self.share) * self.share // self.processes

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.ends))
        for batch in np.resize(order, len(self) * self.processes)[self.process :: self.processes]:
            yield self.rows[self.ends[batch - 1] if batch else 0 : self.ends[batch]].tolist()


def _batch_ends(lengths: np.ndarray, tokens: int) -> np.ndarray:
    """Return the end of each batch, with batches as full as possible.

    Args:
        lengths: ascending, none above `tokens`.
        tokens: most rows × longest row.
    """
    ends, first = [], 0
    while first < len(lengths):
        ahead = lengths[first : first + tokens // max(int(lengths[first]), 1)].astype(np.int64)
        first += int(np.searchsorted(ahead * np.arange(1, len(ahead) + 1), tokens, side="right"))
        ends.append(first)
    return np.array(ends, np.int64)


def row_lengths(rows: Dataset, *columns: str) -> np.ndarray:
    """Return the number of tokens of each row, in the longest of the columns that hold lists; (rows,)."""
    lists = [name for name in columns if isinstance(rows.features.get(name), List)]
    tables = rows.select_columns(lists).with_format("arrow").iter(CHUNK)
    counts = [
        np.max([pc.list_value_length(table[name]).to_numpy() for name in lists], axis=0).astype(np.int32)
        for table in tables
    ]
    return np.concatenate(counts) if counts else np.zeros(0, np.int32)


def grouping(trainer_class: type[Trainer], tokens: int | None = None) -> type[Trainer]:
    """Return a trainer class that can batch rows of similar lengths.

    Args:
        trainer_class: the base class.
        tokens: of a step; if not given, rows are grouped where the training arguments say so.
    """

    class Grouping(trainer_class):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            if tokens is None:
                return super().get_train_dataloader()
            args, rows = self.args, self._remove_unused_columns(self.train_dataset, description="Training")
            batches = ByTokens(
                row_lengths(rows, "input_ids", "labels"),
                tokens,
                passes=args.gradient_accumulation_steps,
                seed=args.seed,
                processes=args.world_size,
                process=args.process_index,
            )
            loader: Any = DataLoader(
                rows,
                batch_sampler=batches,
                collate_fn=self.data_collator,
                num_workers=args.dataloader_num_workers,
                pin_memory=args.dataloader_pin_memory,
                persistent_workers=args.dataloader_persistent_workers,
                prefetch_factor=args.dataloader_prefetch_factor,
            )
            return prepare_data_loader(loader, args.device, num_processes=1, process_index=0, put_on_device=True)

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            strategy = getattr(self.args, "train_sampling_strategy", None)  # Transformers 5.0 has none
            if strategy != "group_by_length":
                return super()._get_train_sampler(train_dataset)
            rows = self.train_dataset if train_dataset is None else train_dataset
            batch = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
            return ByLength(row_lengths(rows, "input_ids").tolist(), batch, self.args.seed)

        def _get_eval_sampler(self, eval_dataset: Any) -> None:
            return None  # in order: translations are scored against the references of the same rows

    Grouping.__name__ = trainer_class.__name__
    return Grouping
