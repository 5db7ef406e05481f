"""The papers' figures, drawn from records. Adding one is a function and a line in `FIGURES`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from collab_compress.experiments.results import Result
from collab_compress.report.section import Curve, Curves, Heatmap, Heatmaps, Panel, Picture, numbered
from collab_compress.training import SCHEDULES

Pictures = list[Picture]
Groups = dict[str, list[Result]]
Points = dict[float, list[float]]
SIZED = re.compile(r"d\d+-h\d+")
"""Methods that are models of other sizes, as in the sweep of Diversity's Table 1."""

AT_MOST = 6
"""Variants that matrices are drawn of."""


@dataclass(frozen=True)
class Figure:
    """A figure of a paper.

    Args:
        name: as in "Figure 3".
        shows: what the paper shows there.
        draw: records → pictures; none where the records lack what it takes.
        needs: what that is, and how it is made.
    """

    name: str
    shows: str
    draw: Callable[[Sequence[Result]], Pictures]
    needs: str


def nothing(results: Sequence[Result]) -> Pictures:
    """Draw nothing: no record has what it takes."""
    return []


def score_by_width(results: Sequence[Result]) -> Pictures:
    """Draw scores at each shared width, converted only and fine-tuned again."""
    return _by_width(results, lambda result: result.score, "Score against the shared width", "score", "Figure 5")


def seconds_by_width(results: Sequence[Result]) -> Pictures:
    """Draw how long conversions take at each shared width."""
    fresh = [result for result in results if result.variant.conversion and not result.variant.again]
    return _by_width(fresh, lambda result: result.seconds, "Time to convert", "seconds", "Figure 4")


def bleu_by_width(results: Sequence[Result]) -> Pictures:
    """Draw score, parameters and training time of untrained models against the width of queries and keys."""
    pictures: Pictures = []
    for group, found in _groups(results).items():
        shown = [result for result in found if (result.recipe.get("fresh") or {}).get("attention") or _plain(result)]
        if not any((result.recipe.get("fresh") or {}).get("attention") for result in shown):
            continue
        source = "Collaborate, Fig. 3"
        unit = _label(shown[0])
        pictures += [
            _picture(f"{what}, {group}", reading, source, [("", _curves(shown, _kind_of_sharing, x, y))], across, up)
            for what, reading, x, y, across, up in (
                ("Score against width", "The flatter a curve, the less narrower queries and keys cost.", _width,
                 lambda result: result.score, "width of queries and keys, all heads", unit),
                ("Score against parameters", "Higher to the left is better.", _millions,
                 lambda result: result.score, "parameters, millions", unit),
                ("Score against training time", "Higher to the left is better; times are of runs side by side.",
                 lambda result: result.seconds, lambda result: result.score, "training, s", unit),
            )
            if _curves(shown, _kind_of_sharing, x, y)
        ]  # fmt: skip
    return pictures


def mixing_matrices(results: Sequence[Result]) -> Pictures:
    """Draw how heads mix what they share, of one seed of each variant."""
    return _matrices(
        results, "mixing", "Mixing matrices",
        "A column of one strong cell belongs to one head, one with several to several.", "Collaborate, Fig. 2",
        "head", "component",
    )  # fmt: skip


def alphas_alone(results: Sequence[Result]) -> Pictures:
    """Draw alphas that were trained without growth, of one seed."""
    return _alphas(results, "Alphas without growth", "Rotation, Fig. 3", growing=False)


def alphas_with_growth(results: Sequence[Result]) -> Pictures:
    """Draw alphas that were trained with growth, of one seed."""
    return _alphas(results, "Alphas with nuclear growth", "Rotation, Fig. 4", growing=True)


def confidence(results: Sequence[Result]) -> Pictures:
    """Draw the confidence of each head: plain, mixed and rotated, of one seed."""
    pictures: Pictures = []
    for group, found in _groups(_rotation(results)).items():
        for kind in _kinds("confidence", found):
            maps = []
            for name, result in _firsts(found, "confidence").items():
                layers = result.measures["confidence"].get(kind)
                if layers:
                    maps.append(_heat(name, layers, len(max(layers, key=len))))
            pictures.append(
                Heatmaps(
                    f"Confidence of heads, {kind}, {group}", "Strong cells are heads that look at one token.",
                    "Rotation, Fig. 5", tuple(maps), 0.0, 1.0, row_label="layer", column_label="head",
                )
            )  # fmt: skip
    return pictures


def cosine_growth(results: Sequence[Result]) -> Pictures:
    """Draw how far the cosine discrepancy of heads grows against the plain model."""
    return _growth(results, "cosine", "Growth of cosine discrepancy", "Rotation, Fig. 6")


def l2_growth(results: Sequence[Result]) -> Pictures:
    """Draw how far the L2 discrepancy of heads grows against the plain model."""
    return _growth(results, "l2", "Growth of L2 discrepancy", "Rotation, Fig. 7")


def svcca_by_size(results: Sequence[Result]) -> Pictures:
    """Draw SVCCA coefficients between heads, of models of several sizes."""
    sized = [result for result in results if SIZED.fullmatch(result.variant.method)]
    return _svcca(sized, "SVCCA coefficients by size", "Diversity, Fig. 3", lambda result: result.column.name)


def svcca_by_method(results: Sequence[Result]) -> Pictures:
    """Draw SVCCA coefficients between heads, by what acted on them."""
    others = [result for result in results if not SIZED.fullmatch(result.variant.method)]
    return _svcca(others, "SVCCA coefficients by method", "Diversity, Fig. 4", _group)


def overlap_while_training(results: Sequence[Result]) -> Pictures:
    """Draw the overlap of heads while training, with the penalty and without."""
    return _history(
        results, "bhattacharyya", "Overlap of heads while training", "The lower, the less heads look at the same.",
        "Bhattacharyya, Fig. 1", "Bhattacharyya coefficient, sum over layers",
    )  # fmt: skip


def cross_entropy_while_training(results: Sequence[Result]) -> Pictures:
    """Draw the task's loss, without penalty, while training."""
    return _history(
        [result for result in results if _penalised(result) is not None], "task_loss",
        "Cross-entropy while training, without penalty", "Curves that meet learn the task equally well.",
        "Bhattacharyya, Fig. 2", "nats",
    )  # fmt: skip


def plain_losses(results: Sequence[Result]) -> Pictures:
    """Draw all losses of models without the penalty."""
    return _losses(results, "Losses without the penalty", "Bhattacharyya, Fig. 3", penalised=False)


def penalised_losses(results: Sequence[Result]) -> Pictures:
    """Draw all losses of models with the penalty."""
    return _losses(results, "Losses with the penalty", "Bhattacharyya, Fig. 4", penalised=True)


def bleu_while_training(results: Sequence[Result]) -> Pictures:
    """Draw BLEU on the validation set while training.

    Curves that end below half of the model's own BLEU on the same set are left out: where batches were grouped by
    length, records have once had translations scored against other rows' references.
    """

    def credible(result: Result) -> bool:
        logged = [float(line["eval_bleu"]) for line in result.history if "eval_bleu" in line]
        validation = next((split for split in result.metrics if split.startswith("validation")), "")
        final = result.metrics.get(validation, {}).get("bleu", 0.0)
        return bool(logged) and 2 * logged[-1] >= final

    return _history(
        [result for result in results if _penalised(result) is not None and credible(result)], "eval_bleu",
        "BLEU while training", "On the validation set, after each epoch.", "Bhattacharyya, Fig. 5", "BLEU",
    )  # fmt: skip


def schedules(results: Sequence[Result]) -> Pictures:
    """Draw the schedules of DropHead's probability, as they are; no record is needed."""
    steps = [step / 100 for step in range(101)]
    curves = tuple(
        Curve(name, tuple(100 * x for x in steps), tuple(schedule(x, 0.1, 0.2, 0.2) for x in steps))
        for name, schedule in SCHEDULES.items()
    )
    return [
        _picture(
            "Probability of DropHead while training", "For p = 0.2 and warmup over a tenth of training.",
            "DropHead, Fig. 2", [("", curves)], "steps, %", "probability", bottom=0.0,
        )
    ]  # fmt: skip


def pruning(results: Sequence[Result]) -> Pictures:
    """Draw scores with more and more heads pruned, with DropHead and without."""
    pictures: Pictures = []
    for group, found in _groups(results).items():
        curves: dict[str, Points] = defaultdict(lambda: defaultdict(list))
        for result in found:
            measured = result.measures.get("pruning")
            if measured and (_plain(result) or (result.recipe.get("heads") or {}).get("drophead")):
                for share, score in zip(measured["shares"], measured["scores"], strict=True):
                    curves[_name(result)][100 * share].append(score)
        if curves:
            pictures.append(
                _picture(
                    f"Score with heads pruned, {group}", "The later a curve falls, the more heads can go.",
                    "DropHead, Fig. 3", [("mean over seeds", _drawn(curves))], "heads pruned, %",
                    _label(found[0]),
                )
            )  # fmt: skip
    return pictures


RUN = "`collab-sweep {}`, whose records have {}"
FIGURES: dict[str, tuple[Figure, ...]] = {
    "collaborate": (
        Figure("Figure 1", "captured energy of queries and keys", nothing,
               "a trained model: `collab-analyze MODEL --sections energy`"),
        Figure("Figure 2", "mixing matrices", mixing_matrices, 'records of collaborative models with "mixing"'),
        Figure("Figure 3", "BLEU against width, parameters and time", bleu_by_width,
               RUN.format("collaborate.yaml", "several widths")),
        Figure("Figure 4", "time to decompose", seconds_by_width, 'records of conversions with "seconds"'),
        Figure("Figure 5", "scores against width, with and without a second fine-tuning", score_by_width,
               RUN.format("glue.yaml", "several widths")),
    ),
    "rotation": (
        Figure("Figure 3", "alphas without growth", alphas_alone, 'records of alphas without growth with "alphas"'),
        Figure("Figure 4", "alphas with growth", alphas_with_growth, 'records of alphas with growth with "alphas"'),
        Figure("Figure 5", "confidence", confidence, 'records with "confidence"'),
        Figure("Figure 6", "growth of cosine discrepancy", cosine_growth,
               'records with "discrepancy", of plain training and with alphas or rotation, of the same seeds'),
        Figure("Figure 7", "growth of L2 discrepancy", l2_growth,
               'records with "discrepancy", of plain training and with alphas or rotation, of the same seeds'),
    ),
    "diversity": (
        Figure("Figure 1", "attention maps", nothing,
               "a trained model: `collab-analyze MODEL --sections attention_maps --data FILE`"),
        Figure("Figure 2", "SVCCA coefficients with a model of one head", nothing,
               "two trained models of `collab-sweep diversity.yaml scale=paper-widths`: "
               "`collab-analyze MODEL --against ONE-HEAD --sections similarity --data FILE`"),
        Figure("Figure 3", "SVCCA coefficients between heads, by size", svcca_by_size,
               RUN.format("diversity.yaml scale=paper-widths", '"svcca"')),
        Figure("Figure 4", "SVCCA coefficients between heads, by method", svcca_by_method,
               RUN.format("diversity.yaml", '"svcca"')),
    ),
    "bhattacharyya": (
        Figure("Figure 1", "overlap while training", overlap_while_training,
               RUN.format("bhattacharyya.yaml", '"history"')),
        Figure("Figure 2", "cross-entropy while training", cross_entropy_while_training,
               RUN.format("bhattacharyya.yaml", '"history"')),
        Figure("Figure 3", "losses without the penalty", plain_losses,
               RUN.format("bhattacharyya.yaml", '"history"')),
        Figure("Figure 4", "losses with the penalty", penalised_losses,
               RUN.format("bhattacharyya.yaml", '"history"')),
        Figure("Figure 5", "BLEU while training", bleu_while_training,
               "records of translation with `eval_strategy: epoch` and `predict_with_generate: true` in "
               "tuning.arguments; curves that end below half of the final BLEU are left out"),
    ),
    "drophead": (
        Figure("Figure 2", "schedules", schedules, "nothing"),
        Figure("Figure 3", "scores with heads pruned", pruning, 'records with "pruning"'),
    ),
}  # fmt: skip
"""Key of the paper → its figures; those that only draw how a method works are left out."""


def _group(result: Result) -> str:
    return f"{result.column.name}, {result.variant.model}"


def _name(result: Result) -> str:
    variant = result.variant
    return variant.method if variant.stage == "tuned" else f"{variant.method}/{variant.stage}"


def _groups(results: Iterable[Result]) -> Groups:
    """Part records by what may be compared: column and model."""
    found: Groups = defaultdict(list)
    for result in results:
        found[_group(result)].append(result)
    return dict(found)


def _label(result: Result) -> str:
    """Name what a score is, at an axis."""
    return result.column.metric.replace("bleu", "BLEU")


def _plain(result: Result) -> bool:
    return result.variant.method == "plain" and result.variant.stage == "tuned"


def _picture(
    title: str, reading: str, source: str, panels: Iterable[tuple[str, Sequence[Curve]]], x: str, y: str,
    bottom: float | None = None,
) -> Curves:  # fmt: skip
    return Curves(title, reading, source, tuple(Panel(name, tuple(c)) for name, c in panels), x, y, bottom)


def _drawn(curves: Mapping[str, Mapping[float, Sequence[float]]]) -> tuple[Curve, ...]:
    """Draw each curve through the means of its points."""
    return tuple(
        Curve(name, tuple(sorted(points)), tuple(fmean(points[x]) for x in sorted(points)))
        for name, points in curves.items()
    )


def _curves(
    results: Iterable[Result], name: Callable[[Result], str], x: Callable[[Result], float | None],
    y: Callable[[Result], float | None],
) -> tuple[Curve, ...]:  # fmt: skip
    """Draw a curve through the means over seeds of each variant."""
    points: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        place, value = x(result), y(result)
        if place is not None and value is not None:
            points[name(result)][_name(result)].append((place, value))
    curves = []
    for curve, variants in points.items():
        means = sorted((fmean(a for a, _ in each), fmean(b for _, b in each)) for each in variants.values())
        curves.append(Curve(curve, tuple(a for a, _ in means), tuple(b for _, b in means)))
    return tuple(curves)


def _kind_of_sharing(result: Result) -> str:
    attention = (result.recipe.get("fresh") or {}).get("attention") or {"train_mixing": False}
    return "shared" if attention.get("train_mixing", True) else "concatenated"


def _width(result: Result) -> float | None:
    """Width of queries and keys of an untrained model, all heads together."""
    fresh = result.recipe.get("fresh") or {}
    attention = fresh.get("attention")
    return attention.get("dk") if attention else fresh.get("width")


def _millions(result: Result) -> float | None:
    return None if result.parameters is None else result.parameters / 1e6


def _by_width(
    results: Sequence[Result], y: Callable[[Result], float | None], title: str, label: str, figure: str
) -> Pictures:
    """Draw what conversions of each kind have at each shared width."""
    pictures: Pictures = []
    for group, found in _groups(results).items():
        converted = [result for result in found if result.variant.conversion]
        curves = list(_curves(converted, _kind_of_conversion, _shared_width, y))
        widths = [x for curve in curves for x in curve.x if x is not None]
        dense = [value for result in found if _plain(result) and (value := y(result)) is not None]
        if len(set(widths)) > 1:
            if dense:
                curves.append(Curve("dense", (min(widths), max(widths)), (fmean(dense),) * 2, "dashed"))
            source = f"Collaborate, {figure.replace('ure', '.')}"
            pictures.append(
                _picture(f"{title}, {group}", "Mean over seeds.", source, [("", curves)], "shared width", label)
            )
    return pictures


def _by(results: Iterable[Result], key: Callable[[Result], str]) -> Groups:
    found: Groups = defaultdict(list)
    for result in results:
        found[key(result)].append(result)
    return dict(found)


def _shared_width(result: Result) -> float | None:
    dk: float | None = (result.recipe.get("compression") or {}).get("dk")
    return dk


def _kind_of_conversion(result: Result) -> str:
    kind = re.sub(r"\d+", "", result.variant.conversion or "").strip("-")
    kind = {"dk": "converted", "cp": "weights alone", "dk-recovered": "recovered"}.get(kind, kind)
    return f"{kind}, fine-tuned again" if result.variant.again else kind


def _firsts(results: Iterable[Result], measure: str) -> dict[str, Result]:
    """Give the record of the lowest seed of each variant, of those that have a measure."""
    found: dict[str, Result] = {}
    for result in sorted(results, key=lambda result: result.seed):
        if result.measures.get(measure):
            found.setdefault(_name(result), result)
    return dict(list(found.items())[:AT_MOST])


def _kinds(measure: str, results: Iterable[Result]) -> list[str]:
    """Name the kinds of attention that have a measure."""
    return list(dict.fromkeys(kind for result in results for kind in result.measures.get(measure, {})))


def _heat(title: str, rows: Sequence[Sequence[float]], columns: int) -> Heatmap:
    values = tuple(tuple(row) + (None,) * (columns - len(row)) for row in rows)
    return Heatmap(title, values, numbered(len(rows)), numbered(columns))


def _matrices(
    results: Iterable[Result], measure: str, title: str, reading: str, source: str, rows: str, columns: str
) -> Pictures:
    """Draw a picture for each variant, with the matrices of all layers."""
    pictures: Pictures = []
    for group, found in _groups(results).items():
        for name, result in _firsts(found, measure).items():
            maps = tuple(
                _heat(f"{kind} {layer}", matrix, len(matrix[0]))
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


def _alphas(results: Sequence[Result], title: str, source: str, growing: bool) -> Pictures:
    def grows(result: Result) -> bool:
        alphas: Mapping[str, Any] = (result.recipe.get("heads") or {}).get("alphas") or {}
        return bool(alphas) and (alphas.get("growth_weight", 0) > 0) == growing

    return _matrices(
        [result for result in results if grows(result)], "alphas", title,
        "A strong diagonal keeps heads as they are; what lies off it mixes head j into head i.", source,
        "head i that leaves", "head j that enters",
    )  # fmt: skip


def _rotation(results: Iterable[Result]) -> list[Result]:
    """Give what "Multi-Head Rotation" compares: plain training, alphas, rotation, and agreement of heads."""

    def compared(result: Result) -> bool:
        heads = result.recipe.get("heads") or {}
        penalties = {penalty.get("name", "") for penalty in heads.get("penalties") or ()}
        return _plain(result) or bool(heads.get("alphas") or heads.get("rotation")) or "agreement" in penalties

    return [result for result in results if compared(result)]


def _growth(results: Sequence[Result], metric: str, title: str, source: str) -> Pictures:
    """Draw, for each layer, by how many per cent a discrepancy is larger than the plain model's of the same seed."""
    pictures: Pictures = []
    for group, found in _groups(_rotation(results)).items():
        measured = [result for result in found if result.measures.get("discrepancy")]
        plain = {result.seed: result.measures["discrepancy"] for result in measured if _plain(result)}
        panels = []
        for kind in _kinds("discrepancy", measured):
            curves: dict[str, Points] = defaultdict(lambda: defaultdict(list))
            for result in measured:
                if not _plain(result) and result.seed in plain:
                    theirs, ours = plain[result.seed].get(kind, ()), result.measures["discrepancy"].get(kind, ())
                    for layer, (base, grown) in enumerate(zip(theirs, ours, strict=False)):
                        curves[_name(result)][layer].append(100 * (grown[metric] / base[metric] - 1))
            if curves:
                panels.append((kind, _drawn(curves)))
        if panels:
            pictures.append(
                _picture(f"{title}, {group}", "Above 0 heads are farther apart than in the plain model.",
                         source, panels, "layer", "%")
            )  # fmt: skip
    return pictures


def _svcca(results: Sequence[Result], title: str, source: str, key: Callable[[Result], str]) -> Pictures:
    pictures: Pictures = []
    for group, found in _by(results, key).items():
        panels = []
        curves_of = [(result, result.measures.get("svcca", {}).get("curve", {})) for result in found]
        for kind in dict.fromkeys(kind for _, curves in curves_of for kind in curves):
            points: dict[str, Points] = defaultdict(lambda: defaultdict(list))
            for result, curves in curves_of:
                for place, value in enumerate(curves.get(kind, ()), 1):
                    points[_name(result)][place].append(value)
            panels.append((kind, _drawn(points)))
        if panels:
            pictures.append(
                _picture(f"{title}, {group}", "The further right a curve stays high, the more directions two heads "
                         "of the last layer share. Mean over seeds.", source, panels, "coefficient, in order",
                         "canonical correlation", bottom=0.0)
            )  # fmt: skip
    return pictures


def _penalised(result: Result) -> bool | None:
    """Say whether Bhattacharyya's penalty counts in training, or is only measured; None where neither."""
    penalties: Sequence[Mapping[str, Any]] = (result.recipe.get("heads") or {}).get("penalties") or ()
    weights = [penalty.get("weight", 1.0) for penalty in penalties if penalty.get("name") == "bhattacharyya"]
    return None if not weights else any(weight != 0 for weight in weights)


def _logged(results: Iterable[Result], key: str) -> dict[str, Points]:
    """Give what was logged under a name: variant → epoch → values of the seeds."""
    found: dict[str, Points] = defaultdict(lambda: defaultdict(list))
    for result in results:
        for line in result.history:
            if key in line and "epoch" in line:
                found[_name(result)][round(float(line["epoch"]), 4)].append(float(line[key]))
    return found


def _history(results: Iterable[Result], key: str, title: str, reading: str, source: str, label: str) -> Pictures:
    pictures: Pictures = []
    for group, found in _groups(results).items():
        curves = _drawn(_logged(found, key))
        if curves:
            reads = f"{reading} Mean over seeds."
            pictures.append(_picture(f"{title}, {group}", reads, source, [("", curves)], "epoch", label))
    return pictures


def _losses(results: Iterable[Result], title: str, source: str, penalised: bool) -> Pictures:
    shown = {"task_loss": "cross-entropy", "bhattacharyya": "overlap", "loss": "total"}
    pictures: Pictures = []
    for group, found in _groups(result for result in results if _penalised(result) is penalised).items():
        panels = []
        for variant, each in _by(found, _name).items():
            curves = {name: points for key, name in shown.items() for points in _logged(each, key).values()}
            if curves:
                panels.append((variant, _drawn(curves)))
        if panels:
            pictures.append(
                _picture(f"{title}, {group}", "The total is what training lowers. Mean over seeds.", source, panels,
                         "epoch", "nats; overlap as it is", bottom=0.0)
            )  # fmt: skip
    return pictures
