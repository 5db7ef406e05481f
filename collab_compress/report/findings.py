"""Run the sections on a study one after another; write their results as a page, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from html import escape
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from jinja2 import Environment, PackageLoader, StrictUndefined

from collab_compress.checkpoint.directory import atomic_directory
from collab_compress.errors import HeadError, UnsupportedModelError
from collab_compress.report import drawing
from collab_compress.report.section import Cell, Heatmaps, Omitted, Section, Table, written
from collab_compress.report.sections import SECTIONS
from collab_compress.report.study import Study

DIGITS = 6  # significant ones of numbers in files


@dataclass(frozen=True)
class Findings:
    """The results of all sections.

    Args:
        title: names of the models.
        facts: what a reader needs to know of model, data and machine, in words.
        sections: results, in order.
        omitted: name of a missing section → reason.
        about: words before the title on the page.
        links: other pages: address → name.
    """

    title: str
    facts: dict[str, str]
    sections: tuple[Section, ...]
    omitted: dict[str, str]
    about: str = "Heads of"
    links: Mapping[str, str] = field(default_factory=dict)

    @property
    def highlights(self) -> list[str]:
        """The most important numbers, a sentence each."""
        return [line for section in self.sections for line in section.highlights]

    @property
    def actions(self) -> list[str]:
        """Advice that follows from the findings, a sentence each."""
        return [line for section in self.sections for line in section.actions]

    def table(self, section: str, name: str) -> list[dict[str, Cell]]:
        """Return the rows of a table as dictionaries: name of a column → cell.

        Args:
            section: name of the section, as "dominance".
            name: short name of the table, as "pruning".

        Raises:
            HeadError: there is no such table.
        """
        tables = {(part.name, table.name): table for part in self.sections for table in part.tables}
        if (section, name) not in tables:
            expected = ", ".join(" ".join(key) for key in tables)
            raise HeadError(f"there is no table {section} {name}; expected one of {expected}")
        names = [column.name for column in tables[section, name].columns]
        return [dict(zip(names, row, strict=True)) for row in tables[section, name].rows]

    def _repr_html_(self) -> str:
        """Return the page in a frame, which keeps the notebook's styles out."""
        page = escape(render_page(self), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:48rem;border:0"></iframe>'


def look_at(study: Study, sections: Collection[str] = tuple(SECTIONS)) -> Findings:
    """Return the results of the sections on a study.

    Args:
        study: models and data.
        sections: names of sections, of `SECTIONS`, which sets the order.

    Raises:
        HeadError: a section is unknown, or none of them can be measured on this model and data.
        CalibrationError: a model does not take the batches.
    """
    unknown = sorted(set(sections) - set(SECTIONS))
    if unknown or not sections:
        raise HeadError(f"unknown section {', '.join(unknown) or 'none'}; expected some of {', '.join(SECTIONS)}")
    started, results, omitted = perf_counter(), [], {}
    for name, measure in SECTIONS.items():
        if name in sections:
            try:
                section = measure(study)
            except (HeadError, UnsupportedModelError) as error:
                section = Omitted(str(error))
            if isinstance(section, Omitted):
                omitted[name] = section.reason
            else:
                results.append(section)
    if not results:
        raise HeadError("nothing to show: " + "; ".join(f"{name}: {reason}" for name, reason in omitted.items()))
    against = "" if study.baseline is None else f" against {study.baseline_name}"
    facts = {**_facts(study), "measured in": f"{perf_counter() - started:.0f} s"}
    return Findings(f"{study.name}{against}", facts, tuple(results), omitted)


def _facts(study: Study) -> dict[str, str]:
    sites = study.sites
    heads = sorted({site.heads for site in sites})
    widths = sorted({site.head_width for site in sites})
    facts = {
        "model": f"{study.name}, {type(study.model).__name__}, {'converted' if study.converted else 'dense'}",
        "parameters": f"{study.model.num_parameters():,}",
        "attention": f"{len(sites)} modules ({', '.join(study.kinds)}), {_numbers(heads)} heads of width "
        + _numbers(widths),
        "data": f"{study.data}: {study.sequences:,} sequences"
        + (f", {study.tokens:,} tokens" if study.tokens else ""),
    }
    if study.baseline is not None:
        kind = type(study.baseline).__name__
        facts["against"] = f"{study.baseline_name}, {kind}, {study.baseline.num_parameters():,} parameters"
    if study.score is not None:
        facts["task"] = study.score.name
    versions = {"collab-compress": version("collab-compress"), "transformers": transformers.__version__}
    versions["torch"] = torch.__version__
    facts["versions"] = ", ".join(f"{name} {number}" for name, number in versions.items())
    facts["threads"] = str(torch.get_num_threads())
    return facts


def _numbers(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def render_page(findings: Findings) -> str:
    """Return the findings as one HTML page, which fetches nothing."""
    texts = [*findings.actions, *findings.highlights, *(section.reading for section in findings.sections)]
    used = {term for text in texts for term in TERM.findall(text)}
    glossary = {term: meaning for term, meaning in GLOSSARY.items() if term in used}
    return _templates().get_template("page.html").render(findings=findings, glossary=glossary)


GLOSSARY = {
    "energy": "The share of a matrix's squared singular values that its first components hold: how much of what "
    "attention computes a given width can keep.",
    "drift": "How far the outputs move: the norm of the difference, divided by the norm of the original outputs.",
    "T*": "The number of tokens beyond which converted attention takes more operations than dense attention.",
    "SVCCA": "How far the outputs of two heads are linear functions of each other: 0 not at all, 1 entirely.",
    "CKA": "How far two heads arrange the same tokens alike: 0 not at all, 1 entirely.",
    "dk": "The width of queries and keys, all heads together.",
    "dv": "The width of values, all heads together.",
    "dff": "The width of feed-forward blocks: how many neurons each has.",
}
TERM = re.compile(r"(?<!\w)(?<!-)(" + "|".join(re.escape(term) for term in GLOSSARY) + r")(?!\w)")


def explained(text: str) -> str:
    """Return a text as HTML in which the first use of each term of the glossary shows what it means."""
    seen: set[str] = set()

    def link(match: re.Match[str]) -> str:
        term = match[0]
        if term in seen:
            return term
        seen.add(term)
        return f'<a class="term" href="#glossary" title="{escape(GLOSSARY[term], quote=True)}">{term}</a>'

    return TERM.sub(link, escape(text, quote=False))


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("collab_compress.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "written": written,
        "explained": explained,
        "numeric": _numeric,
        "narrow": drawing.narrow,
        "many": drawing.many,
        "maps": drawing.maps,
        "panels": drawing.panels,
        "colours": drawing.colours,
    }
    environment.tests["heatmaps"] = lambda picture: isinstance(picture, Heatmaps)
    return environment


def _numeric(table: Table) -> list[bool]:
    """Return for each column whether it holds numbers, which are aligned to the right."""
    return [all(not isinstance(row[place], str) for row in table.rows) for place in range(len(table.columns))]


def write_findings(findings: Findings, directory: Path) -> None:
    """Write `index.html`, `numbers.json`, and `SECTION-TABLE.csv` for each table; all files or none.

    Numbers have six significant digits. Undefined numbers are null in JSON and empty in CSV.

    Args:
        findings: results to write.
        directory: new folder; must not exist.

    Raises:
        CheckpointError: the folder exists or cannot be written.
    """
    page, numbers = render_page(findings), json.dumps(to_json(findings), allow_nan=False, indent=1)
    with atomic_directory(directory) as partial:
        (partial / "index.html").write_text(page, encoding="utf-8")
        (partial / "numbers.json").write_text(numbers + "\n", encoding="utf-8")
        for section in findings.sections:
            for table in section.tables:
                (partial / f"{section.name}-{table.name}.csv").write_text(to_csv(table), encoding="utf-8")


def to_json(findings: Findings) -> dict[str, Any]:
    """Return the findings in JSON types."""
    sections = {}
    for section in findings.sections:
        found = _rounded(asdict(section))
        found["tables"] = {table.pop("name"): table for table in found["tables"]}
        sections[section.name] = {key: found[key] for key in ("title", "reading", "source", "tables", "pictures")}
    return {
        "title": findings.title,
        "facts": findings.facts,
        "actions": findings.actions,
        "highlights": findings.highlights,
        "sections": sections,
        "omitted": findings.omitted,
    }


def to_csv(table: Table) -> str:
    """Return a table as CSV with a header line and units in brackets."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([f"{column.name} [{column.unit}]" if column.unit else column.name for column in table.columns])
    writer.writerows(_rounded(table.rows))
    return file.getvalue()


def _rounded(value: Any) -> Any:
    """Return a value with all floats in it rounded."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
