"""Pictures as inline SVG: heatmaps and curves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from itertools import groupby
from math import ceil, floor, log10

from collab_compress.report.section import Curve, Curves, Heatmap, Heatmaps, Panel, Picture, short

LEVELS = 24  # shades of a hue
LEGIBLE = 26  # rows or columns with names, at most
TELLING = 400  # cells of a map that show their value under the pointer, at most
WIDTH, HEIGHT = 330, 220  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 38  # its margins


def draw_heatmap(heat: Heatmap, picture: Heatmaps, cell: float) -> str:
    """Return one matrix as SVG.

    Args:
        heat: the matrix.
        picture: the picture with this matrix and the scale.
        cell: side of a cell in pixels; its height in very wide maps.
    """
    rows, columns = len(heat.values), max(map(len, heat.values), default=0)
    named = [bool(names) and len(names) <= LEGIBLE for names in (heat.rows, heat.columns)]
    long = max((len(name) for name in heat.columns), default=0) > 3
    left = 6 + 6.2 * max(map(len, heat.rows), default=0) if named[0] else 1
    bottom = (8 + 5.4 * max(map(len, heat.columns), default=0) if long else 16) if named[1] else 1
    across = min(cell, max(1.5, 500 / max(columns, 1)))
    width, height = left + columns * across + (24 if long else 4), rows * cell + bottom + 1
    parts = [_cells(heat, picture, left, across, cell)]
    if named[0]:
        parts += [
            f'<text x="{left - 4:.1f}" y="{(row + 0.5) * cell + 3.5:.1f}" text-anchor="end">{escape(name)}</text>'
            for row, name in enumerate(heat.rows)
        ]
    if named[1]:
        parts += [
            _column_name(name, left + (column + 0.5) * across, rows * cell + 12, long)
            for column, name in enumerate(heat.columns)
            if long or across > 13 or column % 2 == 0
        ]
    frame = f'<rect class="frame" x="{left:.1f}" y="0.5" width="{columns * across:.1f}" height="{rows * cell:.1f}"/>'
    label = escape(f"{picture.title}: {heat.title}", quote=True)
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}">{"".join(parts)}{frame}</svg>'
    )


def draw_panel(panel: Panel, picture: Curves, colours: dict[str, str]) -> str:
    """Return the curves of one panel as SVG.

    Args:
        panel: the curves.
        picture: the picture with this panel and the axes.
        colours: name of a curve → colour.
    """
    across = _Axis.over([x for curve in panel.curves for x in curve.x], picture.log, LEFT, WIDTH - RIGHT)
    heights = [y for curve in _curves(picture) for y in curve.y]
    limits = [limit for limit in (picture.bottom, picture.top) if limit is not None]
    up = _Axis.over([*heights, *limits], picture.log, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>'
        f'<text x="{LEFT - 5}" y="{up(y) + 3.5:.1f}" text-anchor="end">{short_tick(y)}</text>'
        for y in up.ticks
    ]
    parts += [
        f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{short_tick(x)}</text>'
        for x in across.ticks
    ]
    parts += [_curve(curve, across, up, colours) for curve in panel.curves]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text class="name" x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(picture.x_label)}</text>'
    )
    label = escape(f"{picture.title}: {panel.title}", quote=True)
    return f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {HEIGHT}" class="panel">{"".join(parts)}</svg>'


def shade(value: float, low: float, high: float, diverging: bool) -> tuple[str, int]:
    """Return the hue of a value, and its strength from 0 to `LEVELS`."""
    if diverging:
        reach = max(abs(low), abs(high))
        share = abs(value) / reach if reach else 0.0
        hue = "minus" if value < 0 else "plus"
    else:
        share, hue = ((value - low) / (high - low) if high > low else 0.0), "plus"
    return hue, round(LEVELS * min(max(share, 0.0), 1.0))


def short_tick(value: float) -> str:
    """Return a number of an axis as text."""
    return f"{value:g}" if abs(value) < 10_000 else short(value)


def narrow(picture: Picture) -> bool:
    """Return whether there is room for another picture beside this one."""
    if isinstance(picture, Curves):
        return len(picture.panels) == 1
    return len(picture.maps) <= 2 and all(len(row) <= 16 for heat in picture.maps for row in heat.values)


def many(picture: Heatmaps) -> bool:
    """Return whether the maps are drawn small."""
    return len(picture.maps) > 16


def maps(picture: Heatmaps) -> list[tuple[str, str]]:
    """Return the title and the SVG of each map."""
    largest = max(max(len(heat.values), max(map(len, heat.values), default=0)) for heat in picture.maps)
    named = any(heat.rows for heat in picture.maps)
    free = min(26.0, (78 if many(picture) else 190) / max(largest, 1))
    cell = free if not named else 20.0 if narrow(picture) else 12.5
    return [(heat.title, draw_heatmap(heat, picture, cell)) for heat in picture.maps]


def panels(picture: Curves) -> list[tuple[str, str]]:
    """Return the title and the SVG of each panel."""
    of_names = colours(picture)
    return [(panel.title, draw_panel(panel, picture, of_names)) for panel in picture.panels]


def colours(picture: Curves) -> dict[str, str]:
    """Return curve name → colour."""
    names = dict.fromkeys(curve.name for curve in _curves(picture) if curve.name)
    bold = {curve.name for curve in _curves(picture) if curve.weight == "bold"}
    lines = [name for name in names if name not in bold]
    result = dict.fromkeys(names, "var(--ink)")
    for place, name in enumerate(lines):
        hue = (250 + 170 * place / max(len(lines) - 1, 1)) % 360  # from blue over red to yellow
        result[name] = f"var(--c{place})" if len(lines) <= 4 else f"hsl({hue:.0f} 62% var(--light))"
    return result


def _curves(picture: Curves) -> list[Curve]:
    return [curve for panel in picture.panels for curve in panel.curves]


def _cells(heat: Heatmap, picture: Heatmaps, left: float, width: float, height: float) -> str:
    rows, columns = len(heat.values), max(map(len, heat.values), default=0)
    telling = rows * columns <= TELLING and rows * columns * len(picture.maps) <= 12 * TELLING
    runs: dict[tuple[str, int], list[str]] = defaultdict(list)
    for row, values in enumerate(heat.values):
        levels = [_shade(value, picture) for value in values]
        for level, run in groupby(range(len(values)), levels.__getitem__):
            places = list(run)
            if level is not None and telling:
                runs[level] += [_cell_with_value(heat, picture, row, column) for column in places]
            elif level is not None:
                runs[level].append(f"M{places[0]} {row}h{len(places)}v1h-{len(places)}z")
    shades = "".join(
        f'<g class="{hue}" fill-opacity="{level / LEVELS:.3g}">{"".join(cells)}</g>'
        if telling
        else f'<path class="{hue}" fill-opacity="{level / LEVELS:.3g}" d="{"".join(cells)}"/>'
        for (hue, level), cells in sorted(runs.items())
    )
    return (
        f'<g shape-rendering="crispEdges" transform="translate({left:.1f} 0.5) scale({width:.4g} {height:.4g})">'
        f"{shades}</g>"
    )


def _shade(value: float | None, picture: Heatmaps) -> tuple[str, int] | None:
    return None if value is None else shade(value, picture.low, picture.high, picture.scale == "diverging")


def _cell_with_value(heat: Heatmap, picture: Heatmaps, row: int, column: int) -> str:
    """Return a cell that shows its value under the pointer."""
    place = " × ".join(
        names[index] if index < len(names) else str(index)
        for names, index in ((heat.rows, row), (heat.columns, column))
    )
    text = f"{place}: {short(heat.values[row][column])}{picture.unit and ' ' + picture.unit}"
    return f'<rect x="{column}" y="{row}" width="1" height="1"><title>{escape(text)}</title></rect>'


def _column_name(name: str, x: float, y: float, long: bool) -> str:
    if not long:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(name)}</text>'
    return f'<text transform="translate({x - 3:.1f} {y - 4:.1f}) rotate(50)">{escape(name)}</text>'


def _curve(curve: Curve, across: _Axis, up: _Axis, colours: dict[str, str]) -> str:
    """Return a curve that shows its name under the pointer; with few points, these show their coordinates."""
    pieces: list[list[str]] = [[]]
    dots = []
    for x, y in zip(curve.x, curve.y, strict=True):
        if x is None or y is None or (across.log and (x <= 0 or y <= 0)):
            pieces.append([])
        else:
            pieces[-1].append(f"{across(x):.1f} {up(y):.1f}")
            title = escape(f"{curve.name} at {short_tick(x)}: {short(y)}".removeprefix(" "))
            dots.append(f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.2"><title>{title}</title></circle>')
    drawn = "".join("M" + "L".join(piece) for piece in pieces if piece)
    shown = "".join(dots) if len(dots) <= 24 and curve.weight != "faint" else ""
    name = f"<title>{escape(curve.name)}</title>" if curve.name else ""
    colour = colours.get(curve.name, "var(--faint)")
    return f'<g class="{curve.weight}" style="--c:{colour}">{name}<path d="{drawn}"/>{shown}</g>' if drawn else ""


class _Axis:
    """The places of numbers along one axis."""

    def __init__(self, low: float, high: float, log: bool, start: float, stop: float, ticks: Sequence[float]) -> None:
        self.low, self.high, self.log, self.start, self.stop = low, high, log, start, stop
        self.ticks = [tick for tick in ticks if low <= tick <= high]

    @classmethod
    def over(cls, values: Sequence[float | None], log: bool, start: float, stop: float) -> _Axis:
        """Return an axis over values."""
        present = [value for value in values if value is not None and (value > 0 or not log)] or [1.0]
        low, high = min(present), max(present)
        if log:
            first, last = floor(log10(low)), ceil(log10(high))
            steps = (1, 2, 5) if log10(high / low) < 2.5 else (1,)
            powers = [step * 10.0**power for power in range(first, last + 1) for step in steps]
            return cls(low, max(high, low * 1.01), log=True, start=start, stop=stop, ticks=powers)
        if high == low:
            low, high = min(low, 0.0), max(high, 0.0) or 1.0
        raw = (high - low) / 4
        power = 10.0 ** floor(log10(raw))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
        first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
        ticks = [round(place * step, 12) for place in range(first, last + 1)]
        return cls(min(low, *ticks), max(high, *ticks), log=False, start=start, stop=stop, ticks=ticks)

    def __call__(self, value: float) -> float:
        """Return the place of a number, in pixels."""
        low, high, at = (log10(x) for x in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return self.start + (at - low) / (high - low) * (self.stop - self.start)
