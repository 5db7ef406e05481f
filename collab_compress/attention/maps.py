"""What converted maps of attention have in common, and the model edit by which a checkpoint stores them.

An attention module has two maps: the QK circuit, which makes the scores, and the OV circuit, which makes the head
outputs ("A Mathematical Framework for Transformer Circuits", Elhage et al., 2021). A converted one is a module of its
own, `qk` or `ov`, in the attention module. Its config is what a checkpoint stores; a new kind is a config, a module
and a line in `MAP_KINDS` (`attention/__init__.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from types import UnionType
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, TypeVar, get_args, get_origin

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from collab_compress.attention.projections import (
    QKVProjection,
    Weights,
    fused_layer,
    projection_like,
    rows_of,
)
from collab_compress.errors import CheckpointError, one_line

Layers: TypeAlias = dict[str, nn.Linear | Weights]
"""Path of a projection in the attention module → the layer to put there, or parameters for the layer there."""

Part: TypeAlias = Literal["query", "key", "value"]

LARGEST = 2**31  # stored numbers are smaller
T = TypeVar("T")


class Cut(NamedTuple):
    """A pending `setattr` of pruning: a smaller parameter, or a size that follows from it."""

    owner: Any
    name: str
    value: Any


class HeadRows(NamedTuple):
    """Rows of a parameter or buffer that belong to single heads: `size` for each in turn, the first at `start`."""

    path: str
    start: int
    size: int


@dataclass(frozen=True)
class MapConfig(ABC):
    """What is needed to rebuild a converted map, weights aside.

    Args:
        heads: number of heads H.
        head_width: width d of one head in the dense model.
        cross: whether keys and values are of other inputs than queries.
    """

    heads: int
    head_width: int
    cross: bool = field(default=False, kw_only=True)

    kind: ClassVar[str]
    """Name in checkpoints."""
    title: ClassVar[str]
    """The map in words, for model cards."""
    module: ClassVar[type["ConvertedMap"]]
    """The class of the converted map."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in JSON types; those with their default value are left out."""
        defaults = {entry.name: entry.default for entry in fields(self)}
        found = {name: value for name, value in asdict(self).items() if value != defaults[name]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what stored fields must hold: name of a field, whether it does, what is expected."""
        yield "heads", self.heads > 0, "at least 1"
        yield "head_width", self.head_width > 0, "at least 1"

    @property
    def key_value_heads(self) -> int:
        """Number of heads of keys and values in the dense model."""
        return self.heads

    @abstractmethod
    def parameters(self, widths: tuple[int, int]) -> int:
        """Count the parameters of the map, for the widths of its two projections as a site has them."""

    @abstractmethod
    def macs(self, widths: tuple[int, int], length: int) -> int:
        """Count the multiply-accumulates of the map for T = `length` tokens; widths as for `parameters`."""

    @abstractmethod
    def without(self, kept: Sequence[int]) -> Self:
        """Return the config of the kept heads, in ascending order."""


class ConvertedMap(nn.Module, ABC):
    """A map of an attention module in another form than the dense one, a child of that module.

    It has the parameters that belong to it alone. Its projections are the attention module's (`projections`), where
    those of both maps can be one layer. They are built, and filled, as a dictionary of layers by path, which
    `run.install_` puts in place.
    """

    at: ClassVar[str]
    """Name of the map in the attention module."""
    config: Any

    @classmethod
    @abstractmethod
    def build(cls, config: Any, module: Any, parent: Any) -> tuple[Self, Layers]:
        """Return an uninitialised map and its projections, with device, dtype and frozenness of the dense ones.

        Args:
            config: of the map.
            module: the attention module.
            parent: the module that holds it, where a family's path that starts with `..` begins.

        Raises:
            CompressionError: the module has no room for the map.
        """

    @classmethod
    @abstractmethod
    def from_dense(
        cls, site: Any, config: Any, moments: Any, head_weights: Tensor | None, solver: Any
    ) -> tuple["ConvertedMap", Layers, Any]:
        """Solve for the map of a dense module; return it, its projections, and the solver's result.

        Args:
            site: the module, as `architectures` finds it.
            config: of the map.
            moments: of the inputs of its projections, or None to count all their directions alike.
            head_weights: weight of each head's score error, (H,), or None.
            solver: options.
        """

    @abstractmethod
    def to_dense(self, site: Any, head_width: int | None) -> Layers:
        """Return dense projections that compute the same, by path.

        Args:
            site: the attention module.
            head_width: of the dense heads; None for that of the model that was converted.

        Raises:
            CompressionError: dense heads of this width would not compute the same.
            UnsupportedModelError: a projection has an adapter, is quantized or offloaded.
        """

    @abstractmethod
    def head_rows(self, module: Any) -> list[HeadRows]:
        """List the rows that belong to single heads, with paths in the attention module."""

    @abstractmethod
    def kept_channels(self, part: Part, kept: Sequence[int]) -> list[int]:
        """Return the channels of a projection that the kept heads need, in ascending order."""

    @abstractmethod
    def cuts(self, kept: Sequence[int]) -> list[Cut]:
        """Return the cuts of the map's own parameters that leave the kept heads; projections are cut elsewhere."""

    def put_in_(self, module: Any) -> None:
        """Change attributes of the attention module, in place, when the map is installed."""

    def take_out_(self, module: Any) -> None:
        """Undo `put_in_`, in place."""

    def wrap(self, path: str, projection: nn.Linear, module: Any) -> Any:
        """Return the padded projection of a module with its stock forward pass."""
        from collab_compress.attention.projections import PaddedProjection

        return PaddedProjection(projection)

    def finish_(self, module: Any) -> None:
        """Restore, in place, what a checkpoint does not hold."""


def kept_rows(heads: Sequence[int], count: int, start: int = 0) -> list[int]:
    """Return the rows of some heads, each of which has `count`.

    Example:
        >>> kept_rows([0, 2], count=2, start=10)
        [10, 11, 14, 15]
    """
    return [start + head * count + row for head in heads for row in range(count)]


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
        """Rebuild the edit from its kind and what `to_dict` returned.

        Raises:
            CheckpointError: a stored config is invalid.
        """
        from collab_compress.attention import MAP_KINDS

        kind = MAP_KINDS[data["kind"]]
        modules = {name: from_stored(kind, stored, name) for name, stored in stored_modules(data).items()}
        return cls(data["kind"], modules)

    def apply_(self, model: Any) -> None:
        """Install maps without weights in `model` in place, for weights to be loaded into.

        Raises:
            CheckpointError: the model lacks the modules, or they have other widths.
        """
        from collab_compress.attention.run import install_

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
    """Check that the dense projections of the module called `name` have the widths of a stored config.

    Raises:
        CheckpointError: they have not.
    """
    from collab_compress.attention.projections import family_of

    family = family_of(module)
    query, key = config.heads * config.head_width, config.key_value_heads * config.head_width
    paths = {family.query: query, family.key: key} if config.module.at == "qk" else {family.value: key}
    for path, width in paths.items():
        layer = fused_layer(module, path)
        weight, _ = projection_like(module, path)
        channels = weight.shape[1 if isinstance(layer, Conv1D) else 0]
        if path in rows_of(module):
            rows = rows_of(module)[path]
            channels = rows.stop - rows.start
        elif layer is not None and not isinstance(layer, QKVProjection):  # queries, keys and values together
            width = query + 2 * key
        if channels != width:
            raise CheckpointError(
                f"the stored edit of {name} has {config.heads} heads, each {config.head_width} wide, so {path} would "
                f"have {width} channels; the model has {channels}"
            )


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
