"""Ship the modelling code with a checkpoint, for people who do not have this package.

The file holds what the edits need of this package's own source, joined into one module. A checkpoint that carries it
loads with `trust_remote_code=True`; with the package imported it loads without running the file.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from collab_compress.architectures import transformers_model
from collab_compress.checkpoint.edits import EDITS, edits_of
from collab_compress.errors import CheckpointError

MODULE = "modeling_collab_compress"
# What the tail of the file uses, beside the edits: where it is defined, or imported.
ROOTS = (
    ("collab_compress.attention.functions", "register_attention"),
    ("collab_compress.checkpoint.edits", "EDITS"),
    ("collab_compress.checkpoint.edits", "METHOD"),
    ("collab_compress.transformers_parts", "QUANTIZERS"),
    ("collab_compress.checkpoint.quantizer", "register_checkpoint"),
    ("collab_compress.checkpoint.edits", "PreTrainedModel"),
)
_HEAD = '''"""Modelling code of a checkpoint made with collab-compress, for loading without that package.

    model = AutoModel.from_pretrained(PATH, trust_remote_code=True)
"""

'''
_TAIL = '''
EDITS.update({{{edits}}})
if METHOD not in QUANTIZERS:  # else the package is there, and does all this
    register_attention()
    register_checkpoint()


def __getattr__(name):
    """Return the stock model class of that name as a class of this file, so that saving copies the file too."""
    import transformers

    stock = getattr(transformers, name, None) if not name.startswith("_") else None
    if not (isinstance(stock, type) and issubclass(stock, PreTrainedModel)):
        raise AttributeError(name)
    globals()[name] = type(name, (stock,), {{"__module__": __name__}})
    return globals()[name]
'''
PACKAGE = "collab_compress"


def make_standalone_(model: PreTrainedModel) -> None:
    """Make `model` save its modelling code beside its weights from now on, in place.

    Every Auto class of its family loads the checkpoint by that code, so that it can get another head. References to
    other code (`auto_map`) are dropped, for that code is not saved.

    Args:
        model: a converted model.

    Raises:
        CheckpointError: the model is a stock one, which needs no code.
    """
    model = transformers_model(model)
    if not edits_of(model):
        raise CheckpointError(f"{type(model).__name__} is not converted, so it has no modelling code to ship")
    model.__class__ = standalone_class(type(model))
    model.config.auto_map = {auto: f"{MODULE}.{stock}" for auto, stock in _auto_classes(model).items()}


def forget_standalone_(model: PreTrainedModel) -> None:
    """Undo `make_standalone_`, in place; does nothing to other models."""
    if issubclass(type(model), _SavesModellingCode):
        model.__class__ = type(model).__bases__[1]
        vars(model.config).pop("auto_map", None)


def keep_standalone_(model: PreTrainedModel) -> None:
    """Make a model that was loaded from a checkpoint with modelling code save that code again, in place."""
    if names_our_code(model.config) and type(model)._auto_class is None:
        make_standalone_(model)


def names_our_code(config: Any) -> bool:
    """Return whether a config refers to modelling code that `make_standalone_` saved."""
    auto_map = getattr(config, "auto_map", None)
    code = auto_map.values() if isinstance(auto_map, dict) else ()
    return any(isinstance(name, str) and name.startswith(f"{MODULE}.") for name in code)


def standalone_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass of a stock model class, of the same name, that saves its modelling code."""
    if issubclass(stock, _SavesModellingCode):
        return stock
    module = sys.modules[__name__]
    if stock.__name__ not in module.__dict__:
        setattr(module, stock.__name__, type(stock.__name__, (_SavesModellingCode, stock), {"__module__": __name__}))
    made: type[PreTrainedModel] = getattr(module, stock.__name__)
    return made


def __getattr__(name: str) -> Any:
    """Return the standalone class of a stock model class by name, as unpickling looks it up."""
    import transformers

    stock = getattr(transformers, name, None) if not name.startswith("_") else None
    if not (isinstance(stock, type) and issubclass(stock, PreTrainedModel)):
        raise AttributeError(name)
    return standalone_class(stock)


@cache
def modelling_code() -> str:
    """Return the source of a module that knows every kind of edit, and nothing else of this package."""
    code = bundle([*((edit.__module__, edit.__name__) for edit in EDITS.values()), *ROOTS])
    return _HEAD + code + _TAIL.format(edits=", ".join(f'"{kind}": {edit.__name__}' for kind, edit in EDITS.items()))


@dataclass
class _Module:
    """Top-level statements of one module of this package.

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
    """Return the source of a module that defines some names of this package and all that they need of it.

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


class _SavesModellingCode:
    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("is_main_process", True):
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            (Path(save_directory) / f"{MODULE}.py").write_text(modelling_code(), encoding="utf-8")
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]


def _auto_classes(model: PreTrainedModel) -> dict[str, str]:
    """Name every Auto class of the model's family → the stock class that it loads, `model`'s own where it may."""
    from transformers.models.auto import modeling_auto

    own, found = type(model).__name__, {}
    for name, auto_class in vars(modeling_auto).items():
        mapping = getattr(auto_class, "_model_mapping", None)
        if isinstance(auto_class, type) and name.startswith("AutoModel") and mapping is not None:
            listed = mapping._model_mapping.get(model.config.model_type)
            if listed is not None:
                names = tuple(listed) if isinstance(listed, list | tuple) else (listed,)
                found[name] = own if own in names else names[0]
    return found if own in found.values() else {**found, "AutoModel": own}


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
