"""Write a directory or a file beside its final place, and rename it when it is whole; what a directory holds."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from collab_compress.errors import CheckpointError

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model",
    "source.spm",
)  # fmt: skip


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `path` if the block succeeds, and is removed if it does not.

    A process killed outright can leave its working directory `.<name>.partial-<pid>`, never `path`; the next write
    to the same path clears those whose process is gone.

    Args:
        path: where the result is wanted; must not exist.

    Raises:
        CheckpointError: `path` exists, or nothing can be written there.
    """
    refuse_existing(path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear_abandoned(path)
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        yield partial
        refuse_existing(path)
        partial.rename(path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if not path.exists():
            for parent in missing:
                with suppress(OSError):
                    parent.rmdir()


def write_whole(path: Path, text: str) -> None:
    """Write text beside `path` and rename it when it is whole; a file that is there is replaced.

    Args:
        path: where the file is wanted; directories that are missing are made.
        text: what to write.

    Raises:
        CheckpointError: nothing can be written there.
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def write_whole_json(path: Path, value: Any) -> None:
    """Write JSON as `write_whole` writes text; what JSON has no form for is written as its `str`."""
    write_whole(path, json.dumps(value, indent=2, default=str) + "\n")


def has_tokenizer(directory: Path) -> bool:
    """Say whether a model directory holds a tokenizer; Transformers may make up an empty one where it does not."""
    return any((directory / name).exists() for name in TOKENIZER_FILES)


def refuse_existing(path: Path) -> None:
    """Refuse to overwrite.

    Raises:
        CheckpointError: something is at `path`.
    """
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} exists; choose another output or remove it")


def _clear_abandoned(path: Path) -> None:
    for left in path.parent.glob(f".{path.name}.partial-*"):
        pid = left.name.rpartition("-")[2]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        return psutil.pid_exists(pid)  # os.kill(pid, 0) would end the process on Windows
    except OverflowError:  # no number that a process has, so not what we wrote
        return True
