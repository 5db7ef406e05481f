"""All measures of a model's heads, as numbers and as a page of pictures."""

from collab_compress.options import ReportOptions
from collab_compress.report.context import ReportContext, TaskScore
from collab_compress.report.result import ReportResult, make_report, render_page, to_dict, to_json, write_report
from collab_compress.report.section import Curve, Curves, Heatmap, Heatmaps, Panel, Section, Table
from collab_compress.report.sections import SECTIONS

__all__ = [
    "SECTIONS",
    "Curve",
    "Curves",
    "Heatmap",
    "Heatmaps",
    "Panel",
    "ReportContext",
    "ReportOptions",
    "ReportResult",
    "Section",
    "Table",
    "TaskScore",
    "make_report",
    "render_page",
    "to_dict",
    "to_json",
    "write_report",
]
