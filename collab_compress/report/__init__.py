"""All measures of a model's heads, as numbers and as a page of pictures."""

from collab_compress.options import Look
from collab_compress.report.findings import Findings, look_at, render_page, to_json, write_findings
from collab_compress.report.section import Column, Curve, Curves, Heatmap, Heatmaps, Omitted, Panel, Section, Table
from collab_compress.report.sections import SECTIONS
from collab_compress.report.study import Study, TaskScore

__all__ = [
    "SECTIONS",
    "Column",
    "Curve",
    "Curves",
    "Findings",
    "Heatmap",
    "Heatmaps",
    "Look",
    "Omitted",
    "Panel",
    "Section",
    "Study",
    "Table",
    "TaskScore",
    "look_at",
    "render_page",
    "to_json",
    "write_findings",
]
