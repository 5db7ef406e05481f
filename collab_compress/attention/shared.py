r"""Shared channels, of which each head reads a few: W̃q and W̃k serve all heads.

    score_i(x, y) = s · [ Σ_{r ∈ S_i} m_ir (x · w̃q_r)(y · w̃k_r) + v_i · y ],   |S_i| = k

where s is the model's own scale, S_i the channels that head i reads, m_i their weights, and v_i its content bias. If
every head reads all R channels, k = R, this is the collaborative form of "Multi-Head Attention: Collaborate Instead
of Concatenate" (eqs. 7 and 13; costs as in section 3.4). Its scores then take T²·H·R multiplications, where with
k = d they take as many as those of dense heads.

The channels that a head reads are gathered and weighted, and are then an ordinary head, for any attention function.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from collab_compress.attention.maps import ConvertedMap, Cut, HeadRows, Layers, MapConfig, Part, kept_rows
from collab_compress.attention.projections import (
    copied,
    family_of,
    plain_rows,
    projection_like,
    remaining,
    rows_of,
    select_channels,
)
from collab_compress.devices import float64_device
from collab_compress.errors import CheckpointError, CompressionError
from collab_compress.factorization import Factorization, Factors, factorize

EXACT = 1e-5  # largest relative error of scores that is rounding
WIDTH_MULTIPLE = 8  # of heads, as flash attention takes them


@dataclass(frozen=True)
class QKConfig(MapConfig):
    """The config of a converted QK circuit: projections of R channels for queries and keys, of which heads read some.

    Args:
        rank: channels R of all heads together.
        train_mixing: whether the mixing weights are trained.
    """

    rank: int
    train_mixing: bool = field(default=True, kw_only=True)

    space: ClassVar[str]
    """The decomposition in words, for model cards."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Width of one head's queries and keys, content bias included."""

    @property
    def key_channels(self) -> int:
        """Channels of the keys, which a cache holds."""
        return self.rank

    def check_room(self, family: Any) -> None:
        """Raise a CompressionError if modules of a family have no room for the keys."""


class QKMap(ConvertedMap):
    """A converted QK circuit; `mixing` holds the weights by which heads read shared channels."""

    at: ClassVar[str] = "qk"
    config: Any
    mixing: nn.Parameter
    values: tuple[int, int] | None = None
    """First row of the values, and width of a head, in a layer that holds queries, keys and values."""

    def forward(self, make: str, *parts: Any) -> Any:
        """Call `heads` or another method by its name, so that Accelerate's hooks bring weights that are offloaded."""
        return getattr(self, make)(*parts)

    @abstractmethod
    def heads(self, query: Tensor, key: Tensor, content_query: float) -> tuple[Tensor, Tensor]:
        """Return queries (B, H, T, w) and keys (B, H, S, w) of ordinary heads, with content biases as one channel.

        Where groups of heads share a key, there is one key for each group. Query and key are as the module lays them
        out, (B, n, T, ·) and (B, n, S, ·). Heads read content biases with `content_query`: 1, or where a module
        scales its queries itself and calls with another factor than its own, the quotient of the two.
        """

    @abstractmethod
    def head_queries(self, query: Tensor) -> Tensor:
        """Return what each head multiplies the R channels of the keys by, (B, T, H, R); `query` as for `heads`."""

    def join_(self, values: tuple[int, int] | None) -> None:
        """Prepare, in place, for a layer of queries, keys and values, with `values` of it; None for separate ones."""

    def finish_(self, module: Any) -> None:
        """Freeze the mixing weights if they are not trained."""
        self.mixing.requires_grad_(self.config.train_mixing)


def channels_of(x: Tensor) -> Tensor:
    """Put the heads of a module's layout side by side, (B, n, L, d) to (B, L, n·d)."""
    return x.squeeze(1) if x.shape[1] == 1 else x.transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class SharedConfig(QKConfig):
    """The config of `SharedQK`: R channels, of which each head reads `reads`.

    Args:
        content_bias: whether the module has content biases v.
        reads: channels k that each head reads.
        scale: factor of the scores; None keeps the model's own.
        bias: whether its channels have a bias, as in one layer with values that have one.

    Example:
        >>> from collab_compress.architectures import find_dense_attention
        >>> config = SharedConfig.of(find_dense_attention(model)[0], rank=12, head_dim=8, content_bias=True)
        >>> config.reads, config.width, config.parameters((24, 24))  # dense 1,152, and 48 in biases
        (7, 8, 696)
    """

    content_bias: bool
    reads: int
    scale: float | None = None
    bias: bool = False

    kind: ClassVar[str] = "collaborative"
    title: ClassVar[str] = "shared attention"
    space: ClassVar[str] = "a shared query/key space"

    @classmethod
    def of(cls, site: Any, rank: int, head_dim: int | None, content_bias: bool) -> Self:
        """Return the config of what replaces the queries and keys of a module.

        A content bias takes one of the channels of a head, except where `head_dim` lets heads read all R (the paper's
        form), or where d of H·d channels are exact.
        """
        dense = site.head_width
        if head_dim is not None and head_dim >= rank:
            reads = rank
        elif rank >= site.heads * dense and (head_dim is None or head_dim >= dense):
            reads = dense
        else:
            reads = min(rank, (dense if head_dim is None else head_dim) - content_bias)
        if reads < 1:
            raise CompressionError(f"{site.name}: head_dim is 1, which the content bias takes; pass at least 2")
        bias = site.family.forward != "stock" and site.part(site.paths.value).bias is not None
        return cls(site.heads, dense, rank, content_bias, reads, bias=bias, cross=site.kind == "cross")

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what stored fields must hold, as `MapConfig.rules`."""
        yield from super().rules()
        yield "reads", 1 <= self.reads <= self.rank, f"1 to {self.rank}"
        yield "scale", self.scale is None or self.scale > 0, "a number above 0"
        yield "scale", self.scale is None or not self.train_mixing, "none, as the mixing matrix is trained"

    @property
    def width(self) -> int:
        """Width w of a head: the channels that it reads, and one for its content bias."""
        return self.reads + self.content_bias

    @property
    def content_channels(self) -> int:
        """Number of channels behind the R of the keys that hold content biases: H or none."""
        return self.heads if self.content_bias else 0

    @property
    def key_channels(self) -> int:
        """Channels of the keys, content biases included, which a cache holds."""
        return self.rank + self.content_channels

    def check_room(self, family: Any) -> None:
        """Check that a module that views exactly H heads has room for R and the content biases."""
        dense = self.heads * self.head_width
        if family.layout.fixed_head_count and self.key_channels > dense:
            raise CompressionError(
                f"got dk {self.rank} and {self.content_channels} content biases for a model that lays keys out as "
                f"exactly {self.heads} heads of {self.head_width}; pass dk up to {dense - self.content_channels}"
            )

    def without(self, kept: Sequence[int]) -> Self:
        """Return the config of the kept heads, with all shared channels."""
        return replace(self, heads=len(kept))

    # Costs: Dq and Dk input widths of queries and keys, H heads, R channels, k read by a head, T tokens.

    def parameters(self, widths: tuple[int, int]) -> int:
        """(Dq + Dk)·R + H·k, H·Dk for content biases, and one for each channel that has a bias."""
        biases = self.bias * (self.key_channels + (0 if self.cross else self.rank))
        return sum(widths) * self.rank + self.heads * self.reads + widths[1] * self.content_channels + biases

    def macs(self, widths: tuple[int, int], length: int) -> int:
        """T·(Dq + Dk)·R + T·H·k + T²·H·k, and T·Dk·H for v·y."""
        projected = length * sum(widths) * self.rank + length * widths[1] * self.content_channels
        return projected + (length + length**2) * self.heads * self.reads


def uninitialised(
    module: Any, sizes: Mapping[str, tuple[int, bool]], mixing: tuple[int, int], train_mixing: bool
) -> tuple[nn.Parameter, Layers]:
    """Return mixing weights of a shape, and layers (path → outputs, whether with bias), like those of a module.

    They are trained as the module's own are, mixing weights where any of these is.
    """
    weights: list[Tensor] = []
    layers: Layers = {}
    for path, (outputs, bias) in sizes.items():
        weight, inputs = projection_like(module, path)
        layer = nn.Linear(inputs, outputs, bias, device=weight.device, dtype=weight.dtype)
        weights.append(weight)
        layers[path] = layer.requires_grad_(weight.requires_grad)
    is_trained = train_mixing and any(weight.requires_grad for weight in weights)
    first = weights[0]
    return nn.Parameter(torch.empty(mixing, device=first.device, dtype=first.dtype), is_trained), layers


class SharedQK(QKMap):
    """Heads that read shared channels: `mixing` (H, k) are their weights, `channels` (H, k) their ascending indices.

    Queries are R channels; keys are R, and behind them one for the content bias of each head.
    """

    channels: Tensor
    content: Tensor
    joint: Any
    ones: Any

    def __init__(self, config: SharedConfig, mixing: nn.Parameter) -> None:
        super().__init__()
        self.config = config
        self.mixing = mixing
        self.channels = nn.Buffer(torch.arange(config.reads, device=mixing.device).repeat(config.heads, 1))
        self.register_buffer("content", self._content(mixing.device), persistent=False)
        self.register_buffer("joint", None, persistent=False)
        self.register_buffer("ones", None, persistent=False)

    def _content(self, device: torch.device) -> Tensor:
        """Return the index of each head's content bias among the keys, (H, 1), or (H, 0) without."""
        config = self.config
        return torch.arange(config.rank, config.key_channels, device=device).view(config.heads, -1)

    @classmethod
    def build(cls, config: SharedConfig, module: Any, parent: Any) -> tuple["SharedQK", Layers]:
        """Return an uninitialised map and its projections, as `ConvertedMap.build`."""
        family = family_of(module)
        config.check_room(family)
        has_bias = family.relative is not None  # keys of one softmax are multiplied by several queries
        sizes = {family.paths.query: (config.rank, False), family.paths.key: (config.key_channels, has_bias)}
        mixing, layers = uninitialised(module, sizes, (config.heads, config.reads), config.train_mixing)
        return cls(config, mixing), layers

    @classmethod
    def from_dense(
        cls, site: Any, config: SharedConfig, moments: Any, head_weights: Tensor | None, solver: Any
    ) -> tuple["SharedQK", Layers, Factorization]:
        """Factor the scores of a dense module, as `ConvertedMap.from_dense`."""
        query_moments, key_moments = moments or (None, None)
        result = factorize(
            site.query_heads(),
            site.key_heads(),
            config.rank,
            query_bias=site.query_bias(),
            key_bias=site.key_bias() if site.has_positions else None,
            query_moments=query_moments,
            key_moments=key_moments,
            head_weights=head_weights,
            reads=config.reads if config.reads < config.rank else None,
            solver=solver,
        )
        qk, layers = cls.build(config, site.module, site.parent)
        qk.load_(layers, result.factors.to(dtype=qk.mixing.dtype))  # before they move: not every device has float64
        return qk, layers, result

    def load_(self, layers: Layers, factors: Factors) -> None:
        """Copy factors into the map and its projections, in place, in their dtype.

        Of each row of the mixing matrix (H, R) the k largest entries are taken; the others should be zero.
        """
        query, key = layers.values()
        with torch.no_grad():
            channels = factors.mixing.abs().topk(self.config.reads, 1).indices.sort(1).values
            self.channels.copy_(channels)
            self.mixing.copy_(factors.mixing.gather(1, channels))
            query.weight.copy_(factors.query.T)
            key.weight[: self.config.rank].copy_(factors.key.T)
            if self.config.content_bias and factors.content_bias is not None:
                key.weight[self.config.rank :].copy_(factors.content_bias)
            if key.bias is not None:
                key.bias.zero_()
                if factors.key_bias is not None:
                    key.bias[: self.config.rank].copy_(factors.key_bias)

    def factors(self, name: str, module: Any) -> Factors:
        """Return the factors of the attention module called `name`; `query` and `key` are views of its parameters.

        A bias that training gave to the queries is a content bias.
        """
        family, rank = family_of(module), self.config.rank
        query, bias = plain_rows(name, module, family.paths.query)
        key, key_bias = plain_rows(name, module, family.paths.key)
        key_bias = None if family.relative is None or key_bias is None else key_bias[:rank]
        mixing, content = self.mixing_matrix().detach(), None
        if self.config.content_bias:
            content = key[rank:]
            if bias is not None and bool(bias.any()):
                content = content + (mixing * bias) @ key[:rank]
        return Factors(query.T, mixing, key[:rank].T, content, key_bias)

    def to_dense(self, site: Any, head_width: int | None) -> Layers:
        """Factor [T̂_i; v_iᵀ] of each head at the dense width, as `ConvertedMap.to_dense`.

        That is exact if its rank is at most d. With a bias β of the keys, they get a further input, which is 1.
        """
        config, module = self.config, site.module
        width = config.head_width if head_width is None else head_width
        factors = self.factors(site.name, module)
        place = float64_device(factors.query.device)
        query, mixing, key = (factor.to(place).double() for factor in (factors.query, factors.mixing, factors.key))
        content = mixing.new_zeros(config.heads, len(key))
        if factors.content_bias is not None:
            content = factors.content_bias.to(place).double()
        if config.scale is not None:
            mixing, content = (part * (config.scale / module.stock_scaling) for part in (mixing, content))
        bias = None if factors.key_bias is None else factors.key_bias.to(place).double()
        query_weights, query_biases, key_weights, key_biases = [], [], [], []
        lost = total = 0.0
        for head in range(config.heads):
            context = pad(query * mixing[head], (0, 1, 0, 1))  # (D+1, R+1)
            context[-1, -1] = 1.0
            keys = torch.cat([key, content[head, :, None]], 1)
            if bias is not None:
                keys = torch.cat([keys, pad(bias, (0, 1))[None]])  # (D+1, R+1)
                # The softmax ignores the last entry: that of v_i as a sum of keys leaves the rank as it is.
                used = mixing[head] != 0
                keys[-1, -1] = torch.linalg.pinv(key[:, used]) @ content[head] @ bias[used]
            u, s, v = _svd(context, keys)
            rank = min(width, len(s))
            lost, total = lost + float(s[rank:].square().sum()), total + float(s.square().sum())
            root = s[:rank].sqrt()
            left = pad(u[:, :rank] * root, (0, width - rank))  # (D+1, d)
            right = pad(v[:, :rank] * root, (0, width - rank))  # (D, d), or (D+1, d)
            key_weights.append(right[: len(key)])
            key_biases.append(right.new_zeros(width) if bias is None else right[-1])
            query_weights.append(left[:-1])
            query_biases.append(left[-1])
        if total and (error := (lost / total) ** 0.5) > EXACT:
            raise CompressionError(
                f"{site.name}: its heads are wider than the {config.head_width} channels of dense ones, which would "
                f"move scores by {error:.1%}; keep the model converted, or convert the dense checkpoint with a "
                "smaller head_dim"
            )
        family, (like, _) = site.family, projection_like(module, site.paths.query)
        query_bias = torch.cat(query_biases) if config.content_bias else None
        key_bias = torch.cat(key_biases) if config.content_bias and family.key_bias else None
        return {
            family.paths.query: copied(torch.cat(query_weights, 1).T, query_bias, like),
            family.paths.key: copied(torch.cat(key_weights, 1).T, key_bias, like),
        }

    def put_in_(self, module: Any) -> None:
        """Set the config's scale."""
        if self.config.scale is not None:
            module.stock_scaling = scaling_of(module)
            setattr(module, _scaling_name(module), self.config.scale)

    def take_out_(self, module: Any) -> None:
        """Restore the model's scale."""
        if "stock_scaling" in module.__dict__:
            setattr(module, _scaling_name(module), module.__dict__.pop("stock_scaling"))

    def finish_(self, module: Any) -> None:
        """Freeze the mixing weights if they are not trained, and check the channels that a checkpoint holds."""
        super().finish_(module)
        channels = self.channels
        if not channels.is_meta and not bool(((channels >= 0) & (channels < self.config.rank)).all()):
            raise CheckpointError(
                f"the channels of a converted module are numbers from {int(channels.min())} to "
                f"{int(channels.max())}; expected 0 to {self.config.rank - 1}; the checkpoint is damaged"
            )
        device = torch.device("cpu") if self.content.is_meta else self.content.device  # also if weights are offloaded
        self.content = self._content(device)
        self.join_(self.values)

    def join_(self, values: tuple[int, int] | None) -> None:
        """Prepare for a layer of queries, keys and values, in place; also after channels have changed."""
        self.values, self.joint, self.ones = values, None, None
        if values is None:
            return
        config, (start, size) = self.config, values
        used = torch.cat([self.channels, self.content], 1)
        width = config.width
        if width != size:
            width = -(-max(width, size) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        joint = self.channels.new_zeros(3, config.heads, width)  # (queries, keys and values) of each head
        joint[0, :, : config.reads] = self.channels
        joint[1, :, : config.width] = used + config.rank
        joint[2, :, :size] = torch.arange(start, start + config.heads * size, device=used.device).view(-1, size)
        self.joint = joint
        self.ones = torch.zeros(width, device=used.device, dtype=self.mixing.dtype)
        self.ones[config.reads : config.width] = 1

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.join_(self.values)

    def mixing_matrix(self) -> Tensor:
        """Return M (H, R): the mixing weights, and zeros where a head does not read a channel."""
        zeros = self.mixing.new_zeros(self.config.heads, self.config.rank)
        matrix: Tensor = zeros.scatter(1, self.channels, self.mixing)
        return matrix

    # Attention.

    def heads(self, query: Tensor, key: Tensor, content_query: float) -> tuple[Tensor, Tensor]:
        """Return queries (B, H, T, w) and keys (B, H, S, w), as `QKMap.heads`."""
        channels = self.channels
        query = _gathered(channels_of(query), channels) * self.mixing.to(query.dtype)  # (B, T, H, k)
        if self.config.content_bias:
            query = pad(query, (0, 1), value=content_query)
            channels = torch.cat([channels, self.content], 1)
        return query.transpose(1, 2), _gathered(channels_of(key), channels).transpose(1, 2)

    def joint_heads(self, product: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, (B, H, T, w) each, from all channels of one layer, (B, 1, T, ·).

        Where values are narrower, they are followed by channels that do not count.
        """
        joint, dtype = self.joint, product.dtype
        query, key, value = _gathered(product.squeeze(1), joint).unbind(2)  # (B, T, H, w)
        mixing = pad(self.mixing, (0, joint.shape[-1] - self.mixing.shape[1]))
        query = torch.addcmul(self.ones.to(dtype), query, mixing.to(dtype))
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def head_queries(self, query: Tensor) -> Tensor:
        """Return what each head multiplies the R channels of the keys by, (B, T, H, R)."""
        return channels_of(query)[..., None, : self.config.rank] * self.mixing_matrix()

    # Heads.

    def head_rows(self, module: Any) -> list[HeadRows]:
        """List each head's row of the mixing weights, of their channels, and its content bias."""
        rows = [HeadRows("qk.mixing", 0, 1), HeadRows("qk.channels", 0, 1)]
        if self.config.content_bias:
            layer, start, _ = rows_of(module)[family_of(module).paths.key]
            rows.append(HeadRows(f"{layer}.weight", start + self.config.rank, 1))
        return rows

    def kept_channels(self, part: Part, kept: Sequence[int]) -> list[int]:
        """Return all shared channels, and behind them the content biases of the kept heads, if the keys have them."""
        content = kept_rows(kept, 1, self.config.rank) if part == "key" and self.config.content_bias else []
        return [*range(self.config.rank), *content]

    def cuts(self, kept: Sequence[int]) -> list[Cut]:
        """Return the cuts of config, mixing weights and channels."""
        config = self.config.without(kept)
        return [
            Cut(self, "config", config),
            Cut(self, "mixing", remaining(self.mixing, 0, kept)),
            Cut(self, "channels", self.channels[list(kept)]),
            Cut(self, "content", self.content[: len(kept)]),
        ]


SharedConfig.module = SharedQK


def _gathered(projected: Tensor, channels: Tensor) -> Tensor:
    """Gather the channels (…, w) of heads, (B, L, ·) to (B, L, …, w)."""
    return select_channels(projected, channels.flatten()).view(*projected.shape[:2], *channels.shape)


def _scaling_name(module: Any) -> str:
    return "scaling" if hasattr(module, "scaling") else "scale"


def scaling_of(module: Any, default: Any = None) -> float:
    """Return the factor by which an attention module scales its scores."""
    return float(getattr(module, _scaling_name(module), default))


def _svd(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the singular value decomposition of left · right* without forming the product."""
    left_basis, left_core = torch.linalg.qr(left)
    right_basis, right_core = torch.linalg.qr(right)
    u, s, vh = torch.linalg.svd(left_core @ right_core.mH)
    return left_basis @ u[:, : len(s)], s, right_basis @ vh[: len(s)].mH
