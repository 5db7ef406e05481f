"""Fine-tune a workload's model with a Trainer, and evaluate it."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType
from typing import Any, get_args, get_type_hints
from zipfile import BadZipFile, ZipFile

import torch
from datasets import DatasetDict
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, Trainer, TrainingArguments

from collab_compress.checkpoint.directory import atomic_directory
from collab_compress.checkpoint.pretrained import load_model
from collab_compress.distributed import on_main_process
from collab_compress.errors import CollabCompressError, RecipeError, one_line
from collab_compress.experiments.batches import grouping
from collab_compress.experiments.recipe import Tuning
from collab_compress.experiments.record import discard, mark, write_record
from collab_compress.experiments.sharding import (
    is_to_shard,
    keep_whole_checkpoints,
    refuse_deepspeed,
    sharding,
    whole_weights,
)
from collab_compress.experiments.trackers import keep_logs, log_scores
from collab_compress.experiments.workload import Workload
from collab_compress.training import HeadSession, HeadTraining

logger = logging.getLogger(__name__)
STATE = "trainer_state.json"  # written last
STATE_FIELDS = {"global_step", "max_steps", "log_history", "best_model_checkpoint"}
LOG = "log.json"
OPTIMIZERS = {False: "optimizer.pt", True: "optimizer.bin"}
"""Whether FSDP shards the model → what the optimizer is saved as."""
CHECKPOINT_FILES = ((STATE,), tuple(OPTIMIZERS.values()), ("scheduler.pt",))
"""Of each, a checkpoint that is whole has one."""
EVALUATION = {
    "per_device_eval_batch_size", "eval_accumulation_steps", "dataloader_num_workers", "dataloader_pin_memory",
    "use_cpu", "disable_tqdm",
}  # fmt: skip
"""Training arguments that also hold while a model is evaluated; how it searches, `translation` of a recipe says."""
POSITIVE = {"per_device_eval_batch_size", "gradient_accumulation_steps", "generation_num_beams"}
PLAIN: dict[Any, Callable[[Any], bool]] = {
    NoneType: lambda value: value is None,
    bool: lambda value: isinstance(value, bool),
    int: lambda value: isinstance(value, int) and not isinstance(value, bool),
    float: lambda value: isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value),
    str: lambda value: isinstance(value, str),
}
"""Type of a training argument → whether a value is one."""


@sharding(allowed=True)
def fine_tune(
    workload: Workload,
    model: PreTrainedModel,
    data: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    tuning: Tuning,
    folder: Path,
) -> None:
    """Fine-tune and save into `folder/model`, going on where an earlier run stopped.

    What the Trainer logged is kept in `folder/log.json`, with the seconds it took, null where it was interrupted.

    Args:
        workload: the task, and the recipe with what acts on heads.
        model: what to train, in place.
        data: encoded; split train.
        tokenizer: pads, and is saved with the model.
        tuning: how long and how.
        folder: holds checkpoints while it runs, and logs.

    Raises:
        RecipeError: the training arguments are none, or no such tracker; the run that was interrupted sharded its
            model and this one does not, or the other way round.
    """
    checkpoints, recipe = folder / "checkpoints", workload.recipe
    on_main_process(lambda: mark(checkpoints))
    trainer = _trainer(workload, model, data, tokenizer, tuning, checkpoints, recipe.heads)
    keep_whole_checkpoints(trainer)
    keep_logs(trainer, recipe, folder)
    model_class, weights, seconds = type(model), None, None
    latest = on_main_process(lambda: last_checkpoint(checkpoints))
    best = trainer.args.load_best_model_at_end
    chosen = None if latest is None else on_main_process(lambda: _chosen(latest, best))
    if chosen is not None:  # killed before it was saved
        trained, _ = load_model(model_class, chosen, dtype=model.dtype)
        history = _state(chosen)["log_history"]
    else:
        if latest is not None:
            on_main_process(lambda: _check_optimizer(latest, trainer.is_fsdp_enabled))
        with _writing(checkpoints):
            done = trainer.train(resume_from_checkpoint=None if latest is None else str(latest))
        seconds, history = None if latest else done.metrics["train_runtime"], trainer.state.log_history
        trained, weights = trainer.accelerator.unwrap_model(trainer.model), whole_weights(trainer)

    def save() -> None:
        made, state = trained, weights
        if tuning.average > 1:
            made, state = _averaged(model_class, trained.dtype, checkpoints, tuning.average), None
        write_record(folder / LOG, {"seconds": seconds, "history": history})
        with atomic_directory(folder / "model") as directory:
            made.save_pretrained(directory, state_dict=state)
            tokenizer.save_pretrained(directory)
        discard(checkpoints)

    on_main_process(save)


@sharding(allowed=True)
def rehearse(
    workload: Workload,
    model: PreTrainedModel,
    data: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    tuning: Tuning,
) -> None:
    """Set up a fine-tuning as `fine_tune` does, without a step of it, and leave nothing behind but alphas in `model`.

    Raises:
        RecipeError: trainer, optimizer, schedule or data loader cannot be made with these settings.
        HeadError: what acts on heads does not fit the model.
    """
    heads = workload.recipe.heads
    try:
        with TemporaryDirectory() as folder:
            trainer = _trainer(workload, model, data, tokenizer, tuning, Path(folder), heads)
            keep_whole_checkpoints(trainer)
            trainer.create_optimizer_and_scheduler(num_training_steps=1000)
            trainer.get_train_dataloader()
            if trainer.args.eval_strategy != "no":
                trainer.get_eval_dataloader()
            HeadSession(trainer.model, heads, trainer.optimizer, tuning.warmup).close()
    except CollabCompressError:
        raise
    except Exception as error:
        raise RecipeError(
            f"the fine-tuning cannot be set up with these settings: {type(error).__name__}: {one_line(error)}"
        ) from error


@sharding(allowed=False)
def evaluate(
    workload: Workload,
    model: PreTrainedModel,
    data: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    tuning: Tuning,
    folder: Path,
) -> dict[str, dict[str, float]]:
    """Return the task's metrics on each labelled split except the training data, in full precision.

    Each process has the whole model, whether training shards it or not.
    """
    kept = {name: value for name, value in tuning.arguments.items() if name in EVALUATION}
    trainer = _trainer(workload, model, data, tokenizer, Tuning(arguments=kept), folder, precise=True)
    results = {split: workload.score(trainer, split, data[split], folder) for split in workload.scored()}
    log_scores(trainer, workload.recipe, folder, results)
    on_main_process(lambda: discard(folder / "checkpoints"))  # where the process was killed after it saved the model
    return results


def last_checkpoint(folder: Path) -> Path | None:
    """Return the latest checkpoint that is whole; one that was being written when the process died is not."""
    checkpoints = whole_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def whole_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that are whole, in the order of their steps; damaged ones are logged as warnings."""
    checkpoints = []
    for path in folder.glob("checkpoint-*"):
        number = path.name.rpartition("-")[2]
        complete = all(any((path / name).is_file() for name in names) for names in CHECKPOINT_FILES)
        if not number.isdigit() or not complete:
            continue
        if (damaged := _damaged_file(path)) is None:
            checkpoints.append((int(number), path))
        else:
            logger.warning("%s is damaged and not used; earlier checkpoints are, or training starts anew", damaged)
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


def _chosen(checkpoint: Path, best: bool) -> Path | None:
    """Return the checkpoint of the last training step; None if the given one is of another step."""
    state = _state(checkpoint)
    if not state["global_step"] >= state["max_steps"] > 0:
        return None
    named = state["best_model_checkpoint"] if best else None
    return checkpoint if named is None else checkpoint.parent / Path(named).name


def _state(checkpoint: Path) -> dict[str, Any]:
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return state if isinstance(state, dict) else {}


def _check_optimizer(checkpoint: Path, sharded: bool) -> None:
    """Refuse a checkpoint that a trainer cannot go on from.

    Raises:
        RecipeError: the run that wrote it sharded its model and this one does not, or the other way round.
    """
    if not (checkpoint / OPTIMIZERS[sharded]).is_file():
        was, now = ("without", "with") if sharded else ("with", "without")
        raise RecipeError(
            f"{checkpoint} was written {was} FSDP, and training cannot go on {now} it; start it {was} FSDP again, or "
            f"remove {checkpoint.parent}"
        )


def _averaged(model_class: type[PreTrainedModel], dtype: torch.dtype, checkpoints: Path, count: int) -> Any:
    """Return a model whose weights are the mean of the last checkpoints.

    Raises:
        RecipeError: there are not as many checkpoints.
    """
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
    workload: Workload,
    model: PreTrainedModel,
    data: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    tuning: Tuning,
    folder: Path,
    heads: HeadTraining | None = None,
    precise: bool = False,
) -> Trainer:
    arguments = training_arguments(workload, tuning, folder)
    tokenizer = deepcopy(tokenizer)  # batches leave their padding in it, which would be saved with the model
    if precise:
        arguments.mixed_precision = "no"  # whatever `accelerate launch` was told
    validation = next((rows for split, rows in data.items() if split.startswith("validation")), None)
    trainer: Trainer = grouping(workload.trainer_class, tuning.batch_tokens)(
        model, arguments, train_dataset=data.get("train"), eval_dataset=validation, processing_class=tokenizer,
        data_collator=workload.collator(model, tokenizer), head_training=heads, **workload.options(tokenizer),
    )  # fmt: skip
    if not workload.recipe.progress:
        trainer.remove_callback(PrinterCallback)  # which prints the logs where there is no bar
    return trainer


def training_arguments(workload: Workload, tuning: Tuning, folder: Path) -> TrainingArguments:
    """Return a trainer's arguments, checked as far as possible before training.

    Raises:
        RecipeError: one is not known, or its value is none for it.
    """
    given: dict[str, Any] = {
        "num_train_epochs": tuning.epochs, "max_steps": tuning.max_steps, "learning_rate": tuning.learning_rate,
        "warmup_steps": tuning.warmup, "per_device_train_batch_size": tuning.batch_size,
        "per_device_eval_batch_size": 64, "save_strategy": "epoch", "save_total_limit": tuning.average,
        "report_to": list(workload.recipe.trackers) or "none", "logging_steps": 50,
        "disable_tqdm": not workload.recipe.progress,
        "dataloader_pin_memory": torch.accelerator.is_available(),
        "use_cpu": not torch.accelerator.is_available(),  # said so, several processes meet on the CPU
    }  # fmt: skip
    if workload.task.kind == "regression" and tuning.arguments.get("label_smoothing_factor"):
        raise RecipeError(f"{workload.task.name} has scores, not classes; leave label_smoothing_factor out")
    refuse_deepspeed(tuning.arguments)
    hints = get_type_hints(workload.arguments_class)
    for name, value in tuning.arguments.items():
        hint = bool if name == "fsdp" else hints.get(name)  # its hint is of a form that Transformers drops
        kinds = set(get_args(hint) or (hint,))
        if kinds <= PLAIN.keys() and not any(PLAIN[kind](value) for kind in kinds):
            expected = " or ".join(sorted("null" if kind is NoneType else kind.__name__ for kind in kinds))
            raise RecipeError(f"training arguments: {name} is {value!r}; expected {expected}")
        if name in POSITIVE and isinstance(value, int) and value < 1:
            raise RecipeError(f"training arguments: {name} is {value}; expected at least 1")
    try:
        arguments = workload.arguments_class(str(folder), seed=workload.recipe.seed, **(given | tuning.arguments))
    except Exception as error:  # whatever Transformers, Accelerate and PyTorch raise
        raise RecipeError(f"training arguments: {one_line(error)}") from error
    if arguments.eval_strategy != "no" and not any(split.startswith("validation") for split in workload.texts):
        raise RecipeError(
            f"training arguments: eval_strategy is {arguments.eval_strategy.value}, but {workload.task.name} has no "
            "validation data; leave it out"
        )
    is_to_shard(arguments)
    return arguments


@contextmanager
def _writing(checkpoints: Path) -> Iterator[None]:
    """Turn what is raised where a disk is full into one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"training stopped, cannot write {checkpoints}: {error}") from error
    except RuntimeError as error:
        if "PytorchStreamWriter" not in str(error) and "inline_container" not in str(error):
            raise
        raise RecipeError(f"training stopped, cannot write {checkpoints}: {str(error).splitlines()[0]}") from error
