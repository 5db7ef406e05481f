"""Forest plots: the verdicts on a paper's claims, each with its difference and 95 % interval."""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from collab_compress.errors import RecipeError

from .verdicts import FAILS, HOLDS, SAME, Verdict

COLOURS = {HOLDS: "#1a7f37", FAILS: "#cf222e", SAME: "#0969da"}
OPEN_COLOUR = "#8c959f"


def forest_plot(title: str, verdicts: Sequence[Verdict]) -> bytes:
    """Return a picture in SVG: a panel for each unit, in which the side of the claims is the right one.

    Args:
        title: of the picture.
        verdicts: with a difference.

    Raises:
        RecipeError: Matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RecipeError("forest plots need Matplotlib; run: pip install 'collab-compress[data]'") from error
    panels: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        panels.setdefault(f"{verdict.claim.of}, {verdict.unit}".removesuffix(", "), []).append(verdict)
    sizes = [len(panel) + 1 for panel in panels.values()]
    with matplotlib.rc_context({"svg.hashsalt": "forest", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(9, 0.9 + 0.24 * sum(sizes) + 0.4 * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=sizes)[:, 0]
        for axis, (unit, panel) in zip(axes, panels.items(), strict=True):
            labels = [f"{verdict.compared} ({verdict.where.removeprefix('the ')})" for verdict in panel]
            for place, verdict in enumerate(panel):
                _draw(axis, place, verdict)
            axis.axvline(0, color="black", linewidth=0.8)
            axis.set(yticks=range(len(panel)), yticklabels=labels, ylim=(len(panel) - 0.5, -0.5))
            axis.set_xlabel(f"{unit}; to the right as claimed")
            outcomes = axis.secondary_yaxis("right")
            outcomes.set(yticks=range(len(panel)), yticklabels=[_outcome(verdict) for verdict in panel])
            for side in (axis, outcomes):
                side.tick_params(axis="y", length=0)
        figure.suptitle(title)
        file = BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def _draw(axis: Any, place: int, verdict: Verdict) -> None:
    """Draw the difference, its interval (thin where it is of seeds alone), and the bounds of the claim as ticks."""
    colour = COLOURS.get(verdict.outcome, OPEN_COLOUR)
    if verdict.difference is None:
        return
    if verdict.interval is not None:
        ends = [verdict.sign * end for end in verdict.interval]
        axis.plot(ends, [place, place], color=colour, linewidth=2.0 if verdict.of_examples else 1.0)
    axis.plot(verdict.sign * verdict.difference.mean, place, "o", color=colour, markersize=4)
    if not verdict.claim.of_difference:
        bounds = [bound for bound in verdict.claim.bounds if abs(bound) < float("inf")]
        axis.plot(bounds, [place] * len(bounds), "|", color="black", markersize=9)


def _outcome(verdict: Verdict) -> str:
    seeds = 0 if verdict.difference is None else verdict.difference.count
    p = "" if verdict.p is None else f", p = {verdict.p:.2g}"
    return f"{verdict.outcome.removesuffix(', cannot be told')} (n = {seeds}{p})"
