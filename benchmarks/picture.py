"""Draw the README's picture, quality over time, from the records: `python benchmarks/picture.py`.

Each point is a model with about half of its operations: Spearman correlation on STS-B over the time of eight
sequences of 128 tokens on one thread, as a share of the time of the dense model. A rival makes models of the same
shape as ours, which take the same time.
"""

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
PICTURE = ROOT / "docs" / "images" / "quality.svg"
# Title, name of the model in records of quality and of speed, and row of quality → row of speed of that shape.
PANELS = (
    (
        "all-MiniLM-L6-v2",
        "sts-b embeddings",
        None,
        {
            "shared keep=0.5": "shared dff=768",  # the operations are the same
            "shared dff=768": "shared dff=768",
            "shared dff=384": "shared dff=384",
            "shared dk=192 head_dim=16 dv=192 dff=768": "shared dk=192 head_dim=16 dv=192 dff=768",
            "shared layers=5 dff=544": "shared layers=5 dff=544",
            **{f"{rival} dff=768": "shared dff=768" for rival in ("k-prune", "kwon", "flap", "magnitude", "random")},
        },
    ),
    (
        "all-mpnet-base-v2",
        "sts-b embeddings of mpnet",
        "mpnet",
        {
            "shared keep=0.5": "shared dk=228 dv=648 dff=1408",
            "shared dff=1024": "shared dff=1024",
            "shared dff=1536": "shared dff=1536",
            "shared dk=204 dv=636": "shared dk=204 dv=636",
            "shared dk=384 head_dim=64": "shared dk=384",
            **{f"{rival} dff=1536": "shared dff=1536" for rival in ("kwon", "flap", "grail", "wanda", "magnitude")},
        },
    ),
)
NO_DATA = ("none", "default")  # calibrations without texts of the task


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (RECORDS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def draw(axes: Axes, title: str, task: str, model: str | None, rows: dict[str, str]) -> None:
    """Draw the points of one model: ours with and without texts of the task, and rivals."""
    scores, times = read("quality"), read("speed")
    dense = mean(one["score"] for one in scores if (one["task"], one["row"]) == (task, "dense"))
    axes.axhline(dense, color="grey", linewidth=0.8)
    axes.annotate("dense", (1.0, dense), xytext=(0, 3), textcoords="offset points", ha="right", color="grey")
    kinds = {"ours, on texts of the task": ("C0", "o"), "ours, without": ("C0", "s"), "others": ("C1", "x")}
    points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for row, shape in rows.items():
        ratios = [
            one["ratio"]
            for one in times
            if (one.get("model"), one["row"], one.get("T"), one.get("batch")) == (model, shape, 128, 8)
        ]
        found: dict[str, list[float]] = defaultdict(list)
        for one in scores:
            if (one["task"], one["row"]) == (task, row) and one["calibration"] not in ("synthetic", "mixed"):
                found[str(one["calibration"])].append(one["score"])
        for calibration in sorted(found) if ratios else ():
            ours = "ours, without" if calibration in NO_DATA else "ours, on texts of the task"
            points[ours if row.startswith("shared") else "others"].append((median(ratios), mean(found[calibration])))
            if not row.startswith("shared"):
                name = row.partition(" ")[0]
                axes.annotate(name, points["others"][-1], xytext=(5, -3), textcoords="offset points", fontsize=7)
    for kind, (color, marker) in kinds.items():
        if points[kind]:
            filled = {} if marker != "s" else {"facecolors": "none", "edgecolors": color}
            axes.scatter(*zip(*points[kind], strict=True), marker=marker, label=kind, **(filled or {"color": color}))
    axes.set_title(title)
    axes.set_xlabel("time, as a share of the dense model's")
    axes.set_xlim(0.45, 1.02)


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "quality", "font.size": 9, "svg.fonttype": "none"})
    figure, both = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axes, panel in zip(both, PANELS, strict=True):
        draw(axes, *panel)
    both[0].set_ylabel("STS-B")
    figure.legend(*both[1].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
