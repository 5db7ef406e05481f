"""Outputs of experiments: the recipe that made each folder, the lock of the process at work, and records."""

import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import collab_compress_cli
import torch
from collab_compress_cli.distributed import process_state
from datasets import Dataset

import collab_compress
import collab_compress_options
from collab_compress.checkpoint.files import locked, mapped, to_json, write_json
from collab_compress.errors import RecipeError

from .recipe import Recipe

LOCK = ".collab-experiment.lock"
RECIPE = "recipe.json"
"""File with the recipe that made a folder."""

DATA_FIELDS = ("task", "data_dir", "files", "held_out", "max_length", "translation")
TUNED_FIELDS = (*DATA_FIELDS, "model", "revision", "fresh", "seed", "tuning", "heads")
"""Fields of a recipe that decide the fine-tuned model and its score."""

CONVERTED_FIELDS = (*TUNED_FIELDS, "compression", "calibration", "calibration_options")
"""Fields of a recipe that decide the converted model and its score."""

LOGGING = {"logging_steps", "logging_strategy", "disable_tqdm"}
NEUTRAL_ARGUMENTS = {
    *LOGGING,
    "eval_strategy",
    "eval_steps",
    "predict_with_generate",
    "generation_num_beams",
    "generation_max_length",
}
"""Training arguments that do not decide a score, where evaluations do not choose the best checkpoint."""

LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "tokenizers")
SCORERS = ("sacrebleu", "scikit-learn", "scipy")
CHECKOUT = Path(__file__).parents[2]
SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})$")  # in the hub's cache
PREPARED = re.compile(r"/([0-9a-f]{40})/[^/]+\.arrow$")  # in the cache of `datasets`


@contextmanager
def reserve_output(recipe: Recipe, stages: Sequence[str]) -> Iterator[bool]:
    """Lock the output of an experiment, and yield whether all its stages are finished and measured."""
    output = recipe.output

    def finished() -> bool:
        for stage in stages:
            _refuse_other(recipe, stage)
        records = [read_result(output / stage) for stage in stages if (output / stage / "result.json").is_file()]
        return len(records) == len(stages) and not any(
            missing_measures(record, recipe.measures) for record in records
        )

    with ExitStack() as held:
        try:
            if not finished():
                held.enter_context(locked(output, LOCK, RecipeError))
                if not any(has_results(folder) for folder in output.glob("*/")):
                    remove_output(output / "start")
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise RecipeError(
                f"cannot use {output} as output: {getattr(error, 'strerror', None) or error}"
            ) from error
        yield finished()


def claim(recipe: Recipe, folder: Path) -> None:
    """Write the recipe into a folder without results, which makes the folder the recipe's; create it if needed."""
    if not has_results(folder):
        write_json(folder / RECIPE, asdict(recipe))


def has_results(folder: Path) -> bool:
    """Return whether the folder of a stage holds a model, a record or a checkpoint."""
    names = ("model", "result.json", "checkpoints/checkpoint-*")
    return any(path for name in names for path in folder.glob(name))


def remove_output(folder: Path) -> None:
    """Remove a folder that a recipe made; others are left unchanged."""
    if _read_recipe(folder) is not None and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)


def _read_recipe(folder: Path) -> dict[str, Any] | None:
    """Return the recipe that made a folder; None if no recipe did."""
    try:
        saved = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return saved if isinstance(saved, dict) and "task" in saved else None


def _refuse_other(recipe: Recipe, stage: str) -> None:
    """Refuse the folder of a stage that no recipe made, or that has results of another recipe."""
    for folder in (recipe.output / "start", recipe.output / stage):
        is_empty = not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))
        if not is_empty and _read_recipe(folder) is None:
            raise RecipeError(f"{folder} exists and no experiment made it; choose another output")
    saved = _read_recipe(folder)
    if saved is None or not has_results(folder):
        return
    wanted = json.loads(to_json(asdict(recipe)))
    fields = TUNED_FIELDS if stage in ("given", "tuned") else CONVERTED_FIELDS
    if stage == recipe.again_name:
        fields = (*fields, "again")
    deciding = [
        {name: without_nulls(without_neutral(name, of.get(name))) for name in fields} for of in (saved, wanted)
    ]
    if differing := [name for name in fields if deciding[0][name] != deciding[1][name]]:
        raise RecipeError(f"{folder} was made with another {', '.join(differing)}; choose another output")


def without_neutral(name: str, setting: Any) -> Any:
    """Return a field of a recipe without the training arguments that do not decide a score."""
    arguments = setting.get("arguments") if name in ("tuning", "again") and isinstance(setting, dict) else None
    if not isinstance(arguments, dict):
        return setting
    neutral = LOGGING if arguments.get("load_best_model_at_end") else NEUTRAL_ARGUMENTS
    return {**setting, "arguments": {name: value for name, value in arguments.items() if name not in neutral}}


def without_nulls(value: Any) -> Any:
    """Return nested settings without fields that are None, which those written by earlier versions lack."""
    if isinstance(value, Mapping):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(inner) for inner in value]
    return value


def hub_commits(model: Path, data: Mapping[str, Dataset]) -> dict[str, str | None]:
    """Return the commits that a model and a data set have on the hub; None where one is not from there."""
    snapshot = SNAPSHOT.search(model.as_posix())
    files = [Path(file["filename"]).as_posix() for rows in data.values() for file in rows.cache_files]
    commits = {match[1] for match in map(PREPARED.search, files) if match}
    return {"model": snapshot and snapshot[1], "data": commits.pop() if len(commits) == 1 else None}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON, with null for numbers that are not finite."""
    write_json(path, mapped(finite_or_none, record))


def read_record(path: Path) -> dict[str, Any]:
    """Read a JSON file."""
    return _parse(_read_text(path), str(path))


def read_result(folder: Path) -> dict[str, Any]:
    """Read the record of a stage."""
    path = folder / "result.json"
    record = read_record(path)
    mappings = (record.get("metrics"), record.get("recipe"), record.get("measured", {}))
    is_scored = isinstance(record.get("score", ""), int | float | None)
    if not is_scored or not all(isinstance(value, dict) for value in mappings):
        raise RecipeError(f"{path} is no record of an experiment; remove it, or choose another output")
    return record


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Return path, or file and line → record, of every `result.json` below a folder, or of a file of records."""
    if path.is_dir():
        records = {str(file): read_record(file) for file in sorted(path.rglob("result.json"))}
        if not records:
            raise RecipeError(f"{path} holds no result.json; expected the outputs of experiments")
        return records
    if not path.is_file():
        raise RecipeError(f"{path} is no folder; expected one with the outputs of experiments, or a file of records")
    lines = enumerate(_read_text(path).split("\n"), 1)
    lines_by_source = {f"{path}, line {number}": line for number, line in lines if line.strip()}
    if not lines_by_source:
        raise RecipeError(f"{path} holds no records; expected one a line")
    return {source: _parse(line, source) for source, line in lines_by_source.items()}


def record_lines(records: Iterable[dict[str, Any]]) -> str:
    """Return records as JSON Lines, with null for numbers that are not finite."""
    return "".join(f"{json.dumps(mapped(finite_or_none, record), ensure_ascii=False)}\n" for record in records)


def missing_measures(record: Mapping[str, Any], measures: Iterable[str]) -> list[str]:
    """Return the measures that are still to be taken; those that do not apply to the model count as taken."""
    return [name for name in measures if name not in record.get("measured", {})]


def finite_or_none(value: Any) -> Any:
    """Return a value, or None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_text(path: Path) -> str:
    if not path.is_file():  # reading a pipe would wait for ever
        raise RecipeError(f"cannot read the record {path}: expected a regular file")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot read the record {path}: {error}") from error


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        record: Any = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode()  # raises where an escape is half a character
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"cannot read the record {source}: {error}") from error
    if not isinstance(record, dict):
        raise RecipeError(f"{source} holds a {type(record).__name__}; expected the record of an experiment")
    return record


def environment() -> dict[str, Any]:
    """Return the versions of packages, the hardware, and the revision of this package."""
    state = process_state()
    return {
        **{name: version(name) for name in ("collab-compress", *LIBRARIES, *SCORERS)},
        "python": platform.python_version(),
        "processes": state.num_processes,
        "device": str(state.device),
        "threads": torch.get_num_threads(),
        "hardware": _name_hardware(),
        "mixed_precision": os.environ.get("ACCELERATE_MIXED_PRECISION", "no"),
        "revision": _find_revision(),
    }


def _name_hardware() -> str:
    """Return the name of the accelerator, or else of the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@cache
def _find_revision() -> str:
    """Return the commit of the code, or a digest of it where no commit is known."""
    packages = (collab_compress, collab_compress_cli, collab_compress_options)
    folders = (*(Path(package.__path__[0]) for package in packages), Path(__file__).parents[1])
    code = b"".join(path.read_bytes() for folder in folders for path in sorted(folder.rglob("*.py")))
    return _describe_checkout() or f"sha256-{hashlib.sha256(code).hexdigest()[:12]}"


def _describe_checkout() -> str | None:
    """Return the commit of the checkout that holds this package, with -dirty where files have changed."""
    if not (CHECKOUT / ".git").exists():
        return None
    trusted = f"safe.directory={CHECKOUT}"  # a checkout may belong to another user, as in containers
    command = ["git", "-c", trusted, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
