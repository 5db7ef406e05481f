"""Folders that experiments make: a mark in each tells them from anyone else's, and a lock keeps two runs apart."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from collab_compress.checkpoint.directory import write_json
from collab_compress.errors import RecipeError

MARK = ".collab-experiment.json"
LOCK = ".collab-experiment.lock"
MARKED = {"made_by": "collab_compress.experiments", "format": 1}


def mark(folder: Path) -> None:
    """Make a folder if it is not there, and mark it as made by an experiment."""
    write_json(folder / MARK, MARKED)


def is_ours(folder: Path) -> bool:
    """Say whether an experiment made a folder."""
    try:
        return bool(json.loads((folder / MARK).read_text(encoding="utf-8")) == MARKED)
    except (OSError, ValueError, RecursionError):
        return False


def is_free(folder: Path) -> bool:
    """Say whether a folder is not there, or empty."""
    if not folder.exists() and not folder.is_symlink():
        return True
    return folder.is_dir() and all(path.name == LOCK for path in folder.iterdir())


def discard(folder: Path) -> None:
    """Remove a folder that an experiment made; anyone else's stays."""
    if is_ours(folder) and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)


def forget(folder: Path, remove: bool = True) -> None:
    """Remove a folder that an experiment made where nothing but its notes and other such folders is in it.

    Args:
        folder: it stays if it is not ours.
        remove: whether the folder goes too; its notes alone if not, as for one that may have been there before.
    """
    if not is_ours(folder):
        return
    for inner in folder.glob("*/"):
        forget(inner)
    notes = {folder / name for name in (MARK, LOCK, "recipe.json")}
    if set(folder.iterdir()) <= notes:
        for path in notes:
            path.unlink(missing_ok=True)
        if remove:
            folder.rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made if it is not there, and removed if it is left empty.

    The lock is the operating system's: it goes with the process that holds it, however that ends.

    Raises:
        RecipeError: another process is at work there.
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
                (folder / LOCK).unlink()  # before it is let go of: whoever waits for it makes a new one
            lock.release()
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
