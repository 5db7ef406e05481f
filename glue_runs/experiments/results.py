"""Checked records of experiments, from which tables are made."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from collab_compress.checkpoint.files import mapped
from collab_compress.errors import RecipeError

from ..metrics import METRICS
from ..tasks import TASKS
from .outputs import CONVERTED_FIELDS, TUNED_FIELDS, read_records, without_neutral
from .recipe import problems_of
from .untrained import Fresh

FRESH = "fresh"
NOT_SHAPE = {"dropout", "attention_dropout", "attention"}
"""Settings that a method may change in a fresh model. Any other difference makes it another model."""


Natural = Annotated[int, Field(ge=0, lt=2**63)]


class Settings(BaseModel):
    """The settings of a recipe that tables are made by, and all others unchecked."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    fresh: dict[str, Any] | None = None
    compression: dict[str, Any] | None = None
    heads: dict[str, Any] | None = None
    translation: dict[str, Any] | None = None


class Environment(BaseModel):
    """What a record was made with, as far as tables depend on it."""

    model_config = ConfigDict(strict=True)

    revision: str | None = None
    device: str = "unknown"


class Record(BaseModel):
    """The fields of a `result.json` that tables are made from; others are ignored."""

    model_config = ConfigDict(strict=True)

    task: str
    method: str
    conversion: str | None
    again: bool
    stage: str
    seed: Natural
    score: float | None
    parameters: Natural | None = None
    recipe: Settings = Settings()
    metrics: dict[str, dict[str, Any]] = {}
    history: list[dict[str, Any]] | None = None
    measures: dict[str, dict[str, Any]] | None = None
    environment: Environment = Environment()


@dataclass(frozen=True)
class Variant:
    """A row of a table: a model, and what was done to it.

    The model is the shortest unambiguous suffix of its path; "fresh" for an untrained one, with the settings in which
    the shapes of untrained ones on the same task differ, and the kind of device if they were trained on several.
    """

    model: str
    method: str
    stage: str  # tuned, given (as it is), or a conversion, with `-again` after a second fine-tuning
    conversion: str | None = None  # None for a dense model
    again: bool = False

    @property
    def label(self) -> str:
        """The variant as method/stage."""
        return f"{self.method}/{self.stage}"


@dataclass(frozen=True)
class Column:
    """A column of a table: a task."""

    name: str  # with the languages of a translation, as in "iwslt17 de-en"
    metric: str  # name in `metrics.METRICS`
    greater_is_better: bool = True

    @property
    def unit(self) -> str:
        """Unit of the scores; an average over tasks needs tasks of one unit."""
        return self.metric if self.metric in ("bleu", "perplexity") else "%"


@dataclass(frozen=True)
class Result:
    """One record."""

    variant: Variant
    column: Column
    seed: int
    score: float  # in the benchmark's scale: percent, BLEU or perplexity; NaN if it was not finite
    parameters: int | None  # of the model, head included
    recipe: Mapping[str, Any] = field(repr=False)  # the settings that decide the score at this stage
    source: str  # path of the record, or file and line
    metrics: Mapping[str, Any] = field(default_factory=dict, repr=False)  # split → metric → number
    history: Sequence[Mapping[str, Any]] = field(default=(), repr=False)  # the Trainer's log
    measures: Mapping[str, Any] = field(default_factory=dict, repr=False)  # name → numbers, by kind and layer
    revision: str | None = None  # of this package, where it is known


def read_results(*paths: Path) -> list[Result]:
    """Return the results in folders of one run or of many, and in files of records, in the order of their paths."""
    records: dict[str, Record] = {}
    for path in paths:
        contents = read_records(path)
        records |= {source: _check_record(source, content) for source, content in contents.items()}
    names = _name_models(record.recipe.model for record in records.values() if record.recipe.model)
    fresh = _name_fresh_models(records)
    results: dict[tuple[Variant, Column, int], Result] = {}
    for source, record in records.items():
        model = fresh.get(source) or names[str(record.recipe.model)]
        result = _make_result(source, record, model)
        variant, column, seed = result.variant, result.column, result.seed
        earlier = results.setdefault((variant, column, seed), result)
        if earlier is not result:
            raise RecipeError(
                f"{earlier.source} and {source} are both {variant.label} of {variant.model} on {column.name} with "
                f"seed {seed}; remove one, or give their recipes different methods"
            )
    return list(results.values())


def _check_record(source: str, content: dict[str, Any]) -> Record:
    """Return a record with all fields of the right types."""
    try:
        record = Record.model_validate(content)
    except ValidationError as error:
        raise RecipeError(f"{source} is no record of an experiment: {problems_of(error)}") from error
    if record.task not in TASKS:
        raise RecipeError(f"{source}: unknown task {record.task!r}; expected one of {', '.join(sorted(TASKS))}")
    return record


def _make_result(source: str, record: Record, model: str) -> Result:
    recipe, revision = record.recipe.model_dump(exclude_unset=True), record.environment.revision
    deciding = {*(CONVERTED_FIELDS if record.conversion else TUNED_FIELDS), *(["again"] if record.again else [])}
    deciding -= {"seed", "data_dir"}  # what seeds share, wherever the data are
    return Result(
        variant=Variant(model, record.method, record.stage, record.conversion, record.again),
        column=_find_column(record),
        seed=record.seed,
        score=math.nan if record.score is None else record.score,
        parameters=record.parameters,
        recipe={name: without_neutral(name, value) for name, value in recipe.items() if name in deciding},
        source=source,
        metrics=_check_numbers(source, "metrics", record.metrics),
        history=_check_numbers(source, "history", record.history or []),
        measures=_check_numbers(source, "measures", record.measures or {}),
        revision=None if revision == "unknown" else revision,
    )


def _check_numbers(source: str, field: str, values: Any) -> Any:
    """Return the numbers of a record's field, nested; NaN for null, which stands for numbers that are not finite."""

    def number(value: Any) -> Any:
        if not isinstance(value, int | float | None):
            raise RecipeError(
                f"{source} is no record of an experiment: {field} has {repr(value)[:60]}; expected a number"
            )
        return math.nan if value is None else value

    return mapped(number, values)


def _find_column(record: Record) -> Column:
    """Return the column of a task, named with the languages of a translation."""
    task, name = TASKS[record.task], record.task
    if task.kind == "translation":
        chosen = record.recipe.translation or {}
        source, target = task.languages or (None, None)
        source, target = chosen.get("source") or source, chosen.get("target") or target
        name = f"{name} {source}-{target}" if source and target else name
    return Column(name, task.metric, METRICS[task.metric].greater_is_better)


def _name_models(models: Iterable[str]) -> dict[str, str]:
    """Return the last parts of absolute paths: two, or as many as it takes to distinguish them."""
    names = {model: model for model in models}
    paths = {model: Path(model).parts for model in names if Path(model).is_absolute()}
    length, distinct = 2, len(set(paths.values()))
    while len({parts[-length:] for parts in paths.values()}) < distinct:
        length += 1
    return names | {model: "/".join(parts[-length:]) for model, parts in paths.items()}


def _name_fresh_models(records: Mapping[str, Record]) -> dict[str, str]:
    """Return source → "fresh", with the shape or kind of device in which untrained models on a task differ."""
    columns: dict[Column, dict[str, dict[str, Any]]] = defaultdict(dict)
    for source, record in records.items():
        if not record.recipe.model:
            fresh = {**asdict(Fresh()), **(record.recipe.fresh or {})}
            shape = {name: value for name, value in fresh.items() if name not in NOT_SHAPE}
            device = record.environment.device.partition(":")[0]
            columns[_find_column(record)][source] = {**shape, "device": device}
    names = {}
    for shapes in columns.values():
        first = next(iter(shapes.values()))
        fields = [name for name in first if len({str(shape.get(name)) for shape in shapes.values()}) > 1]
        for source, shape in shapes.items():
            differing = ", ".join(f"{name} {shape.get(name)}" for name in fields)
            names[source] = f"{FRESH} ({differing})" if differing else FRESH
    return names
