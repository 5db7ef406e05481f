"""The table of forms, and the model edit by which a checkpoint stores them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

from torch import nn
from transformers import PreTrainedModel

from collab_compress.attention.form import MapForm
from collab_compress.attention.install import install_
from collab_compress.attention.rotary import RotaryScores
from collab_compress.attention.shared import SharedScores
from collab_compress.attention.values import NarrowValues
from collab_compress.errors import CheckpointError, one_line

FORM_KINDS: dict[str, type[MapForm]] = {form.kind: form for form in (SharedScores, RotaryScores, NarrowValues)}
"""Name in checkpoints → form."""


@dataclass(frozen=True)
class FormEdit:
    """Attention modules of which one map is in one kind of form.

    Args:
        kind: of the form.
        modules: path of each module inside the base model (so that the checkpoint loads with and without a head)
            → its form.

    Example:
        >>> from collab_compress import Compression, compress
        >>> from collab_compress.checkpoint import edits_of
        >>> report = compress(model, Compression(dk=12), calibration=None)
        >>> (edit,) = edits_of(model)
        >>> edit.kind, edit.heads["encoder.layer.0.attention.self"]
        ('collaborative', 3)
        >>> FormEdit.from_dict({"kind": edit.kind, **edit.to_dict()}) == edit
        True
    """

    kind: str
    modules: Mapping[str, MapForm]

    @property
    def heads(self) -> dict[str, int]:
        """Path of each module → the number of heads that it has before the edit."""
        return {name: form.heads for name, form in self.modules.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the edit in JSON types."""
        return {"modules": {name: form.to_dict() for name, form in self.modules.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "FormEdit":
        """Rebuild the edit from its kind and what `to_dict` returned.

        Raises:
            CheckpointError: a stored form is invalid.
        """
        form = FORM_KINDS[data["kind"]]
        modules = {name: from_stored(form, stored, name) for name, stored in stored_modules(data).items()}
        return cls(data["kind"], modules)

    def apply_(self, model: PreTrainedModel) -> None:
        """Install attention without weights in `model` in place, for weights to be loaded into.

        Raises:
            CheckpointError: the model lacks the modules, or they have other widths.
        """
        with refusing_other_models(self.kind, model):
            for name, form in self.modules.items():
                module: Any = model.base_model.get_submodule(name)
                if not hasattr(module, form.at):
                    parent = model.base_model.get_submodule(name.rpartition(".")[0])
                    form.check_fits(module, name)
                    install_(module, form, form.build(module, parent))

    def finish_(self, model: PreTrainedModel) -> None:
        """Restore, in place, what the checkpoint does not hold."""
        for name, form in self.modules.items():
            module: Any = model.base_model.get_submodule(name)
            getattr(module, form.at).finish_(module)


LARGEST = 2**31  # stored numbers are smaller


T = TypeVar("T")


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


def from_stored(kind: type[T], data: Any, module: str) -> T:
    """Build a dataclass with `rules` from its stored fields.

    Args:
        kind: the dataclass.
        data: field → value.
        module: path of the module that it describes.

    Raises:
        CheckpointError: a field is missing, unknown, or has a value of another type, or fields contradict each other.
    """
    where = f"the stored edit of {module}"
    if not isinstance(data, Mapping):
        raise CheckpointError(f"{where} is {data!r:.80}; expected an object with fields")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for name in data.keys() - known.keys():
        raise CheckpointError(f"{where} has a field {name!r:.80}, which is not known")
    for name, field in known.items():
        if name not in data and field.default is MISSING:
            raise CheckpointError(f"{where} lacks the field {name}")
        if name in data and not _has_type(data[name], field.type):
            expected = field.type if get_args(field.type) else getattr(field.type, "__name__", field.type)
            raise CheckpointError(f"{where} has {name} {data[name]!r:.80}; expected {expected}")
    stored: Any = kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})
    for name, holds, expected in stored.rules():
        if not holds:
            raise CheckpointError(f"{where} has {name} {getattr(stored, name)!r:.80}; expected {expected}")
    result: T = stored
    return result


@contextmanager
def refusing_other_models(kind: str, model: nn.Module) -> Iterator[None]:
    """Raise `CheckpointError` if an edit of a kind is replayed on a model that lacks its modules."""
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
