"""How heads differ: confidence, distances, overlap of attention, and maps of one sentence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from collab_compress.analysis import AttentionMap, Discrepancy, mean_over_pairs
from collab_compress.analysis import attention_maps as maps_of
from collab_compress.analysis.diversity import Measure, percent_growth
from collab_compress.report.section import (
    Cell,
    Column,
    Curve,
    Curves,
    Heatmap,
    Heatmaps,
    Omitted,
    Panel,
    Picture,
    Section,
    Table,
    heatmap,
    numbered,
    ragged,
)
from collab_compress.report.study import Pass, Study

TOKENS = 40  # beyond that a map is cut
LAYERS = 12  # that are shown at most


def diversity(study: Study) -> Section | Omitted:
    """Show how confident heads are, how far they lie apart, and how much their attention overlaps."""
    ours = _measured(study.seen, study.name)
    theirs = None if study.baseline_seen is None else _measured(study.baseline_seen, study.baseline_name)
    models = [ours] if theirs is None else [ours, theirs]
    sure, pairs = _mean(list(ours.confidence.values())), [_over_pairs(each) for each in ours.overlap.values()]
    overlaps = [each for each in pairs if each is not None]
    together = (
        ""
        if not overlaps
        else f"; the attention of two of a layer overlaps by {sum(overlaps) / len(overlaps):.2f} (0 to 1)"
    )
    tables = [_layers(study, ours)]
    pictures = [*_heads(study, models), _matrices(study, ours), _overlaps(study, models)]
    highlights = [f"Heads give {100 * sure:.0f} % of their attention to one token on average{together}."]
    uncompared = ""
    if theirs is not None and len(theirs.discrepancy) == len(ours.discrepancy):
        table, picture = _growth(study, ours, theirs)
        tables.append(table)
        pictures.append(picture)
    elif theirs is not None:
        uncompared = " The two models have different numbers of attention modules, so no growth is given."
    return Section(
        "diversity",
        "How different heads are",
        "Confidence is the largest weight of an attention row, mean over tokens that do not end a sequence. AVG_L2 "
        "is a head's mean distance from the others of its layer, of outputs. Discrepancy sums a layer's distances "
        "over all ordered pairs; cosine + 1 falls as heads move apart, 1 − cosine and L2 grow. Overlap is the "
        "Bhattacharyya coefficient of two heads' attention rows: 1 where they are the same. Means over all tokens "
        "that are no padding." + uncompared,
        "Rotation, sections 2.4 and 5.3; Diversified Attention, eq. 3",
        tuple(tables), tuple(pictures), tuple(highlights),
    )  # fmt: skip


def attention_maps(study: Study) -> Section | Omitted:
    """Show what each head attends to in a sentence."""
    if study.tokenizer is None or study.sentence is None:
        return Omitted("there is no sentence to read, or no tokenizer to read it with")
    text, target = study.sentence if isinstance(study.sentence, tuple) else (study.sentence, None)
    found = maps_of(study.model, study.tokenizer, text, target=target)
    names = list(found)[:: -(-len(found) // LAYERS)]
    first = found[names[0]]
    word = _word(first, set(study.tokenizer.all_special_tokens))
    skipped = "" if len(names) == len(found) else f" {len(names)} of {len(found)} modules are shown."
    return Section(
        "attention_maps",
        "What heads attend to",
        f"Attention weights of every head for the sentence “{text}”, read as {' '.join(first.queries[:TOKENS])}."
        + (f" Its target: “{target}”." if target else "") + skipped,
        "Diversity, Fig. 1",
        pictures=(_rows_of_word(study, {name: found[name] for name in names}, word), _every_map(study, found, names)),
    )  # fmt: skip


@dataclass(frozen=True)
class _Measured:
    """What one model's heads show; keys are module paths, or uses of one."""

    name: str
    confidence: dict[str, Tensor]
    discrepancy: dict[str, Discrepancy]
    overlap: dict[str, Tensor]


def _measured(found: Pass, name: str) -> _Measured:
    return _Measured(name, found.confidence, found.distances.result(), found.overlaps.result())


def _layers(study: Study, found: _Measured) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, each in found.discrepancy.items():
        sure = found.confidence[name.partition("[")[0]]
        rows.append((
            study.label(name), float(sure.mean()), float(sure.max()), int(sure.argmax()), _mean([_average(each.l2)]),
            each.norm("l2"), each.norm("cosine"), each.norm("difference"), _over_pairs(found.overlap[name]),
        ))  # fmt: skip
    columns = (
        "layer", "confidence, mean", "confidence, largest", "of head", "AVG_L2, mean", "discrepancy, L2",
        "discrepancy, cosine + 1", "discrepancy, 1 − cosine", "Bhattacharyya, mean over pairs",
    )  # fmt: skip
    return Table("layers", f"Layers of {found.name}", tuple(map(Column, columns)), tuple(rows))


def _heads(study: Study, models: list[_Measured]) -> list[Picture]:
    most = max(
        float(each.l2.sum(1).max()) / max(len(each.l2) - 1, 1) for m in models for each in m.discrepancy.values()
    )
    sure = tuple(
        ragged(m.name if len(models) > 1 else "", list(m.confidence.values()), study.labels(m.confidence))
        for m in models
    )
    far = tuple(
        ragged(
            m.name if len(models) > 1 else "",
            [_average(each.l2) for each in m.discrepancy.values()],
            study.labels(m.discrepancy),
        )
        for m in models
    )
    return [
        Heatmaps(
            "Confidence of each head", "Strong cells are heads that look at one token at a time.", "Rotation, Fig. 5",
            sure, 0.0, 1.0, row_label="layer", column_label="head",
        ),
        Heatmaps(
            "AVG_L2 of each head", "Strong cells are heads that answer unlike the others.", "Rotation, eq. 6",
            far, 0.0, most, row_label="layer", column_label="head",
        ),
    ]  # fmt: skip


def _matrices(study: Study, found: _Measured) -> Picture:
    return Heatmaps(
        "1 − cosine of head outputs",
        "Faint cells off the diagonal are heads that point the same way; above 1 they point in opposite ones.",
        "Rotation, section 5.3",
        tuple(
            heatmap(f"layer {study.label(name)}", each.difference, *[numbered(len(each.l2))] * 2)
            for name, each in found.discrepancy.items()
        ),
        0.0, max(1.0, *(float(each.difference.max()) for each in found.discrepancy.values())),
        row_label="head", column_label="head",
    )  # fmt: skip


def _overlaps(study: Study, models: list[_Measured]) -> Picture:
    curves = tuple(
        Curve(m.name, tuple(range(len(m.overlap))), tuple(_over_pairs(each) for each in m.overlap.values()))
        for m in models
    )
    return Curves(
        "Overlap of attention by layer",
        "Low layers have heads that attend to different tokens; the paper sums this over layers.",
        "Diversified Attention, Fig. 1",
        (Panel("mean over pairs of heads", curves),), "attention module, in order", "Bhattacharyya coefficient",
        0.0, 1.0,
    )  # fmt: skip


def _growth(study: Study, ours: _Measured, theirs: _Measured) -> tuple[Table, Picture]:
    measures: dict[Measure, str] = {"difference": "1 − cosine (Fig. 6)", "l2": "L2 (Fig. 7)", "cosine": "cosine + 1"}
    pairs = list(zip(ours.discrepancy.items(), theirs.discrepancy.values(), strict=True))
    values = {
        measure: [percent_growth(own.norm(measure), other.norm(measure)) for (_, own), other in pairs]
        for measure in measures
    }
    rows = tuple(
        (study.label(name), *(values[measure][place] for measure in measures))
        for place, ((name, _), _) in enumerate(pairs)
    )
    table = Table(
        "growth", f"Growth of discrepancy in {ours.name} against {theirs.name}",
        (Column("layer"), *(Column(title, "%") for title in measures.values())), rows,
    )  # fmt: skip
    x = tuple(range(len(pairs)))
    return table, Curves(
        f"Growth of discrepancy against {theirs.name}",
        "Above 0 heads of that layer moved apart (closer together, by cosine + 1).",
        "Rotation, Figs. 6–7",
        (Panel("", tuple(Curve(title, x, tuple(values[measure])) for measure, title in measures.items())),),
        "attention module, in order", "growth, %", 0.0, 0.0,
    )  # fmt: skip


def _average(distances: Tensor) -> Tensor:
    """Mean distance of each head from the others, (H,); not a number for a single head, shown as –."""
    heads = len(distances)
    return distances.sum(1) / (heads - 1) if heads > 1 else torch.full((1,), torch.nan)


def _over_pairs(matrix: Tensor) -> float | None:
    return mean_over_pairs(matrix) if len(matrix) > 1 else None


def _mean(vectors: list[Tensor]) -> float:
    return float(torch.cat(vectors).mean())


def _word(found: AttentionMap, special: set[str]) -> int:
    """Choose the token whose attention is shown: the longest that is no special one."""
    lengths = [0 if token in special else len(token.strip("Ġ▁#")) for token in found.queries[:TOKENS]]
    return max(range(len(lengths)), key=lengths.__getitem__)


def _rows_of_word(study: Study, found: dict[str, AttentionMap], place: int) -> Heatmaps:
    maps = []
    for name, each in found.items():
        row = min(place, len(each.queries) - 1)
        matrix = each.weights[:, row, :TOKENS]  # (H, S)
        title = f"layer {study.label(name)}, from “{each.queries[row]}”"
        maps.append(heatmap(title, matrix, numbered(len(matrix)), each.keys[:TOKENS]))
    return Heatmaps(
        "One word's attention",
        "Each row is a head; rows that look alike attend alike, and a column of its own says where a head looks.",
        "Diversity, Fig. 1",
        tuple(maps), 0.0, 1.0, row_label="head", column_label="token attended to",
    )  # fmt: skip


def _every_map(study: Study, found: dict[str, AttentionMap], names: list[str]) -> Heatmaps:
    maps: list[Heatmap] = [
        heatmap(f"{study.label(name)} · {head}", weights[:TOKENS, :TOKENS])
        for name in names
        for head, weights in enumerate(found[name].weights)
    ]
    return Heatmaps(
        "Every head's attention",
        "Layer · head; a diagonal looks at the token itself, a line beside it at a neighbour, a column at one token.",
        "Diversity, Fig. 1",
        tuple(maps), 0.0, 1.0, row_label="token that asks", column_label="token attended to",
    )  # fmt: skip
