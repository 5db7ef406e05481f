"""Settings of recipes that take seconds, and records of runs that never took place."""

from pathlib import Path
from typing import Any


def mrpc(model: Path, data_dir: Path, output: Path, *more: str) -> list[str]:
    """Return the settings of a recipe on MRPC; later ones replace earlier ones."""
    settings = f"task=mrpc model={model} data_dir={data_dir} output={output} max_length=24 trackers=[]"
    return [*settings.split(), *more]


def make_record(task: str, method: str, stage: str, seed: int, score: float, **more: Any) -> dict[str, Any]:
    """Return the record of a stage: tuned, given, or a conversion, with `-again` after a second fine-tuning."""
    return {
        "task": task,
        "method": method,
        "conversion": None if stage in ("tuned", "given") else stage.removesuffix("-again"),
        "again": stage.endswith("-again"),
        "stage": stage,
        "seed": seed,
        "score": score,
        "recipe": {"model": "minilm"},
        **more,
    }
