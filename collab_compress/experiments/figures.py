"""The papers' figures, drawn from records. Adding one is a function and a line in `FIGURES`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from collab_compress.analysis.diversity import Measure, percent_growth
from collab_compress.experiments.results import Result
from collab_compress.report.section import Curve, Curves, Heatmap, Heatmaps, Panel, Picture, heatmap
from collab_compress.training import SCHEDULES

Pictures = list[Picture]

SIZED = re.compile(r"d\d+-h\d+")
"""Methods that are models of other sizes, as in the sweep of Diversity's Table 1."""

AT_MOST = 6
"""Variants that matrices are drawn of."""

LOSSES = {"task_loss": "cross-entropy", "bhattacharyya": "overlap", "loss": "total"}
"""Name in the Trainer's log → name in a picture."""


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


class Point(NamedTuple):
    """A point of a curve, from one record; points of a curve with the same key are drawn at their mean."""

    picture: str
    panel: str
    curve: str
    key: float | str
    x: float
    y: float


def curves(
    points: Iterable[Point], title: str, reading: str, source: str, x: str, y: str, bottom: float | None = None
) -> Pictures:
    """Draw curves through points: a picture for each name of a picture, a panel for each name of a panel."""
    pictures: Pictures = []
    table = pd.DataFrame(points, columns=Point._fields)
    for name, shown in table.groupby("picture", sort=False):
        panels = []
        for panel, lines in shown.groupby("panel", sort=False):
            drawn = [_curve(curve, line) for curve, line in lines.groupby("curve", sort=False)]
            panels.append(Panel(panel, tuple(drawn)))
        whole = f"{title}, {name}" if name else title
        pictures.append(Curves(whole, reading, source, tuple(panels), x, y, bottom))
    return pictures


def _curve(name: str, points: pd.DataFrame) -> Curve:
    """Draw a curve through the means of its points; one that is not finite stays so, unlike with pandas' mean."""
    means = points.groupby("key")[["x", "y"]].agg(fmean).sort_values(["x", "y"])
    return Curve(name, tuple(means["x"]), tuple(means["y"]), "dashed" if name == "dense" else "line")


def group_of(result: Result) -> str:
    """Name what records may be compared within: column and model."""
    return f"{result.column.name}, {result.variant.model}"


def name_of(result: Result) -> str:
    """Name a variant: method, and stage where that is not fine-tuning."""
    return result.variant.label.removesuffix("/tuned")


def is_plain(result: Result) -> bool:
    """Return whether a record is of plain fine-tuning."""
    return result.variant.label == "plain/tuned"


def heads_of(result: Result) -> Mapping[str, Any]:
    """Return the settings of what acts on heads."""
    return result.recipe.get("heads") or {}


def is_penalised(result: Result) -> bool | None:
    """Return whether Bhattacharyya's penalty is trained with (True) or only measured (False); None without it."""
    for penalty in heads_of(result).get("penalties") or ():
        if penalty.get("name") == "bhattacharyya":
            return bool(penalty.get("weight", 1.0) != 0)
    return None


def nothing(results: Sequence[Result]) -> Pictures:
    """Draw nothing: no record has what it takes."""
    return []


def score_by_width(results: Sequence[Result]) -> Pictures:
    """Draw scores at each shared width, converted only and fine-tuned again."""
    points = _by_width(results, lambda result: result.score)
    title = "Score against the shared width"
    return curves(points, title, "Mean over seeds.", "Collaborate, Fig. 5", "shared width", "score")


def seconds_by_width(results: Sequence[Result]) -> Pictures:
    """Draw how long conversions take at each shared width."""
    once = [result for result in results if result.variant.conversion and not result.variant.again]
    points = _by_width(once, lambda result: result.seconds)
    return curves(points, "Time to convert", "Mean over seeds.", "Collaborate, Fig. 4", "shared width", "seconds")


def _by_width(results: Sequence[Result], y: Callable[[Result], float | None]) -> list[Point]:
    """Return what conversions have at each shared width, where there are several, and what the dense model has."""
    points, widths = [], defaultdict(set)
    for result in results:
        group, width, value = group_of(result), (result.recipe.get("compression") or {}).get("dk"), y(result)
        if result.variant.conversion and width is not None and value is not None:
            widths[group].add(width)
            points.append(Point(group, "", _kind_of_conversion(result), result.variant.stage, width, value))
    for result in filter(is_plain, results):
        group, value = group_of(result), y(result)
        if widths[group] and value is not None:
            points += [Point(group, "", "dense", end, end, value) for end in (min(widths[group]), max(widths[group]))]
    return [point for point in points if len(widths[point.picture]) > 1]


def _kind_of_conversion(result: Result) -> str:
    kind = re.sub(r"\d+", "", result.variant.conversion or "").strip("-")
    kind = {"dk": "converted", "cp": "weights alone", "dk-recovered": "recovered"}.get(kind, kind)
    return f"{kind}, fine-tuned again" if result.variant.again else kind


def score_by_size(results: Sequence[Result]) -> Pictures:
    """Draw the scores of untrained models against width of queries and keys, parameters, and training time."""
    points: dict[str, list[Point]] = {"width": [], "parameters": [], "training time": []}
    fresh = [result for result in results if result.recipe.get("fresh")]
    narrow = {group_of(result) for result in fresh if result.recipe["fresh"].get("attention")}
    for result in fresh:
        settings = result.recipe["fresh"]
        attention = settings.get("attention")
        if group_of(result) not in narrow or not (attention or is_plain(result)):
            continue
        shared = attention and attention.get("train_mixing", True)
        sizes = {
            "width": attention.get("dk") if attention else settings.get("width"),
            "parameters": None if result.parameters is None else result.parameters / 1e6,
            "training time": result.seconds,
        }
        for what, x in sizes.items():
            if x is not None:
                curve = "shared" if shared else "concatenated"
                points[what].append(Point(group_of(result), "", curve, name_of(result), x, result.score))
    source = "Collaborate, Fig. 3"
    flat = "The flatter a curve, the less narrower queries and keys cost."
    width = "width of queries and keys, all heads"
    left = "Higher to the left is better."
    time = "Higher to the left is better; times are of runs side by side."
    return [
        *curves(points["width"], "Score against width", flat, source, width, "score"),
        *curves(points["parameters"], "Score against parameters", left, source, "parameters, millions", "score"),
        *curves(points["training time"], "Score against training time", time, source, "training, s", "score"),
    ]


def mixing_matrices(results: Sequence[Result]) -> Pictures:
    """Draw how heads mix what they share, of one seed of each variant."""
    reading = "A column of one strong cell belongs to one head, one with several to several."
    return _matrices(results, "mixing", "Mixing matrices", reading, "Collaborate, Fig. 2", "head", "component")


def alphas_alone(results: Sequence[Result]) -> Pictures:
    """Draw alphas that were trained without growth, of one seed."""
    return _alphas(results, "Alphas without growth", "Rotation, Fig. 3", growing=False)


def alphas_with_growth(results: Sequence[Result]) -> Pictures:
    """Draw alphas that were trained with growth, of one seed."""
    return _alphas(results, "Alphas with nuclear growth", "Rotation, Fig. 4", growing=True)


def _alphas(results: Sequence[Result], title: str, source: str, growing: bool) -> Pictures:
    shown = []
    for result in results:
        alphas = heads_of(result).get("alphas")
        if alphas and (alphas.get("growth_weight", 0) > 0) == growing:
            shown.append(result)
    reading = "A strong diagonal keeps heads as they are; what lies off it mixes head j into head i."
    return _matrices(shown, "alphas", title, reading, source, "head i that leaves", "head j that enters")


def _matrices(
    results: Sequence[Result], measure: str, title: str, reading: str, source: str, rows: str, columns: str
) -> Pictures:
    """Draw a picture for each variant, with the matrices of all layers."""
    pictures: Pictures = []
    for group, found in _lowest_seeds(results, measure).items():
        for result in found:
            maps = []
            for kind, layers in result.measures[measure].items():
                maps += [_heatmap(f"{kind} {layer}", matrix) for layer, matrix in enumerate(layers) if matrix]
            cells = [abs(cell) for heat in maps for row in heat.values for cell in row if cell is not None]
            if maps:
                reach = max(cells, default=0.0) or 1.0
                whole, seed = f"{title} of {name_of(result)}, {group}", f"{reading} Seed {result.seed}."
                pictures.append(Heatmaps(whole, seed, source, tuple(maps), -reach, reach, "diverging", rows, columns))
    return pictures


def _lowest_seeds(results: Sequence[Result], measure: str) -> dict[str, list[Result]]:
    """Return the records that have a measure, of the lowest seed of each variant: group → a record a variant."""
    found: dict[str, dict[str, Result]] = {}
    for result in sorted(results, key=lambda result: result.seed):
        if result.measures.get(measure):
            found.setdefault(group_of(result), {}).setdefault(name_of(result), result)
    return {group: list(variants.values())[:AT_MOST] for group, variants in found.items()}


def _heatmap(title: str, rows: Sequence[Any]) -> Heatmap:
    return heatmap(title, rows)


def of_rotation(results: Iterable[Result]) -> list[Result]:
    """Return the results that "Multi-Head Rotation" compares: plain training, alphas, rotation and agreement."""
    compared = []
    for result in results:
        heads = heads_of(result)
        penalties = {penalty.get("name", "") for penalty in heads.get("penalties") or ()}
        if is_plain(result) or heads.get("alphas") or heads.get("rotation") or "agreement" in penalties:
            compared.append(result)
    return compared


def confidence(results: Sequence[Result]) -> Pictures:
    """Draw the confidence of each head: plain, mixed and rotated, of one seed."""
    pictures: Pictures = []
    for group, found in _lowest_seeds(of_rotation(results), "confidence").items():
        maps: dict[str, list[Heatmap]] = {}
        for result in found:
            for kind, layers in result.measures["confidence"].items():
                maps.setdefault(kind, []).append(_heatmap(name_of(result), layers))
        for kind, drawn in maps.items():
            title, reading = f"Confidence of heads, {kind}, {group}", "Strong cells are heads that look at one token."
            pictures.append(Heatmaps(title, reading, "Rotation, Fig. 5", tuple(drawn), row_label="layer"))
    return pictures


def cosine_growth(results: Sequence[Result]) -> Pictures:
    """Draw how much 1 − cosine, summed over pairs of heads, grows against the plain model."""
    return _growth(results, "difference", "Growth of cosine discrepancy", "Rotation, Fig. 6")


def l2_growth(results: Sequence[Result]) -> Pictures:
    """Draw how far the L2 discrepancy of heads grows against the plain model."""
    return _growth(results, "l2", "Growth of L2 discrepancy", "Rotation, Fig. 7")


def _growth(results: Sequence[Result], metric: Measure, title: str, source: str) -> Pictures:
    """Draw, for each layer, by how many per cent a discrepancy is larger than the plain model's of the same seed."""
    measured = [result for result in of_rotation(results) if result.measures.get("discrepancy")]
    plain = {(group_of(result), result.seed): result for result in measured if is_plain(result)}
    points = []
    for result in measured:
        base = plain.get((group_of(result), result.seed))
        if base is None or is_plain(result):
            continue
        for kind, layers in result.measures["discrepancy"].items():
            theirs = base.measures["discrepancy"].get(kind, ())
            for layer, (before, after) in enumerate(zip(theirs, layers, strict=False)):
                growth = percent_growth(after.get(metric, 0.0), before.get(metric, 0.0))
                if growth is not None:
                    points.append(Point(group_of(result), kind, name_of(result), layer, layer, growth))
    return curves(points, title, "Above 0 heads are farther apart than in the plain model.", source, "layer", "%")


def svcca_by_size(results: Sequence[Result]) -> Pictures:
    """Draw SVCCA coefficients between heads, of models of several sizes."""
    sized = [result for result in results if SIZED.fullmatch(result.variant.method)]
    return _svcca(sized, "SVCCA coefficients by size", "Diversity, Fig. 3", lambda result: result.column.name)


def svcca_by_method(results: Sequence[Result]) -> Pictures:
    """Draw SVCCA coefficients between heads, by what acted on them."""
    others = [result for result in results if not SIZED.fullmatch(result.variant.method)]
    return _svcca(others, "SVCCA coefficients by method", "Diversity, Fig. 4", group_of)


def _svcca(results: Sequence[Result], title: str, source: str, picture: Callable[[Result], str]) -> Pictures:
    """Draw canonical correlations between heads, in order, for each kind of attention."""
    points = []
    for result in results:
        for kind, values in result.measures.get("svcca", {}).get("curve", {}).items():
            for place, value in enumerate(values, 1):
                points.append(Point(picture(result), kind, name_of(result), place, place, value))
    reading = (
        "The further right a curve stays high, the more directions two heads of the last layer share. "
        "Mean over seeds."
    )
    return curves(points, title, reading, source, "coefficient, in order", "canonical correlation", 0.0)


def overlap_while_training(results: Sequence[Result]) -> Pictures:
    """Draw the overlap of heads while training, with the penalty and without."""
    points = _logged(results, "bhattacharyya")
    title, reading = "Overlap of heads while training", "The lower, the less heads look at the same. Mean over seeds."
    y = "Bhattacharyya coefficient, sum over layers"
    return curves(points, title, reading, "Bhattacharyya, Fig. 1", "epoch", y)


def cross_entropy_while_training(results: Sequence[Result]) -> Pictures:
    """Draw the task's loss, without penalty, while training."""
    points = _logged(results, "task_loss")
    title = "Cross-entropy while training, without penalty"
    reading = "Curves that meet learn the task equally well. Mean over seeds."
    return curves(points, title, reading, "Bhattacharyya, Fig. 2", "epoch", "nats")


def plain_losses(results: Sequence[Result]) -> Pictures:
    """Draw all losses of models without the penalty."""
    return _losses(results, "Losses without the penalty", "Bhattacharyya, Fig. 3", penalised=False)


def penalised_losses(results: Sequence[Result]) -> Pictures:
    """Draw all losses of models with the penalty."""
    return _losses(results, "Losses with the penalty", "Bhattacharyya, Fig. 4", penalised=True)


def bleu_while_training(results: Sequence[Result]) -> Pictures:
    """Draw BLEU on the validation set while training."""
    points = _logged(results, "eval_bleu")
    reading = "On the validation set, after each epoch. Mean over seeds."
    return curves(points, "BLEU while training", reading, "Bhattacharyya, Fig. 5", "epoch", "BLEU")


def _logged(results: Iterable[Result], key: str) -> Iterator[Point]:
    """Yield what was logged under a name, of models whose overlap was measured, against epochs."""
    for result in results:
        if is_penalised(result) is None:
            continue
        for line in result.history:
            if key in line and "epoch" in line:
                epoch = round(float(line["epoch"]), 4)
                yield Point(group_of(result), "", name_of(result), epoch, epoch, float(line[key]))


def _losses(results: Iterable[Result], title: str, source: str, penalised: bool) -> Pictures:
    """Draw the losses that were logged, of models with the penalty, or without: a panel for each variant."""
    shown = [result for result in results if is_penalised(result) is penalised]
    points = []
    for key, name in LOSSES.items():
        points += [point._replace(panel=point.curve, curve=name) for point in _logged(shown, key)]
    reading = "The total is what training lowers. Mean over seeds."
    return curves(points, title, reading, source, "epoch", "nats; overlap as it is", 0.0)


def schedules(results: Sequence[Result]) -> Pictures:
    """Draw the schedules of DropHead's probability, as they are; no record is needed."""
    points = []
    for name, schedule in SCHEDULES.items():
        points += [Point("", "", name, step, step, schedule(step / 100, 0.1, 0.2, 0.2)) for step in range(101)]
    title, reading = "Probability of DropHead while training", "For p = 0.2 and warmup over a tenth of training."
    return curves(points, title, reading, "DropHead, Fig. 2", "steps, %", "probability", 0.0)


def pruning(results: Sequence[Result]) -> Pictures:
    """Draw scores with more and more heads pruned, with DropHead and without."""
    points = []
    for result in results:
        measured = result.measures.get("pruning")
        if measured and (is_plain(result) or heads_of(result).get("drophead")):
            for share, score in zip(measured["shares"], measured["scores"], strict=True):
                points.append(Point(group_of(result), "", name_of(result), share, 100 * share, score))
    title, reading = "Score with heads pruned", "The later a curve falls, the more heads can go. Mean over seeds."
    return curves(points, title, reading, "DropHead, Fig. 3", "heads pruned, %", "score")


RUN = "`collab-sweep {}`, whose records have {}"
FIGURES: dict[str, tuple[Figure, ...]] = {
    "collaborate": (
        Figure("Figure 1", "captured energy of queries and keys", nothing,
               "a trained model: `collab-analyze MODEL --sections energy`"),
        Figure("Figure 2", "mixing matrices", mixing_matrices, 'records of collaborative models with "mixing"'),
        Figure("Figure 3", "BLEU against width, parameters and time", score_by_size,
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
               'records with "difference" in "discrepancy", of plain training and with alphas or rotation, of the '
               "same seeds"),
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
               "tuning.arguments"),
    ),
    "drophead": (
        Figure("Figure 2", "schedules", schedules, "nothing"),
        Figure("Figure 3", "scores with heads pruned", pruning, 'records with "pruning"'),
    ),
}  # fmt: skip
"""Key of the paper → its figures; those that only draw how a method works are left out."""
