"""Log training where people look at it, through Accelerate's trackers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import filter_trackers, get_available_trackers
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from collab_compress.errors import RecipeError

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


class TrackerCallback(TrainerCallback):  # type: ignore[misc]
    """Send what a trainer logs to Accelerate's trackers.

    Args:
        trainer: whose training is logged.
        names: of trackers.
        folder: where those that write files write them.
        config: what the run is called by, as names and numbers.
    """

    def __init__(self, trainer: Trainer, names: tuple[str, ...], folder: Path, config: Mapping[str, Any]) -> None:
        self.accelerator: Accelerator = trainer.accelerator
        self.names, self.folder, self.config = names, folder, dict(config)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Open the trackers."""
        self.accelerator.log_with = filter_trackers(list(self.names), str(self.folder))
        self.accelerator.project_configuration.set_directories(str(self.folder))
        self.accelerator.init_trackers(PROJECT, self.config)

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
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self.accelerator.trackers = []
