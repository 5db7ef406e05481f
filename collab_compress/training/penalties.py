"""Losses over heads by name, and their evaluation on what a tap reads.

A new one is a function of (B, T, H, d) vectors or (B, H, T, S) attention probabilities and a mask (B, T), and a
line in `LOSSES`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, KINDS, Kind, find_attention
from collab_compress.calibration import evaluation_mode, run_batch
from collab_compress.errors import CalibrationError
from collab_compress.heads import Part, Reading, Tap
from collab_compress.losses import agreement, agreement_probs, bhattacharyya, hsic, orthogonality


@dataclass(frozen=True)
class Loss:
    """One loss over heads.

    Args:
        function: of one part of a reading and the mask of its real tokens.
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
    "hsic-rbf": Loss(partial(hsic, kernel="rbf"), "outputs", "mean", 1e-7),
    "orthogonality": Loss(orthogonality, "values", "mean", 1.0),
    "orthogonality-queries": Loss(orthogonality, "queries", "mean", 1.0),
    "orthogonality-keys": Loss(orthogonality, "keys", "mean", 1.0),
    "agreement": Loss(agreement, "outputs", "mean", 1.0),
    "agreement-values": Loss(agreement, "values", "mean", 1.0),
    "agreement-queries": Loss(agreement, "queries", "mean", 1.0),
    "agreement-keys": Loss(agreement, "keys", "mean", 1.0),
    "agreement-probs": Loss(agreement_probs, "probs", "mean", 1.0),
    "bhattacharyya": Loss(bhattacharyya, "probs", "sum", 1.0, ("encoder",)),
    "bhattacharyya-mean": Loss(bhattacharyya, "probs", "mean", 1.0, ("encoder",)),
    "bhattacharyya-sequences": Loss(partial(bhattacharyya, per_sequence=True), "probs", "sum", 1.0, ("encoder",)),
}


class HeadLosses:
    """Evaluate losses on each training step's heads.

    Args:
        model: stock or edited.
        losses: any name → a loss in `LOSSES`, and the kinds of attention it looks at.
        training: read the model in training mode only.

    Raises:
        UnsupportedModelError: the model has no attention of a loss's kinds.
    """

    def __init__(
        self, model: PreTrainedModel, losses: Mapping[str, tuple[str, Collection[Kind]]], training: bool = True
    ) -> None:
        self.losses = losses
        read = {kind for _, chosen in losses.values() for kind in chosen}
        for _, chosen in losses.values():
            find_attention(model, FAMILIES, kinds=chosen)  # raises where there is none
        self.tap = Tap(model, {LOSSES[loss].part for loss, _ in losses.values()}, read, training)

    def values(self) -> dict[str, Tensor]:
        """Return the unweighted losses of the last forward pass; attention that it did not call has none."""
        readings = self.tap.take()
        found = {}
        for name, (loss, kinds) in self.losses.items():
            chosen = [reading for reading in readings if reading.site.kind in kinds]
            if chosen:
                found[name] = _value(LOSSES[loss], chosen)
        return found

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self.tap.remove()


def _value(loss: Loss, readings: list[Reading]) -> Tensor:
    """Evaluate one loss on what modules showed."""
    values = []
    for reading in readings:
        part: Tensor = getattr(reading, loss.part)
        real = reading.real.key if loss.part in ("values", "keys") else reading.real.query
        values.append(loss.function(part, real))
    together = torch.stack([value.to(values[0].device) for value in values])
    return together.mean() if loss.reduction == "mean" else together.sum()


def measure(
    model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]], losses: Collection[str]
) -> dict[str, float]:
    """Measure losses over heads without training: the mean over batches, in evaluation mode.

    Args:
        model: stock or edited; left as it was.
        batches: keyword arguments for the model.
        losses: names from `LOSSES`; each looks at the kinds of attention that its paper does.

    Raises:
        CalibrationError: there is no batch, or the model does not take it.
        UnsupportedModelError: the model's family is not known, or it has no attention of a loss's kinds.
    """
    found: list[dict[str, Tensor]] = []
    heads = HeadLosses(model, {name: (name, LOSSES[name].kinds) for name in losses}, training=False)
    try:
        with evaluation_mode(model):
            for batch in batches:
                run_batch(model, dict(batch))
                found.append(heads.values())
    finally:
        heads.remove()
    if not found:
        raise CalibrationError("there is no batch to measure on")
    return {name: sum(float(values[name]) for values in found) / len(found) for name in losses}
