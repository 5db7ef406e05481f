"""An experiment as data: one dataclass for Python, YAML files and command lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from dacite import Config, DaciteError, from_dict

from collab_compress.conversion.options import Compression
from collab_compress.errors import CollabCompressError, RecipeError
from collab_compress.tasks import TASKS
from collab_compress.training import HeadTraining


@dataclass(frozen=True)
class Tuning:
    """One fine-tuning."""

    epochs: float = 3.0
    """Passes over the training data."""

    learning_rate: float = 5e-5
    """Highest learning rate; it rises in the warmup and then falls linearly to 0."""

    batch_size: int = 32
    """Rows in a batch of one process."""

    warmup: float = 0.1
    """Share of the steps in which the learning rate rises."""

    max_steps: int = -1
    """Stop after so many steps instead of epochs, if positive."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Anything else that Transformers' TrainingArguments take."""

    def __post_init__(self) -> None:
        own = {"output_dir", "seed", "num_train_epochs", "learning_rate", "warmup_steps", "max_steps"}
        doubled = own & self.arguments.keys()
        if doubled:
            raise RecipeError(f"arguments hold {', '.join(sorted(doubled))}, which a recipe says by its own fields")
        if not 0 <= self.warmup < 1:
            raise RecipeError(f"warmup is {self.warmup}; expected a share of the steps, from 0 to below 1")
        if self.batch_size < 1:
            raise RecipeError(f"batch_size is {self.batch_size}; expected at least 1")


@dataclass(frozen=True)
class Recipe:
    """Fine-tune a model on a task, convert it, and fine-tune it again; evaluate after each.

    What is left out is not done: without `tuning` the model is converted as it is, without `compression` it stays
    dense, without `again` a converted model is evaluated only.
    """

    task: str
    """Name of a task (`collab_compress.tasks.TASKS`)."""

    output: Path
    """Folder of the experiment; what is finished in there is not done again."""

    model: str = "minilm"
    """What to start from: minilm, a model directory, or a name on the hub."""

    data_dir: Path | None = None
    """Folder with the task's files; the hub if not given."""

    seed: int = 0
    """Seed of heads, data order, dropout and calibration."""

    max_length: int = 128
    """Tokens of a row; longer ones are cut."""

    tuning: Tuning | None = None
    """The first fine-tuning."""

    compression: Compression | None = None
    """The conversion."""

    calibration: str = "synthetic"
    """What the conversion measures inputs on: synthetic, none, or a file with one text a line."""

    again: Tuning | None = None
    """The second fine-tuning, of the converted model."""

    heads: HeadTraining = field(default_factory=HeadTraining)
    """What acts on heads in both fine-tunings."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise RecipeError(f"unknown task {self.task!r}; expected one of {', '.join(sorted(TASKS))}")
        if self.again is not None and self.compression is None:
            raise RecipeError("again fine-tunes the converted model; give compression too, or leave again out")
        if self.tuning is None and self.compression is None:
            raise RecipeError("there is nothing to do; give tuning, compression, or both")


def read_recipe(path: Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a YAML file and settings such as `compression.rank=128` or `heads.drophead=[{p: 0.2}]`.

    Args:
        path: the file; settings alone if not given.
        overrides: `field=value` each, with dots between the fields of nested ones; values are YAML.

    Raises:
        RecipeError: the file cannot be read, a field is not known, or a value is none for its field.
    """
    data = _load(path) if path is not None else {}
    for override in overrides:
        _set(data, override)
    where = str(path) if path is not None else "the recipe"
    try:
        return from_dict(Recipe, data, Config(strict=True, cast=[Path, tuple], type_hooks={float: float}))
    except CollabCompressError as error:
        raise RecipeError(f"{where}: {error}") from error
    except (DaciteError, TypeError, ValueError) as error:
        raise RecipeError(f"{where}: {error}") from error


def _load(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path} holds a {type(data).__name__}; expected fields and their values")
    return data


def _set(data: dict[str, Any], override: str) -> None:
    """Set one field of nested mappings, in place."""
    name, equals, text = override.partition("=")
    *outer, last = name.split(".")
    if not equals or not all((*outer, last)):
        raise RecipeError(f"{override!r} sets nothing; expected field=value, as in compression.rank=128")
    inner: Any = data
    for part in outer:
        inner[part] = inner.get(part) or {}
        inner = inner[part]
        if not isinstance(inner, Mapping):
            raise RecipeError(f"{override!r}: {part} is {inner!r}, which has no fields")
    try:
        inner[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{override!r}: the value is not YAML: {error}") from error
