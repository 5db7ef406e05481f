"""What experiments found: their records, checked, and what tables are made of."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from collab_compress.conversion.compression import Compression
from collab_compress.errors import RecipeError
from collab_compress.experiments.recipe import parse
from collab_compress.experiments.record import read_records
from collab_compress.experiments.renamed import with_todays_names
from collab_compress.experiments.untrained import Fresh
from collab_compress.metrics import METRICS
from collab_compress.tasks import TASKS
from collab_compress.training import HeadTraining

FIELDS: dict[str, tuple[type, ...]] = {
    "task": (str,),
    "method": (str,),
    "conversion": (str, NoneType),
    "again": (bool,),
    "stage": (str,),
    "seed": (int,),
    "score": (float, int),
    "parameters": (int, NoneType),
    "recipe": (dict,),
}
OPTIONAL: dict[str, Any] = {"parameters": None, "recipe": {}}
SETTINGS = {"model": (str, NoneType), "fresh": (dict, NoneType), "translation": (dict, NoneType)}
"""Settings of a recipe that tables are made by."""

FRESH = "fresh"
FREE = {"seed", "output", "data_dir", "trackers", "progress", "method", "attn_implementation"}
"""Settings that do not decide a score."""

PARTS: dict[str, Any] = {"heads": HeadTraining, "compression": Compression}
"""Settings that have gained fields since the oldest records."""

CONVERSION = {"compression", "conversion", "calibration", "recovery"}
AGAIN = {"again"}
UNSHAPED = {"dropout", "attention_dropout", "attention"}
"""Settings of a fresh model that methods differ in; those with others are other models."""


@dataclass(frozen=True)
class Variant:
    """What was done to which model: a row of a table.

    Args:
        model: what it started from, of a path no more than tells it from others; "fresh" for an untrained one, with
            what tells it from untrained ones of other shapes on the same task.
        method: what the recipe calls it.
        stage: tuned, given (as it is), or the name of a conversion, with `-again` after a second fine-tuning.
        conversion: its name; None for the model before.
        again: whether it was fine-tuned again.
    """

    model: str
    method: str
    stage: str
    conversion: str | None = None
    again: bool = False


@dataclass(frozen=True)
class Column:
    """What is scored: a column of a table.

    Args:
        name: of the task, with the languages of a translation, as in "iwslt17 de-en".
        metric: its name in `collab_compress.metrics.METRICS`.
        greater_is_better: whether a greater score is a better one.
    """

    name: str
    metric: str
    greater_is_better: bool = True

    @property
    def unit(self) -> str:
        """What scores are in; an average over tasks makes sense within one unit only."""
        return self.metric if self.metric in ("bleu", "perplexity") else "%"


@dataclass(frozen=True)
class Result:
    """One record.

    Args:
        variant: what was done.
        column: what was scored.
        seed: of the run.
        score: in the benchmark's scale: percent, BLEU or perplexity.
        parameters: of the model, head included; None if not recorded.
        recipe: the settings that decide the score at this stage.
        place: where the record stands: its path, or file and line.
    """

    variant: Variant
    column: Column
    seed: int
    score: float
    parameters: int | None
    recipe: Mapping[str, Any] = field(repr=False)
    place: str


def read_results(path: Path) -> list[Result]:
    """Read the results of experiments.

    Args:
        path: a folder of one run or of many, or a file of records.

    Returns:
        The results, in the order of their paths, or of their lines.

    Raises:
        RecipeError: there are none, one is no record of an experiment, or two are of the same variant, task and seed.
    """
    records = {place: _checked(place, found) for place, found in read_records(path).items()}
    names = _model_names(record["recipe"]["model"] for record in records.values() if record["recipe"].get("model"))
    fresh = _fresh_names(records)
    results: dict[tuple[Variant, Column, int], Result] = {}
    for place, record in records.items():
        result = _result(place, record, fresh.get(place) or names[record["recipe"]["model"]])
        variant, column, seed = result.variant, result.column, result.seed
        there = results.setdefault((variant, column, seed), result)
        if there is not result:
            raise RecipeError(
                f"{there.place} and {place} are both {variant.method}/{variant.stage} of {variant.model} on "
                f"{column.name} with seed {seed}; remove one, or give their recipes different methods"
            )
    return list(results.values())


def shape(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Give what a fresh model is like, but for what methods differ in."""
    fresh = {**asdict(Fresh()), **(recipe.get("fresh") or {})}
    return {name: value for name, value in fresh.items() if name not in UNSHAPED}


def _result(place: str, record: Mapping[str, Any], model: str) -> Result:
    recipe, conversion, again = with_todays_names(record["recipe"]), record["conversion"], record["again"]
    variant = Variant(model, record["method"], record["stage"], conversion, again)
    free = FREE | (set() if again else AGAIN) | (set() if conversion else CONVERSION)
    return Result(
        variant=variant,
        column=_column(record["task"], recipe),
        seed=record["seed"],
        score=float(record["score"]),
        parameters=record["parameters"],
        recipe={name: _in_full(name, value) for name, value in recipe.items() if name not in free},
        place=place,
    )


def _in_full(name: str, recorded: Any) -> Any:
    """Give a setting with all its fields, also those added since; as it is recorded where it is not known."""
    if recorded is None or name not in PARTS:
        return recorded
    try:
        return asdict(parse(PARTS[name], recorded, name))
    except (AttributeError, RecipeError):
        return recorded


def _checked(place: str, found: Any) -> dict[str, Any]:
    """Give a record whose fields are there and of their types; a foreign file is told by that it is not so."""
    if not isinstance(found, dict):
        raise RecipeError(f"{place} holds a {type(found).__name__}; expected the record of an experiment")
    record = {**OPTIONAL, **found}
    for name, types in FIELDS.items():
        if name not in record:
            raise RecipeError(f"{place} is no record of an experiment: it has no {name}; remove or rename it")
        _check(place, name, record[name], types)
    for name, types in SETTINGS.items():
        _check(place, f"recipe.{name}", record["recipe"].get(name), types)
    if record["task"] not in TASKS:
        raise RecipeError(f"{place}: unknown task {record['task']!r}; expected one of {', '.join(sorted(TASKS))}")
    return record


def _check(place: str, name: str, value: Any, types: tuple[type, ...]) -> None:
    if type(value) not in types:
        expected = " or ".join("null" if kind is NoneType else kind.__name__ for kind in types)
        raise RecipeError(f"{place}: {name} is {repr(value)[:80]}; expected {expected}")
    if type(value) is int and abs(value) >= 1 << 63:
        raise RecipeError(f"{place}: {name} has {value.bit_length()} bits; expected at most 63")


def _model_names(models: Iterable[str]) -> dict[str, str]:
    """Cut absolute paths down to their last parts, two or as many as it takes to tell them apart."""
    names = {model: model for model in models}
    paths = {model: Path(model).parts for model in names if Path(model).is_absolute()}
    parts, apart = 2, len(set(paths.values()))
    while len({path[-parts:] for path in paths.values()}) < apart:
        parts += 1
    return names | {model: "/".join(path[-parts:]) for model, path in paths.items()}


def _fresh_names(records: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Name untrained models, those of several shapes on one task by what tells them apart."""
    columns: dict[Column, dict[str, dict[str, Any]]] = defaultdict(dict)
    for place, record in records.items():
        if not record["recipe"].get("model"):
            columns[_column(record["task"], record["recipe"])][place] = shape(record["recipe"])
    names = {}
    for shapes in columns.values():
        fields = [
            name for name in next(iter(shapes.values())) if len({str(one.get(name)) for one in shapes.values()}) > 1
        ]
        for place, found in shapes.items():
            told = ", ".join(f"{name} {found.get(name)}" for name in fields)
            names[place] = f"{FRESH} ({told})" if told else FRESH
    return names


def _column(task_name: str, recipe: Mapping[str, Any]) -> Column:
    """Name a task, and the languages of a translation."""
    task, name = TASKS[task_name], task_name
    if task.kind == "translation":
        chosen = recipe.get("translation") or {}
        source, target = task.languages or (None, None)
        source, target = chosen.get("source") or source, chosen.get("target") or target
        name = f"{name} {source}-{target}" if source and target else name
    return Column(name, task.metric, METRICS[task.metric].greater_is_better)
