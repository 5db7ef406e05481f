"""An experiment as data: the same dataclasses in Python, in YAML files and on command lines."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import chain
from math import ceil, inf
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from collab_compress.errors import CollabCompressError, RecipeError
from collab_compress.experiments.untrained import Fresh
from collab_compress.options import CalibrationOptions, Compression
from collab_compress.tasks import TASKS
from collab_compress.training import HeadTraining

LARGEST_FILE = 1 << 20
"""Most bytes of a recipe's file."""

MOST_VALUES = 100_000
"""Most values of a recipe, each alias counted wherever it stands."""

MOST_STEPS = 10**9

MOST_DIGITS = 30
"""Most digits of a number in a recipe."""

OWN_ARGUMENTS = {
    "output_dir": "output",
    "seed": "seed",
    "report_to": "trackers",
    "num_train_epochs": "tuning.epochs",
    "learning_rate": "tuning.learning_rate",
    "warmup_steps": "tuning.warmup",
    "max_steps": "tuning.max_steps",
    "per_device_train_batch_size": "tuning.batch_size",
    "save_total_limit": "tuning.average",
}
"""Training argument → the field of a recipe that sets it."""

REFUSED_ARGUMENTS = {
    "resume_from_checkpoint": "a run resumes from its own checkpoints",
    "batch_eval_metrics": "metrics are computed over whole splits",
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
    """Rows in a batch of one process."""

    batch_tokens: int | None = None
    """Tokens of a step instead, as the papers count them: of all processes and passes together, padding included, of
    the longer side where there are two. Rows of similar lengths share a batch, and batches come in random order."""

    warmup: float = 0.1
    """Share of the steps in which the learning rate rises."""

    max_steps: int = -1
    """Stop after so many steps instead of epochs, if positive."""

    average: int = 1
    """Average the weights of so many last checkpoints, one for each epoch; the final weights alone if 1."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Anything else that Transformers' TrainingArguments take."""

    def __post_init__(self) -> None:
        for name in self.arguments:
            if name in OWN_ARGUMENTS:
                raise RecipeError(f"arguments hold {name}, which the recipe's field {OWN_ARGUMENTS[name]} sets")
            if name in REFUSED_ARGUMENTS:
                raise RecipeError(f"arguments hold {name}, but {REFUSED_ARGUMENTS[name]}; leave it out")
        for name in ("epochs", "learning_rate"):
            if not 0 <= (value := getattr(self, name)) < inf:
                raise RecipeError(f"{name} is {value}; expected a number that is not negative")
        if not 0 <= self.warmup < 1:
            raise RecipeError(f"warmup is {self.warmup}; expected a share of the steps, from 0 to below 1")
        for name in ("batch_size", "batch_tokens"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise RecipeError(f"{name} is {size}; expected at least 1")
        for name in ("epochs", "max_steps"):
            if (number := getattr(self, name)) > MOST_STEPS:
                raise RecipeError(f"{name} is {number:.0e}; expected at most {MOST_STEPS:.0e}")
        if self.average < 1:
            raise RecipeError(f"average is {self.average}; expected at least 1 checkpoint")
        if self.max_steps <= 0 and "save_strategy" not in self.arguments and self.average > ceil(self.epochs):
            raise RecipeError(f"average is {self.average}, but {self.epochs:g} epochs leave fewer checkpoints")


def expanded(path: Path) -> Path:
    """Replace ~ in a path by the home directory.

    Raises:
        RecipeError: there is none.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise RecipeError(f"{path}: {error}") from error


@dataclass(frozen=True)
class Recovery:
    """A short distillation of converted attention, without labels (`collab_compress.training.recover_`)."""

    steps: int = 150
    """Steps of 16 sequences, in each process."""

    learning_rate: float = 1e-3
    """At its highest; it rises over the first eighth of the steps and falls along a cosine."""

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate <= 1:
            raise RecipeError(f"learning_rate is {self.learning_rate}; expected a number above 0, up to 1")
        if not 1 <= self.steps <= MOST_STEPS:
            raise RecipeError(
                f"recovery takes {self.steps} steps; expected 1 to {MOST_STEPS:.0e}, or leave recovery out"
            )


@dataclass(frozen=True)
class TranslationOptions:
    """Between which languages, and how the target is searched for."""

    source: str | None = None
    """Language to translate from, as in the names of the files; the task's own if not given."""

    target: str | None = None
    """Language to translate to."""

    beams: int = 5
    """Beams of the search; 1 is greedy."""

    length_penalty: float = 1.0
    """Power of the length by which a hypothesis's score is divided."""

    max_length: int = 128
    """Most tokens of a translation."""


@dataclass(frozen=True)
class Recipe:
    """Fine-tune a model on a task, convert it, and fine-tune it again; evaluate after each.

    What is left out is not done: without `tuning` the model is evaluated and converted as it is, without
    `compression` it stays as it is, without `again` a converted model is evaluated only.
    """

    task: str
    """Name of a task (`collab_compress.tasks.TASKS`)."""

    output: Path
    """Folder of the experiment; what is finished in there is not done again."""

    model: str | None = None
    """minilm (embedded), a model directory, or a name on the hub (bert-base, org/name)."""

    revision: str | None = None
    """Branch, tag or commit of a model on the hub; its main branch if not given."""

    attn_implementation: str | None = None
    """Which attention of Transformers computes: eager, sdpa, …; Transformers' choice if not given."""

    fresh: Fresh | None = None
    """An untrained model to start from instead, with a tokenizer trained on the data."""

    data_dir: Path | None = None
    """Folder with the task's files; the hub if not given."""

    files: dict[str, Any] | None = None
    """Split → file or files in `data_dir`, where they do not have the task's usual names."""

    seed: int = 0
    """Seed of fresh weights, data order, dropout and calibration."""

    num_proc: int | None = None
    """Processes that tokenize the data, which then lie on disk, in the cache of `datasets`, once for all runs on the
    same: memory does not grow with them. If not given, files of `data_dir` are read into memory."""

    max_length: int = 128
    """Tokens of a row, or of a block of running text; longer rows are cut."""

    tuning: Tuning | None = None
    """The first fine-tuning, or the training of a fresh model."""

    compression: Compression | None = None
    """The conversion."""

    conversion: str | None = None
    """Name of the conversion, in tables and as a folder; dkN if not given."""

    calibration: str = "synthetic"
    """Calibration data of the conversion: synthetic, generated, none, or a file with one text a line."""

    calibration_options: CalibrationOptions = field(default_factory=CalibrationOptions)
    """How much of the calibration data is used."""

    recovery: Recovery | None = None
    """Distillation of the converted attention from the dense model's, without labels, on the calibration data."""

    again: Tuning | None = None
    """The second fine-tuning, of the converted model."""

    heads: HeadTraining = field(default_factory=HeadTraining)
    """Methods that act on heads in both fine-tunings."""

    method: str = "plain"
    """Name of the experiment in tables."""

    translation: TranslationOptions = field(default_factory=TranslationOptions)
    """Languages and search, where the task is translation."""

    measures: tuple[str, ...] = ()
    """Measures of the model of each stage: svcca, cka, confidence, discrepancy, overlap, dominance, pruning,
    mixing, alphas; of a finished run too, of which nothing is trained or scored again."""

    trackers: tuple[str, ...] = ("tensorboard",)
    """Where training is logged to, as the Trainer names it: tensorboard (in `output`), wandb, …; none if empty."""

    progress: bool = True
    """Whether the main process shows progress bars, and what is logged in training beside them."""

    def __post_init__(self) -> None:
        for place in ("output", "data_dir"):
            if (path := getattr(self, place)) is not None:
                object.__setattr__(self, place, expanded(Path(path)))
        if not 0 <= self.seed < 1 << 32:
            raise RecipeError(f"seed is {self.seed}; expected a number from 0 to 2**32 - 1")
        if self.num_proc is not None and self.num_proc < 1:
            raise RecipeError(f"num_proc is {self.num_proc}; expected at least 1 process, or leave it out")
        for split, names in (self.files or {}).items():
            listed = [names] if isinstance(names, str) else names
            if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
                raise RecipeError(f"files of {split} are {names!r}; expected a path, or a list of paths")
        if self.task not in TASKS:
            raise RecipeError(f"unknown task {self.task!r}; expected one of {', '.join(sorted(TASKS))}")
        if (self.model is None) == (self.fresh is None):
            raise RecipeError("give either a model to start from, or what a fresh one is like")
        if self.revision is not None and self.model is None:
            raise RecipeError("revision is that of a model on the hub; give model, or leave revision out")
        if self.fresh is not None and self.tuning is None:
            raise RecipeError("a fresh model is trained first; give tuning")
        averaged = [tuning for tuning in (self.tuning, self.again) if tuning is not None and tuning.average > 1]
        if averaged and self.heads.rotation is not None:
            raise RecipeError(
                "rotation moves heads between checkpoints, so their mean mixes different heads; leave average out"
            )
        if self.again is not None and self.compression is None:
            raise RecipeError("again fine-tunes the converted model; give compression too, or leave again out")
        if self.conversion is not None and self.compression is None:
            raise RecipeError(
                f"conversion {self.conversion!r} converts nothing; give compression too, or leave conversion out"
            )
        if self.recovery is not None and (self.compression is None or self.calibration == "none"):
            raise RecipeError(
                "recovery trains a converted model on calibration data; give compression and calibration"
            )
        if self.recovery is not None and self.compression is not None and self.compression.keeps_attention:
            raise RecipeError("recovery trains converted attention; give compression.dk, dv or keep, or leave it out")
        if not self.trains and self.heads != HeadTraining():
            raise RecipeError(
                "heads acts in fine-tuning, and there is none; give tuning or again, or leave heads out"
            )
        for name in (self.method, self.conversion):
            if name is not None and (not name or "/" in name or name.startswith(".")):
                raise RecipeError(f"{name!r} cannot name a folder")
        if self.conversion in ("start", "given", "tuned") or (self.conversion or "").endswith("-again"):
            raise RecipeError(f"a conversion cannot be called {self.conversion!r}, as another stage is")

    @property
    def trains(self) -> bool:
        """Whether there is a fine-tuning."""
        return self.tuning is not None or self.again is not None

    @property
    def conversion_name(self) -> str | None:
        """Name of the conversion; None without one."""
        return None if self.compression is None else self.conversion or f"dk{self.compression.dk}"


Described = TypeVar("Described")


def read_recipe(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a YAML file and settings such as `compression.dk=128` or `heads.drophead=[{p: 0.2}]`.

    Args:
        path: the file; settings alone if not given.
        overrides: `field=value` each, with dots between the fields of nested ones; values are YAML.

    Raises:
        RecipeError: the file cannot be read, a field is not known, or a value is none for its field.
    """
    return parse(Recipe, read_settings(path, overrides), str(path) if path is not None else "the recipe")


def read_settings(path: str | Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Read nested fields from a YAML file, and set some of them.

    Raises:
        RecipeError: the file cannot be read, or a setting is none.
    """
    data = _load(Path(path)) if path is not None else {}
    for override in overrides:
        set_field(data, override)
    return data


def parse(described: type[Described], data: Mapping[str, Any], where: str) -> Described:
    """Build a dataclass from nested fields.

    Types are those of JSON: no text is taken for a number, and no number for a truth value.

    Raises:
        RecipeError: a field is not known or missing, or a value is none for it; `where` says where it stands.
    """
    try:
        adapter = _adapter(cast(Any, described))
        found: Described = adapter.validate_json(json.dumps(data, default=str), strict=True)
        return found
    except ValidationError as error:
        problems = "; ".join(_problem(one, described) for one in error.errors())
        raise RecipeError(f"{where}: {problems}") from error
    except (CollabCompressError, TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"{where}: {_line(error)}") from error


@cache
def _adapter(described: Any) -> TypeAdapter[Any]:
    for kind in _dataclasses_in(described):
        kind.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    return TypeAdapter(described)


def _dataclasses_in(kind: Any) -> set[Any]:
    """Return a dataclass and those in the types of its fields."""
    inner = get_type_hints(kind).values() if is_dataclass(kind) else get_args(kind)
    found = {kind} if is_dataclass(kind) else set()
    return found.union(*map(_dataclasses_in, inner))


def _field_paths(kind: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all fields of a dataclass, and of the dataclasses in them."""
    if not is_dataclass(kind):
        for inner in get_args(kind):
            yield from _field_paths(inner, place)
        return
    for name, inner in get_type_hints(kind).items():
        yield (*place, name)
        yield from _field_paths(inner, (*place, name))


def _problem(error: Mapping[str, Any], described: Any) -> str:
    """Return where a value is wrong, and what is expected there."""
    *_, name = place = list(map(str, error["loc"]))
    if error["type"] == "unexpected_keyword_argument":
        paths = {
            path[-1]: path
            for path in _field_paths(described)
            if (len(path) == 1 if len(place) == 1 else path[0] == place[0])
        }
        near = get_close_matches(name, paths, n=1, cutoff=0.7)
        hint = "".join(f"; did you mean {'.'.join(paths[each])}?" for each in near)
        return f"there is no field {'.'.join(place)}{hint}"
    if error["type"] in ("missing", "missing_argument"):
        return f"{'.'.join(place)} is missing"
    value = repr(error["input"])[:60]
    if error["type"] in ("list_type", "tuple_type"):
        return f"{'.'.join(place)} is {value}; expected a list, as in [{error['input']}]"
    return f"{'.'.join(place)} is {value}; {error['msg'].replace('Input should be', 'expected')}"


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():
            raise RecipeError(f"cannot read the recipe {path}: it is no regular file")
        if (size := path.stat().st_size) > LARGEST_FILE:
            raise RecipeError(f"cannot read the recipe {path}: it has {size} bytes; expected at most {LARGEST_FILE}")
        data = _yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {_line(error)}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path} holds a {type(data).__name__}; expected fields and their values")
    return data


def set_field(data: dict[str, Any], override: str) -> None:
    """Set one field of nested mappings, in place, by a setting such as `compression.dk=128`.

    Raises:
        RecipeError: it is none.
    """
    name, equals, text = override.partition("=")
    *outer, last = name.split(".")
    if not equals or not all((*outer, last)):
        raise RecipeError(f"{override!r} sets nothing; expected field=value, as in compression.dk=128")
    inner: Any = data
    for part in outer:
        found = inner.get(part) or {}
        if not isinstance(found, Mapping):
            raise RecipeError(f"{override!r}: {part} is {found!r}, which has no fields")
        inner[part] = dict(found)  # a copy: an alias in the file may have it stand elsewhere too
        inner = inner[part]
    try:
        inner[last] = _yaml(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{override[:80]!r}: the value is not YAML: {_line(error)}") from error


def _yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def _line(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as a number, as YAML 1.2 does and 1.1 does not; refuses repeated names, and aliases that explode."""

    def get_single_node(self) -> yaml.Node | None:
        """Read a document as PyYAML does, before its aliases are expanded."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _count_values(node, {}) > MOST_VALUES:
            raise yaml.composer.ComposerError(
                None, None, f"it holds more than {MOST_VALUES:,} values, aliases expanded", node.start_mark
            )
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Read a value as PyYAML does; nothing takes NUL characters, surrogates or numbers of many digits."""
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        problem = None
        if re.search("[\0\ud800-\udfff]", node.value):
            problem = "holds NUL characters or surrogates"
        elif re.fullmatch(rf"[-+]?\d{{{MOST_DIGITS + 1},}}", node.value):
            problem = f"has more than {MOST_DIGITS} digits"
        if problem is not None:
            raise yaml.composer.ComposerError(None, None, f"{node.value[:60]!r} {problem}", node.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Read a mapping as PyYAML does, where the last of several values would count."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        names = Counter(name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode))
        if doubled := [name for name, count in names.items() if count > 1]:
            raise yaml.composer.ComposerError(None, None, f"{doubled[0]} stands there twice", node.start_mark)
        return node


def _count_values(node: yaml.Node, counts: dict[yaml.Node, int]) -> int:
    """Return how many values a node holds, each alias counted wherever it stands."""
    if node not in counts:
        counts[node] = MOST_VALUES + 1  # a node that holds itself has no end
        pairs = isinstance(node, yaml.MappingNode)
        inner = chain.from_iterable(node.value) if pairs else node.value if isinstance(node.value, list) else ()
        counts[node] = 1 + sum(_count_values(child, counts) for child in inner)
    return counts[node]


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)
