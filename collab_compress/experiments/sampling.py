"""Batches of similar length whose order depends on seed and epoch alone."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import Trainer
from transformers.trainer_pt_utils import get_length_grouped_indices


class ByLength(Sampler[int]):
    """Random rows of which those in one batch have similar lengths.

    Transformers' own draws from the global generator: a resumed run would see another order, and so would each of
    several processes, which share out what they believe to be one order.

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


def seeded(trainer_class: type[Trainer]) -> type[Trainer]:
    """Give a trainer class that groups by length, where it is asked to, in an order of its own for each epoch."""

    class Seeded(trainer_class):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            if self.args.train_sampling_strategy != "group_by_length":
                return super()._get_train_sampler(train_dataset)
            rows = self.train_dataset if train_dataset is None else train_dataset
            batch = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
            return ByLength([len(ids) for ids in rows["input_ids"]], batch, self.args.seed)

    Seeded.__name__ = trainer_class.__name__
    return Seeded
