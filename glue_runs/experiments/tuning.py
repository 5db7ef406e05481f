"""Fine-tune the model of a workload with a Trainer, and evaluate it."""

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import ceil, inf
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType
from typing import Any, get_args, get_type_hints
from zipfile import BadZipFile, ZipFile

import torch
from pydantic import ConfigDict, PositiveInt, ValidationError, create_model
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import (
    TensorBoardCallback,
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)

from collab_compress.checkpoint.directory import atomic_directory
from collab_compress.checkpoint.pretrained import load_model
from collab_compress.distributed import on_main_process
from collab_compress.errors import CollabCompressError, RecipeError, one_line
from collab_compress.training import HeadSession, HeadTraining

from .batches import grouping
from .outputs import write_record
from .recipe import Recipe, Tuning, problems_of
from .sharding import (
    is_to_shard,
    keep_whole_checkpoints,
    refuse_deepspeed,
    sharding,
    whole_weights,
)
from .workload import Workload

logger = logging.getLogger("collab_compress.glue_runs")  # held with the warnings of the library
STATE = "trainer_state.json"  # written last
STATE_FIELDS = {"global_step", "max_steps", "log_history", "best_model_checkpoint"}
LOG = "log.json"
CHECKPOINTS = "checkpoints"
OPTIMIZERS = {False: "optimizer.pt", True: "optimizer.bin"}
"""Whether FSDP shards the model → file of the optimizer's state."""
CHECKPOINT_FILES = ((STATE,), tuple(OPTIMIZERS.values()), ("scheduler.pt",))
"""A whole checkpoint has one file of each group."""
EVALUATION = {
    "per_device_eval_batch_size",
    "eval_accumulation_steps",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "use_cpu",
    "disable_tqdm",
}
"""Training arguments that also hold during evaluation; generation is set by the recipe's `translation`."""
POSITIVE = ("per_device_eval_batch_size", "gradient_accumulation_steps", "generation_num_beams")
PLAIN = {NoneType, bool, int, float, str}
"""Types of training arguments that are checked."""


@sharding(allowed=True)
def fine_tune(workload: Workload, model: PreTrainedModel, tuning: Tuning, folder: Path) -> None:
    """Fine-tune a model in place and save it into `folder/model`, from the last checkpoint if there is one.

    The Trainer's log is written to `folder/log.json`, with the seconds of training, null if it was interrupted.

    Args:
        workload: the task, and the recipe with the methods that act on heads.
        model: is trained.
        tuning: length and options.
        folder: of the stage; holds checkpoints until the model is saved.

    Raises:
        RecipeError: the training arguments are invalid, or the last checkpoint was sharded and this run does not
            shard, or the reverse.
    """
    checkpoints, recipe = folder / CHECKPOINTS, workload.recipe
    trainer = _trainer(workload, model, tuning, checkpoints, recipe.heads)
    if trainer.accelerator.mixed_precision == "bf16" and _is_emulated(trainer.accelerator.device):
        logger.warning("this CPU only emulates bfloat16, and float32 is faster; pass tuning.arguments.bf16=false")
    keep_whole_checkpoints(trainer)
    keep_logs(trainer, recipe, folder)
    model_class, weights, seconds = type(model), None, None
    whole = on_main_process(lambda: whole_checkpoints(checkpoints))
    latest = whole[-1] if whole else None
    best = trainer.args.load_best_model_at_end
    final = None if latest is None else on_main_process(lambda: _final_checkpoint(latest, best))
    if latest is not None and final is not None:  # the run was killed between its last step and saving the model
        trained, _ = load_model(model_class, final, dtype=model.dtype)
        history = _state(latest)["log_history"]
    else:
        if latest is not None:
            on_main_process(lambda: _check_optimizer(latest, trainer.is_fsdp_enabled))
        with _naming_full_disks(checkpoints):
            done = trainer.train(resume_from_checkpoint=None if latest is None else str(latest))
        seconds, history = None if latest else done.metrics["train_runtime"], trainer.state.log_history
        trained, weights = trainer.accelerator.unwrap_model(trainer.model), whole_weights(trainer)

    def save() -> None:
        saved, state = trained, weights
        if tuning.average > 1:
            saved, state = _averaged(model_class, trained.dtype, checkpoints, tuning.average), None
        write_record(folder / LOG, {"seconds": seconds, "history": history})
        with atomic_directory(folder / "model") as directory:
            saved.save_pretrained(directory, state_dict=state)
            workload.tokenizer.save_pretrained(directory)
        shutil.rmtree(checkpoints, ignore_errors=True)

    on_main_process(save)


def _is_emulated(device: torch.device) -> bool:
    """Return whether a device multiplies in bfloat16 by plain loops, as PyTorch does on x86 without AVX-512."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not in PyTorch 2.6
    is_x86 = device.type == "cpu" and capabilities.get("architecture") == "x86_64"
    return is_x86 and not capabilities.get("avx512_bw")


@sharding(allowed=True)
def rehearse(workload: Workload, model: PreTrainedModel, tuning: Tuning) -> None:
    """Set up a fine-tuning as `fine_tune` does, without a training step; only alphas stay in the model.

    Raises:
        RecipeError: the trainer, optimizer, schedule or data loader cannot be made with these settings.
        HeadError: a method that acts on heads does not fit the model.
    """
    heads = workload.recipe.heads
    dropouts = {
        name: rate for name, rate in model.config.to_dict().items() if "drop" in name and "att" in name and rate
    }
    if dropouts and model.config._attn_implementation == "flex_attention":
        name, rate = next(iter(dropouts.items()))
        raise RecipeError(
            f"attn_implementation is 'flex_attention', which has no dropout in training, and {name} of the model is "
            f"{rate}; expected 0; pass sdpa, or set {name} to 0 in its config"
        )
    try:
        with TemporaryDirectory() as folder:
            trainer = _trainer(workload, model, tuning, Path(folder), heads)
            keep_whole_checkpoints(trainer)
            trainer.create_optimizer_and_scheduler(num_training_steps=1000)
            loader = trainer.get_train_dataloader()
            next(iter(loader))
            _check_average(tuning.average, trainer.args, len(loader))
            if trainer.args.eval_strategy != "no":
                trainer.get_eval_dataloader()
                _check_best(trainer, workload)
            HeadSession(trainer.model, heads, trainer.optimizer, tuning.warmup).close()
    except CollabCompressError:
        raise
    except Exception as error:  # whatever Transformers, Accelerate and PyTorch raise
        raise RecipeError(
            f"the fine-tuning cannot be set up with these settings: {type(error).__name__}: {one_line(error)}"
        ) from error


def _check_average(average: int, arguments: TrainingArguments, batches: int) -> None:
    """Refuse to average more checkpoints than a fine-tuning leaves, given the batches of an epoch."""
    epoch = ceil(batches / arguments.gradient_accumulation_steps)
    steps = arguments.max_steps if arguments.max_steps > 0 else ceil(arguments.num_train_epochs * epoch)
    save_steps = arguments.save_steps if arguments.save_steps >= 1 else ceil(steps * arguments.save_steps)
    every = {"no": inf, "epoch": epoch, "steps": save_steps}.get(arguments.save_strategy.value, 1)
    if average > max(1, ceil(steps / every)):
        raise RecipeError(
            f"average is {average}, and training leaves {ceil(steps / every)} checkpoints; train for longer, save "
            "more often, or lower average"
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


@sharding(allowed=False)
def evaluate(workload: Workload, model: PreTrainedModel, tuning: Tuning, folder: Path) -> dict[str, dict[str, float]]:
    """Return the task's metrics on each labelled split except the training data, in full precision.

    Each process has the whole model, whether training shards it or not.
    """
    arguments = {name: value for name, value in tuning.arguments.items() if name in EVALUATION}
    trainer = _trainer(workload, model, Tuning(arguments=arguments), folder)
    results = {split: workload.score(trainer, split, workload.data[split], folder) for split in workload.scored()}
    log_scores(trainer, workload.recipe, folder, results)
    # they are still there if the process was killed after it saved the model
    on_main_process(lambda: shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True))
    return results


def whole_checkpoints(folder: Path) -> list[Path]:
    """Return the whole checkpoints in the order of their steps; log a warning for each damaged one.

    One that was being written when the process died is not whole.
    """
    checkpoints = []
    for path in folder.glob("checkpoint-*"):
        number = path.name.rpartition("-")[2]
        complete = all(any((path / name).is_file() for name in names) for names in CHECKPOINT_FILES)
        if not number.isdigit() or not complete:
            continue
        if (damaged := _damaged_file(path)) is None:
            checkpoints.append((int(number), path))
        else:
            logger.warning("%s is damaged; an earlier checkpoint is used, or training starts anew", damaged)
    return [path for _, path in sorted(checkpoints)]


def _damaged_file(checkpoint: Path) -> Path | None:
    """Return the first file of a checkpoint that cannot be read; None if all can."""
    for path in sorted(checkpoint.iterdir()):
        try:
            if path.name == STATE:
                state = _state(checkpoint)
                if not (state.keys() >= STATE_FIELDS and isinstance(state["global_step"], int)):
                    return path
            elif path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    pass
            elif path.suffix in (".pt", ".pth", ".bin"):
                with ZipFile(path) as archive:
                    if archive.testzip() is not None:
                        return path
        except (OSError, ValueError, SafetensorError, BadZipFile):
            return path
    return None


def _final_checkpoint(latest: Path, best: bool) -> Path | None:
    """Return the checkpoint whose weights are the result if training is complete, else None.

    Args:
        latest: the last checkpoint.
        best: whether the best checkpoint is the result, not the last one.
    """
    state = _state(latest)
    if not state["global_step"] >= state["max_steps"] > 0:
        return None
    named = state["best_model_checkpoint"] if best else None
    return latest if named is None else latest.parent / Path(named).name


def _state(checkpoint: Path) -> dict[str, Any]:
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return state if isinstance(state, dict) else {}


def _check_optimizer(checkpoint: Path, sharded: bool) -> None:
    """Refuse a checkpoint that was written with FSDP if training goes on without it, and the reverse."""
    if not (checkpoint / OPTIMIZERS[sharded]).is_file():
        was, now = ("without", "with") if sharded else ("with", "without")
        raise RecipeError(
            f"{checkpoint} was written {was} FSDP, and training cannot go on {now} it; start it {was} FSDP again, or "
            f"remove {checkpoint.parent}"
        )


def _averaged(model_class: type[PreTrainedModel], dtype: torch.dtype, checkpoints: Path, count: int) -> Any:
    """Return a model whose weights are the mean of the last checkpoints."""
    paths = whole_checkpoints(checkpoints)[-count:]
    if len(paths) < count:
        raise RecipeError(f"average is {count}, but training left {len(paths)} checkpoints; train for more epochs")
    sums: dict[str, Tensor] = {}
    for path in paths:
        model, _ = load_model(model_class, path, dtype=dtype)
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                sums[name] = sums.get(name, 0) + value.double()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name in sums:
                value.copy_(sums[name] / count)
    return model


def _trainer(
    workload: Workload, model: PreTrainedModel, tuning: Tuning, folder: Path, heads: HeadTraining | None = None
) -> Trainer:
    """Return a trainer; without `heads` it evaluates in full precision."""
    arguments = training_arguments(workload, tuning, folder)
    if heads is None:
        arguments.mixed_precision = "no"  # even under `accelerate launch --mixed_precision`
    tokenizer, data = workload.new_tokenizer(), workload.data
    trainer: Trainer = grouping(workload.trainer_class, tuning.batch_tokens)(
        model,
        arguments,
        train_dataset=data.get("train"),
        eval_dataset=next((rows for split, rows in data.items() if split.startswith("validation")), None),
        processing_class=tokenizer,
        data_collator=workload.collator(model, tokenizer),
        head_training=heads,
        **workload.options(tokenizer, tuning),
    )
    if not workload.recipe.progress:
        trainer.remove_callback(PrinterCallback)  # it prints the logs where there is no progress bar
    return trainer


def training_arguments(workload: Workload, tuning: Tuning, folder: Path) -> TrainingArguments:
    """Return a trainer's arguments, checked as far as possible before training.

    Raises:
        RecipeError: one is unknown, or its value is invalid.
    """
    recipe, has_accelerator = workload.recipe, torch.accelerator.is_available()
    defaults: dict[str, Any] = {
        "num_train_epochs": tuning.epochs,
        "max_steps": tuning.max_steps,
        "learning_rate": tuning.learning_rate,
        "warmup_steps": tuning.warmup,
        "per_device_train_batch_size": tuning.batch_size,
        "per_device_eval_batch_size": 64,
        "save_strategy": "epoch",
        "save_total_limit": tuning.average,
        "report_to": list(recipe.trackers) or "none",
        "logging_steps": 50,
        "disable_tqdm": not recipe.progress,
        "dataloader_pin_memory": has_accelerator,
        "use_cpu": not has_accelerator,  # without it, several processes could not communicate on the CPU
    }
    if workload.task.kind == "regression" and tuning.arguments.get("label_smoothing_factor"):
        raise RecipeError(f"{workload.task.name} has scores, not classes; leave label_smoothing_factor out")
    refuse_deepspeed(tuning.arguments)
    _check_types(workload.arguments_class, tuning.arguments)
    workers, cores = tuning.arguments.get("dataloader_num_workers", 0), os.cpu_count() or 1
    if workers > cores:
        raise RecipeError(
            f"training arguments: dataloader_num_workers is {workers}; expected at most the {cores} cores of this "
            "machine"
        )
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
    is_to_shard(arguments)
    return arguments


def _check_types(arguments_class: type[TrainingArguments], values: Mapping[str, Any]) -> None:
    """Refuse values of the wrong type, which a trainer would notice while it trains."""
    hints: dict[str, Any] = get_type_hints(arguments_class)
    hints = {name: hint for name, hint in hints.items() if set(get_args(hint) or (hint,)) <= PLAIN}
    hints |= {"fsdp": bool} | dict.fromkeys(POSITIVE, PositiveInt | None)
    checked: dict[str, Any] = {name: (hints[name], ...) for name in values.keys() & hints.keys()}
    model = create_model("Arguments", __config__=ConfigDict(strict=True, allow_inf_nan=False), **checked)
    try:
        model(**values)
    except ValidationError as error:
        raise RecipeError(f"training arguments: {problems_of(error)}") from error


@contextmanager
def _naming_full_disks(checkpoints: Path) -> Iterator[None]:
    """Report a full disk as one RecipeError."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        of_torch = any(name in str(error) for name in ("PytorchStreamWriter", "inline_container"))
        if isinstance(error, RuntimeError) and not of_torch:
            raise
        raise RecipeError(f"training stopped, cannot write {checkpoints}: {one_line(error)}") from error


def check_trackers(names: tuple[str, ...]) -> None:
    """Refuse trackers that the Trainer does not know, or whose package is not installed.

    Raises:
        RecipeError: naming those that are available.
    """
    available = get_available_reporting_integrations()
    for name in names:
        if name not in available:
            raise RecipeError(
                f"no tracker {name!r} here; install its package, or set trackers to some of: "
                f"{', '.join(available) or '[]'}"
            )


def keep_logs(trainer: Trainer, recipe: Recipe, folder: Path) -> list[TrainerCallback]:
    """Name a trainer's run after the recipe and the stage, and let TensorBoard write into `folder/logs`.

    Returns:
        The callbacks of the recipe's trackers.
    """
    trainer.args.run_name = f"{recipe.task}-{recipe.method_name}-seed{recipe.seed}-{folder.name}"
    classes = tuple(get_reporting_integration_callbacks(trainer.args.report_to))
    reporting = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, classes)]
    for callback in reporting:
        if isinstance(callback, TensorBoardCallback):
            callback.logging_dir = str(folder / "logs")
    return reporting


def log_scores(trainer: Trainer, recipe: Recipe, folder: Path, metrics: Mapping[str, Mapping[str, float]]) -> None:
    """Log the metrics of a finished stage as the Trainer does, as eval/f1 and test/bleu, and end its run.

    Args:
        trainer: has evaluated the stage.
        recipe: names the trackers.
        folder: of the stage.
        metrics: split → name → value.
    """
    logs: dict[str, float] = {}
    for split, values in metrics.items():
        prefix = split.replace("validation", "eval", 1)
        logs |= {f"{prefix}_{name}": value for name, value in values.items()}
    for callback in keep_logs(trainer, recipe, folder):
        state = (trainer.args, trainer.state, trainer.control)
        callback.on_log(*state, logs=dict(logs), model=trainer.model)
        callback.on_train_end(*state, model=trainer.model, processing_class=trainer.processing_class)
    if "wandb" in trainer.args.report_to:
        sys.modules["wandb"].finish()  # otherwise the next stage would continue this run
