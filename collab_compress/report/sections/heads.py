"""Sections on single heads: what they share, attend to, and are worth."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from collab_compress import analysis
from collab_compress.analysis import Dominance, PruningPoint
from collab_compress.conversion.expand import read_factors
from collab_compress.errors import CalibrationError, HeadError
from collab_compress.heads import alphas_of, head_importance
from collab_compress.report.context import ReportContext
from collab_compress.report.section import (
    Cell,
    Curve,
    Curves,
    Heatmaps,
    Panel,
    Picture,
    Section,
    Table,
    heatmap,
    short,
)

QUANTILE = 0.98  # of mixing entries at which the colour scale ends; a few entries are far larger
TOKENS = 40  # a longer attention map is cut
LAYERS = 12  # of attention maps, at most
PATTERNS = {
    "entropy": ("Entropy of attention", "Faint cells are heads that attend to few tokens.", "Clark et al., 2019"),
    "distance": ("Distance of attention", "Faint cells are heads that attend near by.", "Vig and Belinkov, 2019"),
    "previous token": ("Attention to the previous token", "Strong cells look one token back.", "Clark et al., 2019"),
    "first token": ("Attention to the first token", "Strong cells rest on the first token.", "Xiao et al., 2024"),
    "induction": ("Induction", "Strong cells continue what they have seen before.", "Olsson et al., 2022"),
}
"""Pattern → title, reading and source of its picture."""

AIMS = {"previous token": "previous token", "first token": "first token", "induction": "token after an earlier copy"}
UNBOUNDED = ("entropy", "distance")  # the other patterns are probabilities
MOSTLY = 0.5  # from this probability on a head attends mostly there
DRAWS = 3  # orders of random heads in the pruning curve


def mixing(context: ReportContext) -> Section:
    """Return mixing matrices and alphas, and numbers that describe them."""
    matrices = analysis.mixing_matrices(context.model, order=True) if read_factors(context.model) else {}
    alphas = analysis.alpha_matrices(context.model) if alphas_of(context.model) else {}
    if not matrices and not alphas:
        raise HeadError("heads of a dense model share no components, and they are not mixed: there is no such matrix")
    records: list[dict[str, Cell]]
    tables: list[Table] = []
    pictures: list[Picture] = []
    highlights = []
    if matrices:
        users = {name: _users(matrix) for name, matrix in matrices.items()}
        records = [
            {
                "layer": context.label(name),
                "heads": len(matrix),
                "components R": matrix.shape[1],
                "effective rank": analysis.effective_rank(matrix),
                "heads that use a component": users[name],
            }
            for name, matrix in matrices.items()
        ]
        tables.append(Table("components", "Mixing matrices", records))
        sizes = torch.cat([matrix.abs().flatten() for matrix in matrices.values()])
        reach = float(sizes[sizes > 0].quantile(QUANTILE)) if bool(sizes.any()) else 1.0
        pictures.append(
            Heatmaps(
                "Mixing matrices",
                "A column of one strong cell belongs to one head, one with several to several; the largest 2 % are "
                "cut off.",
                "Collaborate, Fig. 2",
                context.head_maps(matrices),
                high=reach,
                diverging=True,
                column_label="component, strongest first",
            )
        )
        heads = max(map(len, matrices.values()))
        highlights.append(f"A shared component serves {fmean(users.values()):.1f} of {heads} heads on average.")
    if alphas:
        records = []
        for name, matrix in alphas.items():
            count, diagonal = len(matrix), matrix.diagonal()
            off_diagonal = float(matrix.abs().sum() - diagonal.abs().sum())
            records.append(
                {
                    "layer": context.label(name),
                    "heads": count,
                    "mean of diagonal": float(diagonal.mean()),
                    "mean size off diagonal": off_diagonal / (count * (count - 1)) if count > 1 else None,
                    "effective rank": analysis.effective_rank(matrix),
                }
            )
        tables.append(Table("alphas", "Alphas", records))
        reach = max(float(matrix.abs().max()) for matrix in alphas.values())
        pictures.append(
            Heatmaps(
                "Alphas",
                "A strong diagonal keeps heads as they are; cells off it mix head j into head i.",
                "Rotation, Figs. 3–4",
                context.head_maps(alphas),
                high=reach,
                diverging=True,
                row_label="head i that leaves",
                column_label="head j that enters",
            )
        )
    return Section(
        "mixing",
        "What heads share",
        "A row is a head. An entry is the strength of a component of the shared queries and keys in this head, or "
        "the weight of another head in its output (alphas). Effective rank is the exponential of the entropy of "
        "singular values.",
        "Collaborate, Fig. 2; Rotation, Figs. 3–4",
        tables,
        pictures,
        highlights,
    )


def _users(matrix: Tensor) -> float:
    """Return how many heads use a component, mean over used components: 1 for one head, H for all alike."""
    squares = matrix.square()
    used = squares[:, squares.sum(0) > 0]
    if not used.numel():
        return 0.0
    return float((used.sum(0).square() / used.square().sum(0)).mean())


def attention_maps(context: ReportContext) -> Section:
    """Return the attention probabilities of each head in one sentence."""
    if context.tokenizer is None or context.sentence is None:
        raise HeadError("there is no sentence to read, or no tokenizer to read it with")
    text: str | tuple[str, str] = context.sentence
    target: str | None = None
    if isinstance(text, tuple) and context.model.config.is_encoder_decoder:
        text, target = text
    measured = analysis.attention_maps(context.model, context.tokenizer, text, target=target)
    maps = {name: measured[name] for name in list(measured)[:: -(-len(measured) // LAYERS)]}
    queries = next(iter(maps.values())).queries[:TOKENS]
    words = text if isinstance(text, str) else "” and “".join(text)
    reading = f"Attention weights of every head for “{words}”, read as {' '.join(queries)}."
    if target:
        reading += f" Its target: “{target}”."
    if len(maps) < len(measured):
        reading += f" {len(maps)} of {len(measured)} modules are shown."
    special = set(context.tokenizer.all_special_tokens)
    lengths = [0 if token in special else len(token.strip("Ġ▁#")) for token in queries]
    longest = lengths.index(max(lengths))
    of_word, of_heads = [], []
    for name, attention in maps.items():
        layer, query = context.label(name), min(longest, len(attention.queries) - 1)
        title = f"layer {layer}, from “{attention.queries[query]}”"
        of_word.append(heatmap(title, attention.weights[:, query, :TOKENS], columns=attention.keys[:TOKENS]))
        for head, weights in enumerate(attention.weights[:, :TOKENS, :TOKENS]):
            of_heads.append(heatmap(f"{layer} · {head}", weights, (), ()))
    pictures = [
        Heatmaps(
            "One word's attention",
            "Each row is a head; rows that look alike attend alike.",
            "Diversity, Fig. 1",
            of_word,
            column_label="token attended to",
        ),
        Heatmaps(
            "Every head's attention",
            "Layer · head; a diagonal looks at the token itself, a line beside it at a neighbour, a column at "
            "one token.",
            "Diversity, Fig. 1",
            of_heads,
            row_label="query token",
            column_label="token attended to",
        ),
    ]
    return Section("attention_maps", "What heads attend to", reading, "Diversity, Fig. 1", pictures=pictures)


def patterns(context: ReportContext) -> Section:
    """Return how spread the attention of each head is, how far it reaches, and which tokens it goes to."""
    measured = {name: means.result() for name, means in context.heads.patterns.items()}
    with suppress(HeadError, CalibrationError):  # the model reads no tokens, or not as many
        measured["induction"] = analysis.induction(context.model, progress=context.progress("induction"))
    pictures: list[Picture] = []
    for name, heads in measured.items():
        high = max(float(values.max()) for values in heads.values()) if name in UNBOUNDED else 1.0
        layers = [context.layer_map("", heads)]
        pictures.append(Heatmaps(*PATTERNS[name], maps=layers, high=high, row_label="layer"))
    records: list[dict[str, Cell]] = []
    for module in measured["entropy"]:
        means = {name: float(heads[module].mean()) if module in heads else None for name, heads in measured.items()}
        records.append({"layer": context.label(module), **means})
    highlights = []
    for name, heads in measured.items():
        if name not in UNBOUNDED and heads:
            strong = int((torch.cat(list(heads.values())) > MOSTLY).sum())
            highlights.append(f"{strong} of {sum(map(len, heads.values()))} heads attend mostly to the {AIMS[name]}.")
    return Section(
        "patterns",
        "Patterns of attention",
        "Means over the queries of all sequences, without padding. Entropy is in nats: 0 for attention to one token, "
        "the logarithm of their number for even attention to all. Distance is in tokens. The others are "
        "probabilities: of the token before the query, of the first token (an attention sink), and, in a random "
        "sequence that is repeated, of the token that followed the query's token the first time (induction).",
        "Clark et al., 2019; Vig and Belinkov, 2019; Olsson et al., 2022; Xiao et al., 2024",
        [Table("patterns", "Patterns, mean over heads", records)],
        pictures,
        highlights,
    )


def dominance(context: ReportContext) -> Section:
    """Return what the model loses without each head, and without more and more of them."""
    dominant, scored, points, random = _measure_dominance(context)
    metric = "drift" if context.score is None else context.score.name
    zeros = scored["zeros"]
    sign = -1 if zeros.greater_is_better else 1  # losses are positive where the model gets worse
    losses = {
        output: {name: sign * changes for name, changes in without.changes.items()}
        for output, without in scored.items()
    }
    joined = torch.cat([vector for vectors in losses.values() for vector in vectors.values()])
    heads = sum(map(len, zeros.changes.values()))
    scores, shares = [point.score for point in points], [100 * point.share for point in points]
    pictures: list[Picture] = [
        Heatmaps(
            "What is lost without each head",
            "The strongest cell of a row is its layer's dominant head; heads that are faint under zeros can go.",
            "DropHead, Table 4",
            [context.layer_map(output, vectors) for output, vectors in losses.items()],
            high=float(joined.abs().max()),
            diverging=bool((joined < 0).any()),
            row_label="layer",
        ),
        Curves(
            "Pruning curve",
            "The longer the curve stays flat, the more heads can go; random heads show what the order is worth.",
            "DropHead, Fig. 3",
            [Panel("", [Curve("least important", shares, scores), Curve("random", shares, random, dashed=True)])],
            x_label="% of heads silenced",
            y_label=metric,
            bottom=min(0.0, *scores, *random),
        ),
    ]
    changes = {output: without.mean_change(dominant) for output, without in scored.items()}
    pruning: list[dict[str, Cell]] = [
        {
            "heads silenced [%]": round(100 * point.share),
            "heads silenced": point.removed,
            metric: point.score,
            "random heads": mean,
        }
        for point, mean in zip(points, random, strict=True)
    ]
    mean_changes: list[dict[str, Cell]] = [
        {"attention": kind, **{f"change: {output}": by_kind[kind] for output, by_kind in changes.items()}}
        for kind in changes["zeros"]
    ]
    change = ", ".join(f"{short(mean)} ({kind})" for kind, mean in changes["zeros"].items())
    half = next(point for point in points if point.share >= 0.5)
    return Section(
        "dominance",
        "What heads are worth",
        _dominance_reading(context, metric),
        "DropHead, Table 4 and Fig. 3; Wang et al., 2022",
        tables=[
            _dominant_table(context, scored, dominant),
            Table("kinds", "Loss of the dominant head, mean over layers", mean_changes),
            Table("pruning", "Pruning curve", pruning),
        ],
        pictures=pictures,
        highlights=[
            f"Silencing the dominant head of a layer changes the {metric} by {change}, mean over layers.",
            f"Without the {half.removed} least important heads of {heads} the {metric} is {short(half.score)}, with "
            f"all of them {short(zeros.baseline)}.",
        ],
    )


def _measure_dominance(
    context: ReportContext,
) -> tuple[dict[str, int], dict[str, Dominance], list[PruningPoint], list[float]]:
    """Return the dominant heads, the changes without each head on other data, and the pruning curve.

    Changes are by what a silenced head puts out: `zeros` or its `mean output`. The last are the scores of the curve
    for random heads, means over `DRAWS` orders.
    """
    task, model = context.score, context.model
    choose: dict[str, Any]
    score: dict[str, Any]
    if task is None:
        reference, scoring = analysis.split_sequences(context.first(context.options.head_sequences))
        if not scoring:
            raise HeadError("heads are chosen on some sequences and scored on others; pass two sequences at least")
        choose, score = {"batches": reference}, {"batches": scoring}
    else:
        reference = list(task.batches)
        choose, score = {"score": task.choose}, {"score": task.score}
    silence = partial(
        analysis.dominant_heads,
        model,
        greater_is_better=task is None or task.greater_is_better,
        progress=context.progress("heads one by one"),
    )
    chosen = silence(**choose)
    scored = {"zeros": silence(**score), "mean output": silence(**score, ablation="mean", reference=reference)}
    importance = chosen.changes
    if task is not None:
        labelled = analysis.with_progress(task.batches, context.progress("importance"), "importance")
        importance = head_importance(model, labelled)
    progress = context.progress("pruning curve")
    points, *draws = (
        analysis.pruning_curve(model, order, **score, progress=progress)
        for order in (importance, *(analysis.random_importance(model, seed=seed) for seed in range(DRAWS)))
    )
    random = [fmean(point.score for point in drawn) for drawn in zip(*draws, strict=True)]
    return chosen.dominant, scored, points, random


def _dominance_reading(context: ReportContext, metric: str) -> str:
    silenced = (
        " A silenced head puts out zeros, as after pruning, or its mean output over the data that choose heads. "
        "Zeros also take away what a head adds at every token, whatever it reads, and so give the next layer inputs "
        "of an unusual size; its mean keeps this and takes away only what depends on the input. The dominant head of "
        "a layer is the one that costs most with zeros. "
    )
    if context.score is None:
        return (
            f"Heads are silenced one at a time on {min(context.options.head_sequences, context.sequences)} "
            "sequences. Without labels the score is the drift, the relative change of the model's outputs: "
            "‖without − with‖ / ‖with‖ over tokens that are no padding, 0 with all heads. Half of the sequences "
            f"choose heads, the other half measure the drift.{silenced}For the curve, heads are silenced with zeros "
            "cumulatively, starting with those whose removal moved the outputs least."
        )
    return (
        f"Heads are silenced one at a time, and the model is scored without each ({metric}). Other data choose heads."
        f"{silenced}For the curve, heads are silenced with zeros cumulatively, the least important first; importance "
        "is the mean size of the loss's gradient in a mask on the head, normalised in each layer (Michel et al., "
        "2019)."
    )


def _dominant_table(context: ReportContext, scored: Mapping[str, Dominance], dominant: Mapping[str, int]) -> Table:
    records: list[dict[str, Cell]] = []
    for name, head in dominant.items():
        changes = {output: without.changes[name].tolist() for output, without in scored.items()}
        kind = scored["zeros"].kinds[name]
        record: dict[str, Cell] = {"layer": context.label(name), "attention": kind, "dominant head": head}
        for output, of_heads in changes.items():
            record[f"without it: {output}"] = of_heads.pop(head)
        for output, others in changes.items():
            record[f"without another: {output}"] = fmean(others) if others else None
        records.append(record)
    title = "Change without the dominant head of each layer, and mean change without another of its heads"
    return Table("dominant", title, records)
