"""The API reference: a page for each package, of the names in its `__all__`; names in the text link to it.

Docstrings are Markdown as in the code (`code`, $formula$) with Google's sections.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

import collab_compress

PAGES = "reference/packages"
OURS = ("collab_compress.", "collab_compress_glue_runs.")
EXPERIMENTS = ("experiments", "external_evaluation", "metrics", "tasks")
ATTRIBUTES: dict[str, list[str]] = {}  # docstrings of attributes before napoleon changes them
# Indented lines after an empty one, before any section.
CODE_BLOCK = re.compile(r"(?<=\n\n)((?: {4}.*(?:\n|$)|\n(?= {4}))+)(?=\n|$)")
SECTION = re.compile(r"^(Args|Returns|Raises|Yields):$", re.MULTILINE)
PARTS = re.compile(r"(\$\$.+?\$\$|\$[^$\n]+?\$|``.+?``|`[^`]+`)", re.DOTALL)
MARKUP = re.compile(r"\*(?=\S)|\||(?<=\w)_(?!\w)")


def packages() -> list[ModuleType]:
    """Return the package itself and its modules with an `__all__`."""
    names = [f"collab_compress.{module.name}" for module in pkgutil.iter_modules(collab_compress.__path__)]
    names += [
        f"collab_compress_glue_runs.{name}" for name in ("experiments", "external_evaluation", "metrics", "tasks")
    ]
    modules = map(importlib.import_module, names)
    return [collab_compress, *(module for module in modules if getattr(module, "__all__", ()))]


def documented() -> dict[str, str]:
    """Return name → where the object is documented, for full names and for unique short ones."""
    paths: dict[str, str] = {}
    things: dict[str, Any] = {}
    homes: dict[int, str] = {}
    for package in packages():  # the package itself comes first, so that all its names are documented there
        for name in package.__all__:
            thing = getattr(package, name)
            home = homes.setdefault(id(thing), f"{package.__name__}.{name}")
            paths[f"{package.__name__}.{name}"] = home
            if things.setdefault(name, thing) is thing:
                paths.setdefault(name, home)
            else:
                paths.pop(name, None)
            if hasattr(thing, "__qualname__"):
                paths.setdefault(f"{thing.__module__}.{thing.__qualname__}", home)
    return paths


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the reference."""
    app.connect("builder-inited", _write_pages)
    app.connect("autodoc-process-docstring", _from_markdown, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", _keep_attributes, priority=600)  # after napoleon
    app.connect("autodoc-skip-member", _skip)
    app.connect("missing-reference", _moved)
    app.add_transform(LinkNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class LinkNames(SphinxTransform):
    """Link code that is just a public name."""

    default_priority = 850

    def apply(self, **_: Any) -> None:
        """Replace the names in a document."""
        known = documented()
        for literal in list(self.document.findall(nodes.literal)):
            path = known.get(literal.astext().removesuffix("()"))
            inside = (nodes.reference, nodes.title, addnodes.pending_xref, addnodes.desc_signature)
            if path is None or any(isinstance(parent, inside) for parent in _parents(literal)):
                continue
            link = addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=path, refexplicit=True, refwarn=True
            )
            literal.replace_self(link)
            link += literal


def _parents(node: nodes.Node) -> list[nodes.Node]:
    parents = []
    while (node := node.parent) is not None:
        parents.append(node)
    return parents


def _write_pages(app: Sphinx) -> None:
    """Write the pages, and warn of public names without a docstring."""
    folder = Path(app.srcdir) / PAGES
    folder.mkdir(parents=True, exist_ok=True)
    pages = {}
    for package in packages():
        name = package.__name__
        for path in _undocumented(package):
            logging.getLogger(__name__).warning("%s is public and has no docstring", path)
        _plain_annotations(package)
        pages[f"{name}.md"] = "\n".join(_page(package))
    for path in folder.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for page, text in pages.items():
        path = folder / page
        if not path.is_file() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def _page(package: ModuleType) -> Iterator[str]:
    """Yield the lines of a page; what another package exports too is described once, and linked to."""
    known, module = documented(), package.__name__
    own = [name for name in package.__all__ if known[f"{module}.{name}"] == f"{module}.{name}"]
    shared = [name for name in package.__all__ if name not in own]
    tables = [name for name in own if not _is_code(getattr(package, name))]
    yield f"# `{module}`\n\n```{{eval-rst}}\n.. automodule:: {module}"
    if shared or tables:
        yield f"   :exclude-members: {', '.join(shared + tables)}"
    yield from _tables(package, tables)
    yield "```\n"
    if shared:
        yield "Also exported here: " + ", ".join(f"`{known[f'{module}.{name}']}`" for name in shared) + ".\n"


def _tables(package: ModuleType, names: list[str]) -> Iterator[str]:
    """Yield descriptions of tables by their names, and of types and constants by their values."""
    for name in names:
        thing = getattr(package, name)
        if isinstance(thing, Mapping):
            words = "Has " + ", ".join(f"``{key}``" for key in thing) + "."
        else:
            words = f"``{str(thing).replace('typing.', '')}``"
        yield f"\n.. py:data:: {name}\n   :module: {package.__name__}\n\n   {words}"


def _is_code(thing: Any) -> bool:
    """Return whether an object is a class or a function, not a table, a type or a constant."""
    return inspect.isclass(thing) or inspect.isfunction(thing)


def _plain_annotations(package: ModuleType) -> None:
    """Remove from annotations what only the command line needs, in place."""
    for name in package.__all__:
        thing = getattr(package, name)
        if dataclasses.is_dataclass(thing):
            for annotated in (thing, thing.__init__):
                plain = typing.get_type_hints(annotated)
                annotated.__annotations__.update({key: plain[key] for key in annotated.__annotations__})


def _undocumented(package: ModuleType) -> list[str]:
    paths = [] if package.__doc__ else [package.__name__]
    for name in package.__all__:
        thing = getattr(package, name)
        if not _is_code(thing):
            continue
        things = {f"{package.__name__}.{name}": thing}
        if inspect.isclass(thing):
            members = {key: value for key, value in vars(thing).items() if not key.startswith("_")}
            things |= {
                f"{package.__name__}.{name}.{key}": value
                for key, value in members.items()
                if inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
            }
        paths += [path for path, thing in things.items() if not _has_docstring(thing)]
    return paths


def _has_docstring(thing: Any) -> bool:
    """Return whether a class, or a method or what it overrides, has a docstring."""
    if inspect.isclass(thing):  # a dataclass without one has its signature there
        return bool(thing.__doc__) and not thing.__doc__.startswith(f"{thing.__name__}(")
    return bool(inspect.getdoc(thing))


def _skip(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Omit the fields of named tuples, whose docstrings are only their numbers."""
    return True if type(thing).__name__ == "_tuplegetter" else None


def _moved(app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, contents: nodes.TextElement) -> Any:
    """Resolve a name in an annotation to where it is documented; leave it plain if it is not."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or node.get("refexplicit"):
        return None
    path = documented().get(target)
    if path is None or path == target:
        return contents if target.startswith(OURS) or "." not in target else None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", path, node, contents)


def _from_markdown(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring's code and formulas as reStructuredText, in place, and escape everything else."""
    written = "\n".join(lines)
    section = SECTION.search(written)
    end = section.start() if section else len(written)
    blocks = CODE_BLOCK.split(written[:end])
    blocks[-1] += written[end:]
    text = "".join(_prose(block) if place % 2 == 0 else f"::\n\n{block}" for place, block in enumerate(blocks))
    lines[:] = text.split("\n")
    if what == "attribute":
        ATTRIBUTES[name] = list(lines)


def _prose(markdown: str) -> str:
    parts = PARTS.split(markdown)
    text = ""
    for place, part in enumerate(parts):
        if place % 2 == 0:
            text += MARKUP.sub(r"\\\g<0>", part)
        elif part.startswith("$$"):
            last = text.rpartition("\n")[2]
            indent = " " * (len(last) - len(last.lstrip()))
            formula = " ".join(part.strip("$").split())
            text = f"{text.rstrip()}\n\n{indent}.. math::\n\n{indent}    {formula}\n\n{indent}"
        elif part.startswith("$"):
            text += f":math:`{part.strip('$')}`" + _apart(parts, place)
        else:
            text += f"``{part.strip('`')}``" + _apart(parts, place)
    return text


def _keep_attributes(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Undo napoleon's reading of the text before a colon as a type."""
    if what == "attribute":
        lines[:] = ATTRIBUTES[name]


def _apart(parts: list[str], place: int) -> str:
    """Return what ends inline markup before a letter."""
    return "\\ " if re.match(r"\w", parts[place + 1]) else ""
