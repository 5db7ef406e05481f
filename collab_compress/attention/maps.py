"""What converted maps of attention have in common.

An attention module has two maps: the QK circuit, which makes the scores, and the OV circuit, which makes the head
outputs ("A Mathematical Framework for Transformer Circuits", Elhage et al., 2021). A converted one is a module of its
own, `qk` or `ov`, in the attention module. Its config is what a checkpoint stores; a new kind is a config, a module
and a line in `MAP_KINDS` (`attention/edits.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

from torch import Tensor, nn

from collab_compress.attention.projections import PaddedProjection, Weights

Layers: TypeAlias = dict[str, nn.Linear | Weights]
"""Path of a projection in the attention module → the layer to put there, or parameters for the layer there."""

Part: TypeAlias = Literal["query", "key", "value"]


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
        """Return the fields in JSON types."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

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
        """Return an uninitialised map and its projections, with device, dtype and frozenness of the dense ones."""

    @classmethod
    @abstractmethod
    def from_dense(
        cls, site: Any, config: Any, moments: Any, head_weights: Tensor | None, solver: Any
    ) -> tuple["ConvertedMap", Layers, Any]:
        """Solve for the map of a dense module; return it, its projections, and the solver's result."""

    @abstractmethod
    def to_dense(self, site: Any, head_width: int | None) -> Layers:
        """Return dense projections that compute the same, by path."""

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

    def wrap(self, path: str, projection: nn.Linear, module: Any) -> PaddedProjection:
        """Return the padded projection of a module with its stock forward pass."""
        return PaddedProjection(projection)

    def finish_(self, module: Any) -> None:
        """Restore, in place, what a checkpoint does not hold."""


def kept_rows(heads: Sequence[int], count: int, start: int = 0) -> list[int]:
    """Return the rows of some heads, each of which has `count`."""
    return [start + head * count + row for head in heads for row in range(count)]
