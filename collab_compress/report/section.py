"""The data of a report: sections with tables, and with pictures that are drawn as inline SVG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, isfinite, log10
from typing import Any, TypeAlias

from collab_compress.calibration import Batch

SHADES = 24  # shades of a hue
MAX_LARGE_MAPS = 32  # maps beyond which they are drawn small and without numbers
MAX_NAMED_ROWS = 26  # rows or columns with names or numbers, at most
WIDTH, HEIGHT = 330, 220  # of a coordinate system
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 38  # its margins

Label: TypeAlias = Callable[[str], str]
"""Function of a module's path to its short name."""

Progress: TypeAlias = Callable[[str], Callable[[int, int | None], None]]
"""Function of the name of some work to the `progress` argument of a measure."""

Read: TypeAlias = Callable[[str], Iterable[Batch]]
"""Function of the name of some work to all batches, which report their progress by that name while they are read."""


@dataclass(frozen=True)
class Table:
    """A table. All rows have the same keys, which are its headings, as "layer" or "dense [ms]"."""

    title: str
    rows: Sequence[Mapping[str, Any]]  # numbers that are None or not finite are shown as –


@dataclass(frozen=True)
class Heatmaps:
    """A picture of matrices on one scale: from 0 to `high`, or from -`high` in two hues that meet at 0."""

    title: str
    reading: str  # how to read it, in one line, with its source
    maps: Mapping[str, Sequence[Sequence[float]]]  # title → rows; numbers that are not finite are left blank
    high: float = 1.0
    diverging: bool = False
    row_label: str = "head"
    column_label: str = "head"
    row_names: Sequence[str] = ()  # numbers if not given


@dataclass(frozen=True)
class Curves:
    """A picture of curves in one coordinate system, whose y axis begins at 0 or below."""

    title: str
    reading: str  # as for `Heatmaps`
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]]  # name and points (x, y), x ascending
    x_label: str
    y_label: str


@dataclass(frozen=True)
class Section:
    """The results of one group of measures."""

    title: str
    reading: str  # what is measured, on how much data, what it does not show, and its source
    tables: Mapping[str, Table] = field(default_factory=dict)
    pictures: Sequence[Heatmaps | Curves] = ()
    highlights: Sequence[str] = ()  # the most important numbers, a sentence each


def short(cell: str | float | None) -> str:
    """Return a cell of a table as text; a float has three significant digits, or more if it is 1000 or above."""
    if isinstance(cell, str):
        return cell
    if cell is None or not isfinite(cell):
        return "–"
    if cell == 0 or isinstance(cell, int):
        return f"{cell:,.0f}".replace("-", "−")
    digits = floor(log10(abs(float(f"{cell:.2e}"))))  # of the rounded number: 0.9999 is 1.00
    if digits >= 15 or digits < -4:
        return f"{cell:.2e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", "−")
    return f"{cell:,.{max(0, 2 - digits)}f}".replace("-", "−")


def draw_heatmap(picture: Heatmaps, title: str) -> str:
    """Return the matrix of this title as SVG."""
    matrix = picture.maps[title]
    rows, columns = len(matrix), max(map(len, matrix))
    are_large = len(picture.maps) <= MAX_LARGE_MAPS
    cell = 20 if len(picture.maps) <= 2 else 13 if are_large else min(13, 78 / max(rows, columns))
    across = min(cell, max(1.5, 500 / columns))
    legible = MAX_NAMED_ROWS if are_large else 0
    row_names = picture.row_names or [str(row) for row in range(rows)] if rows <= legible else []
    left = 6 + 6.2 * max(map(len, row_names)) if row_names else 1
    width, height = left + columns * across + 4, rows * cell + 17
    shades: dict[tuple[str, int], str] = defaultdict(str)  # hue and strength → cells, as parts of a path
    for row, values in enumerate(matrix):
        for column, value in enumerate(values):
            if isfinite(value) and value and (value > 0 or picture.diverging):
                level = round(SHADES * min(1.0, abs(value) / picture.high))
                shades["plus" if value > 0 else "minus", level] += f"M{column} {row}h1v1h-1z"
    parts = [f'<g shape-rendering="crispEdges" transform="translate({left:.1f} 0.5) scale({across:.4g} {cell:.4g})">']
    for (hue, level), cells in sorted(shades.items()):
        parts.append(f'<path class="{hue}" fill-opacity="{level / SHADES:.3g}" d="{cells}"/>')
    parts.append(f'<rect class="frame" width="{columns}" height="{rows}"/></g>')
    for row, name in enumerate(row_names):
        y = (row + 0.5) * cell + 3.5
        parts.append(f'<text x="{left - 4:.1f}" y="{y:.1f}" text-anchor="end">{escape(name)}</text>')
    for column in range(0, columns if columns <= legible else 0, 1 if cell > 13 else 2):
        x = left + (column + 0.5) * across
        parts.append(f'<text x="{x:.1f}" y="{rows * cell + 12:.1f}" text-anchor="middle">{column}</text>')
    label = escape(f"{picture.title}: {title}")
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}">{"".join(parts)}</svg>'
    )


def draw_curves(picture: Curves) -> str:
    """Return the curves of a picture as SVG."""
    points = [(x, y) for _, curve in picture.curves for x, y in curve if isfinite(y)]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    across, x_ticks = _make_axis([x for x, _ in points], LEFT, right)
    up, y_ticks = _make_axis([0.0, *(y for _, y in points)], bottom, TOP)
    parts = []
    for tick in y_ticks:
        y = up(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{tick:,g}</text>')
    for tick in x_ticks:
        parts.append(f'<text x="{across(tick):.1f}" y="{bottom + 14}" text-anchor="middle">{tick:,g}</text>')
    for (name, curve), colour in zip(picture.curves, colours(len(picture.curves)), strict=True):
        steps = " ".join(f"L{across(x):.1f} {up(y):.1f}" for x, y in curve if isfinite(y))
        path = f"M{steps[1:].partition(' L')[0]}h0 {steps}" if steps else ""  # h0: a single point is a dot
        parts.append(f'<g class="line" style="--c:{colour}"><title>{escape(name)}</title><path d="{path}"/></g>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle, label = (LEFT + right) / 2, escape(picture.title)
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {HEIGHT}" class="curves">{"".join(parts)}'
        f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(picture.x_label)}</text></svg>'
    )


def colours(count: int) -> list[str]:
    """Return colours for so many curves, from blue to orange."""
    return [f"hsl({(215 + 170 * index / max(1, count - 1)) % 360:.0f} 65% 42%)" for index in range(count)]


def _make_axis(values: Sequence[float], start: float, stop: float) -> tuple[Callable[[float], float], list[float]]:
    """Return a function from numbers to pixels along an axis that shows all values, and the axis's ticks."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:
        low, high = min(low, 0.0), max(high, 0.0) or 1.0
    least = (high - low) / 4
    power = 10.0 ** floor(log10(least))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least)
    ticks = [number * step for number in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]
    return lambda value: start + (value - low) / (high - low) * (stop - start), ticks
