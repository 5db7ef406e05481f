"""Which rows make up a batch: those of similar lengths, of so many rows or of so many tokens, in an order of its own
for each epoch.

Transformers' own sampler draws from the global generator: a resumed run would see another order, and so would each of
several processes, which share out what they believe to be one order.
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
    """Random rows of which those in one batch have similar lengths.

    Args:
        lengths: of each row.
        batch: rows of one optimizer step.
        seed: of the order.
    """

    def __init__(self, lengths: list[int], batch: int, seed: int) -> None:
        self.lengths, self.batch, self.seed, self.epoch = lengths, batch, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = get_length_grouped_indices(self.lengths, self.batch, generator=generator)
        return iter(order)


class ByTokens(Sampler[list[int]]):
    """One process's batches of about as many tokens, padding included, in random order.

    Rows, sorted by length, fill one batch after another; an epoch draws the order of the batches. The batches of an
    epoch are shared out in turn, and the first come again where the last step lacks some, so that every process has
    as many, every step is whole, and an epoch has always the same number. A process that makes two passes a step has
    in each step what two processes have that make one.

    Args:
        lengths: of each row; (rows,).
        tokens: of a step: of all its batches together.
        passes: of each process in a step.
        seed: of the rows of equal length in a batch, and of the order.
        processes: how many share the batches.
        process: which of them this is.

    Raises:
        RecipeError: a batch is too small for the longest row.
    """

    def __init__(
        self, lengths: np.ndarray, tokens: int, passes: int = 1, seed: int = 0, processes: int = 1, process: int = 0
    ) -> None:
        room = tokens // (passes * processes)
        if (longest := int(lengths.max(initial=0))) > room:
            raise RecipeError(
                f"batch_tokens is {tokens}, which leaves {room} for a batch of each of {processes} processes with "
                f"{passes} passes a step, and a row has {longest}; raise it, or lower max_length"
            )
        drawn = np.random.default_rng(seed).permutation(len(lengths)).astype(np.int32)
        self.rows = drawn[np.argsort(lengths[drawn], kind="stable")]
        self.ends = _filled(lengths[self.rows], room)
        self.share = passes * processes
        self.seed, self.processes, self.process, self.epoch = seed, processes, process, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.ends) // self.share) * self.share // self.processes

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.ends))
        for batch in np.resize(order, len(self) * self.processes)[self.process :: self.processes]:
            yield self.rows[self.ends[batch - 1] if batch else 0 : self.ends[batch]].tolist()


def _filled(lengths: np.ndarray, room: int) -> np.ndarray:
    """Return the end of each batch, with batches as full as possible.

    Args:
        lengths: ascending, none above `room`.
        room: most rows × longest row.
    """
    ends, first = [], 0
    while first < len(lengths):
        ahead = lengths[first : first + room // max(int(lengths[first]), 1)].astype(np.int64)
        first += int(np.searchsorted(ahead * np.arange(1, len(ahead) + 1), room, side="right"))
        ends.append(first)
    return np.array(ends, np.int64)


def row_lengths(rows: Dataset, *columns: str) -> np.ndarray:
    """Count the tokens of each row, in its longest column, a chunk of rows at a time.

    Args:
        rows: encoded.
        columns: to look at; those that hold no lists, or are not there, do not count.

    Returns:
        Numbers of tokens; (rows,).
    """
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
        trainer_class: of the trainer.
        tokens: of a step; if not given, rows are grouped where the training arguments say so.
    """

    class Grouping(trainer_class):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            if tokens is None:
                return super().get_train_dataloader()
            args, rows = self.args, self._remove_unused_columns(self.train_dataset, description="Training")
            batches = ByTokens(
                row_lengths(rows, "input_ids", "labels"), tokens, args.gradient_accumulation_steps, args.seed,
                args.world_size, args.process_index,
            )  # fmt: skip
            loader: Any = DataLoader(
                rows, batch_sampler=batches, collate_fn=self.data_collator, num_workers=args.dataloader_num_workers,
                pin_memory=args.dataloader_pin_memory, persistent_workers=args.dataloader_persistent_workers,
                prefetch_factor=args.dataloader_prefetch_factor,
            )  # fmt: skip
            return prepare_data_loader(loader, args.device, num_processes=1, process_index=0, put_on_device=True)

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            strategy = getattr(self.args, "train_sampling_strategy", None)  # Transformers 5.0 has none
            if strategy != "group_by_length":
                return super()._get_train_sampler(train_dataset)
            rows = self.train_dataset if train_dataset is None else train_dataset
            batch = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
            return ByLength(row_lengths(rows, "input_ids").tolist(), batch, self.args.seed)

        def _get_eval_sampler(self, eval_dataset: Any) -> None:
            return None  # one row after the other: translations are scored against references in their order

    Grouping.__name__ = trainer_class.__name__
    return Grouping
