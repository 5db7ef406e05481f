"""Write down what an experiment found, and with what."""

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from collab_compress.errors import RecipeError

PACKAGES = ("collab-compress", "torch", "transformers", "accelerate", "datasets")


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write JSON beside `path` and rename it when it is whole."""
    write_text(path, json.dumps(record, indent=2, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text beside `path` and rename it when it is whole."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise RecipeError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def read_record(path: Path) -> dict[str, Any]:
    """Read what `write_record` wrote.

    Raises:
        RecipeError: it is not there or not JSON.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot read the record {path}: {error}") from error
    return record


def environment() -> dict[str, Any]:
    """Name the versions of what computes, and the git revision of this package if it is a checkout."""
    found: dict[str, Any] = {name: version(name) for name in PACKAGES}
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
        found["revision"] = done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        found["revision"] = None
    return found
