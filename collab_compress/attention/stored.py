"""Read what a checkpoint stores of an edit: dataclasses of numbers, names and tuples, as JSON has them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, ClassVar, Protocol, TypeVar, get_args, get_origin

from torch import nn

from collab_compress.errors import CheckpointError, one_line

LARGEST = 2**31  # of numbers that can be stored


class Stored(Protocol):
    """A dataclass whose fields are numbers, strings, booleans, or tuples of them."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what fields must hold: name of a field, whether it does, what is expected."""
        ...


T = TypeVar("T", bound=Stored)


def stored_modules(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an edit stores of each module, by the module's path.

    Raises:
        CheckpointError: there is no such mapping.
    """
    modules = data.get("modules")
    if not isinstance(modules, Mapping) or not modules or not all(isinstance(name, str) for name in modules):
        raise CheckpointError(
            f"a stored edit of kind {data.get('kind')!r} has modules {modules!r:.80}; expected an object by path"
        )
    return dict(modules)


def from_stored(described: type[T], data: Any, module: str) -> T:
    """Build a dataclass from its stored fields.

    Args:
        described: the dataclass.
        data: field → value.
        module: path of the module that it describes.

    Raises:
        CheckpointError: a field is missing, unknown, or has a value of another type, or fields contradict each other.
    """
    if not isinstance(data, Mapping):
        raise CheckpointError(f"the stored edit of {module} is {data!r:.80}; expected an object with fields")
    known = {field.name: field for field in fields(described)}
    for name in data.keys() - known.keys():
        raise CheckpointError(f"the stored edit of {module} has a field {name!r:.80}, which is not known")
    for name, field in known.items():
        if name not in data and field.default is MISSING:
            raise CheckpointError(f"the stored edit of {module} lacks the field {name}")
        if name in data and not _has_type(data[name], field.type):
            expected = field.type if get_args(field.type) else getattr(field.type, "__name__", field.type)
            raise CheckpointError(f"the stored edit of {module} has {name} {data[name]!r:.80}; expected {expected}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    stored = described(**values)
    for name, holds, wanted in stored.rules():
        if not holds:
            value = getattr(stored, name)
            raise CheckpointError(f"the stored edit of {module} has {name} {value!r:.80}; expected {wanted}")
    return stored


@contextmanager
def refusing_other_models(kind: str, model: nn.Module) -> Iterator[None]:
    """Raise `CheckpointError` where an edit of a kind is replayed on a model that lacks what it changes."""
    try:
        yield
    except AttributeError as error:
        raise CheckpointError(
            f"a stored edit of kind {kind!r} does not fit {type(model).__name__}: {one_line(error)}"
        ) from error


def _has_type(value: Any, expected: Any) -> bool:
    if get_origin(expected) is tuple:
        return isinstance(value, list | tuple) and all(_has_type(item, get_args(expected)[0]) for item in value)
    if isinstance(expected, UnionType):
        return any(_has_type(value, option) for option in get_args(expected))
    if expected is float:
        return type(value) in (int, float) and abs(value) < LARGEST
    if expected is int:
        return type(value) is int and 0 <= value < LARGEST
    return type(value) is expected
