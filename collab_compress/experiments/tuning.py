"""Fine-tune a classifier so that it can be stopped at any point, and evaluate one."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from collab_compress.checkpoint.directory import whole_directory
from collab_compress.errors import RecipeError
from collab_compress.experiments.recipe import Tuning
from collab_compress.metrics import load_metric
from collab_compress.tasks import Task
from collab_compress.training import HeadTraining, join_trainer_

CHECKPOINT_FILES = ("trainer_state.json", "optimizer.pt", "scheduler.pt")  # the state is written last


def load_classifier(directory: Path, task: Task, seed: int) -> PreTrainedModel:
    """Load a model with a head for the task; a head that the checkpoint does not have is drawn with the seed."""
    set_seed(seed)
    problem = "regression" if task.kind == "regression" else "single_label_classification"
    return AutoModelForSequenceClassification.from_pretrained(
        directory, num_labels=task.num_labels, problem_type=problem
    )


def fine_tune(
    model: PreTrainedModel,
    task: Task,
    data: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    tuning: Tuning,
    heads: HeadTraining,
    seed: int,
    folder: Path,
) -> None:
    """Fine-tune and save into `folder/model`, going on where an earlier run stopped.

    Args:
        model: what to train, in place.
        task: decides the metric.
        data: encoded; split train.
        tokenizer: pads, and is saved with the model.
        tuning: how long and how.
        heads: what acts on heads meanwhile.
        seed: of data order and dropout.
        folder: holds checkpoints while it runs.

    Raises:
        RecipeError: the training arguments are none.
    """
    checkpoints = folder / "checkpoints"
    trainer = _trainer(model, task, data, tokenizer, tuning, seed, checkpoints)
    join_trainer_(trainer, heads)  # also without any, for it averages losses that a stock trainer would add up
    latest = last_checkpoint(checkpoints)
    trainer.train(resume_from_checkpoint=None if latest is None else str(latest))
    if trainer.is_world_process_zero():
        with whole_directory(folder / "model") as directory:
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(directory)
            tokenizer.save_pretrained(directory)
        shutil.rmtree(checkpoints, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()


def evaluate(
    model: PreTrainedModel, task: Task, data: DatasetDict, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> dict[str, dict[str, float]]:
    """Give the task's metrics on each validation split."""
    trainer = _trainer(model, task, data, tokenizer, Tuning(), 0, folder / "checkpoints")
    results = {}
    for split, rows in data.items():
        if split.startswith("validation"):
            found = trainer.evaluate(rows, metric_key_prefix="")
            results[split] = {name.removeprefix("_"): value for name, value in found.items() if name in _names(task)}
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # the trainer makes it, and nothing is in it
    return results


def last_checkpoint(folder: Path) -> Path | None:
    """Find the latest checkpoint that is whole; one that was being written when the process died is not."""
    found = []
    for path in folder.glob("checkpoint-*"):
        number = path.name.rpartition("-")[2]
        if number.isdigit() and all((path / name).is_file() for name in CHECKPOINT_FILES) and _is_json(path):
            found.append((int(number), path))
    return max(found)[1] if found else None


def _is_json(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / CHECKPOINT_FILES[0]).read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def _names(task: Task) -> set[str]:
    return {f"_{name}" for name in load_metric(task.metric).scores}


def _trainer(
    model: PreTrainedModel,
    task: Task,
    data: Mapping[str, Dataset],
    tokenizer: PreTrainedTokenizerBase,
    tuning: Tuning,
    seed: int,
    folder: Path,
) -> Trainer:
    metric = load_metric(task.metric)

    def score(prediction: EvalPrediction) -> dict[str, float]:
        logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        predicted = np.squeeze(logits, -1) if task.kind == "regression" else logits.argmax(-1)
        result: dict[str, float] = metric.compute(predictions=predicted, references=prediction.label_ids)
        return result

    given: dict[str, Any] = {
        "num_train_epochs": tuning.epochs, "max_steps": tuning.max_steps, "learning_rate": tuning.learning_rate,
        "warmup_steps": tuning.warmup, "per_device_train_batch_size": tuning.batch_size,
        "per_device_eval_batch_size": 64, "save_strategy": "epoch", "save_total_limit": 1, "report_to": "none",
        "dataloader_pin_memory": torch.accelerator.is_available(),
        "use_cpu": not torch.accelerator.is_available(),  # said so, several processes meet on the CPU
    }  # fmt: skip
    try:
        arguments = TrainingArguments(str(folder), seed=seed, **(given | tuning.arguments))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"training arguments: {error}") from error
    validation = next((rows for split, rows in data.items() if split.startswith("validation")), None)
    return Trainer(
        model, arguments, train_dataset=data.get("train"), eval_dataset=validation,
        data_collator=DataCollatorWithPadding(tokenizer), compute_metrics=score,
    )  # fmt: skip
