"""Tasks as data: where their data sets are, how they are read, and how they are encoded for a Trainer."""

from .catalogue import TASKS, Hub, Kind, Task
from .load import load_task, progress_bars
from .tokenization import (
    encode_classification,
    encode_language_model,
    encode_masked_language_model,
    encode_translation,
    train_tokenizer,
)

__all__ = [
    "TASKS",
    "Hub",
    "Kind",
    "Task",
    "encode_classification",
    "encode_language_model",
    "encode_masked_language_model",
    "encode_translation",
    "load_task",
    "progress_bars",
    "train_tokenizer",
]
