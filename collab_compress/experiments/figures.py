"""The papers' figures, drawn from records; another one is a function with `_figure` above it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

import pandas as pd

from collab_compress.analysis.diversity import Measure, percent_growth
from collab_compress.experiments.results import Result
from collab_compress.report.section import Curve, Curves, Heatmap, Heatmaps, Panel, Picture, heatmap
from collab_compress.training import SCHEDULES

Pictures: TypeAlias = list[Picture]
Results: TypeAlias = Sequence[Result]
Draw: TypeAlias = Callable[[Results], Pictures]

SIZED = re.compile(r"d\d+-h\d+")
"""Methods of the sweep of Diversity's Table 1: models of other sizes."""

MOST_VARIANTS = 6
"""Most variants whose matrices are drawn."""

LOSSES = {"task_loss": "cross-entropy", "bhattacharyya": "overlap", "loss": "total"}
"""Name in the Trainer's log → name in a picture."""


@dataclass(frozen=True)
class Figure:
    """A figure of a paper.

    Args:
        name: as in "Figure 3".
        shows: its content in the paper.
        needs: what records it is drawn from, and how they are made.
        source: as in "Rotation, Fig. 3".
        draw: results → pictures; none where the records lack something.
    """

    name: str
    shows: str
    needs: str
    source: str
    draw: Draw

    def pictures(self, results: Results) -> Pictures:
        """Return the pictures of the figure, with its source."""
        return [replace(picture, source=self.source) for picture in self.draw(results)]


FIGURES: dict[str, list[Figure]] = defaultdict(list)
"""Key of the paper → its figures, without those that only draw how a method works."""


def _figure(paper: str, number: int, shows: str, needs: str) -> Callable[[Draw], Draw]:
    """Add the decorated function to the paper's figures."""

    def add(draw: Draw) -> Draw:
        FIGURES[paper.lower()].append(Figure(f"Figure {number}", shows, needs, f"{paper}, Fig. {number}", draw))
        return draw

    return add


def _sweep(name: str, key: str) -> str:
    return f"`collab-sweep {name}`, whose records have {key}"


class Point(NamedTuple):
    """A point of a curve, from one record; points of a curve with the same key are drawn at their mean."""

    picture: str
    panel: str
    curve: str
    key: float | str
    x: float
    y: float


def _curves(
    points: Iterable[Point], title: str, reading: str, x: str, y: str, bottom: float | None = None
) -> Pictures:
    """Draw curves through points: a picture for each of their pictures, a panel for each of their panels."""
    pictures: Pictures = []
    table = pd.DataFrame(points, columns=Point._fields)
    for name, of_picture in table.groupby("picture", sort=False):
        panels = []
        for panel, of_panel in of_picture.groupby("panel", sort=False):
            curves = [_curve(curve, of_curve) for curve, of_curve in of_panel.groupby("curve", sort=False)]
            panels.append(Panel(panel, tuple(curves)))
        heading = f"{title}, {name}" if name else title
        pictures.append(Curves(heading, reading, "", tuple(panels), x, y, bottom))
    return pictures


def _curve(name: str, points: pd.DataFrame) -> Curve:
    """Return the curve through the means of points; unlike pandas' mean, fmean keeps NaN."""
    means = points.groupby("key")[["x", "y"]].agg(fmean).sort_values(["x", "y"])
    return Curve(name, tuple(means["x"]), tuple(means["y"]), "dashed" if name == "dense" else "line")


def _group(result: Result) -> str:
    """Return the column and model, within which records are compared."""
    return f"{result.column.name}, {result.variant.model}"


def _name(result: Result) -> str:
    """Return the method, and the stage unless it is the fine-tuned model."""
    return result.variant.label.removesuffix("/tuned")


def _is_plain(result: Result) -> bool:
    return result.variant.label == "plain/tuned"


def _heads(result: Result) -> Mapping[str, Any]:
    """Return the settings of the methods that act on heads."""
    return result.recipe.get("heads") or {}


@_figure(
    "Collaborate",
    1,
    "captured energy of queries and keys",
    "a trained model: `collab-analyze MODEL --sections energy`",
)
def _from_a_model(results: Results) -> Pictures:
    return []  # no record has it


@_figure("Collaborate", 2, "mixing matrices", 'records of collaborative models with "mixing"')
def _mixing(results: Results) -> Pictures:
    reading = "A column of one strong cell belongs to one head, one with several to several."
    return _matrices(results, "mixing", "Mixing matrices", reading, "head", "component")


@_figure("Collaborate", 3, "BLEU against width, parameters and time", _sweep("collaborate.yaml", "several widths"))
def _score_by_size(results: Results) -> Pictures:
    points: dict[str, list[Point]] = defaultdict(list)
    fresh = [result for result in results if result.recipe.get("fresh")]
    collaborative = {_group(result) for result in fresh if result.recipe["fresh"].get("attention")}
    for result in fresh:
        settings = result.recipe["fresh"]
        attention = settings.get("attention")
        if _group(result) not in collaborative or not (attention or _is_plain(result)):
            continue
        curve = "shared" if attention and attention.get("train_mixing", True) else "concatenated"
        sizes = {
            "width": attention.get("dk") if attention else settings.get("width"),
            "parameters": None if result.parameters is None else result.parameters / 1e6,
            "time": result.seconds,
        }
        for axis, x in sizes.items():
            if x is not None:
                points[axis].append(Point(_group(result), "", curve, _name(result), x, result.score))
    flat = "The flatter a curve, the less narrower queries and keys cost."
    left = "Higher to the left is better"
    width, parameters, time = (points[axis] for axis in ("width", "parameters", "time"))
    return [
        *_curves(width, "Score against width", flat, "width of queries and keys, all heads", "score"),
        *_curves(parameters, "Score against parameters", f"{left}.", "parameters, millions", "score"),
        *_curves(
            time, "Score against training time", f"{left}; times are of runs side by side.", "training, s", "score"
        ),
    ]


@_figure("Collaborate", 4, "time to decompose", 'records of conversions with "seconds"')
def _seconds_by_width(results: Results) -> Pictures:
    converted = [result for result in results if result.variant.conversion and not result.variant.again]
    points = _by_width(converted, lambda result: result.seconds)
    return _curves(points, "Time to convert", "Mean over seeds.", "shared width", "seconds")


@_figure(
    "Collaborate",
    5,
    "scores against width, with and without a second fine-tuning",
    _sweep("glue.yaml", "several widths"),
)
def _score_by_width(results: Results) -> Pictures:
    points = _by_width(results, lambda result: result.score)
    return _curves(points, "Score against the shared width", "Mean over seeds.", "shared width", "score")


def _by_width(results: Results, y: Callable[[Result], float | None]) -> list[Point]:
    """Return points of conversions at each shared width, where there are several, and of the dense model."""
    points, widths = [], defaultdict(set)
    for result in results:
        group, width, value = _group(result), (result.recipe.get("compression") or {}).get("dk"), y(result)
        if result.variant.conversion and width is not None and value is not None:
            widths[group].add(width)
            points.append(Point(group, "", _conversion_name(result), result.variant.stage, width, value))
    for result in filter(_is_plain, results):
        group, value = _group(result), y(result)
        if widths[group] and value is not None:
            points += [Point(group, "", "dense", end, end, value) for end in (min(widths[group]), max(widths[group]))]
    return [point for point in points if len(widths[point.picture]) > 1]


def _conversion_name(result: Result) -> str:
    """Return the name of a curve: the conversion's without its width."""
    name = re.sub(r"\d+", "", result.variant.conversion or "").strip("-")
    name = {"dk": "converted", "cp": "weights alone", "dk-recovered": "recovered"}.get(name, name)
    return f"{name}, fine-tuned again" if result.variant.again else name


@_figure("Rotation", 3, "alphas without growth", 'records of alphas without growth with "alphas"')
def _alphas_alone(results: Results) -> Pictures:
    return _alphas(results, "Alphas without growth", growing=False)


@_figure("Rotation", 4, "alphas with growth", 'records of alphas with growth with "alphas"')
def _alphas_with_growth(results: Results) -> Pictures:
    return _alphas(results, "Alphas with nuclear growth", growing=True)


def _alphas(results: Results, title: str, growing: bool) -> Pictures:
    chosen = []
    for result in results:
        alphas = _heads(result).get("alphas")
        if alphas and (alphas.get("growth_weight", 0) > 0) == growing:
            chosen.append(result)
    reading = "A strong diagonal keeps heads as they are; what lies off it mixes head j into head i."
    return _matrices(chosen, "alphas", title, reading, "head i that leaves", "head j that enters")


def _matrices(results: Results, measure: str, title: str, reading: str, rows: str, columns: str) -> Pictures:
    """Draw a picture for each variant, of one seed, with the matrices of all layers."""
    pictures: Pictures = []
    for result in _lowest_seeds(results, measure):
        maps = []
        for kind, layers in result.measures[measure].items():
            maps += [heatmap(f"{kind} {layer}", matrix) for layer, matrix in enumerate(layers) if matrix]
        cells = [abs(cell) for one in maps for row in one.values for cell in row if cell is not None]
        if maps:
            limit = max(cells, default=0.0) or 1.0
            heading = f"{title} of {_name(result)}, {_group(result)}"
            about = f"{reading} Seed {result.seed}."
            pictures.append(Heatmaps(heading, about, "", tuple(maps), -limit, limit, "diverging", rows, columns))
    return pictures


def _lowest_seeds(results: Results, measure: str) -> list[Result]:
    """Return the records with a measure, of the lowest seed of each variant, a few variants of each group."""
    groups: dict[str, dict[str, Result]] = {}
    for result in sorted(results, key=lambda result: result.seed):
        if result.measures.get(measure):
            groups.setdefault(_group(result), {}).setdefault(_name(result), result)
    return [result for variants in groups.values() for result in list(variants.values())[:MOST_VARIANTS]]


@_figure("Rotation", 5, "confidence", 'records with "confidence"')
def _confidence(results: Results) -> Pictures:
    maps: dict[tuple[str, str], list[Heatmap]] = defaultdict(list)
    for result in _lowest_seeds(_of_rotation(results), "confidence"):
        for kind, layers in result.measures["confidence"].items():
            maps[_group(result), kind].append(heatmap(_name(result), layers))
    reading = "Strong cells are heads that look at one token."
    return [
        Heatmaps(f"Confidence of heads, {kind}, {group}", reading, "", tuple(drawn), row_label="layer")
        for (group, kind), drawn in maps.items()
    ]


def _of_rotation(results: Results) -> list[Result]:
    """Return the results that "Multi-Head Rotation" compares: plain training, alphas, rotation and agreement."""
    compared = []
    for result in results:
        heads = _heads(result)
        penalties = {penalty.get("name", "") for penalty in heads.get("penalties") or ()}
        if _is_plain(result) or heads.get("alphas") or heads.get("rotation") or "agreement" in penalties:
            compared.append(result)
    return compared


@_figure(
    "Rotation",
    6,
    "growth of cosine discrepancy",
    'records with "difference" in "discrepancy", of plain training and with alphas or rotation, of the same seeds',
)
def _cosine_growth(results: Results) -> Pictures:
    return _growth(results, "difference", "Growth of cosine discrepancy")


@_figure(
    "Rotation",
    7,
    "growth of L2 discrepancy",
    'records with "discrepancy", of plain training and with alphas or rotation, of the same seeds',
)
def _l2_growth(results: Results) -> Pictures:
    return _growth(results, "l2", "Growth of L2 discrepancy")


def _growth(results: Results, metric: Measure, title: str) -> Pictures:
    """Draw by how many per cent the discrepancy of each layer exceeds the plain model's of the same seed."""
    measured = [result for result in _of_rotation(results) if result.measures.get("discrepancy")]
    plain = {(_group(result), result.seed): result for result in measured if _is_plain(result)}
    points = []
    for result in measured:
        base = plain.get((_group(result), result.seed))
        if base is None or _is_plain(result):
            continue
        for kind, layers in result.measures["discrepancy"].items():
            of_base = base.measures["discrepancy"].get(kind, ())
            for layer, (before, after) in enumerate(zip(of_base, layers, strict=False)):
                growth = percent_growth(after.get(metric, 0.0), before.get(metric, 0.0))
                if growth is not None:
                    points.append(Point(_group(result), kind, _name(result), layer, layer, growth))
    return _curves(points, title, "Above 0 heads are farther apart than in the plain model.", "layer", "%")


_figure(
    "Diversity",
    1,
    "attention maps",
    "a trained model: `collab-analyze MODEL --sections attention_maps --data FILE`",
)(_from_a_model)
_figure(
    "Diversity",
    2,
    "SVCCA coefficients with a model of one head",
    "two trained models of `collab-sweep diversity.yaml scale=paper-widths`: "
    "`collab-analyze MODEL --against ONE-HEAD --sections similarity --data FILE`",
)(_from_a_model)


@_figure(
    "Diversity",
    3,
    "SVCCA coefficients between heads, by size",
    _sweep("diversity.yaml scale=paper-widths", '"svcca"'),
)
def _svcca_by_size(results: Results) -> Pictures:
    sized = [result for result in results if SIZED.fullmatch(result.variant.method)]
    return _svcca(sized, "SVCCA coefficients by size", lambda result: result.column.name)


@_figure("Diversity", 4, "SVCCA coefficients between heads, by method", _sweep("diversity.yaml", '"svcca"'))
def _svcca_by_method(results: Results) -> Pictures:
    others = [result for result in results if not SIZED.fullmatch(result.variant.method)]
    return _svcca(others, "SVCCA coefficients by method", _group)


def _svcca(results: Results, title: str, picture: Callable[[Result], str]) -> Pictures:
    """Draw canonical correlations between heads, in order, for each kind of attention."""
    points = []
    for result in results:
        for kind, values in result.measures.get("svcca", {}).get("curve", {}).items():
            for place, value in enumerate(values, 1):
                points.append(Point(picture(result), kind, _name(result), place, place, value))
    reading = (
        "The further right a curve stays high, the more directions two heads of the last layer share. "
        "Mean over seeds."
    )
    return _curves(points, title, reading, "coefficient, in order", "canonical correlation", 0.0)


LOGGED = _sweep("bhattacharyya.yaml", '"history"')


@_figure("Bhattacharyya", 1, "overlap while training", LOGGED)
def _overlap_while_training(results: Results) -> Pictures:
    reading = "The lower, the less heads look at the same. Mean over seeds."
    y = "Bhattacharyya coefficient, sum over layers"
    return _curves(_logged(results, "bhattacharyya"), "Overlap of heads while training", reading, "epoch", y)


@_figure("Bhattacharyya", 2, "cross-entropy while training", LOGGED)
def _cross_entropy_while_training(results: Results) -> Pictures:
    title = "Cross-entropy while training, without penalty"
    reading = "Curves that meet learn the task equally well. Mean over seeds."
    return _curves(_logged(results, "task_loss"), title, reading, "epoch", "nats")


@_figure("Bhattacharyya", 3, "losses without the penalty", LOGGED)
def _plain_losses(results: Results) -> Pictures:
    return _losses(results, "Losses without the penalty", is_penalised=False)


@_figure("Bhattacharyya", 4, "losses with the penalty", LOGGED)
def _penalised_losses(results: Results) -> Pictures:
    return _losses(results, "Losses with the penalty", is_penalised=True)


@_figure(
    "Bhattacharyya",
    5,
    "BLEU while training",
    "records of translation with `eval_strategy: epoch` and `predict_with_generate: true` in tuning.arguments",
)
def _bleu_while_training(results: Results) -> Pictures:
    reading = "On the validation set, after each epoch. Mean over seeds."
    return _curves(_logged(results, "eval_bleu"), "BLEU while training", reading, "epoch", "BLEU")


def _is_penalised(result: Result) -> bool | None:
    """Return whether Bhattacharyya's penalty is trained with (True) or only measured (False); None without it."""
    for penalty in _heads(result).get("penalties") or ():
        if penalty.get("name") == "bhattacharyya":
            return bool(penalty.get("weight", 1.0) != 0)
    return None


def _logged(results: Iterable[Result], key: str) -> Iterator[Point]:
    """Yield the logged values of models whose overlap was measured, against epochs."""
    for result in results:
        if _is_penalised(result) is None:
            continue
        for line in result.history:
            if key in line and "epoch" in line:
                epoch = round(float(line["epoch"]), 4)
                yield Point(_group(result), "", _name(result), epoch, epoch, float(line[key]))


def _losses(results: Iterable[Result], title: str, is_penalised: bool) -> Pictures:
    """Draw the logged losses of models with the penalty, or without: a panel for each variant."""
    chosen = [result for result in results if _is_penalised(result) is is_penalised]
    points = []
    for key, name in LOSSES.items():
        points += [point._replace(panel=point.curve, curve=name) for point in _logged(chosen, key)]
    reading = "The total is what training lowers. Mean over seeds."
    return _curves(points, title, reading, "epoch", "nats; overlap as it is", 0.0)


@_figure("DropHead", 2, "schedules", "nothing")
def _schedules(results: Results) -> Pictures:
    points = []
    for name, schedule in SCHEDULES.items():
        points += [Point("", "", name, step, step, schedule(step / 100, 0.1, 0.2, 0.2)) for step in range(101)]
    title, reading = "Probability of DropHead while training", "For p = 0.2 and warmup over a tenth of training."
    return _curves(points, title, reading, "steps, %", "probability", 0.0)


@_figure("DropHead", 3, "scores with heads pruned", 'records with "pruning"')
def _pruning(results: Results) -> Pictures:
    points = []
    for result in results:
        curve = result.measures.get("pruning")
        if curve and (_is_plain(result) or _heads(result).get("drophead")):
            for share, score in zip(curve["shares"], curve["scores"], strict=True):
                points.append(Point(_group(result), "", _name(result), share, 100 * share, score))
    reading = "The later a curve falls, the more heads can go. Mean over seeds."
    return _curves(points, "Score with heads pruned", reading, "heads pruned, %", "score")
