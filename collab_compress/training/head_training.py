"""Options of the methods that act on heads during training, their schedules, and the table of losses over heads."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import KINDS, Kind, find_attention
from collab_compress.errors import HeadError, check_number
from collab_compress.heads import Part, Recorder, RotationOptions
from collab_compress.losses import agreement, agreement_probs, bhattacharyya, hsic, orthogonality
from collab_compress.options import check_kinds, check_known

Schedule = Callable[[float, float], float]


@dataclass(frozen=True)
class Loss:
    """One loss over heads, with the paper's weight and the kinds of attention that the paper uses it on."""

    function: Callable[[Tensor, Tensor | None], Tensor]
    """Of one part of a record, (B, T, H, d) vectors or (B, H, T, S) probabilities, and its mask (B, T)."""

    part: Part
    reduction: Literal["mean", "sum"]  # over attention modules
    weight: float
    kinds: tuple[Kind, ...] = KINDS


LOSSES: dict[str, Loss] = {
    "hsic": Loss(hsic, "outputs", "mean", 1e-7),
    "hsic-unscaled": Loss(partial(hsic, unscaled=True), "outputs", "mean", 1e-7),
    "orthogonality": Loss(orthogonality, "values", "mean", 1.0),
    "agreement": Loss(agreement, "outputs", "mean", 1.0),
    "agreement-values": Loss(agreement, "values", "mean", 1.0),
    "agreement-probs": Loss(agreement_probs, "probs", "mean", 1.0),
    "bhattacharyya": Loss(bhattacharyya, "probs", "sum", 1.0, ("encoder",)),
}


@dataclass(frozen=True)
class DropHeadOptions:
    """Drop heads while training.

    Example:
        >>> DropHeadOptions(p=0.2, schedule="scheduled").kinds
        ('encoder', 'decoder', 'cross')
    """

    p: float = 0.2
    """Probability of dropping a head, from 0 to below 1; the largest of a schedule."""

    schedule: str = "constant"
    """Schedule of p: constant, curriculum, anti-curriculum or scheduled."""

    kinds: tuple[Kind, ...] = KINDS
    """Kinds of attention: encoder, decoder, cross."""

    rescale: bool = True
    """Whether kept heads are scaled up and one always stays; otherwise heads are only set to zero."""

    def __post_init__(self) -> None:
        check_number("DropHead's p", self.p, 0, below=1)
        check_known("schedule", self.schedule, SCHEDULES)
        check_kinds("DropHead", self.kinds)


@dataclass(frozen=True)
class PenaltyOptions:
    """Add a loss over heads to the training loss.

    Example:
        >>> PenaltyOptions("hsic").strength, PenaltyOptions("bhattacharyya", weight=0.1).acts_on
        (1e-07, ('encoder',))
    """

    name: str
    """Loss: hsic, orthogonality, agreement, bhattacharyya, or a variant (`collab_compress.training.LOSSES`)."""

    weight: float | None = None
    """Weight of the penalty; the paper's if not given."""

    schedule: str = "constant"
    """Schedule of the weight: constant, curriculum, anti-curriculum or scheduled."""

    kinds: tuple[Kind, ...] | None = None
    """Kinds of attention: encoder, decoder, cross; the paper's choice if not given."""

    def __post_init__(self) -> None:
        check_known("loss", self.name, LOSSES)
        check_known("schedule", self.schedule, SCHEDULES)
        check_number(f"the weight of {self.name}", self.strength, 0)
        if self.kinds is not None:
            check_kinds(f"penalty {self.name}", self.kinds)

    @property
    def acts_on(self) -> tuple[Kind, ...]:
        """The kinds of attention, the paper's where none are given."""
        return LOSSES[self.name].kinds if self.kinds is None else self.kinds

    @property
    def strength(self) -> float:
        """The weight, the paper's where none is given."""
        return LOSSES[self.name].weight if self.weight is None else self.weight


@dataclass(frozen=True)
class AlphasOptions:
    """Mix head outputs by trained matrices ("alphas") that start as the identity.

    Example:
        >>> AlphasOptions(frozen_ratio=0).growth_weight
        0.01
    """

    frozen_ratio: float = 0.31
    """Share of training in which they stay frozen."""

    growth_weight: float = 0.01
    """Weight of the nuclear growth loss, summed over all matrices, beside the mean loss of a token; 0 for none. The
    authors add 40 times the growth loss to a loss summed over the tokens of a step, about 4,096: 40 / 4,096 here."""

    growth_beside: Literal["mean", "sum"] = "mean"
    """The loss that the growth loss is weighed against: the `mean` loss of a token, or the `sum` over the tokens of a
    batch, as the authors' 40. The weight is then divided by the number of labels in each batch."""

    growth: float = 1e-4
    """Δr, the value of the growth loss of a matrix. It has no gradient, so that norms grow all the time."""

    kinds: tuple[Kind, ...] = KINDS
    """Kinds of attention whose heads are mixed: encoder, decoder, cross."""

    def __post_init__(self) -> None:
        check_number("frozen_ratio of alphas", self.frozen_ratio, 0, 1)
        check_number("growth_weight of alphas", self.growth_weight, 0)
        check_number("growth of alphas", self.growth, 0)
        check_known("growth_beside", self.growth_beside, ("mean", "sum"))
        check_kinds("alphas", self.kinds)


@dataclass(frozen=True)
class HeadTraining:
    """Methods that act on heads while a model trains; all are off by default and may be combined.

    Example:
        >>> training = HeadTraining(drophead=(DropHeadOptions(p=0.1),), penalties=(PenaltyOptions("orthogonality"),))
        >>> training.acts, HeadTraining().acts
        (True, False)
    """

    drophead: tuple[DropHeadOptions, ...] = ()
    """DropHead; several for kinds of attention with different probabilities or schedules."""

    penalties: tuple[PenaltyOptions, ...] = ()
    """Losses over heads; one may be given several times, for kinds of attention with different weights."""

    alphas: AlphasOptions | None = None
    """Alphas mixing."""

    rotation: RotationOptions | None = None
    """Head rotation."""

    loss_normalization: Literal["stock", "mean"] = "stock"
    """How a Trainer's loss adds up over the passes and processes of a step.

    `stock`: as in a plain Trainer, bit for bit, so that a run differs from a plain one by its methods alone. Models
    that ignore `num_items_in_batch` (regression, BERT's classifiers, Marian) get the sum over passes and processes,
    beside which a penalty weighs less. `mean`: the mean over passes and processes of each batch's mean, so that a
    penalty weighs the same however a step is divided; tokens of a short batch weigh more, and a custom loss function
    gets None for `num_items_in_batch`."""

    def __post_init__(self) -> None:
        for name, member in (("drophead", DropHeadOptions), ("penalties", PenaltyOptions)):
            methods = getattr(self, name)
            if not isinstance(methods, tuple | list) or not all(isinstance(method, member) for method in methods):
                raise HeadError(f"{name} is {methods!r}; expected a tuple, as in {name}=({member.__name__}(…),)")
            object.__setattr__(self, name, tuple(methods))  # lists come from JSON and YAML
        acts = Counter(("DropHead", kind) for options in self.drophead for kind in options.kinds)
        acts.update((f"penalty {options.name}", kind) for options in self.penalties for kind in options.acts_on)
        for (name, kind), count in acts.items():
            if count > 1:
                raise HeadError(f"{name} acts {count} times on {kind} attention; give each kind once")
        check_known("loss normalization", self.loss_normalization, ("stock", "mean"))

    @property
    def acts(self) -> bool:
        """Whether any method is on."""
        return bool(self.drophead or self.penalties or self.alphas or self.rotation)


def of_kinds(name: str, kinds: tuple[Kind, ...], usual: tuple[Kind, ...]) -> str:
    """Return the name of a method in logs, with its kinds of attention if they are not the usual ones."""
    return name if set(kinds) == set(usual) else f"{name}/{'+'.join(kind for kind in KINDS if kind in kinds)}"


# From progress (0 at the first step, 1 at the last) and the share of the warmup, below 1, to the share of p or of a
# weight.
SCHEDULES: dict[str, Schedule] = {
    "constant": lambda progress, warmup: 1.0,
    "curriculum": lambda progress, warmup: progress,
    "anti-curriculum": lambda progress, warmup: 1 - progress,
    # From 1 to 0 over the learning rate's warmup, then to 1 at the last step.
    "scheduled": lambda progress, warmup: (
        1 - progress / warmup if progress < warmup else (progress - warmup) / (1 - warmup)
    ),
}


class HeadLosses(Recorder):
    """Evaluate losses, name → (loss in `LOSSES`, kinds of attention), on the heads of forward passes."""

    keeps_passes = True  # a contrastive loss has a pass for each of its texts

    def __init__(self, model: PreTrainedModel, losses: Mapping[str, tuple[str, Collection[Kind]]]) -> None:
        self.losses = {name: (LOSSES[loss], kinds) for name, (loss, kinds) in losses.items()}
        recorded: set[Kind] = set()
        for _, kinds in self.losses.values():
            find_attention(model, kinds=kinds)  # raises where there is none
            recorded |= {*kinds}
        super().__init__(model, {loss.part for loss, _ in self.losses.values()}, recorded, training=True)

    def values(self, measured: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the unweighted losses, means over the passes since the last call; `measured` ones without gradient.

        Losses whose modules were not called are left out.
        """
        passes, records = self._passes, self.take()
        losses = {}
        for name, (loss, kinds) in self.losses.items():
            values: list[Tensor] = []
            with torch.set_grad_enabled(torch.is_grad_enabled() and name not in measured):
                for record in records:
                    if record.site.kind in kinds:
                        value = loss.function(getattr(record, loss.part), record.mask_of(loss.part))
                        values.append(value.to(values[0].device) if values else value)
            if values:
                stacked = torch.stack(values)
                losses[name] = stacked.mean() if loss.reduction == "mean" else stacked.sum() / passes
        return losses
