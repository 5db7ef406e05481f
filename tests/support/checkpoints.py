"""Changes to a saved model, which make it incomplete, damaged, or another one."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def change_json(path: Path, **entries: Any) -> None:
    """Set entries of a JSON file, which need not exist."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps({**content, **entries}), encoding="utf-8")


def change_weights(folder: Path, **tensors: Tensor | None) -> None:
    """Set tensors of a saved model; None removes one."""
    path = folder / "model.safetensors"
    changed = {name: tensor for name, tensor in {**load_file(path), **tensors}.items() if tensor is not None}
    save_file(changed, path, metadata={"format": "pt"})
