"""Look at a model: run the sections one after another, and keep what they found."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from html import escape
from importlib.metadata import version
from time import perf_counter

import torch
import transformers

from collab_compress.errors import HeadError, UnsupportedModelError
from collab_compress.report.section import Cell, Omitted, Section
from collab_compress.report.sections import SECTIONS
from collab_compress.report.study import Study


@dataclass(frozen=True)
class Findings:
    """What was found.

    Args:
        title: names of what was looked at.
        facts: what a reader needs to know of model, data and machine, in words.
        sections: what was measured, in order.
        omitted: name of a section that is not there → why.
        about: what stands before the title on the page.
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
        """The most telling numbers, a sentence each."""
        return [line for section in self.sections for line in section.highlights]

    @property
    def actions(self) -> list[str]:
        """What a reader can do about the findings, a sentence each."""
        return [line for section in self.sections for line in section.actions]

    def table(self, section: str, name: str) -> list[dict[str, Cell]]:
        """Return a table, a dictionary for each row by names of columns.

        Args:
            section: name of the section, as "dominance".
            name: short name of the table, as "pruning".

        Raises:
            HeadError: there is no such table.
        """
        tables = {(part.name, each.name): each for part in self.sections for each in part.tables}
        if (section, name) not in tables:
            names = ", ".join(" ".join(key) for key in tables)
            raise HeadError(f"there is no table {section} {name}; expected one of {names}")
        found = tables[section, name]
        return [dict(zip((column.name for column in found.columns), row, strict=True)) for row in found.rows]

    def _repr_html_(self) -> str:
        """Show the page in a notebook, apart from the notebook's own styles."""
        from collab_compress.report.page import render_page

        page = escape(render_page(self), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:48rem;border:0"></iframe>'


def look_at(study: Study, sections: Collection[str] = tuple(SECTIONS)) -> Findings:
    """Measure what the sections show.

    Args:
        study: what is looked at.
        sections: names of sections, of `SECTIONS`; they come in its order.

    Raises:
        HeadError: a section is unknown, or none of them can be measured on this model and data.
        CalibrationError: a model does not take the batches.
    """
    unknown = sorted(set(sections) - set(SECTIONS))
    if unknown or not sections:
        raise HeadError(f"unknown section {', '.join(unknown) or 'none'}; expected some of {', '.join(SECTIONS)}")
    started, found, omitted = perf_counter(), [], {}
    for name, measure in SECTIONS.items():
        if name in sections:
            try:
                section = measure(study)
            except (HeadError, UnsupportedModelError) as error:
                section = Omitted(str(error))
            if isinstance(section, Omitted):
                omitted[name] = section.reason
            else:
                found.append(section)
    if not found:
        raise HeadError("nothing to show: " + "; ".join(f"{name}: {reason}" for name, reason in omitted.items()))
    against = "" if study.baseline is None else f" against {study.baseline_name}"
    facts = {**_facts(study), "measured in": f"{perf_counter() - started:.0f} s"}
    return Findings(f"{study.name}{against}", facts, tuple(found), omitted)


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
