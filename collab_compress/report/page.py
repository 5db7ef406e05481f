"""The page: one HTML file that needs nothing else, in light and dark, with tables that sort."""

from html import escape
from string import Template

from collab_compress.report.findings import Findings
from collab_compress.report.numerals import written
from collab_compress.report.section import Cell, Column, Curves, Heatmaps, Picture, Section, Table
from collab_compress.report.style import SCRIPT, STYLE
from collab_compress.report.svg import draw_heatmap, draw_panel

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Heads of $title</title>
<link rel="icon" href="data:,">
<style>$style</style>
</head>
<body>
<header><h1>Heads of $title</h1><dl class="facts">$facts</dl></header>
<nav aria-label="Sections">$links</nav>
<main>
<section id="overview"><h2>At a glance</h2><ul class="highlights">$highlights</ul></section>
$sections
$omitted
</main>
<script>$script</script>
</body>
</html>
""")


def render_page(findings: Findings) -> str:
    """Render what was found as one HTML page; it fetches nothing."""
    return PAGE.substitute(
        title=escape(findings.title),
        style=STYLE,
        script=SCRIPT,
        facts="".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in findings.facts.items()),
        links="".join(
            f'<a href="#{each.name}">{escape(each.name.replace("_", " "))}</a>' for each in findings.sections
        ),
        highlights="".join(f"<li>{escape(line)}</li>" for line in findings.highlights),
        sections="\n".join(map(_section, findings.sections)),
        omitted=_omitted(findings.omitted),
    )


def _section(section: Section) -> str:
    pictures = "\n".join(map(_picture, section.pictures))
    tables = "\n".join(map(_table, section.tables))
    return (
        f'<section id="{section.name}"><h2>{escape(section.title)}</h2>'
        f'<p class="reading">{escape(section.reading)}</p>{_source(section.source)}\n'
        f'<div class="tables">{tables}</div>\n'
        f'<div class="pictures">{pictures}</div></section>'
    )


def _source(source: str) -> str:
    return f'<p class="source">After {escape(source)}.</p>'


def _omitted(omitted: dict[str, str]) -> str:
    if not omitted:
        return ""
    lines = "".join(f"<li><b>{escape(name)}</b>: {escape(reason)}</li>" for name, reason in omitted.items())
    return f'<section id="omitted"><h2>Not shown</h2><ul>{lines}</ul></section>'


def _table(table: Table) -> str:
    numeric = [all(not isinstance(row[place], str) for row in table.rows) for place in range(len(table.columns))]
    head = "".join(map(_header, table.columns, numeric))
    body = "".join(
        "<tr>" + "".join(_cell(cell, right) for cell, right in zip(row, numeric, strict=True)) + "</tr>"
        for row in table.rows
    )
    return (
        f'<figure class="table"><figcaption>{escape(table.title)}</figcaption><div class="scroll"><table><thead><tr>'
        f"{head}</tr></thead><tbody>{body}</tbody></table></div></figure>"
    )


def _header(column: Column, numeric: bool) -> str:
    unit = f' <span class="unit">{escape(column.unit)}</span>' if column.unit else ""
    side = ' class="number"' if numeric else ""
    return f'<th{side} aria-sort="none"><button type="button">{escape(column.name)}{unit}</button></th>'


def _cell(cell: Cell, numeric: bool) -> str:
    value = "" if cell is None else escape(str(cell), quote=True)
    side = ' class="number"' if numeric else ""
    return f'<td{side} data-value="{value}">{escape(written(cell))}</td>'


def _picture(picture: Picture) -> str:
    drawn = _heatmaps(picture) if isinstance(picture, Heatmaps) else _curves(picture)
    narrow = ' class="narrow"' if _narrow(picture) else ""
    return (
        f"<figure{narrow}><figcaption><b>{escape(picture.title)}.</b> {escape(picture.reading)} "
        f'<span class="source">{escape(picture.source)}</span></figcaption>{drawn}</figure>'
    )


def _narrow(picture: Picture) -> bool:
    """Whether it leaves room for another beside it."""
    if isinstance(picture, Curves):
        return len(picture.panels) == 1
    return len(picture.maps) <= 2 and all(len(row) <= 16 for heat in picture.maps for row in heat.values)


def _heatmaps(picture: Heatmaps) -> str:
    largest = max(max(len(heat.values), max(map(len, heat.values), default=0)) for heat in picture.maps)
    many = len(picture.maps) > 16
    named = any(heat.rows for heat in picture.maps)
    cell = min(26.0, (78 if many else 190) / max(largest, 1)) if not named else 20.0 if _narrow(picture) else 12.5
    drawn = "".join(
        '<div class="map">' + (f"<h4>{escape(heat.title)}</h4>" if heat.title else "")
        + draw_heatmap(heat, picture, cell) + "</div>"
        for heat in picture.maps
    )  # fmt: skip
    axes = " · ".join(
        f"{name}: {escape(label)}"
        for name, label in (("rows", picture.row_label), ("columns", picture.column_label))
        if label
    )
    unit = f" {escape(picture.unit)}" if picture.unit else ""
    scale = (
        f'<span class="scale {picture.scale}"><span>{picture.low:.3g}</span><i></i>'
        f"<span>{picture.high:.3g}{unit}</span></span>"
    )
    return f'<p class="key">{scale}<span>{axes}</span></p><div class="maps{" many" * many}">{drawn}</div>'


def _curves(picture: Curves) -> str:
    names = list(dict.fromkeys(c.name for panel in picture.panels for c in panel.curves if c.name))
    bold = {c.name for panel in picture.panels for c in panel.curves if c.weight == "bold"}
    lines = [name for name in names if name not in bold]
    colours = {
        name: f"var(--c{place})" if len(lines) <= 4 else _ramp(place, len(lines)) for place, name in enumerate(lines)
    }
    colours |= dict.fromkeys(bold, "var(--ink)")
    legend = "".join(f'<li style="--c:{colours[name]}">{escape(name)}</li>' for name in names)
    panels = "".join(
        '<div class="panel">' + (f"<h4>{escape(panel.title)}</h4>" if panel.title else "")
        + draw_panel(panel, picture, colours) + "</div>"
        for panel in picture.panels
    )  # fmt: skip
    shown = f'<ul class="legend">{legend}</ul>' if len(names) > 1 else ""
    return f'<p class="key"><span>up: {escape(picture.y_label)}</span></p>{shown}<div class="panels">{panels}</div>'


def _ramp(place: int, count: int) -> str:
    """Give the colour of one of many curves in order, from blue over red to yellow."""
    return f"hsl({(250 + 170 * place / max(count - 1, 1)) % 360:.0f} 62% var(--light))"
