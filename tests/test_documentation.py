"""What the documentation tells people to import and to run is there."""

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "packages" not in page.parts]  # those are written by the build


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_imported_is_there(page: Path) -> None:
    for block in blocks(page, "python"):
        for statement in ast.walk(ast.parse(block)):
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("collab_compress"):
                module = importlib.import_module(statement.module)
                missing = [name.name for name in statement.names if not hasattr(module, name.name)]
                assert not missing, f"{statement.module} has no {', '.join(missing)}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 900


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_there(page: Path) -> None:
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    named = set(re.findall(r"^(collab-[a-z]+)", "\n".join(blocks(page, "")), re.MULTILINE))
    named |= set(re.findall(r"`(collab-[a-z]+)[ `]", page.read_text(encoding="utf-8")))
    assert named <= {*commands, "collab-compress"}
