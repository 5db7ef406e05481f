"""What heads are worth: dominant heads and the pruning curve, by a task's score or by drift."""

import torch
from torch import Tensor

from collab_compress.analysis import Dominance, PruningPoint, dominant_heads, pruning_curve, with_progress
from collab_compress.heads import head_importance
from collab_compress.report.section import (
    Cell,
    Column,
    Curve,
    Curves,
    Heatmaps,
    Omitted,
    Panel,
    Section,
    Table,
    ragged,
    short,
)
from collab_compress.report.study import Study


def dominance(study: Study) -> Section | Omitted:
    """Show what the model loses without each head, and without more and more of them."""
    found, points, words = _by_drift(study) if study.score is None else _by_score(study)
    cost = _costs(found)
    labels = study.labels(found.changes)
    worst = max(float(values.max()) for values in cost.values())
    best = min(0.0, *(float(values.min()) for values in cost.values()))
    pictures = (
        Heatmaps(
            "What is lost without each head",
            "The strongest cell of a row is its layer's dominant one; heads with faint ones can go.",
            "DropHead, Table 4",
            (ragged("", list(cost.values()), labels),), best, worst,
            "diverging" if best < 0 else "sequential", "layer", "head",
        ),
        Curves(
            "Pruning curve",
            "The longer the curve stays flat, the more heads the model can do without.",
            "DropHead, Fig. 3",
            (Panel("", (Curve(words, tuple(100 * p.share for p in points), tuple(p.score for p in points)),)),),
            "% of heads silenced, least important first", words,
            min(0.0, *(p.score for p in points)),
        ),
    )  # fmt: skip
    kinds = ", ".join(f"{short(change)} ({kind})" for kind, change in found.by_kind.items())
    half = next(point for point in points if point.share >= 0.5)
    return Section(
        "dominance",
        "What heads are worth",
        _reading(study, words),
        "DropHead, Table 4 and Fig. 3",
        (_dominant(found, labels), _kinds(found), _pruning(points, words)),
        pictures,
        (
            f"Silencing the dominant head of a layer changes the {words} by {kinds}, mean over layers.",
            f"Without the {half.removed} least important heads of {_heads(found)} the {words} is "
            f"{short(half.score)}, with all of them {short(found.baseline)}.",
        ),
    )


def _by_drift(study: Study) -> tuple[Dominance, list[PruningPoint], str]:
    batches = study.some(study.look.head_sequences)
    found = dominant_heads(study.model, batches=batches, progress=study.progress("heads one by one"))
    points = pruning_curve(study.model, found.changes, batches=batches, progress=study.progress("pruning curve"))
    return found, points, "drift"


def _by_score(study: Study) -> tuple[Dominance, list[PruningPoint], str]:
    task = study.score
    assert task is not None
    found = dominant_heads(
        study.model, task.score, greater_is_better=task.greater_is_better, progress=study.progress("heads one by one")
    )
    labelled = with_progress(task.batches, study.progress("importance"), "importance")
    importance = head_importance(study.model, labelled)
    points = pruning_curve(study.model, importance, task.score, progress=study.progress("pruning curve"))
    return found, points, task.name


def _reading(study: Study, words: str) -> str:
    if study.score is not None:
        return (
            f"Heads are silenced one at a time, and the model is scored without each ({words}). For the curve they "
            "are silenced together, the least important first: importance is the mean size of the loss's gradient "
            "in a mask on the head, normalised in each layer (Michel et al., 2019)."
        )
    count = min(study.look.head_sequences, study.sequences)
    return (
        f"Heads are silenced one at a time on {count} sequences. Without labels the score is the drift of the "
        "model's outputs, ‖without − with‖ / ‖with‖ over real tokens: 0 with all heads, less is better. For the "
        "curve they are silenced together, those whose own loss moved the outputs least first."
    )


def _costs(found: Dominance) -> dict[str, Tensor]:
    """What each head's loss costs: positive where the model gets worse."""
    sign = -1 if found.greater_is_better else 1
    return {name: sign * changes for name, changes in found.changes.items()}


def _heads(found: Dominance) -> int:
    return sum(map(len, found.changes.values()))


def _dominant(found: Dominance, labels: list[str]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for label, (name, changes) in zip(labels, found.changes.items(), strict=True):
        head = found.dominant[name]
        others = torch.cat([changes[:head], changes[head + 1 :]])
        rows.append((
            label, found.kinds[name], head, float(changes[head]), float(others.mean()) if len(others) else None,
        ))  # fmt: skip
    columns = ("layer", "attention", "dominant head", "change without it", "mean change without another head")
    return Table("dominant", "Dominant head of each layer", tuple(map(Column, columns)), tuple(rows))


def _kinds(found: Dominance) -> Table:
    rows = tuple((kind, change) for kind, change in found.by_kind.items())
    return Table(
        "kinds", "Loss of the dominant head, mean over layers", (Column("attention"), Column("change")), rows
    )


def _pruning(points: list[PruningPoint], words: str) -> Table:
    rows = tuple((round(100 * point.share), point.removed, point.score) for point in points)
    return Table(
        "pruning", "Pruning curve", (Column("heads silenced", "%"), Column("heads silenced"), Column(words)), rows
    )
