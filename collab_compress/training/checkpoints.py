"""The checkpoints that a Transformers `Trainer` leaves in its output folder."""

import json
from pathlib import Path
from typing import Any

STATE = "trainer_state.json"  # written last


def whole_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in the order of their steps, without one that was still being written."""
    numbered = ((path.name.rpartition("-")[2], path) for path in folder.glob("checkpoint-*") if read_state(path))
    return [path for _, path in sorted((int(number), path) for number, path in numbered if number.isdigit())]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the Trainer's state, which it writes last; empty if it is not whole."""
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        return state
    except (OSError, ValueError):
        return {}
