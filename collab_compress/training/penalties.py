"""The table of losses over heads, and their evaluation on the readings of a tap."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import KINDS, Kind, find_attention
from collab_compress.heads import Part, Tap
from collab_compress.losses import agreement, agreement_probs, bhattacharyya, hsic, orthogonality


@dataclass(frozen=True)
class Loss:
    """One loss over heads.

    Args:
        function: of one part of a reading, (B, T, H, d) vectors or (B, H, T, S) probabilities, and its mask (B, T).
        part: the part.
        reduction: over attention modules.
        weight: the paper's.
        kinds: the kinds of attention the paper uses it on.
    """

    function: Callable[[Tensor, Tensor | None], Tensor]
    part: Part
    reduction: Literal["mean", "sum"]
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


class HeadLosses(Tap):
    """Evaluate losses on the heads of each forward pass, or only of those in training mode.

    `losses` maps any name to a loss in `LOSSES` and its kinds of attention.
    """

    def __init__(
        self, model: PreTrainedModel, losses: Mapping[str, tuple[str, Collection[Kind]]], training: bool = True
    ) -> None:
        self.losses = {name: (LOSSES[loss], kinds) for name, (loss, kinds) in losses.items()}
        tapped: set[Kind] = set()
        for _, kinds in self.losses.values():
            find_attention(model, kinds=kinds)  # raises where there is none
            tapped |= {*kinds}
        super().__init__(model, {loss.part for loss, _ in self.losses.values()}, tapped, training)

    def values(self, measured: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the unweighted losses of the last forward pass; omits losses whose modules were not called.

        Args:
            measured: names of losses that need no gradient.
        """
        readings = self.take()
        losses = {}
        for name, (loss, kinds) in self.losses.items():
            values: list[Tensor] = []
            with torch.set_grad_enabled(torch.is_grad_enabled() and name not in measured):
                for reading in readings:
                    if reading.site.kind in kinds:
                        value = loss.function(getattr(reading, loss.part), reading.mask_of(loss.part))
                        values.append(value.to(values[0].device) if values else value)
            if values:
                stacked = torch.stack(values)
                losses[name] = stacked.mean() if loss.reduction == "mean" else stacked.sum()
        return losses
