"""Read what an experiment found, and name what it was found with."""

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from collab_compress.errors import RecipeError
from collab_compress.processes import processes

PACKAGES = (
    "collab-compress", "torch", "transformers", "accelerate", "datasets", "tokenizers", "evaluate", "sacrebleu",
    "scikit-learn", "scipy",
)  # fmt: skip
CHECKOUT = Path(__file__).parents[2]


def read_record(path: Path) -> dict[str, Any]:
    """Read the JSON that `write_whole_json` wrote.

    Raises:
        RecipeError: it is not there or not JSON.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"cannot read the record {path}: {error}") from error
    return record


def environment() -> dict[str, Any]:
    """Name the versions of what computes, on what, and the git revision of this package if it is a checkout.

    The mixed precision is that of `accelerate launch`; a recipe's own is among its training arguments.
    """
    state = processes()
    found: dict[str, Any] = {name: version(name) for name in PACKAGES}
    found |= {"python": platform.python_version(), "processes": state.num_processes, "device": str(state.device)}
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
