"""Multi-Head Rotation: swap heads during training, paired by a strategy at given epochs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from numbers import Real
from random import Random
from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.architectures import KINDS, AttentionSite, Kind, find_attention, transformers_model
from collab_compress.errors import HeadError, check_number
from collab_compress.heads.importance import average_distance, confidence, end_tokens
from collab_compress.heads.swap import (
    Head,
    Pair,
    as_pairs,
    check_optimizer,
    head_blocks,
    match_blocks,
    match_heads,
    swap_heads_,
)
from collab_compress.options import check_counts, check_kinds, check_known

Strategy = Literal["manual", "hard", "soft", "random"]
Importance = Literal["distance", "confidence"]
EPOCH_ATOL = 1e-9  # far below a step, far above the rounding errors of sums of fractions


@dataclass(frozen=True)
class RotationOptions:
    """Which heads swap places, and when (Multi-Head Rotation, §3.1).

    Heads of different kinds of attention never swap. Every strategy but `manual` pairs the heads of each kind
    separately, so k pairs means k pairs of each kind.

    Example:
        >>> RotationOptions("hard", epochs=(1, 2, 3), k=2, swap_back_after=0.5).within_epochs
        True
    """

    strategy: Strategy
    """`manual`: the given pairs. `hard`: the k least important heads of all layers with the k most important.
    `soft`: for i = 1 … t_max, the k least important heads of layer i with those of layer L+1−i. `random`: k random
    pairs of all layers."""

    epochs: tuple[float, ...]
    """When heads are swapped, in epochs from 0: 1 is the start of the second epoch, 0.5 the middle of the first, or
    the first step after it. Times before heads have swapped back, or in the rest after that, are skipped."""

    k: int = 1
    """Number of pairs."""

    t_max: int = 1
    """Number of layers from each end that `soft` pairs, at most half of the layers."""

    pairs: tuple[Pair, ...] = ()
    """Pairs that `manual` swaps, of (path of the attention module, number of the head from 0)."""

    importance: Importance = "distance"
    """Importance by which `hard` and `soft` sort heads: `distance` of their outputs from those of the
    layer's other heads (AVG_L2), or `confidence`."""

    exclude: tuple[int, ...] | None = None
    """Tokens whose positions do not count for importance; if not given, the end-of-sequence tokens of the config and
    of the tokenizer that a Trainer or a session has."""

    kinds: tuple[Kind, ...] = KINDS
    """Kinds of attention whose heads rotate; not used by `manual`."""

    swap_back_after: float | None = None
    """Swap the same heads back after this many epochs, possibly a fraction; never if not given."""

    rest: float = 1
    """Epochs after swapping back in which no heads are swapped. With every epoch of a range in `epochs`, swapping
    back after n and resting r gives a cycle of n + r epochs."""

    of_training: bool = False
    """Whether `epochs`, `swap_back_after` and `rest` are shares of the training, from 0 to 1, in place of epochs."""

    moments: bool = True
    """Whether the optimizer's moments move with the heads; in the authors' code they stay."""

    seed: int = 0
    """Seed of `random`, whose pairs depend only on it and on the epoch."""

    def __post_init__(self) -> None:
        try:
            normalised: dict[str, Any] = {  # lists come from JSON and YAML
                "epochs": tuple(_as_int(epoch) for epoch in self.epochs),
                "rest": _as_int(self.rest),
                "swap_back_after": None if self.swap_back_after is None else _as_int(self.swap_back_after),
                "kinds": tuple(self.kinds),
                "pairs": as_pairs(self.pairs),
                "exclude": None if self.exclude is None else tuple(map(int, self.exclude)),
            }
        except (TypeError, ValueError) as error:
            raise HeadError(
                f"an option has a wrong type ({error}); expected tuples of numbers as epochs and exclude, "
                "of names as kinds, and numbers as rest and swap_back_after"
            ) from error
        for name, value in normalised.items():
            object.__setattr__(self, name, value)
        check_known("strategy", self.strategy, get_args(Strategy))
        check_known("importance", self.importance, get_args(Importance))
        check_kinds("rotation", self.kinds)
        check_counts(self, HeadError, "k", "t_max")
        check_number("rest", self.rest, 0)
        valid = all(0 <= epoch < inf for epoch in self.epochs) and len(set(self.epochs)) == len(self.epochs)
        if not self.epochs or not valid:
            raise HeadError(f"epochs are {self.epochs}; expected at least one, each once, counted from 0")
        if self.swap_back_after is not None and not 0 < self.swap_back_after < inf:
            raise HeadError(f"swap_back_after is {self.swap_back_after}; expected more than 0 epochs")
        if self.of_training and max(self.epochs) >= 1:
            raise HeadError(f"epochs are {self.epochs}; expected shares of the training, below 1, with of_training")
        if (self.strategy == "manual") != bool(self.pairs):
            raise HeadError(
                f"strategy {self.strategy!r} got {len(self.pairs)} pairs; the manual strategy needs pairs, and "
                "others take none"
            )

    @property
    def within_epochs(self) -> bool:
        """Whether heads may swap between the starts of two epochs."""
        times = (*self.epochs, self.rest, self.swap_back_after or 0)
        return self.of_training or any(isinstance(time, float) for time in times)

    @property
    def measures(self) -> bool:
        """Whether the strategy measures the importance of heads."""
        return self.strategy in ("hard", "soft")


def _as_int(epochs: float) -> float:
    """Return whole numbers as integers, so that 1.0 and 1 are one setting everywhere."""
    if not isinstance(epochs, Real):
        raise TypeError(f"{epochs!r} is no number")
    return int(epochs) if float(epochs).is_integer() else float(epochs)


Scores = Mapping[str, Tensor]
"""Path of a module → importance of its heads, (H,)."""


def pair_heads(rotation: RotationOptions, sites: Sequence[AttentionSite], scores: Scores, epoch: float) -> list[Pair]:
    """Return the pairs to swap among modules of one kind, no head twice, or raise a HeadError if there are too few.

    `hard`, `soft` and `random` are algorithms 1 to 3. In `soft` layer i meets L+1−i, where the paper prints L−i. The
    two are never the same layer, so k may be up to H, where the paper stops at H/2: its own manual swap exchanges
    whole layers.
    """
    k, t_max, last = rotation.k, rotation.t_max, len(sites)
    if rotation.strategy == "soft":
        if t_max > last // 2:
            raise HeadError(
                f"t_max is {t_max} for {last} layers of {sites[0].kind} attention; expected at most "
                f"{last // 2}" + ("; the strategy needs more modules than a single shared one" if last < 2 else "")
            )
        pairs: list[Pair] = []
        for lower, upper in zip(sites[:t_max], reversed(sites), strict=False):
            _check_k(rotation, min(lower.heads, upper.heads), sites)
            pairs += zip(_sort_heads([lower], scores)[:k], _sort_heads([upper], scores)[:k], strict=True)
        return pairs
    heads = _sort_heads(sites, scores)
    _check_k(rotation, len(heads) // 2, sites)
    if rotation.strategy == "random":
        sample = Random(f"{rotation.seed} {sites[0].kind} {epoch}").sample(heads, 2 * k)
        return list(zip(sample[::2], sample[1::2], strict=True))
    return list(zip(heads[:k], heads[::-1], strict=False))


def _sort_heads(sites: Sequence[AttentionSite], scores: Scores) -> list[Head]:
    """Return all heads, the least important first, equal ones and those without scores in the model's order."""
    heads = [(site.name, head) for site in sites for head in range(site.heads)]
    return sorted(heads, key=lambda head: float(scores[head[0]][head[1]])) if scores else heads


def _check_k(rotation: RotationOptions, most: int, sites: Sequence[AttentionSite]) -> None:
    if rotation.k > most:
        raise HeadError(
            f"k is {rotation.k} for {rotation.strategy!r} among {len(sites)} modules of {sites[0].kind} attention "
            f"such as {sites[0].name}, which has {sites[0].heads} heads; expected at most {most}"
        )


@dataclass(frozen=True)
class RotationEvent:
    """One swap of heads, at an epoch from 0, or their swap back.

    Example:
        >>> first, last = ("encoder.layer.0.attention.self", 0), ("encoder.layer.1.attention.self", 2)
        >>> rotator = Rotator(model, RotationOptions("manual", epochs=(1,), pairs=((first, last),)))
        >>> (event,) = rotator.epoch(1)
        >>> event.reason, event.epoch
        ('swap', 1)
    """

    epoch: float
    reason: Literal["swap", "swap-back"]
    pairs: tuple[Pair, ...]


def _is_reached(time: float, now: float) -> bool:
    return now >= time - EPOCH_ATOL


class Rotator:
    """Swap heads of a model when a `RotationOptions` says so (Multi-Head Rotation, §3.1).

    A swap changes only weights and optimizer state, so the model can be saved between any two steps.

    Args:
        model: stock or edited, whole or sharded by FSDP2; not its `DistributedDataParallel` wrapper.
        rotation: which heads swap, and when.
        tokenizer: its end-of-sequence tokens do not count for importance either, unless `rotation.exclude` is given.

    Raises:
        HeadError: the model does not have the heads that the strategy needs, or they cannot be swapped, as under
            FSDP1 and ZeRO-3.
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.

    Example:
        >>> rotator = Rotator(model, RotationOptions("soft", epochs=(1,), swap_back_after=2))
        >>> [len(rotator.epoch(epoch, batches=[batch])) for epoch in range(4)]
        [0, 1, 0, 1]
        >>> [event.reason for event in rotator.history]
        ['swap', 'swap-back']
    """

    def __init__(
        self, model: PreTrainedModel, rotation: RotationOptions, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.model, self.rotation = transformers_model(model), rotation
        self._excluded = end_tokens(self.model, tokenizer) if rotation.exclude is None else rotation.exclude
        self.history: list[RotationEvent] = []
        self._latest: float | None = None  # epoch of the last call
        match_blocks(model, rotation.pairs)
        if rotation.strategy == "manual":
            return
        for sites in self._sites_by_kind().values():
            for site in sites:
                for head in range(site.heads):
                    match_heads(sites[0], 0, site, head)
            pair_heads(rotation, sites, {}, 0)

    def epoch(
        self, epoch: float, optimizer: Optimizer | None = None, batches: Iterable[Mapping[str, Tensor]] | None = None
    ) -> tuple[RotationEvent, ...]:
        """Swap the heads that have become due since the last call; nothing if training was here before.

        Call it at the start of each epoch, and before each step if `RotationOptions` has fractions of epochs. Swaps
        that were due before the epoch of the first call are skipped.

        Every process of a distributed training must call it; importance is measured on the batches of all of them, so
        all swap the same heads. Where FSDP shards the model, each must pass as many batches.

        Args:
            epoch: from 0; 1.5 is the middle of the second. With `of_training`, the share of the steps done.
            optimizer: its state moves with the heads, as in `swap_heads_`.
            batches: held-out data to measure importance on, if the strategy does and swaps now.

        Returns:
            The swaps, which are also added to `history`.

        Raises:
            HeadError: the epoch lies before one that has already begun, importance cannot be measured, or
                `swap_heads_` refuses.
            CalibrationError: the model does not take such batches.
        """
        now = _as_int(epoch)
        if self._latest is not None and int(now) < int(self._latest):
            raise HeadError(
                f"epoch {now} comes after epoch {self._latest}; when training resumes from a checkpoint, give a "
                "new Rotator the state saved with it"
            )
        if self._latest is not None and now <= self._latest:
            return ()
        before = len(self.history)
        swapped, due = self._due()
        if swapped and _is_reached(due, now):
            self._swap(RotationEvent(now, "swap-back", swapped), optimizer)
            swapped, due = self._due()
        times = [time for time in self.rotation.epochs if _is_reached(time, now)]
        if self._latest is None:  # only a time that is due now
            time = next((time for time in times if _is_reached(now, time)), None)
        else:
            time = max((time for time in times if not _is_reached(time, self._latest)), default=None)
        if time is not None and not swapped and _is_reached(due, time):
            self._swap(RotationEvent(now, "swap", self._pairs(time, batches)), optimizer)
        self._latest = now
        return tuple(self.history[before:])

    def check(self, optimizer: Optimizer | None) -> None:
        """Raise a HeadError, before training, if an optimizer's state could not move with the heads."""
        blocks = [block for pair in match_blocks(self.model, self.rotation.pairs) for block in pair]
        if not self.rotation.pairs:
            for site in find_attention(self.model, kinds=self.rotation.kinds):
                blocks += head_blocks(site, 0)
        check_optimizer(optimizer, blocks)

    def state_dict(self) -> dict[str, Any]:
        """Return, in JSON types, the state that a resumed training needs beside that of model and optimizer."""
        return {"latest": self._latest, "history": [asdict(event) for event in self.history]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, or raise a HeadError; swaps nothing, for the weights saved with it are swapped already."""
        try:
            latest = state["latest"]
            history = [RotationEvent(e["epoch"], e["reason"], as_pairs(e["pairs"])) for e in state["history"]]
        except (KeyError, TypeError) as error:
            raise HeadError(
                f"cannot read the state of a Rotator ({error!r}); pass what its state_dict() gave"
            ) from error
        match_blocks(self.model, [pair for event in history[-1:] for pair in event.pairs])
        self._latest, self.history = latest, history

    def _due(self) -> tuple[tuple[Pair, ...], float]:
        """Return the pairs to swap back and the epoch of that; or no pairs and the epoch at which the rest ends."""
        rotation = self.rotation
        if rotation.swap_back_after is None or not self.history:
            return (), 0
        last = self.history[-1]
        swap = last if last.reason == "swap" else self.history[-2]
        time = max((time for time in rotation.epochs if _is_reached(time, swap.epoch)), default=swap.epoch)
        due = time + rotation.swap_back_after
        if last is swap:
            return swap.pairs, due
        is_late = last.epoch >= due + 1  # whole epochs without a call
        return (), (last.epoch if is_late else due) + rotation.rest

    def _swap(self, event: RotationEvent, optimizer: Optimizer | None) -> None:
        swap_heads_(self.model, event.pairs, optimizer if self.rotation.moments else None)
        self.history.append(event)

    def _sites_by_kind(self) -> dict[Kind, list[AttentionSite]]:
        """Return the modules that rotate, of each kind by layer."""
        by_kind: dict[Kind, list[AttentionSite]] = {}
        for site in find_attention(self.model, kinds=self.rotation.kinds):
            by_kind.setdefault(site.kind, []).append(site)
        return by_kind

    def _pairs(self, epoch: float, batches: Iterable[Mapping[str, Tensor]] | None) -> tuple[Pair, ...]:
        """Return the pairs to swap, the same in all processes."""
        rotation = self.rotation
        scores: Scores = {}
        if rotation.strategy == "manual":
            return rotation.pairs
        if rotation.measures:
            if batches is None:
                raise HeadError(
                    f"strategy {rotation.strategy!r} swaps heads by importance at epoch {epoch} and got no batches; "
                    "pass batches=, of held-out data"
                )
            measure = confidence if rotation.importance == "confidence" else average_distance
            scores = measure(self.model, batches, exclude=self._excluded, kinds=rotation.kinds, across_processes=True)
        by_kind = self._sites_by_kind().values()
        return tuple(pair for sites in by_kind for pair in pair_heads(rotation, sites, scores, epoch))
