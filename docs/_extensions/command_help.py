"""Every command's own `--help`, so that the reference cannot say anything else."""

from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

TEXTS = Path(__file__).parents[2] / "cli" / "help_texts"  # a test keeps them what the parsers print


class CommandHelp(Directive):
    """A section for each command of the project: its name, and what it says of itself."""

    def run(self) -> list[nodes.Node]:
        """Read all texts."""
        texts = sorted(TEXTS.glob("*.txt"))
        if not texts:
            raise self.error(f"no help in {TEXTS}; render it: make help-texts")
        environment = self.state.document.settings.env
        for path in texts:
            environment.note_dependency(str(path))
        return [self._section(path.stem, path.read_text(encoding="utf-8").strip()) for path in texts]

    def _section(self, name: str, text: str) -> nodes.section:
        section = nodes.section(ids=[name], names=[name])
        section += [nodes.title(name, name), nodes.literal_block(text, text, language="text")]
        self.state.document.note_implicit_target(section, section)
        return section


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive `command-help`."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
