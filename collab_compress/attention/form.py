"""The forms of attention's maps: objects that install, compute, prune, count and store them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from collab_compress.attention.decoding import cached_scores, readers_of
from collab_compress.attention.projections import (
    Layout,
    PaddedProjection,
    QKVProjection,
    dense_projection,
    fused_layer,
    put_back_,
    replace_,
)
from collab_compress.attention.stored import from_stored
from collab_compress.errors import CheckpointError, CompressionError, UnsupportedModelError


@dataclass(frozen=True)
class ScoreParts:
    """The parameters of a module in some form, ready to be installed.

    Args:
        query: query projection, D → R.
        key: key projection, D → R, or R + H with its content biases.
        mixing: mixing matrix (H, R); a buffer where it is fixed.
    """

    query: PaddedProjection
    key: PaddedProjection
    mixing: Tensor

    def tensors(self) -> list[Tensor]:
        """List the tensors that hold what was fitted."""
        fitted = [*self.query.parameters(), *self.key.parameters(), self.mixing]
        return [tensor.data for tensor in fitted]


@dataclass(frozen=True)
class Cut:
    """One attribute to be set: what remains of a parameter, or a size that follows from it."""

    owner: Any
    name: str
    value: Any


class HeadRows(NamedTuple):
    """The rows of one parameter, all of which belong to single heads.

    Args:
        path: of the parameter in the attention module.
        rows: rows of each head.
    """

    path: str
    rows: Sequence[range]

    @classmethod
    def of(cls, path: str, sizes: Sequence[int]) -> Self:
        """Describe a parameter whose rows belong to the heads in turn, `sizes` to each."""
        return cls(path, [range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))])


@dataclass(frozen=True)
class MapForm(ABC):
    """The form of one map of an attention module: all that is needed to rebuild and use it, weights aside.

    A module has two maps: that of the scores (queries and keys) and that of the values (values and output). Each is
    dense, or in a form that the module holds in an attribute of its own. A new form is a subclass and a line in
    `FORM_KINDS`.

    Args:
        heads: number of heads H.
        head_width: width d of one head in the dense model.
    """

    heads: int
    head_width: int

    at: ClassVar[str]
    """Attribute of the module that holds the form."""
    kind: ClassVar[str]
    """Name in checkpoints."""
    option: ClassVar[str]
    """Name that people choose it by."""
    title: ClassVar[str]
    """The form in words, for model cards."""

    @property
    def dense_key_width(self) -> int:
        """How wide keys, and values, of all heads are in the dense model."""
        return self.heads * self.head_width

    @property
    def dense_widths(self) -> dict[str, int]:
        """Path of each projection that is replaced → its width in the dense model."""
        return dict.fromkeys(self.padded, self.dense_key_width)

    @property
    @abstractmethod
    def pieces(self) -> str:
        """Attribute of a module that says how many heads it views, if it views so many and that can change."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """How a fused layer of the stock module is laid out."""

    @property
    @abstractmethod
    def padded(self) -> tuple[str, ...]:
        """Paths of the projections that are filled up with zeros, for the module to view them as whole heads."""

    def to_dict(self) -> dict[str, Any]:
        """Describe the form in JSON types; `pieces` and `even` are left out where they are not set."""
        described = {name: value for name, value in asdict(self).items() if name not in ("pieces", "even") or value}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in described.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], module: str) -> Self:
        """Rebuild the form of a module from what `to_dict` returned.

        Raises:
            CheckpointError: fields are missing, unknown, of another type, or contradict each other.
        """
        return from_stored(cls, data, module)

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what stored fields must hold: name of a field, whether it does, what is expected."""
        yield "heads", self.heads > 0, "at least 1"
        yield "head_width", self.head_width > 0, "at least 1"

    def check_fits(self, module: Any, name: str) -> None:
        """Check that the dense projections of `module` are laid out and as wide as this form has them.

        Raises:
            CheckpointError: they are not.
        """
        for path, width in self.dense_widths.items():
            weight, _ = dense_projection(module, path)
            layer = fused_layer(module, path)
            if layer is not None and not isinstance(layer, QKVProjection):  # queries, keys and values together
                width = self.heads * self.head_width + 2 * self.dense_key_width
            if isinstance(layer, Conv1D) and self.layout.even:
                raise CheckpointError(
                    f"the stored edit of {name} has even True; expected False, as {path} lies in a Conv1D"
                )
            rows = weight.shape[1 if isinstance(layer, Conv1D) else 0]
            if rows != width:
                raise CheckpointError(
                    f"the stored edit of {name} has {self.heads} heads, each {self.head_width} wide, so {path} would "
                    f"have {width} channels; the model has {rows}"
                )

    @abstractmethod
    def build(self, module: Any, parent: Any) -> Any:
        """Make uninitialised parameters for `module`: device, dtype and frozenness are those of what they replace.

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
        """Undo `put_in_`, also where it stopped half-way, in place.

        Args:
            module: the attention module.
            dense: the map's dense projections.
        """

    @abstractmethod
    def finish_(self, module: Any) -> None:
        """Restore, in place, what a checkpoint does not hold."""

    @abstractmethod
    def head_rows(self) -> list[HeadRows]:
        """Return the parts of parameters that belong to single heads, in the same order for every head."""

    @abstractmethod
    def without(self, kept: Sequence[int]) -> Self:
        """Describe what is left of this form with these heads only, in ascending order."""

    @abstractmethod
    def parameters(self, width: int) -> int:
        """Count parameters of the map where the model is `width` D wide."""

    @abstractmethod
    def macs(self, width: int, length: int) -> int:
        """Count multiply-accumulates of the map for `length` T tokens of `width` D."""

    def row_cuts(self, module: Any, kept: Sequence[int]) -> list[Cut]:
        """Compute what remains of the parameters that have rows of single heads, with these heads only."""
        cuts = []
        for path, rows in self.head_rows():
            kept_rows = [row for head in kept for row in rows[head]]
            parent, _, name = path.rpartition(".")
            owner = module.get_submodule(parent)
            cuts.append(Cut(owner, name, remaining(getattr(owner, name), 0, kept_rows)))
            if hasattr(owner, "out_features"):
                cuts.append(Cut(owner, "out_features", len(kept_rows)))
        return cuts


@dataclass(frozen=True)
class ScoreForm(MapForm):
    """The form of a module's score maps: all that is needed to rebuild and use it, weights aside.

    A module in such a form has projections of R channels for queries and keys in place of its own, a mixing matrix
    (H, R), and its form as `module.score_form`.

    Args:
        heads: number of heads H.
        head_width: width d of one head's keys in the dense model.
        query: attribute path of the query projection in the attention module; where the stock model keeps it in a
            fused layer, a child of that layer's path.
        key: attribute path of the key projection.
        rank: channels R of all heads together.
        content_bias: whether the module has content biases v.
        scale: what scores are multiplied by; None keeps the model's own scale.
        train_mixing: whether the mixing matrix is trained.
        fixed_heads: whether the module views queries and keys as exactly H heads.
        interleaved: whether a fused layer holds each head's queries, keys and values together.
        pieces: attribute that says how many those are, if it can be changed.
        even: whether it views queries, keys and values of a fused layer as equally many heads.
    """

    query: str
    key: str
    rank: int
    content_bias: bool
    scale: float | None = None
    train_mixing: bool = True
    fixed_heads: bool = False
    interleaved: bool = False
    pieces: str = ""
    even: bool = False

    at: ClassVar[str] = "score_form"
    space: ClassVar[str]
    """The decomposition in words, for model cards."""
    solvers: ClassVar[tuple[str, ...]]
    """Names of the solvers that fit this form; the first is the default."""

    @classmethod
    def of(cls, site: Any, rank: int, content_bias: bool, sizes: Sequence[int] | None = None) -> Self:
        """Describe what is to replace the projections of a module.

        Args:
            site: the module, as `architectures` finds it.
            rank: channels R.
            content_bias: whether there will be content biases.
            sizes: channels of each head, once that is known, where none is shared.
        """
        return cls(
            query=site.family.query, key=site.family.key, heads=site.heads, head_width=site.head_width, rank=rank,
            content_bias=content_bias, fixed_heads=site.family.fixed_heads, interleaved=site.family.interleaved,
            pieces=site.family.pieces, even=site.family.even,
        )  # fmt: skip

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what stored fields must hold, as `MapForm.rules`."""
        yield from super().rules()
        yield "scale", self.scale is None or self.scale > 0, "a number above 0"

    @property
    def dense_widths(self) -> dict[str, int]:
        """Path of each projection that is replaced → its width in the dense model."""
        return {self.query: self.heads * self.head_width, self.key: self.dense_key_width}

    @property
    def layout(self) -> Layout:
        """How a fused layer of the stock module is laid out."""
        return Layout(self.heads, self.head_width, self.interleaved, self.even)

    # How wide queries and keys are.

    @property
    def padded(self) -> tuple[str, ...]:
        """Queries and keys."""
        return self.query, self.key

    @property
    def head_sizes(self) -> tuple[int, ...] | None:
        """Channels of each head where none is shared, else None."""
        return None

    @property
    def content_channels(self) -> int:
        """How many channels behind the R of the keys hold content biases: H or none."""
        return self.heads if self.content_bias else 0

    @property
    def key_width(self) -> int:
        """How many channels the keys fill, content biases and the zeros that make whole heads of them included."""
        width = self.rank + self.content_channels
        return width + -width % self._step

    @property
    def key_pieces(self) -> int:
        """How many pieces of the head width the keys and their content biases fill."""
        return self.key_width // self.head_width

    @property
    def multiple(self) -> int:
        """What the width of queries and keys is padded to a multiple of, for the module to view as heads.

        Raises:
            CompressionError: the module views exactly H heads, and they have no room for R and the content biases.
        """
        room = self.heads * self.head_width
        if self.fixed_heads and self.rank + self.content_channels > room:
            raise CompressionError(
                f"got dk {self.rank} and {self.content_channels} content biases for a model that lays keys out as "
                f"exactly {self.heads} heads of {self.head_width}; pass dk up to {room - self.content_channels}"
            )
        return self._step

    @property
    def _step(self) -> int:
        return self.heads * self.head_width if self.fixed_heads else self.head_width

    # Parameters: made, filled, put into a module, read.

    def build(self, module: Any, parent: Any) -> ScoreParts:
        """Make uninitialised parameters; arguments as for `MapForm.build`.

        Raises:
            CompressionError: as `multiple`.
        """
        weights, inputs = zip(*(dense_projection(module, path) for path in (self.query, self.key)), strict=True)
        like: dict[str, Any] = {"device": weights[0].device, "dtype": weights[0].dtype}
        trained = [weight.requires_grad for weight in weights]
        query = PaddedProjection(inputs[0], self.rank, self.multiple, **like)
        key = PaddedProjection(inputs[1], self.rank, self.multiple, content_biases=self.content_channels, **like)
        query.requires_grad_(trained[0])
        key.requires_grad_(trained[1])
        return ScoreParts(query, key, self.build_mixing(any(trained), **like))

    @abstractmethod
    def build_mixing(self, trained: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Make the mixing matrix (H, R): a parameter to be filled, or a buffer that is what it is to be."""

    def load_(self, parts: ScoreParts, query: Tensor, mixing: Tensor, key: Tensor, content: Tensor | None) -> None:
        """Copy W̃q (D, R), M (H, R), W̃k (D, R) and v (H, D) or None into `parts`, in place, in their dtype."""
        with torch.no_grad():
            parts.query.proj.weight.copy_(query.T)
            parts.mixing.copy_(mixing)
            parts.key.proj.weight.copy_(key.T)
            if parts.key.content_bias is not None and content is not None:
                parts.key.content_bias.copy_(content)

    def put_in_(self, module: Any, parts: ScoreParts) -> None:
        """Replace the query and key projections of `module` by `parts`, in place."""
        module.mixing = parts.mixing
        replace_(module, {self.query: parts.query, self.key: parts.key}, self.layout)
        if self.scale is not None:
            module.stock_scaling = scaling_of(module)
            setattr(module, _scaling_at(module), self.scale)

    def take_out_(self, module: Any, dense: tuple[Any, Any]) -> None:
        """Restore dense query and key projections in place; as `MapForm.take_out_`.

        Args:
            module: the attention module.
            dense: projections, or where the stock model has a fused layer, what holds the old one as `whole`.
        """
        put_back_(module, dict(zip((self.query, self.key), dense, strict=True)), self.layout)
        if hasattr(module, "mixing"):
            del module.mixing
        if "stock_scaling" in module.__dict__:
            setattr(module, _scaling_at(module), module.__dict__.pop("stock_scaling"))

    def read(self, name: str, module: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Read W̃q (D, R), M (H, R), W̃k (D, R) and v (H, D) or None from the module called `name`.

        Raises:
            UnsupportedModelError: a projection carries an adapter, is quantized, or is offloaded.
        """
        query, key = (
            plain_weight(f"{name}.{path}.proj", module.get_submodule(path).proj) for path in (self.query, self.key)
        )
        content = module.get_submodule(self.key).content_bias
        return query.T, module.mixing.detach(), key.T, None if content is None else content.detach()

    def trained(self, module: Any) -> list[nn.Parameter]:
        """List the parameters that make the scores of `module`, for training to bring them nearer to dense ones."""
        return [*module.get_submodule(self.query).parameters(), *module.get_submodule(self.key).parameters()]

    # Attention.

    @abstractmethod
    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float,
        dropout: float, causal: bool,
    ) -> Tensor:  # fmt: skip
        """Compute head outputs (B, H, T, dv), by the fastest kernel for the shapes at hand.

        Args:
            module: that holds the parameters.
            query: as the module lays out what its projection returns, (B, ⌈R/d⌉, T, d).
            key: the same with content biases, (B, ⌈(R+H)/d⌉, S, d).
            value: (B, H, S, dv).
            mask: boolean (True = attend) or additive, broadcastable to (B, H, T, S), or None.
            scaling: what scores are multiplied by.
            dropout: share of the probabilities to drop.
            causal: whether the kernel must hide the future itself.
        """

    @abstractmethod
    def probabilities(
        self, module: Any, query: Tensor, key: Tensor, mask: Tensor | None, *, scaling: float, causal: bool
    ) -> Tensor:
        """Compute attention probabilities (B, H, T, S); as `attend`."""

    def unpack(self, module: Any, query: Tensor, key: Tensor, scaling: float) -> tuple[Tensor, Tensor, Tensor | None]:
        """Undo the split into heads: query (B, T, R), key (B, S, R), content bias (B, S, H) or None.

        A module that scales its queries itself (OPT) calls with another scale than its own; what is left of its own
        is put into the content biases, which its queries do not reach.
        """
        rank = self.rank
        joined_query = query.transpose(1, 2).flatten(2)  # (B, T, R + padding)
        joined_key = key.transpose(1, 2).flatten(2)  # (B, S, R + H + padding)
        content = joined_key[..., rank : rank + self.heads] if self.content_bias else None
        if content is not None and scaling != scaling_of(module):
            content = content * (scaling_of(module) / scaling)
        return joined_query[..., :rank], joined_key[..., :rank], content

    def head_queries(self, module: Any, query: Tensor) -> Tensor:
        """Return the queries of each head, (B, T, H, R), from queries in the layout of `attend`."""
        joined = query.transpose(1, 2).flatten(2)[..., : self.rank]  # (B, T, R)
        mixing: Tensor = module.mixing
        return joined[..., None, :] * mixing

    def cached_scores(self, module: Any, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Compute the scores of one token, (B, H, S), by keys as they lie in a cache; arguments as for `attend`."""
        own = self.head_queries(module, query * scaling).squeeze(1)  # (B, H, R)
        left = key.shape[1] * key.shape[3] - self.rank
        if left:
            own = pad(own, (0, left))
        if self.content_bias:  # which are not scaled by a module that scales its queries itself
            own[..., self.rank : self.rank + self.heads].diagonal(0, 1, 2).fill_(scaling_of(module))
        sizes = self.head_sizes
        readers = readers_of(sizes, key.shape[3], self.content_bias) if sizes else None
        return cached_scores(own, key, readers)

    # Heads.

    def content_rows(self) -> list[HeadRows]:
        """List the rows of the content biases, one a head, if there are any."""
        return [HeadRows.of(f"{self.key}.content_bias", [1] * self.heads)] if self.content_bias else []

    def keep_heads(self, module: Any, kept: Sequence[int]) -> list[Cut]:
        """Compute what remains of `module` with these heads only, in ascending order, without changing it.

        Raises:
            CompressionError: as `multiple`, of what is left.
        """
        smaller = self.without(kept)
        cuts = [Cut(module, self.at, smaller), *self.row_cuts(module, kept)]
        for path, width in ((self.query, smaller.rank), (self.key, smaller.rank + smaller.content_channels)):
            cuts.append(Cut(module.get_submodule(path), "padding", padding_of(width, smaller.multiple)))
        return cuts

    # Costs: D input width, H heads, d head width, R channels, T tokens.

    @abstractmethod
    def break_even(self, width: int) -> float:
        """Return T*: up to this many tokens the scores take fewer multiply-accumulates than dense ones.

        Args:
            width: input width D.

        Returns:
            Infinite where they always do, 0 where they never do.
        """


def _scaling_at(module: Any) -> str:
    return "scaling" if hasattr(module, "scaling") else "scale"


def scaling_of(module: Any) -> float:
    """Return the factor by which an attention module scales its scores."""
    return float(getattr(module, _scaling_at(module)))


def remaining(parameter: nn.Parameter, dim: int, indices: Sequence[int]) -> nn.Parameter:
    """Make a parameter of some slices of another; frozenness is kept."""
    index = torch.tensor(indices, dtype=torch.int64, device=parameter.device)
    return nn.Parameter(parameter.detach().index_select(dim, index), parameter.requires_grad)


def padding_of(width: int, multiple: int) -> int:
    """Return the number of zeros that pad `width` channels; a width of 0 is padded to one full multiple."""
    return -width % multiple if width else multiple


def plain_weight(path: str, projection: Any) -> Tensor:
    """Read the weight of a projection, if that is all there is to it."""
    kinds = {nn.Linear: nn.Linear.forward, Conv1D: Conv1D.forward}
    plain = any(isinstance(projection, kind) and type(projection).forward is own for kind, own in kinds.items())
    weight: Tensor = projection.weight
    if not plain or type(weight) not in (Tensor, nn.Parameter):
        kind = type(weight if plain else projection)
        raise UnsupportedModelError(
            f"{path}: got {kind.__module__}.{kind.__qualname__}, expected a plain torch.nn.Linear of floats; merge "
            "adapters and undo quantization first"
        )
    if weight.is_meta:
        raise UnsupportedModelError(f"{path} is offloaded; load the model into memory")
    return weight.detach()
