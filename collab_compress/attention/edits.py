"""The table of converted maps, and the model edit by which a checkpoint stores them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

from torch import nn

from collab_compress.architectures.sites import fused_slice
from collab_compress.attention.maps import MapConfig
from collab_compress.attention.projections import family_of, projection_like, rows_of
from collab_compress.attention.rotary import RotaryConfig
from collab_compress.attention.run import install_
from collab_compress.attention.shared import SharedConfig
from collab_compress.attention.values import NarrowConfig
from collab_compress.errors import CheckpointError, one_line

MAP_KINDS: dict[str, type[MapConfig]] = {config.kind: config for config in (SharedConfig, RotaryConfig, NarrowConfig)}
"""Name in checkpoints → config of the converted map."""

LARGEST = 2**31  # stored numbers are smaller
T = TypeVar("T")


@dataclass(frozen=True)
class MapEdit:
    """Attention modules of which one map is converted, all to one kind.

    Args:
        kind: of the map.
        modules: path of each module inside the base model (so that the checkpoint loads with and without a head)
            → config of the map.

    Example:
        >>> from collab_compress import Compression, compress
        >>> from collab_compress.checkpoint import edits_of
        >>> report = compress(model, Compression(dk=12), calibration=None)
        >>> (edit,) = edits_of(model)
        >>> edit.kind, edit.heads["encoder.layer.0.attention.self"]
        ('collaborative', 3)
        >>> MapEdit.from_dict({"kind": edit.kind, **edit.to_dict()}) == edit
        True
    """

    kind: str
    modules: Mapping[str, MapConfig]

    @property
    def heads(self) -> dict[str, int]:
        """Path of each module → the number of heads that it has before the edit."""
        return {name: config.heads for name, config in self.modules.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the edit in JSON types."""
        return {"modules": {name: config.to_dict() for name, config in self.modules.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "MapEdit":
        """Rebuild the edit from its kind and what `to_dict` returned."""
        kind = MAP_KINDS[data["kind"]]
        modules = {name: from_stored(kind, stored, name) for name, stored in stored_modules(data).items()}
        return cls(data["kind"], modules)

    def apply_(self, model: Any) -> None:
        """Install maps without weights in `model` in place, for weights to be loaded into."""
        with refusing_other_models(self.kind, model):
            for name, config in self.modules.items():
                module = model.base_model.get_submodule(name)
                if not hasattr(module, config.module.at):
                    parent = model.base_model.get_submodule(name.rpartition(".")[0])
                    check_fits(config, module, name)
                    install_(module, *config.module.build(config, module, parent), parent)

    def finish_(self, model: Any) -> None:
        """Restore, in place, what the checkpoint does not hold."""
        for name, config in self.modules.items():
            module = model.base_model.get_submodule(name)
            module.get_submodule(config.module.at).finish_(module)


def check_fits(config: MapConfig, module: Any, name: str) -> None:
    """Check that the dense projections of the module called `name` have the widths of a stored config."""
    family = family_of(module)
    query, key = config.heads * config.head_width, config.key_value_heads * config.head_width
    paths = (
        {family.paths.query: query, family.paths.key: key} if config.module.at == "qk" else {family.paths.value: key}
    )
    for path, width in paths.items():
        part = fused_slice(module, family, path)
        channels = len(projection_like(module, path)[0]) if part is None else part.out_features
        if path in rows_of(module):
            rows = rows_of(module)[path]
            channels = rows.stop - rows.start
        if channels != width:
            raise CheckpointError(
                f"the stored edit of {name} has {config.heads} heads, each {config.head_width} wide, so {path} would "
                f"have {width} channels; the model has {channels}"
            )


def stored_modules(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an edit stores of each module, by the module's path."""
    modules = data.get("modules")
    if not isinstance(modules, Mapping) or not modules or not all(isinstance(name, str) for name in modules):
        raise CheckpointError(
            f"a stored edit of kind {data.get('kind')!r} has modules {modules!r:.80}; expected an object by path"
        )
    return dict(modules)


def from_stored(kind: type[T], data: Any, module: str) -> T:
    """Build a dataclass with `rules` from its stored fields."""
    where = f"the stored edit of {module}"
    if not isinstance(data, Mapping):
        raise CheckpointError(f"{where} is {data!r:.80}; expected an object with fields")
    known = {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    for name in data.keys() - known.keys():
        raise CheckpointError(f"{where} has a field {name!r:.80}, which is not known")
    for name, entry in known.items():
        if name not in data and entry.default is MISSING:
            raise CheckpointError(f"{where} lacks the field {name}")
        if name in data and not _has_type(data[name], entry.type):
            expected = entry.type if get_args(entry.type) else getattr(entry.type, "__name__", entry.type)
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
