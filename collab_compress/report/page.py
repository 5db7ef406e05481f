"""The page: templates filled with what was found, and the pictures in it drawn."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from collab_compress.report.findings import Findings
from collab_compress.report.section import Curves, Heatmaps, Picture, Table, written
from collab_compress.report.svg import draw_heatmap, draw_panel


def render_page(findings: Findings) -> str:
    """Render what was found as one HTML page; it fetches nothing."""
    return _templates().get_template("page.html").render(findings=findings)


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
