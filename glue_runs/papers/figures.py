"""Draw the papers' figures from records: `python glue_runs/papers/figures.py FOLDER [RECORDS ...]`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from collab_compress_glue_runs.experiments.results import Result
from matplotlib.figure import Figure
from quantities import read_records

LOGGED = {  # by the Trainer, against epochs
    "bhattacharyya": "Bhattacharyya 1, overlap of heads",
    "task_loss": "Bhattacharyya 2, cross-entropy",
    "eval_bleu": "Bhattacharyya 5, BLEU on the validation set",
}


def points(result: Result) -> Iterator[tuple[str, float, float]]:
    """Yield figure, x and y of the points that a record adds."""
    for line in result.history:
        yield from ((LOGGED[key], round(line["epoch"], 2), line[key]) for key in LOGGED.keys() & line.keys())
    for place, value in enumerate(result.measures.get("svcca", {}).get("curve", {}).get("cross", ())):
        yield "Diversity 4, canonical correlations of heads, in order", place, value
    for layer, distances in enumerate(result.measures.get("discrepancy", {}).get("encoder", ())):
        yield "Rotation 7, L2 distance of heads in layers", layer, distances["l2"]
    pruning = result.measures.get("pruning", {"shares": (), "scores": ()})
    for share, score in zip(pruning["shares"], pruning["scores"], strict=True):
        yield "DropHead 3, score against the share of pruned heads", share, score


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    folder.mkdir(parents=True)
    rows = [
        (*point, f"{result.column.name}, {result.variant.model}", result.variant.label)
        for result in read_records()
        for point in points(result)
    ]
    for (name, of), points_of in pd.DataFrame(rows).groupby([0, 3]):
        figure = Figure()
        means = points_of.pivot_table(2, 1, 4)  # over seeds, a line for each method
        means.plot(ax=figure.subplots(), title=f"{name}\n{of}", xlabel="").legend(title=None)
        figure.savefig(folder / f"{name}, {of.replace('/', ' ')}.svg")
