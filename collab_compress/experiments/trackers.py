"""Log training where people look at it, through the Trainer's integrations."""

import sys
from collections.abc import Mapping
from pathlib import Path

from transformers import Trainer, TrainerCallback
from transformers.integrations import (
    TensorBoardCallback,
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)

from collab_compress.errors import RecipeError
from collab_compress.experiments.recipe import Recipe


def check_trackers(names: tuple[str, ...]) -> None:
    """Refuse trackers that are not there.

    Raises:
        RecipeError: the Trainer does not know one, or its package is not installed.
    """
    available = get_available_reporting_integrations()
    for name in names:
        if name not in available:
            raise RecipeError(
                f"no tracker {name!r} here; install its package, or set trackers to some of: "
                f"{', '.join(available) or '[]'}"
            )


def keep_logs(trainer: Trainer, recipe: Recipe, folder: Path) -> list[TrainerCallback]:
    """Name a trainer's run after the recipe and the stage, and keep what TensorBoard writes in `folder/logs`.

    Args:
        trainer: whose arguments report to the recipe's trackers.
        recipe: of the experiment.
        folder: of the stage.

    Returns:
        The trainer's callbacks that report.
    """
    trainer.args.run_name = f"{recipe.task}-{recipe.method}-seed{recipe.seed}-{folder.name}"
    kinds = tuple(get_reporting_integration_callbacks(trainer.args.report_to))
    reporting = [each for each in trainer.callback_handler.callbacks if isinstance(each, kinds)]
    for callback in reporting:
        if isinstance(callback, TensorBoardCallback):
            callback.logging_dir = str(folder / "logs")
    return reporting


def log_scores(trainer: Trainer, recipe: Recipe, folder: Path, metrics: Mapping[str, Mapping[str, float]]) -> None:
    """Send the metrics of a finished stage to the recipe's trackers, and end its run.

    Args:
        trainer: that found them.
        recipe: of the experiment.
        folder: of the stage.
        metrics: split → name → value; logged as the Trainer does, as in eval/f1 and test/bleu.
    """
    logs = {
        f"{split.replace('validation', 'eval', 1)}_{name}": value
        for split, found in metrics.items()
        for name, value in found.items()
    }
    for callback in keep_logs(trainer, recipe, folder):
        about = (trainer.args, trainer.state, trainer.control)
        callback.on_log(*about, logs=dict(logs), model=trainer.model)
        callback.on_train_end(*about, model=trainer.model, processing_class=trainer.processing_class)
    if "wandb" in trainer.args.report_to:
        sys.modules["wandb"].finish()  # or the next stage would go on with this run
