"""Section on what the widths of a layer lose: of queries and keys, values and outputs, feed-forward blocks."""

from __future__ import annotations

import math
from statistics import fmean

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
    tables, pictures, highlights = [], [], []
    for part, curves in losses.items():
        records, lines, lost = [], [], {}
        for name, lost_at in curves.items():
            dense, label = len(lost_at) - 1, context.label(name)
            record: dict[str, Cell] = {"layer": label, "module": name, "dense width": dense}
            for share in SHARES:
                record[f"at {share:.3g} of it [%]"] = 100 * float(lost_at[math.ceil(share * dense)])
            records.append(record)
            drawn = range(0, len(lost_at), -(-len(lost_at) // POINTS))
            lines.append(Curve(f"layer {label}", drawn, (100 * lost_at[drawn]).tolist()))
            lost[label] = 100 * float(lost_at[math.ceil(dense / 2)])
        tables.append(Table(part, f"Loss of {PARTS[part]}", records))
        pictures.append(
            Curves(
                f"What {part} loses",
                f"{PARTS[part].capitalize()} of a layer whose curve falls late need more of their width.",
                "this package (docs/analysis.md)",
                panels=[Panel("", lines)],
                x_label=part,
                y_label="loss, % of the stream's variance",
                bottom=0.0,
            )
        )
        most = max(lost, key=lambda label: lost[label])
        highlights.append(
            f"Half of {part} loses {short(fmean(lost.values()))} % of the residual stream's variance in a layer on "
            f"average, and {short(lost[most])} % in layer {most} ({context.data})."
        )
    return Section(
        "widths",
        "What the widths of a layer lose",
        "Loss is the squared error that one part of one layer adds to the residual stream, as a share of the "
        f"stream's variance there, on {min(sequences, context.sequences):,} sequences. All else is dense; a "
        "conversion loses less, because its layers are refitted." + "".join(f" {reason}." for reason in left_out),
        "this package (docs/analysis.md)",
        tables,
        pictures,
        highlights,
    )
