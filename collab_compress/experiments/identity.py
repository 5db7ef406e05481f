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
from collab_compress.checkpoint.directory import TOKENIZER_FILES, write_json
from collab_compress.errors import RecipeError
from collab_compress.experiments.recipe import Recipe, parse
from collab_compress.experiments.record import discard, forget, is_free, is_ours, lacking, locked, mark, read_record
from collab_compress.tasks import task_files

TOKENIZER = {*TOKENIZER_FILES, "merges.txt", "added_tokens.json", "special_tokens_map.json", "generation_config.json"}
Digests = dict[str, list[list[str]]]


def contents_of(recipe: Recipe, train: bool) -> dict[str, Any]:
    """Digest what an experiment reads: model, config, data and calibration file; nothing of the hub's, which stays.

    Args:
        recipe: of the experiment.
        train: whether training data are read.

    Raises:
        RecipeError: a file cannot be read.
        DataError: the data are not there.
    """
    found: dict[str, Digests | None] = {"tokenizer": None, "config": None, "data": None, "calibration": None}
    weights = None
    try:
        model = None if recipe.model is None else Path(recipe.model).expanduser()
        if model is not None and model.is_dir():
            weights = _joined([*model.glob("config.json"), *model.glob("*.safetensors")])
            found["tokenizer"] = {
                "": _digests(path for path in sorted(model.iterdir()) if path.name in TOKENIZER and path.is_file())
            }
        if recipe.fresh is not None and isinstance(recipe.fresh.config, str):
            config = Path(recipe.fresh.config).expanduser() / "config.json"
            found["config"] = {"": _digests([config])} if config.is_file() else None
        if recipe.data_dir is not None:
            languages = recipe.translation
            files = task_files(
                recipe.task, recipe.data_dir, source=languages.source, target=languages.target, files=recipe.files,
                train=train,
            )  # fmt: skip
            found["data"] = {split: _digests(paths) for split, paths in files.items()}
        if recipe.compression is not None and (file := text_file(recipe.calibration)) is not None:
            texts = file.expanduser()
            found["calibration"] = {"": _digests([texts])} if texts.is_file() else None
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of nobody
        raise RecipeError(f"cannot read what {recipe.task} starts from: {error}") from error
    return {"weights": weights, "contents": found}


def differing_contents(there: dict[str, Any], wanted: dict[str, Any], fields: tuple[str, ...]) -> list[str]:
    """Name in what two notes of an experiment differ; where both have digests, paths do not count.

    Args:
        there: fields of the recipe, with the digests of model and files.
        wanted: the same.
        fields: which to compare.
    """
    old, new = ({**(note["contents"] or {}), "weights": note["weights"]} for note in (there, wanted))

    def digested(name: str) -> bool:
        return old.get(name) is not None and new.get(name) is not None

    differing = []
    for name in fields:
        one, other = there[name], wanted[name]
        if name == "model" and digested("weights"):
            if old["weights"] != new["weights"]:
                differing.append("model (its files have changed)")
            elif digested("tokenizer") and (changed := _changed(old["tokenizer"], new["tokenizer"])):
                differing.append(f"model ({changed})")
            continue
        if name in ("data_dir", "files") and digested("data"):
            if name == "data_dir" and (changed := _changed(old["data"], new["data"])):
                differing.append(f"data set ({changed})")
            continue
        if name == "calibration" and digested("calibration"):
            if changed := _changed(old["calibration"], new["calibration"]):
                differing.append(f"calibration ({changed})")
            continue
        if name == "fresh" and digested("config"):
            if changed := _changed(old["config"], new["config"]):
                differing.append(f"fresh.config ({changed})")
            one, other = ({**value, "config": None} for value in (one, other))
        if one != other:
            differing.append(name)
    return differing


def _changed(old: Digests, new: Digests) -> str:
    """Name the files whose contents changed; their names and places do not count."""
    changed = []
    for split in [*new, *(split for split in old if split not in new)]:
        one, other = old.get(split, []), new.get(split, [])
        if len(one) == len(other):
            changed += [name for (_, before), (name, now) in zip(one, other, strict=True) if before != now]
        else:
            changed.append(split or "files")
    return f"{', '.join(dict.fromkeys(changed))} changed" if changed else ""


def _digests(paths: Iterable[Path]) -> list[list[str]]:
    return [[path.name, _digest(path)] for path in paths]


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
NOTES = ("weights", "contents")  # beside the fields of the recipe


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
    described = json.loads(json.dumps(asdict(recipe), default=str))
    if recipe.data_dir is not None:
        described["data_dir"] = str(recipe.data_dir.resolve())
    wanted = {train: contents_of(recipe, train) for train in {recipe.trains, recipe.tuning is not None}}
    folders = [(folder, fields, {**described, **wanted[train]}) for folder, fields, train in _folders(recipe)]

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
    try:
        noted = _parsed(there, str(path))
        if any(commits.get("model") == wanted["revision"] for _, commits in _hub_commits(Path(wanted["output"]))):
            noted["revision"] = wanted["revision"] or noted["revision"]  # the same by another name, or by none
        differing = differing_contents(noted, _parsed(wanted), fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecipeError(f"{path} is not as an experiment notes it: {error}") from error
    if differing and any(_made(folder)):
        raise RecipeError(f"{folder} was made with another {', '.join(differing)}; choose another output")
    return bool(differing) or not is_ours(folder)


def _parsed(noted: dict[str, Any], where: str = "the recipe") -> dict[str, Any]:
    """Return all fields of a noted recipe, defaults included, and the notes beside them."""
    fields = {name: value for name, value in noted.items() if name not in NOTES}
    return {**asdict(parse(Recipe, fields, where)), **{name: noted.get(name) for name in NOTES}}


def _made(folder: Path) -> Iterator[Path]:
    """Yield the models, records and checkpoints in a folder and in the folders of its stages."""
    for place in (folder, *folder.glob("*/")):
        yield from place.glob("model")
        yield from place.glob("result.json")
        yield from place.glob("checkpoints/checkpoint-*")
