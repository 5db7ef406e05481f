"""What a form of attention's score maps is: one object that rebuilds, attends, prunes, counts and stores a module."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from collab_compress.attention.projections import QKVProjection, SharedProjection, join, joint_layer, value_of
from collab_compress.errors import CompressionError, UnsupportedModelError


@dataclass(frozen=True)
class ScoreParts:
    """The parameters of a module in some form, ready to be installed.

    Args:
        query: query projection, D → R.
        key: key projection, content biases included, D → R or R + H.
        mixing: mixing matrix (H, R); a buffer where it is fixed.
        value: the model's own values where they were in one layer with query and key, else None.
    """

    query: SharedProjection
    key: SharedProjection
    mixing: Tensor
    value: nn.Linear | None = None

    def tensors(self) -> list[Tensor]:
        """List the memory that holds what was fitted."""
        return [self.query.proj.weight.data, self.key.proj.weight.data, self.mixing.data]


@dataclass(frozen=True)
class Cut:
    """One attribute to be set: what remains of a parameter, or a size that follows from it."""

    owner: Any
    name: str
    value: Any


class HeadRows(NamedTuple):
    """What of one parameter belongs to single heads; other rows belong to all.

    Args:
        path: of the parameter in the attention module.
        heads: for each head its stretches of rows.
    """

    path: str
    heads: Sequence[Sequence[range]]


@dataclass(frozen=True)
class ScoreForm(ABC):
    """The form of a module's score maps: all that is needed to rebuild and use it, weights aside.

    A module in such a form has projections of R channels for queries and keys in place of its own, a mixing matrix
    (H, R), and its form as `module.score_form`. A new form is a subclass and a line in `FORMS`.

    Args:
        query: attribute path of the query projection in the attention module; where the stock model keeps it in a
            joint layer, a child of that layer's path.
        key: attribute path of the key projection.
        heads: number of heads H.
        head_width: width d of one head's keys in the dense model.
        rank: channels R of all heads together.
        content_bias: whether the module has content biases v.
        scale: what scores are multiplied by; None keeps the model's own scale.
        train_mixing: whether the mixing matrix is trained.
        fixed_heads: whether the module views queries and keys as exactly H heads.
    """

    query: str
    key: str
    heads: int
    head_width: int
    rank: int
    content_bias: bool
    scale: float | None = None
    train_mixing: bool = True
    fixed_heads: bool = False

    kind: ClassVar[str]
    """Name in checkpoints."""
    option: ClassVar[str]
    """Name that people choose it by."""
    title: ClassVar[str]
    """What a model in this form has, in words."""
    space: ClassVar[str]
    """What queries and keys are decomposed into, in words."""
    solvers: ClassVar[tuple[str, ...]]
    """What may fit it, by names in the table of solvers; the first does unless another is chosen."""

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
            content_bias=content_bias, fixed_heads=site.family.fixed_heads,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Describe the form in JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild the form from what `to_dict` gave."""
        return cls(**data)

    # How wide queries and keys are.

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

    def build(self, module: Any) -> ScoreParts:
        """Make uninitialised parameters for `module`: device, dtype and frozenness are those of what they replace.

        Raises:
            CompressionError: as `multiple`.
        """
        layer: Any = joint_layer(module, self.query)
        query, key = (
            (layer, layer) if layer is not None else (attrgetter(path)(module) for path in (self.query, self.key))
        )
        like: dict[str, Any] = {"device": query.weight.device, "dtype": query.weight.dtype}
        trained = (query.weight.requires_grad, key.weight.requires_grad)
        inputs = (query.weight.shape[0],) * 2 if layer is not None else (query.in_features, key.in_features)
        widths = (self.rank, self.rank + self.content_channels)
        projections = [
            SharedProjection(width_in, width, self.multiple, **like).requires_grad_(train)
            for width_in, width, train in zip(inputs, widths, trained, strict=True)
        ]
        mixing = self.build_mixing(any(trained), **like)
        return ScoreParts(projections[0], projections[1], mixing, None if layer is None else value_of(layer))

    @abstractmethod
    def build_mixing(self, trained: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Make the mixing matrix (H, R): a parameter to be filled, or a buffer that is what it is to be."""

    def load_(self, parts: ScoreParts, query: Tensor, mixing: Tensor, key: Tensor, content: Tensor | None) -> None:
        """Copy W̃q (D, R), M (H, R), W̃k (D, R) and v (H, D) or None into `parts`, in place, in their dtype."""
        with torch.no_grad():
            parts.query.proj.weight.copy_(query.T)
            parts.mixing.copy_(mixing)
            parts.key.proj.weight.copy_(key.T if content is None else torch.cat([key.T, content]))

    @abstractmethod
    def finish_(self, module: Any) -> None:
        """Restore, in place, what a checkpoint does not hold."""

    def put_in_(self, module: Any, parts: ScoreParts) -> None:
        """Replace the query and key projections of `module` by `parts`, in place."""
        module.mixing = parts.mixing
        if parts.value is None:
            module.set_submodule(self.query, parts.query.train(module.training))
            module.set_submodule(self.key, parts.key.train(module.training))
        else:
            whole = QKVProjection(parts.query, parts.key, parts.value).train(module.training)
            module.set_submodule(self.query.rpartition(".")[0], whole)
            module.split_size = whole.widths
        if self.scale is not None:
            module.stock_scaling, module.scaling = module.scaling, self.scale

    def take_out_(self, module: Any, query: Any, key: Any) -> None:
        """Undo `put_in_`, also where it stopped half-way, in place.

        Args:
            module: the attention module.
            query: its dense query projection; where the stock model has a joint layer, either a projection to be put
                into one again, or something that holds the old layer as `whole`.
            key: the same for keys.
        """
        layer = joint_layer(module, self.query)
        if layer is None:
            module.set_submodule(self.query, query)
            module.set_submodule(self.key, key)
        else:
            whole = query.whole if hasattr(query, "whole") else join(query, key, layer.value)
            module.set_submodule(self.query.rpartition(".")[0], whole)
            module.split_size = whole.weight.shape[1] // 3
        if hasattr(module, "mixing"):
            del module.mixing
        if "stock_scaling" in module.__dict__:
            module.scaling = module.__dict__.pop("stock_scaling")

    def read(self, name: str, module: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Read W̃q (D, R), M (H, R), W̃k (D, R) and v (H, D) or None from the module called `name`.

        Raises:
            UnsupportedModelError: a projection carries an adapter, is quantized, or is offloaded.
        """
        query, key = (
            _plain_weight(f"{name}.{path}.proj", module.get_submodule(path).proj) for path in (self.query, self.key)
        )
        content = key[self.rank :] if self.content_bias else None
        return query.T, module.mixing.detach(), key[: self.rank].T, content

    def trained(self, module: Any) -> list[nn.Parameter]:
        """List the parameters that make the scores of `module`, for training to bring them nearer to dense ones."""
        return [module.get_submodule(path).proj.weight for path in (self.query, self.key)]

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
        if content is not None and scaling != module.scaling:
            content = content * (module.scaling / scaling)
        return joined_query[..., :rank], joined_key[..., :rank], content

    def head_queries(self, module: Any, query: Tensor) -> Tensor:
        """Give the queries of each head, (B, T, H, R), of queries as `attend` takes them."""
        joined = query.transpose(1, 2).flatten(2)[..., : self.rank]  # (B, T, R)
        mixing: Tensor = module.mixing
        return joined[..., None, :] * mixing

    # Heads.

    @abstractmethod
    def head_rows(self) -> list[HeadRows]:
        """Say what belongs to single heads, in an order that is the same for every head."""

    @abstractmethod
    def without(self, kept: Sequence[int]) -> Self:
        """Describe what is left of this form with these heads only, in ascending order."""

    def keep_heads(self, module: Any, kept: Sequence[int]) -> list[Cut]:
        """Compute what remains of `module` with these heads only, in ascending order, without changing it.

        Raises:
            CompressionError: as `multiple`, of what is left.
        """
        smaller = self.without(kept)
        cuts = [Cut(module, "score_form", smaller)]
        for path, heads in self.head_rows():
            lost = {row for head, own in enumerate(heads) if head not in kept for rows in own for row in rows}
            parameter = attrgetter(path)(module)
            left = [row for row in range(parameter.shape[0]) if row not in lost]
            place, _, name = path.rpartition(".")
            owner = module.get_submodule(place)
            cuts.append(Cut(owner, name, remaining(parameter, 0, left)))
            if hasattr(owner, "out_features"):
                cuts.append(Cut(owner, "out_features", len(left)))
        for path, width in ((self.query, smaller.rank), (self.key, smaller.rank + smaller.content_channels)):
            # heads without channels are left with zeros, for there must be something to lay out as heads
            padding = -width % smaller.multiple if width else smaller.multiple
            cuts.append(Cut(module.get_submodule(path), "padding", padding))
        return cuts

    # Costs: D input width, H heads, d head width, R channels, T tokens.

    @abstractmethod
    def parameters(self, width: int) -> int:
        """Count parameters of queries and keys that read vectors of `width` D."""

    @abstractmethod
    def macs(self, width: int, length: int) -> int:
        """Count multiply-accumulates of the scores of `length` T tokens of `width` D."""

    @abstractmethod
    def break_even(self, width: int) -> float:
        """Give T*: up to this many tokens the scores take fewer multiply-accumulates than dense ones, beyond it more.

        Args:
            width: input width D.

        Returns:
            Infinite where they always do, 0 where they never do.
        """


def remaining(parameter: nn.Parameter, dim: int, indices: Sequence[int]) -> nn.Parameter:
    """Make a parameter of some slices of another; frozenness is kept."""
    index = torch.tensor(indices, dtype=torch.int64, device=parameter.device)
    return nn.Parameter(parameter.detach().index_select(dim, index), parameter.requires_grad)


def _plain_weight(path: str, projection: Any) -> Tensor:
    """Read the weight of a projection, if that is all there is to it."""
    plain = isinstance(projection, nn.Linear) and type(projection).forward is nn.Linear.forward
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
