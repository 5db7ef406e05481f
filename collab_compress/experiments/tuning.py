"""Fine-tune a model so that it can be stopped at any point, and evaluate one."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from collab_compress.checkpoint.directory import whole_directory
from collab_compress.checkpoint.load import load_model
from collab_compress.errors import RecipeError
from collab_compress.experiments.processes import once
from collab_compress.experiments.recipe import Tuning
from collab_compress.experiments.sampling import seeded
from collab_compress.experiments.trackers import TrackerCallback, log_scores
from collab_compress.experiments.workload import Workload
from collab_compress.training import HeadTraining

CHECKPOINT_FILES = ("trainer_state.json", "optimizer.pt", "scheduler.pt")  # the state is written last
EVALUATION = {
    "per_device_eval_batch_size", "eval_accumulation_steps", "dataloader_num_workers", "dataloader_pin_memory",
    "use_cpu", "disable_tqdm", "generation_max_length", "generation_num_beams",
}  # fmt: skip
"""Training arguments that also hold while a model is evaluated."""


def fine_tune(
    workload: Workload,
    model: PreTrainedModel,
    data: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    tuning: Tuning,
    folder: Path,
) -> None:
    """Fine-tune and save into `folder/model`, going on where an earlier run stopped.

    Args:
        workload: the task, and the recipe with what acts on heads.
        model: what to train, in place.
        data: encoded; split train.
        tokenizer: pads, and is saved with the model.
        tuning: how long and how.
        folder: holds checkpoints while it runs, and logs.

    Raises:
        RecipeError: the training arguments are none, or no such tracker.
    """
    checkpoints, recipe = folder / "checkpoints", workload.recipe
    trainer = _trainer(workload, model, data, tokenizer, tuning, checkpoints, recipe.heads)
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise RecipeError("an experiment keeps each model whole in its process; leave FSDP and DeepSpeed out")
    if recipe.trackers:
        trainer.add_callback(TrackerCallback(trainer, recipe, folder))
    latest = last_checkpoint(checkpoints)
    if latest is not None and _finished(latest):  # killed before it was saved
        trained, _ = load_model(type(model), latest, dtype=model.dtype)
    else:
        trainer.train(resume_from_checkpoint=None if latest is None else str(latest))
        trained = trainer.accelerator.unwrap_model(trainer.model)

    def save() -> None:
        if tuning.average > 1:
            _average_(trained, checkpoints, tuning.average)
        with whole_directory(folder / "model") as directory:
            trained.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
        shutil.rmtree(checkpoints, ignore_errors=True)

    once(save)


def evaluate(
    workload: Workload,
    model: PreTrainedModel,
    data: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    tuning: Tuning,
    folder: Path,
) -> dict[str, dict[str, float]]:
    """Give the task's metrics on each split that has labels, but for the training data; in full precision."""
    checkpoints = folder / "checkpoints"
    kept = {name: value for name, value in tuning.arguments.items() if name in EVALUATION}
    trainer = _trainer(workload, model, data, tokenizer, Tuning(arguments=kept), checkpoints, precise=True)
    results = {split: workload.score(trainer, split, data[split], folder) for split in workload.scored()}
    if workload.recipe.trackers:
        log_scores(trainer, workload.recipe, folder, results)
    once(lambda: shutil.rmtree(checkpoints, ignore_errors=True))  # the trainer makes it, and nothing is in it
    return results


def last_checkpoint(folder: Path) -> Path | None:
    """Find the latest checkpoint that is whole; one that was being written when the process died is not."""
    found = whole_checkpoints(folder)
    return found[-1] if found else None


def whole_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints that are whole, in the order of their steps."""
    found = []
    for path in folder.glob("checkpoint-*"):
        number = path.name.rpartition("-")[2]
        if number.isdigit() and all((path / name).is_file() for name in CHECKPOINT_FILES) and _is_json(path):
            found.append((int(number), path))
    return [path for _, path in sorted(found)]


def _finished(checkpoint: Path) -> bool:
    """Say whether a checkpoint is that of the last step."""
    state = json.loads((checkpoint / CHECKPOINT_FILES[0]).read_text(encoding="utf-8"))
    return bool(state["global_step"] >= state["max_steps"] > 0)


def _is_json(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / CHECKPOINT_FILES[0]).read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def _average_(model: PreTrainedModel, checkpoints: Path, count: int) -> None:
    """Set weights to the mean of those in the last checkpoints, in place.

    Raises:
        RecipeError: there are not as many checkpoints.
    """
    paths = whole_checkpoints(checkpoints)[-count:]
    if len(paths) < count:
        raise RecipeError(f"average is {count}, but training left {len(paths)} checkpoints; train for more epochs")
    sums: dict[str, Tensor] = {}
    for path in paths:
        checkpoint, _ = load_model(type(model), path, dtype=model.dtype)
        for name, value in checkpoint.state_dict().items():
            if value.is_floating_point():
                sums[name] = sums.get(name, 0) + value.double()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name in sums:
                value.copy_(sums[name] / count)


def _trainer(
    workload: Workload,
    model: PreTrainedModel,
    data: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    tuning: Tuning,
    folder: Path,
    heads: HeadTraining | None = None,
    precise: bool = False,
) -> Trainer:
    given: dict[str, Any] = {
        "num_train_epochs": tuning.epochs, "max_steps": tuning.max_steps, "learning_rate": tuning.learning_rate,
        "warmup_steps": tuning.warmup, "per_device_train_batch_size": tuning.batch_size,
        "per_device_eval_batch_size": 64, "save_strategy": "epoch", "save_total_limit": tuning.average,
        "report_to": "none", "logging_steps": 50, "disable_tqdm": not workload.recipe.progress,
        "dataloader_pin_memory": torch.accelerator.is_available(),
        "use_cpu": not torch.accelerator.is_available(),  # said so, several processes meet on the CPU
    }  # fmt: skip
    if workload.task.kind == "regression" and tuning.arguments.get("label_smoothing_factor"):
        raise RecipeError(f"{workload.task.name} has scores, not classes; leave label_smoothing_factor out")
    try:
        arguments = workload.arguments_class(str(folder), seed=workload.recipe.seed, **(given | tuning.arguments))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"training arguments: {error}") from error
    if precise:
        arguments.mixed_precision = "no"  # whatever `accelerate launch` was told
    validation = next((rows for split, rows in data.items() if split.startswith("validation")), None)
    return seeded(workload.trainer_class)(
        model, arguments, train_dataset=data.get("train"), eval_dataset=validation, processing_class=tokenizer,
        data_collator=workload.collator(model, tokenizer), head_training=heads, **workload.options(),
    )  # fmt: skip
