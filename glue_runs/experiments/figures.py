"""The papers' figures, drawn from records as `figures` in papers.yaml describes them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

import pandas as pd
import yaml

from collab_compress.analysis.diversity import Measure, percent_growth
from collab_compress.report.section import Curve, Curves, Heatmap, Heatmaps, Panel, Picture, heatmap
from collab_compress.training import SCHEDULES

from .papers import PAPERS
from .results import Result

Pictures: TypeAlias = list[Picture]
Results: TypeAlias = Sequence[Result]

SIZED = re.compile(r"d\d+-h\d+")
"""Methods of the sweep of Diversity's Table 1: models of other sizes."""

MOST_VARIANTS = 6
"""Most variants whose matrices are drawn."""

RANDOM = ", random heads"
"""End of the name of the baseline of a pruning curve."""

LOSSES = {"task_loss": "cross-entropy", "bhattacharyya": "overlap", "loss": "total"}
"""Name in the Trainer's log → name in a picture."""


@dataclass(frozen=True)
class Figure:
    """A figure of a paper."""

    name: str  # as in "Figure 3"
    source: str  # as in "Rotation, Fig. 3"
    shows: str
    needs: str  # what it is drawn from, and how that is made
    draw: Callable[[Results], Pictures] | None  # None if no record has it

    def pictures(self, results: Results) -> Pictures:
        """Return the pictures of the figure."""
        return [] if self.draw is None else [replace(one, source=self.source) for one in self.draw(results)]


def read_figures() -> dict[str, list[Figure]]:
    """Read the figures of all papers: the paper's key → its figures."""
    figures: dict[str, list[Figure]] = {}
    for key, paper in yaml.safe_load(PAPERS.read_text(encoding="utf-8")).items():
        figures[key] = []
        for name, figure in paper["figures"].items():
            draw = figure.get("draw")
            function = None if draw is None else partial(DRAWINGS[draw], **figure.get("options", {}))
            source = f"{paper['short']}, {name.replace('Figure', 'Fig.')}"
            figures[key].append(Figure(name, source, figure["shows"], figure["needs"], function))
    return figures


class Point(NamedTuple):
    """A point of a curve, from one record; points of a curve with the same key are drawn at their mean."""

    picture: str
    curve: str
    x: float
    y: float
    panel: str = ""
    key: str | None = None  # x if None


def _curves(
    points: Iterable[Point], title: str, reading: str, x: str, y: str, bottom: float | None = None
) -> Pictures:
    """Draw curves through points: a picture for each of their pictures, a panel for each of their panels."""
    pictures: Pictures = []
    table = pd.DataFrame(points, columns=Point._fields)
    table["key"] = table["key"].where(table["key"].notna(), table["x"])
    for name, of_picture in table.groupby("picture", sort=False):
        panels = []
        for panel, of_panel in of_picture.groupby("panel", sort=False):
            curves = [_curve(curve, of_curve) for curve, of_curve in of_panel.groupby("curve", sort=False)]
            panels.append(Panel(panel, tuple(curves)))
        heading = f"{title}, {name}" if name else title
        pictures.append(
            Curves(heading, reading, source="", panels=tuple(panels), x_label=x, y_label=y, bottom=bottom)
        )
    return pictures


def _curve(name: str, points: pd.DataFrame) -> Curve:
    """Return the curve through the means of points; unlike pandas' mean, fmean keeps NaN."""
    means = points.groupby("key")[["x", "y"]].agg(fmean).sort_values(["x", "y"])
    is_baseline = name == "dense" or name.endswith(RANDOM)
    return Curve(name, tuple(means["x"]), tuple(means["y"]), "dashed" if is_baseline else "line")


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


def _draw_widths(results: Results) -> Pictures:
    """Draw the scores of conversions at each shared width, where there are several, and of the dense model."""
    points: list[Point] = []
    widths: dict[str, set[int]] = defaultdict(set)
    for result in results:
        group, width = _group(result), (result.recipe.get("compression") or {}).get("dk")
        if width is None or not result.variant.conversion:
            continue
        widths[group].add(width)
        name = re.sub(r"\d+", "", result.variant.conversion).strip("-")
        name = {"dk": "converted", "cp": "weights alone", "dk-recovered": "recovered"}.get(name, name)
        curve = f"{name}, fine-tuned again" if result.variant.again else name
        points.append(Point(group, curve, width, result.score))
    for result in results:
        if _is_plain(result) and widths[_group(result)]:
            ends = (min(widths[_group(result)]), max(widths[_group(result)]))
            points += [Point(_group(result), "dense", end, result.score) for end in ends]
    points = [point for point in points if len(widths[point.picture]) > 1]
    return _curves(points, "Score against the shared width", "Mean over seeds.", "shared width", "score")


def _draw_sizes(results: Results) -> Pictures:
    """Draw the scores of untrained models against the width of queries and keys, and against parameters."""
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
        }
        for axis, x in sizes.items():
            if x is not None:
                points[axis].append(Point(_group(result), curve, x, result.score, key=_name(result)))
    flat = "The flatter a curve, the less narrower queries and keys cost."
    axes = {
        "width": (flat, "width of queries and keys, all heads"),
        "parameters": ("Higher to the left is better.", "parameters, millions"),
    }
    pictures = []
    for axis, (reading, x_label) in axes.items():
        pictures += _curves(points[axis], f"Score against {axis}", reading, x_label, "score")
    return pictures


def _draw_matrices(
    results: Results, measure: str, title: str, reading: str, rows: str, columns: str, growing: bool | None = None
) -> Pictures:
    """Draw a picture for each variant, of one seed, with the matrices of all layers.

    Args:
        results: all results.
        measure: of the matrices.
        title: of the pictures.
        reading: how to read them.
        rows: label of the rows.
        columns: label of the columns.
        growing: whether only alphas that were trained with growth are drawn, or without; None for all results.
    """
    pictures: Pictures = []
    chosen = [result for result in results if growing is None or _has_growth(result) is growing]
    for result in _lowest_seeds(chosen, measure):
        maps: list[Heatmap] = []
        for kind, layers in result.measures[measure].items():
            maps += [heatmap(f"{kind} {layer}", matrix) for layer, matrix in enumerate(layers) if matrix]
        if not maps:
            continue
        rows_of_cells = chain.from_iterable(one.values for one in maps)
        cells = [abs(cell) for cell in chain.from_iterable(rows_of_cells) if cell is not None]
        limit = max(cells, default=0.0) or 1.0
        pictures.append(
            Heatmaps(
                f"{title} of {_name(result)}, {_group(result)}",
                f"{reading} Seed {result.seed}.",
                source="",
                maps=tuple(maps),
                high=limit,
                diverging=True,
                row_label=rows,
                column_label=columns,
            )
        )
    return pictures


def _has_growth(result: Result) -> bool | None:
    """Return whether alphas were trained with growth; None without alphas."""
    alphas = _heads(result).get("alphas")
    return alphas.get("growth_weight", 0) > 0 if alphas else None


def _lowest_seeds(results: Results, measure: str) -> list[Result]:
    """Return the records with a measure, of the lowest seed of each variant, a few variants of each group."""
    groups: dict[str, dict[str, Result]] = {}
    for result in sorted(results, key=lambda result: result.seed):
        if result.measures.get(measure):
            groups.setdefault(_group(result), {}).setdefault(_name(result), result)
    return [result for variants in groups.values() for result in list(variants.values())[:MOST_VARIANTS]]


def _draw_confidence(results: Results) -> Pictures:
    """Draw the confidence of each head: plain, mixed and rotated, of one seed."""
    maps: dict[tuple[str, str], list[Heatmap]] = defaultdict(list)
    for result in _lowest_seeds(_of_rotation(results), "confidence"):
        for kind, layers in result.measures["confidence"].items():
            maps[_group(result), kind].append(heatmap(_name(result), layers))
    reading = "Strong cells are heads that look at one token."
    return [
        Heatmaps(f"Confidence of heads, {kind}, {group}", reading, source="", maps=tuple(drawn), row_label="layer")
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


def _draw_growth(results: Results, metric: Measure, title: str) -> Pictures:
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
                    points.append(Point(_group(result), _name(result), layer, growth, panel=kind))
    return _curves(points, title, "Above 0 heads are farther apart than in the plain model.", "layer", "%")


def _draw_svcca(results: Results, sized: bool, title: str) -> Pictures:
    """Draw canonical correlations between heads, in order, for each kind of attention.

    Args:
        results: all results.
        sized: whether models of other sizes are drawn in one picture, or else other methods in one for each model.
        title: of the pictures.
    """
    points = []
    for result in results:
        if bool(SIZED.fullmatch(result.variant.method)) is not sized:
            continue
        picture = result.column.name if sized else _group(result)
        for kind, values in result.measures.get("svcca", {}).get("curve", {}).items():
            for place, value in enumerate(values, 1):
                points.append(Point(picture, _name(result), place, value, panel=kind))
    reading = (
        "The further right a curve stays high, the more directions two heads of the last layer share. "
        "Mean over seeds."
    )
    return _curves(points, title, reading, "coefficient, in order", "canonical correlation", bottom=0.0)


def _draw_log(results: Results, key: str, title: str, reading: str, y: str) -> Pictures:
    """Draw logged values of models whose overlap was measured."""
    return _curves(_logged(results, key), title, reading, "epoch", y)


def _draw_losses(results: Results, penalised: bool, title: str) -> Pictures:
    """Draw the logged losses of models with Bhattacharyya's penalty, or without: a panel for each variant."""
    chosen = [result for result in results if _is_penalised(result) is penalised]
    points = []
    for key, name in LOSSES.items():
        points += [point._replace(panel=point.curve, curve=name) for point in _logged(chosen, key)]
    reading = "The total is what training lowers. Mean over seeds."
    return _curves(points, title, reading, "epoch", "nats; overlap as it is", bottom=0.0)


def _is_penalised(result: Result) -> bool | None:
    """Return whether Bhattacharyya's penalty is trained with (True) or only measured (False); None without it."""
    for penalty in _heads(result).get("penalties") or ():
        if penalty.get("name") == "bhattacharyya":
            return bool(penalty.get("weight", 1.0) != 0)
    return None


def _logged(results: Iterable[Result], key: str) -> Iterator[Point]:
    """Yield logged values against epochs."""
    for result in results:
        if _is_penalised(result) is None:
            continue
        for line in result.history:
            if key in line and "epoch" in line:
                epoch = round(float(line["epoch"]), 4)
                yield Point(_group(result), _name(result), epoch, float(line[key]))


def _draw_schedules(results: Results) -> Pictures:
    """Draw the schedules of DropHead's probability; no record is needed."""
    points = []
    for name, schedule in SCHEDULES.items():
        points += [Point("", name, step, 0.2 * schedule(step / 100, 0.1)) for step in range(101)]
    title, reading = "Probability of DropHead while training", "For p = 0.2 and warmup over a tenth of training."
    return _curves(points, title, reading, "steps, %", "probability", bottom=0.0)


def _draw_pruning(results: Results) -> Pictures:
    """Draw scores with more and more heads pruned, with DropHead and without, beside random heads where recorded."""
    points = []
    for result in results:
        curve = result.measures.get("pruning")
        if curve and (_is_plain(result) or _heads(result).get("drophead")):
            for scores, end in (("scores", ""), ("random", RANDOM)):
                for share, score in zip(curve["shares"], curve.get(scores, ()), strict=False):
                    points.append(Point(_group(result), _name(result) + end, 100 * share, score))
    reading = "The later a curve falls, the more heads can go; dashed curves are of random heads. Mean over seeds."
    return _curves(points, "Score with heads pruned", reading, "heads pruned, %", "score")


DRAWINGS: dict[str, Callable[..., Pictures]] = {
    "widths": _draw_widths,
    "sizes": _draw_sizes,
    "matrices": _draw_matrices,
    "confidence": _draw_confidence,
    "growth": _draw_growth,
    "svcca": _draw_svcca,
    "log": _draw_log,
    "losses": _draw_losses,
    "schedules": _draw_schedules,
    "pruning": _draw_pruning,
}
"""Name in papers.yaml → function of the results and of the figure's options."""
