"""Batches of rows of similar lengths, in a seeded order for each epoch.

Transformers' own sampler draws from the global generator. A resumed run would have another order, and so would each
of several processes, which must share one.
"""

from typing import Any

import pyarrow.compute as pc
import torch
from transformers import Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler


class ByLength(LengthGroupedSampler):  # type: ignore[misc]
    """Rows in random order, with similar lengths in each batch; a batch holds the rows of one optimizer step."""

    def __init__(self, lengths: list[int], batch: int, seed: int) -> None:
        super().__init__(batch, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the order."""
        self.epoch = epoch

    def __iter__(self) -> Any:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


def group_by_length(trainer_class: type[Trainer]) -> type[Trainer]:
    """Return a trainer class that batches rows of similar lengths where the training arguments say so."""

    class Grouping(trainer_class):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            strategy = getattr(self.args, "train_sampling_strategy", None)  # Transformers 5.0 has none
            if strategy != "group_by_length":
                return super()._get_train_sampler(train_dataset)
            rows = self.train_dataset if train_dataset is None else train_dataset
            batch = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
            lengths = pc.list_value_length(rows.with_format("arrow")["input_ids"][:])
            return ByLength(lengths.to_pylist(), batch, self.args.seed)

        def _get_eval_sampler(self, eval_dataset: Any) -> None:
            return None  # in order: translations are scored against the references of the same rows

    Grouping.__name__ = trainer_class.__name__
    return Grouping
