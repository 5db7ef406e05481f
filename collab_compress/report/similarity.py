"""Sections that compare heads: similarity (SVCCA and CKA) of heads and of models; diversity of heads."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress import analysis
from collab_compress.errors import HeadError
from collab_compress.heads.importance import end_tokens
from collab_compress.report.section import Heatmaps, Label, Read, Section, Table, short


def similarity(model: PreTrainedModel, baseline: PreTrainedModel | None, read: Read, label: Label) -> Section:
    """Return how similar the heads of a model are, and how similar its layers are to another model's."""
    heads = analysis.head_covariances(model, read("heads"))
    pairs = {name: joint for name, joint in heads.items() if len(joint.widths) > 1}
    if not pairs and len(heads) < 2 and baseline is None:
        raise HeadError("a single head in a single layer has no other to be compared with")
    tables: dict[str, Table] = {}
    pictures: list[Heatmaps] = []
    highlights, notes = [], ""
    if pairs:
        rows: list[dict[str, Any]] = []
        matrices: dict[str, dict[str, Any]] = {"SVCCA": {}, "CKA": {}}
        for name, joint in pairs.items():
            correlation, alignment = analysis.svcca(joint), analysis.cka(joint)
            rows.append(
                {
                    "layer": label(name),
                    "SVCCA": correlation.mean,
                    "CKA, linear": analysis.mean_over_pairs(alignment),
                    "directions kept, mean": float(correlation.directions.diagonal().double().mean()),
                }
            )
            matrices["SVCCA"][f"layer {label(name)}"] = correlation.similarity.tolist()
            matrices["CKA"][f"layer {label(name)}"] = alignment.tolist()
        tables["heads"] = Table("Similarity of heads, mean over pairs", rows)
        reading = "Strong cells off the diagonal are pairs of similar heads (Diversity, section 3)."
        pictures += [Heatmaps(f"{measure} of heads", reading, maps) for measure, maps in matrices.items()]
        mean_svcca, mean_cka = (fmean(row[measure] for row in rows) for measure in ("SVCCA", "CKA, linear"))
        highlights.append(
            f"Two heads of a layer have a similarity of {short(mean_svcca)} (SVCCA) and {short(mean_cka)} (linear "
            "CKA) on average."
        )
    if baseline is not None:
        try:
            by_head = analysis.model_covariances(model, baseline, read("similarity of models"))
        except HeadError as error:  # as for models of different depths
            notes += f" The two models were not compared: {error}."
        else:
            rows, maps = [], {}
            for name, joint in by_head.items():
                correlations, alignment = analysis.svcca(joint).similarity, analysis.cka(joint)
                rows.append(
                    {
                        "layer": label(name),
                        "SVCCA": analysis.svcca(joint.layers).mean,
                        "CKA, linear": float(analysis.cka(joint.layers)),
                        "SVCCA of nearest heads": float(correlations.max(1).values.mean()),
                        "SVCCA of two heads": float(correlations.mean()),
                        "CKA of two heads, linear": float(alignment.mean()),
                    }
                )
                maps[f"layer {label(name)}"] = alignment.tolist()
            tables["models"] = Table("Similarity of the two models, layer by layer", rows)
            reading = "A strong diagonal means that each head still does what its counterpart does."
            title, sides = "CKA of heads, model against baseline", ("head of the model", "head of the baseline")
            pictures.append(Heatmaps(title, reading, maps, 1.0, False, *sides))
            mean_cka = fmean(row["CKA, linear"] for row in rows)
            highlights.append(
                f"Layers of the two models have a similarity of {short(mean_cka)} (linear CKA) on average."
            )
    return Section(
        "What heads have in common",
        "SVCCA (canonical correlations, with 99 % of the variance kept) measures how far one head is a linear "
        "function of another, CKA (centred kernel alignment) whether both arrange tokens alike; both of head outputs "
        f"at {max(joint.count for joint in heads.values()):,} tokens that are no padding. With few sequences, "
        "however long, all values come out too high, so compare models on the same text. Linear CKA of independent "
        "heads is not 0 but about √(dᵢdⱼ)/N. To see how similar unrelated heads are, compare with the same model "
        "trained from another seed: the table of models has the mean over all pairs of heads, one from each model "
        f"(Diversity, Tables 2, 3 and 5).{notes}",
        tables,
        pictures,
        highlights,
    )


def diversity(
    models: Mapping[str, tuple[PreTrainedModel, Label]], read: Read, tokenizer: PreTrainedTokenizerBase | None
) -> Section:
    """Return how confident heads of each model are, how far apart they are, and how much their attention overlaps."""
    rows: list[dict[str, Any]] = []
    pictures, highlights = [], []
    for model_name, (model, label) in models.items():
        confidences = analysis.confidence(model, read("confidence"), exclude=end_tokens(model, tokenizer))
        apart = analysis.discrepancy(model, read("distances"))
        overlaps = analysis.bhattacharyya(model, read("overlap"))
        distances = {name: heads.l2.sum(1) / (len(heads.l2) - 1) for name, heads in apart.items()}
        for name, heads in apart.items():
            confidence, overlap = confidences[name.partition("[")[0]], overlaps[name]
            rows.append(
                {
                    "model": model_name,
                    "layer": label(name),
                    "confidence, mean": float(confidence.mean()),
                    "confidence, largest": float(confidence.max()),
                    "AVG_L2, mean": float(distances[name].mean()),
                    "discrepancy, L2": heads.norm("l2"),
                    "discrepancy, cosine + 1": heads.norm("cosine"),
                    "discrepancy, 1 − cosine": heads.norm("difference"),
                    "Bhattacharyya": analysis.mean_over_pairs(overlap) if len(overlap) > 1 else None,
                }
            )
        of_model = f" of {model_name}" if len(models) > 1 else ""
        for title, reading, vectors in (
            ("Confidence", "Strong cells look at one token at a time (Rotation, Fig. 5).", confidences),
            ("AVG_L2", "Strong cells have outputs unlike those of other heads (Rotation, eq. 6).", distances),
        ):
            maps = {"": [vector.nan_to_num().tolist() for vector in vectors.values()]}
            high = 1.0 if vectors is confidences else max(map(max, maps[""]))
            title, names = f"{title} of each head{of_model}", list(map(label, vectors))
            pictures.append(Heatmaps(title, reading, maps, high, row_label="layer", row_names=names))
        mean = fmean(head for heads in confidences.values() for head in heads.tolist())
        highlights.append(f"Heads{of_model} give {100 * mean:.0f} % of their attention to one token on average.")
    return Section(
        "How different heads are",
        "Confidence is the largest attention probability of a query, mean over tokens that do not end a sequence. "
        "AVG_L2 is a head's mean distance from the others of its layer, of outputs. Discrepancy sums a layer's "
        "distances over all ordered pairs; cosine + 1 falls as heads move apart, 1 − cosine and L2 grow. The "
        "Bhattacharyya coefficient is the overlap of two heads' attention probabilities, 1 where they are the same. "
        "Padding does not count (Rotation, sections 2.4 and 5.3; Diversified Attention, eq. 3).",
        {"layers": Table("Layers", rows)},
        pictures,
        highlights,
    )
