"""The page's style sheet and its script."""

from html import escape
from string import Template

from collab_compress.report.findings import Findings
from collab_compress.report.section import Cell, Column, Curves, Heatmaps, Picture, Section, Table, written
from collab_compress.report.svg import draw_heatmap, draw_panel

STYLE = """
:root{--paper:#fcfcfa;--panel:#fff;--ink:#1c1f24;--soft:#5b626c;--line:#dfe2e6;--faint:#9aa3ae;--plus:#1f5fae;
--minus:#c2571a;--c0:#1f5fae;--c1:#c2571a;--c2:#2b8a5b;--c3:#8a4fb3;--light:45%}
@media (prefers-color-scheme:dark){:root{--paper:#14171b;--panel:#1b1f24;--ink:#e8eaed;--soft:#a3abb5;--line:#333a42;
--faint:#69727d;--plus:#6fb1ff;--minus:#ff9a5c;--c0:#6fb1ff;--c1:#ff9a5c;--c2:#5fd097;--c3:#c795ee;--light:66%}}
*{box-sizing:border-box}
html{scroll-behavior:smooth;scroll-padding-top:3.2rem}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif}
header,main{max-width:76rem;margin:0 auto;padding:1.2rem 1.2rem .2rem}
h1{font-size:1.7rem;line-height:1.2;margin:.4rem 0 1rem;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:0 0 .4rem}
h4{font-size:.8rem;font-weight:600;margin:0 0 .25rem;color:var(--soft)}
section{margin:0 0 2.6rem;padding-top:.4rem}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(15rem,1fr));gap:.5rem 1.4rem;margin:0;
font-size:.86rem}
.facts dt{color:var(--soft);font-size:.75rem}
.facts dd{margin:0;overflow-wrap:anywhere}
nav{position:sticky;top:0;z-index:2;display:flex;gap:.2rem 1.1rem;overflow-x:auto;white-space:nowrap;
padding:.55rem 1.2rem;background:var(--paper);border-bottom:1px solid var(--line);font-size:.85rem;margin-top:.8rem}
@media (min-width:78rem){nav{padding-left:calc(50vw - 36.8rem)}}
a{color:var(--plus);text-decoration:none}
a:hover,a:focus-visible{text-decoration:underline}
.reading{max-width:48rem;margin:.2rem 0}
.source{color:var(--soft);font-size:.8rem}
p.source{margin:.1rem 0 .9rem}
figcaption .source::before{content:"("}
figcaption .source::after{content:")"}
.highlights{display:grid;grid-template-columns:repeat(auto-fit,minmax(19rem,1fr));gap:.7rem;padding:0;margin:.6rem 0;
list-style:none}
.highlights li{background:var(--panel);border:1px solid var(--line);border-left:3px solid var(--plus);
border-radius:4px;padding:.6rem .8rem}
.tables{display:flex;flex-wrap:wrap;gap:1.1rem;margin:1.1rem 0}
.tables>figure{flex:1 1 auto;min-width:0;margin:0;max-width:100%}
.pictures{display:flex;flex-wrap:wrap;gap:1.1rem;margin:1.1rem 0}
.pictures>figure{flex:1 1 100%;min-width:0;margin:0}
.pictures>figure.narrow{flex:1 1 21rem}
figure{margin:1.1rem 0;padding:.8rem 1rem;background:var(--panel);border:1px solid var(--line);border-radius:6px}
figcaption{font-size:.9rem;margin-bottom:.5rem}
.table figcaption{font-weight:600}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.84rem;font-variant-numeric:tabular-nums}
th,td{padding:.22rem .5rem;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}
th{vertical-align:bottom;white-space:normal;min-width:4.2rem}
.number{text-align:right}
th button{all:unset;cursor:pointer;font-weight:600;line-height:1.25}
th button:focus-visible{outline:2px solid var(--plus)}
th[aria-sort=ascending] button::after{content:" \\25B2";font-size:.7em}
th[aria-sort=descending] button::after{content:" \\25BC";font-size:.7em}
.unit{color:var(--soft);font-weight:400}
.unit::before{content:"["}
.unit::after{content:"]"}
tbody tr:hover{background:color-mix(in srgb,var(--plus) 8%,transparent)}
.key{display:flex;flex-wrap:wrap;gap:.2rem 1.4rem;color:var(--soft);font-size:.78rem;margin:.2rem 0 .6rem}
.scale{display:inline-flex;align-items:center;gap:.4rem}
.scale i{width:7rem;height:.65rem;border:1px solid var(--line);
background:linear-gradient(90deg,transparent,var(--plus))}
.scale.diverging i{background:linear-gradient(90deg,var(--minus),transparent,var(--plus))}
.maps{display:flex;flex-wrap:wrap;gap:.9rem 1.3rem;align-items:flex-start}
.maps.many{gap:.5rem .6rem}
.map{overflow-x:auto;max-width:100%}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(20rem,100%),1fr));gap:.8rem 1rem}
svg{display:block}
svg.panel{width:100%;max-width:24rem;height:auto}
svg text{font:10px system-ui,"DejaVu Sans",sans-serif;fill:var(--soft)}
svg text.name{font-size:11px}
svg .frame{fill:none;stroke:var(--line)}
svg .grid{stroke:var(--line);stroke-width:.7}
svg .axis{stroke:var(--faint)}
svg g path{vector-effect:non-scaling-stroke}
.plus{fill:var(--plus)}.minus{fill:var(--minus)}
.line path,.bold path,.faint path,.dashed path{fill:none;stroke:var(--c);stroke-width:1.5;stroke-linejoin:round}
.bold path{stroke-width:2.8}
.faint path{stroke-width:.6;opacity:.55}
.dashed path{stroke-dasharray:4 3}
.line circle,.bold circle,.dashed circle{fill:var(--c)}
.legend{display:flex;flex-wrap:wrap;gap:.1rem 1rem;list-style:none;padding:0;margin:0 0 .5rem;font-size:.8rem}
.legend li::before{content:"";display:inline-block;width:1.1rem;height:3px;background:var(--c);vertical-align:middle;
margin-right:.35rem}
@media print{nav{display:none}figure{break-inside:avoid}}
"""

SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, row = head.parentElement, body = row.closest("table").tBodies[0];
  const column = [...row.children].indexOf(head), up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of row.children) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = line => line.children[column].dataset.value;
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const [x, y] = [Number(a), Number(b)];
    const order = Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, undefined, {numeric: true}) : x - y;
    return up ? order : -order;
  };
  body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
});
"""


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
