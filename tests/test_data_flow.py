"""Imports go one way: later layers use earlier ones, never the reverse."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = [
    "factorization", "architectures", "attention", "calibration", "checkpoint", "conversion", "losses", "heads",
    "analysis", "report", "training", "tasks", "metrics", "experiments",
]  # fmt: skip
ALLOWED = {
    "factorization": set(),
    "architectures": {"errors"},
    "attention": {"errors"},
    "losses": {"errors"},
    "calibration": {"errors", "architectures", "factorization"},
    "checkpoint": {"errors", "architectures"},
    "conversion": {
        "errors", "processes", "factorization", "architectures", "attention", "calibration", "checkpoint",
    },
    "heads": {"errors", "architectures", "attention", "calibration", "checkpoint"},
    "analysis": {"errors", "architectures", "attention", "calibration", "conversion", "factorization", "heads"},
    "report": {"errors", "architectures", "calibration", "checkpoint", "conversion", "heads", "analysis"},
    "training": {"errors", "architectures", "attention", "calibration", "losses", "heads"},
    "tasks": {"errors"},
    "metrics": {"errors"},
    "experiments": {"errors", "processes", "checkpoint", "conversion", "training", "tasks", "metrics"},
}  # fmt: skip


def own_imports(path):
    """Layers of this package that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.ImportFrom)
            and node.level == 0
            and (node.module or "").startswith("collab_compress.")
        ):
            yield node.module.split(".")[1]
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("collab_compress") for alias in node.names), path


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_what_stands_below_it(layer):
    for path in (ROOT / "collab_compress" / layer).glob("*.py"):
        assert set(own_imports(path)) - {layer} <= ALLOWED[layer], path


def test_no_layer_is_forgotten():
    folders = {path.parent.name for path in (ROOT / "collab_compress").glob("*/__init__.py")}
    assert folders == set(LAYERS)


def test_factorization_is_pure():
    for path in (ROOT / "collab_compress" / "factorization").glob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert "transformers" not in source, path
        assert "open(" not in source, path


def test_the_library_never_prints():
    for path in (ROOT / "collab_compress").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("print", "input", "exec", "eval"), path


def test_files_are_short():
    for path in [*(ROOT / "collab_compress").rglob("*.py"), *(ROOT / "cli").glob("*.py")]:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 220, path
