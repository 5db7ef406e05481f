"""The page's style sheet and its script."""

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
