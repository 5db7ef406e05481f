"""The sections of a report. Adding one is a function and a line in `SECTIONS`."""

from collections.abc import Callable

from collab_compress.report.context import ReportContext
from collab_compress.report.section import Section
from collab_compress.report.sections.cost import cost
from collab_compress.report.sections.heads import attention_maps, dominance, mixing, patterns
from collab_compress.report.sections.similarity import diversity, similarity
from collab_compress.report.sections.widths import widths

SECTIONS: dict[str, Callable[[ReportContext], Section]] = {
    "widths": widths,
    "mixing": mixing,
    "cost": cost,
    "similarity": similarity,
    "diversity": diversity,
    "patterns": patterns,
    "attention_maps": attention_maps,
    "dominance": dominance,
}
"""Name → function, in the order of the page; one that cannot be measured raises a HeadError with the reason."""
