"""Sweeps: one experiment for each combination of task, method, conversion and seed."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from collab_compress_cli.distributed import process_state

from collab_compress.errors import RecipeError

from .processes import message_of
from .protocol import check_environment, run, summary
from .recipe import Recipe, parse, read_settings, set_field

logger = logging.getLogger("collab_compress.glue_runs.sweep")
Settings = dict[str, Any]

AXES = ("tasks", "methods", "conversions", "seeds")
MADE_FIELDS = {"output": "output", "task": "tasks", "method": "methods", "conversion": "conversions", "seed": "seeds"}
"""Field of a recipe → the field of a sweep that sets it."""


@dataclass(frozen=True)
class Sweep:
    """A sweep: fields of recipes that all runs share, and those that differ, by the names of the runs."""

    output: Path
    """Folder of all experiments: OUTPUT/TASK/METHOD/seedN holds one model with all its conversions."""

    tasks: dict[str, Settings | None]
    """Task → fields of its recipes."""

    base: Settings = field(default_factory=dict)
    """Fields of every recipe; `progress: true` shows the progress bars of single runs."""

    recipe: Path | None = None
    """A recipe, by its path from the sweep's file, whose fields `base` extends and replaces."""

    methods: dict[str, Settings | None] = field(default_factory=lambda: {"plain": None})
    """Method → fields of its recipes, such as what acts on heads."""

    conversions: dict[str, Settings | None] = field(default_factory=dict)
    """Conversion → fields of its recipes, such as dk and solver; models are not converted if empty."""

    seeds: tuple[int, ...] = (0,)
    """Seeds; all runs of one come before those of the next."""

    only: dict[str, list[Any]] = field(default_factory=dict)
    """Tasks, methods, conversions and seeds to run now; all of those that are not named."""

    scales: dict[str, Settings] = field(default_factory=dict)
    """Scale → fields of the sweep that replace the others: what runs here in hours, and what a paper ran."""

    scale: str | None = None
    """The scale to run; the first if not given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "output", Path(self.output).expanduser())
        if self.recipe is not None:
            fields = read_settings(self.recipe, [])
            shared = {name: value for name, value in fields.items() if name not in MADE_FIELDS}
            object.__setattr__(self, "base", _merge(shared, self.base))
        for axis, names in self.only.items():
            if axis not in AXES:
                raise RecipeError(f"only holds {axis!r}; expected some of {', '.join(AXES)}")
            known = list(getattr(self, axis))
            for name in names:
                if name not in known:
                    raise RecipeError(f"only.{axis} names {name!r}; expected some of {', '.join(map(str, known))}")
        all_fields: Settings = {"base": self.base}
        for axis in ("tasks", "methods", "conversions"):
            all_fields |= {f"{axis}.{name}": fields for name, fields in getattr(self, axis).items()}
        for path, fields in all_fields.items():
            for name in MADE_FIELDS.keys() & (fields or {}).keys():
                raise RecipeError(
                    f"{path} has {name}, which each run gets from the sweep; give its {MADE_FIELDS[name]}"
                )
        if not list(self.recipes()):
            raise RecipeError("there is nothing to run; give tasks, methods and seeds")

    def recipes(self) -> Iterator[Recipe]:
        """Yield the recipes of the runs seed by seed, so that a stopped sweep has whole seeds."""
        for seed, task, method in product(*(self._select(axis) for axis in ("seeds", "tasks", "methods"))):
            for conversion in self._select("conversions") or [None]:
                merged: Settings = {"progress": False}
                for part in (self.base, self.tasks[task], self.methods[method]):
                    merged = _merge(merged, part or {})
                merged |= {"task": task, "method": method, "seed": seed, "conversion": conversion}
                merged["output"] = self.output / task / method / f"seed{seed}"
                if conversion is not None:
                    merged = _merge(merged, self.conversions[conversion] or {})
                yield parse(Recipe, merged, f"{task}, {method}, {conversion or 'not converted'}")

    def _select(self, axis: str) -> list[Any]:
        return [name for name in getattr(self, axis) if name in self.only.get(axis, [name])]


def read_sweep(path: str | Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep from a YAML file and settings such as `base.data_dir=data` or `only.seeds=[0]`.

    The fields of the scale replace those of the file, and settings replace both. A setting of `base` that is null, as
    `base.again=null`, also holds for tasks that have the field themselves.

    Raises:
        RecipeError: the file cannot be read, there is no such scale, or a field is unknown.
    """
    settings = _apply_scale(read_settings(path, overrides), str(path))
    for override in overrides:
        value = set_field(settings, override)
        if value is None and override.startswith("base."):
            for task in list(settings.get("tasks") or ()):
                set_field(settings, override.replace("base.", f"tasks.{task}.", 1))
    if settings.get("recipe"):
        settings["recipe"] = Path(path).parent / str(settings["recipe"])
    return parse(Sweep, settings, str(path))


def _apply_scale(settings: Settings, where: str) -> Settings:
    """Return the fields of a sweep, replaced by those of its scale."""
    scales = settings.get("scales") or {}
    chosen = settings.get("scale", next(iter(scales), None)) if isinstance(scales, Mapping) else None
    if chosen is None:
        return settings
    fields = scales.get(chosen) if isinstance(chosen, str) else None
    if not isinstance(fields, Mapping):
        known = f"expected one of {', '.join(map(str, scales))}, each with fields" if scales else "the sweep has none"
        raise RecipeError(f"{where}: scale is {chosen!r}; {known}")
    return _merge({**settings, "scale": chosen}, fields)


def run_sweep(sweep: Sweep) -> list[str]:
    """Run what is not finished yet. It can be stopped at any point, and started again.

    If a run fails, the others go on; where several processes run together, the sweep stops at the first failure.

    Returns:
        The errors, each with its folder.

    Raises:
        RecipeError: a recipe asks for unknown measures or trackers, or a run of several processes failed.
    """
    recipes = list(sweep.recipes())
    for recipe in recipes:
        check_environment(recipe)
    errors = []
    for recipe in recipes:
        try:
            for record in run(recipe):
                logger.info("%s %s: %s", recipe.output, record["stage"], summary(record))
        except Exception as error:
            failure = f"{recipe.output}: {message_of(error)}"
            if process_state().num_processes > 1:
                raise RecipeError(
                    f"{failure}; a sweep of several processes stops at the first failure: start it again"
                ) from error
            logger.error("%s", failure)
            errors.append(failure)
    return errors


def _merge(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> Settings:
    """Return nested settings with some of them changed."""
    merged = dict(settings)
    for name, value in changes.items():
        inner = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(inner, Mapping)
        merged[name] = _merge(inner, value) if both else value  # type: ignore[arg-type]
    return merged
