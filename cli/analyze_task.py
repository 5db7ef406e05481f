"""A task's labelled data for `collab-analyze`: what models are run on, and how they are scored."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.calibration.batches import BATCH_SIZE
from collab_compress.calibration.padding import forward_arguments
from collab_compress.errors import DataError
from collab_compress.metrics import load_metric
from collab_compress.report import TaskScore
from collab_compress.tasks import TASKS, Task, encode_classification, load_task

if TYPE_CHECKING:
    from .analyze_data import Data

SPLITS = ("validation", "validation_matched", "test", "train")
LABELLED = 256  # rows that the gradient of the loss is taken on


@dataclass(frozen=True)
class Rows:
    """A task's data.

    Args:
        batches: keyword arguments for the model, without labels.
        texts: first texts of the rows.
    """

    batches: list[Batch]
    texts: list[str]


def load_scored(
    name: str, data: Data, model: PreTrainedModel, tokenizer: Any, seed: int
) -> tuple[Rows, str, TaskScore]:
    """Load a task's validation data, and give what they are and how a model is scored on them.

    Raises:
        DataError: no such task, one that is not classification or regression, data that are not there or malformed,
            or a model that does not answer it.
    """
    try:
        rows = load_task(name, data.data_dir, train=False)
    except DataError:
        rows = load_task(name, data.data_dir)  # where there are none but training data
    task = TASKS[name]
    _check(task, model, tokenizer)
    split = next(each for each in SPLITS if each in rows)
    chosen = rows[split].shuffle(seed=seed).select(range(min(len(rows[split]), data.sentences)))
    encoded = encode_classification(chosen, tokenizer, max_length=min(data.length, tokenizer.model_max_length))
    if "labels" not in encoded.column_names:
        raise DataError(f"{name}: {split} has no labels to score with; pass its sentences by --data instead")
    batches = list(_padded(encoded, tokenizer, {*forward_arguments(model), "labels"}))
    bare = [{key: value for key, value in batch.items() if key != "labels"} for batch in batches]
    labels = torch.cat([batch["labels"] for batch in batches])
    metric = load_metric(task.metric)

    def score(scored: PreTrainedModel) -> float:
        predicted = torch.cat([_predicted(scored, batch) for batch in bare])
        found = metric.compute(predictions=predicted, references=labels)
        return float(metric.scale * sum(found[key] for key in metric.scores) / len(metric.scores))

    named = f"{' and '.join(metric.scores)} on {len(chosen):,} rows of {name}"
    labelled = batches[: -(-LABELLED // BATCH_SIZE)]
    words = f"rows of {name}, {split}"
    return Rows(bare, chosen["text"][:]), words, TaskScore(named, score, labelled, metric.greater_is_better)


def _check(task: Task, model: PreTrainedModel, tokenizer: Any) -> None:
    """Refuse what would give a score that means nothing."""
    if task.num_labels is None:
        kinds = ", ".join(sorted(each.name for each in TASKS.values() if each.num_labels is not None))
        raise DataError(f"{task.name} is {task.kind}, on which single heads are not scored; expected one of {kinds}")
    config: Any = model.config
    if (
        tokenizer is None
        or "SequenceClassification" not in type(model).__name__
        or config.num_labels != task.num_labels
    ):
        raise DataError(
            f"{type(model).__name__} does not answer {task.name}, which takes a sequence classifier of "
            f"{task.num_labels} outputs with its tokenizer; fine-tune one, or pass sentences by --data"
        )
    order = [str(label).lower() for _, label in sorted(config.id2label.items())]
    wanted = [label.lower() for label in task.labels]
    if order != wanted and sorted(order) == sorted(wanted):
        raise DataError(
            f"the model has its classes in the order {', '.join(order)}; {task.name} has {', '.join(wanted)}"
        )


def _predicted(model: PreTrainedModel, batch: Batch) -> Tensor:
    with evaluation_mode(model):
        logits: Tensor = run_batch(model, batch).logits.float().cpu()
    return logits[:, 0] if logits.shape[1] == 1 else logits.argmax(1)


def _padded(rows: Any, tokenizer: Any, known: Collection[str]) -> Iterator[Batch]:
    for start in range(0, len(rows), BATCH_SIZE):
        part = [rows[place] for place in range(start, min(start + BATCH_SIZE, len(rows)))]
        padded = tokenizer.pad(part, return_tensors="pt")
        yield {key: value for key, value in padded.items() if key in known}
