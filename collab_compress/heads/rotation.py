"""Multi-Head Rotation: when heads are swapped during training, how they are paired, and what does it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from random import Random
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, KINDS, AttentionSite, Kind, find_attention, transformers_model
from collab_compress.errors import HeadError
from collab_compress.heads.importance import average_distance, confidence
from collab_compress.heads.swap import Head, Pair, check_optimizer, head_blocks, matched_blocks, swap_heads_

Strategy = Literal["manual", "hard", "in-layer", "soft", "random"]
STRATEGY_NAMES: tuple[Strategy, ...] = get_args(Strategy)
Importance = Literal["distance", "confidence"]
ROUNDING = 1e-9  # epochs: far below a step, far above what sums of fractions lose


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

    epochs: tuple[float, ...]
    """When heads are swapped, in epochs from 0: 1 is the start of the second epoch, 0.5 the middle of the first, or
    the first step after it. Times that fall while heads are swapped until they swap back, or into the rest after
    that, are passed over."""

    k: int = 1
    """Number of pairs."""

    t_max: int = 1
    """How many layers from each end `soft` pairs, at most half of the layers."""

    printed: bool = False
    """Whether `soft` pairs layer i with L−i as the paper prints it, which leaves the last layer out."""

    pairs: tuple[Pair, ...] = ()
    """What `manual` swaps: pairs of (path of the attention module, number of the head from 0)."""

    importance: Importance = "distance"
    """What `hard`, `in-layer` and `soft` sort heads by: `distance` of their outputs from those of the other heads in
    the layer (AVG_L2), or `confidence`. The smaller, the less important."""

    exclude: tuple[int, ...] | None = None
    """Tokens whose positions do not count for importance; the config's end-of-sequence tokens if not given."""

    kinds: tuple[Kind, ...] = KINDS
    """Kinds of attention whose heads rotate, of those that the model has; `manual` goes by its pairs instead."""

    swap_back_after: float | None = None
    """Swap the same heads back after so many epochs, or such a share of one; never if not given."""

    rest: float = 1
    """Epochs after swapping back in which no heads are swapped. With every epoch of a range in `epochs`, swapping
    back after n and resting r gives a cycle of n + r epochs."""

    seed: int = 0
    """Seed of `random`, which depends on nothing else but the epoch."""

    def __post_init__(self) -> None:
        # lists come from JSON and YAML
        object.__setattr__(self, "epochs", tuple(_plain(epoch) for epoch in self.epochs))
        object.__setattr__(self, "rest", _plain(self.rest))
        if self.swap_back_after is not None:
            object.__setattr__(self, "swap_back_after", _plain(self.swap_back_after))
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

    @property
    def within_epochs(self) -> bool:
        """Whether anything may be due between the starts of two epochs."""
        times = (*self.epochs, self.rest, self.swap_back_after or 0)
        return any(isinstance(time, float) for time in times)

    def _check_numbers(self) -> None:
        if (
            not self.epochs
            or not all(0 <= epoch < inf for epoch in self.epochs)
            or len(set(self.epochs)) < len(self.epochs)
        ):
            raise HeadError(f"epochs are {self.epochs}; expected at least one, each once, counted from 0")
        for name, least in (("k", 1), ("t_max", 1), ("rest", 0)):
            value = getattr(self, name)
            if not least <= value < inf:
                raise HeadError(f"{name} is {value}; expected at least {least}")
        if self.swap_back_after is not None and not 0 < self.swap_back_after < inf:
            raise HeadError(f"swap_back_after is {self.swap_back_after}; expected more than 0 epochs")


def _plain(epochs: float) -> float:
    """Make whole numbers integers, so that 1.0 and 1 are one setting everywhere."""
    return int(epochs) if float(epochs).is_integer() else float(epochs)


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


Scores = Mapping[str, Tensor]


def manual(rotation: RotationOptions, sites: Sequence[AttentionSite], scores: Scores, epoch: float) -> list[Pair]:
    """Return the given pairs whose first head is in one of `sites`."""
    names = {site.name for site in sites}
    return [pair for pair in rotation.pairs if pair[0][0] in names]


def hard(rotation: RotationOptions, sites: Sequence[AttentionSite], scores: Scores, epoch: float) -> list[Pair]:
    """Pair the k least important heads of all layers with the k most important (algorithm 1)."""
    heads = _from_least(sites, scores)
    _check_k(rotation, len(heads) // 2, sites)
    return list(zip(heads[: rotation.k], heads[::-1], strict=False))


def in_layer(rotation: RotationOptions, sites: Sequence[AttentionSite], scores: Scores, epoch: float) -> list[Pair]:
    """Pair the k least important heads of each layer with its k most important (§3.1.1, there by hand)."""
    return [pair for site in sites for pair in hard(rotation, [site], scores, epoch)]


def soft(rotation: RotationOptions, sites: Sequence[AttentionSite], scores: Scores, epoch: float) -> list[Pair]:
    """Pair the k least important heads of lower layers with those of upper ones (algorithm 2).

    Layer i meets L+1−i, or as printed L−i, for i = 1 … t_max. The two are never the same layer, so k may be up to H,
    where the paper stops at H/2: its own manual swap exchanges whole layers.
    """
    last = len(sites) - rotation.printed
    if rotation.t_max > last // 2:
        raise HeadError(
            f"t_max is {rotation.t_max} for {len(sites)} layers of {sites[0].kind} attention; expected at most "
            f"{last // 2}"
            + (", for printed pairs layer i with L−i" if rotation.printed else "")
            + ("; the strategy needs more modules than a single shared one" if last < 2 else "")
        )
    pairs: list[Pair] = []
    for lower, upper in zip(sites[: rotation.t_max], sites[last - 1 :: -1], strict=False):
        _check_k(rotation, min(lower.heads, upper.heads), sites)
        least = (_from_least([site], scores)[: rotation.k] for site in (lower, upper))
        pairs += zip(*least, strict=True)
    return pairs


def random(rotation: RotationOptions, sites: Sequence[AttentionSite], scores: Scores, epoch: float) -> list[Pair]:
    """Draw k pairs of different heads from all layers (algorithm 3); the same for the same seed, kind and epoch."""
    heads = _heads(sites)
    _check_k(rotation, len(heads) // 2, sites)
    drawn = Random(f"{rotation.seed} {sites[0].kind} {epoch}").sample(heads, 2 * rotation.k)
    return list(zip(drawn[::2], drawn[1::2], strict=True))


@dataclass(frozen=True)
class Pairing:
    """A strategy.

    Args:
        pair: from the settings, the modules of one kind, path → importance (H,) of each, and the epoch to pairs in
            which no head is twice. Raises HeadError where the settings ask more than the modules have.
        measures: whether it looks at importance.
        crosses: whether it may pair heads of different modules.
    """

    pair: Callable[[RotationOptions, Sequence[AttentionSite], Scores, float], list[Pair]]
    measures: bool
    crosses: bool


PAIRINGS: dict[Strategy, Pairing] = {
    "manual": Pairing(manual, measures=False, crosses=False),  # whether they cross is seen from the pairs
    "hard": Pairing(hard, measures=True, crosses=True),
    "in-layer": Pairing(in_layer, measures=True, crosses=False),
    "soft": Pairing(soft, measures=True, crosses=True),
    "random": Pairing(random, measures=False, crosses=True),
}


def _heads(sites: Sequence[AttentionSite]) -> list[Head]:
    return [(site.name, head) for site in sites for head in range(site.heads)]


def _from_least(sites: Sequence[AttentionSite], scores: Scores) -> list[Head]:
    """All heads, the least important first; equal ones in the model's order."""
    return sorted(_heads(sites), key=lambda head: float(scores[head[0]][head[1]]))


def _check_k(rotation: RotationOptions, most: int, sites: Sequence[AttentionSite]) -> None:
    if rotation.k > most:
        raise HeadError(
            f"k is {rotation.k} for {rotation.strategy!r} among {len(sites)} modules of {sites[0].kind} attention "
            f"such as {sites[0].name}, which has {sites[0].heads} heads; expected at most {most}"
        )


@dataclass(frozen=True)
class RotationEvent:
    """Heads that swapped places.

    Args:
        epoch: when they did, in epochs from 0.
        reason: whether they were swapped, or swapped back.
        pairs: the heads.
    """

    epoch: float
    reason: Literal["swap", "swap-back"]
    pairs: tuple[Pair, ...]


def _reached(time: float, now: float) -> bool:
    return now >= time - ROUNDING


class Rotator:
    """Swap heads of a model when a `RotationOptions` says so (Multi-Head Rotation, §3.1).

    Between steps the model is always a whole one, which can be saved as it is: a swap changes weights only.

    Args:
        model: stock or edited, whole or sharded by FSDP2; not its `DistributedDataParallel` wrapper.
        rotation: which heads swap, and when.

    Raises:
        HeadError: the model does not have the heads that the strategy needs, or they cannot be swapped, as under
            FSDP1 and ZeRO-3.
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.
    """

    def __init__(self, model: PreTrainedModel, rotation: RotationOptions) -> None:
        self.model, self.rotation = transformers_model(model), rotation
        self.history: list[RotationEvent] = []
        self._pairing = PAIRINGS[rotation.strategy]
        self._latest: float | None = None  # what `epoch` was last called for
        self._swapped: tuple[Pair, ...] = ()  # what is to be swapped back
        self._due: float = 0  # when
        self._awake: float = 0  # when the rest is over
        matched_blocks(model, rotation.pairs)
        for sites in self._sites().values():
            for site in sites if not rotation.pairs else ():
                head_blocks(site, 0)
                heads = [(site.name, head) for head in range(site.heads)]
                for start in (0, 1):  # each with the next: heads that differ in width would change places somewhere
                    matched_blocks(model, list(zip(heads[start::2], heads[start + 1 :: 2], strict=False)))
            zeros = {site.name: torch.zeros(site.heads) for site in sites}
            self._pairing.pair(rotation, sites, zeros, 0)
            for site in sites[1:] if self._pairing.crosses else ():
                matched_blocks(model, [((sites[0].name, 0), (site.name, 0))])

    def epoch(
        self, epoch: float, optimizer: Any = None, batches: Iterable[Mapping[str, Tensor]] | None = None
    ) -> tuple[RotationEvent, ...]:
        """Swap what has become due since the call before; nothing where the training was before, as after resuming.

        Called at the start of each epoch, and for `RotationOptions` with fractions before each step. The first call
        says where the training begins: what was due earlier is passed over.

        Every process of a distributed training must call it; where importance decides, it is measured on the batches
        of all of them, so that all swap the same heads. Where FSDP shards the model, each must give as many batches.

        Args:
            epoch: from 0; 1.5 is the middle of the second.
            optimizer: whose state moves with the heads, as for `swap_heads_`.
            batches: held-out data that importance is measured on, if the strategy looks at it and swaps now.

        Returns:
            What was done, also added to `history`.

        Raises:
            HeadError: the epoch lies before one that has already begun, importance cannot be measured, or
                `swap_heads_` refuses.
            CalibrationError: the model does not take such batches.
        """
        now = _plain(epoch)
        if self._latest is not None and int(now) < int(self._latest):
            raise HeadError(
                f"epoch {now} comes after epoch {self._latest}; when training resumes from a checkpoint, give a "
                "new Rotator the state saved with it"
            )
        if self._latest is not None and now <= self._latest:
            return ()
        before = len(self.history)
        if self._swapped and _reached(self._due, now):
            self._swap(RotationEvent(now, "swap-back", self._swapped), optimizer)
            late = now >= self._due + 1  # epochs that nobody called for
            self._swapped, self._awake = (), (now if late else self._due) + self.rotation.rest
        time = self._reached_since(self._latest, now)
        if time is not None and not self._swapped and _reached(self._awake, time):
            pairs = self._choose(time, batches)
            self._swap(RotationEvent(now, "swap", pairs), optimizer)
            if self.rotation.swap_back_after is not None:
                self._swapped, self._due = pairs, time + self.rotation.swap_back_after
        self._latest = now
        return tuple(self.history[before:])

    def check(self, optimizer: Any) -> None:
        """Refuse, before training, an optimizer whose state could not move with the heads.

        Raises:
            HeadError: it does not step the parameters of heads that may swap.
        """
        pairs = [block for blocks in matched_blocks(self.model, self.rotation.pairs) for block in blocks]
        sites = [] if self.rotation.pairs else [site for sites in self._sites().values() for site in sites]
        check_optimizer(optimizer, pairs + [block for site in sites for block in head_blocks(site, 0)])

    def state_dict(self) -> dict[str, Any]:
        """Describe in JSON types all that a resumed training needs beside the model's and optimizer's own states."""
        return {
            "latest": self._latest,
            "swapped": self._swapped,
            "due": self._due,
            "awake": self._awake,
            "history": [asdict(event) for event in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; swaps nothing, for weights saved with it are swapped already.

        Raises:
            HeadError: the state is none, or names heads that this model does not have.
        """
        try:
            latest, due, awake = state["latest"], _plain(state["due"]), _plain(state["awake"])
            swapped = as_pairs(state["swapped"])
            events = [RotationEvent(e["epoch"], e["reason"], as_pairs(e["pairs"])) for e in state["history"]]
        except (KeyError, TypeError, ValueError) as error:
            raise HeadError(
                f"cannot read the state of a Rotator ({error!r}); pass what its state_dict() gave"
            ) from error
        matched_blocks(self.model, swapped)
        self._latest, self._swapped, self._due, self._awake, self.history = latest, swapped, due, awake, events

    def _reached_since(self, latest: float | None, now: float) -> float | None:
        """Return the last swap time after `latest` and not after now; at the first call, only one that is due now."""
        times = [time for time in self.rotation.epochs if _reached(time, now)]
        if latest is None:
            return next((time for time in times if _reached(now, time)), None)
        return max((time for time in times if not _reached(time, latest)), default=None)

    def _swap(self, event: RotationEvent, optimizer: Any) -> None:
        swap_heads_(self.model, event.pairs, optimizer)
        self.history.append(event)

    def _sites(self) -> dict[Kind, list[AttentionSite]]:
        """Modules of each kind that rotates, by layer."""
        if self.rotation.strategy == "manual":
            sites = find_attention(self.model, FAMILIES)
        else:
            sites = find_attention(self.model, FAMILIES, kinds=self.rotation.kinds)
        return {kind: [site for site in sites if site.kind == kind] for kind in dict.fromkeys(s.kind for s in sites)}

    def _choose(self, epoch: float, batches: Iterable[Mapping[str, Tensor]] | None) -> tuple[Pair, ...]:
        scores = self._measure(epoch, batches) if self._pairing.measures else {}
        pairs = [
            pair
            for sites in self._sites().values()
            for pair in self._pairing.pair(self.rotation, sites, scores, epoch)
        ]
        return tuple(pairs)  # the same in all processes, which measure together

    def _measure(self, epoch: float, batches: Iterable[Mapping[str, Tensor]] | None) -> dict[str, Tensor]:
        if batches is None:
            raise HeadError(
                f"strategy {self.rotation.strategy!r} swaps heads by importance at epoch {epoch} and got no batches; "
                "pass batches=, of held-out data"
            )
        measure = confidence if self.rotation.importance == "confidence" else average_distance
        return measure(self.model, batches, exclude=self.rotation.exclude, kinds=self.rotation.kinds, together=True)
