"""Shared channels in models with a rotary embedding: pseudo-heads that the stock module turns and caches as its own.

    score_i(x, y) = s · Re Σ_c m_ic (x χ_c) conj(y κ_c) e^{iθ(c)n}

where two channels that are turned together are one complex channel c, θ(c) its frequency, n the distance of the
tokens and m_ic complex ("RoFormer", Su et al., 2021; the sharing is ours). Where groups of heads share a key, keys
are shared among groups, and queries stay each head's own: x a_iθ(c) in place of x χ_c.

The module projects P·d channels of keys, views them as P heads and turns each of their channel pairs by the frequency
that belongs to its place; a channel of another frequency is turned by the difference beforehand. Heads are mixed
behind the cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from collab_compress.attention.form import Cut, HeadRows, ScoreForm, ScoreParts, plain_weight
from collab_compress.attention.kernels import in_float32_on_cpu, masked, softmax
from collab_compress.attention.projections import PaddedProjection, dense_projection
from collab_compress.errors import CompressionError, UnsupportedModelError

PAIRS = ("halves", "neighbours", "neighbours, tables too")
TABLES = "collab_tables"  # attribute of hidden states: cosines and sines of their positions


@dataclass(frozen=True)
class Pairing:
    """Which channels of a head are turned together.

    Args:
        width: channels d of a head.
        rotated: how many are turned, its first.
        pairs: "halves" where channel j is turned with that half of the turned ones further, "neighbours" where 2j is
            with 2j + 1, "neighbours, tables too" where the tables of cosines and sines are laid out so as well.
    """

    width: int
    rotated: int
    pairs: str

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return real and imaginary parts, (…, d) to twice (…, d/2): rotated pairs first, then unrotated ones."""
        if self.pairs != "halves":
            return x[..., ::2], x[..., 1::2]
        turned, rest = x[..., : self.rotated], x[..., self.rotated :]
        if not rest.shape[-1]:
            one, two = turned.chunk(2, -1)
            return one, two
        (one, two), (three, four) = turned.tensor_split(2, -1), rest.tensor_split(2, -1)
        return torch.cat([one, three], -1), torch.cat([two, four], -1)

    def join(self, real: Tensor, imaginary: Tensor) -> Tensor:
        """Undo `split`."""
        if self.pairs != "halves":
            return torch.stack([real, imaginary], -1).flatten(-2)
        half = self.rotated // 2
        parts = (real[..., :half], imaginary[..., :half], real[..., half:], imaginary[..., half:])
        return torch.cat([part for part in parts if part.shape[-1]], -1)


class TurningProjection(PaddedProjection):
    """A projection to pseudo-heads, some of whose channels get another frequency than their place in the head has.

    Args:
        in_features: input width D.
        width: P·d.
        pairing: of the channels of a head.
        frequencies: of each pair, pseudo-head by pseudo-head, P·d/2; a place's own frequency is its number in the
            head.
        bias: whether it has one.
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        pairing: Pairing,
        frequencies: Sequence[int],
        bias: bool,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, width, pairing.width, bias, device, dtype)
        self.pairing, self.frequencies = pairing, list(frequencies)

    @property
    def moved(self) -> bool:
        """Whether any channel is not where its frequency is."""
        places = self.pairing.width // 2
        return any(frequency != place % places for place, frequency in enumerate(self.frequencies))

    def forward(self, x: Tensor) -> Tensor:
        """Project x (B, T, D) to (B, T, P·d), channels of other frequencies turned by what their place lacks.

        The attention module attaches its tables of cosines and sines to x.

        Raises:
            UnsupportedModelError: x has no tables.
        """
        projected: Tensor = self.proj(x)
        if not self.moved:
            return projected
        tables: tuple[Tensor, Tensor] | None = getattr(x, TABLES, None)
        if tables is None:
            raise UnsupportedModelError(
                "converted rotary attention needs position_embeddings, cosines and sines of all positions, as stock "
                "models pass to their attention modules; call the model rather than the module"
            )
        cos, sin = tables
        heads = projected.unflatten(-1, (-1, self.pairing.width))  # (B, T, P, d)
        real, imaginary = self.pairing.split(heads)
        places = self.pairing.width // 2
        wanted = torch.tensor(self.frequencies, device=x.device).view(-1, places)
        cos, sin = (each[:, :, None] for each in (self._angles(cos, 1.0), self._angles(sin, 0.0)))  # (B, T, 1, d/2)
        to_cos, to_sin = (each[:, :, 0, wanted.flatten()].unflatten(-1, wanted.shape) for each in (cos, sin))
        size = cos * cos + sin * sin  # tables may be longer than 1
        by_cos = (to_cos * cos + to_sin * sin) / size  # (B, T, P, d/2)
        by_sin = (to_sin * cos - to_cos * sin) / size
        turned = self.pairing.join(
            (real * by_cos - imaginary * by_sin).to(projected.dtype),
            (real * by_sin + imaginary * by_cos).to(projected.dtype),
        )
        return turned.flatten(-2)

    def _angles(self, table: Tensor, rest: float) -> Tensor:
        """One number a channel pair, (B, T, d/2), of tables for the turned channels; `rest` for the others."""
        half = self.pairing.rotated // 2
        own = table[..., ::2] if self.pairing.pairs == "neighbours, tables too" else table
        left = self.pairing.width // 2 - half
        return nn.functional.pad(own[..., :half].float(), (0, left), value=rest)


def arranged(frequencies: Sequence[int], places: int) -> list[int]:
    """Order channels so that as many as can be are at the place of their own frequency.

    Args:
        frequencies: of P·d/2 channels.
        places: d/2.

    Returns:
        Which channel belongs at each place, pseudo-head by pseudo-head.
    """
    waiting: list[list[int]] = [[] for _ in range(places)]
    for channel, frequency in enumerate(frequencies):
        waiting[frequency].append(channel)
    found = [
        waiting[place].pop(0) if waiting[place] else None
        for _ in range(len(frequencies) // places)
        for place in range(places)
    ]
    others = iter([channel for left in waiting for channel in left])
    return [next(others) if channel is None else channel for channel in found]


@dataclass(frozen=True)
class RotaryScores(ScoreForm):
    """The shared form of heads that a rotary embedding turns.

    `mixing` is (G, R): of each head, or group of heads, R/2 real parts, then R/2 imaginary ones.

    Args:
        key_heads: number G of heads of keys in the dense model; where that is less than H, queries are not shared.
        rotated: how many channels of a head are turned.
        pairs: as for `Pairing`.
        frequencies: of each channel pair, P·d/2, as for `TurningProjection`.
        query_bias: whether queries have a bias.
        key_bias: whether keys have one.
    """

    key_heads: int = 0
    rotated: int = 0
    pairs: str = "halves"
    frequencies: tuple[int, ...] = ()
    query_bias: bool = False
    key_bias: bool = False

    kind: ClassVar[str] = "rotary"
    option: ClassVar[str] = "shared"
    title: ClassVar[str] = "shared rotary attention"
    space: ClassVar[str] = "a query/key space for each rotary frequency that heads share, all together"
    solvers: ClassVar[tuple[str, ...]] = ("als",)

    @classmethod
    def of(cls, site: Any, rank: int, content_bias: bool, sizes: Sequence[int] | None = None) -> Self:
        """Describe what is to replace the projections of a module, in whole pseudo-heads: R is rounded up to P·d.

        Args:
            site: the module, as `architectures` finds it.
            rank: channels R, rounded up here.
            content_bias: ignored: biases stay in the projections.
            sizes: frequency of each channel pair; each pseudo-head has all of them if not given.
        """
        width = site.head_width
        if site.rotated % 2 or width % 2:
            raise CompressionError(
                f"{site.name}: {site.rotated} of {width} channels are turned; expected even numbers"
            )
        pseudo = -(-rank // width)
        found = tuple(range(width // 2)) * pseudo if sizes is None else tuple(sizes)
        query, key = site.part(site.family.query), site.part(site.family.key)
        return cls(
            query=site.family.query, key=site.family.key, heads=site.heads, head_width=width, rank=pseudo * width,
            content_bias=False, key_heads=site.key_value_heads, rotated=site.rotated,
            interleaved=site.family.interleaved, even=site.family.even, pairs=site.family.rotary, frequencies=found,
            query_bias=query.bias is not None, key_bias=key.bias is not None,
        )  # fmt: skip

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what stored fields must hold, as `MapForm.rules`."""
        width, places = self.head_width, self.head_width // 2
        yield from super().rules()
        yield "key_heads", self.key_heads > 0 and self.heads % self.key_heads == 0, f"a divisor of {self.heads}"
        yield "head_width", width % 2 == 0, "an even number"
        yield "rotated", self.rotated in range(0, width + 1, 2), f"an even number up to {width}"
        yield "rank", self.rank % width == 0, f"a multiple of {width}"
        yield "pairs", self.pairs in PAIRS, f"one of {', '.join(map(repr, PAIRS))}"
        yield "frequencies", len(self.frequencies) * 2 == self.rank, f"{self.rank // 2} numbers, one a channel pair"
        yield "frequencies", all(number < places for number in self.frequencies), f"numbers below {places}"

    @property
    def dense_key_width(self) -> int:
        """How wide keys, and values, of all heads are in the dense model."""
        return self.key_heads * self.head_width

    @property
    def pairing(self) -> Pairing:
        """Which channels are turned together."""
        return Pairing(self.head_width, self.rotated, self.pairs)

    @property
    def unrotated(self) -> tuple[bool, ...]:
        """Which of the R/2 channel pairs are not rotated; there the mixing matrix holds a real factor of each."""
        return tuple(frequency >= self.rotated // 2 for frequency in self.frequencies)

    @property
    def grouped(self) -> bool:
        """Whether groups of heads share a key, so that queries are each head's own."""
        return self.key_heads < self.heads

    @property
    def query_width(self) -> int:
        """How wide queries are: R, or H·d where they are not shared."""
        return self.heads * self.head_width if self.grouped else self.rank

    # Parameters.

    def build(self, module: Any, parent: Any) -> ScoreParts:
        """Make uninitialised parameters; arguments as for `MapForm.build`."""
        weights, inputs = zip(*(dense_projection(module, path) for path in (self.query, self.key)), strict=True)
        like: dict[str, Any] = {"device": weights[0].device, "dtype": weights[0].dtype}
        trained = [weight.requires_grad for weight in weights]
        shared = (self.rank, self.pairing, self.frequencies)
        own_query = (
            PaddedProjection(inputs[0], self.query_width, self.head_width, self.query_bias, **like)
            if self.grouped
            else TurningProjection(inputs[0], *shared, self.query_bias, **like)
        )
        own_key = TurningProjection(inputs[1], *shared, self.key_bias, **like)
        return ScoreParts(
            own_query.requires_grad_(trained[0]),
            own_key.requires_grad_(trained[1]),
            self.build_mixing(any(trained), **like),
        )

    def build_mixing(self, trained: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Make an empty parameter."""
        empty = torch.empty(self.key_heads, self.rank, device=device, dtype=dtype)
        return nn.Parameter(empty, self.train_mixing and trained)

    def load_channels_(
        self, parts: ScoreParts, query: Tensor | None, mixing: Tensor, key: Tensor, dense: Any
    ) -> None:
        """Copy complex channels into `parts`, in place, in their dtype; they lie as `frequencies` says.

        Args:
            parts: as `build` makes them.
            query: χ, complex (D, R/2), with a last row that is the bias where there is one; None where queries are
                each head's own.
            mixing: m, complex (G, R/2).
            key: κ, as the queries.
            dense: the dense query projection, which is copied where queries are not shared.
        """
        with torch.no_grad():
            parts.mixing.copy_(torch.cat([mixing.real, mixing.imag], -1))
            for projection, channels, biased in (
                (parts.query.proj, query, self.query_bias),
                (parts.key.proj, key, self.key_bias),
            ):
                if channels is None:
                    projection.weight.copy_(dense.weight)
                    if biased:
                        projection.bias.copy_(dense.bias)
                    continue
                rows = self.to_heads(channels.real, channels.imag).mT  # (R, D)
                projection.weight.copy_(rows[:, : projection.in_features])
                if biased:
                    projection.bias.copy_(rows[:, -1])

    def channels_of(self, heads: Tensor, bias: Tensor | None) -> Tensor:
        """Pair the channels of dense heads: (H, D, d) to complex (H, D, d/2), a bias (H·d,) as one more row."""
        rows = heads if bias is None else torch.cat([heads, bias.detach().view(len(heads), 1, -1)], 1)
        real, imaginary = self.pairing.split(rows)
        wide = torch.float32 if rows.device.type == "mps" else torch.float64  # which has no other
        return torch.complex(real.to(wide), imaginary.to(wide))

    def to_heads(self, real: Tensor, imaginary: Tensor) -> Tensor:
        """Lay R/2 channel pairs out as the pseudo-heads have them, twice (…, R/2) to (…, R)."""
        shape = (-1, self.head_width // 2)
        return self.pairing.join(real.unflatten(-1, shape), imaginary.unflatten(-1, shape)).flatten(-2)

    def of_heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `to_heads`; also for the H·d channels of queries."""
        real, imaginary = self.pairing.split(x.unflatten(-1, (-1, self.head_width)))
        return real.flatten(-2), imaginary.flatten(-2)

    def put_in_(self, module: Any, parts: ScoreParts) -> None:
        """Replace the query and key projections of `module`, which reads its tables from each call, in place."""
        super().put_in_(module, parts)
        if _attach_tables not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_attach_tables, with_kwargs=True)

    def take_out_(self, module: Any, dense: tuple[Any, Any]) -> None:
        """Restore dense query and key projections in place."""
        for number in [number for number, hook in module._forward_pre_hooks.items() if hook is _attach_tables]:
            del module._forward_pre_hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)
        super().take_out_(module, dense)

    def finish_(self, module: Any) -> None:
        """Freeze the mixing matrix again if it is not trained."""
        module.mixing.requires_grad_(self.train_mixing)

    def read_channels(self, name: str, module: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Read what makes the scores of the module called `name`, as complex numbers.

        Returns:
            χ (Dq, R/2), or each head's own (Dq, H·d/2); m (G, R/2); κ (Dk, R/2). A bias is the last row.

        Raises:
            UnsupportedModelError: a projection carries an adapter, is quantized, or is offloaded.
        """
        sides = []
        for path in (self.query, self.key):
            projection = module.get_submodule(path).proj
            weight = plain_weight(f"{name}.{path}.proj", projection).mT  # (D, R)
            if projection.bias is not None:
                weight = torch.cat([weight, projection.bias.detach()[None]])
            sides.append(torch.complex(*(each.double() for each in self.of_heads(weight))))
        mixing = torch.complex(*module.mixing.detach().double().chunk(2, -1))
        return sides[0], mixing, sides[1]

    def read(self, name: str, module: Any) -> Any:
        """Refuse: channels are complex; see `read_channels`."""
        raise UnsupportedModelError(
            f"{name}: shared rotary channels are no factors of Wq·Wkᵀ; expand the model, or read its parameters"
        )

    def trained(self, module: Any) -> list[nn.Parameter]:
        """List projections, their biases and the mixing matrix."""
        return [*super().trained(module), module.mixing]

    # Attention.

    def head_queries(self, module: Any, query: Tensor) -> Tensor:
        """Return the rotated queries of each head, (B, T, H, R), from queries in the layout of `attend`."""
        return self._mixed(module, query).transpose(1, 2)

    def _joined(self, key: Tensor) -> Tensor:
        """Concatenate the channels of the pseudo-heads without padding, (B, P, S, d) to (B, S, R)."""
        return key[:, : self.rank // self.head_width].transpose(1, 2).flatten(2)

    def _mixed(self, module: Any, query: Tensor) -> Tensor:
        """Multiply queries by the mixing matrix: (B, P, T, d), or (B, H, T, d) where not shared, to (B, H, T, R)."""
        mixing: Tensor = module.mixing
        real, imaginary = self.pairing.split(query[:, : self.query_width // self.head_width])
        if self.grouped:
            mixing = mixing.repeat_interleave(self.heads // self.key_heads, 0)
            places = torch.tensor(self.frequencies, device=query.device)
            real, imaginary = real[..., places], imaginary[..., places]  # (B, H, T, R/2)
        else:
            real, imaginary = (
                each.transpose(1, 2).flatten(2).unsqueeze(1) for each in (real, imaginary)
            )  # (B, 1, T, R/2)
        by_real, by_imaginary = mixing.unsqueeze(1).chunk(2, -1)  # (H, 1, R/2)
        mixed = real * by_real - imaginary * by_imaginary, real * by_imaginary + imaginary * by_real
        if not self.grouped and self.rotated < self.head_width:
            still = torch.tensor(self.unrotated, device=query.device)
            parts = real * by_real, imaginary * by_imaginary
            mixed = torch.where(still, parts[0], mixed[0]), torch.where(still, parts[1], mixed[1])
        return self.to_heads(*mixed)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float,
        dropout: float, causal: bool,
    ) -> Tensor:  # fmt: skip
        """Attend by PyTorch's kernel, each head to the shared keys."""
        mixed, shared = self._mixed(module, query), self._joined(key)
        return attend_to_shared(mixed, shared, value, mask, scaling, dropout, causal)

    def probabilities(
        self, module: Any, query: Tensor, key: Tensor, mask: Tensor | None, *, scaling: float, causal: bool
    ) -> Tensor:
        """Compute attention probabilities (B, H, T, S)."""
        return shared_probabilities(self._mixed(module, query), self._joined(key), mask, scaling, causal)

    # Heads.

    def head_rows(self) -> list[HeadRows]:
        """A head owns its row of the mixing matrix; none where a group's keys and rows are those of several heads."""
        return [HeadRows.of("mixing", [1] * self.heads)]

    def without(self, kept: Sequence[int]) -> Self:
        """Keep all shared channels."""
        return replace(self, heads=len(kept), key_heads=len(kept))

    def keep_heads(self, module: Any, kept: Sequence[int]) -> list[Cut]:
        """Compute what remains of `module` with these heads only; projections are what they were."""
        return [Cut(module, self.at, self.without(kept)), *self.row_cuts(module, kept)]

    # Costs.

    def parameters(self, width: int) -> int:
        """D·(R or H·d) for queries, D·R for keys, G·R, and biases."""
        biases = self.query_width * self.query_bias + self.rank * self.key_bias
        return width * (self.query_width + self.rank) + self.key_heads * self.rank + biases

    def macs(self, width: int, length: int) -> int:
        """T·D·(R or H·d) + T·D·R + 2·T·H·R + T²·H·R: a complex product is four real ones for each two channels."""
        projected = length * width * (self.query_width + self.rank)
        return projected + (2 * length + length**2) * self.heads * self.rank

    def break_even(self, width: int) -> float:
        """T* = [D·((H + G)·d − (R or H·d) − R) − 2·H·R] / (H·R − H·d); infinite for R ≤ d."""
        heads, head_width = self.heads, self.head_width
        before = (heads + self.key_heads) * head_width
        saved = width * (before - self.query_width - self.rank) - 2 * heads * self.rank
        growth = heads * (self.rank - head_width)
        if growth <= 0:
            return inf if saved >= 0 else 0.0
        return max(0.0, saved / growth)


def _attach_tables(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the module's arguments with the tables of cosines and sines attached to the hidden states.

    They are attached to a view that belongs to this call alone: several threads may run one module at the same time.
    """
    form: RotaryScores = module.score_form
    projections = [module.get_submodule(path) for path in (form.query, form.key)]
    if not any(isinstance(projection, TurningProjection) and projection.moved for projection in projections):
        return None
    tables = kwargs.get("position_embeddings")
    if tables is None:
        tables = next((value for value in args if isinstance(value, tuple) and len(value) == 2), None)
    hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    view = hidden_states.view_as(hidden_states)
    setattr(view, TABLES, tables)
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": view}
    return (view, *args[1:]), kwargs


@in_float32_on_cpu
def attend_to_shared(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, dropout: float, causal: bool
) -> Tensor:
    """Compute head outputs (B, H, T, dv) of queries (B, H, T, R), keys of all (B, S, R) and values (B, H, S, dv)."""
    shared = key.unsqueeze(1).expand(-1, query.shape[1], -1, -1)
    return scaled_dot_product_attention(
        query, shared, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scaling
    )


@in_float32_on_cpu
def shared_probabilities(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, causal: bool) -> Tensor:
    """Softmax of the scores over keys, (B, H, T, S)."""
    return softmax(masked((query * scaling) @ key.unsqueeze(1).mT, mask, causal))
