"""Read what an experiment found, and name what it was found with."""

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from collab_compress.distributed import processes
from collab_compress.errors import RecipeError

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
    """Name the versions of what computes, on what hardware, and the git revision of this package in a checkout.

    The mixed precision is that of `accelerate launch`; a recipe's own is among its training arguments.
    """
    state = processes()
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
