"""What each kind of task needs besides a recipe: its model class, its encoding, its collator and its score."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset, DatasetDict
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from collab_compress.checkpoint import load
from collab_compress.checkpoint.directory import has_tokenizer
from collab_compress.errors import CheckpointError, RecipeError
from collab_compress.experiments.recipe import Recipe
from collab_compress.metrics import Metric, load_metric
from collab_compress.processes import processes
from collab_compress.tasks import TASKS, Task, load_task
from collab_compress.training import HeadTrainer


class Workload(ABC):
    """A recipe's task, loaded.

    Args:
        recipe: of the experiment.

    Raises:
        DataError: the data are not there, or malformed.
    """

    model_class: ClassVar[Any]
    trainer_class: ClassVar[type[Trainer]] = HeadTrainer
    arguments_class: ClassVar[type[TrainingArguments]] = TrainingArguments

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        languages = recipe.translation
        self.progress = recipe.progress and processes().is_main_process
        self.texts: DatasetDict = load_task(
            recipe.task, recipe.data_dir, source=languages.source, target=languages.target, files=recipe.files,
            train=recipe.trains, progress=self.progress,
        )  # fmt: skip
        self.metric: Metric = load_metric(self.task.metric, **self.metric_options())

    @property
    def task(self) -> Task:
        """The task."""
        return TASKS[self.recipe.task]

    def load_model(self, directory: str | Path, trained: bool = True) -> PreTrainedModel:
        """Load a model with a head for the task.

        Args:
            directory: of the model.
            trained: whether the head must be there; otherwise it is drawn with the seed.

        Raises:
            RecipeError: weights are missing, or the model does not fit the task or the recipe.
        """
        set_seed(self.recipe.seed)
        chosen = self.recipe.attn_implementation
        attention = {} if chosen is None else {"attn_implementation": chosen}
        try:
            model, found = load.load_model(
                self.model_class, directory, dtype=torch.float32, **attention, **self.head()
            )
        except CheckpointError as error:
            raise RecipeError(f"{directory} cannot be loaded for {self.task.name}: {error}") from error
        if trained and found["missing_keys"]:
            raise RecipeError(
                f"{directory} was not trained for {self.task.name}: it lacks weights, such as "
                f"{min(found['missing_keys'])}; give tuning"
            )
        return model

    def metric_options(self) -> dict[str, Any]:
        """Give what the metric needs to know."""
        return {}

    def head(self) -> dict[str, Any]:
        """Give what a model's head needs to know."""
        return {}

    @abstractmethod
    def encode(self, texts: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
        """Turn texts into rows of tokens and labels."""

    @abstractmethod
    def collator(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Give what makes a batch of rows."""

    def scored(self) -> list[str]:
        """Name the splits that have labels, but for the training data."""
        return [name for name, rows in self.texts.items() if name != "train" and _labelled(rows)]

    def options(self) -> dict[str, Any]:
        """Give further options of the trainer: `compute_metrics` and the like."""
        return {"compute_metrics": self.compute_metrics}

    def compute_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Score what the model predicted for a split."""
        raise NotImplementedError

    def score(self, trainer: Trainer, split: str, rows: Dataset, folder: Path) -> dict[str, float]:
        """Score a trainer's model on a split.

        Args:
            trainer: its model is scored.
            split: name of the split.
            rows: encoded.
            folder: where predictions worth reading are kept.
        """
        found = trainer.predict(rows, metric_key_prefix="").metrics
        return {name: found[f"_{name}"] for name in self.metric.scores}


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer; Transformers makes one without words where a directory has none.

    Raises:
        RecipeError: there is none.
    """
    if Path(source).is_dir() and not has_tokenizer(Path(source)):
        raise RecipeError(f"{source} has no tokenizer; save it there too, by tokenizer.save_pretrained")
    try:
        tokenizer: PreTrainedTokenizerBase = load.load_tokenizer(source)
    except CheckpointError as error:
        raise RecipeError(f"the tokenizer of {source} cannot be loaded: {error}") from error
    return tokenizer


def _labelled(rows: Dataset) -> bool:
    return "label" not in rows.column_names or (bool(len(rows)) and min(rows["label"]) >= 0)
