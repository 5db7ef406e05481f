"""The page: templates filled with what was found, its heatmaps and curves drawn as inline SVG."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from html import escape
from math import ceil, floor, log10

from jinja2 import Environment, PackageLoader, StrictUndefined

from collab_compress.report.findings import Findings
from collab_compress.report.section import Curve, Curves, Heatmap, Heatmaps, Panel, Picture, Table, short, written

LEVELS = 24  # shades of a hue
LEGIBLE = 26  # rows or columns that are named at most
TELLING = 400  # cells of a map that say their value when pointed at
WIDTH, HEIGHT = 330, 220  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 38  # its margins


def render_page(findings: Findings) -> str:
    """Render what was found as one HTML page; it fetches nothing."""
    texts = [*findings.actions, *findings.highlights, *(section.reading for section in findings.sections)]
    used = {term for text in texts for term in TERM.findall(text)}
    glossary = {term: meaning for term, meaning in GLOSSARY.items() if term in used}
    return _templates().get_template("page.html").render(findings=findings, glossary=glossary)


GLOSSARY = {
    "energy": "The share of a matrix's squared singular values that its first components hold: how much of what "
    "attention computes a given width can keep.",
    "drift": "How far the outputs move: the norm of the difference, divided by the norm of the original outputs.",
    "T*": "The number of tokens beyond which converted attention takes more operations than dense attention.",
    "SVCCA": "How far the outputs of two heads are linear functions of each other: 0 not at all, 1 entirely.",
    "CKA": "How far two heads arrange the same tokens alike: 0 not at all, 1 entirely.",
    "dk": "The width of queries and keys, all heads together.",
    "dv": "The width of values, all heads together.",
}
TERM = re.compile(r"(?<!\w)(?<!-)(" + "|".join(re.escape(term) for term in GLOSSARY) + r")(?!\w)")


def explained(text: str) -> str:
    """Return a text as HTML in which the first use of each term of the glossary shows what it means."""
    seen: set[str] = set()

    def link(match: re.Match[str]) -> str:
        term = match[0]
        if term in seen:
            return term
        seen.add(term)
        return f'<a class="term" href="#glossary" title="{escape(GLOSSARY[term], quote=True)}">{term}</a>'

    return TERM.sub(link, escape(text, quote=False))


def draw_heatmap(heat: Heatmap, picture: Heatmaps, cell: float) -> str:
    """Draw one matrix.

    Args:
        heat: the matrix.
        picture: that it is part of, which has the scale.
        cell: side of a cell, in pixels; the height of one where a map is very wide.
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
    """Draw the curves of one panel.

    Args:
        panel: the curves.
        picture: that it is part of, which has the axes.
        colours: name of a curve → colour.
    """
    across = _Axis.over([x for curve in panel.curves for x in curve.x], picture.log, LEFT, WIDTH - RIGHT)
    everything = [y for each in picture.panels for curve in each.curves for y in curve.y]
    limits = [limit for limit in (picture.bottom, picture.top) if limit is not None]
    up = _Axis.over([*everything, *limits], picture.log, HEIGHT - BOTTOM, TOP)
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
    """Give the hue of a value, and its strength from 0 to `LEVELS`."""
    if diverging:
        reach = max(abs(low), abs(high))
        share = abs(value) / reach if reach else 0.0
        hue = "minus" if value < 0 else "plus"
    else:
        share, hue = ((value - low) / (high - low) if high > low else 0.0), "plus"
    return hue, round(LEVELS * min(max(share, 0.0), 1.0))


def short_tick(value: float) -> str:
    """Write a number at an axis."""
    return f"{value:g}" if abs(value) < 10_000 else short(value)


@cache
def _templates() -> Environment:
    found = Environment(
        loader=PackageLoader("collab_compress.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "written": written,
        "explained": explained,
        "numeric": _numeric,
        "narrow": _narrow,
        "many": _many,
        "maps": _maps,
        "panels": _panels,
        "colours": _colours,
    }
    found.tests["heatmaps"] = lambda picture: isinstance(picture, Heatmaps)
    return found


def _numeric(table: Table) -> list[bool]:
    """Say for each column whether it holds numbers, which stand to the right."""
    return [all(not isinstance(row[place], str) for row in table.rows) for place in range(len(table.columns))]


def _narrow(picture: Picture) -> bool:
    """Whether it leaves room for another beside it."""
    if isinstance(picture, Curves):
        return len(picture.panels) == 1
    return len(picture.maps) <= 2 and all(len(row) <= 16 for heat in picture.maps for row in heat.values)


def _many(picture: Heatmaps) -> bool:
    """Whether its maps are small."""
    return len(picture.maps) > 16


def _maps(picture: Heatmaps) -> list[tuple[str, str]]:
    """Draw each map; gives its title and its SVG."""
    largest = max(max(len(heat.values), max(map(len, heat.values), default=0)) for heat in picture.maps)
    named = any(heat.rows for heat in picture.maps)
    free = min(26.0, (78 if _many(picture) else 190) / max(largest, 1))
    cell = free if not named else 20.0 if _narrow(picture) else 12.5
    return [(heat.title, draw_heatmap(heat, picture, cell)) for heat in picture.maps]


def _panels(picture: Curves) -> list[tuple[str, str]]:
    """Draw each panel; gives its title and its SVG."""
    colours = _colours(picture)
    return [(panel.title, draw_panel(panel, picture, colours)) for panel in picture.panels]


def _colours(picture: Curves) -> dict[str, str]:
    """Give each curve that has a name a colour, in the order they come in."""
    names = list(dict.fromkeys(c.name for panel in picture.panels for c in panel.curves if c.name))
    bold = {c.name for panel in picture.panels for c in panel.curves if c.weight == "bold"}
    lines = [name for name in names if name not in bold]
    found = dict.fromkeys(names, "var(--ink)")
    return found | {
        name: f"var(--c{place})" if len(lines) <= 4 else _ramp(place, len(lines)) for place, name in enumerate(lines)
    }


def _ramp(place: int, count: int) -> str:
    """Give the colour of one of many curves in order, from blue over red to yellow."""
    return f"hsl({(250 + 170 * place / max(count - 1, 1)) % 360:.0f} 62% var(--light))"


def _cells(heat: Heatmap, picture: Heatmaps, left: float, width: float, height: float) -> str:
    rows, columns = len(heat.values), max(map(len, heat.values), default=0)
    telling = rows * columns <= TELLING and rows * columns * len(picture.maps) <= 12 * TELLING
    runs: dict[tuple[str, int], list[str]] = {}
    for row, values in enumerate(heat.values):
        start = 0
        while start < len(values):
            value, stop = values[start], start + 1
            if value is not None:
                found = shade(value, picture.low, picture.high, picture.scale == "diverging")
                while not telling and stop < len(values) and _same(values[stop], found, picture):
                    stop += 1
                runs.setdefault(found, []).append(
                    _told(heat, picture, row, start)
                    if telling
                    else f"M{start} {row}h{stop - start}v1h{start - stop}z"
                )
            start = stop
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


def _same(value: float | None, found: tuple[str, int], picture: Heatmaps) -> bool:
    return value is not None and shade(value, picture.low, picture.high, picture.scale == "diverging") == found


def _told(heat: Heatmap, picture: Heatmaps, row: int, column: int) -> str:
    """Draw a cell that says its value when pointed at."""
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
    """Draw a curve that says its name when pointed at, and its dots, where it has few, that say their place."""
    pieces: list[list[str]] = [[]]
    dots = []
    for x, y in zip(curve.x, curve.y, strict=True):
        if x is None or y is None or (across.log and (x <= 0 or y <= 0)):
            pieces.append([])
        else:
            pieces[-1].append(f"{across(x):.1f} {up(y):.1f}")
            told = escape(f"{curve.name} at {short_tick(x)}: {short(y)}".removeprefix(" "))
            dots.append(f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.2"><title>{told}</title></circle>')
    drawn = "".join("M" + "L".join(piece) for piece in pieces if piece)
    shown = "".join(dots) if len(dots) <= 24 and curve.weight != "faint" else ""
    name = f"<title>{escape(curve.name)}</title>" if curve.name else ""
    colour = colours.get(curve.name, "var(--faint)")
    return f'<g class="{curve.weight}" style="--c:{colour}">{name}<path d="{drawn}"/>{shown}</g>' if drawn else ""


class _Axis:
    """Where numbers lie along one axis."""

    def __init__(self, low: float, high: float, log: bool, start: float, stop: float, ticks: Sequence[float]) -> None:
        self.low, self.high, self.log, self.start, self.stop = low, high, log, start, stop
        self.ticks = [tick for tick in ticks if low <= tick <= high]

    @classmethod
    def over(cls, values: Sequence[float | None], log: bool, start: float, stop: float) -> _Axis:
        """Make an axis over values."""
        present = [value for value in values if value is not None and (value > 0 or not log)] or [1.0]
        low, high = min(present), max(present)
        if log:
            first, last = floor(log10(low)), ceil(log10(high))
            steps = (1, 2, 5) if log10(high / low) < 2.5 else (1,)
            return cls(low, max(high, low * 1.01), True, start, stop, [
                step * 10.0**power for power in range(first, last + 1) for step in steps
            ])  # fmt: skip
        if high == low:
            low, high = min(low, 0.0), max(high, 0.0) or 1.0
        raw = (high - low) / 4
        step = next(s * 10.0 ** floor(log10(raw)) for s in (1, 2, 2.5, 5, 10) if s * 10.0 ** floor(log10(raw)) >= raw)
        first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
        ticks = [round(place * step, 12) for place in range(first, last + 1)]
        return cls(min(low, *ticks), max(high, *ticks), False, start, stop, ticks)

    def __call__(self, value: float) -> float:
        """Give the place of a number, in pixels."""
        low, high, at = (log10(x) for x in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return self.start + (at - low) / (high - low) * (self.stop - self.start)
