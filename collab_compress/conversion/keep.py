"""Choose widths and a form that keep a share of the layers' operations, by how far each moves the outputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

from transformers import PreTrainedModel

from collab_compress.architectures import (
    AttentionSite,
    DenseSite,
    ValueSite,
    find_attention,
    find_dense_attention,
    find_dense_values,
)
from collab_compress.attention import FORMS, NarrowValues
from collab_compress.calibration import Batch
from collab_compress.conversion.expand import refuse_stock
from collab_compress.conversion.feed_forward import FeedForward, block_report, find_feed_forward, narrower_config
from collab_compress.conversion.report import dense_macs, width_range
from collab_compress.errors import CompressionError, UnsupportedModelError
from collab_compress.options import Compression, Form

STEP = 0.15  # of attention's operations, by which the split between attention and feed-forward blocks is moved
NEURONS = 32  # wide blocks keep a multiple of it: products of odd widths take longer
SPLIT = {"shared": (0.85, 1.15), "per-head": (1.0, 1.0)}
"""Relative widths of queries and keys, and of values: heads have more in common in their scores than in their values,
so shared queries and keys can be narrower."""


@dataclass(frozen=True)
class Candidate:
    """Widths that keep the share of the layers' operations that was asked for.

    Args:
        compression: of the whole model; dk, dv and form are those of the first attention module, with a dk if any.
        modules: path of each attention module → its compression; empty if attention stays dense.
        attention: share of attention's operations that attention keeps.
        kept: share of the layers' operations that the model keeps.
    """

    compression: Compression
    modules: dict[str, Compression]
    attention: float
    kept: float

    def __str__(self) -> str:
        widths = {
            "dk": [module.dk for module in self.modules.values() if module.dk is not None],
            "dv": [module.dv for module in self.modules.values() if module.dv is not None],
            "dff": [] if self.compression.dff is None else [self.compression.dff],
        }
        words = [f"{name} {width_range(numbers)}" for name, numbers in widths.items() if numbers]
        form = f"form {self.compression.form}" + (" with equal heads" if self.compression.equal_heads else "")
        return ", ".join([*words, form] if widths["dk"] else words)


@dataclass(frozen=True)
class _Widths:
    """Widths of one attention module, dk None if its scores stay dense, and its multiply-accumulates."""

    dk: int | None
    dv: int
    macs: int


class _Attention:
    """The costs of one attention module for inputs of a length."""

    def __init__(self, site: AttentionSite, values: ValueSite, length: int) -> None:
        query, key = site.part(site.family.query), site.part(site.family.key)
        self.site, self.values, self.length = DenseSite(**vars(site), query=query, key=key), values, length
        self.scores_macs = dense_macs(self.site.widths, (site.width, site.key_value_width), length)
        dv = values.key_value_width
        self.dense = _Widths(None, dv, self.scores_macs + self._values_macs(dv))

    def _values_macs(self, dv: int) -> int:
        form = NarrowValues.of(self.values, dv, self.values.value.bias is not None)
        return form.macs(self.values.widths, self.length)

    def plain(self, channels: int) -> _Widths:
        """Return the widths that heads of a stock model hold, of which a content bias takes one channel."""
        site, heads = self.site, self.values.key_value_heads
        content_bias = site.query.bias is not None
        macs = dense_macs(site.widths, (site.heads * channels, heads * channels), self.length)
        dk = site.heads * (channels - content_bias)
        return _Widths(dk, heads * channels, macs + self._values_macs(heads * channels))

    def widest(self, form: Form, share: float) -> _Widths | None:
        """Return the largest widths that keep a share of the operations, whose scores cost no more than dense ones.

        None if there are none. Shared channels that cost more than dense are not narrowed further: they would keep
        much less than was asked for.
        """
        site, heads = self.site, self.values.key_value_heads
        scores_share, values_share = SPLIT[form]
        for channels in range(min(self.values.head_width, self.values.value.in_features), 0, -1):
            dk, scores_macs = None, self.scores_macs
            if not site.family.rotary:
                score_channels = min(site.head_width, max(1, round(channels * scores_share / values_share)))
                content_bias = site.query.bias is not None
                scores = FORMS[form].of(site, site.heads * score_channels, content_bias=content_bias)
                dk, scores_macs = scores.rank, scores.macs(site.widths, self.length)
            macs = scores_macs + self._values_macs(heads * channels)
            if macs <= share * self.dense.macs:
                if scores_macs <= self.scores_macs and macs <= self.dense.macs:
                    return _Widths(dk, heads * channels, macs)
                if form == "shared":
                    return None
        return None


class Layers:
    """The attention modules and feed-forward blocks of a dense model, and their costs for inputs of `length` tokens.

    Raises:
        UnsupportedModelError: an attention module cannot be converted.
    """

    def __init__(self, model: PreTrainedModel, compression: Compression, length: int, batch: Batch) -> None:
        assert compression.keep is not None
        self.keep, self.compression, self.length = compression.keep, compression, length
        where = (model, compression.modules, compression.kinds)
        self.attention = [
            _Attention(site, values, length)
            for site, values in zip(find_attention(*where), find_dense_values(*where), strict=True)
        ]
        rotary = [module.site for module in self.attention if module.site.family.rotary]
        self.rotary = len(rotary) == len(self.attention)
        narrowable = any(not site.family.keeps_scores for site in rotary)
        self.why_no_rotary = "only dk makes them narrower" if narrowable else ""
        self.why_no_heads = _why_no_heads(model, len(self.attention)) if compression.equal_heads else ""
        if not self.rotary and not self.why_no_heads:
            find_dense_attention(*where, [site.name for site in rotary])  # raises if others cannot be converted
        self.blocks, self.why_no_blocks = _narrowable(model, batch)
        reports = [block_report(model, block, 1, length) for block in self.blocks]
        self.neurons = min((block.width for block in self.blocks), default=0)
        self.macs_per_neuron = sum(report.macs_after for report in reports)
        self.macs = sum(module.dense.macs for module in self.attention) + sum(
            report.macs_before for report in reports
        )

    def candidate(self, form: Form, attention: float) -> Candidate | None:
        """Return the widths that give attention a share of its operations, and the rest to feed-forward blocks.

        None if there are none: too little is left for one of them, or the form costs more than dense attention.
        """
        if not 0 < attention < 1 + STEP or (attention < 1 and self.why_no_heads):
            return None
        if attention < 1 and self.compression.equal_heads:
            widths = self._plain(attention)
        else:
            candidates = [
                module.dense if attention >= 1 else module.widest(form, attention) for module in self.attention
            ]
            widths = [width for width in candidates if width is not None]
        if len(widths) < len(self.attention):
            return None
        spent = sum(module.macs for module in widths)
        dff = self._neurons(self.keep * self.macs - spent)
        if (dff is None and self.blocks) or (not self.blocks and attention > self.keep):
            return None
        modules = {}
        for module, chosen in zip(self.attention, widths, strict=True):
            if attention < 1:
                modules[module.site.name] = self._compression(form, chosen.dk, chosen.dv, dff)
        own = list(modules.values()) or [self._compression(form, None, None, dff)]
        compression = next((chosen for chosen in own if chosen.dk is not None), own[0])
        return Candidate(compression, modules, attention, (spent + (dff or 0) * self.macs_per_neuron) / self.macs)

    def _plain(self, share: float) -> list[_Widths]:
        """Return the widths of the widest heads, alike in all modules, that keep a share; empty if there are none."""
        macs = share * sum(module.dense.macs for module in self.attention)
        for channels in range(self.attention[0].site.head_width - 1, 0, -1):
            widths = [module.plain(channels) for module in self.attention]
            if all(width.dk for width in widths) and sum(width.macs for width in widths) <= macs:
                return widths
        return []

    def _neurons(self, macs: float) -> int | None:
        """Return the number of neurons that each block can have; None for none."""
        neurons = int(macs / self.macs_per_neuron + 1e-9) if self.blocks else 0
        if neurons > 8 * NEURONS:
            neurons -= neurons % NEURONS
        return min(neurons, self.neurons) if neurons > 0 else None

    def _compression(self, form: Form, dk: int | None, dv: int | None, dff: int | None) -> Compression:
        compression = self.compression
        if dk is None or len(FORMS[form].solvers) == 1:  # closed form
            compression = compression.with_solver(method="als", effort="best", sweeps=None, tolerance=None)
        equal = compression.equal_heads and dk is not None
        form = "shared" if dk is None else form
        return replace(compression, keep=None, dk=dk, dv=dv, dff=dff, form=form, equal_heads=equal)

    def starts(self) -> Iterator[Candidate]:
        """Yield the different candidates, one of each form, with the most even split.

        Raises:
            CompressionError: there is none.
        """
        shares = [self.keep + step for step in sorted((count * STEP for count in range(-6, 7)), key=abs)]
        starts: dict[str, Candidate] = {}
        forms: tuple[Form, ...] = ("shared",) if self.rotary else get_args(Form)  # rotary scores stay dense
        if self.compression.equal_heads:
            forms = ("per-head",)
        for form in forms:
            start = next(filter(None, (self.candidate(form, share) for share in shares)), None)
            if start is not None:
                starts[str(start)] = start
        if not starts:
            raise CompressionError(
                f"keep is {self.keep}: no widths of {len(self.attention)} attention modules and {len(self.blocks)} "
                f"feed-forward blocks keep so little at {self.length} tokens{self.why}; pass more, or dk, dv and dff"
            )
        yield from starts.values()

    @property
    def why(self) -> str:
        """Why attention or feed-forward blocks stay as they are, if they do."""
        reasons = {
            "attention stays as it is": self.why_no_heads,
            "queries and keys with a rotary embedding stay dense": self.why_no_rotary,
            "feed-forward blocks stay as they are": self.why_no_blocks,
        }
        words = [f"{what}: {why}" for what, why in reasons.items() if why]
        return f" ({'; '.join(words)})" if words else ""


def choose(layers: Layers, drift: Callable[[Candidate], float]) -> tuple[Candidate, str]:
    """Choose the form and the widths that keep a share of the layers' operations and move the model's outputs least.

    The forms are tried at the most even split of operations between attention and feed-forward blocks; then the split
    of the better one is moved as long as the outputs move less. Neither a module nor its scores cost more than dense.

    Args:
        layers: of the model.
        drift: tries a candidate, and returns the relative error of the outputs.

    Returns:
        The choice, and a sentence or two for the report on what was chosen and why.
    """
    tried = [(drift(candidate), candidate) for candidate in layers.starts()]
    least, best = min(tried, key=lambda pair: pair[0])
    for step in (-STEP, STEP):
        start = best
        while (candidate := layers.candidate(start.compression.form, best.attention + step)) is not None:
            tried.append((drift(candidate), candidate))
            if tried[-1][0] >= least:
                break
            least, best = tried[-1]
        if best is not start:
            break
    others = "; ".join(f"{other} {error:.1%}" for error, other in sorted(tried, key=lambda pair: pair[0])[1:])
    reason = f"Kept {best.kept:.0%} of the layers' operations at {layers.length} tokens{layers.why}: {best}."
    if others:
        reason += f" On a part of the calibration data it moves the outputs by {least:.1%}. Others tried: {others}."
    return best, reason


def _why_no_heads(model: PreTrainedModel, modules: int) -> str:
    """Return why a stock model of this kind has no narrower heads, or an empty text if it has."""
    try:
        refuse_stock(model)
    except CompressionError as error:
        return str(error).partition("; ")[0].partition(" (")[0]
    return "" if modules == len(find_attention(model)) else "heads of a stock model are narrower in all modules alike"


def _narrowable(model: PreTrainedModel, batch: Batch) -> tuple[list[FeedForward], str]:
    """Return the feed-forward blocks that can be made narrower, or why there are none."""
    try:
        blocks = find_feed_forward(model, batch)
        narrower_config(model, blocks, max(1, min(block.width for block in blocks) // 2))
    except UnsupportedModelError as error:
        return [], str(error).removesuffix("; leave out dff")
    return blocks, ""
