"""Which experiment a folder holds, so that results of two are never taken for one another."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from collab_compress.calibration.batches import text_file
from collab_compress.calibration.files import split_columns
from collab_compress.checkpoint.directory import TOKENIZER_FILES, write_json
from collab_compress.errors import RecipeError
from collab_compress.experiments.recipe import Recipe, expanded
from collab_compress.experiments.record import discard, forget, is_free, is_ours, lacking, locked, mark, read_record
from collab_compress.tasks import task_files

TOKENIZER = {*TOKENIZER_FILES, "merges.txt", "added_tokens.json", "special_tokens_map.json", "generation_config.json"}
FILES = "sha256"
"""Key of a list of files, each its name and digest, that stands in place of a path in the settings of a recipe."""


def settings_of(recipe: Recipe, train: bool) -> dict[str, Any]:
    """Return the fields of a recipe in JSON types, with digests of the files that it reads in place of their paths.

    Models and data on the hub stay names.

    Args:
        recipe: of the experiment.
        train: whether training data are read.

    Raises:
        RecipeError: a file cannot be read.
        DataError: the data are not there.
    """
    settings: dict[str, Any] = json.loads(json.dumps(asdict(recipe), default=str))
    try:
        if recipe.model is not None and (model := expanded(Path(recipe.model))).is_dir():
            names = (path for path in sorted(model.iterdir()) if path.name in TOKENIZER and path.is_file())
            settings["model"] = _digests([*model.glob("config.json"), *sorted(model.glob("*.safetensors")), *names])
        if recipe.fresh is not None and isinstance(recipe.fresh.config, str):
            config = expanded(Path(recipe.fresh.config)) / "config.json"
            if config.is_file():
                settings["fresh"]["config"] = _digests([config])
        if recipe.data_dir is not None:
            languages = recipe.translation
            files = task_files(
                recipe.task, recipe.data_dir, source=languages.source, target=languages.target, files=recipe.files,
                train=train,
            )  # fmt: skip
            settings["data_dir"] = {split: _digests(paths) for split, paths in files.items()}
            settings["files"] = None
        file = None if recipe.compression is None else text_file(recipe.calibration)
        if file is not None and expanded(file).is_file():
            columns = split_columns(str(recipe.calibration))[1]
            digests = _digests([expanded(file)])
            settings["calibration"] = {"columns": columns, "file": digests} if columns else digests
    except OSError as error:
        raise RecipeError(f"cannot read what {recipe.task} starts from: {error}") from error
    return settings


def _differing(there: Mapping[str, Any], wanted: Mapping[str, Any], fields: Iterable[str]) -> Iterator[str]:
    """Yield the fields in which two settings differ, with the files that changed; names of files do not count."""
    for name in fields:
        old, new = there.get(name), wanted[name]
        if _nameless(old) == _nameless(new):
            continue
        before, now = list(_files(old)), list(_files(new))
        pairs = zip(before, now, strict=True) if len(before) == len(now) else ()
        changed = [file for (_, digest), (file, present) in pairs if digest != present]
        yield f"{name} ({', '.join(dict.fromkeys(changed))} changed)" if changed else name


def _nameless(value: Any) -> Any:
    """Return settings without the names of files."""
    if not isinstance(value, dict):
        return value
    if FILES in value:
        return [digest for _, digest in _files(value)]
    return {name: _nameless(inner) for name, inner in value.items()}


def _files(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each file in settings."""
    if isinstance(value, dict):
        yield from map(tuple, value.get(FILES, ()))
        for inner in value.values():
            yield from _files(inner)


def _digests(paths: Iterable[Path]) -> dict[str, list[list[str]]]:
    return {FILES: [[path.name, _digest(path)] for path in paths]}


def _digest(path: Path) -> str:
    """Digest a file, or the files in a folder with their names."""
    if not path.is_dir():
        return _joined([path])
    files = sorted(inner for inner in path.rglob("*") if inner.is_file())
    lines = (f"{inner.relative_to(path)} {_joined([inner])}\n" for inner in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _joined(paths: Iterable[Path]) -> str:
    """Digest the contents of files, one after another in the order of their paths."""
    stats = [(path.resolve(), path.stat()) for path in sorted(paths)]
    return _read(tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats))


@cache
def _read(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Digest files; those whose size and time have not changed are read once in a process."""
    digest = hashlib.sha256()
    for path, _, _ in files:
        with path.open("rb") as file:
            while part := file.read(1 << 24):
                digest.update(part)
    return digest.hexdigest()


BASE = (
    "task", "model", "revision", "fresh", "data_dir", "files", "seed", "max_length", "tuning", "heads", "translation",
)  # fmt: skip
CONVERTED = (*BASE, "compression", "calibration", "calibration_options", "recovery")


@contextmanager
def reserve_output(recipe: Recipe, stages: Sequence[str]) -> Iterator[bool]:
    """Hold an experiment's folders, and note in them what is done there, or check that it is the same.

    A folder is ours that has our mark. Where the work ends in an error before anything was made, the notes go too.
    Where all stages are finished, and measured, nothing is written.

    Args:
        recipe: of the experiment.
        stages: names of its stages.

    Yields:
        Whether all stages are finished.

    Raises:
        RecipeError: a folder is not ours, holds something else, naming what differs, or another process works there.
        DataError: the data are not there.
    """
    output = recipe.output
    wanted = {train: settings_of(recipe, train) for train in {recipe.trains, recipe.tuning is not None}}
    folders = [(folder, fields, wanted[train]) for folder, fields, train in _folders(recipe)]

    def to_note() -> list[tuple[Path, dict[str, Any]]]:
        _refuse_foreign(recipe, stages)
        return [(folder, noted) for folder, fields, noted in folders if _differs(folder, noted, fields)]

    def finished() -> bool:
        return all(
            (output / stage / "result.json").is_file()
            and (not recipe.measures or not lacking(read_result(recipe, stage), recipe.measures))
            for stage in stages
        )

    with ExitStack() as held:
        with _usable(output):
            _refuse_inside(recipe)
            noting = to_note()
            if noting or not finished():
                held.enter_context(locked(output))
                noting = to_note()  # again, for another process may have been there
                held.callback(_clear, recipe, stages)
                if not any(_made(output)):
                    discard(output / "start")
                for folder, noted in noting:
                    mark(folder)
                    write_json(folder / "recipe.json", noted)
        yield finished()


def _clear(recipe: Recipe, stages: Sequence[str]) -> None:
    """Remove the notes of folders in which nothing was made."""
    for name in stages:
        forget(recipe.output / name)
    if not any(_made(recipe.output)):
        discard(recipe.output / "start")
        forget(recipe.output, remove=False)  # `locked` does so if it made it


@contextmanager
def _usable(output: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise RecipeError(f"cannot use {output} as output: {getattr(error, 'strerror', None) or error}") from error


def read_result(recipe: Recipe, stage: str) -> dict[str, Any]:
    """Read the record of a stage.

    Raises:
        RecipeError: it is not there, or is that of something else.
    """
    path = recipe.output / stage / "result.json"
    record: Any = read_record(path)
    if not isinstance(record, dict) or not (
        {"score", "metrics", "recipe"} <= record.keys() and isinstance(record["score"], int | float | None)
    ):
        raise RecipeError(f"{path} is no record of an experiment; remove it, or choose another output")
    for name, wanted in (("task", recipe.task), ("stage", stage), ("seed", recipe.seed)):
        if record.get(name) != wanted:
            raise RecipeError(f"{path} has {name} {record.get(name)!r}, not {wanted!r}; choose another output")
    return record


def refuse_moved(recipe: Recipe, hub: Mapping[str, str | None]) -> None:
    """Refuse to go on with another model or data set than something in the output was made with.

    Args:
        recipe: of the experiment.
        hub: what is read now; `collab_compress.experiments.record.hub_commits` gives it.

    Raises:
        RecipeError: one is at another commit on the hub now.
    """
    for folder, commits in _hub_commits(recipe.output):
        for name, now in hub.items():
            if now is not None and (before := commits.get(name)) not in (None, now):
                way = f"pass revision={before}, or " if name == "model" else ""
                raise RecipeError(
                    f"{folder} was made with commit {before} of the {name} on the hub, which is at {now} now; "
                    f"{way}choose another output"
                )


def _hub_commits(output: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield the folders of finished stages in an output, with the commits that they were made with."""
    for path in sorted(output.glob("*/result.json")):
        record: Any = read_record(path)
        if isinstance(record, dict) and isinstance(record.get("hub"), dict):
            yield path.parent, record["hub"]


def _folders(recipe: Recipe) -> list[tuple[Path, tuple[str, ...], bool]]:
    """List an experiment's folders, the settings that decide what is in them, and whether training data do."""
    name, tuned = recipe.conversion_name, recipe.tuning is not None
    folders: list[tuple[Path, tuple[str, ...], bool]] = [(recipe.output, BASE, tuned)]
    if name is not None:
        folders.append((recipe.output / name, CONVERTED, tuned))
    if recipe.again is not None:
        folders.append((recipe.output / f"{name}-again", (*CONVERTED, "again"), True))
    return folders


def _refuse_inside(recipe: Recipe) -> None:
    """Refuse a model in the output, which would be taken for a part of the experiment."""
    config = None if recipe.fresh is None else recipe.fresh.config
    for name in (recipe.model, config):
        if (
            isinstance(name, str)
            and Path(name).is_dir()
            and Path(name).resolve().is_relative_to(recipe.output.resolve())
        ):
            raise RecipeError(f"the model {name} lies in the output {recipe.output}; choose another output")


def _refuse_foreign(recipe: Recipe, stages: Sequence[str]) -> None:
    """Refuse folders that are there and are not ours.

    Raises:
        RecipeError: naming one.
    """
    output = recipe.output
    if not is_free(output) and not is_ours(output):
        raise RecipeError(f"{output} is there, and is no output of an experiment; choose another, or an empty folder")
    names = [*stages, *(f"{stage}/checkpoints" for stage in stages), *(["start"] if recipe.fresh else [])]
    for folder in (output / name for name in names):
        if not is_free(folder) and not is_ours(folder):
            raise RecipeError(f"{folder} is there, and no experiment made it; choose another output, or remove it")


def _differs(folder: Path, wanted: dict[str, Any], fields: tuple[str, ...]) -> bool:
    """Return whether the notes of a folder are still to be written.

    Raises:
        RecipeError: something was made there with other fields or data.
    """
    path = folder / "recipe.json"
    if not path.is_file():
        if any(_made(folder)):
            raise RecipeError(
                f"{folder} has lost its recipe.json, so what was made there is not known; choose another output"
            )
        return True
    there = read_record(path)
    if not isinstance(there, dict):
        raise RecipeError(f"{path} holds a {type(there).__name__}; expected what an experiment noted")
    if any(commits.get("model") == wanted["revision"] for _, commits in _hub_commits(Path(wanted["output"]))):
        there["revision"] = wanted["revision"] or there.get("revision")  # the same by another name, or by none
    try:
        differing = list(_differing(there, wanted, fields))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{path} is not as an experiment notes it: {error}") from error
    if differing and any(_made(folder)):
        raise RecipeError(f"{folder} was made with another {', '.join(differing)}; choose another output")
    return bool(differing) or not is_ours(folder)


def _made(folder: Path) -> Iterator[Path]:
    """Yield the models, records and checkpoints in a folder and in the folders of its stages."""
    for place in (folder, *folder.glob("*/")):
        yield from place.glob("model")
        yield from place.glob("result.json")
        yield from place.glob("checkpoints/checkpoint-*")
