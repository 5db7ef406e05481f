"""Read recipes from YAML files and settings such as `compression.rank=128`."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from dacite import Config, DaciteError, from_dict

from collab_compress.errors import CollabCompressError, RecipeError
from collab_compress.experiments.recipe import Recipe

Described = TypeVar("Described")


def read_recipe(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a YAML file and settings such as `compression.rank=128` or `heads.drophead=[{p: 0.2}]`.

    Args:
        path: the file; settings alone if not given.
        overrides: `field=value` each, with dots between the fields of nested ones; values are YAML.

    Raises:
        RecipeError: the file cannot be read, a field is not known, or a value is none for its field.
    """
    return parse(Recipe, read_settings(path, overrides), str(path) if path is not None else "the recipe")


def read_settings(path: str | Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Read nested fields from a YAML file, and set some of them.

    Raises:
        RecipeError: the file cannot be read, or a setting is none.
    """
    data = _load(Path(path)) if path is not None else {}
    for override in overrides:
        _set(data, override)
    return data


def parse(described: type[Described], data: Mapping[str, Any], where: str) -> Described:
    """Build a dataclass from nested fields.

    Raises:
        RecipeError: a field is not known or missing, or a value is none for it; `where` says where it stands.
    """
    try:
        return from_dict(described, data, Config(strict=True, cast=[Path, tuple], type_hooks=HOOKS))
    except (CollabCompressError, DaciteError, TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"{where}: {_line(error)}") from error


def _load(path: Path) -> dict[str, Any]:
    try:
        data = _yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {_line(error)}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path} holds a {type(data).__name__}; expected fields and their values")
    return data


def _set(data: dict[str, Any], override: str) -> None:
    """Set one field of nested mappings, in place."""
    name, equals, text = override.partition("=")
    *outer, last = name.split(".")
    if not equals or not all((*outer, last)):
        raise RecipeError(f"{override!r} sets nothing; expected field=value, as in compression.rank=128")
    inner: Any = data
    for part in outer:
        found = inner.get(part) or {}
        if not isinstance(found, Mapping):
            raise RecipeError(f"{override!r}: {part} is {found!r}, which has no fields")
        inner[part] = dict(found)  # a copy: an alias in the file may have it stand elsewhere too
        inner = inner[part]
    try:
        inner[last] = _yaml(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{override[:80]!r}: the value is not YAML: {_line(error)}") from error


def _yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def _line(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(number := float(value)):
        raise ValueError(f"got {value}; expected a finite number")
    return number


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as a number, as YAML 1.2 does and 1.1 does not."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)
HOOKS: dict[Any, Any] = {
    float: _finite,
    tuple[str, ...]: lambda value: (value,) if isinstance(value, str) else value,
}
