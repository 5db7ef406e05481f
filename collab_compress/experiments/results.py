"""Data of tables: checked records of experiments, and the numbers that the papers print."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from collab_compress.errors import RecipeError
from collab_compress.experiments.record import read_records
from collab_compress.experiments.untrained import Fresh
from collab_compress.metrics import METRICS
from collab_compress.tasks import TASKS

FIELDS: dict[str, tuple[type, ...]] = {
    "task": (str,),
    "method": (str,),
    "conversion": (str, NoneType),
    "again": (bool,),
    "stage": (str,),
    "seed": (int,),
    "score": (float, int, NoneType),
    "parameters": (int, NoneType),
    "recipe": (dict,),
    "metrics": (dict,),
    "seconds": (float, int, NoneType),
    "history": (list, NoneType),
    "measures": (dict, NoneType),
}
OPTIONAL: dict[str, Any] = {
    "parameters": None, "recipe": {}, "metrics": {}, "seconds": None, "history": None, "measures": None,
}  # fmt: skip
SETTINGS = {"model": (str, NoneType), "fresh": (dict, NoneType), "translation": (dict, NoneType)}
"""Settings of a recipe that tables are made by."""

FRESH = "fresh"
FREE = {"seed", "output", "data_dir", "trackers", "progress", "method", "attn_implementation", "measures"}
"""Settings that do not decide a score."""

WATCHING = {
    "logging_steps", "logging_strategy", "eval_strategy", "eval_steps", "predict_with_generate",
    "generation_num_beams", "generation_max_length", "disable_tqdm",
}  # fmt: skip
"""Training arguments that only watch."""

TUNINGS = {"tuning", "again"}
CONVERSION = {"compression", "conversion", "calibration", "calibration_options", "recovery"}
AGAIN = {"again"}
UNSHAPED = {"dropout", "attention_dropout", "attention"}
"""Settings of a fresh model that methods differ in; those with others are other models."""

PAPERS = Path(__file__).with_name("papers.yaml")


@dataclass(frozen=True)
class Variant:
    """A row of a table: what was done to which model.

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

    @property
    def label(self) -> str:
        """The variant as method/stage."""
        return f"{self.method}/{self.stage}"


@dataclass(frozen=True)
class Column:
    """A column of a table: what is scored.

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
        """Unit of the scores; averages over tasks make sense within one unit only."""
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
        metrics: split → metric → number.
        seconds: that the stage took; None if not recorded.
        history: what was logged while it trained, a dictionary a line, with `step` and `epoch`.
        measures: of heads on the trained model: name → numbers, by kind of attention and layer.
    """

    variant: Variant
    column: Column
    seed: int
    score: float
    parameters: int | None
    recipe: Mapping[str, Any] = field(repr=False)
    place: str
    metrics: Mapping[str, Any] = field(default_factory=dict, repr=False)
    seconds: float | None = None
    history: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    measures: Mapping[str, Any] = field(default_factory=dict, repr=False)


def read_results(*paths: Path) -> list[Result]:
    """Read the results of experiments.

    Args:
        paths: folders of one run or of many, and files of records.

    Returns:
        The results, in the order of their paths, or of their lines.

    Raises:
        RecipeError: there are none, one is no record of an experiment, or two are of the same variant, task and seed.
    """
    records = {place: _checked(place, found) for path in paths for place, found in read_records(path).items()}
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
    """Return the shape of an untrained model, without the fields in which methods differ."""
    fresh = {**asdict(Fresh()), **(recipe.get("fresh") or {})}
    return {name: value for name, value in fresh.items() if name not in UNSHAPED}


@dataclass(frozen=True)
class PaperRow:
    """A row of a paper's table.

    Args:
        model: the model, or what else the row is about.
        scores: column → the printed number, or two where the paper gives both metrics of a task; columns without
            one are left out.
        method: what acts on heads, in the paper's words.
        stage: tuned, or the conversion, as ours are called; empty where the paper does not convert.
        parameters: in millions.
        average: over the columns, as printed.
        baseline: whether rows of the same model in this table are compared with it.
        ours: what we call the same, as method or method/stage, the most fitting first; empty if nothing of ours is.
    """

    model: str
    scores: Mapping[str, tuple[Decimal, ...]]
    method: str = ""
    stage: str = ""
    parameters: Decimal | None = None
    average: Decimal | None = None
    baseline: bool = False
    ours: tuple[str, ...] = ()

    def score(self, column: str) -> Decimal | None:
        """Return one number for a column: the mean of two metrics, as ours is; None without any."""
        printed = self.scores.get(column)
        return None if printed is None else sum(printed, Decimal()) / len(printed)

    def mean(self, columns: Sequence[str]) -> Decimal | None:
        """Return the mean over columns; None if there are none or one is missing."""
        scores = [score for score in map(self.score, columns) if score is not None]
        return sum(scores, Decimal()) / len(scores) if scores and len(scores) == len(columns) else None


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper, or a figure or section whose text gives numbers.

    Args:
        paper: the paper's key.
        title: of the paper.
        source: authors, and where it appeared.
        name: as in "Table 2".
        columns: name → metric; those of tasks are named as ours are.
        rows: as printed.
        about: the conditions.
        note: where the paper contradicts itself; empty if it does not.
        beside: our columns that stand beside the paper's, as they are at our scale.
        of: what of ours is shown in them, of `collab_compress.experiments.claims.QUANTITIES`.
        sweep: the sweep that makes such rows, with its scale; empty if there is none.
    """

    paper: str
    title: str
    source: str
    name: str
    columns: Mapping[str, str]
    rows: tuple[PaperRow, ...]
    about: str = ""
    note: str = ""
    beside: tuple[str, ...] = ()
    of: tuple[str, ...] = ("score",)
    sweep: str = ""

    @property
    def place(self) -> str:
        """Where its rows stand: the paper's key and the table's name."""
        return f"{self.paper}, {self.name}"

    def baseline(self, row: PaperRow) -> PaperRow | None:
        """Return the baseline of a row; None for a baseline itself, or without one."""
        found = [other for other in self.rows if other.baseline and other.model == row.model]
        return found[0] if found and row is not found[0] else None

    def rows_for(self, columns: Sequence[str]) -> list[PaperRow]:
        """Return the rows that have a number in one of the columns."""
        return [row for row in self.rows if any(column in row.scores for column in columns)]


def read_papers(path: Path = PAPERS) -> list[PaperTable]:
    """Read the tables of all papers; numbers keep the digits they are printed with.

    Raises:
        RecipeError: the file cannot be read, or a table in it is malformed.
    """
    try:
        papers = yaml.load(path.read_text(encoding="utf-8"), _Exact)
        return [
            _table(key, paper, name, table)
            for key, paper in papers.items()
            for name, table in paper["tables"].items()
        ]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"cannot read the papers' numbers in {path}: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise RecipeError(f"{path} is not laid out as the papers' numbers are: {error}") from error


def select_tables(
    tables: Sequence[PaperTable], paper: str | None = None, table: str | None = None
) -> list[PaperTable]:
    """Choose tables of papers.

    Args:
        tables: to choose from.
        paper: key of the paper; all papers if not given.
        table: its number or name: "2", "Table 2", "Figure 3"; all of them if not given.

    Raises:
        RecipeError: there is no such paper or table, naming those there are.
    """
    papers = dict.fromkeys(one.paper for one in tables)
    if paper is not None and paper not in papers:
        raise RecipeError(f"unknown paper {paper!r}; expected one of {', '.join(papers)}")
    found = [one for one in tables if paper in (None, one.paper)]
    if table is None:
        return found
    chosen = [one for one in found if table.casefold() in (one.name.casefold(), one.name.removeprefix("Table "))]
    if not chosen:
        raise RecipeError(
            f"no table {table!r}; expected one of {', '.join(dict.fromkeys(one.name for one in found))}"
        )
    return chosen


def _result(place: str, record: Mapping[str, Any], model: str) -> Result:
    recipe, conversion, again = record["recipe"], record["conversion"], record["again"]
    variant = Variant(model, record["method"], record["stage"], conversion, again)
    free = FREE | (set() if again else AGAIN) | (set() if conversion else CONVERSION)
    return Result(
        variant=variant,
        column=_column(record["task"], recipe),
        seed=record["seed"],
        score=float(_numbers(record["score"])),
        parameters=record["parameters"],
        recipe={name: _deciding(name, value) for name, value in recipe.items() if name not in free},
        place=place,
        metrics=_numbers(record["metrics"]),
        seconds=record["seconds"],
        history=_numbers(record["history"] or []),
        measures=_numbers(record["measures"] or {}),
    )


def _deciding(name: str, setting: Any) -> Any:
    """Return a setting without the training arguments that only watch."""
    arguments = setting.get("arguments") if name in TUNINGS and isinstance(setting, dict) else None
    if not isinstance(arguments, dict):
        return setting
    return {**setting, "arguments": {name: value for name, value in arguments.items() if name not in WATCHING}}


def _numbers(value: Any) -> Any:
    """Return what was recorded with NaN for null, which stands for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: _numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return math.nan if value is None else value


def _checked(place: str, found: Any) -> dict[str, Any]:
    """Return a record after checking that its fields exist and have the right types."""
    if not isinstance(found, dict):
        raise RecipeError(f"{place} holds a {type(found).__name__}; expected the record of an experiment")
    record = {**OPTIONAL, **found}
    for name, types in FIELDS.items():
        if name not in record:
            raise RecipeError(f"{place} is no record of an experiment: it has no {name}; remove or rename it")
        _check(place, name, record[name], types)
    for name, types in SETTINGS.items():
        _check(place, f"recipe.{name}", record["recipe"].get(name), types)
    for name in ("metrics", "measures"):
        for inner, value in (record[name] or {}).items():
            _check(place, f"{name}.{inner}", value, (dict,))
    for line in record["history"] or ():
        _check(place, "a line of history", line, (dict,))
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


def _table(key: str, paper: Mapping[str, Any], name: str, table: Mapping[str, Any]) -> PaperTable:
    rows = tuple(_row(row, list(table["columns"]), f"{key}, {name}") for row in table["rows"])
    listed = {field: tuple(table[field]) for field in ("beside", "of") if field in table}
    return PaperTable(key, paper["title"], paper["source"], name, **{**table, **listed, "rows": rows})


def _row(row: Mapping[str, Any], columns: Sequence[str], where: str) -> PaperRow:
    scores = row["scores"]
    if len(scores) != len(columns):
        raise RecipeError(f"{where}, {row['model']}: {len(scores)} scores; expected {len(columns)}, null for none")
    printed = {
        column: tuple(score if isinstance(score, list) else [score])
        for column, score in zip(columns, scores, strict=True)
        if score is not None
    }
    ours = row.get("ours", ())
    return PaperRow(**{**row, "scores": printed, "ours": (ours,) if isinstance(ours, str) else tuple(ours)})


class _Exact(yaml.SafeLoader):
    """Reads numbers as decimals, which keep their digits."""


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Decimal:
    return Decimal(loader.construct_scalar(node))


for kind in ("int", "float"):
    _Exact.add_constructor(f"tag:yaml.org,2002:{kind}", _decimal)
