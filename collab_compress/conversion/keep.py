"""Choose widths and a form for a share of the layers' operations to keep, by how far each moves the outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import (
    FAMILIES,
    AttentionSite,
    ValueSite,
    find_attention,
    find_dense_attention,
    find_dense_values,
)
from collab_compress.attention import FORMS, NarrowValues, ScoreForm
from collab_compress.calibration import Batch
from collab_compress.conversion.feed_forward import FeedForward, block_report, find_feed_forward, narrower_config
from collab_compress.conversion.report import dense_macs
from collab_compress.errors import CompressionError, UnsupportedModelError
from collab_compress.options import CalibrationOptions, Compression, Form

TYPICAL = 128  # tokens, where nothing says how long inputs are
COMMON = 0.9  # share of the calibration sequences that are no longer than the length that counts
STEP = 0.15  # of attention's operations, by which the split between attention and feed-forward blocks is moved
NEURONS = 32  # wide blocks keep a multiple of it: products of odd widths take longer
SPLIT = {"shared": (0.85, 1.15), "per-head": (1.0, 1.0)}
"""Share of queries and keys, and of values, that a form keeps where half of both would be 1 and 1: heads have more in
common in their scores than in their values, so shared queries and keys can be the narrower."""


@dataclass(frozen=True)
class Candidate:
    """Widths that keep the share of the layers' operations that was asked for.

    Args:
        compression: of the whole model; its dk, dv and form are those of the first attention module.
        modules: path of each attention module → its compression; empty where attention stays as it is.
        attention: share of attention's operations that was given to it.
        kept: share of the layers' operations that it keeps.
    """

    compression: Compression
    modules: dict[str, Compression]
    attention: float
    kept: float

    def __str__(self) -> str:
        widths = {
            name: sorted({getattr(own, name) for own in self.modules.values()} - {None}) for name in ("dk", "dv")
        }
        widths["dff"] = [self.compression.dff] if self.compression.dff is not None else []
        words = [f"{name} {_range(found)}" for name, found in widths.items() if found]
        return ", ".join([*words, f"form {self.compression.form}"] if widths["dk"] else words)


@dataclass(frozen=True)
class _Widths:
    """Widths of one attention module, and its multiply-accumulates at the length that counts; dk None for dense."""

    dk: int | None
    dv: int
    macs: int


class Layers:
    """The attention modules and feed-forward blocks of a model, and what they cost.

    Args:
        model: dense.
        compression: with `keep`.
        length: tokens of an input.
        batch: keyword arguments for the model, of which two sequences are run.

    Raises:
        UnsupportedModelError: an attention module cannot be converted.
    """

    def __init__(self, model: PreTrainedModel, compression: Compression, length: int, batch: Batch) -> None:
        assert compression.keep is not None
        self.keep, self.asked, self.length = compression.keep, compression, length
        where = (model, FAMILIES, compression.modules, compression.kinds)
        self.sites = list(zip(find_attention(*where), find_dense_values(*where), strict=True))
        self.rotary = any(site.family.rotary for site, _ in self.sites)
        if not self.rotary:
            find_dense_attention(*where)  # raises where queries and keys cannot be converted
        self.before = [_dense_cost(site, values, length) for site, values in self.sites]
        self.attention = sum(each.macs for each in self.before)
        self.blocks, self.left_out = _narrowable(model, batch)
        self.neurons = min((block.width for block in self.blocks), default=0)
        self.per_neuron = sum(block_report(model, block, 1, length).macs_after for block in self.blocks)
        self.total = self.attention + sum(block_report(model, each, 1, length).macs_before for each in self.blocks)

    @property
    def forms(self) -> tuple[Form, ...]:
        """Forms to choose from; queries and keys of rotary models stay dense, so there is no choice."""
        return ("shared",) if self.rotary else get_args(Form)

    def candidate(self, form: Form, attention: float) -> Candidate | None:
        """Return the widths that give attention a share of its operations, and the rest to feed-forward blocks.

        Returns:
            None where there are none: too little is left for either, or the form takes more than dense attention.
        """
        if not 0 < attention < 1 + STEP:
            return None
        widths: list[_Widths] = []
        for (site, values), before in zip(self.sites, self.before, strict=True):
            found = before if attention >= 1 else _widest(site, values, form, attention, self.length)
            if found is None:
                return None
            widths.append(found)
        spent = sum(each.macs for each in widths)
        dff = self._neurons(self.keep * self.total - spent)
        if (dff is None and self.blocks) or (not self.blocks and attention > self.keep):
            return None
        modules = {}
        for (site, _), each in zip(self.sites, widths, strict=True):
            if attention < 1:
                modules[site.name] = self._compression(form, each.dk, each.dv, dff)
        whole = next(iter(modules.values())) if modules else self._compression(form, None, None, dff)
        return Candidate(whole, modules, attention, (spent + (dff or 0) * self.per_neuron) / self.total)

    def _neurons(self, macs: float) -> int | None:
        """Return how many neurons each block can have; None for none."""
        found = int(macs / self.per_neuron + 1e-9) if self.blocks else 0
        if found > 8 * NEURONS:
            found -= found % NEURONS
        return min(found, self.neurons) if found > 0 else None

    def _compression(self, form: Form, dk: int | None, dv: int | None, dff: int | None) -> Compression:
        asked = self.asked
        if dk is None or len(FORMS[form].solvers) == 1:  # closed form
            asked = asked.with_solver(method="als", effort="best", sweeps=None, tolerance=None)
        return replace(asked, keep=None, dk=dk, dv=dv, dff=dff, form="shared" if dk is None else form)

    def starts(self) -> Iterator[Candidate]:
        """Yield the candidates whose splits are the most even, of each form one, unless they are the same.

        Raises:
            CompressionError: there is none.
        """
        steps = [count * STEP for count in range(-6, 7)]
        shares = [self.keep + step for step in sorted(steps, key=abs)]
        found: dict[str, Candidate] = {}
        for form in self.forms:
            first = next(filter(None, (self.candidate(form, share) for share in shares)), None)
            if first is not None:
                found[str(first)] = first
        if not found:
            raise CompressionError(
                f"keep is {self.keep}: no widths of {len(self.sites)} attention modules and {len(self.blocks)} "
                f"feed-forward blocks keep so little at {self.length} tokens{self.why}; pass more, or dk, dv and dff"
            )
        yield from found.values()

    @property
    def why(self) -> str:
        """Why feed-forward blocks stay as they are, where they do."""
        return f" (feed-forward blocks stay as they are: {self.left_out})" if self.left_out else ""


def choose(layers: Layers, drift: Callable[[Candidate], float]) -> tuple[Candidate, str]:
    """Choose the form and the widths that keep a share of the layers' operations and move the model's outputs least.

    The forms are tried at the most even split of operations between attention and feed-forward blocks; then the split
    of the better one is moved as long as the outputs move less. In no attention module do the scores, or all of it,
    take more operations than dense.

    Args:
        layers: what there is to choose.
        drift: tries a candidate: how far the outputs move, relative to their norm.

    Returns:
        The choice, and for the report a sentence or two on what was chosen and why.

    Raises:
        CompressionError: the share is too small.
    """
    tried: list[tuple[float, Candidate]] = []

    def attempt(candidate: Candidate) -> float:
        tried.append((drift(candidate), candidate))
        return tried[-1][0]

    starts = list(layers.starts())
    least, best = min(((attempt(each), each) for each in starts), key=lambda pair: pair[0])
    form = best.compression.form
    for step in (-STEP, STEP):
        before = best
        while (candidate := layers.candidate(form, best.attention + step)) is not None:
            found = attempt(candidate)
            if found >= least:
                break
            least, best = found, candidate
        if best is not before:
            break
    others = "; ".join(f"{each} {moved:.1%}" for moved, each in sorted(tried, key=lambda pair: pair[0])[1:])
    reason = f"Kept {best.kept:.0%} of the layers' operations at {layers.length} tokens{layers.why}: {best}."
    if others:
        reason += f" On a part of the calibration data it moves the outputs by {least:.1%}. Others tried: {others}."
    return best, reason


def typical_length(options: CalibrationOptions, batches: Sequence[Batch] = ()) -> int:
    """Return the number of tokens for which costs count.

    That is `length` where it is given, else the length that nine in ten of the calibration sequences do not exceed,
    else 128.

    Args:
        options: with `length` or without.
        batches: calibration data that are not random tokens.
    """
    masks = [batch["attention_mask"] for batch in batches if isinstance(batch.get("attention_mask"), Tensor)]
    lengths = [mask.sum(1).float().cpu() for mask in masks if mask.dim() == 2]
    if options.length is not None or not lengths:
        return options.length or TYPICAL
    return max(1, int(torch.cat(lengths).quantile(COMMON, interpolation="lower")))


def _narrowable(model: PreTrainedModel, batch: Batch) -> tuple[list[FeedForward], str]:
    """Return the feed-forward blocks that can be made narrower; where there are none, why."""
    try:
        blocks = find_feed_forward(model, batch)
        narrower_config(model, blocks, max(1, min(block.width for block in blocks) // 2))
    except UnsupportedModelError as error:
        return [], str(error).removesuffix("; leave out dff")
    return blocks, ""


def _widest(site: AttentionSite, values: ValueSite, form: Form, share: float, length: int) -> _Widths | None:
    """Return the largest widths of one module within the share of its operations, with scores no dearer than dense.

    Shared channels that cost too much are not narrowed further: they would keep much less than was asked for.
    """
    before = _dense_cost(site, values, length)
    dense_scores = _dense_scores(site, values, length)
    scores_share, values_share = SPLIT[form]
    for channels in range(values.head_width, 0, -1):
        scores, macs = None, dense_scores
        if not site.family.rotary:
            score_channels = min(site.head_width, max(1, round(channels * scores_share / values_share)))
            scores = _scores(site, form, site.heads * score_channels)
            macs = scores.macs(values.value.in_features, length)
        dv = values.key_value_heads * channels
        cost = macs + _values(values, dv, length)
        if cost <= share * before.macs:
            cheaper = macs <= dense_scores and cost <= before.macs
            if cheaper:
                return _Widths(None if scores is None else scores.rank, dv, cost)
            if form == "shared":
                return None
    return None


def _dense_cost(site: AttentionSite, values: ValueSite, length: int) -> _Widths:
    return _Widths(None, values.width, _dense_scores(site, values, length) + _values(values, values.width, length))


def _dense_scores(site: AttentionSite, values: ValueSite, length: int) -> int:
    return dense_macs(values.value.in_features, site.width, site.key_value_width, length)


def _values(values: ValueSite, dv: int, length: int) -> int:
    form = NarrowValues.of(values, dv, values.value.bias is not None)
    return form.macs(values.value.weight.shape[1], length)


def _scores(site: AttentionSite, form: Form, dk: int) -> ScoreForm:
    return FORMS[form].of(site, dk, content_bias=site.part(site.family.query).bias is not None)


def _range(widths: Iterable[int]) -> str:
    found = sorted(set(widths))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
