"""The sections of a report. Adding one is a function and a line in `SECTIONS`."""

from collections.abc import Callable

from collab_compress.report.section import Omitted, Section
from collab_compress.report.sections.differences import attention_maps, diversity
from collab_compress.report.sections.energy import energy
from collab_compress.report.sections.sharing import content, mixing
from collab_compress.report.sections.similarity import similarity
from collab_compress.report.sections.worth import cost, dominance
from collab_compress.report.study import Study

SECTIONS: dict[str, Callable[[Study], Section | Omitted]] = {
    "energy": energy,
    "mixing": mixing,
    "cost": cost,
    "similarity": similarity,
    "diversity": diversity,
    "attention_maps": attention_maps,
    "dominance": dominance,
    "content": content,
}
"""Name → function, in the order of the page."""
