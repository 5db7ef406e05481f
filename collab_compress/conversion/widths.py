r"""Choose widths that keep a share of the layers' operations and lose least, by what each width of each part loses.

One pass of the dense model gives all losses, in one unit: the squared error that a part adds to the residual stream,
over the stream's variance there. Of scores, with head weights $w_i$ (`head_weights`), it is
$\sum_i w_i^2\, E\,\delta s_i^2$, where the scores keep their R largest singular components of all heads, which a
conversion at dk = R improves on. Of values it is what `narrow_values` loses, and of feed-forward blocks what is lost
with the neurons that are eliminated first (`eliminate`), the others being fitted again. Here no layer repairs what
those below it lost, as a conversion does.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import (
    AttentionSite,
    DenseSite,
    ValueSite,
    find_attention,
    find_dense_attention,
    find_dense_values,
)
from collab_compress.attention import NarrowConfig, SharedConfig
from collab_compress.calibration import Batch
from collab_compress.calibration.batches import in_parts
from collab_compress.conversion.chain import Room, undivided
from collab_compress.conversion.feed_forward import FeedForward, Structure, block_report, narrower_config
from collab_compress.conversion.fit import DAMPINGS
from collab_compress.conversion.layers import States
from collab_compress.conversion.maps import RUNNING, Progress, Task, silent
from collab_compress.conversion.report import dense_macs, width_range
from collab_compress.conversion.writers import Writer
from collab_compress.devices import float64_device
from collab_compress.errors import CompressionError, UnsupportedModelError
from collab_compress.factorization import HeadTensor, Moments
from collab_compress.factorization.factors import singular_channels
from collab_compress.factorization.least_squares import BLOCK, ResidualMoments, choice_moments, eliminate
from collab_compress.factorization.moments import Weighting, damp
from collab_compress.factorization.narrowing import CONSTANT, captured
from collab_compress.options import Compression

NEURONS = 32  # wide blocks keep a multiple of it: products of odd widths take longer
NEURON_WEIGHT = 4
"""Weight of the losses of neurons, relative to those of attention.

It is empirical: of 1, 2 and 4 it moved the outputs of MiniLM least. On all-mpnet-base-v2 8 scored higher on STS-B
(86.85 in place of 86.54), on MiniLM's classifiers no higher, so 4 stayed (`docs/tried.md`).
"""
LONG = 512  # tokens beyond which heads are made narrower too, because most operations are those of the scores
MEASURED = 256  # sequences that losses are measured on
RANKINGS = 32  # of neurons, at least: losses are linear between two
DAMPING = 1e-3  # share of the mean variance, as `Solver.damping`

Part: TypeAlias = Literal["dk", "dv", "dff"]
LossCurves: TypeAlias = Mapping[Part, Mapping[str, Tensor]]
"""Part → path of an attention module, or of the layer that reads the neurons → losses at widths 0 to the dense one,
(N+1,), in float64."""


@dataclass(frozen=True)
class Choice:
    """Widths that keep the share of the layers' operations that was asked for.

    Args:
        compression: of the whole model; dk and dv are those of the first attention module, with a dk if any.
        modules: path of each attention module → its compression; empty if attention stays dense.
        kept: share of the layers' operations that the model keeps.
        reason: a sentence for the report on what was chosen and why.
    """

    compression: Compression
    modules: dict[str, Compression]
    kept: float
    reason: str


@dataclass(frozen=True)
class Split:
    """Shares of the channels of each head that scores and values keep, None for all, and its operations."""

    scores: float | None
    values: float | None
    macs: int


class Attention:
    """The widths of one attention module by the share of its channels, and their costs for inputs of a length."""

    def __init__(self, site: AttentionSite, values: ValueSite, length: int) -> None:
        query, key = site.part(site.family.query), site.part(site.family.key)
        self.scores, self.values, self.length = DenseSite(**vars(site), query=query, key=key), values, length
        self.has_dk = not site.family.rotary

    def dk(self, share: float | None) -> int | None:
        """Return the width of queries and keys; None if they stay dense."""
        site = self.scores
        return None if share is None or not self.has_dk else site.heads * max(1, int(share * site.head_width))

    def dv(self, share: float | None) -> int | None:
        """Return the width of values; None if they stay dense."""
        site = self.values
        width = min(site.head_width, site.value.in_features)
        return None if share is None else site.key_value_heads * max(1, int(share * width))

    def head_dim(self, share: float | None) -> int | None:
        """Return the width of heads of queries and keys; None for the dense one."""
        dk, has_bias = self.dk(share), self.scores.query.bias is not None
        return None if dk is None or self.length <= LONG else max(dk // self.scores.heads, 1 + has_bias)

    def score_macs(self, share: float | None) -> int:
        """Return the multiply-accumulates of scores."""
        site, dk = self.scores, self.dk(share)
        if dk is None:
            return dense_macs(site.widths, (site.width, site.key_value_width), self.length)
        form = SharedConfig.of(site, dk, self.head_dim(share), site.query.bias is not None)
        return form.macs(site.widths, self.length)

    def value_macs(self, share: float | None) -> int:
        """Return the multiply-accumulates of values and outputs."""
        site = self.values
        form = NarrowConfig.of(site, self.dv(share) or site.key_value_width, site.value.bias is not None)
        return form.macs(site.widths, self.length)


class Costs:
    """The attention modules and feed-forward blocks of a dense model, and their costs for inputs of `length` tokens.

    Raises:
        UnsupportedModelError: an attention module cannot be converted.
    """

    def __init__(self, structure: Structure, compression: Compression, length: int) -> None:
        model = structure.model
        where = (model, compression.modules)
        sites = find_attention(*where)
        values = find_dense_values(*where)
        self.attention = [Attention(site, own, length) for site, own in zip(sites, values, strict=True)]
        rotary = [site for site in sites if site.family.rotary]
        if len(rotary) < len(sites):
            find_dense_attention(*where, [site.name for site in rotary])  # raises if others cannot be converted
        narrowable = any(not site.family.keeps_scores for site in rotary)
        self.blocks, why_no_blocks = narrowable_blocks(structure)
        reports = [block_report(model, block, 1, length) for block in self.blocks]
        self.neurons = min((block.width for block in self.blocks), default=0)
        self.macs_per_neuron = sum(report.macs_after for report in reports)
        dense_attention = sum(module.score_macs(None) + module.value_macs(None) for module in self.attention)
        self.macs = dense_attention + sum(report.macs_before for report in reports)
        self.length = length
        reasons = {
            "queries and keys with a rotary embedding stay dense": "only dk makes them narrower"
            if narrowable
            else "",
            "feed-forward blocks stay as they are": why_no_blocks,
        }
        words = [f"{what}: {why}" for what, why in reasons.items() if why]
        self.why = f" ({'; '.join(words)})" if words else ""

    def splits(self) -> list[Split]:
        """Return all shares of the channels of heads that scores and values can keep."""
        finest = max(module.scores.head_width for module in self.attention)
        shares = [None, *(channels / finest for channels in range(1, finest))]
        scores = {share: sum(module.score_macs(share) for module in self.attention) for share in shares}
        values = {share: sum(module.value_macs(share) for module in self.attention) for share in shares}
        if not any(module.has_dk for module in self.attention):
            scores = {None: scores[None]}
        return [Split(one, other, scores[one] + values[other]) for one in scores for other in values]

    def neurons_in(self, macs: float) -> int | None:
        """Return the number of neurons that each block can have; None if there is no block."""
        if not self.blocks:
            return None
        neurons = int(macs / self.macs_per_neuron + 1e-9)
        if neurons > 8 * NEURONS:
            neurons -= neurons % NEURONS
        return min(neurons, self.neurons)

    def loss_of_scores(self, share: float | None, losses: Mapping[str, Tensor]) -> float:
        """Return what scores lose at a share of their channels."""
        widths = {module.scores.name: module.dk(share) for module in self.attention}
        return sum(float(losses[name][dk]) for name, dk in widths.items() if dk is not None)

    def loss_of_values(self, share: float | None, losses: Mapping[str, Tensor]) -> float:
        """Return what values lose at a share of their channels."""
        widths = {module.values.name: module.dv(share) for module in self.attention}
        return sum(float(losses[name][dv]) for name, dv in widths.items() if dv is not None)

    def choice(self, split: Split, neurons: int | None, compression: Compression) -> Choice:
        """Return the widths of a split, and of blocks with so many neurons."""
        dff = None if neurons == self.neurons else neurons
        own = {
            module.scores.name: _compression(
                compression, module.dk(split.scores), module.head_dim(split.scores), module.dv(split.values), dff
            )
            for module in self.attention
        }
        changed = {name: chosen for name, chosen in own.items() if chosen.dk is not None or chosen.dv is not None}
        chosen = list(changed.values()) or [_compression(compression, None, None, None, dff)]
        widths = {
            "dk": [module.dk for module in changed.values() if module.dk is not None],
            "dv": [module.dv for module in changed.values() if module.dv is not None],
            "dff": [] if dff is None else [dff],
        }
        words = ", ".join(f"{name} {width_range(numbers)}" for name, numbers in widths.items() if numbers)
        kept = (split.macs + (neurons or 0) * self.macs_per_neuron) / self.macs
        reason = f"Kept {kept:.0%} of the layers' operations at {self.length} tokens{self.why}: {words}."
        first = next((module for module in chosen if module.dk is not None), chosen[0])
        return Choice(first, changed, kept, reason)


def _compression(
    compression: Compression, dk: int | None, head_dim: int | None, dv: int | None, dff: int | None
) -> Compression:
    """Return the compression of one module to these widths."""
    solver = compression.solver
    if dk is None:  # no solver iterates
        solver = replace(solver, method="als", sweeps=None)
    return replace(compression, keep=None, dk=dk, head_dim=head_dim, dv=dv, dff=dff, solver=solver)


def choose_widths(
    structure: Structure,
    compression: Compression,
    batches: Sequence[Batch],
    length: int,
    progress: Progress = silent,
) -> Choice:
    """Choose the widths that keep a share of the layers' operations and lose least.

    All attention modules keep the same share of the channels of a head, and all feed-forward blocks as many neurons.

    Args:
        structure: of the dense model.
        compression: with the share, `keep`.
        batches: to measure losses on.
        length: tokens for which operations count.
        progress: called with what is being done, how many layers are done, and how many there are, or None.

    Raises:
        CompressionError: no widths keep so little.
        UnsupportedModelError: an attention module cannot be converted.
    """
    assert compression.keep is not None
    parts = Costs(structure, compression, length)
    room = compression.keep * parts.macs
    splits = [split for split in parts.splits() if split.macs <= room and parts.neurons_in(room - split.macs) != 0]
    if not splits:
        raise CompressionError(
            f"keep is {compression.keep}: no widths of {len(parts.attention)} attention modules and "
            f"{len(parts.blocks)} feed-forward blocks keep so little at {length} tokens{parts.why}; pass more, or "
            "dk, dv and dff"
        )
    scored = [module.scores for module in parts.attention if module.has_dk]
    valued = [module.values for module in parts.attention]
    losses = loss_curves(structure, scored, valued, parts.blocks, batches, progress)
    of_neurons = [sum(float(curve[count]) for curve in losses["dff"].values()) for count in range(parts.neurons + 1)]
    scores = {split.scores: parts.loss_of_scores(split.scores, losses["dk"]) for split in splits}
    values = {split.values: parts.loss_of_values(split.values, losses["dv"]) for split in splits}

    def loss(split: Split) -> float:
        neurons = parts.neurons_in(room - split.macs)
        of_blocks = 0.0 if neurons is None else NEURON_WEIGHT * of_neurons[neurons]
        return scores[split.scores] + values[split.values] + of_blocks

    best = min(splits, key=loss)
    return parts.choice(best, parts.neurons_in(room - best.macs), compression)


def narrowable_blocks(structure: Structure) -> tuple[list[FeedForward], str]:
    """Return the feed-forward blocks that can be made narrower, or why there are none."""
    try:
        blocks = structure.blocks
        narrower_config(structure.model, blocks, max(1, min(block.width for block in blocks) // 2))
    except UnsupportedModelError as error:
        return [], str(error).removesuffix("; leave out dff")
    return blocks, ""


def loss_curves(
    structure: Structure,
    scores: Sequence[DenseSite],
    values: Sequence[ValueSite],
    blocks: Sequence[FeedForward],
    batches: Sequence[Batch],
    progress: Progress = silent,
) -> LossCurves:
    """Return what parts of a model lose at every width.

    Args:
        structure: of the dense model, which is left in the mode it was in.
        scores: attention modules whose queries and keys count.
        values: attention modules whose values count.
        blocks: feed-forward blocks that count.
        batches: keyword arguments for the model.
        progress: called with what is being done, how many layers are done, and how many there are, or None.

    Raises:
        UnsupportedModelError: the model's layers cannot be called alone, or one writes to no residual stream.
        CalibrationError: a module saw no token, or an input was not finite.
        CompressionError: moments of a module are singular.
    """
    model = structure.model
    losses: dict[Part, dict[str, Tensor]] = {"dk": {}, "dv": {}, "dff": {}}
    tasks = [Task(site, Compression(dk=1)) for site in scores] + [Task(site, Compression(dv=1)) for site in values]
    by_down = {block.down: block for block in blocks}
    with torch.no_grad(), undivided(model), Room() as room:
        try:
            writers = structure.writers
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{error}, so that its losses cannot be measured; pass dk or dv") from error
        states = States(model, model, room)
        progress(RUNNING, 0, None)
        states.capture(in_parts(batches), [])
        for done, layer in enumerate(states.layers):
            progress(f"measuring {layer}", done, len(states.layers))
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
        progress("measured all layers", len(states.layers), len(states.layers))
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
    output = site.output
    group = site.heads // site.key_value_heads
    joint = moments.covariance() if output.bias is not None else moments.second
    if float(joint.trace()) <= CONSTANT * float(moments.second.trace()):  # the output's bias takes over all
        return torch.zeros(site.key_value_width + 1, dtype=torch.float64, device="cpu")
    heads = [head * writer.gain.to(head) for head in site.output_heads().to(joint)]
    _, contributions = captured(damp(joint, DAMPING), heads, group)
    return _lost(contributions, site.key_value_width)


def _neuron_losses(layer: nn.Linear | Conv1D, writer: Writer, moments: ResidualMoments) -> Tensor:
    """Return what a block's outputs lose at every dff, (N+1,).

    What a fit of k weights to n vectors leaves of these is (n − k) / (n + k) of what it leaves of others.
    """
    weight = (layer.weight.detach() if isinstance(layer, Conv1D) else layer.weight.detach().mT).to(
        moments.place, torch.float64
    )
    chosen = choice_moments(moments, weight, writer.gain, DAMPINGS[0], layer.bias is not None)
    losses = eliminate(*chosen, block=max(1, min(BLOCK, len(weight) // RANKINGS))).losses.cpu()
    kept = torch.arange(len(losses), device="cpu")
    return losses * (moments.count + kept) / (moments.count - kept).clamp(min=1)


def _lost(contributions: Tensor, width: int) -> Tensor:
    """Return the sums of all but the first 0, 1, …, `width` contributions, (width+1,); there may be fewer."""
    sums = torch.zeros(width + 1, dtype=torch.float64, device="cpu")
    lost = contributions.cpu().double().flip(0).cumsum(0).flip(0)
    sums[: len(lost)] = lost
    return sums
