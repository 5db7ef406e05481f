"""The help of every command: at once, without large libraries, and what the parser prints now."""

import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from collab_compress_cli import help as texts
from collab_compress_cli.start import COMMANDS, help_text

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from collab_compress_cli import start
sys.argv = ["x", "--help"]
start.{}()
assert not {{"torch", "transformers", "tyro", "huggingface_hub", "collab_compress"}} & set(sys.modules), "loaded"
"""


def test_every_command_is_installed():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {name: f"collab_compress_cli.start:{module}" for name, module in COMMANDS.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_told_at_once(name):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(COMMANDS[name])], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < 2
    assert done.stdout == help_text(name) + "\n"
    assert done.stdout.startswith(f"usage: {name} ")
    assert f"\n  {name} " in done.stdout  # an example
    for option in ("--help", "--version"):
        assert option in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_stored_help_is_what_the_parser_prints(name):
    stored = (texts.TEXTS / f"{name}.txt").read_text(encoding="utf-8")
    assert stored == texts.rendered(name), "render it anew: make help-texts"


def test_recipes_are_told_field_by_field():
    text = help_text("collab-run")
    assert not re.search(r"^  \S+ +(\(|$)", text.partition("fields of a recipe:")[2], re.MULTILINE), (
        "a field without words"
    )
    for field in ("task", "tuning.learning_rate", "compression.damping", "recovery.steps", "heads.drophead.p"):
        assert f"\n  {field}  " in text
