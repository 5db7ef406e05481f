"""Loss of score without some heads: the dominant head of each layer, and the pruning curve."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from statistics import fmean
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis.stream import Batches, Progress, with_progress
from collab_compress.architectures import KINDS, Kind, find_attention
from collab_compress.calibration import Batch, as_batch
from collab_compress.calibration.batches import is_divisible, sequence_count, slice_batch
from collab_compress.calibration.gather import main_output, read_outputs, token_mask
from collab_compress.errors import HeadError
from collab_compress.heads import HeadMask, least_important, masks_without

Score: TypeAlias = Callable[[PreTrainedModel], float]
PRUNED_SHARES = tuple(step / 10 for step in range(11))


@dataclass(frozen=True)
class Dominance:
    """How a score changes when one head at a time is silenced.

    Args:
        baseline: the score with all heads.
        changes: module path → score without head h, less the baseline, (H,) in float64; NaN for heads that were not
            silenced.
        kinds: module path → attention type.
        greater_is_better: whether a greater score is a better one.
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
        changes: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
        for name, head in heads.items():
            changes[self.kinds[name]].append(float(self.changes[name][head]))
        return {kind: fmean(values) for kind, values in changes.items() if values}


@dataclass(frozen=True)
class PruningPoint:
    """One point of a pruning curve.

    Args:
        share: requested share of silenced heads.
        heads: module path → silenced heads.
        removed: number of silenced heads.
        score: the score without them.
        random_score: the score without as many random heads, mean over `random_orders`; NaN if not measured.
    """

    share: float
    heads: dict[str, list[int]]
    removed: int
    score: float
    random_score: float = nan


def dominant_heads(
    model: PreTrainedModel,
    score: Score | None = None,
    *,
    batches: Batches | None = None,
    greater_is_better: bool = True,
    kinds: Collection[Kind] = KINDS,
    heads: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> Dominance:
    """Return how the score changes when one head at a time is silenced ("Scheduled DropHead", Table 4).

    Other arguments and errors are those of `head_covariances`.

    Args:
        model: stock or edited; its heads may be masked already.
        score: function from a model to its score, as BLEU or accuracy; called once for all heads, and once without
            each.
        batches: instead of a score: keyword arguments for the model, read once. The score is then the output error,
            ‖without − with‖ / ‖with‖ over tokens that are no padding; less is better.
        greater_is_better: whether a greater `score` is better; False for perplexity.
        kinds: attention types.
        heads: module path → the one head to silence there, as a dominant head on other data; every head of every
            module if not given.
        progress: called with the number of finished scores, or of batches for the output error, and their total (None
            if unknown).

    Example:
        >>> dominance = dominant_heads(model, batches=[batch])
        >>> dominance.baseline, dominance.changes["encoder.layer.0.attention.self"].shape
        (0.0, torch.Size([3]))
    """
    sites = find_attention(model, kinds=kinds)
    every = [(site.name, head) for site in sites for head in range(site.heads)]
    single = every if heads is None else list(heads.items())
    silenced: list[dict[str, list[int]]] = [{}, *({name: [head]} for name, head in single)]
    baseline, *scores = _measure_scores(model, silenced, score, batches, progress)
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
    shares: Sequence[float] = PRUNED_SHARES,
    random_orders: int = 0,
    progress: Progress | None = None,
) -> list[PruningPoint]:
    """Return the score without more and more heads, the least important first.

    Figure 3 of "Scheduled DropHead", with the importance of Michel et al., 2019. Masks silence the heads: the
    outputs are those after `prune_heads_`, and the model does not change. Other arguments and errors are those
    of `dominant_heads`.

    Args:
        importance: module path → (H,) from `head_importance`, measured on other data than the score; modules without
            importance keep their heads.
        shares: shares of the heads, 0 to 1, each rounded to a number of heads.
        random_orders: number of random orders of heads (`random_importance`) to score too.

    Example:
        >>> importance = random_importance(model)
        >>> points = pruning_curve(model, importance, batches=[batch], shares=(0, 0.5))
        >>> [(point.share, point.removed) for point in points], points[0].score
        ([(0, 0), (0.5, 3)], 0.0)
    """
    orders = [importance, *(random_importance(model, seed=seed) for seed in range(random_orders))]
    silenced = [least_important(order, share) for share in shares for order in orders]
    scores = _measure_scores(model, silenced, score, batches, progress)
    points = []
    for index, share in enumerate(shares):
        start = index * len(orders)
        heads, (value, *random_scores) = silenced[start], scores[start : start + len(orders)]
        random_score = fmean(random_scores) if random_scores else nan
        points.append(PruningPoint(share, heads, sum(map(len, heads.values())), value, random_score))
    return points


def random_importance(model: PreTrainedModel, *, kinds: Collection[Kind] = KINDS, seed: int = 0) -> dict[str, Tensor]:
    """Return a random importance for each head, with which `pruning_curve` gives the baseline of an importance.

    Returns:
        Module path → (H,), uniform between 0 and 1.

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


def _measure_scores(
    model: PreTrainedModel,
    silenced: Sequence[Mapping[str, list[int]]],
    score: Score | None,
    batches: Batches | None,
    progress: Progress | None,
) -> list[float]:
    """Return the score of the model without some heads, module path → heads, for each of several choices."""
    if (score is None) == (batches is None):
        raise HeadError(
            "pass either score=, a function of the model, or batches=, on which changes of its outputs are measured"
        )
    masks = [masks_without(model, heads) for heads in silenced]
    with HeadMask(model) as mask:
        if score is None:
            return _measure_output_errors(model, mask, masks, batches or (), progress)
        scores = []
        for without in with_progress(masks, progress):
            mask.set(without)
            scores.append(float(score(model)))
            if not isfinite(scores[-1]):
                raise HeadError(f"the score is {scores[-1]}; expected a finite number")
    return scores


def _measure_output_errors(
    model: PreTrainedModel,
    mask: HeadMask,
    masks: Sequence[dict[str, Tensor]],
    batches: Batches,
    progress: Progress | None,
) -> list[float]:
    """Return the output error under each mask; every batch is read once."""
    differences, norm = [0.0] * len(masks), 0.0
    for batch in map(as_batch, with_progress(batches, progress)):
        mask.set({})
        dense = _read_output(model, batch)
        norm += float(dense.square().sum())
        for index, without in enumerate(masks):
            if without:
                mask.set(without)
                differences[index] += float((_read_output(model, batch) - dense).square().sum())
    if not norm:
        raise HeadError("no output error can be measured: there are no batches, or the outputs are all zero")
    return [(difference / norm) ** 0.5 for difference in differences]


def _read_output(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the model's main output in float64, without padding where it has a token axis."""
    name, output = main_output(model, read_outputs(model, batch))
    mask = token_mask(model, batch, name, output)
    return (output if mask is None else output[mask]).cpu().double()
