"""Sections on single heads: what they share, attend to, and are worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress import analysis
from collab_compress.calibration import Batch
from collab_compress.calibration.batches import sequence_count
from collab_compress.conversion.expand import read_factors
from collab_compress.errors import CalibrationError, HeadError
from collab_compress.heads import alphas_of, head_importance
from collab_compress.report.section import Curves, Heatmaps, Label, Progress, Read, Section, Table, short

COLOUR_QUANTILE = 0.98  # of mixing entries at which the colour scale ends; a few entries are far larger
MAX_MAP_TOKENS = 40  # a longer attention map is cut
MAX_MAP_MODULES = 12  # of attention maps, at most
PATTERN_PICTURES = {
    "entropy": ("Entropy of attention", "Faint cells are heads that attend to few tokens (Clark et al., 2019)."),
    "distance": ("Distance of attention", "Faint cells are heads that attend near by (Vig and Belinkov, 2019)."),
    "previous token": ("Attention to the previous token", "Strong cells look one token back (Clark et al., 2019)."),
    "first token": ("Attention to the first token", "Strong cells rest on the first token (Xiao et al., 2024)."),
    "induction": ("Induction", "Strong cells continue what they have seen before (Olsson et al., 2022)."),
}
"""Pattern → title and reading of its picture."""

NOT_PROBABILITIES = ("entropy", "distance")  # the other patterns are probabilities
STRONG_PROBABILITY = 0.5  # from this probability on a head attends mostly there
RANDOM_ORDERS = 3  # orders of random heads in the pruning curve


@dataclass(frozen=True)
class TaskScore:
    """A score of a model on a task.

    Args:
        name: of the score, of which more is better, as `accuracy on 408 rows of mrpc`.
        score: function from a model to its score.
        choose: the same on other data, which chooses heads.
        batches: labelled batches that choose heads, for the gradient of the loss.
    """

    name: str
    score: Callable[[PreTrainedModel], float]
    choose: Callable[[PreTrainedModel], float]
    batches: Sequence[Batch]


def mixing(model: PreTrainedModel, label: Label) -> Section:
    """Return mixing matrices and alphas, and numbers that describe them."""
    mixed = (
        {label(name): alphas for name, alphas in analysis.alpha_matrices(model).items()} if alphas_of(model) else {}
    )
    shared = {}
    if read_factors(model):
        shared = {label(name): matrix for name, matrix in analysis.mixing_matrices(model, order=True).items()}
    if not shared and not mixed:
        raise HeadError("heads of a dense model share no components, and they are not mixed: there is no such matrix")
    pictures, highlights = [], []
    if shared:
        sizes = torch.cat([matrix.abs().flatten() for matrix in shared.values()])
        high = float(sizes[sizes > 0].quantile(COLOUR_QUANTILE)) if bool(sizes.any()) else 1.0
        maps = {f"layer {layer}": matrix.tolist() for layer, matrix in shared.items()}
        reading = (
            "A column of one strong cell belongs to one head; the largest 2 % are cut off (Collaborate, Fig. 2)."
        )
        pictures.append(Heatmaps("Mixing matrices", reading, maps, high, True, column_label="component, by strength"))
        users, heads = fmean(map(_count_users, shared.values())), max(map(len, shared.values()))
        highlights.append(f"A shared component serves {users:.1f} of {heads} heads on average.")
    if mixed:
        high = max(float(alphas.abs().max()) for alphas in mixed.values())
        maps = {f"layer {layer}": alphas.tolist() for layer, alphas in mixed.items()}
        reading = "A strong diagonal keeps heads as they are; cells off it mix head j into head i (Rotation, Fig. 3)."
        pictures.append(Heatmaps("Alphas", reading, maps, high, True, "head i that leaves", "head j that enters"))
    return Section(
        "What heads share",
        "A row is a head. An entry is the strength of a component of the shared queries and keys in this head, or "
        "the weight of another head in its output (alphas).",
        pictures=pictures,
        highlights=highlights,
    )


def _count_users(matrix: Tensor) -> float:
    """Return how many heads use a component, mean over used ones: 1 for one head, H for all of them equally."""
    squares = matrix.square()
    used = squares[:, squares.sum(0) > 0]
    return float((used.sum(0).square() / used.square().sum(0)).mean()) if used.numel() else 0.0


def attention_maps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    sentence: str | tuple[str, str] | None,
    label: Label,
) -> Section:
    """Return the attention probabilities of each head in one sentence."""
    if tokenizer is None or sentence is None:
        raise HeadError("there is no sentence to read, or no tokenizer to read it with")
    text, target = sentence, None
    if isinstance(sentence, tuple) and model.config.is_encoder_decoder:
        text, target = sentence
    maps = analysis.attention_maps(model, tokenizer, text, target=target)
    chosen = list(maps)[:: -(-len(maps) // MAX_MAP_MODULES)]
    of_heads = {
        f"{label(name)} · {head}": weights[:MAX_MAP_TOKENS, :MAX_MAP_TOKENS].tolist()
        for name in chosen
        for head, weights in enumerate(maps[name].weights)
    }
    reading = (
        "Layer · head. A diagonal looks at the token itself, a line next to it at a neighbour, a column at one token."
    )
    picture = Heatmaps(
        "Every head's attention", reading, of_heads, row_label="query token", column_label="token attended to"
    )
    words = sentence if isinstance(sentence, str) else "” and “".join(sentence)
    queries = " ".join(maps[chosen[0]].queries[:MAX_MAP_TOKENS])
    return Section(
        "What heads attend to",
        f"Attention probabilities of every head for “{words}”, read as {queries}, in {len(chosen)} of {len(maps)} "
        "modules (Diversity, Fig. 1).",
        pictures=[picture],
    )


def patterns(model: PreTrainedModel, read: Read, label: Label) -> Section:
    """Return how spread the attention of each head is, how far it reaches, and which tokens it goes to."""
    measured = analysis.head_patterns(model, read("patterns"))
    with suppress(HeadError, CalibrationError):  # the model reads no tokens, or not as many
        measured["induction"] = analysis.induction(model)
    rows: dict[str, dict[str, Any]] = {name: {"layer": label(name)} for name in measured["entropy"]}
    pictures, highlights = [], []
    for pattern, heads in measured.items():
        for name, row in rows.items():
            row[pattern] = float(heads[name].mean()) if name in heads else None
        if not heads:  # of cross-attention there is the entropy only
            continue
        values = torch.cat(list(heads.values()))
        maps = {"": [vector.tolist() for vector in heads.values()]}
        high = float(values.max()) if pattern in NOT_PROBABILITIES else 1.0
        layers = list(map(label, heads))
        pictures.append(Heatmaps(*PATTERN_PICTURES[pattern], maps, high, row_label="layer", row_names=layers))
        if pattern not in NOT_PROBABILITIES:
            aim = "token after an earlier copy" if pattern == "induction" else pattern
            strong = int((values > STRONG_PROBABILITY).sum())
            highlights.append(f"{strong} of {len(values)} heads attend mostly to the {aim}.")
    return Section(
        "Patterns of attention",
        "Means over the queries of all sequences, without padding. Entropy is in nats: 0 for attention to one token, "
        "the logarithm of their number for even attention to all. Distance is in tokens. The others are "
        "probabilities: of the token before the query, of the first token (an attention sink), and, in a random "
        "sequence that is repeated, of the token that followed the query's token the first time (induction).",
        {"patterns": Table("Patterns, mean over heads", list(rows.values()))},
        pictures,
        highlights,
    )


def dominance(
    model: PreTrainedModel, batches: Sequence[Batch], task: TaskScore | None, label: Label, progress: Progress
) -> Section:
    """Return what the model loses without each head, and without more and more of them."""
    choose: dict[str, Any]
    score: dict[str, Any]
    if task is None:
        choosing, scoring = analysis.split_sequences(batches)
        if not scoring:
            raise HeadError("heads are chosen on some sequences and scored on others; pass two sequences at least")
        metric, choose, score = "output error", {"batches": choosing}, {"batches": scoring}
        reading = (
            f"The score is the output error on half of {sum(map(sequence_count, batches))} sequences; the others "
            "choose heads. It is the relative change of the model's outputs, ‖without − with‖ / ‖with‖ over tokens "
            "that are no padding, 0 with all heads. Heads are important whose removal moves the outputs most."
        )
    else:
        metric, choose, score = task.name, {"score": task.choose}, {"score": task.score}
        reading = (
            f"The model is scored without each head ({metric}); other data choose heads. Importance is the mean size "
            "of the loss's gradient in a mask on the head, normalised in each layer (Michel et al., 2019)."
        )
    report = progress("heads one by one")
    chosen, scored = (analysis.dominant_heads(model, **how, progress=report) for how in (choose, score))
    importance = chosen.changes if task is None else head_importance(model, task.batches)
    points = analysis.pruning_curve(
        model, importance, **score, random_orders=RANDOM_ORDERS, progress=progress("pruning curve")
    )
    rows = [
        {
            "heads silenced [%]": round(100 * point.share),
            "heads silenced": point.removed,
            metric: point.score,
            "random heads": point.random_score,
        }
        for point in points
    ]
    sign = -1 if scored.greater_is_better else 1  # losses are positive where the model gets worse
    losses = [(sign * changes).tolist() for changes in scored.changes.values()]
    joined = torch.cat(list(scored.changes.values())) * sign
    means = ", ".join(f"{short(mean)} ({kind})" for kind, mean in scored.mean_change(chosen.dominant).items())
    half = next(point for point in points if point.share >= 0.5)
    curves = [
        ("least important", [(100 * point.share, point.score) for point in points]),
        ("random", [(100 * point.share, point.random_score) for point in points]),
    ]
    strong = "The strongest cell of a row is its layer's dominant head; faint heads can go (DropHead, Table 4)."
    high, both_signs, layers = float(joined.abs().max()), bool((joined < 0).any()), list(map(label, scored.changes))
    worth = Heatmaps(
        "What is lost without each head", strong, {"": losses}, high, both_signs, "layer", row_names=layers
    )
    flat = "The longer the curve stays flat, the more heads can go (DropHead, Fig. 3)."
    return Section(
        "What heads are worth",
        f"Heads are silenced one at a time, by zeros, as after pruning. {reading} The dominant head of a layer is "
        "the one that costs most. For the curve, heads are silenced cumulatively, the least important first.",
        {"pruning": Table("Pruning curve", rows)},
        [worth, Curves("Pruning curve", flat, curves, "% of heads silenced", metric)],
        [
            f"Silencing the dominant head of a layer changes the {metric} by {means}, mean over layers.",
            f"Without the {half.removed} least important heads of {len(joined)} the {metric} is {short(half.score)}, "
            f"with all of them {short(scored.baseline)}.",
        ],
    )
