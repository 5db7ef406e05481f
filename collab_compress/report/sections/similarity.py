"""What heads, layers and models have in common: SVCCA and CKA."""

from __future__ import annotations

from collections.abc import Mapping

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
from collab_compress.analysis.cka import Kernel
from collab_compress.errors import HeadError
from collab_compress.report.section import (
    Cell,
    Column,
    Curve,
    Curves,
    Heatmaps,
    Omitted,
    Panel,
    Picture,
    Section,
    Table,
    heatmap,
    numbered,
    short,
)
from collab_compress.report.study import Study

SOURCE = "Diversity, section 3"


def similarity(study: Study) -> Section | Omitted:
    """Show how similar heads and layers are, and two models."""
    heads = {name: joint for each in study.seen.heads for name, joint in each.result().items()}
    together = [each.result() for each in study.seen.layers]
    for joint in together:
        heads |= _by_module(joint)
    layers = [whole for joint in together if len((whole := _whole(joint)).widths) > 1]
    samples = study.seen.samples.result()
    if max(len(joint.widths) for joint in heads.values()) < 2 and not layers and study.baseline is None:
        return Omitted("a single head in a single layer has no other to be compared with")
    found_svcca = {name: svcca(joint) for name, joint in heads.items()}
    found_cka = {name: cka(joint) for name, joint in heads.items()}
    pairs = {name: each for name, each in found_svcca.items() if len(each.rows) > 1}
    tables: list[Table] = []
    pictures: list[Picture] = []
    if pairs:
        tables.append(_table(study, found_svcca, found_cka, samples))
        pictures += [
            _matrices(study, "SVCCA of heads", {name: each.similarity for name, each in pairs.items()}),
            _matrices(study, "CKA of heads, linear kernel", {name: found_cka[name] for name in pairs}),
            _curves(study, pairs),
        ]
    pictures += [picture for joint in layers for picture in _layers(study, joint, samples)]
    highlights, uncompared = _highlights(pairs, found_cka), ""
    if study.baseline is not None:
        try:
            table, more, words = between_models(study, study.baseline)
        except HeadError as error:  # as for models of different depths
            uncompared = f" The two models were not compared: {error}."
        else:
            tables.append(table)
            pictures += more
            highlights += words
    tokens = max(joint.count for joint in heads.values())
    return Section(
        "similarity",
        "What heads have in common",
        f"SVCCA (99 % of the variance kept) and CKA of head outputs at {tokens:,} tokens that are no padding. SVCCA "
        "asks whether one head is a linear function of another, CKA whether both arrange tokens alike. Sequences "
        "count, not tokens: with few, all values come out too high, so compare models on the same text. Linear CKA "
        "of independent heads is not 0 but about √(dᵢdⱼ)/N. The unbiased estimates (HSIC₁ on one mini-batch of "
        f"{min(study.look.kernel_tokens, tokens):,} tokens drawn from all sequences) have no such bias and may be "
        "below 0; the RBF kernel is as wide as the median distance of two tokens." + uncompared,
        "Diversity, Tables 2, 3, 5 and Figs. 2–4",
        tuple(tables), tuple(pictures), tuple(highlights),
    )  # fmt: skip


def _by_module(joint: JointCovariance) -> dict[str, JointCovariance]:
    """Take apart the covariance of all heads, labelled `path:head`."""
    return {name: joint.only(range(start, start + size)) for name, (start, size) in _modules(joint).items()}


def _whole(joint: JointCovariance) -> JointCovariance:
    """Join the heads of each module."""
    modules = _modules(joint)
    return joint.merged([size for _, size in modules.values()], list(modules))


def _modules(joint: JointCovariance) -> dict[str, tuple[int, int]]:
    """Module path → place of its first head, and how many there are."""
    names = [label.rpartition(":")[0] for label in joint.labels]
    return {name: (names.index(name), names.count(name)) for name in names}


def _table(
    study: Study, found: Mapping[str, SVCCA], linear: Mapping[str, Tensor], samples: Mapping[str, Tensor]
) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, each in found.items():
        kept = each.directions.diagonal().double()
        rows.append((
            study.label(name), _mean(each.similarity), _mean(linear[name]),
            *(_mean(_unbiased(samples[name], kernel)) for kernel in ("linear", "rbf")),
            _most_similar(each.similarity), float(kept.mean()),
        ))  # fmt: skip
    columns = (
        "layer", "SVCCA", "CKA, linear", "CKA, linear, unbiased", "CKA, RBF, unbiased", "most similar heads",
        "directions kept, mean",
    )  # fmt: skip
    return Table("heads", "Similarity of heads, mean over pairs", tuple(map(Column, columns)), tuple(rows))


def _matrices(study: Study, title: str, matrices: Mapping[str, Tensor]) -> Heatmaps:
    return Heatmaps(
        title,
        "Strong cells off the diagonal are pairs of heads that answer alike.",
        SOURCE,
        tuple(
            heatmap(f"layer {study.label(name)}", matrix, *[numbered(len(matrix))] * 2)
            for name, matrix in matrices.items()
        ),
        0.0, 1.0, row_label="head", column_label="head",
    )  # fmt: skip


def _curves(study: Study, found: Mapping[str, SVCCA]) -> Curves:
    curves = tuple(
        Curve(f"layer {study.label(name)}", tuple(range(1, len(each.curve) + 1)), each.curve.tolist())  # type: ignore[arg-type]
        for name, each in found.items()
    )
    return Curves(
        "SVCCA coefficients",
        "The further right a curve stays high, the more directions two heads of that layer share, on average.",
        "Diversity, Figs. 2–4",
        (Panel("mean over pairs of heads", curves),), "coefficient, in order", "canonical correlation", 0.0, 1.0,
    )  # fmt: skip


def _layers(study: Study, joint: JointCovariance, samples: Mapping[str, Tensor]) -> list[Heatmaps]:
    names = [study.label(name) for name in joint.labels]
    found = {"SVCCA": svcca(joint).similarity, "CKA, linear kernel": cka(joint)}
    drawn = [samples[name].flatten(1) for name in joint.labels]
    if len(drawn[0]) > 3:
        found["CKA, RBF, unbiased"] = sample_cka(drawn, unbiased=True)
    return [
        Heatmaps(
            "Similarity of layers",
            "Strong cells far from the diagonal are layers that answer alike although others lie between them.",
            SOURCE,
            tuple(heatmap(title, matrix, names, names) for title, matrix in found.items()),
            0.0, 1.0, row_label="layer, all heads", column_label="layer, all heads",
        )
    ]  # fmt: skip


def _unbiased(sample: Tensor, kernel: Kernel) -> Tensor | None:
    """Compare heads by HSIC₁ on a sample; it needs four tokens."""
    return sample_cka(sample, kernel, unbiased=True) if len(sample) > 3 else None


def _mean(matrix: Tensor | None) -> float | None:
    return None if matrix is None or len(matrix) < 2 else mean_over_pairs(matrix)


def _most_similar(matrix: Tensor) -> str | None:
    if len(matrix) < 2:
        return None
    rows, columns = torch.triu_indices(len(matrix), len(matrix), 1)
    place = int(matrix[rows, columns].argmax())
    row, column = int(rows[place]), int(columns[place])
    return f"{row} and {column} ({short(float(matrix[row, column]))})"


def _highlights(found: Mapping[str, SVCCA], linear: Mapping[str, Tensor]) -> list[str]:
    if not found:
        return []
    values = [each.mean for each in found.values()]
    aligned = [mean_over_pairs(linear[name]) for name in found]
    return [
        f"Two heads of a layer are similar by {short(sum(values) / len(values))} (SVCCA) and "
        f"{short(sum(aligned) / len(aligned))} (linear CKA) on average."
    ]


def between_models(study: Study, baseline: PreTrainedModel) -> tuple[Table, list[Picture], list[str]]:
    """Compare each layer with the one at the same place in another model, as a whole and by head."""
    found = model_covariances(
        study.model, baseline, study.batches, unit="head", progress=study.progress("similarity of models")
    )
    labels = [study.label(name) for name in found]
    whole = [_whole_of_both(joint) for joint in found.values()]
    coefficients, aligned = [svcca(joint) for joint in whole], [float(cka(joint)) for joint in whole]
    kernels = _kernels(study, list(found))
    rows: list[tuple[Cell, ...]] = [
        (label, each.mean, alignment, kernel, float(svcca(joint).similarity.max(1).values.mean()))
        for label, each, alignment, kernel, joint in zip(
            labels, coefficients, aligned, kernels, found.values(), strict=True
        )
    ]
    table = Table(
        "models", f"Similarity of {study.name} and {study.baseline_name}, layer by layer",
        tuple(map(Column, ("layer", "SVCCA", "CKA, linear", "CKA, RBF, unbiased", "SVCCA of nearest heads"))),
        tuple(rows),
    )  # fmt: skip
    pictures: list[Picture] = [
        Heatmaps(
            f"CKA of heads, {study.name} against {study.baseline_name}",
            "A strong diagonal means that each head still does what its counterpart does.",
            "Diversity, section 3",
            tuple(
                heatmap(f"layer {label}", cka(joint), numbered(len(joint.rows)), numbered(len(joint.columns)))
                for label, joint in zip(labels, found.values(), strict=True)
            ),
            0.0, 1.0, row_label=f"head of {study.name}", column_label=f"head of {study.baseline_name}",
        ),
        Curves(
            "SVCCA coefficients between the models",
            "The further right a curve stays at 1, the more of the layer is the same in both models.",
            "Diversity, Figs. 2–4",
            (
                Panel(
                    "layer with layer",
                    tuple(
                        Curve(f"layer {label}", tuple(range(1, len(each.curve) + 1)), each.curve.tolist())  # type: ignore[arg-type]
                        for label, each in zip(labels, coefficients, strict=True)
                    ),
                ),
            ),
            "coefficient, in order", "canonical correlation", 0.0, 1.0,
        ),
    ]  # fmt: skip
    mean = sum(aligned) / len(aligned)
    return table, pictures, [f"Layers of the two models are similar by {short(mean)} (linear CKA) on average."]


def _kernels(study: Study, names: list[str]) -> list[float | None]:
    """CKA of each layer with its counterpart, by the RBF kernel on the same tokens; it needs four."""
    if study.baseline_seen is None:
        return [None] * len(names)
    ours, theirs = study.seen.samples.result(), list(study.baseline_seen.samples.result().values())
    places = {name: place for place, name in enumerate(ours)}
    both = [(ours[name].flatten(1), theirs[places[name]].flatten(1)) for name in names]
    return [float(sample_cka(pair, unbiased=True)[0, 1]) if len(pair[0]) > 3 else None for pair in both]


def _whole_of_both(joint: JointCovariance) -> JointCovariance:
    """Join the heads of both models into a block each."""
    rows, columns = len(joint.rows), len(joint.columns)
    return joint.merged([rows, columns], ["model", "baseline"], leading=1)
