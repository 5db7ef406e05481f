r"""Refit the layers that write to the residual stream, in closed form, towards the dense model: no labels, no steps.

For each such layer y = W a + b (the output projection of attention, the second layer of a feed-forward block), in the
order of the forward pass,

$$\min_{W', b'}\ \mathbb{E}\,\|(h + y)_\text{dense} - (h' + W' a' + b')\|^2 + \lambda\,\|W' - W\|^2$$

where h is what y is added to, and ' marks the converted model, whose lower layers are refitted already. So each layer
also repairs what those below it lost.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.attention.projections import fill_
from collab_compress.calibration.gather import unpadded
from collab_compress.conversion.feed_forward import FeedForward, cut_
from collab_compress.conversion.report import RefitReport
from collab_compress.conversion.writers import Writer
from collab_compress.errors import CalibrationError, CollabCompressError, CompressionError
from collab_compress.factorization.least_squares import ResidualMoments, choice_moments, choose_neurons, fit

DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0)  # shares of the inputs' mean variance, chosen by held-back data
ROUNDING = 1e-5  # relative error of the stream that is rounding alone


@dataclass(frozen=True)
class Refitted:
    """New weights of one layer, in its own layout and dtype."""

    report: RefitReport
    weight: Tensor
    bias: Tensor | None
    kept: Tensor | None = None  # neurons that it still reads, ascending; None for all


class Fit:
    """What one layer is to be fitted to: moments of its inputs and of what the stream lacks after it."""

    def __init__(self) -> None:
        self.used = ResidualMoments()  # of the sequences to fit to
        self.held_back = ResidualMoments()
        self.spread = 0.0  # of the dense stream on the held-back sequences, Σ‖x − mean‖²

    def add(
        self, inputs: Tensor, stream: Tensor, target: Tensor, writer: Writer, mask: Tensor | None, used: bool
    ) -> None:
        """Add one call of the layer, without padding.

        Args:
            inputs: of the converted layer, (B, T, N).
            stream: after it, (B, T, D).
            target: the dense stream there, (B, T, D).
            writer: the layer; residuals are divided by its gain, to be in the units of its outputs.
            mask: padding mask (B, T), or None.
            used: whether the layer is fitted to the sequences, or errors are measured on them.
        """
        wanted = target.to(stream.device).reshape(-1, target.shape[-1]).float()
        gain = torch.where(writer.gain == 0, torch.inf, writer.gain).to(wanted)
        lacking = (wanted - stream.reshape(wanted.shape).float()) / gain
        (self.used if used else self.held_back).add(unpadded(inputs, mask), unpadded(lacking, mask))
        if not used:
            wanted = unpadded(wanted / gain, mask)
            self.spread += float((wanted - wanted.mean(0)).square().sum())


def as_read(model: PreTrainedModel, writer: Writer, stream: Tensor, target: Tensor) -> Tensor:
    """Return a target (B, T, D) from another place of the model for the stream (B, T, D) after a writer.

    Where a LayerNorm reads the stream, that is the target with the mean and the deviation that each token has in the
    stream: the norm removes both, and a linear layer cannot change them token by token.
    """
    if not isinstance(model.get_submodule(writer.at), nn.LayerNorm):
        return target
    stream = stream.float()
    normal = nn.functional.layer_norm(target.to(stream), target.shape[-1:], eps=1e-12)
    return normal * stream.std(-1, correction=0, keepdim=True) + stream.mean(-1, keepdim=True)


def solve(gathered: Fit, writer: Writer, layer: nn.Linear | Conv1D, neurons: int | None, sequences: int) -> Refitted:
    """Fit a layer with the damping that has the smallest error on held-back sequences.

    It stays as it is if none lowers that error, unless it is to keep some of its neurons only.

    Args:
        gathered: what it is to be fitted to.
        writer: the layer.
        layer: its module, an `nn.Linear` or `Conv1D`.
        neurons: number of its inputs to keep, those whose loss would cost most; None for all.
        sequences: that it is fitted to, for the report.

    Raises:
        CalibrationError: no token was held back, or too few data to choose neurons by.
    """
    used, held_back, biased = gathered.used, gathered.held_back, layer.bias is not None
    if not held_back.count:
        raise CalibrationError(
            f"{writer.name} saw no token of the sequences held back, which are padding alone; pass more data"
        )
    weight = layer.weight.detach() if isinstance(layer, Conv1D) else layer.weight.detach().mT  # (N, D)
    exact = weight.to(used.place, torch.float64)
    before, scale = held_back.squared / held_back.count, max(gathered.spread / held_back.count, 1e-30)
    kept, best = None, before
    if neurons is not None:
        try:
            kept = choose_neurons(*choice_moments(used, exact, writer.gain, DAMPINGS[0], biased), neurons)
        except ValueError as error:
            raise CalibrationError(f"{writer.name}: {error}") from error
        best = torch.inf
        used, held_back = used.narrowed(exact, kept), held_back.narrowed(exact, kept)
    change, shift = None, None
    for damping in DAMPINGS if kept is not None or before > ROUNDING**2 * scale else ():
        try:
            candidate = fit(used, damping, biased)
        except ValueError:
            continue
        candidate_error = held_back.squared_error(*candidate)
        if candidate_error < best:
            best, (change, shift) = candidate_error, candidate
    if kept is not None:
        if change is None:
            raise CalibrationError(f"{writer.name}: the data cannot say which neurons to keep; pass more of them")
        change = (-exact).index_copy(0, kept, change)
    bias = layer.bias.detach() if biased else None
    if change is not None:
        weight = (exact + change).to(weight)
        if bias is not None and shift is not None:
            bias = (bias.to(shift) + shift).to(bias)
    if kept is not None:
        weight = weight[kept.to(weight.device)]
    weight = (weight if isinstance(layer, Conv1D) else weight.mT).contiguous()
    report = RefitReport(
        name=writer.name,
        error_before=None if kept is not None else (before / scale) ** 0.5,
        error_after=(best / scale) ** 0.5,
        vectors=gathered.used.count,
        sequences=sequences,
    )
    return Refitted(report, weight, bias, kept)


def install_refits(model: PreTrainedModel, results: Sequence[Refitted], blocks: Sequence[FeedForward] = ()) -> None:
    """Install refitted layers in place, in narrower blocks if results keep some neurons only.

    Parameters are replaced, so that models that share them keep theirs.
    """
    by_name = {block.down: block for block in blocks}
    for result in results:
        layer: Any = model.get_submodule(result.report.name)
        if result.kept is not None:
            cut_(model, by_name[result.report.name], result.kept)
        bias = None if result.bias is None else nn.Parameter(result.bias, layer.bias.requires_grad)
        fill_(layer, nn.Parameter(result.weight, layer.weight.requires_grad), bias)


def check_weights(weights: Iterable[tuple[str, Tensor]], error: type[CollabCompressError] = CompressionError) -> None:
    """Raise `error` for the first of the weights, given by their names, that is offloaded or not finite."""
    for name, weight in weights:
        if weight.is_meta:
            raise error(f"{name} is offloaded; load the model into memory")
        if not bool(torch.isfinite(weight).all()):
            raise error(f"{name} holds NaN or infinite values; the checkpoint is damaged")
