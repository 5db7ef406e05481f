"""How many dimensions queries and keys need: Figure 1 of Collaborate, and the dk that it suggests."""

from collections.abc import Sequence

import torch
from torch import Tensor

from collab_compress.analysis import Energy, head_energy
from collab_compress.analysis.energy import SHARES, Joined
from collab_compress.errors import HeadError
from collab_compress.report.section import Cell, Column, Curve, Curves, Omitted, Panel, Section, Table
from collab_compress.report.study import Study

HEADS = 72  # that are drawn at most
WEIGHED = {"weights": "bare weights", "inputs": "weighed by inputs"}
CURVES: dict[Joined, str] = {"product": "sum of heads", "shared": "at least", "unshared": "at most"}


def energy(study: Study) -> Section | Omitted:
    """Show the energy of queries, keys and their products, and suggest a dk."""
    found, unweighed = {"weights": head_energy(study.model)}, ""
    batches = study.some(study.look.input_sequences)
    try:
        found["inputs"] = head_energy(study.model, batches, progress=study.progress("energy"))
    except HeadError as error:  # as for a single token, whose covariance is 0
        unweighed = f" These inputs allow no weighing: {error}."
    labels = study.labels(found["weights"])
    by_weighing = {weighing: list(energies.values()) for weighing, energies in found.items()}
    weighing, last = list(by_weighing.items())[-1]
    least, most = (
        [max(each.rank(share, curve) for each in last) for share in SHARES] for curve in ("shared", "unshared")
    )
    return Section(
        "energy",
        "How many dimensions queries and keys need",
        "Energy is the share of squared singular values that the first components hold. Weighed by inputs (of "
        f"{min(study.look.input_sequences, study.sequences):,} sequences), it is that of what the weights make of "
        "their real inputs, as a conversion weighs it; most directions of the weights never meet an input. The sum "
        "of all heads (W_Q W_Kᵀ) needs few components, but that says little of each head. No conversion captures the "
        "share below the dk named “at least”; the dk named “at most” captures it even before heads share anything."
        + unweighed,
        "Collaborate, Fig. 1",
        tables=(_suggestions(by_weighing, labels),),
        pictures=(_heads(by_weighing), _joined(by_weighing, labels), _bounds(last, labels, weighing)),
        highlights=(
            "dk for 90, 95, 99 % of the energy of scores in every layer: at least "
            f"{', '.join(map(str, least))}, at most {', '.join(map(str, most))} ({WEIGHED[weighing]}).",
        ),
    )


def _suggestions(found: dict[str, list[Energy]], labels: Sequence[str]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for weighing, energies in found.items():
        for label, each in zip(labels, energies, strict=True):
            rows.append(
                (label, WEIGHED[weighing], *(rank for curve in CURVES for rank in each.ranks(curve).values()))
            )
    columns = [Column(f"{name}, {100 * share:.0f} %", "dk") for name in CURVES.values() for share in SHARES]
    return Table(
        "dk", "Suggested --dk for 90, 95 and 99 % of the energy", (Column("layer"), Column("energy"), *columns),
        tuple(rows),
    )  # fmt: skip


def _heads(found: dict[str, list[Energy]]) -> Curves:
    panels = []
    for weighing, energies in found.items():
        for name, title in (("query", "Q"), ("key", "K"), ("product", "QKᵀ")):
            curves = [head for each in energies for head in getattr(each, name)]
            drawn = curves[:: -(-len(curves) // HEADS)]
            panels.append(
                Panel(
                    f"{title}, {WEIGHED[weighing]}",
                    (*(_curve("", head, "faint") for head in drawn), _curve("mean of heads", _mean(curves), "bold")),
                )
            )
    return Curves(
        "Energy of each head",
        "A curve that rises late is a head that is not low-rank by itself.",
        "Collaborate, Fig. 1, left",
        tuple(panels), "components of the head", "share of energy", 0.0, 1.0,
    )  # fmt: skip


def _joined(found: dict[str, list[Energy]], labels: Sequence[str]) -> Curves:
    panels = []
    for weighing, energies in found.items():
        for name, title in (("joined_query", "Q"), ("joined_key", "K"), ("joined_product", "QKᵀ")):
            curves = [getattr(each, name) for each in energies]
            lines = [_curve(f"layer {label}", curve) for label, curve in zip(labels, curves, strict=True)]
            panels.append(Panel(f"{title}, {WEIGHED[weighing]}", (*lines, _curve("mean", _mean(curves), "bold"))))
    return Curves(
        "Energy of all heads side by side",
        "Where QKᵀ rises sooner than Q and K, heads together use fewer directions than they have.",
        "Collaborate, Fig. 1, right",
        tuple(panels), "components of all heads", "share of energy", 0.0, 1.0,
    )  # fmt: skip


def _bounds(energies: Sequence[Energy], labels: Sequence[str], weighing: str) -> Curves:
    panels = []
    for name, title in (("shared", "most that dk can capture"), ("unshared", "what dk captures at least")):
        lines = [_curve(f"layer {label}", getattr(each, name)) for label, each in zip(labels, energies, strict=True)]
        panels.append(Panel(title, tuple(lines)))
    return Curves(
        "What a shared dk captures",
        "A conversion at dk lies between the two; its relative error is the root of what is missing.",
        "bounds of this toolkit, docs/analysis.md",
        tuple(panels), "dk", f"share of energy, {WEIGHED[weighing]}", 0.0, 1.0,
    )  # fmt: skip


def _curve(name: str, shares: Tensor, weight: str = "line") -> Curve:
    return Curve(name, tuple(range(len(shares))), shares.tolist(), weight)  # type: ignore[arg-type]


def _mean(curves: Sequence[Tensor]) -> Tensor:
    """Average cumulative shares of different lengths; where one has ended, it holds everything."""
    longest = max(map(len, curves))
    return torch.stack([torch.cat([each, each.new_ones(longest - len(each))]) for each in curves]).mean(0)
