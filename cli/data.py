"""Data of `collab-analyze` and `collab-prune`: random tokens, a file of texts, or a task's labelled data."""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.calibration import Batch, calibration_batches, evaluation_mode, run_batch
from collab_compress.calibration.batches import sequence_count
from collab_compress.calibration.encode import batch_slices, usable_length
from collab_compress.calibration.files import Text, read_texts
from collab_compress.calibration.gather import forward_arguments
from collab_compress.calibration.source import reads_tokens_alone
from collab_compress.errors import DataError
from collab_compress.report import TaskScore

from .arguments import Inputs

SYNTHETIC, SYNTHETIC_LENGTH = 256, 64  # random sequences at most, and their tokens
SHORT = (5, 14)  # least and most words of a sentence whose attention maps are legible
SENTENCE = "The animal did not cross the street because it was too tired."
SPLITS = ("validation", "validation_matched", "test", "train")  # of a task: the first that exists is read
LABELLED = 256  # rows for the gradient of the loss

_logger = logging.getLogger("collab_compress.cli")  # held with the warnings of the library


@dataclass(frozen=True)
class Loaded:
    """Data for a study: batches and their description, a text or pair whose attention is shown, the task's score."""

    batches: list[Batch]
    words: str
    sentence: str | tuple[str, str] | None
    score: TaskScore | None = None


def load_data(data: Inputs, model: PreTrainedModel, tokenizer: Any, seed: int) -> Loaded:
    """Read the data that the arguments name."""
    if data.task is not None:
        return _labelled(data.task, data, model, tokenizer, seed)
    if data.data is None:
        return _synthetic(data, model, tokenizer, seed)
    words = f"sentences of {data.data.name}"
    texts, notes = read_texts(data.data)
    for note in notes:
        _logger.warning(note)
    batches = calibration_batches(texts, model, tokenizer, sequences=data.sentences, length=data.length, seed=seed)
    return Loaded(batches, words, _short(texts))


def _synthetic(data: Inputs, model: PreTrainedModel, tokenizer: Any, seed: int) -> Loaded:
    length: int | None = min(data.length, SYNTHETIC_LENGTH)
    if reads_tokens_alone(model) and tokenizer is not None:
        length = usable_length(length, model, tokenizer)
    sequences = min(data.sentences, SYNTHETIC)
    batches = calibration_batches("synthetic", model, tokenizer, sequences=sequences, length=length, seed=seed)
    return Loaded(batches, "random tokens", None if model.config.is_encoder_decoder else SENTENCE)


def _labelled(name: str, data: Inputs, model: PreTrainedModel, tokenizer: Any, seed: int) -> Loaded:
    """Load a task's validation data, and the score of a model on them."""
    # only tasks need the extra `data`
    from collab_compress_glue_runs.metrics import load_metric
    from collab_compress_glue_runs.tasks import TASKS, encode_classification, load_task

    if name in TASKS:  # `load_task` refuses others
        _check(TASKS[name], model, tokenizer)
    try:
        rows = load_task(name, data.data_dir, train=False)
    except DataError:  # there are only training data
        rows = load_task(name, data.data_dir)
    task = TASKS[name]
    split = next(split for split in SPLITS if split in rows)
    chosen = rows[split].shuffle(seed=seed).select(range(min(len(rows[split]), data.sentences)))
    encoded = encode_classification(chosen, tokenizer, max_length=usable_length(data.length, model, tokenizer))
    if "labels" not in encoded.column_names:
        raise DataError(f"{name}: {split} has no labels to score with; pass its sentences by --data instead")
    known = {*forward_arguments(model), "labels"}
    half = len(encoded) // 2
    choosing = list(_padded(encoded.select(range(half)), tokenizer, known))
    scoring = list(_padded(encoded.select(range(half, len(encoded))), tokenizer, known))
    metric = load_metric(task.metric)
    task_score = TaskScore(
        name=f"{' and '.join(metric.scores)} on {len(encoded) - half:,} rows of {name}",
        score=_scorer(metric, scoring),
        choose=_scorer(metric, choosing or scoring),
        batches=_first_rows(choosing or scoring, LABELLED),
    )
    words, sentence = f"rows of {name}, {split}", _short(chosen["text"][:])
    return Loaded(_without_labels(choosing + scoring), words, sentence, task_score)


def _without_labels(batches: Sequence[Batch]) -> list[Batch]:
    return [{key: value for key, value in batch.items() if key != "labels"} for batch in batches]


def _first_rows(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Return the first batches, until they hold `count` rows."""
    before = accumulate(map(sequence_count, batches), initial=0)
    return [batch for batch, rows in zip(batches, before, strict=False) if rows < count]


def _scorer(metric: Any, batches: Sequence[Batch]) -> Callable[[PreTrainedModel], float]:
    """Return a function that scores a model by a metric on labelled batches."""
    labels = torch.cat([batch["labels"] for batch in batches])
    inputs = _without_labels(batches)

    def score(model: PreTrainedModel) -> float:
        predicted = torch.cat([_predicted(model, batch) for batch in inputs])
        return float(metric.benchmark_score(metric.compute(predictions=predicted, references=labels)))

    return score


def _short(texts: Sequence[Text]) -> Text:
    """Return the first text, or pair, that is short enough for legible attention maps."""
    return next((text for text in texts if SHORT[0] <= len(str(text).split()) <= SHORT[1]), texts[0])


def _check(task: Any, model: PreTrainedModel, tokenizer: Any) -> None:
    """Refuse tasks, and models for them, whose score would mean nothing."""
    from collab_compress_glue_runs.tasks import TASKS

    if task.num_labels is None:
        names = ", ".join(sorted(other.name for other in TASKS.values() if other.num_labels is not None))
        raise DataError(f"{task.name} is {task.kind}, on which single heads are not scored; expected one of {names}")
    config: Any = model.config
    is_classifier = "SequenceClassification" in type(model).__name__
    if tokenizer is None or not is_classifier or config.num_labels != task.num_labels:
        raise DataError(
            f"{type(model).__name__} does not answer {task.name}, which takes a sequence classifier of "
            f"{task.num_labels} outputs with its tokenizer; fine-tune one, or pass sentences by --data"
        )
    task.check_classes([label for _, label in sorted(config.id2label.items())], "the model")


def _predicted(model: PreTrainedModel, batch: Batch) -> Tensor:
    with evaluation_mode(model):
        logits: Tensor = run_batch(model, batch).logits.float().cpu()
    return logits[:, 0] if logits.shape[1] == 1 else logits.argmax(1)


def _padded(rows: Any, tokenizer: Any, known: Collection[str]) -> Iterator[Batch]:
    for group in batch_slices([len(ids) for ids in rows["input_ids"]]):
        batch = [rows[row] for row in range(group.start, group.stop)]
        padded = tokenizer.pad(batch, return_tensors="pt")
        yield {key: value for key, value in padded.items() if key in known}
