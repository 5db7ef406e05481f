"""Write the generated parts of RESULTS.md and its forest plots: `python glue_runs/papers/results_page.py`.

Parts stand between `<!-- KIND: ABOUT -->` and `<!-- end -->`: a table of `records`; `findings`, `forest` or `claims`.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import matplotlib
import pandas as pd
from collab_compress_glue_runs.commands.tables import Grid
from matplotlib.figure import Figure
from quantities import read_records, tabulate
from verdicts import FAILS, HOLDS, NO_RECORDS, verdicts_of

from collab_compress.report.section import short

PAGE = Path(__file__).parents[1] / "RESULTS.md"
PART = re.compile(r"<!-- (\w+): (.*?) -->\n.*?<!-- end -->", re.DOTALL)
STYLE = {"svg.hashsalt": "forest", "svg.fonttype": "none", "font.size": 8}
COLOURS = {HOLDS: "#1a7f37", FAILS: "#cf222e"}
FINDINGS = {"says": "claim", "where": "on", "change": "difference [95 % interval]", "verdict": "verdict"}
CLAIMS = {"says": "claim", "source": "source", "compared": "compared", "model": "model", "seeds": "seeds", "p": "p"}
CLAIMS |= {"verdict": "verdict", "revisions": "revisions that are paired"}


def scores(about: str, records: pd.DataFrame) -> str:
    """Return a table of mean ± deviation over seeds, of the model and tasks that JSON names."""
    chosen = json.loads(about)
    of_model = records[(records["model"] == chosen["model"]) & records["task"].isin(chosen["tasks"])]
    wide = of_model.pivot_table("score", ["label", "seed"], "task")[chosen["tasks"]]
    if len(chosen["tasks"]) > 1:
        wide["average"] = wide.mean(axis=1, skipna=False)
    of_seeds = wide.groupby("label")
    cells = of_seeds.mean().map("{:.2f} ± ".format) + of_seeds.std().map("{:.2f}".format)
    cells["seeds"] = of_seeds.size().astype(str)
    return Grid(["method", *cells.columns], cells.reset_index().to_numpy(), text_columns=1).markdown()


def verdict_table(table: pd.DataFrame, columns: Mapping[str, str]) -> str:
    """Return columns of verdicts, by name and heading."""
    cells = table[list(columns)].map(lambda cell: short(cell) if isinstance(cell, float) else str(cell))
    return Grid(list(columns.values()), cells.to_numpy(), text_columns=len(columns)).markdown()


def forest(table: pd.DataFrame) -> Figure:
    """Return a plot of differences, intervals and bounds, a panel for each unit; to the right is what is claimed."""
    panels = list(table[table["seeds"] > 0].groupby("unit", sort=False))
    sizes = [len(rows) + 1 for _, rows in panels]
    figure = Figure(figsize=(9, 0.5 + 0.24 * sum(sizes) + 0.4 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=sizes)[:, 0]
    for axis, (unit, rows) in zip(axes, panels, strict=True):
        for place, row in enumerate(rows.itertuples()):
            mean, error = row.sign * row.difference, (row.high - row.low) / 2
            axis.errorbar(mean, place, xerr=error, fmt="o", markersize=4, color=COLOURS.get(row.verdict, "#8c959f"))
            axis.plot([row.lower, row.upper], [place] * 2, "|", color="black", markersize=9)
        places, labels = range(len(rows)), [f"{row.compared} ({row.where})" for row in rows.itertuples()]
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set(yticks=places, yticklabels=labels, ylim=(len(rows) - 0.5, -0.5), xlabel=unit or "no unit")
        axis.secondary_yaxis("right").set(yticks=places, yticklabels=rows["verdict"])
    return figure


def generate(text: str, records: pd.DataFrame) -> tuple[str, dict[Path, Figure]]:
    """Return the page with its generated parts made from records, and its plots by path."""
    verdicts = verdicts_of(records)
    plots = {PAGE.parent / f"images/forest-{paper}.svg": forest(table) for paper, table in verdicts.items()}

    def part(match: re.Match[str]) -> str:
        kind, about = match.groups()
        if kind == "records":
            body = scores(about, records)
        elif kind == "forest":
            body = f"![Differences and 95 % intervals](images/forest-{about}.svg)"
        elif kind == "findings":
            body = verdict_table(verdicts[about][verdicts[about]["verdict"] != NO_RECORDS], FINDINGS)
        else:
            body = verdict_table(verdicts[about], CLAIMS)
        return f"<!-- {kind}: {about} -->\n\n{body}\n\n<!-- end -->"

    return PART.sub(part, text), plots


if __name__ == "__main__":
    matplotlib.rcParams.update(STYLE)
    text, plots = generate(PAGE.read_text(encoding="utf-8"), tabulate(read_records()))
    PAGE.write_text(text, encoding="utf-8")
    for path, plot in plots.items():
        plot.savefig(path, metadata={"Date": None, "Creator": None})
