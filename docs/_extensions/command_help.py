"""Every command's own `--help`, so that the reference cannot say anything else."""

import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.util import logging

WIDTH = 96
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


class CommandHelp(Directive):
    """A section for each command of the project: its name, and what it says of itself."""

    def run(self) -> list[nodes.Node]:
        """Ask all commands."""
        commands: dict[str, str] = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]["scripts"]
        with ThreadPoolExecutor(2) as pool:
            helps = dict(zip(commands, pool.map(_help, commands, commands.values()), strict=True))
        return [self._section(name, helps[name]) for name in sorted(helps)]

    def _section(self, name: str, text: str) -> nodes.section:
        section = nodes.section(ids=[name], names=[name])
        section += [nodes.title(name, name), nodes.literal_block(text, text, language="text")]
        self.state.document.note_implicit_target(section, section)
        return section


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive `command-help`."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _help(name: str, target: str) -> str:
    module, _, function = target.partition(":")
    program = f"import sys; sys.argv = [{name!r}, '--help']; from {module} import {function}; {function}()"
    environment = {**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    if done.returncode or not done.stdout.strip():
        logging.getLogger(__name__).warning("%s --help: exit code %d\n%s", name, done.returncode, done.stderr)
    return done.stdout.strip()
