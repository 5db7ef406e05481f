"""The parts of a Markdown file that are made of records, between comments that say what stands there."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from collab_compress.errors import RecipeError
from collab_compress.experiments.claims import Verdict, tried
from collab_compress.experiments.comparison import compare
from collab_compress.experiments.pages import verdicts_of
from collab_compress.experiments.recipe import parse
from collab_compress.experiments.results import Result

from .tables import comparison_blocks, to_markdown

PART = re.compile(r"<!-- (records|claims): (.*?) -->(\r?\n).*?<!-- end -->", re.DOTALL)
START = re.compile(r"<!-- (?:records|claims):")
NONE = "No records yet."


@dataclass(frozen=True)
class Chosen:
    """Which records a table is made of, as in `<!-- records: {"tasks": ["mrpc", "rte"]} -->`."""

    tasks: tuple[str, ...]
    """Columns, named as in tables; an average is over these."""

    methods: tuple[str, ...] = ()
    """Methods; all if not given."""

    stages: tuple[str, ...] = ()
    """Stages; all if not given."""

    models: tuple[str, ...] = ()
    """Models, named as in tables; all if not given."""

    def holds(self, result: Result) -> bool:
        """Return whether a record is one of the chosen."""
        return (
            result.column.name in self.tasks
            and result.variant.method in (self.methods or (result.variant.method,))
            and result.variant.stage in (self.stages or (result.variant.stage,))
            and result.variant.model in (self.models or (result.variant.model,))
        )


def regenerated(path: Path, results: Sequence[Result]) -> str:
    """Return the text of a Markdown file with its generated parts made from results.

    Args:
        path: of the file; each part stands between `<!-- records: … -->` or `<!-- claims: PAPER -->` and
            `<!-- end -->`.
        results: what they are made of.

    Raises:
        RecipeError: the file cannot be read, has no such part, or one without its end or with what is not known.
    """
    try:
        text = path.read_bytes().decode()  # with its line ends
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot read {path}: {error}") from error
    parts = list(PART.finditer(text))
    if not parts or len(START.findall(text)) != len(parts):
        raise RecipeError(
            f"{path} has {len(parts)} whole parts to write anew; expected each between "
            '<!-- records: {"tasks": […]} --> or <!-- claims: PAPER --> and <!-- end -->, and one at least'
        )
    verdicts = verdicts_of(results)

    def made(part: re.Match[str]) -> str:
        kind, about, line_end = part.groups()
        body = _scores(about, results, path) if kind == "records" else _claims(about, verdicts, path)
        return f"<!-- {kind}: {about} -->\n\n{body}\n\n<!-- end -->".replace("\n", line_end)

    return PART.sub(made, text)


def _scores(about: str, results: Sequence[Result], path: Path) -> str:
    try:
        settings = json.loads(about)
    except ValueError as error:
        raise RecipeError(f"{path}: cannot read {about!r}: {error}") from error
    if not isinstance(settings, dict):
        raise RecipeError(f'{path}: cannot read {about!r}: expected {{"tasks": […]}}')
    chosen = parse(Chosen, settings, str(path))
    found = [result for result in results if chosen.holds(result)]
    if not found:
        return NONE
    return to_markdown(comparison_blocks(compare(found), []))


def _claims(about: str, verdicts: dict[str, list[Verdict]], path: Path) -> str:
    if about not in verdicts:
        raise RecipeError(f"{path}: unknown paper {about!r}; expected one of {', '.join(verdicts)}")
    others = [f"{verdict.compared} on {verdict.where}" for verdict in verdicts[about] if verdict.difference is None]
    lines = [f"* {verdict.sentence}" for verdict in tried(verdicts[about])]
    if others:
        lines.append(f"* Not tried on one seed or more: {'; '.join(others)}.")
    return "\n".join(lines)
