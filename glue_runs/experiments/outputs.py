"""Output folders of experiments: which experiment each holds, which process works there, and its records."""

import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from filelock import FileLock, Timeout

import collab_compress
from collab_compress.calibration.batches import text_file
from collab_compress.calibration.files import split_columns
from collab_compress.checkpoint.directory import TOKENIZER_FILES, mapped, write_json
from collab_compress.distributed import process_state
from collab_compress.errors import RecipeError

from ..tasks import task_files
from .recipe import Recipe

MARK = ".collab-experiment.json"
LOCK = ".collab-experiment.lock"
MADE_BY = {"made_by": "collab_compress.experiments", "format": 2}
LOST = "{} has no valid mark file, so the recipe that made it is unknown; choose another output"
FILES = "sha256"
"""Key of the names and digests that replace a path in the settings of a mark."""

TOKENIZER = {*TOKENIZER_FILES, "merges.txt", "added_tokens.json", "special_tokens_map.json", "generation_config.json"}
DATA = ("task", "data_dir", "files", "held_out", "max_length", "translation")
BASE = (*DATA, "model", "revision", "fresh", "seed", "tuning", "heads")
"""Fields of a recipe that decide the fine-tuned model and its score."""

CONVERTED = (*BASE, "compression", "calibration", "calibration_options", "recovery")
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
    """Lock and mark the folders of an experiment, and yield whether all its stages are finished and measured.

    A mark holds the settings that decide the content of its folder. If an error ends the work before anything was
    made, the marks are removed. Nothing is written where all stages are finished.

    Args:
        recipe: the experiment.
        stages: names of its stages.

    Raises:
        RecipeError: a folder is foreign or holds another experiment, or another process works there.
        DataError: the data are missing.
    """
    output = recipe.output
    settings = _settings_by_folder(recipe, stages)

    def finished() -> bool:
        records = [read_result(recipe, stage) for stage in stages if (output / stage / "result.json").is_file()]
        return len(records) == len(stages) and not any(lacking(record, recipe.measures) for record in records)

    def unmarked() -> list[Path]:
        _refuse_foreign(recipe, stages)
        return [folder for folder, wanted in settings.items() if not _is_marked(folder, wanted, output)]

    with ExitStack() as held:
        try:
            if unmarked() or not finished():
                held.enter_context(_locked(output))
                held.callback(_remove_unused, output, stages)
                folders = unmarked()  # again: another process may have worked there before the lock
                if not _has_results(output):
                    discard(output / "start")
                for folder in folders:
                    mark(folder, settings[folder])
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise RecipeError(
                f"cannot use {output} as output: {getattr(error, 'strerror', None) or error}"
            ) from error
        yield finished()


def mark(folder: Path, settings: Mapping[str, Any]) -> None:
    """Mark a folder as made by an experiment with these settings; create it if needed."""
    write_json(folder / MARK, {**MADE_BY, "recipe": settings})


def is_ours(folder: Path) -> bool:
    """Return whether an experiment made a folder."""
    return _read_mark(folder) is not None


def discard(folder: Path) -> None:
    """Remove a folder that an experiment made; others are left unchanged.

    Its mark is removed last, so that the folder is still known as ours if the process is killed.
    """
    if not is_ours(folder) or folder.is_symlink():
        return
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != MARK:
                path.unlink()
        (folder / MARK).unlink()
        folder.rmdir()


def _read_mark(folder: Path) -> dict[str, Any] | None:
    """Return the settings in the mark of a folder; None if no experiment made it."""
    try:
        content = json.loads((folder / MARK).read_text(encoding="utf-8"))
        settings = content.pop("recipe")
    except (OSError, ValueError, AttributeError, KeyError, RecursionError):
        return None
    return settings if content == MADE_BY and isinstance(settings, dict) else None


def _is_marked(folder: Path, wanted: Mapping[str, Any], output: Path) -> bool:
    """Return whether a folder is marked with these settings; refuse it if it has results of others."""
    marked = _read_mark(folder)
    if marked is None:
        return False
    revision = wanted.get("revision")
    if revision is not None and any(commits.get("model") == revision for _, commits in _recorded_commits(output)):
        marked["revision"] = revision  # the same commit under another name, or without one
    try:
        differing = list(_differing(marked, wanted))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{folder / MARK} is damaged; choose another output") from error
    if differing and _has_results(folder):
        raise RecipeError(f"{folder} was made with another {', '.join(differing)}; choose another output")
    return not differing


def _has_results(folder: Path) -> bool:
    """Return whether a folder, or that of one of its stages, holds a model, a record or a checkpoint."""
    for place in (folder, *folder.glob("*/")):
        if (place / "model").exists() or (place / "result.json").exists():
            return True
        if any(place.glob("checkpoints/checkpoint-*")):
            return True
    return False


def _remove_unused(output: Path, stages: Sequence[str]) -> None:
    """Remove the marks in which nothing was made, and the folders of such stages."""
    if not _has_results(output):
        discard(output / "start")
    for folder in (*(output / stage for stage in stages), output):
        if not is_ours(folder):
            continue
        for inner in folder.glob("*/"):
            with suppress(OSError):
                inner.rmdir()  # succeeds for empty ones only
        if {path.name for path in folder.iterdir()} <= {MARK, LOCK}:
            (folder / MARK).unlink()
            if folder != output:  # which may have been there before
                folder.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes; it is created if needed, and removed again if it stays empty.

    The lock is the operating system's: it ends with the process that holds it, even if that is killed.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = FileLock(folder / LOCK, is_singleton=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise RecipeError(
                f"another process is at work in {folder}; wait for it, or choose another output"
            ) from error
        try:
            yield
        finally:
            with suppress(OSError):
                (folder / LOCK).unlink()  # before its release, so that a waiting process makes a new file
            lock.release()
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def _refuse_foreign(recipe: Recipe, stages: Sequence[str]) -> None:
    """Refuse folders that no experiment made, an output in the model or among the data, and a model in the output."""
    output, place = recipe.output, recipe.output.resolve()
    for name in (recipe.model, recipe.fresh and recipe.fresh.config):
        if isinstance(name, str) and (model := Path(name)).is_dir():
            if model.resolve().is_relative_to(place):
                raise RecipeError(f"the model {name} lies in the output {output}; choose another output")
            if place.is_relative_to(model.resolve()):
                raise RecipeError(f"the output {output} lies in the model {name}; choose another output")
    for folder in {file.parent for files in _data_files(recipe, recipe.trains).values() for file in files}:
        is_in_use = Path.cwd().is_relative_to(folder.resolve())  # as data_dir=. of a project
        if place.is_relative_to(folder.resolve()) and not is_in_use:
            raise RecipeError(f"the output {output} lies among the data in {folder}; choose another output")
    if _is_foreign(output):
        if any(map(is_ours, output.glob("*/"))):
            raise RecipeError(LOST.format(output))
        raise RecipeError(f"{output} exists and is no output of an experiment; choose another, or an empty folder")
    for folder in (output / name for name in (*stages, "start")):
        if _is_foreign(folder):
            if _has_results(folder):
                raise RecipeError(LOST.format(folder))
            raise RecipeError(f"{folder} exists and no experiment made it; choose another output, or remove it")


def _is_foreign(folder: Path) -> bool:
    """Return whether a path holds something that no experiment made."""
    if is_ours(folder) or not os.path.lexists(folder):
        return False
    return not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir())


def _settings_by_folder(recipe: Recipe, stages: Sequence[str]) -> dict[Path, dict[str, Any]]:
    """Return the settings that decide the content of each folder of an experiment."""
    fields = {".": BASE, stages[0]: ()} | dict.fromkeys(stages[1:], CONVERTED)
    if recipe.again is not None:
        fields[stages[-1]] = (*CONVERTED, "again")
    tuned = recipe.tuning is not None
    settings = {train: settings_of(recipe, train) for train in {tuned, recipe.trains}}
    return {
        recipe.output / name: {field: settings[tuned or "again" in names][field] for field in names}
        for name, names in fields.items()
    }


def settings_of(recipe: Recipe, train: bool) -> dict[str, Any]:
    """Return the fields of a recipe as JSON, with digests of the files that it reads in place of their paths.

    Args:
        recipe: the experiment; models and data of the hub stay names.
        train: whether training data are read.

    Raises:
        RecipeError: a file cannot be read.
        DataError: the data are missing.
    """
    settings: dict[str, Any] = json.loads(json.dumps(asdict(recipe), default=str))
    try:
        if recipe.model is not None and (model := Path(recipe.model).expanduser()).is_dir():
            tokenizer = [path for path in sorted(model.iterdir()) if path.name in TOKENIZER]
            settings["model"] = _digests(
                [*model.glob("config.json"), *sorted(model.glob("*.safetensors")), *tokenizer]
            )
        if recipe.fresh is not None and isinstance(recipe.fresh.config, str):
            config = Path(recipe.fresh.config).expanduser() / "config.json"
            if config.is_file():
                settings["fresh"]["config"] = _digests([config])
        if recipe.data_dir is not None:
            files = _data_files(recipe, train)
            settings["data_dir"] = {split: _digests(paths) for split, paths in files.items()}
            settings["files"] = None
        texts = None if recipe.compression is None else text_file(recipe.calibration)
        if texts is not None and texts.expanduser().is_file():
            columns = split_columns(recipe.calibration)[1]
            settings["calibration"] = {"columns": columns, "file": _digests([texts.expanduser()])}
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        raise RecipeError(f"cannot read what {recipe.task} starts from: {error}") from error
    return settings


def _data_files(recipe: Recipe, train: bool) -> dict[str, list[Path]]:
    """Return split → files of the task; none from the hub."""
    if recipe.data_dir is None:
        return {}
    languages = recipe.translation
    return task_files(
        recipe.task,
        recipe.data_dir,
        source=languages.source,
        target=languages.target,
        files=recipe.files,
        train=train,
    )


def _digests(paths: Iterable[Path]) -> dict[str, list[list[str]]]:
    return {FILES: [[path.name, _digest(path)] for path in paths]}


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of the files in a folder."""
    if path.is_dir():
        return _folder_digest(path, "*")
    stat = path.stat()
    return _file_digest(path.resolve(), stat.st_size, stat.st_mtime_ns)


def _folder_digest(folder: Path, pattern: str) -> str:
    files = sorted(path for path in folder.rglob(pattern) if path.is_file())
    lines = (f"{path.relative_to(folder).as_posix()} {_digest(path)}\n" for path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@cache
def _file_digest(path: Path, size: int, changed: int) -> str:
    """Return the SHA-256 of a file; a process reads a file once until its size or time changes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _differing(marked: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields in which two settings differ, with the files that changed.

    Names of files, nulls and training arguments that do not decide a score do not count.
    """
    for name, value in wanted.items():
        if _comparable(name, marked.get(name)) != _comparable(name, value):
            before, now = list(_files(marked.get(name))), list(_files(value))
            pairs = zip(before, now, strict=True) if len(before) == len(now) else ()
            changed = dict.fromkeys(file for (_, old), (file, new) in pairs if old != new)
            yield f"{name} ({', '.join(changed)} changed)" if changed else name


def _comparable(name: str, setting: Any) -> Any:
    return _nameless(without_nulls(without_neutral(name, setting)))


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


def _nameless(value: Any) -> Any:
    """Return settings without the names of files."""
    if not isinstance(value, dict):
        return value
    return {
        name: [digest for _, digest in inner] if name == FILES else _nameless(inner) for name, inner in value.items()
    }


def _files(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each file in settings."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from map(tuple, inner) if name == FILES else _files(inner)


def refuse_moved(recipe: Recipe, commits: Mapping[str, str | None]) -> None:
    """Refuse a model or data of another commit than the finished stages were made with.

    Args:
        recipe: the experiment.
        commits: the present ones, by `hub_commits`.

    Raises:
        RecipeError: one has another commit now.
    """
    for folder, recorded in _recorded_commits(recipe.output):
        for name, now in commits.items():
            if now is not None and (before := recorded.get(name)) not in (None, now):
                way = f"pass revision={before}, or " if name == "model" else ""
                raise RecipeError(
                    f"{folder} was made with commit {before} of the {name} on the hub, which is at {now} now; "
                    f"{way}choose another output"
                )


def _recorded_commits(output: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield the folders of finished stages, with the commits of their models and data on the hub."""
    for path in sorted(output.glob("*/result.json")):
        yield path.parent, _stage_record(path).get("hub", {})


def hub_commits(model: Path, data: Mapping[str, Dataset]) -> dict[str, str | None]:
    """Return the commits that a model and a data set have on the hub; None where one is not from there.

    Args:
        model: directory, as of a snapshot in the hub's cache.
        data: split → rows, whose files `datasets` keeps in a folder named after the commit.
    """
    snapshot = SNAPSHOT.search(model.as_posix())
    files = [Path(file["filename"]).as_posix() for rows in data.values() for file in rows.cache_files]
    commits = {match[1] for match in map(PREPARED.search, files) if match}
    return {"model": snapshot and snapshot[1], "data": commits.pop() if len(commits) == 1 else None}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON, with null for numbers that are not finite."""
    write_json(path, mapped(_finite, record))


def read_record(path: Path) -> dict[str, Any]:
    """Read a JSON file.

    Raises:
        RecipeError: it is missing or not JSON.
    """
    return _parsed(_text(path), str(path))


def read_result(recipe: Recipe, stage: str) -> dict[str, Any]:
    """Read the record of a stage.

    Raises:
        RecipeError: it is missing, damaged, or of another experiment.
    """
    path = recipe.output / stage / "result.json"
    record = _stage_record(path)
    for name, wanted in (("task", recipe.task), ("stage", stage), ("seed", recipe.seed)):
        if record.get(name) != wanted:
            raise RecipeError(f"{path} has {name} {record.get(name)!r}, not {wanted!r}; choose another output")
    return record


def _stage_record(path: Path) -> dict[str, Any]:
    """Read the record of a stage, and check the fields that decide whether the stage is finished."""
    record = read_record(path)
    mappings = (record.get("metrics"), record.get("recipe"), *(record.get(name, {}) for name in ("hub", "measured")))
    scored = "score" in record and isinstance(record["score"], int | float | None)
    if not scored or not all(isinstance(value, dict) for value in mappings):
        raise RecipeError(f"{path} is no record of an experiment; remove it, or choose another output")
    return record


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Read many records: every `result.json` below a folder, or the lines of a file of records.

    Args:
        path: a folder with the outputs of experiments, or a file of `record_lines`.

    Returns:
        The path, or the file and line, of each record → the record, unchecked, in this order.

    Raises:
        RecipeError: there are none, or one cannot be read.
    """
    if path.is_dir():
        records = {str(file): read_record(file) for file in sorted(path.rglob("result.json"))}
        if not records:
            raise RecipeError(f"{path} holds no result.json; expected the outputs of experiments")
        return records
    if not path.is_file():
        raise RecipeError(f"{path} is no folder; expected one with the outputs of experiments, or a file of records")
    lines = enumerate(_text(path).split("\n"), 1)
    places = {f"{path}, line {number}": line for number, line in lines if line.strip()}
    if not places:
        raise RecipeError(f"{path} holds no records; expected one a line")
    return {place: _parsed(line, place) for place, line in places.items()}


def record_lines(records: Iterable[dict[str, Any]]) -> str:
    """Return records as JSON Lines, with null for numbers that are not finite."""
    return "".join(f"{json.dumps(mapped(_finite, record), ensure_ascii=False)}\n" for record in records)


def lacking(record: Mapping[str, Any], measures: Iterable[str]) -> list[str]:
    """Return the measures that are still to be taken; those that do not apply to the model count as taken."""
    return [name for name in measures if name not in record.get("measured", {})]


def _finite(value: Any) -> Any:
    """Return a value, or None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(path: Path) -> str:
    if not path.is_file():  # reading a pipe would wait for ever
        raise RecipeError(f"cannot read the record {path}: expected a regular file")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot read the record {path}: {error}") from error


def _parsed(text: str, place: str) -> dict[str, Any]:
    try:
        record: Any = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode()  # raises where an escape is half a character
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"cannot read the record {place}: {error}") from error
    if not isinstance(record, dict):
        raise RecipeError(f"{place} holds a {type(record).__name__}; expected the record of an experiment")
    return record


def environment() -> dict[str, Any]:
    """Return the versions of packages, the hardware, and the revision of this package.

    The mixed precision is that of `accelerate launch`; a recipe's own is among its training arguments.
    """
    state = process_state()
    return {
        **{name: version(name) for name in ("collab-compress", *LIBRARIES, *SCORERS)},
        "python": platform.python_version(),
        "processes": state.num_processes,
        "device": str(state.device),
        "threads": torch.get_num_threads(),
        "hardware": _hardware(),
        "mixed_precision": os.environ.get("ACCELERATE_MIXED_PRECISION", "no"),
        "revision": _revision(),
    }


def _hardware() -> str:
    """Return the name of the accelerator, or else of the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@cache
def _revision() -> str:
    """Return the commit of the code, or a digest of the library and of this package where no commit is known."""
    folders = (Path(collab_compress.__file__).parent, Path(__file__).parents[1])
    digests = "".join(_folder_digest(folder, "*.py") for folder in folders)
    return _checked_out() or f"sha256-{hashlib.sha256(digests.encode()).hexdigest()[:12]}"


def _checked_out() -> str | None:
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
