"""Shared keys in models with a rotary embedding: pseudo-heads that the stock module rotates and caches.

    score_i(x, y) = s · Re Σ_c m_ic (x a_iθ(c)) conj(y κ_c) e^{iθ(c)n}

where two channels that are rotated together are one complex channel c, θ(c) is its frequency, n the distance of the
tokens, and m_ic complex ("RoFormer", Su et al., 2021; the sharing is ours). Each head keeps its queries.

The module projects keys to P·d channels, views them as P pseudo-heads and rotates each channel pair by the frequency
of its slot. A channel of another frequency is rotated by the difference beforehand. After the cache the channels of
each frequency are summed to the keys of each head or group, Σ_c m̄_ic κ_c, which are as wide as dense ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from collab_compress.attention.maps import Cut, HeadRows, Layers, Part, kept_rows
from collab_compress.attention.projections import (
    PaddedProjection,
    add_pre_hook_,
    copied,
    family_of,
    plain_rows,
    projection_like,
    remaining,
    remove_pre_hook_,
    rows_of,
    select_channels,
)
from collab_compress.attention.shared import QKConfig, QKMap, uninitialised
from collab_compress.devices import float64_device
from collab_compress.errors import CompressionError, UnsupportedModelError
from collab_compress.factorization import RotaryFactorization, factorize_rotary

PAIRS = ("halves", "neighbours", "neighbours, tables too")
TABLES = "collab_tables"  # attribute of hidden states: cosines and sines of their positions


class RotatingProjection(PaddedProjection):
    """A projection to pseudo-heads that pre-rotates channels whose frequency differs from that of their slot."""

    wanted: Tensor  # for each channel, the frequency of its pair; then the one of its slot, (2R,)
    swapped: Tensor  # the other channel of its pair, (R,)
    signs: Tensor  # -1 for real parts and 1 for imaginary ones, (R,)

    def __init__(self, proj: nn.Linear, config: "RotaryConfig") -> None:
        super().__init__(proj)
        self.config = config
        slots = tuple(range(config.head_width // 2)) * (config.rank // config.head_width)
        self.rotates = config.frequencies != slots
        self.fill_(proj.weight.device)

    def fill_(self, device: torch.device) -> None:
        """Fill the buffers, which no checkpoint holds."""
        config = self.config
        pairs = torch.arange(config.rank // 2, device=device)
        frequencies = torch.tensor(config.frequencies, device=device)
        slots = pairs % (config.head_width // 2)
        channels = torch.arange(config.rank, device=device).unflatten(-1, (-1, config.head_width))
        real, imaginary = (part.flatten() for part in config.split(channels))
        signs = config.to_heads(-torch.ones_like(pairs), torch.ones_like(pairs)).float()
        wanted = torch.cat([config.to_heads(part, part) for part in (frequencies, slots)])
        self.wanted = nn.Buffer(wanted, persistent=False)
        self.swapped = nn.Buffer(config.to_heads(imaginary, real), persistent=False)
        self.signs = nn.Buffer(signs, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Project x (B, T, D) to (B, T, P·d), rotated by the difference of frequencies.

        The attention module attaches its tables of cosines and sines to x.
        """
        projected: Tensor = self.proj(x)
        if not self.rotates:
            return projected
        tables: tuple[Tensor, Tensor] | None = getattr(x, TABLES, None)
        if tables is None:
            raise UnsupportedModelError(
                "converted rotary attention needs position_embeddings, cosines and sines of all positions, as stock "
                "models pass to their attention modules; call the model rather than the module"
            )
        by_pair = self._by_pair(tables[0], 1.0), self._by_pair(tables[1], 0.0)  # (B, T, d/2)
        (to_cos, cos), (to_sin, sin) = (table.index_select(-1, self.wanted).chunk(2, -1) for table in by_pair)
        size = cos * cos + sin * sin  # tables may be longer than 1
        by_cos = (to_cos * cos + to_sin * sin) / size  # (B, T, P·d)
        by_sin = (to_sin * cos - to_cos * sin) * (self.signs / size)
        rotated = projected * by_cos + select_channels(projected, self.swapped) * by_sin
        return rotated.to(projected.dtype)

    def _by_pair(self, table: Tensor, unrotated: float) -> Tensor:
        """Return one number for each channel pair of a head, (B, T, d/2), from a table for the rotated channels."""
        half = self.config.rotated // 2
        if self.config.pairs == "neighbours, tables too":
            table = table[..., ::2]
        table, rest = table[..., :half].float(), self.config.head_width // 2 - half
        return pad(table, (0, rest), value=unrotated) if rest else table


@dataclass(frozen=True)
class RotaryConfig(QKConfig):
    """The config of `RotaryQK`: heads with a rotary embedding share R channels of keys.

    Args:
        key_heads: number G of key heads in the dense model.
        rotated: number of rotated channels of a head.
        pairs: which channels of a head are rotated together: "halves" where channel j of the rotated ones pairs with
            j + rotated/2, "neighbours" where 2j pairs with 2j + 1, "neighbours, tables too" where the tables of
            cosines and sines have that layout as well.
        frequencies: of each channel pair, P·d/2.
        query_bias: whether queries have a bias.
        key_bias: whether keys have one.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from collab_compress.architectures import find_dense_attention
        >>> sizes = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 3, "num_hidden_layers": 1}
        >>> site = find_dense_attention(LlamaModel(LlamaConfig(vocab_size=61, **sizes)))[0]
        >>> config = RotaryConfig.of(site, rank=12)
        >>> config.rank, config.frequencies  # two pseudo-heads of 4 pairs of channels
        (16, (0, 1, 2, 3, 0, 1, 2, 3))
    """

    key_heads: int
    rotated: int
    pairs: str
    frequencies: tuple[int, ...]
    query_bias: bool = False
    key_bias: bool = False

    kind: ClassVar[str] = "rotary"
    title: ClassVar[str] = "shared rotary keys"
    space: ClassVar[str] = "shared key spaces, one for each rotary frequency, with a total width"

    @classmethod
    def of(cls, site: Any, rank: int) -> Self:
        """Return the config for a site, in whole pseudo-heads, each with all frequencies: R is rounded up to P·d.

        Biases stay in the projections.
        """
        width, family = site.head_width, site.family
        if site.rotated % 2 or width % 2:
            raise CompressionError(
                f"{site.name}: {site.rotated} of {width} channels are rotated; expected even numbers"
            )
        pseudo_heads = -(-rank // width)
        return cls(
            site.heads,
            width,
            pseudo_heads * width,
            key_heads=site.key_value_heads,
            rotated=site.rotated,
            pairs=family.rotary.pairs,
            frequencies=tuple(range(width // 2)) * pseudo_heads,
            query_bias=site.part(family.paths.query).bias is not None,
            key_bias=site.part(family.paths.key).bias is not None,
        )

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what stored fields must hold, as `MapConfig.rules`."""
        width, slots = self.head_width, self.head_width // 2
        yield from super().rules()
        yield "key_heads", self.key_heads > 0 and self.heads % self.key_heads == 0, f"a divisor of {self.heads}"
        yield "head_width", width % 2 == 0, "an even number"
        yield "rotated", self.rotated in range(0, width + 1, 2), f"an even number up to {width}"
        yield "rank", self.rank % width == 0, f"a multiple of {width}"
        yield "pairs", self.pairs in PAIRS, f"one of {', '.join(map(repr, PAIRS))}"
        yield "frequencies", len(self.frequencies) * 2 == self.rank, f"{self.rank // 2} numbers, one a channel pair"
        yield "frequencies", all(number < slots for number in self.frequencies), f"numbers below {slots}"

    @property
    def key_value_heads(self) -> int:
        """Number of heads of keys and values in the dense model."""
        return self.key_heads

    @property
    def width(self) -> int:
        """Width d of one head's queries and keys."""
        return self.head_width

    def without(self, kept: Sequence[int]) -> Self:
        """Return the config of the kept heads, with all shared channels."""
        return replace(self, heads=len(kept), key_heads=len(kept))

    # Pairs of channels as complex numbers.

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return real and imaginary parts, (…, d) to twice (…, d/2): rotated pairs first, then unrotated ones."""
        if self.pairs != "halves":
            return x[..., ::2], x[..., 1::2]
        real, imaginary = x[..., : self.rotated].tensor_split(2, -1)
        if self.rotated < self.head_width:
            rest_real, rest_imaginary = x[..., self.rotated :].tensor_split(2, -1)
            real, imaginary = torch.cat([real, rest_real], -1), torch.cat([imaginary, rest_imaginary], -1)
        return real, imaginary

    def join(self, real: Tensor, imaginary: Tensor) -> Tensor:
        """Undo `split`."""
        if self.pairs != "halves":
            return torch.stack([real, imaginary], -1).flatten(-2)
        half = self.rotated // 2
        return torch.cat([real[..., :half], imaginary[..., :half], real[..., half:], imaginary[..., half:]], -1)

    def key_rows(self, channels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return weight (2n, D) and bias (2n,) or None of a projection to complex channels (D, n), or (D + 1, n)."""
        rows = self.to_heads(channels.real, channels.imag).mT
        return (rows[:, :-1], rows[:, -1]) if self.key_bias else (rows, None)

    def complex_channels(self, heads: Tensor, bias: Tensor | None) -> Tensor:
        """Pair the channels of dense heads: (H, D, d) to complex (H, D, d/2), a bias (H·d,) as one more row."""
        rows = heads if bias is None else torch.cat([heads, bias.detach().view(len(heads), 1, -1)], 1)
        real, imaginary = self.split(rows)
        wide = torch.float32 if rows.device.type == "mps" else torch.float64  # MPS has no float64
        return torch.complex(real.to(wide), imaginary.to(wide))

    def to_heads(self, real: Tensor, imaginary: Tensor) -> Tensor:
        """Lay R/2 channel pairs out as the pseudo-heads have them, twice (…, R/2) to (…, R)."""
        shape = (-1, self.head_width // 2)
        return self.join(real.unflatten(-1, shape), imaginary.unflatten(-1, shape)).flatten(-2)

    # Costs.

    def parameters(self, widths: tuple[int, int]) -> int:
        """Dq·H·d for queries, Dk·R for keys, G·R, and biases."""
        query, key = widths[0] + self.query_bias, widths[1] + self.key_bias
        return query * self.heads * self.head_width + (key + self.key_heads) * self.rank

    def macs(self, widths: tuple[int, int], length: int) -> int:
        """T·Dq·H·d + T·Dk·R + 2·T·G·R + T²·H·d: a complex product is four real ones for each two channels."""
        query_width = self.heads * self.head_width
        projected = length * (widths[0] * query_width + widths[1] * self.rank)
        return projected + (2 * length * self.key_heads * self.rank + length**2 * query_width)


class RotaryQK(QKMap):
    """Heads with a rotary embedding that share keys; each has its own queries.

    `mixing` is (G, R): for each head, or group of heads, R/2 real parts, then R/2 imaginary ones.
    """

    slots: Tensor  # frequency of each channel pair, (R/2,)
    read: Tensor  # for each shared channel, the channel of a query that meets it; then the other of its pair, (2R,)
    weights: Tensor  # which mixing weights those are multiplied by, (2R,)
    signs: Tensor  # and the signs of these, (2R,)

    def __init__(self, config: RotaryConfig, mixing: nn.Parameter) -> None:
        super().__init__()
        self.config = config
        self.mixing = mixing
        self.fill_(mixing.device)

    def fill_(self, device: torch.device) -> None:
        """Fill the buffers, which no checkpoint holds."""
        config = self.config
        slots = torch.tensor(config.frequencies, dtype=torch.int64, device=device)
        pairs = torch.arange(config.rank // 2, device=device)
        real, imaginary = (part[slots] for part in config.split(torch.arange(config.head_width, device=device)))
        ones = torch.ones_like(pairs)
        read = torch.cat([config.to_heads(real, imaginary), config.to_heads(imaginary, real)])
        weights = torch.cat([config.to_heads(part, part) for part in (pairs, pairs + len(pairs))])
        signs = torch.cat([config.to_heads(ones, ones), config.to_heads(-ones, ones)])
        self.slots = nn.Buffer(slots, persistent=False)
        self.read = nn.Buffer(read, persistent=False)
        self.weights = nn.Buffer(weights, persistent=False)
        self.signs = nn.Buffer(signs.to(self.mixing.dtype), persistent=False)

    @classmethod
    def build(cls, config: RotaryConfig, module: Any, parent: Any) -> tuple["RotaryQK", Layers]:
        """Return an uninitialised map and its projections, as `ConvertedMap.build`."""
        paths = family_of(module).paths
        sizes = {
            paths.query: (config.heads * config.head_width, config.query_bias),
            paths.key: (config.rank, config.key_bias),
        }
        mixing, layers = uninitialised(module, sizes, (config.key_heads, config.rank), config.train_mixing)
        return cls(config, mixing), layers

    @classmethod
    def from_dense(
        cls, site: Any, config: RotaryConfig, moments: Any, head_weights: Tensor | None, solver: Any
    ) -> tuple["RotaryQK", Layers, RotaryFactorization]:
        """Share the keys of a dense module, as `ConvertedMap.from_dense`."""
        query_moments, key_moments = moments or (None, None)
        result = factorize_rotary(
            config.complex_channels(site.query_heads(), site.query.bias),
            config.complex_channels(site.key_heads(), site.key.bias),
            config.rank // 2,
            query_moments=query_moments,
            key_moments=key_moments,
            head_weights=head_weights,
            rotated=site.rotated // 2,
            solver=solver,
        )
        factors = result.factors
        order = arranged(factors.frequencies, site.head_width // 2)
        config = replace(config, frequencies=tuple(factors.frequencies[channel] for channel in order))
        qk, layers = cls.build(config, site.module, site.parent)
        mixing = factors.mixing[:, order]
        query, key = layers[site.paths.query], layers[site.paths.key]
        with torch.no_grad():
            qk.mixing.copy_(torch.cat([mixing.real, mixing.imag], -1))
            copies = (site.query.weight, site.query.bias), config.key_rows(factors.key[:, order])
            for layer, (weight, bias) in zip((query, key), copies, strict=True):
                layer.weight.copy_(weight)
                if layer.bias is not None:
                    layer.bias.copy_(bias)
        return qk, layers, result

    def to_dense(self, site: Any, head_width: int | None) -> Layers:
        """Sum the shared channels to the keys of each head or group, as `ConvertedMap.to_dense`; always exact."""
        family = site.family
        keys = self.read_keys(site.name, site.module)  # (G, D, d/2)
        parts: dict[str, tuple[Tensor, Tensor | None]] = {
            family.paths.query: plain_rows(site.name, site.module, family.paths.query),
            family.paths.key: self.config.key_rows(keys.transpose(0, 1).flatten(1)),
        }
        return {path: copied(*part, projection_like(site.module, path)[0]) for path, part in parts.items()}

    def read_keys(self, name: str, module: Any) -> Tensor:
        """Return the complex keys of each head or group, (G, Dk, d/2), of the module called `name`.

        A bias is the last row.
        """
        weight, bias = plain_rows(name, module, family_of(module).paths.key)
        rows = weight.mT if bias is None else torch.cat([weight.mT, bias[None]])  # (D, R)
        place = float64_device(rows.device)
        rows = rows.to(place).double()
        real, imaginary = self.config.split(rows.unflatten(-1, (-1, self.config.head_width)))
        channels = torch.complex(real.flatten(-2), imaginary.flatten(-2))
        mixing = torch.complex(*self.mixing.detach().to(place).double().chunk(2, -1))
        keys = channels.new_zeros(len(mixing), len(channels), self.config.head_width // 2)
        return keys.index_add(-1, self.slots.to(place), channels * mixing.conj()[:, None])

    # In the attention module, which rotates queries and keys and reads its tables from each call.

    def wrap(self, path: str, projection: nn.Linear, module: Any) -> PaddedProjection:
        """Return the projection of queries as it is, and that of keys with the rotation before the module's."""
        if path == family_of(module).paths.query:
            return PaddedProjection(projection)
        return RotatingProjection(projection, self.config)

    def put_in_(self, module: Any) -> None:
        """Attach the tables of each call to its hidden states, if keys are rotated before the module does it."""
        if module.get_submodule(family_of(module).paths.key).rotates:
            add_pre_hook_(module, _attach_tables)

    def take_out_(self, module: Any) -> None:
        """Undo `put_in_`."""
        remove_pre_hook_(module, _attach_tables)

    def finish_(self, module: Any) -> None:
        """Freeze the mixing weights if they are not trained, and restore the frequencies."""
        super().finish_(module)
        device = torch.device("cpu") if self.slots.is_meta else self.slots.device  # also if weights are offloaded
        self.fill_(device)
        module.get_submodule(family_of(module).paths.key).fill_(device)

    # Attention.

    def heads(self, query: Tensor, key: Tensor, content_query: float) -> tuple[Tensor, Tensor]:
        """Return queries (B, H, T, d), as they are, and the keys of each head or group, (B, G, S, d).

        The channels of each frequency are summed to these keys.
        """
        config = self.config
        key = key[:, : config.rank // config.head_width]  # (B, P, S, d)
        by_real, by_imaginary = self.mixing.to(key.dtype).unsqueeze(1).chunk(2, -1)  # (G, 1, R/2)
        # (B, 1, S, R/2)
        real, imaginary = (part.transpose(1, 2).flatten(2).unsqueeze(1) for part in config.split(key))
        mixed = real * by_real + imaginary * by_imaginary, imaginary * by_real - real * by_imaginary
        width = config.head_width // 2
        sums = (part.new_zeros(*part.shape[:3], width).index_add(-1, self.slots, part) for part in mixed)
        return query[:, : config.heads], config.join(*sums)

    def head_queries(self, query: Tensor) -> Tensor:
        """Return the rotated queries (B, H, T, d), mixed for the R channels of the keys, (B, T, H, R)."""
        query = query[:, : self.config.heads].index_select(-1, self.read)  # (B, H, T, 2R)
        mixing = self.mixing.index_select(-1, self.weights) * self.signs  # (G, 2R)
        mixed = query.unflatten(1, (len(mixing), -1)) * mixing[:, None, None]  # (B, G, H/G, T, 2R)
        queries: Tensor = mixed.unflatten(-1, (2, -1)).sum(-2).flatten(1, 2).transpose(1, 2)
        return queries

    # Heads.

    def head_rows(self, module: Any) -> list[HeadRows]:
        """List each head's rows of the queries and of the mixing weights. Not valid for grouped queries."""
        layer, start, _ = rows_of(module)[family_of(module).paths.query]
        names = ("weight", "bias") if self.config.query_bias else ("weight",)
        rows = [HeadRows(f"{layer}.{name}", start, self.config.head_width) for name in names]
        return [*rows, HeadRows("qk.mixing", 0, 1)]

    def kept_channels(self, part: Part, kept: Sequence[int]) -> list[int]:
        """Return the queries of the kept heads, or all shared keys."""
        if part == "query":
            return kept_rows(kept, self.config.head_width)
        return [*range(self.config.rank)]

    def cuts(self, kept: Sequence[int]) -> list[Cut]:
        """Return the cuts of config and mixing weights."""
        return [
            Cut(self, "config", self.config.without(kept)),
            Cut(self, "mixing", remaining(self.mixing, 0, kept)),
        ]


RotaryConfig.module = RotaryQK


def arranged(frequencies: Sequence[int], slots: int) -> list[int]:
    """Return the index of the channel pair for each slot, so that as many as possible have their own frequency there.

    There are P·d/2 pairs, and d/2 slots in each pseudo-head.
    """
    waiting: list[list[int]] = [[] for _ in range(slots)]
    for channel, frequency in enumerate(frequencies):
        waiting[frequency].append(channel)
    order: list[int | None] = []
    for place in range(len(frequencies)):
        matching = waiting[place % slots]
        order.append(matching.pop(0) if matching else None)
    others = iter([channel for channels in waiting for channel in channels])
    return [next(others) if channel is None else channel for channel in order]


def _attach_tables(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the module's arguments with the tables of cosines and sines attached to the hidden states.

    They are attached to a view that belongs to this call alone: several threads may run one module at the same time.
    """
    tables = kwargs.get("position_embeddings")
    if tables is None:
        tables = next((value for value in args if isinstance(value, tuple) and len(value) == 2), None)
    hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    view = hidden_states.view_as(hidden_states)
    setattr(view, TABLES, tables)
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": view}
    return (view, *args[1:]), kwargs
