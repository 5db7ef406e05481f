"""Make a report from its sections; write the results as a page, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from html import escape
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from jinja2 import Environment, PackageLoader, StrictUndefined

from collab_compress.checkpoint.directory import atomic_directory, mapped
from collab_compress.conversion.report import width_range
from collab_compress.errors import HeadError, UnsupportedModelError
from collab_compress.report import drawing
from collab_compress.report.context import ReportContext
from collab_compress.report.section import Cell, Section, Table, written
from collab_compress.report.sections import SECTIONS

DIGITS = 6  # significant digits of numbers in files


@dataclass(frozen=True)
class ReportResult:
    """The results of all sections of a report.

    Args:
        title: what the page is of, as "Heads of BERT".
        facts: model, data and machine, in words.
        sections: results, in order.
        omitted: name of a missing section → reason.

    Example:
        >>> result = make_report(ReportContext(model, [batch]), ["patterns"])
        >>> [section.name for section in result.sections], result.table("patterns", "patterns")[0]["layer"]
        (['patterns'], '0')
    """

    title: str
    facts: dict[str, str]
    sections: tuple[Section, ...]
    omitted: dict[str, str]

    @property
    def highlights(self) -> list[str]:
        """The most important numbers, a sentence each."""
        return [line for section in self.sections for line in section.highlights]

    def table(self, section: str, name: str) -> list[dict[str, Cell]]:
        """Return the rows of a table, as "dominance", "pruning", as dictionaries: name of a column → cell.

        Raises:
            HeadError: there is no such table.
        """
        tables = {(part.name, table.name): table for part in self.sections for table in part.tables}
        if (section, name) not in tables:
            expected = ", ".join(" ".join(key) for key in tables)
            raise HeadError(f"there is no table {section} {name}; expected one of {expected}")
        names = [column["name"] for column in tables[section, name].columns]
        return [dict(zip(names, row, strict=True)) for row in tables[section, name].rows]

    def _repr_html_(self) -> str:
        """Return the page in a frame, which keeps the notebook's styles out."""
        page = escape(render_page(self), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:48rem;border:0"></iframe>'


def make_report(context: ReportContext, sections: Collection[str] = tuple(SECTIONS)) -> ReportResult:
    """Measure models and data for the given sections, in the order of `SECTIONS`.

    Raises:
        HeadError: a section is unknown, or none of them can be measured on this model and data.
        CalibrationError: a model does not take the batches.

    Example:
        >>> result = make_report(ReportContext(model, [batch], name="tiny BERT"), ["diversity", "mixing"])
        >>> result.title, list(result.omitted)
        ('Heads of tiny BERT', ['mixing'])
    """
    unknown = sorted(set(sections) - set(SECTIONS))
    if unknown or not sections:
        raise HeadError(f"unknown section {', '.join(unknown) or 'none'}; expected some of {', '.join(SECTIONS)}")
    started, results, omitted = perf_counter(), [], {}
    for name, measure in SECTIONS.items():
        if name in sections:
            try:
                results.append(measure(context))
            except (HeadError, UnsupportedModelError) as error:
                omitted[name] = str(error)
    if not results:
        raise HeadError("nothing to show: " + "; ".join(f"{name}: {reason}" for name, reason in omitted.items()))
    against = "" if context.baseline is None else f" against {context.baseline_name}"
    facts = {**_facts(context), "measured in": f"{perf_counter() - started:.0f} s"}
    return ReportResult(f"Heads of {context.name}{against}", facts, tuple(results), omitted)


def _facts(context: ReportContext) -> dict[str, str]:
    model, sites, baseline = context.model, context.sites, context.baseline
    heads, widths = width_range(site.heads for site in sites), width_range(site.head_width for site in sites)
    tokens = f", {context.tokens:,} tokens" if context.tokens else ""
    facts = {
        "model": f"{context.name}, {type(model).__name__}, {'converted' if context.converted else 'dense'}",
        "parameters": f"{model.num_parameters():,}",
        "attention": f"{len(sites)} modules ({', '.join(context.kinds)}), {heads} heads of width {widths}",
        "data": f"{context.data}: {context.sequences:,} sequences{tokens}",
    }
    if baseline is not None:
        parameters = f"{baseline.num_parameters():,} parameters"
        facts["against"] = f"{context.baseline_name}, {type(baseline).__name__}, {parameters}"
    if context.score is not None:
        facts["task"] = context.score.name
    facts["versions"] = (
        f"collab-compress {version('collab-compress')}, transformers {transformers.__version__}, "
        f"torch {torch.__version__}"
    )
    facts["threads"] = str(torch.get_num_threads())
    return facts


def render_page(result: ReportResult) -> str:
    """Return the results as one HTML page, which fetches nothing.

    Example:
        >>> render_page(ReportResult("Heads of a model", {}, (), {}))[:15]
        '<!DOCTYPE html>'
    """
    loader = PackageLoader("collab_compress.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["written"] = written
    return environment.get_template("page.html").render(result=result, drawing=drawing)


def write_report(result: ReportResult, directory: Path) -> None:
    """Write `index.html`, `numbers.json`, and `SECTION-TABLE.csv` for each table; all files or none.

    Numbers have six significant digits. Undefined numbers are null in JSON and empty in CSV.

    Args:
        result: results to write.
        directory: new folder; must not exist.

    Raises:
        CheckpointError: the folder exists or cannot be written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     write_report(make_report(ReportContext(model, [batch]), ["patterns"]), Path(folder) / "heads")
        ...     print(*sorted(path.name for path in Path(folder).glob("heads/*")))
        index.html numbers.json patterns-patterns.csv
    """
    page, numbers = render_page(result), to_json(result)
    with atomic_directory(directory) as partial:
        (partial / "index.html").write_text(page, encoding="utf-8")
        (partial / "numbers.json").write_text(numbers, encoding="utf-8")
        for section in result.sections:
            for table in section.tables:
                (partial / f"{section.name}-{table.name}.csv").write_text(to_csv(table), encoding="utf-8")


def to_json(result: ReportResult) -> str:
    """Return the results as JSON for a file.

    Example:
        >>> json.loads(to_json(ReportResult("Heads of a model", {}, (), {})))["title"]
        'Heads of a model'
    """
    return json.dumps(to_dict(result), allow_nan=False, indent=1) + "\n"


def to_dict(result: ReportResult) -> dict[str, Any]:
    """Return the results in JSON types.

    Example:
        >>> to_dict(ReportResult("Heads of a model", {"model": "tiny"}, (), {}))
        {'title': 'Heads of a model', 'facts': {'model': 'tiny'}, 'highlights': [], 'sections': {}, 'omitted': {}}
    """
    sections = {}
    for section in result.sections:
        tables = {
            table.name: {"title": table.title, "columns": table.columns, "rows": table.rows}
            for table in section.tables
        }
        sections[section.name] = {
            "title": section.title,
            "reading": section.reading,
            "source": section.source,
            "tables": mapped(_rounded, tables),
            "pictures": mapped(_rounded, [asdict(picture) for picture in section.pictures]),
        }
    return {
        "title": result.title,
        "facts": result.facts,
        "highlights": result.highlights,
        "sections": sections,
        "omitted": result.omitted,
    }


def to_csv(table: Table) -> str:
    """Return a table as CSV with a header line and units in brackets."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(table.records[0])
    writer.writerows(mapped(_rounded, table.rows))
    return file.getvalue()


def _rounded(value: Any) -> Any:
    """Return a value, rounded if it is a float."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
