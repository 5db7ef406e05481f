"""Ship the modelling code with a checkpoint, for people who do not have this package.

The file holds what the edits need of this package's source, joined into one module. A checkpoint that carries it
loads with `trust_remote_code=True`; with the package imported it loads without running the file.
"""

import ast
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from transformers import PreTrainedModel

from collab_compress.architectures import transformers_model
from collab_compress.checkpoint.edits import EDITS, MODULE, edits_of, names_our_code
from collab_compress.errors import CheckpointError

PACKAGE = "collab_compress"
# Names that the end of the file uses, and the modules that define or import them.
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
if METHOD not in QUANTIZERS:  # else the package is imported, and does all this
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


def make_standalone_(model: PreTrainedModel) -> None:
    """Make `model` save its modelling code beside its weights from now on, in place.

    Every Auto class of its family loads the checkpoint by that code, so that it can get another head. References to
    other code (`auto_map`) are dropped, because that code is not saved.

    Args:
        model: a converted model.

    Raises:
        CheckpointError: the model is a stock one, which needs no code.
    """
    model = transformers_model(model)
    if not edits_of(model):
        raise CheckpointError(f"{type(model).__name__} is not converted, so it has no modelling code to ship")
    model.config.auto_map = _auto_map(model)


def save_modelling_code(model: PreTrainedModel, directory: Path) -> None:
    """Write the modelling code of a model that `make_standalone_` marked into the directory it is saved to."""
    if names_our_code(model.config) and type(model)._auto_class is None:  # else Transformers copies it
        model.config.auto_map = _auto_map(model)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{MODULE}.py").write_text(modelling_code(), encoding="utf-8")


def _auto_map(model: PreTrainedModel) -> dict[str, str]:
    """Map every Auto class of the model's family to the stock class that it loads, the model's own if possible."""
    from transformers.models.auto import modeling_auto

    model_class, classes = type(model).__name__, {}
    for name, auto_class in vars(modeling_auto).items():
        mapping = getattr(auto_class, "_model_mapping", None)
        if isinstance(auto_class, type) and name.startswith("AutoModel") and mapping is not None:
            listed = mapping._model_mapping.get(model.config.model_type)
            if listed is not None:
                names = tuple(listed) if isinstance(listed, list | tuple) else (listed,)
                classes[name] = model_class if model_class in names else names[0]
    if model_class not in classes.values():
        classes["AutoModel"] = model_class
    return {auto_class: f"{MODULE}.{stock}" for auto_class, stock in classes.items()}


@cache
def modelling_code() -> str:
    """Return the source of a module that knows every kind of edit, and nothing else of this package."""
    code = bundle([*((edit.__module__, edit.__name__) for edit in EDITS.values()), *ROOTS])
    return _HEAD + code + _TAIL.format(edits=", ".join(f'"{kind}": {edit.__name__}' for kind, edit in EDITS.items()))


class _Module:
    """Top-level statements of one module of this package.

    Attributes:
        definitions: name → the statement that defines it.
        imports: name → module it is imported from, name there (None for the module itself).
    """

    def __init__(self, name: str) -> None:
        source = Path(str(sys.modules[name].__file__)).read_text(encoding="utf-8")
        self.lines = source.splitlines()
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, tuple[str, str | None]] = {}
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    self.imports[alias.asname or alias.name.partition(".")[0]] = alias.name, None
            elif isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    self.imports[alias.asname or alias.name] = str(statement.module), alias.name
            elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
                self.definitions[statement.name] = statement
            else:
                targets = getattr(statement, "targets", [getattr(statement, "target", None)])
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                self.definitions |= dict.fromkeys(names, statement)

    def uses(self, name: str) -> set[str]:
        """Return the names of this module that a definition uses."""
        names = {node.id for node in ast.walk(self.definitions[name]) if isinstance(node, ast.Name)}
        return names & {*self.definitions, *self.imports}

    def source(self, name: str) -> str:
        """Return the text of a definition, with its decorators and the comment above it."""
        statement = self.definitions[name]
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(decorator.lineno for decorator in decorators)]) - 1
        while first and self.lines[first - 1].startswith("#"):
            first -= 1
        return "\n".join(self.lines[first : statement.end_lineno])


def bundle(roots: Iterable[tuple[str, str]]) -> str:
    """Return the source of a module that defines some names of this package and everything they need of it.

    Definitions stand in the order of their modules' imports, then of their lines. Top-level statements that define
    nothing, such as calls that register something, are left out.

    Args:
        roots: (module, name) each.

    Raises:
        CheckpointError: a module does not define a name, or two modules define different things of one name.
    """
    modules: dict[str, _Module] = {}
    needed: dict[str, str] = {}  # name → module that defines it
    imports: set[str] = set()  # lines
    waiting = list(roots)
    while waiting:
        place, name = waiting.pop()
        if place not in modules:
            modules[place] = _Module(place)
        module = modules[place]
        if name in module.imports:
            origin, original = module.imports[name]
            if original is None:
                imports.add(f"import {origin}" + (f" as {name}" if name != origin.partition(".")[0] else ""))
            elif origin.partition(".")[0] == PACKAGE:
                waiting.append((origin, original))
            else:
                imports.add(f"from {origin} import {original}" + (f" as {name}" if name != original else ""))
        elif name not in module.definitions:
            raise CheckpointError(f"{place} defines no {name}")
        elif name not in needed:
            needed[name] = place
            waiting += [(place, used) for used in module.uses(name)]
        elif needed[name] != place:
            raise CheckpointError(f"{name} is defined in {needed[name]} and in {place}; one file cannot hold both")
    graph = {place: {origin for origin, _ in module.imports.values()} for place, module in modules.items()}
    definitions = [
        modules[place].source(name)
        for place in TopologicalSorter(graph).static_order()
        if place in modules
        for name in modules[place].definitions
        if needed.get(name) == place
    ]
    return "\n".join(sorted(imports)) + "\n\n\n" + "\n\n\n".join(definitions) + "\n"
