"""Data of `collab-analyze` and `collab-prune`: random tokens, a file of texts, or a task's labelled data."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.calibration import Batch, calibration_batches, evaluation_mode, run_batch
from collab_compress.calibration.files import Text, read_texts
from collab_compress.calibration.gather import forward_arguments
from collab_compress.calibration.synthetic import BATCH_SIZE, usable_length
from collab_compress.errors import CalibrationError, DataError
from collab_compress.report import TaskScore

from .arguments import Data

SYNTHETIC, SYNTHETIC_LENGTH = 256, 64  # random sequences at most, and their tokens
SHORT = (5, 14)  # words of a sentence whose attention maps can be read
SENTENCE = "The animal did not cross the street because it was too tired."
SPLITS = ("validation", "validation_matched", "test", "train")  # of a task: the first that is there is read
LABELLED = 256  # rows that the gradient of the loss is taken on


@dataclass(frozen=True)
class Loaded:
    """Data that are ready for a study.

    Args:
        batches: keyword arguments for the model.
        words: what they are.
        sentence: whose attention is shown, if any.
        score: of the task, if there is one.
    """

    batches: list[Batch]
    words: str
    sentence: str | tuple[str, str] | None
    score: TaskScore | None = None


def load_data(data: Data, model: PreTrainedModel, tokenizer: Any, seed: int) -> Loaded:
    """Read what was asked for.

    Raises:
        CalibrationError: a file that cannot be read or has no text, no tokenizer, or a model that reads no texts.
        DataError: a task that is not there, malformed, or of another kind.
    """
    if data.task is not None:
        return _labelled(data.task, data, model, tokenizer, seed)
    if data.sentence is not None and model.config.is_encoder_decoder:
        raise DataError("--sentence is one text, and an encoder–decoder reads two; it shows a pair of --data FILE")
    if data.data is None:
        return _synthetic(data, model, tokenizer, seed)
    words = f"sentences of {data.data.name}"
    texts = read_texts(data.data)
    if model.config.is_encoder_decoder and tokenizer is not None:
        pairs = _pairs(data.data, texts)
        drawn = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))[: data.sentences].tolist()
        return Loaded(
            list(_translated([pairs[place] for place in drawn], model, tokenizer, data.length)),
            words,
            next((pair for pair in pairs if SHORT[0] <= len(pair[0].split()) <= SHORT[1]), pairs[0]),
        )
    batches = calibration_batches(texts, model, tokenizer, sequences=data.sentences, length=data.length, seed=seed)
    return Loaded(batches, words, data.sentence or _short(texts))


def _synthetic(data: Data, model: PreTrainedModel, tokenizer: Any, seed: int) -> Loaded:
    tokens = model.main_input_name == "input_ids"
    length: int | None = min(data.length, SYNTHETIC_LENGTH)
    if tokens and tokenizer is not None:
        length = usable_length(length, model, tokenizer)
    sequences = min(data.sentences, SYNTHETIC)
    batches = calibration_batches("synthetic", model, tokenizer, sequences=sequences, length=length, seed=seed)
    sentence = (data.sentence or SENTENCE) if tokens and not model.config.is_encoder_decoder else None
    return Loaded(batches, "random tokens" if tokens else "noise", sentence)


def _pairs(path: Path, texts: Sequence[Text]) -> list[tuple[str, str]]:
    """Return batches of pairs: the text of the encoder and that of the decoder.

    Raises:
        CalibrationError: a line is no such pair.
    """
    pairs = []
    for text in texts:
        if isinstance(text, str) or not all(text):
            line = text if isinstance(text, str) else "\t".join(text)
            raise CalibrationError(
                f"{path}: {line[:60]!r} is no pair; an encoder–decoder reads a source and a target, a tab between"
            )
        pairs.append(text)
    return pairs


def _translated(
    pairs: Sequence[tuple[str, str]], model: PreTrainedModel, tokenizer: Any, length: int
) -> Iterator[Batch]:
    """Encode sources and targets; the decoder starts with its start token, as in training."""
    config: Any = model.config
    options = {"truncation": True, "max_length": length, "padding": True, "return_tensors": "pt"}
    known = forward_arguments(model)
    for start in range(0, len(pairs), BATCH_SIZE):
        sources, targets = zip(*pairs[start : start + BATCH_SIZE], strict=True)
        batch = {name: value for name, value in tokenizer(list(sources), **options).items() if name in known}
        target = tokenizer(text_target=list(targets), **options)
        first = torch.full((len(targets), 1), config.decoder_start_token_id)
        batch["decoder_input_ids"] = torch.cat([first, target["input_ids"][:, :-1]], 1)
        batch["decoder_attention_mask"] = target["attention_mask"]
        yield batch


def _labelled(name: str, data: Data, model: PreTrainedModel, tokenizer: Any, seed: int) -> Loaded:
    """Load a task's validation data, and say how a model is scored on them.

    Raises:
        DataError: no such task, one that is not classification or regression, data that are not there or malformed,
            or a model that does not answer it.
    """
    # what `data` installs is needed for a task alone
    from collab_compress.metrics import load_metric
    from collab_compress.tasks import TASKS, encode_classification, load_task

    try:
        rows = load_task(name, data.data_dir, train=False)
    except DataError:
        rows = load_task(name, data.data_dir)  # where there are none but training data
    task = TASKS[name]
    _check(name, model, tokenizer)
    split = next(each for each in SPLITS if each in rows)
    chosen = rows[split].shuffle(seed=seed).select(range(min(len(rows[split]), data.sentences)))
    encoded = encode_classification(chosen, tokenizer, max_length=min(data.length, tokenizer.model_max_length))
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
        batches=(choosing or scoring)[: -(-LABELLED // BATCH_SIZE)],
        greater_is_better=metric.greater_is_better,
    )
    sentence = data.sentence or _short(chosen["text"][:])
    return Loaded(_without_labels(choosing + scoring), f"rows of {name}, {split}", sentence, task_score)


def _without_labels(batches: Sequence[Batch]) -> list[Batch]:
    return [{key: value for key, value in batch.items() if key != "labels"} for batch in batches]


def _scorer(metric: Any, batches: Sequence[Batch]) -> Callable[[PreTrainedModel], float]:
    """Return a function that scores a model by a metric on labelled batches."""
    labels = torch.cat([batch["labels"] for batch in batches])
    inputs = _without_labels(batches)

    def score(model: PreTrainedModel) -> float:
        predicted = torch.cat([_predicted(model, batch) for batch in inputs])
        found = metric.compute(predictions=predicted, references=labels)
        return float(metric.scale * sum(found[key] for key in metric.scores) / len(metric.scores))

    return score


def _short(texts: Sequence[Text]) -> Text:
    """Choose the first text, or pair, whose attention maps can be read."""
    return next((text for text in texts if SHORT[0] <= len(str(text).split()) <= SHORT[1]), texts[0])


def _check(name: str, model: PreTrainedModel, tokenizer: Any) -> None:
    """Refuse what would give a score that means nothing."""
    from collab_compress.tasks import TASKS

    task = TASKS[name]
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
