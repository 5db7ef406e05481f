"""Choose widths that keep a share of the layers' operations, by how far each moves the outputs."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from collab_compress.architectures import (
    AttentionSite,
    DenseSite,
    ValueSite,
    find_attention,
    find_dense_attention,
    find_dense_values,
)
from collab_compress.attention import NarrowValues, SharedScores
from collab_compress.calibration import Batch
from collab_compress.conversion.feed_forward import FeedForward, block_report, find_feed_forward, narrower_config
from collab_compress.conversion.report import dense_macs, width_range
from collab_compress.errors import CompressionError, UnsupportedModelError
from collab_compress.options import Compression

STEP = 0.15  # of attention's operations, by which the split between attention and feed-forward blocks is moved
NEURONS = 32  # wide blocks keep a multiple of it: products of odd widths take longer
SPLIT = 0.85 / 1.15  # dk over dv: heads have more in common in their scores than in their values
LONG = 512  # tokens beyond which heads are made narrower too, because most operations are those of the scores


@dataclass(frozen=True)
class Candidate:
    """Widths that keep the share of the layers' operations that was asked for.

    Args:
        compression: of the whole model; dk and dv are those of the first attention module, with a dk if any.
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
        return ", ".join(f"{name} {width_range(numbers)}" for name, numbers in widths.items() if numbers)


@dataclass(frozen=True)
class _Widths:
    """Widths of one attention module, dk None if its scores stay dense, and its multiply-accumulates."""

    dk: int | None
    head_dim: int | None
    dv: int
    macs: int


class _Attention:
    """The costs of one attention module for inputs of a length."""

    def __init__(self, site: AttentionSite, values: ValueSite, length: int) -> None:
        query, key = site.part(site.family.query), site.part(site.family.key)
        self.site, self.values, self.length = DenseSite(**vars(site), query=query, key=key), values, length
        self.scores_macs = dense_macs(self.site.widths, (site.width, site.key_value_width), length)
        dv = values.key_value_width
        self.dense = _Widths(None, None, dv, self.scores_macs + self._values_macs(dv))

    def _values_macs(self, dv: int) -> int:
        form = NarrowValues.of(self.values, dv, self.values.value.bias is not None)
        return form.macs(self.values.widths, self.length)

    def widest(self, share: float) -> _Widths | None:
        """Return the largest widths that keep a share of the operations; None if there are none."""
        site, heads = self.site, self.values.key_value_heads
        for channels in range(min(self.values.head_width, self.values.value.in_features), 0, -1):
            dk, head_dim, scores_macs = None, None, self.scores_macs
            if not site.family.rotary:
                dk = site.heads * min(site.head_width, max(1, round(channels * SPLIT)))
                content_bias = site.query.bias is not None
                head_dim = max(channels, 1 + content_bias) if self.length > LONG else None
                scores_macs = SharedScores.of(site, dk, head_dim, content_bias).macs(site.widths, self.length)
            macs = scores_macs + self._values_macs(heads * channels)
            if macs <= min(share, 1) * self.dense.macs:
                return _Widths(dk, head_dim, heads * channels, macs)
        return None


class Layers:
    """The attention modules and feed-forward blocks of a dense model, and their costs for inputs of `length` tokens.

    Raises:
        UnsupportedModelError: an attention module cannot be converted.
    """

    def __init__(self, model: PreTrainedModel, compression: Compression, length: int, batch: Batch) -> None:
        assert compression.keep is not None
        self.keep, self.compression, self.length = compression.keep, compression, length
        where = (model, compression.modules)
        self.attention = [
            _Attention(site, values, length)
            for site, values in zip(find_attention(*where), find_dense_values(*where), strict=True)
        ]
        rotary = [module.site for module in self.attention if module.site.family.rotary]
        self.rotary = len(rotary) == len(self.attention)
        narrowable = any(not site.family.keeps_scores for site in rotary)
        self.why_no_rotary = "only dk makes them narrower" if narrowable else ""
        if not self.rotary:
            find_dense_attention(*where, [site.name for site in rotary])  # raises if others cannot be converted
        self.blocks, self.why_no_blocks = _narrowable(model, batch)
        reports = [block_report(model, block, 1, length) for block in self.blocks]
        self.neurons = min((block.width for block in self.blocks), default=0)
        self.macs_per_neuron = sum(report.macs_after for report in reports)
        self.macs = sum(module.dense.macs for module in self.attention) + sum(
            report.macs_before for report in reports
        )

    def candidate(self, attention: float) -> Candidate | None:
        """Return the widths that give attention a share of its operations, and the rest to feed-forward blocks.

        None if there are none: too little is left for one of them.
        """
        if not 0 < attention < 1 + STEP:
            return None
        candidates = [module.dense if attention >= 1 else module.widest(attention) for module in self.attention]
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
                modules[module.site.name] = self._compression(chosen, dff)
        own = list(modules.values()) or [self._compression(None, dff)]
        compression = next((chosen for chosen in own if chosen.dk is not None), own[0])
        return Candidate(compression, modules, attention, (spent + (dff or 0) * self.macs_per_neuron) / self.macs)

    def _neurons(self, macs: float) -> int | None:
        """Return the number of neurons that each block can have; None for none."""
        neurons = int(macs / self.macs_per_neuron + 1e-9) if self.blocks else 0
        if neurons > 8 * NEURONS:
            neurons -= neurons % NEURONS
        return min(neurons, self.neurons) if neurons > 0 else None

    def _compression(self, widths: _Widths | None, dff: int | None) -> Compression:
        dk, head_dim, dv = (None,) * 3 if widths is None else (widths.dk, widths.head_dim, widths.dv)
        solver = self.compression.solver
        if dk is None:  # no solver iterates
            solver = replace(solver, method="als", sweeps=None)
        return replace(self.compression, keep=None, dk=dk, head_dim=head_dim, dv=dv, dff=dff, solver=solver)

    def start(self) -> Candidate:
        """Return the candidate with the most even split.

        Raises:
            CompressionError: there is none.
        """
        shares = [self.keep + step for step in sorted((count * STEP for count in range(-6, 7)), key=abs)]
        start = next(filter(None, map(self.candidate, shares)), None)
        if start is None:
            raise CompressionError(
                f"keep is {self.keep}: no widths of {len(self.attention)} attention modules and {len(self.blocks)} "
                f"feed-forward blocks keep so little at {self.length} tokens{self.why}; pass more, or dk, dv and dff"
            )
        return start

    @property
    def why(self) -> str:
        """Why attention or feed-forward blocks stay as they are, if they do."""
        reasons = {
            "queries and keys with a rotary embedding stay dense": self.why_no_rotary,
            "feed-forward blocks stay as they are": self.why_no_blocks,
        }
        words = [f"{what}: {why}" for what, why in reasons.items() if why]
        return f" ({'; '.join(words)})" if words else ""


def choose(layers: Layers, drift: Callable[[Candidate], float]) -> tuple[Candidate, str]:
    """Choose the widths that keep a share of the layers' operations and move the model's outputs least.

    The split of operations between attention and feed-forward blocks is moved from the most even one as long as the
    outputs move less.

    Args:
        layers: of the model.
        drift: tries a candidate, and returns the relative error of the outputs.

    Returns:
        The choice, and a sentence or two for the report on what was chosen and why.
    """
    best = layers.start()
    least = drift(best)
    tried = [(least, best)]
    for step in (-STEP, STEP):
        start = best
        while (candidate := layers.candidate(best.attention + step)) is not None:
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


def _narrowable(model: PreTrainedModel, batch: Batch) -> tuple[list[FeedForward], str]:
    """Return the feed-forward blocks that can be made narrower, or why there are none."""
    try:
        blocks = find_feed_forward(model, batch)
        narrower_config(model, blocks, max(1, min(block.width for block in blocks) // 2))
    except UnsupportedModelError as error:
        return [], str(error).removesuffix("; leave out dff")
    return blocks, ""
