"""Curves and matrices of the papers' figures, from records averaged over seeds."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from collab_compress.analysis.diversity import Measure, percent_growth
from collab_compress.experiments.results import Result
from collab_compress.report.section import Curve, Curves, Heatmap, Heatmaps, Panel, Picture, numbered

Pictures = list[Picture]
Groups = dict[str, list[Result]]
Points = dict[float, list[float]]

AT_MOST = 6
"""Variants that matrices are drawn of."""


def group_of(result: Result) -> str:
    """Name what records may be compared within: column and model."""
    return f"{result.column.name}, {result.variant.model}"


def name_of(result: Result) -> str:
    """Name a variant: method, and stage where that is not fine-tuning."""
    variant = result.variant
    return variant.method if variant.stage == "tuned" else f"{variant.method}/{variant.stage}"


def by(results: Iterable[Result], key: Callable[[Result], str]) -> Groups:
    """Part records by a key."""
    found: Groups = defaultdict(list)
    for result in results:
        found[key(result)].append(result)
    return dict(found)


def by_group(results: Iterable[Result]) -> Groups:
    """Part records by what may be compared: column and model."""
    return by(results, group_of)


def score_label(result: Result) -> str:
    """Name what a score is, at an axis."""
    return result.column.metric.replace("bleu", "BLEU")


def is_plain(result: Result) -> bool:
    """Return whether a record is of plain fine-tuning."""
    return result.variant.method == "plain" and result.variant.stage == "tuned"


def picture(
    title: str, reading: str, source: str, panels: Iterable[tuple[str, Sequence[Curve]]], x: str, y: str,
    bottom: float | None = None,
) -> Curves:  # fmt: skip
    """Make a picture of panels of curves."""
    return Curves(title, reading, source, tuple(Panel(name, tuple(c)) for name, c in panels), x, y, bottom)


def drawn(curves: Mapping[str, Mapping[float, Sequence[float]]]) -> tuple[Curve, ...]:
    """Draw each curve through the means of its points."""
    return tuple(
        Curve(name, tuple(sorted(points)), tuple(fmean(points[x]) for x in sorted(points)))
        for name, points in curves.items()
    )


def mean_curves(
    results: Iterable[Result],
    name: Callable[[Result], str],
    x: Callable[[Result], float | None],
    y: Callable[[Result], float | None],
) -> tuple[Curve, ...]:
    """Draw a curve through the means over seeds of each variant."""
    points: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        place, value = x(result), y(result)
        if place is not None and value is not None:
            points[name(result)][name_of(result)].append((place, value))
    curves = []
    for curve, variants in points.items():
        means = sorted((fmean(a for a, _ in each), fmean(b for _, b in each)) for each in variants.values())
        curves.append(Curve(curve, tuple(a for a, _ in means), tuple(b for _, b in means)))
    return tuple(curves)


def kind_of_sharing(result: Result) -> str:
    """Return whether the heads of an untrained model are "shared" or narrow and "concatenated"."""
    attention = (result.recipe.get("fresh") or {}).get("attention") or {"train_mixing": False}
    return "shared" if attention.get("train_mixing", True) else "concatenated"


def own_width(result: Result) -> float | None:
    """Width of queries and keys of an untrained model, all heads together."""
    fresh = result.recipe.get("fresh") or {}
    attention = fresh.get("attention")
    return attention.get("dk") if attention else fresh.get("width")


def millions(result: Result) -> float | None:
    """Count parameters."""
    return None if result.parameters is None else result.parameters / 1e6


def width_curves(
    results: Sequence[Result], y: Callable[[Result], float | None], title: str, source: str, label: str
) -> Pictures:
    """Draw what conversions of each kind have at each shared width."""
    pictures: Pictures = []
    for group, found in by_group(results).items():
        converted = [result for result in found if result.variant.conversion]
        curves = list(mean_curves(converted, _kind_of_conversion, _shared_width, y))
        widths = [x for curve in curves for x in curve.x if x is not None]
        dense = [value for result in found if is_plain(result) and (value := y(result)) is not None]
        if len(set(widths)) > 1:
            if dense:
                curves.append(Curve("dense", (min(widths), max(widths)), (fmean(dense),) * 2, "dashed"))
            pictures.append(
                picture(f"{title}, {group}", "Mean over seeds.", source, [("", curves)], "shared width", label)
            )
    return pictures


def _shared_width(result: Result) -> float | None:
    dk: float | None = (result.recipe.get("compression") or {}).get("dk")
    return dk


def _kind_of_conversion(result: Result) -> str:
    kind = re.sub(r"\d+", "", result.variant.conversion or "").strip("-")
    kind = {"dk": "converted", "cp": "weights alone", "dk-recovered": "recovered"}.get(kind, kind)
    return f"{kind}, fine-tuned again" if result.variant.again else kind


def lowest_seeds(results: Iterable[Result], measure: str) -> dict[str, Result]:
    """Return the record with the lowest seed of each variant that has a measure."""
    found: dict[str, Result] = {}
    for result in sorted(results, key=lambda result: result.seed):
        if result.measures.get(measure):
            found.setdefault(name_of(result), result)
    return dict(list(found.items())[:AT_MOST])


def kinds_of(measure: str, results: Iterable[Result]) -> list[str]:
    """Name the kinds of attention that have a measure."""
    return list(dict.fromkeys(kind for result in results for kind in result.measures.get(measure, {})))


def heatmap(title: str, rows: Sequence[Sequence[float]], columns: int) -> Heatmap:
    """Make a matrix of rows of any lengths; what is no finite number is left empty."""
    found = [tuple(cell if math.isfinite(cell) else None for cell in row) for row in rows]
    values = tuple(row + (None,) * (columns - len(row)) for row in found)
    return Heatmap(title, values, numbered(len(rows)), numbered(columns))


def matrix_pictures(
    results: Iterable[Result], measure: str, title: str, reading: str, source: str, rows: str, columns: str
) -> Pictures:
    """Draw a picture for each variant, with the matrices of all layers."""
    pictures: Pictures = []
    for group, found in by_group(results).items():
        for name, result in lowest_seeds(found, measure).items():
            maps = tuple(
                heatmap(f"{kind} {layer}", matrix, len(matrix[0]))
                for kind, layers in result.measures[measure].items()
                for layer, matrix in enumerate(layers)
                if matrix and matrix[0]
            )
            if maps:
                cells = [abs(cell) for heat in maps for row in heat.values for cell in row if cell is not None]
                reach = max(cells, default=0.0) or 1.0
                pictures.append(
                    Heatmaps(f"{title} of {name}, {group}", f"{reading} Seed {result.seed}.", source, maps, -reach,
                             reach, "diverging", rows, columns)
                )  # fmt: skip
    return pictures


def alpha_matrices(results: Sequence[Result], title: str, source: str, growing: bool) -> Pictures:
    """Draw alphas trained with growth, or without."""

    def grows(result: Result) -> bool:
        alphas: Mapping[str, Any] = (result.recipe.get("heads") or {}).get("alphas") or {}
        return bool(alphas) and (alphas.get("growth_weight", 0) > 0) == growing

    return matrix_pictures(
        [result for result in results if grows(result)], "alphas", title,
        "A strong diagonal keeps heads as they are; what lies off it mixes head j into head i.", source,
        "head i that leaves", "head j that enters",
    )  # fmt: skip


def of_rotation(results: Iterable[Result]) -> list[Result]:
    """Return the results that "Multi-Head Rotation" compares: plain training, alphas, rotation and agreement."""

    def compared(result: Result) -> bool:
        heads = result.recipe.get("heads") or {}
        penalties = {penalty.get("name", "") for penalty in heads.get("penalties") or ()}
        return is_plain(result) or bool(heads.get("alphas") or heads.get("rotation")) or "agreement" in penalties

    return [result for result in results if compared(result)]


def discrepancy_growth(results: Sequence[Result], metric: Measure, title: str, source: str) -> Pictures:
    """Draw, for each layer, by how many per cent a discrepancy is larger than the plain model's of the same seed."""
    pictures: Pictures = []
    for group, found in by_group(of_rotation(results)).items():
        measured = [result for result in found if result.measures.get("discrepancy")]
        plain = {result.seed: result.measures["discrepancy"] for result in measured if is_plain(result)}
        panels = []
        for kind in kinds_of("discrepancy", measured):
            curves: dict[str, Points] = defaultdict(lambda: defaultdict(list))
            for result in measured:
                if not is_plain(result) and result.seed in plain:
                    theirs, ours = plain[result.seed].get(kind, ()), result.measures["discrepancy"].get(kind, ())
                    for layer, (base, grown) in enumerate(zip(theirs, ours, strict=False)):
                        growth = percent_growth(grown.get(metric, 0.0), base.get(metric, 0.0))
                        if growth is not None:
                            curves[name_of(result)][layer].append(growth)
            if curves:
                panels.append((kind, drawn(curves)))
        if panels:
            pictures.append(
                picture(f"{title}, {group}", "Above 0 heads are farther apart than in the plain model.",
                         source, panels, "layer", "%")
            )  # fmt: skip
    return pictures


def svcca_curves(results: Sequence[Result], title: str, source: str, key: Callable[[Result], str]) -> Pictures:
    """Draw canonical correlations between heads, in order, for each kind of attention."""
    pictures: Pictures = []
    for group, found in by(results, key).items():
        panels = []
        curves_of = [(result, result.measures.get("svcca", {}).get("curve", {})) for result in found]
        for kind in dict.fromkeys(kind for _, curves in curves_of for kind in curves):
            points: dict[str, Points] = defaultdict(lambda: defaultdict(list))
            for result, curves in curves_of:
                for place, value in enumerate(curves.get(kind, ()), 1):
                    points[name_of(result)][place].append(value)
            panels.append((kind, drawn(points)))
        if panels:
            pictures.append(
                picture(f"{title}, {group}", "The further right a curve stays high, the more directions two heads "
                         "of the last layer share. Mean over seeds.", source, panels, "coefficient, in order",
                         "canonical correlation", bottom=0.0)
            )  # fmt: skip
    return pictures


def is_penalised(result: Result) -> bool | None:
    """Return whether Bhattacharyya's penalty is trained with (True) or only measured (False); None without it."""
    penalties: Sequence[Mapping[str, Any]] = (result.recipe.get("heads") or {}).get("penalties") or ()
    weights = [penalty.get("weight", 1.0) for penalty in penalties if penalty.get("name") == "bhattacharyya"]
    return None if not weights else any(weight != 0 for weight in weights)


def _logged(results: Iterable[Result], key: str) -> dict[str, Points]:
    """Return the logged values of a name: variant → epoch → values of the seeds."""
    found: dict[str, Points] = defaultdict(lambda: defaultdict(list))
    for result in results:
        for line in result.history:
            if key in line and "epoch" in line:
                found[name_of(result)][round(float(line["epoch"]), 4)].append(float(line[key]))
    return found


def history_curves(
    results: Iterable[Result], key: str, title: str, reading: str, source: str, label: str
) -> Pictures:
    """Draw what was logged under a name against epochs."""
    pictures: Pictures = []
    for group, found in by_group(results).items():
        curves = drawn(_logged(found, key))
        if curves:
            reads = f"{reading} Mean over seeds."
            pictures.append(picture(f"{title}, {group}", reads, source, [("", curves)], "epoch", label))
    return pictures


def loss_curves(results: Iterable[Result], title: str, source: str, penalised: bool) -> Pictures:
    """Draw the losses that were logged, of models with the penalty, or without."""
    shown = {"task_loss": "cross-entropy", "bhattacharyya": "overlap", "loss": "total"}
    pictures: Pictures = []
    for group, found in by_group(result for result in results if is_penalised(result) is penalised).items():
        panels = []
        for variant, each in by(found, name_of).items():
            curves = {name: points for key, name in shown.items() for points in _logged(each, key).values()}
            if curves:
                panels.append((variant, drawn(curves)))
        if panels:
            pictures.append(
                picture(f"{title}, {group}", "The total is what training lowers. Mean over seeds.", source, panels,
                         "epoch", "nats; overlap as it is", bottom=0.0)
            )  # fmt: skip
    return pictures
