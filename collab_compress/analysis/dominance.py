"""Loss of score without some heads: the dominant head of each layer, and the pruning curve."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis.stream import Batches, Means, Progress, read_heads, unpadded_vectors, with_progress
from collab_compress.architectures import KINDS, AttentionSite, Kind, find_attention
from collab_compress.attention.run import HeadCall
from collab_compress.calibration import Batch, as_batch
from collab_compress.calibration.batches import is_divisible, sequence_count, slice_batch
from collab_compress.conversion.drift import main_output, token_mask
from collab_compress.errors import HeadError
from collab_compress.heads import HeadMask, Reading, least_important, masks_without

Score: TypeAlias = Callable[[PreTrainedModel], float]
Masks: TypeAlias = dict[str, Tensor]
SHARES = tuple(step / 10 for step in range(11))


@dataclass(frozen=True)
class Dominance:
    """How a score changes when one head at a time is silenced.

    Args:
        baseline: the score with all heads.
        changes: module path → score without head h, less the baseline, (H,) in float64; NaN for heads that were not
            silenced.
        kinds: module path → attention type.
        greater_is_better: whether a greater score is a better one.

    Example:
        >>> changes = {"a": torch.tensor([0.25, 0.5]), "b": torch.tensor([0.75, 0.0])}
        >>> dominance = Dominance(0.0, changes, {"a": "encoder", "b": "encoder"}, greater_is_better=False)
        >>> dominance.dominant, dominance.mean_change({"a": 0, "b": 1})
        ({'a': 1, 'b': 0}, {'encoder': 0.125})
    """

    baseline: float
    changes: dict[str, Tensor]
    kinds: dict[str, Kind]
    greater_is_better: bool

    @property
    def dominant(self) -> dict[str, int]:
        """The head whose loss costs most, of each module in which heads were silenced."""
        sign = 1 if self.greater_is_better else -1
        return {
            name: int((sign * changes).nan_to_num(nan=inf).argmin())
            for name, changes in self.changes.items()
            if not bool(changes.isnan().all())
        }

    def mean_change(self, heads: Mapping[str, int]) -> dict[Kind, float]:
        """Return the mean change over layers without one head of each, for each attention type (Table 4).

        Args:
            heads: module path → head. Take `dominant` of a `Dominance` measured on other data: on the data that
                chose them, the change without the dominant heads looks larger than it is.
        """
        changes: dict[Kind, list[float]] = {}
        for name, head in heads.items():
            changes.setdefault(self.kinds[name], []).append(float(self.changes[name][head]))
        return {kind: sum(changes[kind]) / len(changes[kind]) for kind in KINDS if kind in changes}


@dataclass(frozen=True)
class PruningPoint:
    """One point of a pruning curve.

    Args:
        share: requested share of silenced heads.
        heads: module path → silenced heads.
        removed: number of silenced heads.
        score: the score without them.

    Example:
        >>> (point,) = pruning_curve(model, random_importance(model), batches=[batch], shares=(1,))
        >>> point.heads, point.removed
        ({'encoder.layer.0.attention.self': [0, 1, 2], 'encoder.layer.1.attention.self': [0, 1, 2]}, 6)
    """

    share: float
    heads: dict[str, list[int]]
    removed: int
    score: float


def dominant_heads(
    model: PreTrainedModel,
    score: Score | None = None,
    *,
    batches: Batches | None = None,
    greater_is_better: bool = True,
    kinds: Collection[Kind] = KINDS,
    heads: Mapping[str, int] | None = None,
    reference: Batches | None = None,
    progress: Progress = False,
) -> Dominance:
    """Return how the score changes when one head at a time is silenced ("Scheduled DropHead", Table 4).

    Zeros, as in the paper, put the next layer's input out of its usual range. With `reference`, a silenced head gives
    its mean output ("Interpretability in the Wild", Wang et al., 2022), which keeps that input in its range and
    removes only what the head reads from its own.

    Other arguments and errors are those of `head_covariances`.

    Args:
        model: stock or edited; its heads may be masked already.
        score: function from a model to its score, as BLEU or accuracy; called once for all heads, and once without
            each.
        batches: in place of a score: keyword arguments for the model, read once. The score is then the drift of the
            outputs, ‖without − with‖ / ‖with‖ over tokens that are no padding; less is better.
        greater_is_better: whether a greater `score` is better; False for perplexity.
        kinds: attention types.
        heads: module path → the one head to silence there, as a dominant head on other data; every head of every
            module if not given.
        reference: keyword arguments for the model; a silenced head gives its mean output over the tokens of these
            batches, or zeros if not given.
        progress: as for `with_progress`, over scores, or over batches for the drift.

    Raises:
        HeadError: neither or both of score and batches, or a score that is no finite number.

    Example:
        >>> dominance = dominant_heads(model, batches=[batch])
        >>> dominance.baseline, dominance.changes["encoder.layer.0.attention.self"].shape
        (0.0, torch.Size([3]))
    """
    sites = find_attention(model, kinds=kinds)
    every = [(site.name, head) for site in sites for head in range(site.heads)]
    single = every if heads is None else list(heads.items())
    masks: list[Masks] = [{}, *(masks_without(model, {name: [head]}) for name, head in single)]
    with _ablation(model, reference) as mask:
        baseline, *scores = _scores(model, mask, masks, score, batches, progress)
    changes = {site.name: torch.full((site.heads,), nan, dtype=torch.float64, device="cpu") for site in sites}
    for (name, head), value in zip(single, scores, strict=True):
        changes[name][head] = value - baseline
    kind_of = {site.name: site.kind for site in sites}
    return Dominance(baseline, changes, kind_of, greater_is_better and score is not None)


def pruning_curve(
    model: PreTrainedModel,
    importance: Mapping[str, Tensor],
    score: Score | None = None,
    *,
    batches: Batches | None = None,
    shares: Sequence[float] = SHARES,
    reference: Batches | None = None,
    progress: Progress = False,
) -> list[PruningPoint]:
    """Return the score without more and more heads, the least important first.

    Figure 3 of "Scheduled DropHead", with the importance of Michel et al., 2019. Masks silence the heads: with zeros
    the outputs are those after `prune_heads_`, and the model does not change. Other arguments and errors are those
    of `dominant_heads`.

    Args:
        importance: module path → (H,) from `head_importance`, measured on other data than the score; modules without
            importance keep their heads.
        shares: shares of the heads, 0 to 1, each rounded to a number of heads.

    Raises:
        HeadError: a share, a module or an importance is wrong.

    Example:
        >>> importance = random_importance(model)
        >>> points = pruning_curve(model, importance, batches=[batch], shares=(0, 0.5))
        >>> [(point.share, point.removed) for point in points], points[0].score
        ([(0, 0), (0.5, 3)], 0.0)
    """
    silenced = [least_important(importance, share) for share in shares]
    masks = [masks_without(model, heads) for heads in silenced]
    with _ablation(model, reference) as mask:
        scores = _scores(model, mask, masks, score, batches, progress)
    return [
        PruningPoint(share, heads, sum(map(len, heads.values())), value)
        for share, heads, value in zip(shares, silenced, scores, strict=True)
    ]


def random_importance(model: PreTrainedModel, *, kinds: Collection[Kind] = KINDS, seed: int = 0) -> dict[str, Tensor]:
    """Return a random importance for each head, with which `pruning_curve` gives the baseline of an importance.

    Returns:
        Module path → (H,), uniform between 0 and 1.

    Raises:
        UnsupportedModelError: the model's family is not known, or it has no attention of these types.

    Example:
        >>> random_importance(model, seed=1).keys()
        dict_keys(['encoder.layer.0.attention.self', 'encoder.layer.1.attention.self'])
    """
    generator = torch.Generator().manual_seed(seed)
    sites = find_attention(model, kinds=kinds)
    return {site.name: torch.rand(site.heads, generator=generator, device="cpu") for site in sites}


def split_sequences(batches: Batches) -> tuple[list[Batch], list[Batch]]:
    """Return two halves of the sequences of batches: one to choose heads on, one to score the model without them.

    Batches of several sequences are split in two; others go to one side and the other in turn.

    Example:
        >>> choosing, scoring = split_sequences([batch])
        >>> torch.equal(scoring[0]["input_ids"], batch["input_ids"][1:])
        True
    """
    choosing: list[Batch] = []
    scoring: list[Batch] = []
    for batch in map(as_batch, batches):
        if sequence_count(batch) > 1 and is_divisible(batch):
            choosing.append(slice_batch(batch, slice(0, None, 2)))
            scoring.append(slice_batch(batch, slice(1, None, 2)))
        else:
            (choosing if len(choosing) <= len(scoring) else scoring).append(batch)
    return choosing, scoring


class AblatedHeads(HeadMask):
    """A `HeadMask` whose silenced heads give other outputs in place of zeros: ξ_h · Z_h + (1 − ξ_h) · Z'_h.

    Args:
        model: stock or edited.
        means: module path → Z' (H, s).
    """

    def __init__(self, model: PreTrainedModel, means: Mapping[str, Tensor]) -> None:
        self._means = means
        super().__init__(model)

    def act(self, site: AttentionSite, outputs: Tensor, call: HeadCall) -> Tensor:
        """Replace the silenced heads of outputs (B, T, H, s)."""
        name = site.name
        mask = self._masks.get(name)
        if mask is None:
            return outputs
        if name not in self._means:
            raise HeadError(f"{name} does not run on the reference batches; pass some on which it does")
        others = self._means[name].to(outputs)
        masked: Tensor = super().act(site, outputs, call)
        return masked + others * (1 - mask.to(outputs))[:, None]


def _ablation(model: PreTrainedModel, reference: Batches | None) -> HeadMask:
    if reference is None:
        return HeadMask(model)
    means = Means("outputs", _summed_outputs)
    for (readings,) in read_heads([model], reference, "outputs"):
        means.add([(reading.site.name, reading) for _, reading in readings])  # one mean for all uses of a module
    return AblatedHeads(model, means.result())


def _summed_outputs(reading: Reading) -> tuple[Tensor, int]:
    vectors = unpadded_vectors(reading, "outputs").double()  # (N, H, s)
    return vectors.sum(0), len(vectors)


def _scores(
    model: PreTrainedModel,
    mask: HeadMask,
    masks: Sequence[Masks],
    score: Score | None,
    batches: Batches | None,
    progress: Progress,
) -> list[float]:
    """Return the score of the model under each of several masks."""
    if (score is None) == (batches is None):
        raise HeadError("pass either score=, a function of the model, or batches=, on which its outputs drift")
    if score is None:
        return _drifts(model, mask, masks, batches or (), progress)
    scores = []
    for silenced in with_progress(masks, progress, "scores"):
        mask.set(silenced)
        value = float(score(model))
        if not isfinite(value):
            raise HeadError(f"the score is {value}; expected a finite number")
        scores.append(value)
    return scores


def _drifts(
    model: PreTrainedModel, mask: HeadMask, masks: Sequence[Masks], batches: Batches, progress: Progress
) -> list[float]:
    """Return the drift of the outputs under each mask; every batch is read once."""
    differences, norm = [0.0] * len(masks), 0.0
    for batch in map(as_batch, with_progress(batches, progress, "batches")):
        mask.set({})
        dense = _unpadded_output(model, batch)
        norm += float(dense.square().sum())
        for place, silenced in enumerate(masks):
            if silenced:
                mask.set(silenced)
                differences[place] += float((_unpadded_output(model, batch) - dense).square().sum())
    if not norm:
        raise HeadError("no drift can be measured: there are no batches, or the outputs are all zero")
    return [(difference / norm) ** 0.5 for difference in differences]


def _unpadded_output(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the model's main output in float64, without padding where it has a token axis."""
    name, output = main_output(model, batch)
    mask = token_mask(model, batch, name, output)
    return (output if mask is None else output[mask]).cpu().double()
