"""Sections that compare heads: similarity (SVCCA and CKA) of heads, layers and models; diversity of heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress import analysis
from collab_compress.analysis import SVCCA, JointCovariance
from collab_compress.analysis.diversity import Measure
from collab_compress.errors import HeadError
from collab_compress.report.context import HeadMeasures, ReportContext
from collab_compress.report.section import (
    Cell,
    Curves,
    Heatmaps,
    Panel,
    Picture,
    Section,
    Table,
    curve,
    heatmap,
    short,
)

SOURCE = "Diversity, section 3"
GROWTH: dict[Measure, str] = {"difference": "1 − cosine (Fig. 6)", "l2": "L2 (Fig. 7)", "cosine": "cosine + 1"}


def similarity(context: ReportContext) -> Section:
    """Return how similar heads and layers are, and two models."""
    heads, layers = _covariances(context)
    samples = context.heads.samples.result()
    if max(len(joint.widths) for joint in heads.values()) < 2 and not layers and context.baseline is None:
        raise HeadError("a single head in a single layer has no other to be compared with")
    correlations = {name: analysis.svcca(joint) for name, joint in heads.items()}
    alignments = {name: analysis.cka(joint) for name, joint in heads.items()}
    tables: list[Table] = []
    pictures: list[Picture] = []
    highlights: list[str] = []
    pairs = {name: result for name, result in correlations.items() if len(result.labels) > 1}
    if pairs:
        tables.append(_heads_table(context, correlations, alignments, samples))
        for title, matrices in (
            ("SVCCA of heads", {name: result.similarity for name, result in pairs.items()}),
            ("CKA of heads", {name: alignments[name] for name in pairs}),
        ):
            reading = "Strong cells off the diagonal are pairs of similar heads."
            pictures.append(Heatmaps(title, reading, SOURCE, context.head_maps(matrices)))
        pictures.append(_correlation_curves(context, "SVCCA coefficients", "mean over pairs of heads", pairs))
        correlation = fmean(result.mean for result in pairs.values())
        alignment = fmean(analysis.mean_over_pairs(alignments[name]) for name in pairs)
        highlights.append(
            f"Two heads of a layer have a similarity of {short(correlation)} (SVCCA) and {short(alignment)} (linear "
            "CKA) on average."
        )
    pictures += [_layer_maps(context, joint) for joint in layers]
    note = ""
    if context.baseline is not None:
        try:
            table, model_pictures, highlight = _compare_models(context, context.baseline)
        except HeadError as error:  # as for models of different depths
            note = f" The two models were not compared: {error}."
        else:
            tables.append(table)
            pictures += model_pictures
            highlights.append(highlight)
    tokens = max(joint.count for joint in heads.values())
    return Section(
        "similarity",
        "What heads have in common",
        "SVCCA (canonical correlations, with 99 % of the variance kept) measures how far one head is a linear "
        "function of another, CKA (centred kernel alignment) whether both arrange tokens alike; both of head outputs "
        f"at {tokens:,} tokens that are no padding. With few sequences, however long, all values come out too high, "
        "so compare models on the same text. Linear CKA of independent heads is not 0 but about √(dᵢdⱼ)/N. The "
        f"unbiased estimate (HSIC₁ on {min(context.options.kernel_tokens, tokens):,} tokens drawn from all "
        "sequences) has no such bias and may be below 0. To see how similar unrelated heads "
        "are, compare with the same model trained from another seed: the table of models then lists the mean "
        "similarity over all pairs of heads, one from each model." + note,
        "Diversity, Tables 2, 3, 5 and Figs. 2–4",
        tables,
        pictures,
        highlights,
    )


def _covariances(context: ReportContext) -> tuple[dict[str, JointCovariance], list[JointCovariance]]:
    """Return the covariance of the heads of each module, and of the layers that can be compared."""
    heads: dict[str, JointCovariance] = {}
    layers = []
    for joint in [joint for observer in context.heads.covariances for joint in observer.result().values()]:
        names = [label.rpartition(":")[0] for label in joint.labels]  # of the module of each head
        counts = Counter(names)
        for name, count in counts.items():
            heads[name] = joint.only(range(names.index(name), names.index(name) + count))
        if len(counts) > 1:
            layers.append(joint.merged(list(counts.values()), list(counts)))
    return heads, layers


def _heads_table(
    context: ReportContext,
    correlations: Mapping[str, SVCCA],
    alignments: Mapping[str, Tensor],
    samples: Mapping[str, Tensor],
) -> Table:
    records: list[dict[str, Cell]] = []
    for name, result in correlations.items():
        several = len(result.labels) > 1
        records.append(
            {
                "layer": context.label(name),
                "SVCCA": result.mean if several else None,
                "CKA, linear": analysis.mean_over_pairs(alignments[name]) if several else None,
                "CKA, linear, unbiased": _unbiased_cka(samples[name]),
                "most similar heads": _most_similar(result.similarity) if several else None,
                "directions kept, mean": float(result.directions.diagonal().double().mean()),
            }
        )
    return Table("heads", "Similarity of heads, mean over pairs", records)


def _unbiased_cka(sample: Tensor) -> float | None:
    """Return unbiased CKA, mean over pairs of heads; None for a single head or fewer than four tokens."""
    if len(sample) < 4 or sample.shape[1] < 2:
        return None
    return analysis.mean_over_pairs(analysis.sample_cka(sample))


def _most_similar(matrix: Tensor) -> str:
    rows, columns = torch.triu_indices(len(matrix), len(matrix), 1)
    place = int(matrix[rows, columns].argmax())
    row, column = int(rows[place]), int(columns[place])
    return f"{row} and {column} ({short(float(matrix[row, column]))})"


def _correlation_curves(context: ReportContext, title: str, panel: str, correlations: Mapping[str, SVCCA]) -> Curves:
    curves = [curve(f"layer {context.label(name)}", result.curve, start=1) for name, result in correlations.items()]
    return Curves(
        title,
        "The further right a curve stays high, the more directions are the same in both.",
        "Diversity, Figs. 2–4",
        panels=[Panel(panel, curves)],
        x_label="coefficient, in order",
        y_label="canonical correlation",
        bottom=0.0,
        top=1.0,
    )


def _layer_maps(context: ReportContext, joint: JointCovariance) -> Heatmaps:
    labels = list(map(context.label, joint.labels))
    matrices = {"SVCCA": analysis.svcca(joint).similarity, "CKA": analysis.cka(joint)}
    return Heatmaps(
        "Similarity of layers",
        "Strong cells far from the diagonal are distant layers with similar outputs.",
        SOURCE,
        [heatmap(title, matrix, labels, labels) for title, matrix in matrices.items()],
        row_label="layer, all heads",
        column_label="layer, all heads",
    )


def _compare_models(context: ReportContext, baseline: PreTrainedModel) -> tuple[Table, list[Picture], str]:
    """Compare each layer with its counterpart in another model, with all heads and by head."""
    progress = context.progress("similarity of models")
    joints = analysis.model_covariances(context.model, baseline, context.batches, unit="head", progress=progress)
    correlations, alignments, records = {}, [], []
    aligned = {name: analysis.cka(joint) for name, joint in joints.items()}
    for name, joint in joints.items():
        heads = analysis.svcca(joint)
        layer = joint.merged([len(joint.rows), len(joint.columns)], ["model", "baseline"], leading=1)
        correlations[name] = analysis.svcca(layer)
        alignments.append(float(analysis.cka(layer)))
        record: dict[str, Cell] = {
            "layer": context.label(name),
            "SVCCA": correlations[name].mean,
            "CKA, linear": alignments[-1],
            "SVCCA of nearest heads": float(heads.similarity.max(1).values.mean()),
            "SVCCA of two heads": heads.mean,
            "CKA of two heads, linear": float(aligned[name].mean()),
        }
        records.append(record)
    maps = Heatmaps(
        f"CKA of heads, {context.name} against {context.baseline_name}",
        "A strong diagonal means that each head still does what its counterpart does.",
        SOURCE,
        context.head_maps(aligned),
        row_label=f"head of {context.name}",
        column_label=f"head of {context.baseline_name}",
    )
    title = f"Similarity of {context.name} and {context.baseline_name}, layer by layer"
    curves = _correlation_curves(context, "SVCCA coefficients between the models", "layer with layer", correlations)
    highlight = f"Layers of the two models have a similarity of {short(fmean(alignments))} (linear CKA) on average."
    return Table("models", title, records), [maps, curves], highlight


def diversity(context: ReportContext) -> Section:
    """Return how confident heads are, how far apart they are, and how much their attention overlaps."""
    model, baseline = context.heads, context.baseline_heads
    tables, pictures = [_diversity_table(context, model)], _diversity_pictures(context, model, baseline)
    note = ""
    if baseline is not None and len(baseline.discrepancy) == len(model.discrepancy):
        table, picture = _growth(context, model, baseline)
        tables.append(table)
        pictures.append(picture)
    elif baseline is not None:
        note = " The two models have different numbers of attention modules, so no growth is given."
    confidence = float(torch.cat(list(model.confidence.values())).mean())
    highlight = f"Heads give {100 * confidence:.0f} % of their attention to one token on average"
    overlaps = [overlap for overlap in model.mean_overlaps if overlap is not None]
    if overlaps:
        highlight += f"; the attention of two heads of a layer overlaps by {fmean(overlaps):.2f} (0 to 1)"
    return Section(
        "diversity",
        "How different heads are",
        "Confidence is the largest attention probability of a query, mean over tokens that do not end a sequence. "
        "AVG_L2 is a head's mean distance from the others of its layer, of outputs. Discrepancy sums a layer's "
        "distances over all ordered pairs; cosine + 1 falls as heads move apart, 1 − cosine and L2 grow. Overlap is "
        "the Bhattacharyya coefficient of two heads' attention probabilities: 1 where they are the same. Padding "
        "does not count." + note,
        "Rotation, sections 2.4 and 5.3; Diversified Attention, eq. 3",
        tables,
        pictures,
        highlights=[highlight + "."],
    )


def _diversity_pictures(context: ReportContext, model: HeadMeasures, baseline: HeadMeasures | None) -> list[Picture]:
    models = [model] if baseline is None else [model, baseline]
    titles = [""] if baseline is None else [model.name, baseline.name]
    differences = {name: module.difference for name, module in model.discrepancy.items()}
    distances = torch.cat([torch.cat([*heads.distances.values()]) for heads in models])
    return [
        Heatmaps(
            "Confidence of each head",
            "Strong cells are heads that look at one token at a time.",
            "Rotation, Fig. 5",
            [context.layer_map(title, heads.confidence) for title, heads in zip(titles, models, strict=True)],
            row_label="layer",
        ),
        Heatmaps(
            "AVG_L2 of each head",
            "Strong cells are heads whose outputs differ from the others'.",
            "Rotation, eq. 6",
            [context.layer_map(title, heads.distances) for title, heads in zip(titles, models, strict=True)],
            high=float(distances.nan_to_num().max()),
            row_label="layer",
        ),
        Heatmaps(
            "1 − cosine of head outputs",
            "Faint cells off the diagonal are heads that point the same way; above 1 they point in opposite ones.",
            "Rotation, section 5.3",
            context.head_maps(differences),
            high=max(1.0, *(float(matrix.max()) for matrix in differences.values())),
        ),
        Curves(
            "Overlap of attention by layer",
            "Low layers have heads that attend to different tokens; the paper sums this over layers.",
            "Diversified Attention, Fig. 1",
            [Panel("mean over pairs of heads", [curve(heads.name, heads.mean_overlaps) for heads in models])],
            x_label="attention module, in order",
            y_label="Bhattacharyya coefficient",
            bottom=0.0,
            top=1.0,
        ),
    ]


def _diversity_table(context: ReportContext, model: HeadMeasures) -> Table:
    records: list[dict[str, Cell]] = []
    for (name, discrepancy), overlap in zip(model.discrepancy.items(), model.mean_overlaps, strict=True):
        confidence = model.confidence[name.partition("[")[0]]
        records.append(
            {
                "layer": context.label(name),
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
    return Table("layers", f"Layers of {model.name}", records)


def _growth(context: ReportContext, model: HeadMeasures, baseline: HeadMeasures) -> tuple[Table, Picture]:
    records: list[dict[str, Cell]] = []
    growths: dict[str, list[float | None]] = {title: [] for title in GROWTH.values()}
    for (name, ours), theirs in zip(model.discrepancy.items(), baseline.discrepancy.values(), strict=True):
        record: dict[str, Cell] = {"layer": context.label(name)}
        for measure, title in GROWTH.items():
            growths[title].append(analysis.percent_growth(ours.norm(measure), theirs.norm(measure)))
            record[f"{title} [%]"] = growths[title][-1]
        records.append(record)
    table = Table("growth", f"Growth of discrepancy in {model.name} against {baseline.name}", records)
    picture = Curves(
        f"Growth of discrepancy against {baseline.name}",
        "Above 0 heads of that layer moved apart (closer together, by cosine + 1).",
        "Rotation, Figs. 6–7",
        [Panel("", [curve(title, growth) for title, growth in growths.items()])],
        x_label="attention module, in order",
        y_label="growth, %",
        bottom=0.0,
        top=0.0,
    )
    return table, picture
