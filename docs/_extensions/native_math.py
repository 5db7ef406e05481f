"""Formulas as MathML, which browsers draw without a script or a network."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

SIZED = re.compile(r"\\[bB]igg?[lr]?\s*(?=\\\|)")  # the converter knows sizes of brackets only


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer `native`."""
    app.add_html_math_renderer("native", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _inline(writer: HTML5Translator, node: nodes.math) -> None:
    writer.body.append(_rendered(node, "inline"))
    raise nodes.SkipNode


def _block(writer: HTML5Translator, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{_rendered(node, "block")}</div>\n')
    raise nodes.SkipNode


def _rendered(node: nodes.Element, display: str) -> str:
    formula = node.astext()
    try:
        drawn = convert(SIZED.sub("", formula).strip(), display=display)
    except Exception as error:  # of many kinds; the warning stops the build
        logging.getLogger(__name__).warning("formula %r: %s", formula, error, location=node)
        return f"<code>{formula}</code>"
    if "\\" in drawn:
        logging.getLogger(__name__).warning(
            "formula %r: %s", formula, "has a command that is not known", location=node
        )
    return drawn
