"""The help of every command: at once, without large libraries, and what the parser prints now."""

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from collab_compress_glue_runs.experiments import Recipe, Sweep
from collab_compress_glue_runs.tasks import TASKS

from collab_compress.options import SECTION_NAMES

ROOT = Path(__file__).parents[2]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
TERMINAL = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
PROGRAM = """
import sys
from {} import {} as command
sys.argv = ["x", sys.argv[1]]
try:
    command()
except SystemExit as stop:
    assert not stop.code
loaded = {{"torch", "transformers", "huggingface_hub", "numpy", "yaml"}} & set(sys.modules)
assert not loaded, loaded
"""


@cache
def printed(name, option="--help"):
    """Return what a command prints, in little processor time, which does not depend on load."""
    began = os.times()
    program = [sys.executable, "-c", PROGRAM.format(*SCRIPTS[name].split(":")), option]
    done = subprocess.run(program, env={**os.environ, **TERMINAL}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    ended = os.times()
    assert sum(ended[2:4]) - sum(began[2:4]) < 1.5  # user and system time of child processes
    return done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_printed_at_once(name):
    text = printed(name)
    assert "options options" not in text
    assert text.startswith(f"usage: {name} ")
    assert f"\n  {name} " in text  # an example
    for option in ("--help", "--version"):
        assert option in text
    assert printed(name, "--version").startswith(f"{name} 0.")


CHECKED = [  # options whose values are looked up in tables, and what they may be
    ("collab-analyze", "sections", lambda: SECTION_NAMES),
    *(
        (name, "task", lambda: [task.name for task in TASKS.values() if task.num_labels is not None])
        for name in ("collab-analyze", "collab-prune")
    ),
]


@pytest.mark.parametrize(("name", "option", "values"), CHECKED)
def test_the_values_of_an_option_are_listed(name, option, values):
    entry = re.search(rf"^  --{option}\b.*(?:\n {{6,}}\S.*)*", printed(name), re.MULTILINE)[0]
    for value in values():
        assert re.search(rf"\b{value}\b", entry), (option, value)


@pytest.mark.parametrize(("name", "kind"), [("collab-run", Recipe), ("collab-sweep", Sweep)])
def test_every_field_of_a_file_is_described(name, kind):
    fields = printed(name).partition("fields of a ")[2]
    for field in nested_fields(kind):
        assert re.search(rf"^  {re.escape(field)}  \S", fields, re.MULTILINE), field


def nested_fields(kind, prefix=""):
    """Yield the path of each field of a dataclass, and of the dataclasses in it."""
    for name, annotation in get_type_hints(kind).items():
        yield f"{prefix}{name}"
        for inner in (annotation, *get_args(annotation)):
            if is_dataclass(inner):
                yield from nested_fields(inner, f"{prefix}{name}.")
