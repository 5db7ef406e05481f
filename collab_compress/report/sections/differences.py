"""Differences between heads: confidence, distances, overlap of attention, and attention maps of one sentence."""

from __future__ import annotations

from statistics import fmean

import torch

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
)
from collab_compress.report.study import Pass, Study

TOKENS = 40  # a longer map is cut
LAYERS = 12  # shown at most
GROWTH: dict[Measure, str] = {"difference": "1 − cosine (Fig. 6)", "l2": "L2 (Fig. 7)", "cosine": "cosine + 1"}


def diversity(study: Study) -> Section | Omitted:
    """Return how confident heads are, how far apart they are, and how much their attention overlaps."""
    model = study.seen
    models = [model] if study.baseline_seen is None else [model, study.baseline_seen]
    differences = {name: module.difference for name, module in model.discrepancy.items()}
    tables = [_layers(study, model)]
    pictures: list[Picture] = [
        Heatmaps(
            "Confidence of each head",
            "Strong cells are heads that look at one token at a time.",
            "Rotation, Fig. 5",
            tuple(study.layer_map(each.name if len(models) > 1 else "", each.confidence) for each in models),
            row_label="layer",
        ),
        Heatmaps(
            "AVG_L2 of each head",
            "Strong cells are heads whose outputs differ from the others'.",
            "Rotation, eq. 6",
            tuple(study.layer_map(each.name if len(models) > 1 else "", each.distances) for each in models),
            high=max(float(x.nan_to_num().max()) for each in models for x in each.distances.values()),
            row_label="layer",
        ),
        Heatmaps(
            "1 − cosine of head outputs",
            "Faint cells off the diagonal are heads that point the same way; above 1 they point in opposite ones.",
            "Rotation, section 5.3",
            study.head_maps(differences),
            high=max(1.0, *(float(matrix.max()) for matrix in differences.values())),
        ),
        Curves(
            "Overlap of attention by layer",
            "Low layers have heads that attend to different tokens; the paper sums this over layers.",
            "Diversified Attention, Fig. 1",
            (Panel("mean over pairs of heads", tuple(curve(each.name, each.mean_overlaps) for each in models)),),
            x_label="attention module, in order",
            y_label="Bhattacharyya coefficient",
            bottom=0.0,
            top=1.0,
        ),
    ]
    note = ""
    if len(models) > 1 and len(models[1].discrepancy) == len(model.discrepancy):
        table, picture = _growth(study, model, models[1])
        tables.append(table)
        pictures.append(picture)
    elif len(models) > 1:
        note = " The two models have different numbers of attention modules, so no growth is given."
    confidence = float(torch.cat(list(model.confidence.values())).mean())
    highlight = f"Heads give {100 * confidence:.0f} % of their attention to one token on average"
    overlaps = [overlap for overlap in model.mean_overlaps if overlap is not None]
    if overlaps:
        highlight += f"; the attention of two heads of a layer overlaps by {fmean(overlaps):.2f} (0 to 1)"
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
    reading = (
        f"Attention weights of every head for the sentence “{text}”, read as {' '.join(first.queries[:TOKENS])}."
    )
    if target:
        reading += f" Its target: “{target}”."
    if len(maps) < len(measured):
        reading += f" {len(maps)} of {len(measured)} modules are shown."
    special = set(study.tokenizer.all_special_tokens)
    lengths = [0 if token in special else len(token.strip("Ġ▁#")) for token in first.queries[:TOKENS]]
    word = lengths.index(max(lengths))
    of_word, of_heads = [], []
    for name, attention in maps.items():
        layer, query = study.label(name), min(word, len(attention.queries) - 1)
        title = f"layer {layer}, from “{attention.queries[query]}”"
        of_word.append(heatmap(title, attention.weights[:, query, :TOKENS], columns=attention.keys[:TOKENS]))
        for head, weights in enumerate(attention.weights[:, :TOKENS, :TOKENS]):
            of_heads.append(heatmap(f"{layer} · {head}", weights, (), ()))
    return Section(
        "attention_maps",
        "What heads attend to",
        reading,
        "Diversity, Fig. 1",
        pictures=(
            Heatmaps(
                "One word's attention",
                "Each row is a head; rows that look alike attend alike.",
                "Diversity, Fig. 1",
                tuple(of_word),
                column_label="token attended to",
            ),
            Heatmaps(
                "Every head's attention",
                "Layer · head; a diagonal looks at the token itself, a line beside it at a neighbour, a column at "
                "one token.",
                "Diversity, Fig. 1",
                tuple(of_heads),
                row_label="query token",
                column_label="token attended to",
            ),
        ),
    )


def _layers(study: Study, model: Pass) -> Table:
    records: list[dict[str, Cell]] = []
    for (name, discrepancy), overlap in zip(model.discrepancy.items(), model.mean_overlaps, strict=True):
        confidence = model.confidence[name.partition("[")[0]]
        records.append(
            {
                "layer": study.label(name),
                "confidence, mean": float(confidence.mean()),
                "confidence, largest": float(confidence.max()),
                "of head": int(confidence.argmax()),
                "AVG_L2, mean": float(model.distances[name].mean()),
                "discrepancy, L2": discrepancy.norm("l2"),
                "discrepancy, cosine + 1": discrepancy.norm("cosine"),
                "discrepancy, 1 − cosine": discrepancy.norm("difference"),
                "Bhattacharyya, mean over pairs": overlap,
            }
        )
    return Table.of("layers", f"Layers of {model.name}", records)


def _growth(study: Study, model: Pass, baseline: Pass) -> tuple[Table, Picture]:
    records: list[dict[str, Cell]] = []
    for (name, ours), theirs in zip(model.discrepancy.items(), baseline.discrepancy.values(), strict=True):
        record: dict[str, Cell] = {"layer": study.label(name)}
        for measure, title in GROWTH.items():
            record[f"{title} [%]"] = percent_growth(ours.norm(measure), theirs.norm(measure))
        records.append(record)
    table = Table.of("growth", f"Growth of discrepancy in {model.name} against {baseline.name}", records)
    _, *columns = zip(*table.rows, strict=True)
    picture = Curves(
        f"Growth of discrepancy against {baseline.name}",
        "Above 0 heads of that layer moved apart (closer together, by cosine + 1).",
        "Rotation, Figs. 6–7",
        (Panel("", tuple(curve(title, column) for title, column in zip(GROWTH.values(), columns, strict=True))),),
        x_label="attention module, in order",
        y_label="growth, %",
        bottom=0.0,
        top=0.0,
    )
    return table, picture
