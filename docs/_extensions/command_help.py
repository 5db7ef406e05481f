"""Each command's `--help`, so that the reference always agrees with it."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

TERMINAL = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
PROGRAM = "from {} import {} as command; command()"
COMMANDS = {
    script.name: script.value.split(":")
    for script in entry_points(group="console_scripts")
    if script.value.startswith("collab_compress")
}
"""Command → its module and function."""


class CommandHelp(Directive):
    """A section for each command: its name, and what it prints for `--help`."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        return [self._section(name) for name in sorted(COMMANDS)]

    def _section(self, name: str) -> nodes.section:
        command = [sys.executable, "-c", PROGRAM.format(*COMMANDS[name]), "--help"]
        done = subprocess.run(command, env={**os.environ, **TERMINAL}, capture_output=True, text=True, check=True)
        text = done.stdout.strip()
        section = nodes.section(ids=[name], names=[name])
        section += [nodes.title(name, name), nodes.literal_block(text, text, language="text")]
        self.state.document.note_implicit_target(section, section)
        return section


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive `command-help`."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
