"""Files and directories that are written as a whole: beside their place, then renamed; and the lock of a folder."""

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from collab_compress.errors import CheckpointError, CollabCompressError

RUST_OS_ERROR = re.compile(r"\(os error \d+\)")  # in errors of safetensors and tokenizers, such as a full disk


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which is renamed to `path` if the block succeeds, and removed if it fails.

    A process that is killed can leave `.<name>.partial-<random>`, never `path`. Missing directories are made. Raises
    a CheckpointError if `path` exists or cannot be written.
    """
    refuse_existing(path)
    final = resolved(path)
    with _write_errors(path), _partial(final) as partial:
        yield partial
        refuse_existing(path)
        partial.rename(final)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `path`, as `atomic_file` does with a file."""
    with atomic_file(path) as partial:
        partial.mkdir()
        yield partial


def write_new(path: Path, text: str) -> None:
    """Write text to a file that must not exist, by `atomic_file`."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write to a file, replacing an earlier one as a whole, which keeps its permissions; refuse what is no file."""
    with _write_errors(path):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise CheckpointError(f"cannot write {path}: it is no regular file")
        with _partial(path) as partial:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
            if path.exists():
                shutil.copymode(path, partial)
            partial.replace(path)


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON, by `write_atomically`."""
    write_atomically(path, to_json(value))


def to_json(value: object) -> str:
    """Return a value as JSON for a file; values that JSON cannot hold become strings."""
    return json.dumps(value, indent=2, default=str) + "\n"


def mapped(leaf: Callable[[Any], Any], value: Any) -> Any:
    """Apply `leaf` to every value in nested mappings and lists; tuples become lists."""
    if isinstance(value, Mapping):
        return {name: mapped(leaf, inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(leaf, inner) for inner in value]
    return leaf(value)


def refuse_existing(path: Path) -> None:
    """Refuse to overwrite anything: a file, a directory, a link, a device or a pipe."""
    with _write_errors(path):
        if os.path.lexists(path) or os.path.lexists(resolved(path)):  # `new/..` exists, though `new` does not
            raise CheckpointError(f"{path} exists; choose another output or remove it")


def refuse_place(path: Path, *inputs: Path) -> None:
    """Refuse an output that exists, lies in one of `inputs`, or cannot be written, before the work starts."""
    refuse_existing(path)
    with _write_errors(path):
        final = resolved(path)
        for read in inputs:
            if final.is_relative_to(resolved(read)):
                raise CheckpointError(f"{path} lies in {read}, which is read; choose an output elsewhere")
        parent = next(parent for parent in final.parents if os.path.lexists(parent))
        if not parent.is_dir():
            raise CheckpointError(f"cannot write {path}: {parent} is not a directory")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise CheckpointError(f"cannot write {path}: Permission denied")


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Raise errors of the file system, including those of Rust libraries, as `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
    except Exception as error:
        if isinstance(error, CheckpointError) or not RUST_OS_ERROR.search(str(error)):
            raise
        raise CheckpointError(f"cannot write {path}: {error}") from error


def resolved(path: Path) -> Path:
    """Resolve links and `..`; unlike `Path.resolve`, a circle of links raises no error."""
    return Path(os.path.realpath(path))


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """Yield a unique path beside `path`, in a directory that is made if it is missing; remove what is left there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{uuid.uuid4().hex[:12]}")
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            partial.unlink()


@contextmanager
def locked(folder: Path, name: str, error: type[CollabCompressError]) -> Iterator[None]:
    """Lock a folder, made if needed, against other processes; the lock ends with this one, even if that is killed.

    `name` is that of the lock's file in it. Raises `error` if another process holds the lock.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = FileLock(folder / name, is_singleton=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout as timeout:
            raise error(f"another process is at work in {folder}; wait for it, or choose another output") from timeout
        try:
            yield
        finally:
            with suppress(OSError):
                (folder / name).unlink()  # before its release, so that a waiting process makes a new file
            lock.release()
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
