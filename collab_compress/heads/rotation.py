"""How heads are to be rotated during training: the same dataclass in the Python API and on the command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from collab_compress.architectures import KINDS, Kind
from collab_compress.errors import HeadError
from collab_compress.heads.swap import Head, Pair

Strategy = Literal["manual", "hard", "in-layer", "soft", "random"]
STRATEGY_NAMES: tuple[Strategy, ...] = get_args(Strategy)
Importance = Literal["distance", "confidence"]


@dataclass(frozen=True)
class RotationOptions:
    """Which heads swap places, and when (Multi-Head Rotation, §3.1).

    Heads of different kinds of attention never swap; with several kinds, every strategy but `manual` works on each
    kind by itself, so that k pairs means k pairs of each kind.
    """

    strategy: Strategy
    """`manual`: the given pairs. `hard`: the k least important heads of all layers with the k most important.
    `in-layer`: the same inside each layer, k pairs a layer. `soft`: for i = 1 … t_max, the k least important heads of
    layer i with those of layer L+1−i. `random`: k pairs drawn from all layers."""

    epochs: tuple[int, ...]
    """Epochs, from 0, at whose start heads are swapped. Those that fall while heads are swapped until they swap back,
    or into the rest after that, are passed over."""

    k: int = 1
    """Number of pairs."""

    t_max: int = 1
    """How many layers from each end `soft` pairs, at most half of the layers."""

    printed: bool = False
    """Let `soft` pair layer i with L−i as the paper prints it, which leaves the last layer out."""

    pairs: tuple[Pair, ...] = ()
    """What `manual` swaps: pairs of (path of the attention module, number of the head from 0)."""

    importance: Importance = "distance"
    """What `hard`, `in-layer` and `soft` sort heads by: `distance` of their outputs from those of the other heads in
    the layer (AVG_L2), or `confidence`. The smaller, the less important."""

    exclude: tuple[int, ...] | None = None
    """Tokens whose positions do not count for importance; the config's end-of-sequence tokens if not given."""

    kinds: tuple[Kind, ...] = KINDS
    """Kinds of attention whose heads rotate, of those that the model has; `manual` goes by its pairs instead."""

    swap_back_after: int | None = None
    """Swap the same heads back after so many epochs; never if not given."""

    rest: int = 1
    """Epochs after swapping back in which no heads are swapped. With every epoch of a range in `epochs`, swapping
    back after n and resting r gives a cycle of n + r epochs."""

    seed: int = 0
    """Seed of `random`, which depends on nothing else but the epoch."""

    def __post_init__(self) -> None:
        # lists come from JSON and YAML
        object.__setattr__(self, "epochs", tuple(self.epochs))
        object.__setattr__(self, "kinds", tuple(self.kinds))
        object.__setattr__(self, "pairs", as_pairs(self.pairs))
        if self.exclude is not None:
            object.__setattr__(self, "exclude", tuple(self.exclude))
        if self.strategy not in STRATEGY_NAMES:
            raise HeadError(f"strategy is {self.strategy!r}; expected one of {', '.join(STRATEGY_NAMES)}")
        if self.importance not in get_args(Importance):
            raise HeadError(f"importance is {self.importance!r}; expected distance or confidence")
        self._check_numbers()
        if (self.strategy == "manual") != bool(self.pairs):
            raise HeadError(
                f"strategy {self.strategy!r} got {len(self.pairs)} pairs; the manual strategy swaps given pairs, and "
                "no other takes any"
            )
        unknown = set(self.kinds) - set(KINDS)
        if unknown or not self.kinds:
            raise HeadError(
                f"kinds are {', '.join(map(str, self.kinds)) or 'none'}; expected some of {', '.join(KINDS)}"
            )

    def _check_numbers(self) -> None:
        if not self.epochs or min(self.epochs) < 0 or len(set(self.epochs)) < len(self.epochs):
            raise HeadError(f"epochs are {self.epochs}; expected at least one, each once, counted from 0")
        for name, least in (("k", 1), ("t_max", 1), ("rest", 0), ("swap_back_after", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise HeadError(f"{name} is {value}; expected at least {least}")


def as_pairs(pairs: Sequence[Sequence[Sequence[str | int]]]) -> tuple[Pair, ...]:
    """Read pairs of heads that JSON or YAML made lists of.

    Raises:
        HeadError: they are no pairs of (module, head).
    """
    try:
        return tuple((_head(one), _head(other)) for one, other in pairs)
    except (TypeError, ValueError) as error:
        raise HeadError(f"pairs are {pairs!r}; expected ((module, head), (module, head)) for each") from error


def _head(head: Sequence[str | int]) -> Head:
    name, number = head
    if not isinstance(name, str) or not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(head)
    return name, number
