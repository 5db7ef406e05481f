"""Log training where people look at it, through Accelerate's trackers."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import filter_trackers, get_available_trackers
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from collab_compress.errors import RecipeError
from collab_compress.experiments.recipe import Recipe

PROJECT = "collab_compress"


def check_trackers(names: tuple[str, ...]) -> None:
    """Refuse trackers that are not there.

    Raises:
        RecipeError: Accelerate does not know one, or its package is not installed.
    """
    available = [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        if name not in available:
            raise RecipeError(
                f"no tracker {name!r} here; install its package, or set trackers to some of: "
                f"{', '.join(available) or '[]'}"
            )


def run_config(recipe: Recipe, stage: str) -> dict[str, Any]:
    """Describe a run by the fields of its recipe that are set; names of nested ones have dots between them."""
    flat: dict[str, Any] = {"stage": stage}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for inner, found in value.items():
                add(f"{name}.{inner}" if name else inner, found)
        elif value is not None and value != ():
            flat[name] = value if isinstance(value, str | int | float) else str(value)

    add("", asdict(recipe))
    return flat


def log_scores(trainer: Trainer, recipe: Recipe, folder: Path, metrics: Mapping[str, Mapping[str, float]]) -> None:
    """Send the metrics of a finished stage to the recipe's trackers.

    Args:
        trainer: that found them.
        recipe: of the experiment.
        folder: of the stage.
        metrics: split → name → value.
    """
    open_trackers(trainer.accelerator, recipe, folder)
    trainer.accelerator.log({f"{split}/{name}": n for split, found in metrics.items() for name, n in found.items()})
    close_trackers(trainer.accelerator)


def open_trackers(accelerator: Accelerator, recipe: Recipe, folder: Path) -> None:
    """Begin a run of the recipe's trackers; those that write files write them into `folder/logs`."""
    accelerator.log_with = filter_trackers(list(recipe.trackers), str(folder / "logs"))
    accelerator.project_configuration.set_directories(str(folder / "logs"))
    accelerator.init_trackers(PROJECT, run_config(recipe, folder.name))


def close_trackers(accelerator: Accelerator) -> None:
    """End it."""
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.trackers = []


class TrackerCallback(TrainerCallback):  # type: ignore[misc]
    """Send what a trainer logs to Accelerate's trackers.

    Args:
        trainer: whose training is logged.
        recipe: of the experiment.
        folder: of the stage.
    """

    def __init__(self, trainer: Trainer, recipe: Recipe, folder: Path) -> None:
        self.accelerator: Accelerator = trainer.accelerator
        self.recipe, self.folder = recipe, folder

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Open the trackers."""
        open_trackers(self.accelerator, self.recipe, self.folder)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Send numbers, at the number of steps done."""
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        self.accelerator.log(numbers, step=state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Close the trackers."""
        close_trackers(self.accelerator)
