"""What experiments found, read one by one or many at once, and what it was found with."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from collab_compress.checkpoint.directory import write_new
from collab_compress.distributed import process_state
from collab_compress.errors import RecipeError

PACKAGES = (
    "collab-compress", "torch", "transformers", "accelerate", "datasets", "tokenizers", "evaluate", "sacrebleu",
    "scikit-learn", "scipy",
)  # fmt: skip
CHECKOUT = Path(__file__).parents[2]


def read_record(path: Path) -> dict[str, Any]:
    """Read the JSON that `write_json` wrote.

    Raises:
        RecipeError: it is not there or not JSON.
    """
    return _parsed(_text(path), str(path))


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Read many records: every `result.json` in a folder and the folders in it, or the lines of a file of records.

    Args:
        path: a folder with the outputs of experiments, or a file that `write_records` wrote.

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


def write_records(records: Iterable[dict[str, Any]], path: Path) -> None:
    """Write records as JSON Lines, one a line, all of them or nothing.

    Args:
        records: as `read_records` gives them.
        path: of the file; must not exist.

    Raises:
        CheckpointError: something is there, or nothing can be written there.
    """
    write_new(path, "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot read the record {path}: {error}") from error


def _parsed(text: str, place: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"cannot read the record {place}: {error}") from error
    return record


def environment() -> dict[str, Any]:
    """Name the versions of what computes, on what hardware, and the git revision of this package in a checkout.

    The mixed precision is that of `accelerate launch`; a recipe's own is among its training arguments.
    """
    state = process_state()
    found: dict[str, Any] = {name: version(name) for name in PACKAGES}
    found |= {"python": platform.python_version(), "processes": state.num_processes, "device": str(state.device)}
    found |= {"threads": torch.get_num_threads(), "hardware": _hardware()}
    found |= {"mixed_precision": os.environ.get("ACCELERATE_MIXED_PRECISION", "no"), "revision": None}
    if (CHECKOUT / ".git").exists():
        try:
            done = subprocess.run(
                ["git", "describe", "--always", "--dirty", "--abbrev=12"],
                cwd=CHECKOUT, capture_output=True, text=True, check=True, timeout=10,
            )  # fmt: skip
            found["revision"] = done.stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass  # no git, or a checkout that it does not trust
    return found


def _hardware() -> str:
    """Name the accelerator, or else the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
