"""Forms of attention's maps: frozen objects that build, install, use, prune, count and store what replaces a map."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from collab_compress.attention.decoding import cached_scores
from collab_compress.attention.projections import (
    Layout,
    PaddedProjection,
    QKVProjection,
    dense_projection,
    fused_layer,
    replace_,
)
from collab_compress.errors import CheckpointError, CollabCompressError, CompressionError, UnsupportedModelError


class Cut(NamedTuple):
    """A pending `setattr` of pruning: a smaller parameter, or a size that follows from it."""

    owner: Any
    name: str
    value: Any


@dataclass(frozen=True)
class MapForm(ABC):
    """The form of one map of an attention module: what is needed to rebuild and use it, weights aside.

    A module has two maps: scores (queries and keys) and values (values and output). Each is dense, or has a form in
    the module's attribute `at`. A new form is a subclass and a line in `FORM_KINDS`.

    Args:
        heads: number of heads H.
        head_width: width d of one head in the dense model.
        fixed_heads: whether the module views its projections as exactly H heads.
        interleaved: whether a fused layer holds each head's queries, keys and values together.
        pieces: name of the module's head-count attribute for reshaping, if it may be overwritten.
        even: whether the module views queries, keys and values of a fused layer as equally many heads.
    """

    heads: int
    head_width: int
    fixed_heads: bool = field(default=False, kw_only=True)
    interleaved: bool = field(default=False, kw_only=True)
    pieces: str = field(default="", kw_only=True)
    even: bool = field(default=False, kw_only=True)

    at: ClassVar[str]
    """Attribute of the module that holds the form."""
    kind: ClassVar[str]
    """Name in checkpoints."""
    title: ClassVar[str]
    """The form in words, for model cards."""

    @classmethod
    def for_site(cls, site: Any, **fields: Any) -> Self:
        """Return the form with these fields, and those that follow from the module, as `architectures` finds it."""
        viewed = site.family.layout
        layout = {"fixed_heads": viewed.fixed_head_count, "interleaved": viewed.interleaved}
        layout |= {"pieces": viewed.head_count_attr, "even": viewed.equal_widths}
        return cls(heads=site.heads, head_width=site.head_width, **layout, **fields)

    @property
    def dense_key_width(self) -> int:
        """Width of the dense keys, and values, of all heads."""
        return self.heads * self.head_width

    @property
    @abstractmethod
    def dense_widths(self) -> dict[str, int]:
        """Path of each projection that is replaced → its width in the dense model."""

    @property
    def layout(self) -> Layout:
        """How a fused layer of the stock module is laid out."""
        return Layout(self.heads, self.head_width, self.interleaved, self.even)

    @property
    def multiple(self) -> int:
        """The widths of projections are padded to a multiple of this, for the module to view as heads."""
        return self.dense_key_width if self.fixed_heads else self.head_width

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in JSON types; `pieces` and `even` are left out if not set."""
        fields = {name: value for name, value in asdict(self).items() if name not in ("pieces", "even") or value}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what stored fields must hold: name of a field, whether it does, what is expected."""
        yield "heads", self.heads > 0, "at least 1"
        yield "head_width", self.head_width > 0, "at least 1"

    def check_fits(self, module: Any, name: str) -> None:
        """Check that the dense projections of `module` have the layout and the widths of this form.

        Raises:
            CheckpointError: they have not.
        """
        for path, width in self.dense_widths.items():
            weight, _ = dense_projection(module, path)
            layer = fused_layer(module, path)
            if layer is not None and not isinstance(layer, QKVProjection):  # queries, keys and values together
                width = self.heads * self.head_width + 2 * self.dense_key_width
            if isinstance(layer, Conv1D) and self.even:
                raise CheckpointError(
                    f"the stored edit of {name} has even True; expected False, as {path} lies in a Conv1D"
                )
            channels = weight.shape[1 if isinstance(layer, Conv1D) else 0]
            if channels != width:
                raise CheckpointError(
                    f"the stored edit of {name} has {self.heads} heads, each {self.head_width} wide, so {path} would "
                    f"have {width} channels; the model has {channels}"
                )

    @abstractmethod
    def build(self, module: Any, parent: Any) -> Any:
        """Return uninitialised parameters for `module`, with device, dtype and frozenness of the dense ones.

        Args:
            module: the attention module.
            parent: the module that holds it, where a family's path that starts with `..` begins.

        Raises:
            CompressionError: the module has no room for the form.
        """

    @abstractmethod
    def put_in_(self, module: Any, parts: Any) -> None:
        """Replace the map's projections by `parts`, as `build` makes them, in place."""

    @abstractmethod
    def take_out_(self, module: Any, dense: Any) -> None:
        """Restore the map's dense projections in place, also if `put_in_` failed half-way."""

    def finish_(self, module: Any) -> None:  # noqa: B027 (not every form has such parts)
        """Restore, in place, what a checkpoint does not hold."""

    @abstractmethod
    def head_rows(self) -> dict[str, int]:
        """Return the parameters whose rows belong to single heads: path in the module → rows of each head in turn."""

    @abstractmethod
    def without(self, kept: Sequence[int]) -> Self:
        """Return the form of the kept heads, in ascending order."""

    @abstractmethod
    def parameters(self, widths: tuple[int, int]) -> int:
        """Count the parameters of the map, for the widths of its two projections as a site has them."""

    @abstractmethod
    def macs(self, widths: tuple[int, int], length: int) -> int:
        """Count the multiply-accumulates of the map for T = `length` tokens; widths as for `parameters`."""

    def row_cuts(self, module: Any, kept: Sequence[int]) -> list[Cut]:
        """Return the cuts of the parameters in `head_rows`."""
        cuts = []
        for path, count in self.head_rows().items():
            kept_rows = [row for head in kept for row in range(head * count, (head + 1) * count)]
            parent, _, name = path.rpartition(".")
            owner = module.get_submodule(parent)
            tensor = getattr(owner, name)
            is_trained = isinstance(tensor, nn.Parameter)  # indices of channels are not
            cuts.append(Cut(owner, name, remaining(tensor, 0, kept_rows) if is_trained else tensor[kept_rows]))
            if hasattr(owner, "out_features"):
                cuts.append(Cut(owner, "out_features", len(kept_rows)))
        return cuts


@dataclass(frozen=True)
class ScoreParts:
    """The parameters of a score map, ready to be installed.

    Args:
        query: query projection, D → R.
        key: key projection, D → R, or R + H with its content biases.
        mixing: weights (H, k) of the channels that each head reads, or (G, R) where keys have a rotary embedding.
        channels: indices of these channels, (H, k); None where all are read.
    """

    query: PaddedProjection
    key: PaddedProjection
    mixing: nn.Parameter
    channels: Tensor | None = None


@dataclass(frozen=True)
class ScoreForm(MapForm):
    """The form of a module's scores: projections of R channels for queries and keys, of which heads read some.

    Args:
        query: attribute path of the query projection in the attention module; where the stock model keeps it in a
            fused layer, a child of that layer's path.
        key: attribute path of the key projection.
        rank: channels R of all heads together.
        content_bias: whether the module has content biases v.
        scale: factor of the scores; None keeps the model's own.
        train_mixing: whether the mixing weights are trained.
    """

    query: str
    key: str
    rank: int
    content_bias: bool
    scale: float | None = None
    train_mixing: bool = True

    at: ClassVar[str] = "score_form"
    space: ClassVar[str]
    """The decomposition in words, for model cards."""

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what stored fields must hold, as `MapForm.rules`."""
        yield from super().rules()
        yield "scale", self.scale is None or self.scale > 0, "a number above 0"
        yield "scale", self.scale is None or not self.train_mixing, "none, as the mixing matrix is trained"

    # Widths of queries and keys.

    @property
    def dense_widths(self) -> dict[str, int]:
        """Path of each projection that is replaced → its width in the dense model."""
        return {self.query: self.heads * self.head_width, self.key: self.dense_key_width}

    @property
    def query_width(self) -> int:
        """Channels of the queries, without padding."""
        return self.rank

    @property
    def content_channels(self) -> int:
        """Number of channels behind the R of the keys that hold content biases: H or none."""
        return self.heads if self.content_bias else 0

    @property
    def key_width(self) -> int:
        """Channels of the keys, with content biases and padding."""
        width = self.rank + self.content_channels
        return width + -width % self.multiple

    def check_room(self) -> None:
        """Check that a module that views exactly H heads has room for R and the content biases.

        Raises:
            CompressionError: it has not.
        """
        if self.fixed_heads and self.rank + self.content_channels > self.multiple:
            raise CompressionError(
                f"got dk {self.rank} and {self.content_channels} content biases for a model that lays keys out as "
                f"exactly {self.heads} heads of {self.head_width}; pass dk up to "
                f"{self.multiple - self.content_channels}"
            )

    # Parameters: built, filled, installed, read.

    def build(self, module: Any, parent: Any) -> ScoreParts:
        """Return uninitialised parameters, as `MapForm.build`."""
        self.check_room()
        query_weight, query_in = dense_projection(module, self.query)
        key_weight, key_in = dense_projection(module, self.key)
        like: dict[str, Any] = {"device": query_weight.device, "dtype": query_weight.dtype}
        is_trained = self.train_mixing and (query_weight.requires_grad or key_weight.requires_grad)
        query, key = self.build_projections(query_in, key_in, like)
        return ScoreParts(
            query.requires_grad_(query_weight.requires_grad),
            key.requires_grad_(key_weight.requires_grad),
            nn.Parameter(torch.empty(*self.mixing_shape, **like), is_trained),
        )

    def build_projections(
        self, query_in: int, key_in: int, like: dict[str, Any]
    ) -> tuple[PaddedProjection, PaddedProjection]:
        """Return projections of queries and keys from these input widths."""
        query = PaddedProjection(query_in, self.rank, self.multiple, **like)
        key = PaddedProjection(key_in, self.rank, self.multiple, content_biases=self.content_channels, **like)
        return query, key

    @property
    @abstractmethod
    def width(self) -> int:
        """Width of one head's queries and keys, content bias included."""

    @property
    @abstractmethod
    def mixing_shape(self) -> tuple[int, int]:
        """Shape of the mixing weights."""

    def put_in_(self, module: Any, parts: ScoreParts) -> None:
        """Replace the query and key projections of `module` by `parts`, in place."""
        module.mixing = parts.mixing
        if parts.channels is not None:
            module.mixing_channels = nn.Buffer(parts.channels)
        replace_(module, {self.query: parts.query, self.key: parts.key}, self.layout)
        if self.scale is not None:
            module.stock_scaling = scaling_of(module)
            setattr(module, _scaling_name(module), self.scale)

    def take_out_(self, module: Any, dense: tuple[Any, Any]) -> None:
        """Restore the dense query and key projections in place, as `replace_` takes them."""
        replace_(module, dict(zip((self.query, self.key), dense, strict=True)), self.layout)
        for name in ("mixing", "mixing_channels"):
            if hasattr(module, name):
                delattr(module, name)
        if "stock_scaling" in module.__dict__:
            setattr(module, _scaling_name(module), module.__dict__.pop("stock_scaling"))

    def finish_(self, module: Any) -> None:
        """Freeze the mixing weights if they are not trained."""
        module.mixing.requires_grad_(self.train_mixing)

    # Attention.

    @abstractmethod
    def heads_of(self, module: Any, query: Tensor, key: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Return queries (B, H, T, w) and keys (B, H, S, w) of ordinary heads, with content biases as one channel.

        Where groups of heads share a key, there is one key for each group.

        Args:
            module: the attention module.
            query: as the module lays out what its projection returns, (B, ⌈R/d⌉, T, d).
            key: likewise, (B, ⌈(R+H)/d⌉, S, d).
            scaling: factor of the scores in this call.
        """

    @abstractmethod
    def head_queries(self, module: Any, query: Tensor) -> Tensor:
        """Return what each head multiplies the R channels of the keys by, (B, T, H, R); `query` as for `heads_of`."""

    def cached_scores(self, module: Any, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Return the scores of one token, (B, H, S), from keys as they lie in a cache."""
        query = self.head_queries(module, query * scaling).squeeze(1)  # (B, H, R)
        padding = key.shape[1] * key.shape[3] - self.rank
        if padding:
            query = pad(query, (0, padding))
        if self.content_bias:  # which a module that scales its queries does not scale
            query[..., self.rank : self.rank + self.heads].diagonal(0, 1, 2).fill_(scaling_of(module))
        return cached_scores(query, key)

    # Heads.

    def keep_heads(self, module: Any, kept: Sequence[int]) -> list[Cut]:
        """Return the cuts of `module` that leave the kept heads, in ascending order."""
        smaller = self.without(kept)
        cuts = [Cut(module, self.at, smaller), *self.row_cuts(module, kept)]
        for path, width in ((self.query, smaller.query_width), (self.key, smaller.rank + smaller.content_channels)):
            cuts.append(Cut(module.get_submodule(path), "padding", padding_of(width, smaller.multiple)))
        return cuts


def _scaling_name(module: Any) -> str:
    return "scaling" if hasattr(module, "scaling") else "scale"


def scaling_of(module: Any) -> float:
    """Return the factor by which an attention module scales its scores."""
    return float(getattr(module, _scaling_name(module)))


def remaining(parameter: Tensor, dim: int, indices: Sequence[int]) -> nn.Parameter:
    """Return a parameter of some slices of another, frozen if that is."""
    index = torch.tensor(indices, dtype=torch.int64, device=parameter.device)
    return nn.Parameter(parameter.detach().index_select(dim, index), parameter.requires_grad)


def padding_of(width: int, multiple: int) -> int:
    """Return the number of zeros that pad `width` channels; a width of 0 is padded to one full multiple."""
    return -width % multiple if width else multiple


def plain_weight(path: str, projection: Any, error: type[CollabCompressError] = UnsupportedModelError) -> Tensor:
    """Return the detached weight of the projection at `path`, which must be a parameter of it.

    Raises:
        CollabCompressError: of class `error`: an adapter, quantization, pruning or a parametrization changes the
            weight, or it is offloaded.
    """
    stock = next((kind for kind in (nn.Linear, Conv1D) if isinstance(projection, kind)), None)
    is_plain = stock is not None and type(projection).forward is stock.forward
    weight = projection._parameters.get("weight") if is_plain else None
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        kind = type(projection if type(weight) in (nn.Parameter, type(None)) else weight)
        raise error(
            f"{path}: got {kind.__module__}.{kind.__qualname__}, expected a plain torch.nn.Linear of floats; merge "
            "adapters and undo quantization first, and make computed weights plain (torch.nn.utils.prune.remove, "
            "parametrize.remove_parametrizations)"
        )
    if weight.is_meta:
        raise error(f"{path} is offloaded; load the model into memory")
    return weight.detach()
