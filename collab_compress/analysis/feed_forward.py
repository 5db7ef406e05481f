r"""What feed-forward blocks lose with fewer neurons, and what they cost.

A block adds $W_2 a + b$ to the residual stream, where a are the activations of its N neurons. Of these, backward
elimination leaves dff, the set S (`elimination_order`), whose weights are fitted anew:

$$\min_{W_2', b'}\ \mathbb{E}\,\|(W_2 a + b) - (W_2' a_S + b')\|^2 + \lambda\,\|W_2' - W_2\|^2$$
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.analysis.cost import FormCost, MapCost
from collab_compress.analysis.energy import Ranks
from collab_compress.analysis.stream import Batches, Progress, with_progress
from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.calibration.gather import batch_masks, masks_of, unpadded
from collab_compress.conversion.drift import split_held_back
from collab_compress.conversion.feed_forward import FeedForward, block_report, find_feed_forward
from collab_compress.conversion.refit import DAMPINGS, ROOM, ROUNDING
from collab_compress.conversion.writers import remove_hooks, width_out
from collab_compress.errors import HeadError
from collab_compress.factorization.least_squares import ResidualMoments, choice_moments, elimination_order, fit

GRID = 16  # widths that a block is measured at, evenly spaced


@dataclass(frozen=True)
class FeedForwardEnergy(Ranks):
    """What one feed-forward block keeps of its output with fewer neurons.

    Args:
        widths: numbers of neurons dff, ascending, the last of them all, (W,).
        errors: relative error of the block's output at each width: ‖refitted narrower − dense‖ over the norm of the
            dense output less its mean, (W,).
    """

    widths: Tensor
    errors: Tensor

    curves: ClassVar = {"energy": "energy"}

    @property
    def energy(self) -> Tensor:
        """Share of the output's variance that each width and all larger ones keep at least, (W,)."""
        kept: Tensor = (1 - self.errors.square()).clamp(min=0)
        return kept.flip(0).cummin(0).values.flip(0)

    def rank(self, share: float = 0.99, of: str = "") -> int:
        """Return the least of the measured widths that keeps this share of the output's variance.

        Args:
            share: of the variance, above 0, up to 1.
            of: `energy`, the only curve.

        Raises:
            HeadError: the share is not in range, or the curve is unknown.
        """
        return int(self.widths[super().rank(share, of)])


def feed_forward_energy(
    model: PreTrainedModel,
    batches: Batches,
    *,
    blocks: Sequence[FeedForward] | None = None,
    damping: float = DAMPINGS[0],
    progress: Progress = False,
) -> dict[str, FeedForwardEnergy]:
    """Return what each feed-forward block loses with fewer neurons, each block by itself, at sixteenths of its width.

    Neurons are chosen as in a conversion, by optimal brain surgeon, in one elimination a block; the weights of those
    that stay are fitted to seven eighths of the sequences, and the error is that on the others.

    Args:
        model: stock or edited.
        batches: keyword arguments for the model, at least two sequences. Padding does not count.
        blocks: its feed-forward blocks, where they are known already.
        damping: share of the activations' mean variance that is added to each variance.
        progress: True for a bar, or a function of how many blocks are done and how many there are.

    Returns:
        Path of the layer that reads the neurons → curve, in float64; no error where the output never varies.

    Raises:
        HeadError: fewer than two sequences, activations that are not finite, or too few of them without damping.
        CalibrationError: the model does not take such batches.
        UnsupportedModelError: the model has no such block, or its family is not known.
    """
    used, held_back = split_held_back([dict(batch) for batch in batches])
    if not (used and held_back):
        raise HeadError("neurons are fitted on some sequences and measured on others; pass two sequences at least")
    blocks = find_feed_forward(model, used[0]) if blocks is None else blocks
    numbers = max((block.width * (block.width + len(block.writer.gain)) for block in blocks), default=1)
    together = max(1, ROOM // (2 * 8 * numbers))  # blocks whose moments have room side by side
    found = {}
    gathered: list[tuple[ResidualMoments, ResidualMoments]] = []
    for place, block in enumerate(with_progress(blocks, progress, "feed-forward")):
        if not gathered:
            group = blocks[place : place + together]
            gathered = list(zip(_moments(model, group, used), _moments(model, group, held_back), strict=True))
        try:
            found[block.down] = _curve(model.get_submodule(block.down), block, *gathered.pop(0), damping)
        except ValueError as error:
            raise HeadError(f"{block.down}: {error}") from error
    return found


def _moments(
    model: PreTrainedModel, blocks: Sequence[FeedForward], batches: Sequence[Batch]
) -> list[ResidualMoments]:
    """Return moments of the activations of each block; nothing is missing from the outputs."""
    moments = [ResidualMoments() for _ in blocks]
    masks: dict[Any, Any] = {}

    def see(place: int, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        vectors = unpadded(args[0], masks_of(blocks[place].writer.site, masks).query)
        moments[place].add(vectors, vectors.new_zeros(len(vectors), width_out(layer)))

    layers = [model.get_submodule(block.down) for block in blocks]
    handles = [layer.register_forward_pre_hook(partial(see, place)) for place, layer in enumerate(layers)]
    try:
        with evaluation_mode(model), torch.autocast(model.device.type, enabled=False):
            for batch in batches:
                masks.update(batch_masks(model, batch))
                run_batch(model, batch)
    finally:
        remove_hooks(handles)
    return moments


def _curve(
    layer: Any, block: FeedForward, used: ResidualMoments, held_back: ResidualMoments, damping: float
) -> FeedForwardEnergy:
    """Return the curve of one block, whose second layer this is."""
    bias = layer.bias is not None
    weight = layer.weight.detach() if isinstance(layer, Conv1D) else layer.weight.detach().mT  # (N, D)
    weight = weight.to(used.place, torch.float64)
    widths = sorted({-(-block.width * step // GRID) for step in range(1, GRID + 1)})
    variance = held_back.squared_error(-weight, held_back.means()[0] @ weight)
    if variance <= ROUNDING**2 * held_back.squared_error(-weight, None):
        return FeedForwardEnergy(torch.tensor(widths), torch.zeros(len(widths), dtype=torch.float64))
    order = elimination_order(*choice_moments(used, weight, block.writer.gain, damping, bias))
    errors = []
    for width in widths:
        kept = order[block.width - width :].sort().values
        fitted = fit(used.narrowed(weight, kept), damping, bias)
        errors.append(held_back.narrowed(weight, kept).squared_error(*fitted))
    return FeedForwardEnergy(torch.tensor(widths), (torch.tensor(errors, dtype=torch.float64) / variance).sqrt())


def feed_forward_costs(
    model: PreTrainedModel, blocks: Sequence[FeedForward], length: int = 128, *, dff: int | None = None
) -> dict[str, MapCost]:
    """Return the cost of feed-forward blocks, as they are and with fewer neurons.

    Args:
        model: stock or edited.
        blocks: its feed-forward blocks, as `find_feed_forward` finds them.
        length: tokens T.
        dff: neurons to keep in each block; None leaves them as they are.

    Returns:
        Path of the layer that reads the neurons → cost, of all layers of the block, biases included.

    Raises:
        HeadError: the length or dff is not positive, or dff is beyond the width of a block.
    """
    if length < 1 or (dff is not None and dff < 1):
        raise HeadError(f"got length {length}, dff {dff}; expected at least 1")
    costs = {}
    for block in blocks:
        if dff is not None and dff > block.width:
            raise HeadError(f"{block.down} reads {block.width} neurons, and dff is {dff}; pass up to {block.width}")
        report = block_report(model, block, dff or block.width, length)
        dense = FormCost(report.parameters_before, report.macs_before)
        narrower = FormCost(report.parameters_after, report.macs_after)
        costs[block.down] = MapCost(dff, dense, narrower, None if dff is None else torch.inf)
    return costs
