"""What two models have in common, layer by layer."""

from transformers import PreTrainedModel

from collab_compress.analysis import JointCovariance, cka, model_covariances, sample_cka, svcca
from collab_compress.report.heatmaps import heatmap, numbered
from collab_compress.report.numerals import short
from collab_compress.report.section import Cell, Column, Curve, Curves, Heatmaps, Panel, Picture, Table
from collab_compress.report.study import Study


def between_models(study: Study, baseline: PreTrainedModel) -> tuple[Table, list[Picture], list[str]]:
    """Compare each layer with the one at the same place in another model, as a whole and by head."""
    found = model_covariances(
        study.model, baseline, study.batches, unit="head", progress=study.progress("similarity of models")
    )
    labels = [study.label(name) for name in found]
    whole = [_whole(joint) for joint in found.values()]
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


def _whole(joint: JointCovariance) -> JointCovariance:
    """Join the heads of both models into a block each."""
    rows, columns = len(joint.rows), len(joint.columns)
    return joint.merged([rows, columns], ["model", "baseline"], leading=1)
