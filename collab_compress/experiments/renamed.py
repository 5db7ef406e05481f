"""What settings of recipes were called in earlier revisions, whose records and folders can still be read."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Path = tuple[str, ...]
RENAMED: dict[Path, str] = {
    ("compression", "rank"): "dk",
    ("fresh", "attention", "rank"): "dk",
    ("heads", "penalties", "loss"): "name",
    ("heads", "alphas", "frozen"): "frozen_ratio",
}
"""Fields of a recipe, by their old names; those of a list are those of its items."""

RENAMED_VALUES: dict[Path, tuple[str, str]] = {("heads", "penalties", "name"): ("disagreement", "agreement")}
"""Settings (by the names of today) → how their values began, and begin now."""


def with_todays_names(settings: Any) -> Any:
    """Give a recipe's settings by the names of today; what is no recipe is given as it is.

    Args:
        settings: fields of a recipe, nested, as JSON or YAML has them.
    """
    return _walk(settings, (), lambda old, new: None)


def older_names(settings: Any) -> Iterator[tuple[str, str]]:
    """Find the settings of a recipe that stand there by an old name, or with one: what they say, and say now."""
    found: list[tuple[str, str]] = []
    _walk(settings, (), lambda old, new: found.append((old, new)))
    yield from found


def _walk(value: Any, path: Path, note: Callable[[str, str], None]) -> Any:
    if isinstance(value, Mapping):
        todays = {}
        for name, inner in value.items():
            today = str(RENAMED.get((*path, str(name)), name))
            if today != name:
                note(".".join((*path, name)), ".".join((*path, today)))
            todays[today] = _walk(inner, (*path, today), note)
        return todays
    if isinstance(value, list | tuple):
        return [_walk(item, path, note) for item in value]
    old, new = RENAMED_VALUES.get(path, ("", ""))
    if old and isinstance(value, str) and value.startswith(old):
        named = new + value.removeprefix(old)
        note(f"{'.'.join(path)} {value}", named)
        return named
    return value
