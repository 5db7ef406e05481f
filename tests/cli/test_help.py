"""The help of every command: at once, without large libraries, and what the parser prints now."""

import re
import subprocess
import sys
import time
import tomllib
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from collab_compress_cli import help as texts
from collab_compress_cli.start import COMMANDS, help_text

from collab_compress.architectures import KINDS
from collab_compress.attention import FORMS
from collab_compress.experiments.results import read_papers
from collab_compress.report import SECTIONS
from collab_compress.tasks import TASKS

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


def described(name):
    """The dataclass of a command's arguments, if it has one; recipes and sweeps are YAML."""
    return getattr(import_module(f"collab_compress_cli.{COMMANDS[name]}"), "Arguments", None)


CHECKED = [  # options whose values are looked up in tables, and what they may be
    ("collab-compress", "solver", lambda: FORMS["shared"].solvers),
    ("collab-compress", "form", lambda: FORMS),
    ("collab-compress", "kinds", lambda: KINDS),
    ("collab-analyze", "sections", lambda: SECTIONS),
    *(
        (name, "task", lambda: [task.name for task in TASKS.values() if task.num_labels is not None])
        for name in ("collab-analyze", "collab-prune")
    ),
    ("collab-results", "paper", lambda: {table.paper for table in read_papers()}),
]


@pytest.mark.parametrize(("name", "option", "values"), CHECKED)
def test_what_an_option_may_be_is_told(name, option, values):
    told = entries(help_text(name))[f"--{option}"]
    for value in values():
        assert re.search(rf"\b{value}\b", told), (option, value)


@pytest.mark.parametrize("name", [name for name in COMMANDS if described(name) is not None])
def test_every_choice_is_told(name):
    """Whatever the parser itself chooses from."""
    told, found = entries(help_text(name)), 0
    for option, choices in literals(described(name)):
        for choice in choices:
            found += 1
            assert choice in told[option], (option, choice)
    assert found or name not in ("collab-compress", "collab-results")


def literals(kind):
    """Option → what it may be, for each field of a dataclass, and of those in it, that has a type with choices."""
    for field, annotation in get_type_hints(kind).items():
        parts = [annotation]
        while parts:
            part = parts.pop()
            if is_dataclass(part):
                yield from literals(part)
            elif get_origin(part) is Literal:
                yield f"--{field.replace('_', '-')}", get_args(part)
            else:
                parts += get_args(part)


def entries(text):
    """Option → what is said of it."""
    return {
        match[1]: " ".join(match[0].split())
        for match in re.finditer(r"^  (--[\w-]+)\b.*(?:\n {6,}\S.*)*", text, re.MULTILINE)
    }


def test_recipes_are_told_field_by_field():
    text = help_text("collab-run")
    assert not re.search(r"^  \S+ +(\(|$)", text.partition("fields of a recipe:")[2], re.MULTILINE), (
        "a field without words"
    )
    for field in ("task", "tuning.learning_rate", "compression.solver.damping", "recovery.steps", "heads.drophead.p"):
        assert f"\n  {field}  " in text
