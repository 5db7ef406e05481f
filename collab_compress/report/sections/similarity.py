"""Similarity of heads, of layers and of two models: SVCCA and CKA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis import (
    SVCCA,
    JointCovariance,
    cka,
    mean_over_pairs,
    model_covariances,
    sample_cka,
    svcca,
)
from collab_compress.analysis.similarity import Kernel
from collab_compress.errors import HeadError
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
    short,
)
from collab_compress.report.study import Study

SOURCE = "Diversity, section 3"


def similarity(study: Study) -> Section | Omitted:
    """Return how similar heads and layers are, and two models."""
    heads = {name: joint for observer in study.seen.heads for name, joint in observer.result().items()}
    joined = []
    for observer in study.seen.layers:
        joint = observer.result()
        names = [label.rpartition(":")[0] for label in joint.labels]  # of the module of each head
        counts = Counter(names)
        for name, count in counts.items():
            heads[name] = joint.only(range(names.index(name), names.index(name) + count))
        if len(counts) > 1:
            joined.append(joint.merged(list(counts.values()), list(counts)))
    samples = study.seen.samples.result()
    if max(len(joint.widths) for joint in heads.values()) < 2 and not joined and study.baseline is None:
        return Omitted("a single head in a single layer has no other to be compared with")
    coefficients = {name: svcca(joint) for name, joint in heads.items()}
    linear = {name: cka(joint) for name, joint in heads.items()}
    pairs = {name: result for name, result in coefficients.items() if len(result.rows) > 1}
    tables: list[Table] = []
    pictures: list[Picture] = []
    highlights: list[str] = []
    if pairs:
        tables.append(_heads_table(study, coefficients, linear, samples))
        pictures += [
            *(
                Heatmaps(
                    title,
                    "Strong cells off the diagonal are pairs of similar heads.",
                    SOURCE,
                    study.head_maps(matrices),
                )
                for title, matrices in (
                    ("SVCCA of heads", {name: result.similarity for name, result in pairs.items()}),
                    ("CKA of heads, linear kernel", {name: linear[name] for name in pairs}),
                )
            ),
            _curves(study, "SVCCA coefficients", "mean over pairs of heads", pairs),
        ]
        correlation = fmean(result.mean for result in pairs.values())
        alignment = fmean(mean_over_pairs(linear[name]) for name in pairs)
        highlights.append(
            f"Two heads of a layer are similar by {short(correlation)} (SVCCA) and {short(alignment)} (linear CKA) "
            "on average."
        )
    pictures += [_layers(study, joint, samples) for joint in joined]
    note = ""
    if study.baseline is not None:
        try:
            table, model_pictures, highlight = between_models(study, study.baseline)
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
        f"SVCCA (99 % of the variance kept) and CKA of head outputs at {tokens:,} tokens that are no padding. SVCCA "
        "asks whether one head is a linear function of another, CKA whether both arrange tokens alike. Sequences "
        "count, not tokens: with few, all values come out too high, so compare models on the same text. Linear CKA "
        "of independent heads is not 0 but about √(dᵢdⱼ)/N. The unbiased estimates (HSIC₁ on "
        f"{min(study.look.kernel_tokens, tokens):,} tokens drawn from all sequences) have no such bias and may be "
        "below 0; the RBF kernel is as wide as the median distance of two tokens." + note,
        "Diversity, Tables 2, 3, 5 and Figs. 2–4",
        tables=tuple(tables),
        pictures=tuple(pictures),
        highlights=tuple(highlights),
    )


def between_models(study: Study, baseline: PreTrainedModel) -> tuple[Table, list[Picture], str]:
    """Compare each layer with its counterpart in another model, as a whole and by head."""
    joints = model_covariances(
        study.model, baseline, study.batches, unit="head", progress=study.progress("similarity of models")
    )
    joined = {
        name: joint.merged([len(joint.rows), len(joint.columns)], ["model", "baseline"], leading=1)
        for name, joint in joints.items()
    }
    coefficients = {name: svcca(joint) for name, joint in joined.items()}
    linear = {name: float(cka(joint)) for name, joint in joined.items()}
    radial = _radial_cka(study)
    records: list[dict[str, Cell]] = [
        {
            "layer": study.label(name),
            "SVCCA": coefficients[name].mean,
            "CKA, linear": linear[name],
            "CKA, RBF, unbiased": radial.get(name),
            "SVCCA of nearest heads": float(svcca(joint).similarity.max(1).values.mean()),
        }
        for name, joint in joints.items()
    ]
    maps = Heatmaps(
        f"CKA of heads, {study.name} against {study.baseline_name}",
        "A strong diagonal means that each head still does what its counterpart does.",
        SOURCE,
        study.head_maps({name: cka(joint) for name, joint in joints.items()}),
        row_label=f"head of {study.name}",
        column_label=f"head of {study.baseline_name}",
    )
    title = f"Similarity of {study.name} and {study.baseline_name}, layer by layer"
    curves = _curves(study, "SVCCA coefficients between the models", "layer with layer", coefficients)
    mean = short(fmean(linear.values()))
    highlight = f"Layers of the two models are similar by {mean} (linear CKA) on average."
    return Table.of("models", title, records), [maps, curves], highlight


def _heads_table(
    study: Study, coefficients: Mapping[str, SVCCA], linear: Mapping[str, Tensor], samples: Mapping[str, Tensor]
) -> Table:
    records: list[dict[str, Cell]] = []
    for name, result in coefficients.items():
        several = len(result.rows) > 1
        records.append(
            {
                "layer": study.label(name),
                "SVCCA": result.mean if several else None,
                "CKA, linear": mean_over_pairs(linear[name]) if several else None,
                "CKA, linear, unbiased": _unbiased(samples[name], "linear"),
                "CKA, RBF, unbiased": _unbiased(samples[name], "rbf"),
                "most similar heads": _most_similar(result.similarity) if several else None,
                "directions kept, mean": float(result.directions.diagonal().double().mean()),
            }
        )
    return Table.of("heads", "Similarity of heads, mean over pairs", records)


def _curves(study: Study, title: str, panel: str, coefficients: Mapping[str, SVCCA]) -> Curves:
    curves = [curve(f"layer {study.label(name)}", result.curve, start=1) for name, result in coefficients.items()]
    return Curves(
        title,
        "The further right a curve stays high, the more directions are the same in both.",
        "Diversity, Figs. 2–4",
        (Panel(panel, tuple(curves)),),
        x_label="coefficient, in order",
        y_label="canonical correlation",
        bottom=0.0,
        top=1.0,
    )


def _layers(study: Study, joint: JointCovariance, samples: Mapping[str, Tensor]) -> Heatmaps:
    labels = study.labels(joint.labels)
    matrices = {"SVCCA": svcca(joint).similarity, "CKA, linear kernel": cka(joint)}
    tokens = [samples[name].flatten(1) for name in joint.labels]
    if len(tokens[0]) > 3:
        matrices["CKA, RBF, unbiased"] = sample_cka(tokens, unbiased=True)
    return Heatmaps(
        "Similarity of layers",
        "Strong cells far from the diagonal are distant layers with similar outputs.",
        SOURCE,
        tuple(heatmap(title, matrix, labels, labels) for title, matrix in matrices.items()),
        row_label="layer, all heads",
        column_label="layer, all heads",
    )


def _unbiased(sample: Tensor, kernel: Kernel) -> float | None:
    """Return unbiased CKA, mean over pairs of heads; None for a single head or fewer than four tokens."""
    if len(sample) < 4 or sample.shape[1] < 2:
        return None
    return mean_over_pairs(sample_cka(sample, kernel, unbiased=True))


def _most_similar(matrix: Tensor) -> str:
    rows, columns = torch.triu_indices(len(matrix), len(matrix), 1)
    place = int(matrix[rows, columns].argmax())
    row, column = int(rows[place]), int(columns[place])
    return f"{row} and {column} ({short(float(matrix[row, column]))})"


def _radial_cka(study: Study) -> dict[str, float]:
    """Return CKA of each layer with its counterpart by the RBF kernel, of at least four tokens."""
    assert study.baseline_seen is not None
    samples = study.seen.samples.result().items()
    counterparts = study.baseline_seen.samples.result().values()
    return {
        name: float(sample_cka([sample.flatten(1), counterpart.flatten(1)], unbiased=True)[0, 1])
        for (name, sample), counterpart in zip(samples, counterparts, strict=True)
        if len(sample) > 3
    }
