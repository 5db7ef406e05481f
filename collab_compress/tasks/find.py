"""Find a task's files in a folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from collab_compress.errors import DataError
from collab_compress.tasks.layouts import Layout
from collab_compress.tasks.task import Task

Languages = tuple[str, str] | None


@dataclass(frozen=True)
class Found:
    """A layout, and for each split that is there the files of its parts."""

    layout: Layout
    splits: dict[str, list[tuple[Path, ...]]]


def find_files(task: Task, data_dir: Path, languages: Languages, splits: Sequence[str] | None) -> Found:
    """Find the files of a task, laid out in one of several ways.

    Args:
        task: the task.
        data_dir: the task's folder, or one that holds it.
        languages: of the source and the target, for translation.
        splits: which to find, all needed; every split, the optional ones where they are there, if not given.

    Raises:
        DataError: no such folder, or files are missing; says what was expected.
    """
    layouts = task.layouts
    if not data_dir.is_dir():
        raise DataError(f"{task.name}: no folder {data_dir}; {expected_files(layouts, languages)}")
    names = list(dict.fromkeys(split for layout in layouts for split in layout.files))
    if unknown := [split for split in splits or () if split not in names]:
        raise DataError(f"{task.name} has no split {unknown[0]!r}; expected {', '.join(names)}")
    folders = [data_dir / name for name in task.folders if (data_dir / name).is_dir()] + [data_dir]
    best: tuple[int, str, Layout, Path] | None = None
    for folder in folders:
        for layout in layouts:
            there, missing = _look(layout, folder, languages, splits)
            if there and not missing:
                return Found(layout, there)
            if there and (best is None or len(there) > best[0]):
                best = len(there), missing[0], layout, folder
    if best is not None:
        raise DataError(f"{task.name}: no {best[1]} in {best[3]}; {expected_files([best[2]], languages)}")
    looked = ", ".join(str(folder) for folder in folders)
    of = f" of {', '.join(splits)}" if splits else ""
    raise DataError(f"{task.name}: none of its files{of} in {looked}; {expected_files(layouts, languages)}")


def _look(
    layout: Layout, folder: Path, languages: Languages, splits: Sequence[str] | None
) -> tuple[dict[str, list[tuple[Path, ...]]], list[str]]:
    """Give the files of the splits that are there, and the names of those that are needed and missing."""
    there, missing = {}, []
    for split in splits or layout.files:
        parts = [_first(layout.candidates(part, languages), folder) for part in layout.files.get(split, ())]
        if parts and all(part is not None for part in parts):
            there[split] = [part for part in parts if part is not None]
        elif splits or split not in layout.optional or _begun(layout, folder, languages, split):
            missing.append(_missing(layout, folder, languages, split, parts))
    return there, missing


def _missing(
    layout: Layout, folder: Path, languages: Languages, split: str, parts: Sequence[tuple[Path, ...] | None]
) -> str:
    """Name the first file that a split lacks."""
    for part, found in zip(layout.files.get(split, ()), parts, strict=True):
        if found is None:
            names = layout.candidates(part, languages)[0]
            return f"{next(name for name in names if _there(folder / name) is None)} ({split})"
    return f"files of {split}"


def _begun(layout: Layout, folder: Path, languages: Languages, split: str) -> bool:
    """Say whether some of a split's files are there, though not all."""
    groups = (layout.candidates(part, languages) for part in layout.files[split])
    return any(_there(folder / name) for candidates in groups for names in candidates for name in names)


def _first(candidates: Sequence[tuple[str, ...]], folder: Path) -> tuple[Path, ...] | None:
    """Give the first of several groups of files that is there."""
    for names in candidates:
        files = [_there(folder / name) for name in names]
        if all(file is not None for file in files):
            return tuple(file for file in files if file is not None)
    return None


def _there(path: Path) -> Path | None:
    packed = path.with_name(f"{path.name}.gz")
    return path if path.exists() else packed if packed.is_file() else None


def expected_files(layouts: Sequence[Layout], languages: Languages) -> str:
    """Say which files make up a task, in each of its layouts."""
    ways = []
    for layout in layouts:
        names = []
        for split, parts in layout.files.items():
            files = " and ".join(name for part in parts for name in layout.candidates(part, languages)[0])
            names.append(f"[{files}]" if split in layout.optional else files)
        ways.append(", ".join(names))
    return f"expected {' or '.join(ways)} (plain or with .gz, those in brackets where there are any)"
