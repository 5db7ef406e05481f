"""What files say, so that an experiment is known by its data wherever they lie."""

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from collab_compress.checkpoint.directory import TOKENIZER_FILES
from collab_compress.errors import RecipeError
from collab_compress.experiments.recipe import Recipe
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
        if recipe.fresh is not None and recipe.fresh.config is not None:
            config = Path(recipe.fresh.config).expanduser() / "config.json"
            found["config"] = {"": _digests([config])} if config.is_file() else None
        if recipe.data_dir is not None:
            languages = recipe.translation
            files = task_files(
                recipe.task, recipe.data_dir, source=languages.source, target=languages.target, files=recipe.files,
                train=train,
            )  # fmt: skip
            found["data"] = {split: _digests(paths) for split, paths in files.items()}
        if recipe.compression is not None and recipe.calibration not in ("synthetic", "none"):
            texts = Path(recipe.calibration).expanduser()
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
    """Say which files are not what they were; their names and places do not count."""
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
