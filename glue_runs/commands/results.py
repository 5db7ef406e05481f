"""`collab-results`: tables of what experiments found, beside the papers' numbers; pages; parts of a Markdown file."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from collab_compress_cli.command import main_of, table
from collab_compress_cli.model import check_outputs

from collab_compress.checkpoint.directory import atomic_file, to_json, write_atomically
from collab_compress.errors import CheckpointError, RecipeError, one_line

from ..experiments.comparison import compare
from ..experiments.examples import ENDING, Arrays, Examples, gather_examples, packed, read_examples
from ..experiments.forest import forest_plot
from ..experiments.outputs import read_records, record_lines
from ..experiments.pages import write_pages
from ..experiments.papers import read_papers, select_tables, title_of
from ..experiments.recipe import parse as parse_settings
from ..experiments.results import Result, read_results
from ..experiments.verdicts import FAILS, HOLDS, SAME, SEEDS, Verdict, counted, tried, verdicts_of
from .arguments import ResultsArguments as Arguments
from .tables import (
    comparison_blocks,
    comparison_lines,
    csv_text,
    papers_blocks,
    papers_lines,
    plain,
    scores_blocks,
    to_markdown,
)

PART = re.compile(r"<!-- (records|claims|findings|forest): (.*?) -->(\r?\n).*?<!-- end -->", re.DOTALL)
PART_START = re.compile(r"<!-- (?:records|claims|findings|forest):")
IMAGE = "images/forest-{}.svg"
"""Path of a paper's forest plot, from the folder of the Markdown file."""
Plots: TypeAlias = dict[Path, Callable[[], bytes]]
NONE = "No records."


def run(arguments: Arguments) -> None:
    """Read, compare, and print or write."""
    paths = arguments.records_in
    outputs = {f"--{name}": getattr(arguments, name) for name in ("output", "json", "records", "pages")}
    check_outputs(outputs)
    outcomes = None if arguments.records is None else arguments.records.with_suffix(ENDING)
    check_outputs({**outputs, "outcomes of --records": outcomes})
    if arguments.markdown is not None:
        check_editable(arguments.markdown)
    selected = arguments.paper is not None or arguments.table is not None
    tables = select_tables(read_papers(), arguments.paper, arguments.table) if arguments.papers or selected else []
    results: list[Result] = []
    if not paths:
        need_results = (arguments.against, arguments.records, arguments.pages, arguments.markdown)
        if not tables or any(option is not None for option in need_results):
            raise RecipeError("no results: give a folder with the outputs of experiments, or --papers alone")
        lines, blocks = papers_lines(tables), list(papers_blocks(tables))
    else:
        results = read_results(*paths)
        comparison = compare(results, arguments.against)
        names = [column.name for column in comparison.columns]
        shown = [table for table in tables if table.rows_for(names)]
        if tables and not shown:
            missing = f"no selected table of the papers has {' or '.join(names)}"
            if selected:
                raise RecipeError(f"{missing}; leave the folder out to print the tables")
            if not arguments.quiet:
                print(f"collab-results: {missing}", file=sys.stderr)
        lines, blocks = comparison_lines(comparison, shown), comparison_blocks(comparison, shown)
    page, plots = ("", {}) if arguments.markdown is None else regenerated(arguments.markdown, results)
    images = {path: draw() for path, draw in plots.items()}
    text = f"{to_markdown(blocks)}\n" if arguments.format == "markdown" else csv_text(lines)
    with ExitStack() as files:  # all of them are written, or none
        contents: dict[Path | None, str | bytes] = {arguments.output: text}
        contents[arguments.json] = to_json([{name: plain(value) for name, value in line.items()} for line in lines])
        if arguments.records is not None:
            contents[arguments.records], arrays = gathered(paths)
            contents |= {outcomes: packed(arrays)} if arrays else {}
        for path, content in contents.items():
            if path is not None:
                binary = content.encode() if isinstance(content, str) else content
                files.enter_context(atomic_file(path)).write_bytes(binary)
        if arguments.pages is not None:
            write_pages(results, arguments.pages)
        if arguments.markdown is not None:
            for path, content in images.items():
                write_atomically(path, content)
            write_atomically(arguments.markdown.resolve(), page)
    if arguments.output is not None or arguments.quiet:
        return
    if arguments.format == "csv" or not sys.stdout.isatty():
        print(text, end="")
        return
    for block in blocks:
        print(*([block] if isinstance(block, str) else table(block.header, block.rows, block.text_columns)), sep="\n")


main = main_of("collab-results", Arguments, run)


def gathered(paths: Sequence[Path]) -> tuple[str, Arrays]:
    """Return the lines of all records, and the outcomes of their examples, which lines name by `examples`."""
    records: dict[str, dict[str, Any]] = {}
    examples: dict[str, Examples] = {}
    for path in paths:
        contents = read_records(path)
        records |= contents
        examples |= read_examples(path, contents)
    keys, arrays = gather_examples([examples.get(place) for place in records])
    lines = []
    for record, key in zip(records.values(), keys, strict=True):
        environment = record.get("environment", {})
        revision = environment.get("revision") or "unknown"
        lines.append(
            record | {"environment": environment | {"revision": revision}} | ({"examples": key} if key else {})
        )
    return record_lines(lines), arrays


@dataclass(frozen=True)
class Selection:
    """Records that a generated table shows, as in `<!-- records: {"tasks": ["mrpc", "rte"]} -->`."""

    tasks: tuple[str, ...]
    """Columns, named as in tables; an average is over these."""

    methods: tuple[str, ...] = ()
    """Methods; all if empty."""

    stages: tuple[str, ...] = ()
    """Stages; all if empty."""

    models: tuple[str, ...] = ()
    """Models, named as in tables; all if empty."""

    def holds(self, result: Result) -> bool:
        """Return whether a record is selected."""
        variant = result.variant
        return (
            result.column.name in self.tasks
            and (not self.methods or variant.method in self.methods)
            and (not self.stages or variant.stage in self.stages)
            and (not self.models or variant.model in self.models)
        )


def regenerated(path: Path, results: Sequence[Result]) -> tuple[str, Plots]:
    """Return the text of a Markdown file with its generated parts made from results, and what draws its pictures.

    Args:
        path: of the file; each part stands between `<!-- KIND: ABOUT -->` and `<!-- end -->`: a table of `records`,
            or `findings`, a `forest` plot or the `claims` of a paper.
        results: of experiments.

    Raises:
        RecipeError: the file cannot be read, has no generated part, or an incomplete or unknown one.
    """
    try:
        text = path.read_bytes().decode()  # with its line ends
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot read {path}: {one_line(error)}") from error
    complete = len(PART.findall(text))
    if not complete or len(PART_START.findall(text)) != complete:
        raise RecipeError(
            f"{path} has {complete} complete generated parts; expected at least one, each between "
            '<!-- records: {"tasks": […]} --> or <!-- claims: PAPER --> and <!-- end -->'
        )
    verdicts = verdicts_of(results)
    plots: Plots = {}

    def generate(part: re.Match[str]) -> str:
        kind, about, line_end = part.groups()
        if kind == "records":
            body = _scores(about, results, path)
        elif (kind, about) == ("findings", "records"):
            body = _counts(results)
        elif about not in verdicts:
            raise RecipeError(f"{path}: unknown paper {about!r}; expected one of {', '.join(verdicts)}")
        elif kind == "forest":
            body = _forest(about, verdicts[about], path, plots)
        else:
            body = _claims(verdicts[about]) if kind == "claims" else _findings(about, verdicts[about])
        return f"<!-- {kind}: {about} -->\n\n{body}\n\n<!-- end -->".replace("\n", line_end)

    return PART.sub(generate, text), plots


def _scores(about: str, results: Sequence[Result], path: Path) -> str:
    try:
        settings = json.loads(about)
    except ValueError as error:
        raise RecipeError(f"{path}: cannot read {about!r}: {error}") from error
    if not isinstance(settings, dict):
        raise RecipeError(f'{path}: cannot read {about!r}: expected {{"tasks": […]}}')
    selection = parse_settings(Selection, settings, str(path))
    selected = [result for result in results if selection.holds(result)]
    return to_markdown(scores_blocks(compare(selected))) if selected else NONE


def _claims(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts, the claims without pairs, and the revisions that differ within pairs."""
    shown = tried(verdicts)
    others = [verdict for verdict in verdicts if verdict not in shown]
    lines = [verdict.sentence for verdict in shown]
    lines += [f"No records to compare on {verdict.where}: {verdict.claim.says}" for verdict in others]
    if revisions := sorted({pair for verdict in shown for pair in verdict.revisions}):
        lines.append(f"Revisions that are paired: {'; '.join(revisions)}.")
    return "\n".join(f"* {line}" for line in lines)


def _counts(results: Sequence[Result]) -> str:
    """Return how many records there are, repeated how often, and of how many the revision is not known."""
    seeds = Counter((result.variant, result.column) for result in results)
    repeated = sum(count >= SEEDS for count in seeds.values())
    unknown = sum(result.revision is None for result in results)
    return (
        f"* **Records**: {len(results)}, of {len(seeds)} methods and stages on a task, {repeated} of them with "
        f"{SEEDS} seeds or more." + f" The revision of {unknown} is unknown." * bool(unknown)
    )


def _findings(paper: str, verdicts: Sequence[Verdict]) -> str:
    """Return the number of verdicts, and those that were decided."""
    shown = tried(verdicts)
    title = title_of(paper)
    if not shown:
        return f"* **{title}**: {NONE}"
    lines = [f"* **{title}**: {len(shown)} comparison{'s' * (len(shown) != 1)} tried: {counted(shown)}."]
    for outcome in (HOLDS, FAILS, SAME):
        said = [f"{one.claim.says[:-1]} ({one.change} on {one.where})" for one in shown if one.outcome == outcome]
        if said:
            lines.append(f"{outcome.capitalize()}: {'; '.join(said)}.")
    return " ".join(lines)


def _forest(paper: str, verdicts: Sequence[Verdict], path: Path, plots: Plots) -> str:
    """Return the line that shows the plot of a paper's verdicts, which is added to `plots`."""
    drawn = [verdict for verdict in verdicts if verdict.difference is not None]
    if not drawn:
        return NONE
    title = title_of(paper)
    plots[path.parent / IMAGE.format(paper)] = partial(forest_plot, title, drawn)
    return f"![Differences and 95 % intervals, {title}]({IMAGE.format(paper)})"


def check_editable(path: Path) -> None:
    """Refuse a text file that cannot be rewritten.

    Raises:
        CheckpointError: it is not a regular file, or it is write-protected.
    """
    if not path.is_file():
        raise CheckpointError(f"cannot edit {path}: expected a file that exists")
    if not path.stat().st_mode & 0o222 or not os.access(path, os.W_OK):
        raise CheckpointError(f"cannot edit {path}: it is write-protected")
