"""All measures of a model's heads, as numbers and as a page of pictures."""

from collab_compress.options import ReportOptions
from collab_compress.report.heads import TaskScore
from collab_compress.report.result import ReportResult, make_report, render_page, to_json, write_report

__all__ = ["ReportOptions", "ReportResult", "TaskScore", "make_report", "render_page", "to_json", "write_report"]
