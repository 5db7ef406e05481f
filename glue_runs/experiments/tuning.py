"""Fine-tune the model of a workload with a Trainer, and evaluate it."""

import copy
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from collab_compress_cli.pretrained import load_weights
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import (
    TensorBoardCallback,
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)

from collab_compress.checkpoint.files import atomic_directory
from collab_compress.devices import emulates_bfloat16
from collab_compress.errors import CollabCompressError, RecipeError, one_line
from collab_compress.training import DistillationTrainer, HeadSession, HeadTraining
from collab_compress.training.checkpoints import read_state, whole_checkpoints

from .by_length import group_by_length
from .outputs import write_record
from .processes import on_main_process
from .recipe import Recipe, Tuning
from .workload import Workload

logger = logging.getLogger("collab_compress.glue_runs")  # held with the warnings of the library
LOG = "log.json"
CHECKPOINTS = "checkpoints"
EVALUATION_ARGUMENTS = {
    "per_device_eval_batch_size",
    "eval_accumulation_steps",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "use_cpu",
    "disable_tqdm",
}
"""Training arguments that also hold during evaluation; generation is set by the recipe's `translation`."""


def fine_tune(
    workload: Workload,
    model: PreTrainedModel,
    tuning: Tuning,
    folder: Path,
    teacher: PreTrainedModel | None = None,
) -> None:
    """Fine-tune a model, from the last checkpoint if there is one, and save it in `folder/model` with its log.

    With a teacher it is trained towards that, without labels.
    """
    checkpoints, recipe = folder / CHECKPOINTS, workload.recipe
    trainer = _make_trainer(workload, model, tuning, checkpoints, recipe.heads, teacher)
    if trainer.accelerator.mixed_precision == "bf16" and emulates_bfloat16(trainer.accelerator.device):
        logger.warning("this CPU only emulates bfloat16, and float32 is faster; pass tuning.arguments.bf16=false")
    keep_logs(trainer, recipe, folder)
    seconds = None
    whole = on_main_process(whole_checkpoints)(checkpoints)
    latest = whole[-1] if whole else None
    best = trainer.args.load_best_model_at_end
    final = None if latest is None else on_main_process(_final_checkpoint)(latest, best)
    if latest is not None and final is not None:  # the run was killed between its last step and saving the model
        trained, _ = load_weights(type(model), final, dtype=model.dtype)
        history = read_state(latest)["log_history"]
    else:
        done = trainer.train(resume_from_checkpoint=None if latest is None else str(latest))
        seconds, history = None if latest else done.metrics["train_runtime"], trainer.state.log_history
        trained = trainer.accelerator.unwrap_model(trainer.model)

    @on_main_process
    def save() -> None:
        write_record(folder / LOG, {"seconds": seconds, "history": history})
        with atomic_directory(folder / "model") as directory:
            trained.save_pretrained(directory)
            workload.tokenizer.save_pretrained(directory)
        shutil.rmtree(checkpoints, ignore_errors=True)

    save()


def rehearse(workload: Workload, model: PreTrainedModel, tuning: Tuning) -> None:
    """Set up a fine-tuning as `fine_tune` does, without a training step; only alphas stay in the model."""
    heads = workload.recipe.heads
    try:
        with TemporaryDirectory() as folder:
            teacher = copy.deepcopy(model) if tuning.distilled else None
            trainer = _make_trainer(workload, model, tuning, Path(folder), heads, teacher)
            trainer.create_optimizer_and_scheduler(num_training_steps=1000)
            next(iter(trainer.get_train_dataloader()))
            if trainer.eval_dataset is not None:
                trainer.get_eval_dataloader()
            HeadSession(trainer.model, heads, trainer.optimizer, tuning.warmup).close()
    except CollabCompressError:
        raise
    except Exception as error:  # whatever Transformers, Accelerate and PyTorch raise
        message = f"{type(error).__name__}: {one_line(error)}"
        raise RecipeError(f"the fine-tuning cannot be set up with these settings: {message}") from error


def _check_dropout(config: PretrainedConfig) -> None:
    """Refuse to train with flex attention, which has no dropout, a model that has one."""
    for name, rate in config.to_dict().items():
        if rate and "drop" in name and "att" in name and config._attn_implementation == "flex_attention":
            raise RecipeError(
                f"attn_implementation is 'flex_attention', which has no dropout in training, and {name} of the model "
                f"is {rate}; expected 0; pass sdpa, or set {name} to 0 in its config"
            )


def _check_best(trainer: Trainer, workload: Workload) -> None:
    """Refuse to choose the best model by a metric that evaluations do not have: the first would end the training."""
    best = (trainer.args.metric_for_best_model or "loss").removeprefix("eval_")
    known = ["loss", *(workload.metric.scores if trainer.compute_metrics is not None else ())]
    if best not in known:
        raise RecipeError(
            f"metric_for_best_model is {best}, and evaluations have {', '.join(known)} (of translations, bleu with "
            "predict_with_generate: true); choose one of them"
        )


def evaluate(workload: Workload, model: PreTrainedModel, tuning: Tuning, folder: Path) -> dict[str, dict[str, float]]:
    """Return the task's metrics on each labelled split except the training data, in full precision."""
    arguments = {name: value for name, value in tuning.arguments.items() if name in EVALUATION_ARGUMENTS}
    trainer = _make_trainer(workload, model, Tuning(arguments=arguments), folder)
    results = {split: workload.score(trainer, split, workload.data[split], folder) for split in workload.scored()}
    log_scores(trainer, workload.recipe, folder, results)
    # they are still there if the process was killed after it saved the model
    on_main_process(shutil.rmtree)(folder / CHECKPOINTS, ignore_errors=True)
    return results


def _final_checkpoint(latest: Path, best: bool) -> Path | None:
    """Return the checkpoint with the result, the `best` or the latest, if training is complete; else None."""
    state = read_state(latest)
    if not state["global_step"] >= state["max_steps"] > 0:
        return None
    named = state["best_model_checkpoint"] if best else None
    return latest if named is None else latest.parent / Path(named).name


def _make_trainer(
    workload: Workload,
    model: PreTrainedModel,
    tuning: Tuning,
    folder: Path,
    heads: HeadTraining | None = None,
    teacher: PreTrainedModel | None = None,
) -> Trainer:
    """Return a trainer; without `heads` it evaluates in full precision."""
    arguments = training_arguments(workload, tuning, folder)
    if heads is None:
        arguments.mixed_precision = "no"  # even under `accelerate launch --mixed_precision`
    tokenizer, data = workload.new_tokenizer(), workload.data
    trainer_class = workload.trainer_class if teacher is None else DistillationTrainer
    own: dict[str, Any] = {"head_training": heads} if teacher is None else {"teacher": teacher}
    trainer: Trainer = group_by_length(trainer_class)(
        model,
        arguments,
        train_dataset=data.get("train"),
        eval_dataset=next((rows for split, rows in data.items() if split.startswith("validation")), None),
        processing_class=tokenizer,
        data_collator=workload.collator(model, tokenizer),
        **own,
        **workload.options(tokenizer, tuning),
    )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise RecipeError("recipes keep the whole model in each process; leave FSDP and DeepSpeed out")
    if heads is not None:
        _check_dropout(model.config)
        if arguments.eval_strategy != "no":
            _check_best(trainer, workload)
    if not workload.recipe.progress:
        trainer.remove_callback(PrinterCallback)  # it prints the logs where there is no progress bar
    return trainer


def training_arguments(workload: Workload, tuning: Tuning, folder: Path) -> TrainingArguments:
    """Return a trainer's arguments, checked as far as possible before training."""
    recipe, has_accelerator = workload.recipe, torch.accelerator.is_available()
    defaults: dict[str, Any] = {
        "num_train_epochs": tuning.epochs,
        "max_steps": tuning.max_steps,
        "learning_rate": tuning.learning_rate,
        "warmup_steps": tuning.warmup,
        "per_device_train_batch_size": tuning.batch_size,
        "per_device_eval_batch_size": 64,
        "save_strategy": "epoch",
        "save_total_limit": 1,
        "report_to": list(recipe.trackers) or "none",
        "logging_steps": 50,
        "disable_tqdm": not recipe.progress,
        "dataloader_pin_memory": has_accelerator,
        "use_cpu": not has_accelerator,  # without it, several processes could not communicate on the CPU
    }
    if workload.task.kind == "regression" and tuning.arguments.get("label_smoothing_factor"):
        raise RecipeError(f"{workload.task.name} has scores, not classes; leave label_smoothing_factor out")
    try:
        arguments = workload.arguments_class(str(folder), seed=recipe.seed, **(defaults | tuning.arguments))
    except Exception as error:  # whatever Transformers, Accelerate and PyTorch raise
        file = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        raise RecipeError(f"training arguments: {file}{one_line(error)}") from error
    if arguments.eval_strategy != "no" and not any(split.startswith("validation") for split in workload.texts):
        raise RecipeError(
            f"training arguments: eval_strategy is {arguments.eval_strategy.value}, but {workload.task.name} has no "
            "validation data; leave it out"
        )
    return arguments


def check_trackers(names: tuple[str, ...]) -> None:
    """Refuse trackers that the Trainer does not know, or whose package is not installed."""
    available = get_available_reporting_integrations()
    for name in names:
        if name not in available:
            raise RecipeError(
                f"no tracker {name!r} here; install its package, or set trackers to some of: "
                f"{', '.join(available) or '[]'}"
            )


def keep_logs(trainer: Trainer, recipe: Recipe, folder: Path) -> list[TrainerCallback]:
    """Name a trainer's run, let TensorBoard write into `folder/logs`, and return the trackers' callbacks."""
    trainer.args.run_name = f"{recipe.task}-{recipe.method_name}-seed{recipe.seed}-{folder.name}"
    classes = tuple(get_reporting_integration_callbacks(trainer.args.report_to))
    reporting = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, classes)]
    for callback in reporting:
        if isinstance(callback, TensorBoardCallback):
            callback.logging_dir = str(folder / "logs")
    return reporting


def log_scores(trainer: Trainer, recipe: Recipe, folder: Path, metrics: Mapping[str, Mapping[str, float]]) -> None:
    """Log the metrics of a finished stage as the Trainer does, as eval/f1 and test/bleu, and end its run."""
    logs: dict[str, float] = {}
    for split, values in metrics.items():
        prefix = split.replace("validation", "eval", 1)
        logs |= {f"{prefix}_{name}": value for name, value in values.items()}
    for callback in keep_logs(trainer, recipe, folder):
        state = (trainer.args, trainer.state, trainer.control)
        callback.on_log(*state, logs=dict(logs), model=trainer.model)
        callback.on_train_end(*state, model=trainer.model, processing_class=trainer.processing_class)
