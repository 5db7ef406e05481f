"""The notebooks of the documentation run as they stand, and show what they print."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs/notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    printed = [_printed(cell) for cell in notebook.cells]
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for cell, before in zip(notebook.cells, printed, strict=True):
        assert bool(_printed(cell)) == bool(before), (
            f"a cell of {path.name} printed before and not now, or the reverse"
        )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_keeps_what_it_printed_and_nothing_of_the_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    code = [cell for cell in nbformat.reads(text, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    assert os.sep + "site-packages" not in text
    assert str(Path.home()) not in text


def _printed(cell: nbformat.NotebookNode) -> str:
    """Return what a cell printed, without warnings and progress bars."""
    return "".join(output.get("text", "") for output in cell.get("outputs", []) if output.get("name") == "stdout")
