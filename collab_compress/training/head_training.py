"""Options of the methods that act on heads during training, and their schedules."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Literal

from collab_compress.architectures import KINDS, Kind
from collab_compress.errors import HeadError
from collab_compress.heads import RotationOptions
from collab_compress.training.penalties import LOSSES

Schedule = Callable[[float, float, float, float], float]


@dataclass(frozen=True)
class DropHeadOptions:
    """Drop heads while training."""

    p: float = 0.2
    """Probability of dropping a head, from 0 to below 1; the end of a rising schedule."""

    schedule: str = "constant"
    """Schedule of p: constant, curriculum, anti-curriculum or scheduled."""

    start: float | None = None
    """Start of a falling schedule; p if not given."""

    kinds: tuple[Kind, ...] = KINDS
    """Kinds of attention: encoder, decoder, cross."""

    rescale: bool = True
    """Whether kept heads are scaled up and one always stays; otherwise heads are only set to zero."""

    def __post_init__(self) -> None:
        for name, value in (("p", self.p), ("start", self.start)):
            if value is not None and not (isinstance(value, Real) and 0 <= value < 1):
                raise HeadError(f"DropHead's {name} is {value!r}; expected a probability, from 0 to below 1")
        _known("schedule", self.schedule, SCHEDULES)
        _known_kinds("DropHead", self.kinds)


@dataclass(frozen=True)
class PenaltyOptions:
    """Add a loss over heads to the training loss."""

    name: str
    """Loss: hsic, orthogonality, agreement, bhattacharyya, or a variant (`collab_compress.training.LOSSES`)."""

    weight: float | None = None
    """Weight of the penalty; the paper's if not given."""

    schedule: str = "constant"
    """Schedule of the weight or share: constant, curriculum, anti-curriculum or scheduled."""

    kinds: tuple[Kind, ...] | None = None
    """Kinds of attention: encoder, decoder, cross; the paper's choice if not given."""

    share: float | None = None
    """In place of a weight: the size of the weighted penalty as a share of the training loss, as 0.1. The weight then
    follows from both at each forward pass and is treated as a constant."""

    def __post_init__(self) -> None:
        _known("loss", self.name, LOSSES)
        _known("schedule", self.schedule, SCHEDULES)
        if self.weight is not None and not (isinstance(self.weight, Real) and self.weight >= 0):
            raise HeadError(f"the weight of {self.name} is {self.weight!r}; expected 0 or more")
        of_loss = self.weight is None and isinstance(self.share, Real) and 0 <= self.share < inf
        if self.share is not None and not of_loss:
            raise HeadError(
                f"{self.name} has weight {self.weight} and share {self.share!r}; expected either a weight, or a "
                "share of the training loss, 0 or more"
            )
        if self.kinds is not None:
            _known_kinds(f"penalty {self.name}", self.kinds)

    @property
    def acts_on(self) -> tuple[Kind, ...]:
        """The kinds of attention, the paper's where none are given."""
        return LOSSES[self.name].kinds if self.kinds is None else self.kinds

    @property
    def strength(self) -> float:
        """The share, or the weight, or the paper's weight where neither is given."""
        return next(value for value in (self.share, self.weight, LOSSES[self.name].weight) if value is not None)


@dataclass(frozen=True)
class AlphasOptions:
    """Mix head outputs by trained matrices ("alphas") that start as the identity."""

    frozen_ratio: float = 0.31
    """Share of training in which they stay frozen."""

    growth_weight: float = 0.01
    """Weight of the nuclear growth loss, summed over all matrices, beside the mean loss of a token; 0 for none. The
    authors add 40 times the growth loss to a loss summed over the tokens of a step, about 4,096: 40 / 4,096 here."""

    growth_beside: Literal["mean", "sum"] = "mean"
    """The loss that the growth loss is weighed against: the `mean` loss of a token, or the `sum` over the tokens of a
    batch, as the authors' 40. The weight is then divided by the number of labels in each batch."""

    growth: float = 1e-4
    """Δr, by which a matrix's nuclear norm should grow in a step; no effect in the `printed` form, where its gradient
    is zero."""

    growth_form: Literal["printed", "hinge"] = "printed"
    """`printed`: as in the paper and the authors' code, which always raises the norm. `hinge`: compares with the norm
    one step before and stops once it has grown by Δr."""

    kinds: tuple[Kind, ...] = KINDS
    """Kinds of attention whose heads are mixed: encoder, decoder, cross."""

    def __post_init__(self) -> None:
        if not isinstance(self.frozen_ratio, Real) or not 0 <= self.frozen_ratio <= 1:
            raise HeadError(f"frozen_ratio of alphas is {self.frozen_ratio!r}; expected 0 to 1")
        for name, value in (("growth_weight", self.growth_weight), ("growth", self.growth)):
            if not isinstance(value, Real) or not value >= 0:
                raise HeadError(f"{name} of alphas is {value!r}; expected 0 or more")
        _known("growth form", self.growth_form, ("hinge", "printed"))
        _known("growth_beside", self.growth_beside, ("mean", "sum"))
        _known_kinds("alphas", self.kinds)


@dataclass(frozen=True)
class HeadTraining:
    """Methods that act on heads while a model trains; all are off by default and may be combined."""

    drophead: tuple[DropHeadOptions, ...] = ()
    """DropHead; several for kinds of attention with different probabilities or schedules."""

    penalties: tuple[PenaltyOptions, ...] = ()
    """Losses over heads; one may be given several times, for kinds of attention with different weights."""

    alphas: AlphasOptions | None = None
    """Alphas mixing."""

    rotation: RotationOptions | None = None
    """Head rotation."""

    loss_normalization: Literal["auto", "stock", "mean"] = "auto"
    """How a Trainer's loss adds up over the passes and processes of a step. `stock`: as in a plain Trainer. `mean`:
    as the mean over passes and processes. `auto`: `mean` for models that ignore `num_items_in_batch`, whose gradients
    a plain Trainer sums, so that the weight of penalties does not depend on their number; else `stock`."""

    def __post_init__(self) -> None:
        for name, member in (("drophead", DropHeadOptions), ("penalties", PenaltyOptions)):
            methods = getattr(self, name)
            if not isinstance(methods, tuple | list) or not all(isinstance(method, member) for method in methods):
                raise HeadError(f"{name} is {methods!r}; expected a tuple, as in {name}=({member.__name__}(…),)")
            object.__setattr__(self, name, tuple(methods))  # lists come from JSON and YAML
        for name, options in (("alphas", AlphasOptions), ("rotation", RotationOptions)):
            if not isinstance(getattr(self, name), options | None):
                raise HeadError(f"{name} is {getattr(self, name)!r}; expected {options.__name__}(…), or None")
        kinds = [kind for options in self.drophead for kind in options.kinds]
        if len(set(kinds)) < len(kinds):
            raise HeadError(f"DropHead acts on {', '.join(kinds)} attention; give each kind once")
        losses = Counter((options.name, kind) for options in self.penalties for kind in options.acts_on)
        for (name, kind), count in losses.items():
            if count > 1:
                raise HeadError(f"penalty {name} acts {count} times on {kind} attention; give each kind once")
        _known("loss normalization", self.loss_normalization, ("auto", "stock", "mean"))

    @property
    def acts(self) -> bool:
        """Whether any method is on."""
        return bool(self.drophead or self.penalties or self.alphas or self.rotation)


def of_kinds(name: str, kinds: tuple[Kind, ...], usual: tuple[Kind, ...]) -> str:
    """Return the name of a method in logs, with its kinds of attention if they are not the usual ones."""
    return name if set(kinds) == set(usual) else f"{name}/{'+'.join(kind for kind in KINDS if kind in kinds)}"


def constant(progress: float, warmup: float, start: float, end: float) -> float:
    """Return `end`."""
    return end


def curriculum(progress: float, warmup: float, start: float, end: float) -> float:
    """Grow from 0 to `end`."""
    return end * progress


def anti_curriculum(progress: float, warmup: float, start: float, end: float) -> float:
    """Fall from `start` to 0."""
    return start * (1 - progress)


def scheduled(progress: float, warmup: float, start: float, end: float) -> float:
    """Fall from `start` to 0 over the learning rate's warmup, then grow to `end` at the last step."""
    if progress < warmup:
        return start * (1 - progress / warmup)
    return end * (progress - warmup) / (1 - warmup) if warmup < 1 else 0.0


SCHEDULES: dict[str, Schedule] = {
    "constant": constant,
    "curriculum": curriculum,
    "anti-curriculum": anti_curriculum,
    "scheduled": scheduled,
}
"""Name → function of progress (0 at the first step, 1 at the last), share of the warmup, start and end value."""


def _known(what: str, name: str, table: Iterable[str]) -> None:
    known = sorted(table)
    if name not in known:
        raise HeadError(f"unknown {what} {name!r}; expected one of {', '.join(known)}")


def _known_kinds(what: str, kinds: tuple[Kind, ...]) -> None:
    if isinstance(kinds, str) or not kinds or len(set(kinds)) < len(kinds):
        raise HeadError(f"{what}: kinds are {kinds!r}; expected some of {', '.join(KINDS)}, each once")
    for kind in kinds:
        _known(f"kind of attention for {what}", kind, KINDS)
