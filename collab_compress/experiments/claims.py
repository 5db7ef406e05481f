"""Which experiment a folder holds, so that results of two are never taken for one another."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from collab_compress.checkpoint.directory import write_whole_json
from collab_compress.errors import RecipeError
from collab_compress.experiments.reading import parse
from collab_compress.experiments.recipe import Recipe
from collab_compress.experiments.record import read_record

BASE = ("task", "model", "fresh", "data_dir", "files", "seed", "max_length", "tuning", "heads", "translation")
CONVERTED = (*BASE, "compression", "calibration", "recovery")
WEIGHTS = "weights"


def claim(recipe: Recipe) -> None:
    """Note in an experiment's folders what is done there, or check that it is the same.

    A folder where nothing was made is free.

    Raises:
        RecipeError: something else was done there, naming the fields that differ.
    """
    described = json.loads(json.dumps(asdict(recipe), default=str))
    if recipe.data_dir is not None:
        described["data_dir"] = str(recipe.data_dir.expanduser().resolve())
    described[WEIGHTS] = None if recipe.model is None else _digest(Path(recipe.model).expanduser())
    wanted = _parsed(described, "the recipe")
    for folder, fields in _folders(recipe):
        if _differs(folder, wanted, (*fields, WEIGHTS)):
            shutil.rmtree(folder / "start", ignore_errors=True)
            write_whole_json(folder / "recipe.json", described)


def _folders(recipe: Recipe) -> list[tuple[Path, tuple[str, ...]]]:
    """List the folders of an experiment, with the settings that decide what is in them."""
    folders: list[tuple[Path, tuple[str, ...]]] = [(recipe.output, BASE)]
    name = recipe.conversion_name
    if name is not None:
        folders.append((recipe.output / name, CONVERTED))
    if recipe.again is not None:
        folders.append((recipe.output / f"{name}-again", (*CONVERTED, "again")))
    return folders


def _differs(folder: Path, wanted: dict[str, Any], fields: tuple[str, ...]) -> bool:
    """Say whether a folder is still to be noted as that of an experiment.

    Raises:
        RecipeError: something was made there with other fields.
    """
    path = folder / "recipe.json"
    if not path.is_file():
        return True
    there = _parsed(read_record(path), str(path))
    differing = [name for name in fields if there[name] != wanted[name]]
    if differing and any(_made(folder)):
        named = ", ".join("model (its files have changed)" if name == WEIGHTS else name for name in differing)
        raise RecipeError(f"{folder} was made with another {named}; choose another output")
    return bool(differing)


def _parsed(described: dict[str, Any], where: str) -> dict[str, Any]:
    """Give all fields, those that are not written down too."""
    fields = {name: value for name, value in described.items() if name != WEIGHTS}
    return {**asdict(parse(Recipe, fields, where)), WEIGHTS: described.get(WEIGHTS)}


def _digest(model: Path) -> str | None:
    """Tell a model directory's config and weights from others; None for names on the hub, whose weights stay."""
    if not model.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted([*model.glob("config.json"), *model.glob("*.safetensors")]):
        with path.open("rb") as file:
            while part := file.read(1 << 24):
                digest.update(part)
    return digest.hexdigest()


def _made(folder: Path) -> Iterator[Path]:
    """Find what took work to make, in a folder and in those of its stages."""
    for place in (folder, *folder.glob("*/")):
        yield from place.glob("model")
        yield from place.glob("result.json")
        yield from place.glob("checkpoints/checkpoint-*")
