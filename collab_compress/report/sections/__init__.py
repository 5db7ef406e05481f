"""The sections of a report. Adding one is a function and a line in `SECTIONS`."""

from collections.abc import Callable

from collab_compress.report.section import Omitted, Section
from collab_compress.report.sections.attention_maps import attention_maps
from collab_compress.report.sections.content import content
from collab_compress.report.sections.cost import cost
from collab_compress.report.sections.diversity import diversity
from collab_compress.report.sections.dominance import dominance
from collab_compress.report.sections.energy import energy
from collab_compress.report.sections.mixing import mixing
from collab_compress.report.sections.similarity import similarity
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
