"""Draw the README's picture, quality over time, from the records: `python benchmarks/picture.py`.

Each point is a converted model: Spearman correlation on STS-B, mean over calibration seeds, over the time of eight
sequences of 128 tokens on one thread, as a share of the time of the dense model. A rival makes models of the same
shape as ours, which take the same time.
"""

from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from timing import read_records

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
PICTURE = ROOT / "docs" / "images" / "quality.svg"
KINDS = {  # calibration data of a point → colour, marker, whether it is filled, side of its label
    "ours, on texts of the task": ("C0", "o", True, "right"),
    "ours, without such texts": ("C0", "s", False, "right"),
    "other methods, on texts of the task": ("C1", "x", True, "left"),
}
TASK, OWN, OTHERS = KINDS


class Point(NamedTuple):
    """A model of the picture: the records of its quality, and the row whose time is that of its shape."""

    kind: str
    row: str
    calibration: str
    shape: str
    label: str
    height: int = -3  # of the label beside its point, in points


def rivals(width: str, names: dict[str, str]) -> list[Point]:
    return [Point(OTHERS, f"{name} {width}", "text", f"shared {width}", label) for name, label in names.items()]


MINILM = [
    Point(TASK, "shared dff=768", "text", "shared dff=768", "--dff 768"),
    Point(TASK, "shared dff=384", "text", "shared dff=384", "--dff 384"),
    Point(TASK, "shared layers=5 dff=544", "text", "shared layers=5 dff=544", "5 layers, dff=544"),
    Point(OWN, "shared keep=0.5", "default", "shared dk=144 dv=312 dff=672", "default", -17),
    Point(OWN, "shared dff=384", "default", "shared dff=384", "--dff 384", -9),
    Point(OWN, "shared layers=5 dff=544", "default", "shared layers=5 dff=544", "5 layers, dff=544", 0),
    *rivals(
        "dff=768",
        {"k-prune": "K-prune", "kwon": "Kwon (labels)", "flap": "FLAP", "magnitude": "magnitude", "random": "random"},
    ),
]
MPNET = [
    Point(TASK, "shared keep=0.5", "text", "shared dk=228 dv=648 dff=1408", "default", 0),
    Point(TASK, "shared dff=1024", "text", "shared dff=1024", "--dff 1024", -18),
    Point(TASK, "shared dff=1536", "text", "shared dff=1536", "--dff 1536"),
    Point(OWN, "shared keep=0.5", "default", "shared dk=228 dv=648 dff=1408", "default", -5),
    Point(OWN, "shared dff=1024", "default", "shared dff=1024", "--dff 1024"),
    Point(OWN, "shared dk=204 dv=636", "default", "shared dk=204 dv=636", "--dk 204 --dv 636"),
    Point(OWN, "shared dk=384 head_dim=64", "none", "shared dk=384", "--dk 384", 0),
    *rivals(
        "dff=1536",
        {"kwon": "Kwon (labels)", "flap": "FLAP", "grail": "GRAIL, Wanda", "wanda": "", "magnitude": "magnitude"},
    ),
]
PANELS = (  # title, task of the records of quality, model of the records of speed, points
    ("all-MiniLM-L6-v2", "sts-b embeddings", None, MINILM),
    ("all-mpnet-base-v2", "sts-b embeddings of mpnet", "mpnet", MPNET),
)


def quality(task: str, row: str, calibration: str | None) -> float:
    wanted = {"task": task, "row": row, "calibration": calibration}
    records = read_records(RECORDS / "quality.jsonl")
    return mean(record["score"] for record in records if wanted.items() <= record.items())


def time(model: str | None, row: str) -> float:
    wanted = {"row": row, "T": 128, "batch": 8, "threads": 1}
    records = [record for record in read_records(RECORDS / "speed.jsonl") if record.get("model") == model]
    return median(record["ratio"] for record in records if wanted.items() <= record.items())


def draw(axes: Axes, title: str, task: str, model: str | None, points: list[Point]) -> None:
    dense = quality(task, "dense", None)
    axes.axhline(dense, color="grey", linewidth=0.8)
    axes.annotate("dense", (0.365, dense), xytext=(0, 3), textcoords="offset points", color="grey", fontsize=8)
    for kind, (color, marker, filled, anchor) in KINDS.items():
        found = [point for point in points if point.kind == kind]
        places = [(time(model, point.shape), quality(task, point.row, point.calibration)) for point in found]
        fill = {} if filled else {"facecolors": "none"}
        axes.scatter(*zip(*places, strict=True), s=30, marker=marker, color=color, label=kind, **fill)
        for point, place in zip(found, places, strict=True):
            offset = (-6 if anchor == "right" else 6, point.height)
            axes.annotate(point.label, place, xytext=offset, textcoords="offset points", fontsize=7, ha=anchor)
    axes.set_title(title)
    axes.set_xlabel("time on one thread, as a share of the dense model's")
    axes.set_xlim(0.36, 1.02)


def main(path: Path = PICTURE) -> None:
    # Text stays text, and ids do not depend on the run, so that the file follows from the records.
    with matplotlib.rc_context({"svg.hashsalt": "quality", "font.size": 9, "svg.fonttype": "none"}):
        figure, both = pyplot.subplots(1, 2, figsize=(9, 3.6))
        figure.subplots_adjust(left=0.065, right=0.99, top=0.92, bottom=0.23, wspace=0.12)
        for axes, panel in zip(both, PANELS, strict=True):
            draw(axes, *panel)
        both[0].set_ylabel("STS-B")
        figure.legend(*both[1].get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=8)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    main()
