r"""Choose widths that keep a share of the layers' operations and lose least, by what each width of each part loses.

One pass of the dense model gives all losses, in one unit: the squared error that a part adds to the residual stream,
over the stream's variance there. Of scores, with head weights $w_i$ (`head_weights`), it is
$\sum_i w_i^2\, E\,\delta s_i^2$, where the scores keep their R largest singular components of all heads, which a
conversion at dk = R improves on. Of values it is what `narrow_values` loses, and of feed-forward blocks what is lost
with the neurons that are eliminated first (`eliminate`), the others being fitted again. In the variance and in losses
of neurons tokens count by the inverse of the stream's mean square, because a few can be many times larger than all
others. Here no layer repairs what those below it lost, as a conversion does.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import DenseSite, ValueSite
from collab_compress.architectures.sites import by_input
from collab_compress.calibration import Batch
from collab_compress.calibration.source import SplitData
from collab_compress.conversion.cost import Part, block_cost, costs_at
from collab_compress.conversion.feed_forward import FeedForward
from collab_compress.conversion.inventory import Inventory, check_weights
from collab_compress.conversion.layers import HiddenStateStore, capture_calls, undivided
from collab_compress.conversion.maps import RUNNING, MapTask, Progress, silent
from collab_compress.conversion.report import width_range
from collab_compress.conversion.residual import ResidualLinear
from collab_compress.conversion.sequential import DAMPINGS, LayerData, Pair, gather_layer, stream_variance
from collab_compress.devices import float64_device
from collab_compress.errors import CompressionError, UnsupportedModelError
from collab_compress.factorization import HeadTensor, Moments
from collab_compress.factorization.factors import singular_channels
from collab_compress.factorization.least_squares import BLOCK_NEURONS, ResidualMoments, eliminate
from collab_compress.factorization.moments import Weighting, damped_
from collab_compress.factorization.narrowing import MIN_VARIANCE_SHARE, explained_energy
from collab_compress.options import Compression

NEURON_MULTIPLE = 32  # of neurons in wide blocks: products of odd widths take longer
LONG_INPUT = 512  # tokens beyond which heads lose width too, because most operations are those of the scores
MIN_RANKINGS = 32  # of neurons: losses are linear between two rankings
DAMPING = 1e-3  # share of the mean variance, as `Solver.damping`

LossCurves: TypeAlias = Mapping[Part, Mapping[str, Tensor]]
"""Part → path of an attention module, or of the layer that reads the neurons → losses at widths 0 to the dense one,
(N+1,), in float64."""


@dataclass(frozen=True)
class Choice:
    """The widths of a conversion: of the whole model, or by path of the attention modules where these differ."""

    compression: Compression  # dk and dv are those of the first attention module, with a dk if any
    modules: Mapping[str, Compression] = field(default_factory=dict)
    reason: str = ""  # a sentence for the report on what was chosen and why; empty if nothing was

    def whole(self, passed: Compression) -> Compression:
        """Return the chosen compression if it is that of every module, else the one that was passed."""
        return self.compression if all(one == self.compression for one in self.modules.values()) else passed


@dataclass(frozen=True)
class Split:
    """Shares of the channels of each head that scores and values keep, None for all, and its operations."""

    scores: float | None
    values: float | None
    macs: int


class HeadShares:
    """The widths of one attention module at a share of the channels of its heads, and their costs."""

    def __init__(self, site: ValueSite, has_dk: bool, length: int) -> None:
        self.site, self.has_dk, self.length, self.name = site, has_dk, length, site.name

    def dk(self, share: float | None) -> int | None:
        """Return the width of queries and keys; None if they stay dense."""
        if share is None or not self.has_dk:
            return None
        return self.site.heads * max(1, int(share * self.site.head_width))

    def dv(self, share: float | None) -> int | None:
        """Return the width of values; None if they stay dense."""
        width = min(self.site.head_width, self.site.value.in_features)
        return None if share is None else self.site.key_value_heads * max(1, int(share * width))

    def head_dim(self, share: float | None) -> int | None:
        """Return the width of heads of queries and keys; None for the dense one."""
        dk = self.dk(share)
        if dk is None or self.length <= LONG_INPUT:
            return None
        has_bias = self.site.part(self.site.paths.query).bias is not None
        return max(dk // self.site.heads, 1 + has_bias)

    def macs(self, scores: float | None, values: float | None) -> tuple[int, int]:
        """Return the multiply-accumulates of queries and keys, and of values and outputs."""
        costs = costs_at(self.site, self.length, self.dk(scores), self.dv(values), self.head_dim(scores))
        return costs[0].macs_after, costs[1].macs_after

    def compression(self, base: Compression, split: Split, dff: int | None) -> Compression:
        """Return the compression of this module at shares of its channels."""
        dk, dv = self.dk(split.scores), self.dv(split.values)
        # Without a dk no solver iterates.
        solver = base.solver if dk is not None else replace(base.solver, method="als", sweeps=None)
        return replace(base, keep=None, dk=dk, head_dim=self.head_dim(split.scores), dv=dv, dff=dff, solver=solver)


class Budget:
    """The operations of a dense model's layers for inputs of `length` tokens, and what widths leave of them."""

    def __init__(self, inventory: Inventory, length: int) -> None:
        self.scores, why_no_scores = inventory.scores
        self.values, why_no_values = inventory.narrowable_values
        self.blocks, why_no_blocks = inventory.narrowable_blocks
        with_dk = {site.name for site in self.scores}
        self.attention = [HeadShares(site, site.name in with_dk, length) for site in self.values]
        costs = [block_cost(inventory.model, block, 1, length) for block in self.blocks]
        self.neurons = min((block.width for block in self.blocks), default=0)
        self.macs_per_neuron = sum(cost.macs_after for cost in costs)
        dense_attention = sum(sum(module.macs(None, None)) for module in self.attention)
        self.macs = dense_attention + sum(cost.macs_before for cost in costs)
        self.length = length
        reasons = {"queries and keys": why_no_scores, "values": why_no_values, "feed-forward blocks": why_no_blocks}
        if why_no_values and why_no_values == why_no_scores:
            some = "some attention modules" if self.values else "attention modules"
            reasons = {some: why_no_values, "feed-forward blocks": why_no_blocks}
        words = [f"{what} stay as they are: {why}" for what, why in reasons.items() if why]
        self.why = f" ({'; '.join(words)})" if words else ""
        if not self.macs:
            raise UnsupportedModelError(
                f"{type(inventory.model).__name__} has nothing whose width keep could choose{self.why}; pass layers, "
                "or leave out keep"
            )

    def splits(self) -> list[Split]:
        """Return all shares of the channels of heads that scores and values can keep."""
        finest = max((module.site.head_width for module in self.attention), default=1)
        shares = [None, *(channels / finest for channels in range(1, finest))]
        costs = {share: [module.macs(share, share) for module in self.attention] for share in shares}
        scores = {share: sum(macs for macs, _ in of_share) for share, of_share in costs.items()}
        values = {share: sum(macs for _, macs in of_share) for share, of_share in costs.items()}
        if not self.scores:
            scores = {None: scores[None]}
        return [Split(one, other, scores[one] + values[other]) for one in scores for other in values]

    def neurons_in(self, macs: float) -> int | None:
        """Return the number of neurons that each block can have; None if there is no block."""
        if not self.blocks:
            return None
        neurons = int(macs / self.macs_per_neuron + 1e-9)
        if neurons > 8 * NEURON_MULTIPLE:
            neurons -= neurons % NEURON_MULTIPLE
        return min(neurons, self.neurons)

    def loss(self, share: float | None, part: Part, losses: LossCurves) -> float:
        """Return what queries and keys ("dk"), or values ("dv"), lose at a share of their channels."""
        widths = {module.name: getattr(module, part)(share) for module in self.attention}
        return sum(float(losses[part][name][width]) for name, width in widths.items() if width is not None)

    def choice(self, split: Split, neurons: int | None, compression: Compression) -> Choice:
        """Return the widths of a split, and of blocks with so many neurons."""
        dff = None if neurons == self.neurons else neurons
        by_module = {module.name: module.compression(compression, split, dff) for module in self.attention}
        changed = {name: one for name, one in by_module.items() if one.dk is not None or one.dv is not None}
        chosen = [*changed.values()] or [*by_module.values()] or [replace(compression, keep=None, dff=dff)]
        widths = {
            "dk": [one.dk for one in chosen if one.dk is not None],
            "dv": [one.dv for one in chosen if one.dv is not None],
            "dff": [] if dff is None else [dff],
        }
        words = ", ".join(f"{name} {width_range(numbers)}" for name, numbers in widths.items() if numbers)
        kept = (split.macs + (neurons or 0) * self.macs_per_neuron) / self.macs
        what = "the layers' operations" if self.attention else "the operations of feed-forward blocks"
        reason = f"Kept {kept:.0%} of {what} at {self.length} tokens{self.why}: {words}."
        first = next((one for one in chosen if one.dk is not None), chosen[0])
        return Choice(first, changed, reason)


def choose_widths(
    inventory: Inventory, compression: Compression, data: SplitData, progress: Progress = silent
) -> Choice:
    """Return the widths of all modules: as passed, or, with `keep`, those that lose least on a part of the data.

    They are one share of the channels of all heads, and one number of neurons of all blocks.
    """
    if compression.keep is None:
        return Choice(compression)
    if not data.held_back:
        raise CompressionError(
            "keep chooses by what is lost on calibration data; pass at least two sequences, best your own texts"
        )
    check_weights(inventory.model.named_parameters())
    budget, length = Budget(inventory, data.length), data.length
    macs = compression.keep * budget.macs
    splits = [split for split in budget.splits() if split.macs <= macs and budget.neurons_in(macs - split.macs) != 0]
    if not splits:
        raise CompressionError(
            f"keep is {compression.keep}: no widths of {len(budget.attention)} attention modules and "
            f"{len(budget.blocks)} feed-forward blocks keep so little at {length} tokens{budget.why}; pass more, or "
            "dk, dv and dff"
        )
    losses = loss_curves(inventory, budget.scores, budget.values, budget.blocks, data.sample, progress)
    of_neurons = [sum(float(curve[count]) for curve in losses["dff"].values()) for count in range(budget.neurons + 1)]
    scores = {split.scores: budget.loss(split.scores, "dk", losses) for split in splits}
    values = {split.values: budget.loss(split.values, "dv", losses) for split in splits}

    def loss(split: Split) -> float:
        neurons = budget.neurons_in(macs - split.macs)
        of_blocks = 0.0 if neurons is None else of_neurons[neurons]
        return scores[split.scores] + values[split.values] + of_blocks

    best = min(splits, key=loss)
    return budget.choice(best, budget.neurons_in(macs - best.macs), compression)


def loss_curves(
    inventory: Inventory,
    scores: Sequence[DenseSite],
    values: Sequence[ValueSite],
    blocks: Sequence[FeedForward],
    batches: Sequence[Batch],
    progress: Progress = silent,
) -> LossCurves:
    """Return what parts of a model lose at every width."""
    model = inventory.model
    losses: dict[Part, dict[str, Tensor]] = {"dk": {}, "dv": {}, "dff": {}}
    tasks = [MapTask(site, Compression(dk=1)) for site in scores] + [
        MapTask(site, Compression(dv=1)) for site in values
    ]
    downs = {block.down for block in blocks}
    with torch.no_grad(), undivided(model), HiddenStateStore() as store:
        try:
            linears = inventory.residual_linears
        except UnsupportedModelError as error:
            others = "; pass dk or dv" if inventory.editable else ""
            raise UnsupportedModelError(f"{error}, so that its losses cannot be measured{others}") from error
        progress(RUNNING, 0, None)
        calls = capture_calls(model, list(inventory.layers), batches, [], store)
        models, hidden = Pair(model, model, calls, store), list[Tensor]()
        for done, (layer, numbers) in enumerate(calls.layers.items()):
            progress(f"measuring {layer}", done, len(calls.layers))
            if calls.begins_stack(numbers.start):
                hidden = calls.read_by(numbers.start)
            of_layer = [task for task in tasks if task.site.name.startswith(f"{layer}.")]
            by_name = {linear.name: linear for linear in linears if linear.layer == layer}
            if of_layer and not by_name:
                raise UnsupportedModelError(
                    f"{layer} of {type(model).__name__} writes to no residual stream, so that losses of its parts "
                    "cannot be compared; pass dk, dv or dff"
                )
            neurons = {name: ResidualMoments() for name in by_name if name in downs}
            data = gather_layer(models, numbers, hidden, of_layer, list(by_name.values()), neurons)
            hidden = data.outputs
            for part, name, curve in _layer_losses(models, data, of_layer, by_name, neurons):
                losses[part][name] = curve
        progress("measured all layers", len(calls.layers), len(calls.layers))
    return losses


def _layer_losses(
    models: Pair,
    data: LayerData,
    tasks: Sequence[MapTask],
    linears: Mapping[str, ResidualLinear],
    neurons: Mapping[str, ResidualMoments],
) -> Iterator[tuple[Part, str, Tensor]]:
    """Yield what each part of a layer loses at every width, over the variance of the residual stream there."""
    # Where the stream is the same at all tokens, nothing can be lost.
    variances = {name: stream_variance(models, data, linear) or math.inf for name, linear in linears.items()}
    name = ""
    try:
        for task, moments in zip(tasks, data.moments, strict=True):
            site, name = task.site, task.site.name
            output = site.path(site.paths.output)
            linear = linears.get(output) or linears.get(f"{output}.proj") or next(iter(linears.values()))
            assert moments is not None
            if isinstance(site, ValueSite):
                yield "dv", name, _value_losses(site, moments[0], linear) / variances[linear.name]
            else:
                scale = data.mean_squares[name] * float(linear.gain.square().mean())
                lost = _score_losses(site, moments, data.head_weights[name])
                yield "dk", name, scale * lost / variances[linear.name]
        for name, of_block in neurons.items():
            lost = _neuron_losses(models.dense.get_submodule(name), linears[name], of_block)
            yield "dff", name, lost / variances[name]
    except ValueError as error:  # of the moments
        raise CompressionError(f"{name}: {error}") from error


def _score_losses(site: DenseSite, moments: tuple[Moments, ...], head_weights: Tensor | None) -> Tensor:
    """Return Σ w² E(δs)² at every dk, (H·d+1,), for weights w with mean square 1."""
    group = site.heads // site.key_value_heads
    device = float64_device(site.query.weight.device)
    query, key = (heads.to(device, torch.float64) for heads in (site.query_heads(), site.key_heads()))
    key = key.repeat_interleave(group, 0)
    weighting = Weighting.of(*moments, damping=DAMPING, centre_query=site.query.bias is not None, device=query.device)
    weighted = weighting.apply(HeadTensor(query, key))
    if head_weights is not None:
        weighted = HeadTensor(weighted.query * head_weights.to(query)[:, None, None], weighted.key)
    _, values = singular_channels(weighted)
    return site.scaling**2 * _tail_sums(values.square().flatten().sort(descending=True).values, site.width)


def _value_losses(site: ValueSite, moments: Moments, linear: ResidualLinear) -> Tensor:
    """Return what the layer's outputs lose at every dv, (Hkv·d+1,)."""
    output = site.output
    group = site.heads // site.key_value_heads
    joint = moments.covariance() if output.bias is not None else moments.second
    if float(joint.trace()) <= MIN_VARIANCE_SHARE * float(moments.second.trace()):  # the output's bias takes over all
        return torch.zeros(site.key_value_width + 1, dtype=torch.float64, device="cpu")
    heads = [head * linear.gain.to(head) for head in site.output_heads().to(joint)]
    _, contributions = explained_energy(damped_(joint.clone(), DAMPING), heads, group)
    return _tail_sums(contributions, site.key_value_width)


def _neuron_losses(layer: nn.Linear | Conv1D, linear: ResidualLinear, moments: ResidualMoments) -> Tensor:
    """Return what a block's outputs lose at every dff, (N+1,)."""
    weight = by_input(layer).to(moments.device, torch.float64)
    second, _ = moments.moments(centred=layer.bias is not None)
    wanted = second @ weight * linear.gain.to(second)
    block = max(1, min(BLOCK_NEURONS, len(weight) // MIN_RANKINGS))
    losses = eliminate(damped_(second, DAMPINGS[0]), wanted, block=block).losses.cpu()
    kept = torch.arange(len(losses), device="cpu")  # weights fitted to n vectors leave (n − k) / (n + k) of the error
    return losses * (moments.count + kept) / (moments.count - kept).clamp(min=1)


def _tail_sums(contributions: Tensor, width: int) -> Tensor:
    """Return the sums of all but the first 0, 1, …, `width` contributions, (width+1,); there may be fewer."""
    sums = torch.zeros(width + 1, dtype=torch.float64, device="cpu")
    lost = contributions.cpu().double().flip(0).cumsum(0).flip(0)
    sums[: len(lost)] = lost
    return sums
