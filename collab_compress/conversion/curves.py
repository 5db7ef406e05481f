r"""What a model loses at every width of its parts, from one pass of the dense model.

Losses of all parts are in one unit: the squared error that a part adds to the residual stream, over the stream's
variance there. Of scores, with head weights $w_i$ (`head_weights`), it is $\sum_i w_i^2\, E\,\delta s_i^2$, where the
scores keep their R largest singular components of all heads, which a conversion at dk = R improves on. Of values it
is what `narrow_values` loses, and of feed-forward blocks what is lost with the neurons that are eliminated first
(`eliminate`), the others being fitted again. Here no layer repairs what those below it lost, as a conversion does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
from collab_compress.factorization import HeadTensor, Moments
from collab_compress.factorization.least_squares import BLOCK, ResidualMoments, choice_moments, eliminate
from collab_compress.factorization.moments import Weighting, damp
from collab_compress.factorization.narrowing import captured
from collab_compress.factorization.truncation import singular_channels
from collab_compress.options import Compression

Part: TypeAlias = Literal["dk", "dv", "dff"]
MEASURED = 256  # sequences that losses are measured on
RANKINGS = 32  # of neurons, at least: losses are linear between two
DAMPING = 1e-3  # share of the mean variance, as `Solver.damping`


@dataclass(frozen=True)
class Curve:
    """What one part of one layer loses at every width.

    Args:
        part: queries and keys, values, or neurons.
        name: path of the attention module, or of the layer that reads the neurons.
        losses: at widths 0 to the dense one, (N+1,), in float64.
    """

    part: Part
    name: str
    losses: Tensor


def loss_curves(
    model: PreTrainedModel,
    scores: Sequence[DenseSite],
    values: Sequence[ValueSite],
    blocks: Sequence[FeedForward],
    batches: Sequence[Batch],
    progress: Progress | None = None,
) -> list[Curve]:
    """Return what parts of a model lose at every width.

    Args:
        model: dense; left in the mode it was in.
        scores: attention modules whose queries and keys count.
        values: attention modules whose values count.
        blocks: feed-forward blocks that count.
        batches: keyword arguments for the model.
        progress: called with a layer's name, how many are done, and how many there are.

    Raises:
        UnsupportedModelError: the model's layers cannot be called alone.
        CalibrationError: a module saw no token, or an input was not finite.
        ValueError: moments are singular.
    """
    curves: list[Curve] = []
    tasks = [Task(site, Compression(dk=1)) for site in scores] + [Task(site, Compression(dv=1)) for site in values]
    by_down = {block.down: block for block in blocks}
    with torch.no_grad(), evaluation_mode(model), Room() as room:
        writers = find_writers(model, single_layers(model, batches[0]))
        states = States(model, model, room)
        states.capture(in_parts(batches), [])
        for done, layer in enumerate(states.layers):
            if progress is not None:
                progress(layer, done, len(states.layers))
            states.enter(layer, same_inputs=True)
            of_layer = [task for task in tasks if task.site.name.startswith(f"{layer}.")]
            here = [writer for writer in writers if writer.layer == layer]
            neurons = {writer.name: ResidualMoments() for writer in here if writer.name in by_down}
            gathered = states.run_dense(of_layer, here, neurons)
            for task, moments in zip(of_layer, gathered.moments, strict=True):
                site = task.site
                output = site.path(site.family.output)
                writer = next((one for one in here if one.name in (output, f"{output}.proj")), here[0])
                variance = states.variance(writer)
                if isinstance(site, ValueSite):
                    curves.append(Curve("dv", site.name, _value_losses(site, moments[0], writer) / variance))
                else:
                    scale = gathered.mean_squares[site.name] * float(writer.gain.square().mean())
                    losses = _score_losses(site, moments, gathered.head_weights[site.name])
                    curves.append(Curve("dk", site.name, scale * losses / variance))
            for writer in here:
                if writer.name in by_down:
                    losses = _neuron_losses(model.get_submodule(writer.name), writer, neurons[writer.name])
                    curves.append(Curve("dff", writer.name, losses / states.variance(writer)))
        if progress is not None:
            progress("", len(states.layers), len(states.layers))
    return curves


def _score_losses(site: DenseSite, moments: tuple[Moments, ...], head_weights: Tensor | None) -> Tensor:
    """Return Σ w² E(δs)² at every dk, (H·d+1,), for weights w with mean square 1."""
    group = site.heads // site.key_value_heads
    place = float64_device(site.query.weight.device)
    query, key = (heads.to(place, torch.float64) for heads in (site.query_heads(), site.key_heads()))
    key = key.repeat_interleave(group, 0)
    weighting = Weighting.of(
        *(side.to(query.device, torch.float64) for side in moments),
        damping=DAMPING,
        centre_query=site.query.bias is not None,
        centre_key=True,
    )
    weighted = weighting.apply(HeadTensor(query, key))
    if head_weights is not None:
        weighted = HeadTensor(weighted.query * head_weights.to(query)[:, None, None], weighted.key)
    _, values = singular_channels(weighted)
    return site.scaling**2 * _lost(values.square().flatten().sort(descending=True).values, site.width)


def _value_losses(site: ValueSite, moments: Moments, writer: Writer) -> Tensor:
    """Return what the layer's outputs lose at every dv, (Hkv·d+1,)."""
    output: Any = site.output
    joint = moments.covariance() if output.bias is not None else moments.second
    heads = [head * writer.gain.to(head) for head in site.output_heads().to(joint)]
    _, contributions = captured(damp(joint, DAMPING), heads, site.heads // site.key_value_heads)
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
