"""Recipes of experiments: the same dataclasses in Python, in YAML files and on command lines."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from collab_compress.errors import CollabCompressError, RecipeError, one_line
from collab_compress.options import CalibrationOptions, Compression
from collab_compress.training import HeadTraining

from ..tasks import TASKS
from .untrained import Fresh

MOST_STEPS = 10**9
PLAIN = "plain"
"""Method of the models that others are compared with."""

OWN_ARGUMENTS = {
    "output_dir": "output",
    "seed": "seed",
    "report_to": "trackers",
    "num_train_epochs": "tuning.epochs",
    "learning_rate": "tuning.learning_rate",
    "warmup_steps": "tuning.warmup",
    "max_steps": "tuning.max_steps",
    "per_device_train_batch_size": "tuning.batch_size",
}
"""Training argument → the field of a recipe that sets it."""

REFUSED_ARGUMENTS = {
    "resume_from_checkpoint": "a run resumes from its own checkpoints",
    "batch_eval_metrics": "metrics are computed over whole splits",
    "save_total_limit": "a run keeps its last checkpoint, and the best one where that is the result",
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed"), "each process has the whole model"),
}
"""Training argument → why a recipe cannot set it."""


@dataclass(frozen=True)
class Tuning:
    """One fine-tuning."""

    epochs: float = 3.0
    """Passes over the training data."""

    learning_rate: float = 5e-5
    """Highest learning rate; it rises in the warmup and then falls linearly to 0."""

    batch_size: int = 32
    """Rows of a batch in one process."""

    warmup: float = 0.1
    """Share of the steps in which the learning rate rises."""

    max_steps: int = -1
    """Steps of training instead of epochs, if positive."""

    distilled: bool = False
    """Whether it trains towards the model as it was before conversion, without labels (`DistillationTrainer`)."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Further TrainingArguments of Transformers."""

    def __post_init__(self) -> None:
        for name in self.arguments:
            if name in OWN_ARGUMENTS:
                raise RecipeError(f"arguments hold {name}, which the recipe's field {OWN_ARGUMENTS[name]} sets")
            if name in REFUSED_ARGUMENTS:
                raise RecipeError(f"arguments hold {name}, but {REFUSED_ARGUMENTS[name]}; leave it out")
        for name in ("epochs", "learning_rate"):
            _check_range(self, name, 0, MOST_STEPS)
        _check_range(self, "batch_size", 1, MOST_STEPS)
        _check_range(self, "max_steps", -inf, MOST_STEPS)
        if self.max_steps <= 0 and self.epochs <= 0:
            raise RecipeError(f"epochs is {self.epochs:g}; expected more than 0, or max_steps")
        if not 0 <= self.warmup < 1:
            raise RecipeError(f"warmup is {self.warmup}; expected a share of the steps, from 0 to below 1")


def _check_range(options: Any, name: str, lowest: float, highest: float) -> None:
    """Refuse a field outside a range."""
    value = getattr(options, name)
    if not lowest <= value <= highest:
        shown = f"{value:.10g}" if isinstance(value, float) else value  # an integer may be too large for a float
        raise RecipeError(f"{name} is {shown}; expected a number from {lowest} to {highest}")


@dataclass(frozen=True)
class TranslationOptions:
    """Languages, and beam search."""

    source: str | None = None
    """Language to translate from, as in the names of the files; the task's own if not given."""

    target: str | None = None
    """Language to translate to."""

    beams: int = 5
    """Beams of the search; 1 is greedy."""

    length_penalty: float = 1.0
    """Power of the length by which a hypothesis's score is divided."""

    max_length: int = 128
    """Most tokens of a translation, with the decoder's first."""

    def __post_init__(self) -> None:
        _check_range(self, "beams", 1, MOST_STEPS)
        _check_range(self, "max_length", 2, MOST_STEPS)


@dataclass(frozen=True)
class Recipe:
    """Fine-tune a model on a task, convert it, and fine-tune it again; evaluate after each.

    Without `tuning` the model is evaluated and converted as it is, without `compression` it is not converted, without
    `again` there is no second fine-tuning.
    """

    task: str
    """Name of a task (`tasks.TASKS`)."""

    output: Path
    """Folder of the experiment; its finished stages are not repeated."""

    model: str | None = None
    """minilm (embedded), a model directory, or a name on the hub (bert-base, org/name)."""

    revision: str | None = None
    """Branch, tag or commit of a model on the hub; its main branch if not given."""

    attn_implementation: str | None = None
    """Attention implementation of Transformers: eager, sdpa, …; Transformers' choice if not given."""

    fresh: Fresh | None = None
    """An untrained model to start from instead, with a tokenizer trained on the data."""

    data_dir: Path | None = None
    """Folder with the task's files; the hub if not given."""

    files: dict[str, str | list[str]] | None = None
    """Split → file or files in `data_dir`, if they do not have the task's usual names."""

    held_out: float | None = None
    """Share of the training data that is held out as validation data, the same rows for every seed; for tasks that
    have no validation data."""

    seed: int = 0
    """Seed of fresh weights, data order, dropout and calibration."""

    max_length: int = 128
    """Tokens of a row, or of a block of running text; longer rows are cut."""

    tuning: Tuning | None = None
    """The first fine-tuning, or the training of a fresh model."""

    compression: Compression | None = None
    """The conversion."""

    conversion: str | None = None
    """Name of the conversion, in tables and as a folder; its widths, such as dk128-dv192, if not given. Without
    compression it names the second fine-tuning of the dense model, the control of a converted one's: NAME-again, or
    tuned-again if not given."""

    calibration: str | tuple[str, ...] = "auto"
    """Calibration data of the conversion: auto, builtin, synthetic, generated, none, or a file with one text a line,
    or a list of several to use together, as for `collab-compress`."""

    calibration_options: CalibrationOptions = field(default_factory=CalibrationOptions)
    """How much of the calibration data is used."""

    again: Tuning | None = None
    """The second fine-tuning, of the converted model, or of the dense one without compression."""

    heads: HeadTraining = field(default_factory=HeadTraining)
    """Methods that act on heads, in both fine-tunings."""

    method: str | None = None
    """Name of the experiment in tables. If not given, it says what acts on heads, as in drophead0.2-agreement0.1, or
    `plain`, the baseline's name, where nothing does."""

    translation: TranslationOptions = field(default_factory=TranslationOptions)
    """Languages and beam search, if the task is translation."""

    measures: tuple[str, ...] = ()
    """Measures of the model of each stage: svcca, cka, confidence, discrepancy, overlap, dominance, pruning,
    mixing, alphas; a finished run is only measured."""

    trackers: tuple[str, ...] = ("tensorboard",)
    """Trackers of the Trainer: tensorboard (in `output`), wandb, …; none if empty."""

    progress: bool = True
    """Whether the main process shows progress bars and the log of training."""

    def __post_init__(self) -> None:
        for folder in ("output", "data_dir"):
            if (path := getattr(self, folder)) is not None:
                object.__setattr__(self, folder, Path(path).expanduser())
        _check_range(self, "seed", 0, 2**32 - 1)
        if self.held_out is not None and not 0 < self.held_out < 1:
            raise RecipeError(f"held_out is {self.held_out}; expected a share of the training data, between 0 and 1")
        if self.files and self.trains and "train" not in self.files:
            raise RecipeError("files names no training data; give files.train too, or leave tuning and again out")
        if self.files and set(self.files) == {"train"}:
            raise RecipeError("files names only training data; give data to score too, as files.validation")
        if self.task not in TASKS:
            raise RecipeError(f"unknown task {self.task!r}; expected one of {', '.join(sorted(TASKS))}")
        if (self.model is None) == (self.fresh is None):
            raise RecipeError("give either a model to start from, or the settings of a fresh one")
        if self.revision is not None and self.model is None:
            raise RecipeError("revision selects a version of a hub model; give model too")
        if self.fresh is not None and self.tuning is None:
            raise RecipeError("a fresh model is trained first; give tuning")
        if self.again is not None and self.compression is None and self.tuning is None:
            raise RecipeError("again is a second fine-tuning; give compression or tuning too, or leave again out")
        if any(tuning is not None and tuning.distilled for tuning in (self.tuning, self.again)):
            self._check_distilled()
        if self.conversion is not None and self.compression is None and self.again is None:
            raise RecipeError(
                f"conversion {self.conversion!r} converts nothing; give compression too, or leave conversion out"
            )
        if not self.trains and self.heads != HeadTraining():
            raise RecipeError(
                "heads acts in fine-tuning, and there is none; give tuning or again, or leave heads out"
            )
        if self.method == PLAIN and self._acting:
            raise RecipeError(
                f"method is {PLAIN}, the name of the baseline, but the recipe has {self._acting}; give another "
                "method, or leave it out"
            )
        for name in (self.method, self.conversion):
            if name is not None and (not name or "/" in name or name.startswith(".")):
                raise RecipeError(f"{name!r} cannot name a folder")
        if self.conversion in ("start", "given", "tuned") or (self.conversion or "").endswith("-again"):
            raise RecipeError(f"a conversion cannot be called {self.conversion!r}, as another stage is")

    def _check_distilled(self) -> None:
        """Refuse to train towards a model that there is not, or with what needs labels."""
        if self.compression is None or (self.tuning is not None and self.tuning.distilled):
            raise RecipeError(
                "distilled trains a conversion towards its dense model; give compression, and set it in again"
            )
        if self.heads != HeadTraining():
            raise RecipeError("again.distilled trains without what acts on heads; leave heads out")
        for name in ("label_smoothing_factor", "predict_with_generate"):
            if self.again is not None and self.again.arguments.get(name):
                raise RecipeError(f"again.distilled trains without labels; leave {name} out")

    @property
    def trains(self) -> bool:
        """Whether there is a fine-tuning."""
        return self.tuning is not None or self.again is not None

    @property
    def _acting(self) -> str:
        """What acts on heads in training, as a name; empty if nothing does. A penalty of weight 0 only measures."""
        heads, attention = self.heads, self.fresh and self.fresh.attention
        names = [f"collaborative{attention.dk}"] if attention else []
        for name, strength, schedule in (
            *(("drophead", dropout.p, dropout.schedule) for dropout in heads.drophead),
            *((penalty.name, penalty.strength, penalty.schedule) for penalty in heads.penalties),
        ):
            names += [f"{name}{strength:g}" + f"-{schedule}" * (schedule != "constant")] if strength else []
        names += [name for name in ("alphas", "rotation") if getattr(heads, name) is not None]
        return "-".join(names)

    @property
    def method_name(self) -> str:
        """Name of the method."""
        return self.method or self._acting or PLAIN

    @property
    def conversion_name(self) -> str | None:
        """Name of the conversion; None without one."""
        if self.compression is None:
            return None
        widths = {name: getattr(self.compression, name) for name in ("layers", "dk", "dv", "dff", "keep")}
        return self.conversion or "-".join(f"{name}{width}" for name, width in widths.items() if width is not None)

    @property
    def again_name(self) -> str | None:
        """Name of the second fine-tuning's stage; None without one."""
        return None if self.again is None else f"{self.conversion_name or self.conversion or 'tuned'}-again"


Options = TypeVar("Options")


def read_recipe(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a YAML file and settings such as `compression.dk=128` or `heads.drophead=[{p: 0.2}]`.

    Args:
        path: the file; settings alone if not given.
        overrides: `field=value`, with dots between nested fields and YAML values.

    Raises:
        RecipeError: the file cannot be read, a field is unknown, or a value is invalid.
    """
    return parse(Recipe, read_settings(path, overrides), str(path) if path is not None else "the recipe")


def read_settings(path: str | Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Read nested fields from a YAML file, and set some of them as `read_recipe` does."""
    data = _load(Path(path)) if path is not None else {}
    for override in overrides:
        set_field(data, override)
    return data


def parse(options_class: type[Options], data: Mapping[str, Any], where: str) -> Options:
    """Build a dataclass from nested fields with the types of JSON: a number is no text, and no truth value."""
    try:
        adapter = _adapter(cast(Any, options_class))
        options: Options = adapter.validate_json(json.dumps(data, default=str), strict=True)
        return options
    except ValidationError as error:
        raise RecipeError(f"{where}: {problems_of(error)}") from error
    except (CollabCompressError, TypeError, ValueError, RuntimeError) as error:
        raise RecipeError(f"{where}: {one_line(error)}") from error


@cache
def _adapter(options_class: Any) -> TypeAdapter[Any]:
    for inner in _dataclasses_in(options_class):
        inner.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    return TypeAdapter(options_class)


def _dataclasses_in(annotation: Any) -> Iterator[Any]:
    """Yield a dataclass and those in the types of its fields."""
    if is_dataclass(annotation):
        yield annotation
        for inner in get_type_hints(annotation).values():
            yield from _dataclasses_in(inner)
    for inner in get_args(annotation):
        yield from _dataclasses_in(inner)


def problems_of(error: ValidationError) -> str:
    """Return pydantic's messages in one line, each with the path of its field and the value there."""
    return "; ".join(
        f"{'.'.join(map(str, one['loc']))}: {one['msg']}, got {repr(one['input'])[:60]}" for one in error.errors()
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {one_line(error)}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path} holds a {type(data).__name__}; expected fields and their values")
    return data


def set_field(data: dict[str, Any], override: str) -> Any:
    """Set one field of nested mappings, in place, by a setting such as `compression.dk=128`; return its value."""
    name, equals, text = override.partition("=")
    *outer, last = name.split(".")
    if not equals or not all((*outer, last)):
        raise RecipeError(f"{override!r} sets nothing; expected field=value, as in compression.dk=128")
    inner: Any = data
    for part in outer:
        value = inner.get(part) or {}
        if not isinstance(value, Mapping):
            raise RecipeError(f"{override!r}: {part} is {value!r}, which has no fields")
        inner[part] = dict(value)  # a copy: aliases in the file may share it
        inner = inner[part]
    try:
        inner[last] = yaml.load(text, _Loader)
    except (ValueError, yaml.YAMLError) as error:
        raise RecipeError(f"{override[:80]!r}: cannot read the value: {one_line(error)}") from error
    return inner[last]


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as a number; PyYAML, which reads YAML 1.1, asks for 1.0e-4."""


_SCIENTIFIC = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+.0123456789"))
