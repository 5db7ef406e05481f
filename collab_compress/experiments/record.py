"""Outputs of experiments: marked and locked folders, and records of results and versions."""

import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from filelock import FileLock, Timeout
from huggingface_hub import try_to_load_from_cache

from collab_compress.checkpoint.directory import write_json
from collab_compress.distributed import process_state
from collab_compress.errors import BusyError, RecipeError

MARK = ".collab-experiment.json"
LOCK = ".collab-experiment.lock"
MARKED = {"made_by": "collab_compress.experiments", "format": 1}
PACKAGES = (
    "collab-compress", "torch", "transformers", "accelerate", "datasets", "tokenizers", "evaluate", "sacrebleu",
    "scikit-learn", "scipy",
)  # fmt: skip
CHECKOUT = Path(__file__).parents[2]
SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})/config\.json$")  # in the hub's cache
PREPARED = re.compile(r"/([0-9a-f]{40})/[^/]+\.arrow$")  # in the cache of `datasets`


def mark(folder: Path) -> None:
    """Make a folder if it is not there, and mark it as made by an experiment."""
    write_json(folder / MARK, MARKED)


def is_ours(folder: Path) -> bool:
    """Return whether an experiment made a folder."""
    try:
        return bool(json.loads((folder / MARK).read_text(encoding="utf-8")) == MARKED)
    except (OSError, ValueError, RecursionError):
        return False


def is_free(folder: Path) -> bool:
    """Return whether a folder does not exist or is empty."""
    if not folder.exists() and not folder.is_symlink():
        return True
    return folder.is_dir() and all(path.name == LOCK for path in folder.iterdir())


def discard(folder: Path) -> None:
    """Remove a folder that an experiment made; anyone else's stays.

    The mark goes last, so that what a killed process leaves is still known as ours.
    """
    if not is_ours(folder) or folder.is_symlink():
        return
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != MARK:
                path.unlink(missing_ok=True)
        if {path.name for path in folder.iterdir()} <= {MARK}:
            (folder / MARK).unlink()
            folder.rmdir()


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
    notes = [folder / name for name in (LOCK, "recipe.json", MARK)]
    if set(folder.iterdir()) <= set(notes):
        for path in notes:
            path.unlink(missing_ok=True)
        if remove:
            folder.rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes; it is created if needed, and removed again if it stays empty.

    The lock is the operating system's: it goes with the process that holds it, however that ends.

    Raises:
        BusyError: another process is at work there.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = FileLock(folder / LOCK, is_singleton=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise BusyError(
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


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as `write_json` does, with null for numbers that are not finite, which JSON does not have."""
    write_json(path, _strict(record))


def read_record(path: Path) -> dict[str, Any]:
    """Read the JSON that `write_json` or `write_record` wrote.

    Raises:
        RecipeError: it is not there or not JSON.
    """
    return _parsed(_text(path), str(path))


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Read many records: every `result.json` in a folder and the folders in it, or the lines of a file of records.

    Args:
        path: a folder with the outputs of experiments, or a file of `record_lines`.

    Returns:
        Where each record stands (its path, or file and line) → the record, unchecked, in the order of their paths.

    Raises:
        RecipeError: there are none, or one cannot be read.
    """
    if path.is_dir():
        records = {str(found): read_record(found) for found in sorted(path.rglob("result.json"))}
        if not records:
            raise RecipeError(f"{path} holds no result.json; expected the outputs of experiments")
        return records
    if not path.is_file():
        raise RecipeError(f"{path} is no folder; expected one with the outputs of experiments, or a file of records")
    lines = enumerate(_text(path).split("\n"), 1)
    places = {f"{path}, line {number}": line for number, line in lines if line.strip()}
    if not places:
        raise RecipeError(f"{path} holds no records; expected one a line")
    return {place: _parsed(line, place) for place, line in places.items()}


def lacking(record: Mapping[str, Any], measures: Iterable[str]) -> list[str]:
    """Name the measures that were not taken of a stage's model yet; those that do not apply to it were."""
    return [name for name in measures if name not in record.get("measured", {})]


def record_lines(records: Iterable[dict[str, Any]]) -> str:
    """Return records as JSON Lines, one a line, with null for numbers that are not finite."""
    return "".join(f"{json.dumps(_strict(record), ensure_ascii=False)}\n" for record in records)


def environment() -> dict[str, Any]:
    """Return the versions of what computes, its hardware, and the revision of this package.

    The mixed precision is that of `accelerate launch`; a recipe's own is among its training arguments.
    """
    state = process_state()
    found: dict[str, Any] = {name: version(name) for name in PACKAGES}
    found |= {"python": platform.python_version(), "processes": state.num_processes, "device": str(state.device)}
    found |= {"threads": torch.get_num_threads(), "hardware": _hardware()}
    found |= {"mixed_precision": os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), "revision": _revision()}
    return found


@cache
def _revision() -> str:
    """Return the commit of this package's code, or a digest of its files where no commit is known.

    It is asked for once in a process, whose code does not change.
    """
    return _checked_out() or _installed() or _digest()


def _checked_out() -> str | None:
    """Return the commit of the checkout that this package lies in, with -dirty where files have changed."""
    if not (CHECKOUT / ".git").exists():
        return None
    trusted = ["-c", f"safe.directory={CHECKOUT}"]  # a checkout may belong to another user, as in containers
    command = ["git", *trusted, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _installed() -> str | None:
    """Return the commit that pip installed this package from, where that was a repository."""
    try:
        origin = json.loads(distribution("collab-compress").read_text("direct_url.json") or "{}")
        return str(origin["vcs_info"]["commit_id"])[:12]
    except (KeyError, TypeError, ValueError):
        return None


def _digest() -> str:
    """Return a digest of the package's source files, by their paths and contents."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return f"sha256-{digest.hexdigest()[:12]}"


def hub_commits(model: str | Path, data: Mapping[str, Dataset]) -> dict[str, str | None]:
    """Name the commits that a model and a data set have on the hub; None where one is not from there.

    Args:
        model: directory of the model, as of a snapshot in the hub's cache, or a name on the hub.
        data: split → rows, whose files `datasets` keeps in a folder named after the commit.
    """
    local = Path(model).is_dir()
    place = Path(model, "config.json") if local else try_to_load_from_cache(str(model), "config.json")
    snapshot = SNAPSHOT.search(Path(str(place)).as_posix())
    files = [Path(file["filename"]).as_posix() for rows in data.values() for file in rows.cache_files]
    found = {match[1] for match in map(PREPARED.search, files) if match}
    return {"model": snapshot and snapshot[1], "data": found.pop() if len(found) == 1 else None}


def _strict(value: Any) -> Any:
    """Return a value with None in place of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {name: _strict(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise RecipeError(f"cannot read the record {path}: it is no regular file")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot read the record {path}: {error}") from error


def _parsed(text: str, place: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode()  # lone surrogates cannot be written again
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"cannot read the record {place}: {error}") from error
    return record


def _hardware() -> str:
    """Name the accelerator, or else the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
