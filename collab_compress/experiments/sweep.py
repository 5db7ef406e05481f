"""Many experiments from one description: every task with every conversion, method and seed."""

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby, product
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

from collab_compress.checkpoint.pretrained import find_directory
from collab_compress.distributed import can_meet, on_main_process
from collab_compress.errors import BusyError, CollabCompressError, RecipeError
from collab_compress.experiments.measures import check_measures
from collab_compress.experiments.protocol import run, summary
from collab_compress.experiments.recipe import Recipe, expanded, parse, read_settings, set_field
from collab_compress.experiments.tuning import check_trackers

logger = logging.getLogger(__name__)
Settings = dict[str, Any]
PATIENCE = 10.0  # seconds before another worker's runs are looked at again
MOST_RUNS = 100_000
AXES = ("tasks", "methods", "conversions", "seeds")
# Fields of a recipe that are made of the sweep's.
OWN = {"output": "output", "task": "tasks", "method": "methods", "conversion": "conversions", "seed": "seeds"}


@dataclass(frozen=True)
class Sweep:
    """A sweep: fields of recipes that all runs share, and those that differ, by the names of the runs."""

    output: Path
    """Folder of all experiments: OUTPUT/TASK/METHOD/seedN holds one model with all its conversions."""

    tasks: dict[str, Settings | None]
    """Task → fields that are its own."""

    base: Settings = field(default_factory=dict)
    """Fields of every recipe; bars of single runs are shown with `progress: true`."""

    methods: dict[str, Settings | None] = field(default_factory=lambda: {"plain": None})
    """Method → fields that are its own, such as what acts on heads."""

    conversions: dict[str, Settings | None] = field(default_factory=dict)
    """Conversion → fields that are its own, such as dk and solver; models are not converted if empty."""

    seeds: tuple[int, ...] = (0,)
    """Seeds, which are gone through in this order before another is begun."""

    only: dict[str, list[Any]] = field(default_factory=dict)
    """Which of the tasks, methods, conversions and seeds to run now; all of those not named here."""

    scales: dict[str, Settings] = field(default_factory=dict)
    """Scale → fields of the sweep that are laid over the others: what runs here in hours, and what a paper ran."""

    scale: str | None = None
    """Which of the scales to run; the first if not given."""

    shard: str | None = None
    """Which part this worker does first, as 2/4 for the second of four that share the output; when it is done with
    that it does what is left of the others', those that were killed included."""

    def __post_init__(self) -> None:
        if self.shard is not None:
            self._place()
        object.__setattr__(self, "output", expanded(Path(self.output)))
        for axis, names in self.only.items():
            if axis not in AXES:
                raise RecipeError(f"only holds {axis!r}; expected some of {', '.join(AXES)}")
            for name in names:
                if name not in getattr(self, axis):
                    raise RecipeError(
                        f"only {axis} {name!r}: it is none of {', '.join(map(str, getattr(self, axis)))}"
                    )
        for axis in ("tasks", "methods", "conversions"):
            for name, fields in getattr(self, axis).items():
                _refuse_own(f"{axis}.{name}", fields)
        _refuse_own("base", self.base)
        if (count := prod(len(self._chosen(axis) or [None]) for axis in AXES)) > MOST_RUNS:
            raise RecipeError(f"the sweep has {count:,} runs; expected at most {MOST_RUNS:,}")
        if list(self.recipes()) == []:
            raise RecipeError("there is nothing to run; give tasks, methods and seeds")

    def recipes(self) -> Iterator[Recipe]:
        """Yield the recipes of the runs seed by seed, so that a stopped sweep has whole seeds."""
        for seed, task, method in product(*(self._chosen(axis) for axis in ("seeds", "tasks", "methods"))):
            for conversion in self._chosen("conversions") or [None]:
                settings: Settings = {"output": self.output / task / method / f"seed{seed}"}
                settings |= {"task": task, "method": method, "seed": seed, "conversion": conversion}
                parts = [{"progress": False}, self.base, self.tasks[task], self.methods[method], settings]
                if conversion is not None:
                    parts.append(self.conversions[conversion])
                merged: Settings = {}
                for part in parts:
                    merged = _merged(merged, part or {})
                yield parse(Recipe, merged, f"{task}, {method}, {conversion or 'not converted'}")

    def folders(self) -> list[list[Recipe]]:
        """Return the runs of each folder, in the order of this worker; one worker at a time runs a folder."""
        found = [list(runs) for _, runs in groupby(self.recipes(), key=attrgetter("output"))]
        if self.shard is None:
            return found
        place, count = self._place()
        own = found[place::count]
        return own + [runs for number, runs in enumerate(found) if number % count != place]

    def _place(self) -> tuple[int, int]:
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", str(self.shard))
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise RecipeError(f"shard is {self.shard!r}; expected which of how many workers, such as 2/4")
        return int(match[1]) - 1, int(match[2])

    def _chosen(self, axis: str) -> list[Any]:
        return [name for name in getattr(self, axis) if name in self.only.get(axis, [name])]


def read_sweep(path: str | Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep from a YAML file and settings such as `base.data_dir=data` or `only.seeds=[0]`.

    Settings have the last word, after the scale.

    Raises:
        RecipeError: the file cannot be read, there is no such scale, or a field of the sweep or of a recipe is not
            known.
    """
    settings = _at_scale(read_settings(path, overrides), str(path))
    for override in overrides:
        set_field(settings, override)
    return parse(Sweep, settings, str(path))


def _refuse_own(place: str, fields: Settings | None) -> None:
    for name, own in OWN.items():
        if name in (fields or ()):
            raise RecipeError(f"{place} has {name}, which each run gets from the sweep; give its {own}")


def _at_scale(settings: Settings, where: str) -> Settings:
    """Lay the fields of a scale over the others.

    Raises:
        RecipeError: there is no such scale, or it is no mapping.
    """
    scales = settings.get("scales") or {}
    if not isinstance(scales, Mapping):
        raise RecipeError(f"{where}: scales is {scales!r}; expected names, each with fields of the sweep")
    chosen = settings.get("scale", next(iter(scales), None))
    if chosen is None:
        return settings
    if chosen not in list(scales):
        there = f"expected one of {', '.join(map(str, scales))}" if scales else "the sweep has none"
        raise RecipeError(f"{where}: scale is {chosen!r}; {there}")
    if not isinstance(fields := scales[chosen], Mapping):
        raise RecipeError(f"{where}: scale is {chosen!r}; expected fields of the sweep, got {fields!r}")
    return _merged({**settings, "scale": chosen}, fields)


def run_sweep(sweep: Sweep, find_model: Callable[[str], str | Path] = find_directory) -> list[str]:
    """Run what is not finished yet. It can be stopped at any point, and started again.

    A run that fails, for whatever reason, does not keep the others from running. An interrupt stops the sweep, and so
    does an error of one of several processes in the middle of a training step, where the others cannot be told.

    Workers with a `shard` each may run the same sweep at once, on any machines that see its output and lock files
    there. What another is at work on is left to it, and looked at again in the end: the locks of a worker that was
    killed are gone, so its runs are taken up where they stopped. A run that fails is tried once by each worker.

    Args:
        sweep: what to run.
        find_model: gives the directory, or the name on the hub, of a recipe's model; as for `run`.

    Returns:
        What went wrong, with the folder it went wrong in.

    Raises:
        RecipeError: a recipe asks for measures or trackers that are not there, or one of several processes
            failed where the others cannot be told.
    """
    left = sweep.folders()
    for recipe in chain.from_iterable(left):
        check_trackers(recipe.trackers)
        check_measures(recipe)
    failed: list[str] = []
    while left:
        busy = []
        for runs in left:
            try:
                failed += _run_folder(runs, find_model, shared=sweep.shard is not None)
            except BusyError:
                busy.append(runs)
        if len(busy) == len(left):
            time.sleep(PATIENCE)
        left = busy
    return failed


def _run_folder(runs: Sequence[Recipe], find_model: Callable[[str], str | Path], shared: bool) -> list[str]:
    """Run what is not finished of one folder, and say what went wrong.

    Raises:
        BusyError: the folder is shared, and another worker is at work there.
        RecipeError: as `run_sweep`.
    """
    failed = []
    for recipe in runs:
        try:
            for record in run(recipe, find_model):
                logger.info("%s %s: %s", recipe.output, record["stage"], summary(record))
        except Exception as error:
            known = isinstance(error, CollabCompressError)
            words = str(error) if known else f"{type(error).__name__}: {error}"
            if not can_meet():
                raise RecipeError(
                    f"{recipe.output}: {words}; the sweep stops, for processes wait; start it again"
                ) from error
            if shared and on_main_process(partial(isinstance, error, BusyError)):
                raise BusyError(words) from error
            logger.error("%s: %s", recipe.output, words)
            failed.append(f"{recipe.output}: {words}")
    return failed


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> Settings:
    """Merge two nested mappings; the second takes precedence."""
    result = dict(one)
    for name, value in other.items():
        inner = result.get(name)
        both = isinstance(value, Mapping) and isinstance(inner, Mapping)
        result[name] = _merged(inner, value) if both else value  # type: ignore[arg-type]
    return result
