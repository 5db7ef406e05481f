"""Formulas as MathML, which browsers draw themselves: no script and no network to read them."""

import re

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

# Fences of MathML grow by themselves; the rest are names that the converter has under another one.
KNOWN_OTHERWISE = ((re.compile(r"\\[bB]igg?[lr]?(?![a-zA-Z])"), ""), (re.compile(r"\\dots\b|…"), r"\\ldots "))


def to_mathml(formula: str, block: bool) -> str:
    """Turn LaTeX into a `<math>` element.

    Args:
        formula: what stands between the dollars.
        block: whether it stands alone.

    Raises:
        MathError: a command that is not known.
    """
    for found, instead in KNOWN_OTHERWISE:
        formula = found.sub(instead, formula)
    return str(latex2mathml.tex2mathml(formula.strip(), as_block=block))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer `native`."""
    app.add_html_math_renderer("native", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _inline(writer: HTML5Translator, node: nodes.math) -> None:
    writer.body.append(_rendered(node, block=False))
    raise nodes.SkipNode


def _block(writer: HTML5Translator, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{_rendered(node, block=True)}</div>\n')
    raise nodes.SkipNode


def _rendered(node: nodes.Element, block: bool) -> str:
    try:
        return to_mathml(node.astext(), block)
    except MathError as error:
        logging.getLogger(__name__).warning("%s in formula %r", error, node.astext(), location=node)
        return f"<code>{node.astext()}</code>"
