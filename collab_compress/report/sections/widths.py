"""Section on what the widths of a layer lose: of queries and keys, values and outputs, feed-forward blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from collab_compress.analysis.plan import SHARES, part_losses
from collab_compress.errors import CompressionError, HeadError
from collab_compress.report.context import ReportContext
from collab_compress.report.section import Cell, Curve, Curves, Panel, Section, Table, short

PARTS = {"dk": "queries and keys", "dv": "values and outputs", "dff": "feed-forward blocks"}
POINTS = 128  # of a curve, at most


def widths(context: ReportContext) -> Section:
    """Return what queries and keys, values, and feed-forward blocks lose at every width."""
    report, sequences = context.on_progress, context.options.input_sequences
    try:
        parts = part_losses(
            context.model,
            context.first(sequences),
            None if report is None else lambda _, done, total: report("widths", done, total),
        )
    except CompressionError as error:  # as for a single token, whose covariance is 0
        raise HeadError(f"these inputs allow no weighing: {error}") from error
    losses = {part: curves for part, curves in parts.losses.items() if curves}
    left_out = [f"{part} stays as it is: {reason}" for part, reason in parts.left_out.items()]
    if not losses:
        raise HeadError("; ".join(left_out))
    return Section(
        "widths",
        "What the widths of a layer lose",
        "Loss is the squared error that one part of one layer adds to the residual stream, as a share of the "
        f"stream's variance there, on {min(sequences, context.sequences):,} sequences. All else is dense; a "
        "conversion loses less, because its layers are refitted." + "".join(f" {reason}." for reason in left_out),
        "this package (docs/analysis.md)",
        tables=[_table(context, part, curves) for part, curves in losses.items()],
        pictures=[_picture(context, part, curves) for part, curves in losses.items()],
        highlights=[_highlight(context, part, curves) for part, curves in losses.items()],
    )


def _width(losses: Tensor, share: float) -> int:
    return math.ceil(share * (len(losses) - 1))


def _table(context: ReportContext, part: str, curves: Mapping[str, Tensor]) -> Table:
    records = []
    for name, losses in curves.items():
        record: dict[str, Cell] = {"layer": context.label(name), "module": name, "dense width": len(losses) - 1}
        shares: dict[str, Cell] = {
            f"at {share:.3g} of it [%]": 100 * float(losses[_width(losses, share)]) for share in SHARES
        }
        records.append(record | shares)
    return Table.of(part, f"Loss of {PARTS[part]}", records)


def _picture(context: ReportContext, part: str, curves: Mapping[str, Tensor]) -> Curves:
    lines = []
    for name, losses in curves.items():
        places = range(0, len(losses), -(-len(losses) // POINTS))
        lines.append(Curve(f"layer {context.label(name)}", places, (100 * losses[places]).tolist()))
    return Curves(
        f"What {part} loses",
        f"{PARTS[part].capitalize()} of a layer whose curve falls late need more of their width.",
        "this package (docs/analysis.md)",
        panels=[Panel("", lines)],
        x_label=part,
        y_label="loss, % of the stream's variance",
        bottom=0.0,
    )


def _highlight(context: ReportContext, part: str, curves: Mapping[str, Tensor]) -> str:
    lost = {name: 100 * float(losses[_width(losses, 1 / 2)]) for name, losses in curves.items()}
    most = max(lost, key=lambda name: lost[name])
    return (
        f"Half of {part} loses {short(sum(lost.values()) / len(lost))} % of the residual stream's variance in a "
        f"layer on average, and {short(lost[most])} % in layer {context.label(most)} ({context.data})."
    )
