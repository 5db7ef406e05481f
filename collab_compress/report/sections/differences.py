"""Differences between heads: confidence, distances, overlap of attention, and attention maps of one sentence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from collab_compress.analysis import AttentionMap, Discrepancy, mean_over_pairs
from collab_compress.analysis import attention_maps as measure_maps
from collab_compress.analysis.diversity import Measure, percent_growth
from collab_compress.report.section import (
    Cell,
    Curves,
    Heatmaps,
    Omitted,
    Panel,
    Picture,
    Section,
    Table,
    curve,
    heatmap,
    numbered,
    ragged,
)
from collab_compress.report.study import Pass, Study

TOKENS = 40  # a longer map is cut
LAYERS = 12  # shown at most
GROWTH: dict[Measure, str] = {"difference": "1 − cosine (Fig. 6)", "l2": "L2 (Fig. 7)", "cosine": "cosine + 1"}


@dataclass(frozen=True)
class _Measured:
    """The measures of one model; keys are module paths, or uses of a module."""

    name: str
    confidence: dict[str, Tensor]
    discrepancy: dict[str, Discrepancy]
    overlap: dict[str, Tensor]

    @classmethod
    def of(cls, read: Pass, name: str) -> _Measured:
        return cls(name, read.confidence, read.distances.result(), read.overlaps.result())

    @property
    def distances(self) -> list[Tensor]:
        """Mean distance of each head from the others of its module, (H,); NaN for a single head."""
        matrices = [module.l2 for module in self.discrepancy.values()]
        return [matrix.sum(1) / (len(matrix) - 1) for matrix in matrices]

    @property
    def overlaps(self) -> list[float | None]:
        """Overlap of each module, mean over pairs; None for a single head."""
        return [_over_pairs(matrix) for matrix in self.overlap.values()]


def diversity(study: Study) -> Section | Omitted:
    """Return how confident heads are, how far apart they are, and how much their attention overlaps."""
    models = [_Measured.of(study.seen, study.name)]
    if study.baseline_seen is not None:
        models.append(_Measured.of(study.baseline_seen, study.baseline_name))
    model = models[0]
    tables = [_layers(study, model)]
    pictures = [*_heads(study, models), _matrices(study, model), _overlaps(models)]
    note = ""
    if len(models) > 1 and len(models[1].discrepancy) == len(model.discrepancy):
        table, picture = _growth(study, model, models[1])
        tables.append(table)
        pictures.append(picture)
    elif len(models) > 1:
        note = " The two models have different numbers of attention modules, so no growth is given."
    confidence = float(torch.cat(list(model.confidence.values())).mean())
    highlight = f"Heads give {100 * confidence:.0f} % of their attention to one token on average"
    overlaps = [overlap for overlap in model.overlaps if overlap is not None]
    if overlaps:
        mean = sum(overlaps) / len(overlaps)
        highlight += f"; the attention of two heads of a layer overlaps by {mean:.2f} (0 to 1)"
    return Section(
        "diversity",
        "How different heads are",
        "Confidence is the largest weight of an attention row, mean over tokens that do not end a sequence. AVG_L2 "
        "is a head's mean distance from the others of its layer, of outputs. Discrepancy sums a layer's distances "
        "over all ordered pairs; cosine + 1 falls as heads move apart, 1 − cosine and L2 grow. Overlap is the "
        "Bhattacharyya coefficient of two heads' attention probabilities: 1 where they are the same. Means leave "
        "padding out." + note,
        "Rotation, sections 2.4 and 5.3; Diversified Attention, eq. 3",
        tables=tuple(tables),
        pictures=tuple(pictures),
        highlights=(highlight + ".",),
    )


def attention_maps(study: Study) -> Section | Omitted:
    """Return the attention probabilities of each head in one sentence."""
    if study.tokenizer is None or study.sentence is None:
        return Omitted("there is no sentence to read, or no tokenizer to read it with")
    text, target = study.sentence if isinstance(study.sentence, tuple) else (study.sentence, None)
    measured = measure_maps(study.model, study.tokenizer, text, target=target)
    names = list(measured)[:: -(-len(measured) // LAYERS)]
    maps = {name: measured[name] for name in names}
    first = maps[names[0]]
    word = _longest_word(first, set(study.tokenizer.all_special_tokens))
    reading = (
        f"Attention weights of every head for the sentence “{text}”, read as {' '.join(first.queries[:TOKENS])}."
    )
    if target:
        reading += f" Its target: “{target}”."
    if len(maps) < len(measured):
        reading += f" {len(maps)} of {len(measured)} modules are shown."
    return Section(
        "attention_maps",
        "What heads attend to",
        reading,
        "Diversity, Fig. 1",
        pictures=(_one_word(study, maps, word), _every_head(study, maps)),
    )


def _layers(study: Study, model: _Measured) -> Table:
    records: list[dict[str, Cell]] = []
    rows = zip(model.discrepancy.items(), model.distances, model.overlaps, strict=True)
    for (name, discrepancy), distances, overlap in rows:
        confidence = model.confidence[name.partition("[")[0]]
        records.append(
            {
                "layer": study.label(name),
                "confidence, mean": float(confidence.mean()),
                "confidence, largest": float(confidence.max()),
                "of head": int(confidence.argmax()),
                "AVG_L2, mean": float(distances.mean()),
                "discrepancy, L2": discrepancy.norm("l2"),
                "discrepancy, cosine + 1": discrepancy.norm("cosine"),
                "discrepancy, 1 − cosine": discrepancy.norm("difference"),
                "Bhattacharyya, mean over pairs": overlap,
            }
        )
    return Table.of("layers", f"Layers of {model.name}", records)


def _heads(study: Study, models: list[_Measured]) -> list[Picture]:
    titles = [model.name for model in models] if len(models) > 1 else [""]
    confidence, distances = [], []
    for title, model in zip(titles, models, strict=True):
        confidence.append(ragged(title, list(model.confidence.values()), study.labels(model.confidence)))
        distances.append(ragged(title, model.distances, study.labels(model.discrepancy)))
    return [
        Heatmaps(
            "Confidence of each head",
            "Strong cells are heads that look at one token at a time.",
            "Rotation, Fig. 5",
            tuple(confidence),
            row_label="layer",
        ),
        Heatmaps(
            "AVG_L2 of each head",
            "Strong cells are heads whose outputs differ from the others'.",
            "Rotation, eq. 6",
            tuple(distances),
            high=float(torch.cat([x for model in models for x in model.distances]).nan_to_num().max()),
            row_label="layer",
        ),
    ]


def _matrices(study: Study, model: _Measured) -> Picture:
    matrices = {name: module.difference for name, module in model.discrepancy.items()}
    return Heatmaps(
        "1 − cosine of head outputs",
        "Faint cells off the diagonal are heads that point the same way; above 1 they point in opposite ones.",
        "Rotation, section 5.3",
        study.head_maps(matrices),
        high=max(1.0, *(float(matrix.max()) for matrix in matrices.values())),
    )


def _overlaps(models: list[_Measured]) -> Picture:
    return Curves(
        "Overlap of attention by layer",
        "Low layers have heads that attend to different tokens; the paper sums this over layers.",
        "Diversified Attention, Fig. 1",
        (Panel("mean over pairs of heads", tuple(curve(model.name, model.overlaps) for model in models)),),
        x_label="attention module, in order",
        y_label="Bhattacharyya coefficient",
        bottom=0.0,
        top=1.0,
    )


def _growth(study: Study, model: _Measured, baseline: _Measured) -> tuple[Table, Picture]:
    records: list[dict[str, Cell]] = []
    growths: dict[str, list[float | None]] = {title: [] for title in GROWTH.values()}
    for (name, ours), theirs in zip(model.discrepancy.items(), baseline.discrepancy.values(), strict=True):
        record: dict[str, Cell] = {"layer": study.label(name)}
        for measure, title in GROWTH.items():
            growth = percent_growth(ours.norm(measure), theirs.norm(measure))
            record[f"{title} [%]"] = growth
            growths[title].append(growth)
        records.append(record)
    picture = Curves(
        f"Growth of discrepancy against {baseline.name}",
        "Above 0 heads of that layer moved apart (closer together, by cosine + 1).",
        "Rotation, Figs. 6–7",
        (Panel("", tuple(curve(title, values) for title, values in growths.items())),),
        x_label="attention module, in order",
        y_label="growth, %",
        bottom=0.0,
        top=0.0,
    )
    return Table.of("growth", f"Growth of discrepancy in {model.name} against {baseline.name}", records), picture


def _over_pairs(matrix: Tensor) -> float | None:
    return mean_over_pairs(matrix) if len(matrix) > 1 else None


def _longest_word(first: AttentionMap, special: set[str]) -> int:
    """Return the place of the longest token that is not a special one."""
    lengths = [0 if token in special else len(token.strip("Ġ▁#")) for token in first.queries[:TOKENS]]
    return max(range(len(lengths)), key=lengths.__getitem__)


def _one_word(study: Study, measured: dict[str, AttentionMap], word: int) -> Heatmaps:
    maps = []
    for name, attention in measured.items():
        query = min(word, len(attention.queries) - 1)
        matrix = attention.weights[:, query, :TOKENS]  # (H, S)
        title = f"layer {study.label(name)}, from “{attention.queries[query]}”"
        maps.append(heatmap(title, matrix, numbered(len(matrix)), attention.keys[:TOKENS]))
    return Heatmaps(
        "One word's attention",
        "Each row is a head; rows that look alike attend alike.",
        "Diversity, Fig. 1",
        tuple(maps),
        column_label="token attended to",
    )


def _every_head(study: Study, measured: dict[str, AttentionMap]) -> Heatmaps:
    maps = []
    for name, attention in measured.items():
        for head, weights in enumerate(attention.weights):
            maps.append(heatmap(f"{study.label(name)} · {head}", weights[:TOKENS, :TOKENS]))
    return Heatmaps(
        "Every head's attention",
        "Layer · head; a diagonal looks at the token itself, a line beside it at a neighbour, a column at one token.",
        "Diversity, Fig. 1",
        tuple(maps),
        row_label="query token",
        column_label="token attended to",
    )
