"""Pictures as inline SVG: heatmaps and curves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from itertools import groupby
from math import ceil, floor, log10

from collab_compress.report.section import Curve, Curves, Heatmap, Heatmaps, Panel, Picture, short

LEVELS = 24  # shades of a hue
MANY = 16  # maps beyond which they are drawn small
LEGIBLE = 26  # rows or columns with names, at most
WIDTH, HEIGHT = 330, 220  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 38  # its margins


def is_narrow(picture: Picture) -> bool:
    """Return whether there is room for another picture beside this one."""
    if isinstance(picture, Curves):
        return len(picture.panels) == 1
    return len(picture.maps) <= 2 and all(len(row) <= 16 for heat in picture.maps for row in heat.values)


def draw_heatmaps(picture: Heatmaps) -> list[tuple[str, str]]:
    """Return the title and the SVG of each map."""
    largest = max(max(len(heat.values), *map(len, heat.values)) for heat in picture.maps)
    if any(heat.rows for heat in picture.maps):
        cell = 20.0 if is_narrow(picture) else 12.5
    else:
        cell = min(26.0, (78 if len(picture.maps) > MANY else 190) / largest)
    return [(heat.title, draw_heatmap(heat, picture, cell)) for heat in picture.maps]


def draw_heatmap(heat: Heatmap, picture: Heatmaps, cell: float) -> str:
    """Return one matrix of a picture as SVG; `cell` is the side of a cell in pixels, its height in very wide maps."""
    rows, columns = len(heat.values), max(map(len, heat.values))
    row_names = heat.rows if len(heat.rows) <= LEGIBLE else ()
    column_names = heat.columns if len(heat.columns) <= LEGIBLE else ()
    long = max(map(len, heat.columns), default=0) > 3
    left = 6 + 6.2 * max(map(len, row_names)) if row_names else 1
    bottom = (8 + 5.4 * max(map(len, column_names)) if long else 16) if column_names else 1
    across = min(cell, max(1.5, 500 / columns))
    width, height = left + columns * across + (24 if long else 4), rows * cell + bottom + 1
    parts = [_cells(heat, picture, f"translate({left:.1f} 0.5) scale({across:.4g} {cell:.4g})")]
    for row, name in enumerate(row_names):
        y = (row + 0.5) * cell + 3.5
        parts.append(f'<text x="{left - 4:.1f}" y="{y:.1f}" text-anchor="end">{escape(name)}</text>')
    for column, name in enumerate(column_names):
        x, y = left + (column + 0.5) * across, rows * cell + 12
        if long:
            parts.append(f'<text transform="translate({x - 3:.1f} {y - 4:.1f}) rotate(50)">{escape(name)}</text>')
        elif across > 13 or column % 2 == 0:
            parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(name)}</text>')
    frame = f'<rect class="frame" x="{left:.1f}" y="0.5" width="{columns * across:.1f}" height="{rows * cell:.1f}"/>'
    label = escape(f"{picture.title}: {heat.title}", quote=True)
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}">{"".join(parts)}{frame}</svg>'
    )


def _cells(heat: Heatmap, picture: Heatmaps, transform: str) -> str:
    """Return the cells by shade, in runs of equal ones."""
    shades: dict[tuple[str, int], list[str]] = defaultdict(list)
    for row, values in enumerate(heat.values):
        of_cells = [shade(value, picture) for value in values]
        for cell_shade, run in groupby(range(len(values)), of_cells.__getitem__):
            columns = list(run)
            if cell_shade is not None:
                shades[cell_shade].append(f"M{columns[0]} {row}h{len(columns)}v1h-{len(columns)}z")
    paths = [
        f'<path class="{hue}" fill-opacity="{level / LEVELS:.3g}" d="{"".join(cells)}"/>'
        for (hue, level), cells in sorted(shades.items())
    ]
    return f'<g shape-rendering="crispEdges" transform="{transform}">{"".join(paths)}</g>'


def shade(value: float | None, picture: Heatmaps) -> tuple[str, int] | None:
    """Return the hue of a value, and its strength from 0 to `LEVELS`."""
    if value is None:
        return None
    hue = "minus" if picture.diverging and value < 0 else "plus"
    magnitude = abs(value) if picture.diverging else max(value, 0.0)
    share = magnitude / picture.high if picture.high > 0 else 0.0
    return hue, round(LEVELS * min(share, 1.0))


def draw_panels(picture: Curves) -> list[tuple[str, str]]:
    """Return the title and the SVG of each panel."""
    colours = colours_of(picture)
    return [(panel.title, draw_panel(panel, picture, colours)) for panel in picture.panels]


def colours_of(picture: Curves) -> dict[str, str]:
    """Return curve name → colour: up to four in fixed ones, more in a spectrum."""
    names = list(dict.fromkeys(curve.name for panel in picture.panels for curve in panel.curves))
    if len(names) <= 4:
        return {name: f"var(--c{place})" for place, name in enumerate(names)}
    hues = [(250 + 170 * place / (len(names) - 1)) % 360 for place in range(len(names))]  # blue over red to yellow
    return {name: f"hsl({hue:.0f} 62% 45%)" for name, hue in zip(names, hues, strict=True)}


def draw_panel(panel: Panel, picture: Curves, colours: dict[str, str]) -> str:
    """Return one panel of a picture as SVG, with colours by the names of curves."""
    heights = [y for other in picture.panels for curve in other.curves for y in curve.y]
    across = _Axis([x for curve in panel.curves for x in curve.x], picture.log, LEFT, WIDTH - RIGHT)
    up = _Axis([*heights, picture.bottom, picture.top], picture.log, HEIGHT - BOTTOM, TOP)
    parts = []
    for y in up.ticks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>'
            f'<text x="{LEFT - 5}" y="{up(y) + 3.5:.1f}" text-anchor="end">{_tick(y)}</text>'
        )
    for x in across.ticks:
        parts.append(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{_tick(x)}</text>')
    parts += [_draw_curve(curve, across, up, colours) for curve in panel.curves]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text class="name" x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(picture.x_label)}</text>'
    )
    label = escape(f"{picture.title}: {panel.title}", quote=True)
    return f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {HEIGHT}" class="panel">{"".join(parts)}</svg>'


def _draw_curve(curve: Curve, across: _Axis, up: _Axis, colours: dict[str, str]) -> str:
    """Return a curve with its name; a single point becomes a dot."""
    lines: list[list[str]] = [[]]
    for x, y in zip(curve.x, curve.y, strict=True):
        if x is None or y is None or (across.log and (x <= 0 or y <= 0)):
            lines.append([])  # interrupted
            continue
        lines[-1].append(f"{across(x):.1f} {up(y):.1f}")
    path = "".join("M" + "L".join(points if len(points) > 1 else points * 2) for points in lines if points)
    kind = "dashed" if curve.dashed else "line"
    title = f"<title>{escape(curve.name)}</title>"
    return f'<g class="{kind}" style="--c:{colours[curve.name]}">{title}<path d="{path}"/></g>'


def _tick(value: float) -> str:
    """Return a number of an axis as text."""
    return f"{value:g}" if abs(value) < 10_000 else short(value)


class _Axis:
    """The places of numbers along one axis from `start` to `stop`, in pixels, and its ticks."""

    def __init__(self, values: Sequence[float | None], log: bool, start: float, stop: float) -> None:
        self.log, self.start, self.stop = log, start, stop
        present = [value for value in values if value is not None and (value > 0 or not log)] or [1.0]
        low, high = min(present), max(present)
        if log:
            first, last = floor(log10(low)), ceil(log10(high))
            steps = (1, 2, 5) if log10(high / low) < 2.5 else (1,)
            ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
            self.low, self.high = low, max(high, low * 1.01)
        else:
            if high == low:
                low, high = min(low, 0.0), max(high, 0.0) or 1.0
            least = (high - low) / 4
            power = 10.0 ** floor(log10(least))
            step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least)
            first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
            ticks = [place * step for place in range(first, last + 1)]
            self.low, self.high = min(low, *ticks), max(high, *ticks)
        self.ticks = [tick for tick in ticks if self.low <= tick <= self.high]

    def __call__(self, value: float) -> float:
        """Return the place of a number, in pixels."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = log10(low), log10(high), log10(value)
        return self.start + (value - low) / (high - low) * (self.stop - self.start)
