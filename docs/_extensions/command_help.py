"""Each command's `--help`, so that the reference always agrees with it."""

import os
import subprocess
import sys

from collab_compress_cli import start
from collab_compress_glue_runs.commands import start as experiments
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

TERMINAL = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
PROGRAM = "import sys; from collab_compress_cli.start import print_help; print_help(*sys.argv[1:])"
PACKAGES = dict.fromkeys(start.COMMANDS, start.__package__)
PACKAGES |= dict.fromkeys(experiments.COMMANDS, experiments.__package__)
"""Command → the package that has it."""


class CommandHelp(Directive):
    """A section for each command: its name, and what it prints for `--help`."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        return [self._section(name) for name in sorted(PACKAGES)]

    def _section(self, name: str) -> nodes.section:
        command = [sys.executable, "-c", PROGRAM, name, PACKAGES[name]]
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
