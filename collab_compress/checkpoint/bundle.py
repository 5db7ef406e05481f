"""Join the definitions that some names need into the source of one module."""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from collab_compress.errors import CheckpointError

PACKAGE = "collab_compress"


@dataclass
class _Module:
    """What stands at the top level of one module of this package.

    Args:
        lines: its source.
        definitions: name → the statement that defines it.
        imports: name → module it is imported from, name there (None for the module itself).
    """

    lines: list[str]
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)

    def source(self, statement: ast.stmt) -> str:
        """Text of a statement, decorators and the comment right above it included."""
        first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))]) - 1
        while first and self.lines[first - 1].startswith("#"):
            first -= 1
        return "\n".join(self.lines[first : statement.end_lineno])


def bundle(roots: Iterable[tuple[str, str]]) -> str:
    """Give the source of a module that defines some names of this package, and all that they need of it.

    Definitions stand in the order of their modules' imports, then of their lines. Statements at the top level that
    define nothing, as calls that register something, are left out.

    Args:
        roots: (module, name) each.

    Raises:
        CheckpointError: a name is not defined where it is looked for, or two modules define different things of one
            name that are both needed.
    """
    modules: dict[str, _Module] = {}
    needed: dict[str, str] = {}  # name → module that defines it
    outside: dict[tuple[str, str | None], str] = {}  # import from elsewhere → name it is bound to
    waiting = list(roots)
    while waiting:
        place, name = waiting.pop()
        module = modules[place] if place in modules else modules.setdefault(place, _read(place))
        if name in module.imports:
            origin, original = module.imports[name]
            if original is not None and origin.partition(".")[0] == PACKAGE:
                waiting.append((origin, original))
            else:
                outside[origin, original] = name
        elif name in module.definitions:
            if needed.setdefault(name, place) != place:
                raise CheckpointError(
                    f"{name} is defined in {needed[name]} and in {place}; one file cannot hold both"
                )
            if needed[name] == place and (place, name) not in outside:
                used = {node.id for node in ast.walk(module.definitions[name]) if isinstance(node, ast.Name)}
                known = (used & {*module.definitions, *module.imports}) - {name}
                waiting += [(place, each) for each in known if needed.get(each) != place]
        else:
            raise CheckpointError(f"{place} defines no {name}")
    statements = [
        modules[place].source(statement)
        for place in _in_order(modules)
        for name, statement in modules[place].definitions.items()
        if needed.get(name) == place
    ]
    imports = sorted(
        f"import {origin}" + (f" as {name}" if name != origin.partition(".")[0] else "")
        if original is None
        else f"from {origin} import {original}" + (f" as {name}" if name != original else "")
        for (origin, original), name in outside.items()
    )
    return "\n".join(imports) + "\n\n\n" + "\n\n\n".join(statements) + "\n"


def _read(place: str) -> _Module:
    file = sys.modules[place].__file__
    assert file is not None
    source = Path(file).read_text(encoding="utf-8")
    module = _Module(source.splitlines())
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            module.imports |= {
                alias.asname or alias.name.partition(".")[0]: (alias.name, None) for alias in statement.names
            }
        elif isinstance(statement, ast.ImportFrom):
            module.imports |= {
                alias.asname or alias.name: (str(statement.module), alias.name) for alias in statement.names
            }
        else:
            module.definitions |= dict.fromkeys(_defined(statement), statement)
    return module


def _defined(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
    for target in getattr(statement, "targets", [getattr(statement, "target", None)]):
        if isinstance(target, ast.Name):
            yield target.id


def _in_order(modules: dict[str, _Module]) -> list[str]:
    """Sort modules so that each stands behind those it imports from."""
    found: list[str] = []
    seen: set[str] = set()

    def visit(place: str) -> None:
        if place in seen or place not in modules:
            return
        seen.add(place)
        for origin, _ in modules[place].imports.values():
            visit(origin)
        found.append(place)

    for place in modules:
        visit(place)
    return found
