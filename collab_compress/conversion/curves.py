r"""What a model loses at every width of its parts, from one pass of the dense model.

Losses of all parts are in one unit: the squared error that a part adds to the residual stream, over the stream's
variance there. Of scores, with head weights $w_i$ (`head_weights`), it is $\sum_i w_i^2\, E\,\delta s_i^2$, where the
scores keep their R largest singular components of all heads, which a conversion at dk = R improves on. Of values it
is what `narrow_values` loses, and of feed-forward blocks what is lost with the neurons that are eliminated first
(`eliminate`), the others being fitted again. Here no layer repairs what those below it lost, as a conversion does.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import DenseSite, ValueSite
from collab_compress.calibration import Batch, evaluation_mode
from collab_compress.calibration.batches import in_parts
from collab_compress.conversion.chain import single_layers
from collab_compress.conversion.feed_forward import FeedForward
from collab_compress.conversion.fit import DAMPINGS
from collab_compress.conversion.layers import States
from collab_compress.conversion.maps import Progress, Task
from collab_compress.conversion.room import Room
from collab_compress.conversion.writers import Writer, find_writers
from collab_compress.devices import float64_device
from collab_compress.errors import CompressionError, UnsupportedModelError
from collab_compress.factorization import HeadTensor, Moments
from collab_compress.factorization.least_squares import BLOCK, ResidualMoments, choice_moments, eliminate
from collab_compress.factorization.moments import Weighting, damp
from collab_compress.factorization.narrowing import CONSTANT, captured
from collab_compress.factorization.truncation import singular_channels
from collab_compress.options import Compression

Part: TypeAlias = Literal["dk", "dv", "dff"]
MEASURED = 256  # sequences that losses are measured on
RANKINGS = 32  # of neurons, at least: losses are linear between two
DAMPING = 1e-3  # share of the mean variance, as `Solver.damping`


LossCurves: TypeAlias = Mapping[Part, Mapping[str, Tensor]]
"""Part → path of an attention module, or of the layer that reads the neurons → losses at widths 0 to the dense one,
(N+1,), in float64."""


def loss_curves(
    model: PreTrainedModel,
    scores: Sequence[DenseSite],
    values: Sequence[ValueSite],
    blocks: Sequence[FeedForward],
    batches: Sequence[Batch],
    progress: Progress | None = None,
) -> LossCurves:
    """Return what parts of a model lose at every width.

    Args:
        model: dense; left in the mode it was in.
        scores: attention modules whose queries and keys count.
        values: attention modules whose values count.
        blocks: feed-forward blocks that count.
        batches: keyword arguments for the model.
        progress: called with a layer's name, how many are done, and how many there are.

    Raises:
        UnsupportedModelError: the model's layers cannot be called alone, or one writes to no residual stream.
        CalibrationError: a module saw no token, or an input was not finite.
        CompressionError: moments of a module are singular.
    """
    losses: dict[Part, dict[str, Tensor]] = {"dk": {}, "dv": {}, "dff": {}}
    tasks = [Task(site, Compression(dk=1)) for site in scores] + [Task(site, Compression(dv=1)) for site in values]
    by_down = {block.down: block for block in blocks}
    with torch.no_grad(), evaluation_mode(model), Room() as room:
        try:
            layers = single_layers(model, batches[0])
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{error}, so that its losses cannot be measured; pass dk or dv") from error
        writers = find_writers(model, layers)
        states = States(model, model, room)
        states.capture(in_parts(batches), [])
        for done, layer in enumerate(states.layers):
            if progress is not None:
                progress(layer, done, len(states.layers))
            states.enter(layer, same_inputs=True)
            of_layer = [task for task in tasks if task.site.name.startswith(f"{layer}.")]
            here = {writer.name: writer for writer in writers if writer.layer == layer}
            if of_layer and not here:
                raise UnsupportedModelError(
                    f"{layer} of {type(model).__name__} writes to no residual stream, so that losses of its parts "
                    "cannot be compared; pass dk, dv or dff"
                )
            neurons = {name: ResidualMoments() for name in here if name in by_down}
            gathered = states.run_dense(of_layer, list(here.values()), neurons)
            # where the stream is the same at all tokens, nothing can be lost
            variances = {name: states.variance(writer) or math.inf for name, writer in here.items()}
            for task, moments in zip(of_layer, gathered.moments, strict=True):
                site, name = task.site, task.site.name
                output = site.path(site.family.output)
                writer = here.get(output) or here.get(f"{output}.proj") or next(iter(here.values()))
                assert moments is not None
                with _named(name):
                    if isinstance(site, ValueSite):
                        losses["dv"][name] = _value_losses(site, moments[0], writer) / variances[writer.name]
                    else:
                        scale = gathered.mean_squares[name] * float(writer.gain.square().mean())
                        lost = _score_losses(site, moments, gathered.head_weights[name])
                        losses["dk"][name] = scale * lost / variances[writer.name]
            for name, of_block in neurons.items():
                with _named(name):
                    lost = _neuron_losses(model.get_submodule(name), here[name], of_block)
                    losses["dff"][name] = lost / variances[name]
        if progress is not None:
            progress("", len(states.layers), len(states.layers))
    return losses


@contextmanager
def _named(module: str) -> Iterator[None]:
    """Name the module in errors of its moments."""
    try:
        yield
    except ValueError as error:
        raise CompressionError(f"{module}: {error}") from error


def _score_losses(site: DenseSite, moments: tuple[Moments, ...], head_weights: Tensor | None) -> Tensor:
    """Return Σ w² E(δs)² at every dk, (H·d+1,), for weights w with mean square 1."""
    group = site.heads // site.key_value_heads
    place = float64_device(site.query.weight.device)
    query, key = (heads.to(place, torch.float64) for heads in (site.query_heads(), site.key_heads()))
    key = key.repeat_interleave(group, 0)
    weighting = Weighting.of(*moments, damping=DAMPING, centre_query=site.query.bias is not None, device=query.device)
    weighted = weighting.apply(HeadTensor(query, key))
    if head_weights is not None:
        weighted = HeadTensor(weighted.query * head_weights.to(query)[:, None, None], weighted.key)
    _, values = singular_channels(weighted)
    return site.scaling**2 * _lost(values.square().flatten().sort(descending=True).values, site.width)


def _value_losses(site: ValueSite, moments: Moments, writer: Writer) -> Tensor:
    """Return what the layer's outputs lose at every dv, (Hkv·d+1,)."""
    output: Any = site.output
    group = site.heads // site.key_value_heads
    joint = moments.covariance() if output.bias is not None else moments.second
    if float(joint.trace()) <= CONSTANT * float(moments.second.trace()):  # the output's bias takes over all
        return torch.zeros(site.key_value_width + 1, dtype=torch.float64)
    heads = [head * writer.gain.to(head) for head in site.output_heads().to(joint)]
    _, contributions = captured(damp(joint, DAMPING), heads, group)
    return _lost(contributions, site.key_value_width)


def _neuron_losses(layer: Any, writer: Writer, moments: ResidualMoments) -> Tensor:
    """Return what a block's outputs lose at every dff, (N+1,).

    What a fit of k weights to n vectors leaves of these is (n − k) / (n + k) of what it leaves of others.
    """
    weight = (layer.weight.detach() if isinstance(layer, Conv1D) else layer.weight.detach().mT).to(
        moments.place, torch.float64
    )
    chosen = choice_moments(moments, weight, writer.gain, DAMPINGS[0], layer.bias is not None)
    losses = eliminate(*chosen, block=max(1, min(BLOCK, len(weight) // RANKINGS))).losses.cpu()
    kept = torch.arange(len(losses))
    return losses * (moments.count + kept) / (moments.count - kept).clamp(min=1)


def _lost(contributions: Tensor, width: int) -> Tensor:
    """Return the sums of all but the first 0, 1, …, `width` contributions, (width+1,); there may be fewer."""
    sums = torch.zeros(width + 1, dtype=torch.float64)
    lost = contributions.cpu().double().flip(0).cumsum(0).flip(0)
    sums[: len(lost)] = lost
    return sums
