"""Sections on the parts of layers: what their widths lose, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import ceil, inf
from statistics import fmean, median
from typing import Any

from transformers import PreTrainedModel

from collab_compress import analysis
from collab_compress.analysis import Latency, PartCost
from collab_compress.analysis.plan import WIDTH_SHARES, part_losses
from collab_compress.attention import is_converted
from collab_compress.calibration import Batch
from collab_compress.calibration.batches import sequence_count
from collab_compress.conversion.compress import compress
from collab_compress.conversion.copies import sharing_copy
from collab_compress.conversion.cost import block_cost
from collab_compress.conversion.expand import expand
from collab_compress.conversion.inventory import Inventory
from collab_compress.errors import CollabCompressError, HeadError, UnsupportedModelError
from collab_compress.options import Compression, ReportOptions, Solver
from collab_compress.report.section import Curves, Label, Progress, Section, Table, short

PARTS = {"dk": "queries and keys", "dv": "values and outputs", "dff": "feed-forward blocks"}
POINTS = 128  # of a curve, at most
HALF = "at 0.5 of it [%]"
LENGTH = 128  # tokens for which operations are counted
DENSE, CONVERTED = f"dense at T = {LENGTH} [MMAC]", f"converted at T = {LENGTH} [MMAC]"


def widths(inventory: Inventory, batches: Sequence[Batch], label: Label, progress: Progress) -> Section:
    """Return what queries and keys, values, and feed-forward blocks lose at every width."""
    if sum(map(sequence_count, batches)) < 2:
        raise HeadError("what widths lose is measured on sequences that differ; pass two sequences at least")
    curves_of, reasons = part_losses(inventory, batches, lambda _, done, total: progress("widths")(done, total))
    left_out = [f"{part} stays as it is: {reason}" for part, reason in reasons.items()]
    tables: dict[str, Table] = {}
    pictures, highlights = [], []
    for part, losses in curves_of.items():
        rows: list[dict[str, Any]] = []
        curves = []
        for name, loss in losses.items():
            dense, percent = len(loss) - 1, (100 * loss).tolist()
            at_shares = {f"at {share:.3g} of it [%]": percent[ceil(share * dense)] for share in WIDTH_SHARES}
            rows.append({"layer": label(name), "module": name, "dense width": dense, **at_shares})
            drawn = range(0, dense + 1, -(-(dense + 1) // POINTS))
            curves.append((f"layer {label(name)}", [(width, percent[width]) for width in drawn]))
        if not rows:
            continue
        tables[part] = Table(f"Loss of {PARTS[part]}", rows)
        reading = f"{PARTS[part].capitalize()} of a layer whose curve falls late need more of their width."
        pictures.append(Curves(f"What {part} loses", reading, curves, part, "loss, % of the stream's variance"))
        mean, most = fmean(row[HALF] for row in rows), max(rows, key=lambda row: row[HALF])
        highlights.append(
            f"Half of {part} loses {short(mean)} % of the residual stream's variance in a layer on average, and "
            f"{short(most[HALF])} % in layer {most['layer']}."
        )
    if not tables:
        raise HeadError("; ".join(left_out))
    return Section(
        "What the widths of a layer lose",
        "Loss is the squared error that one part of one layer adds to the residual stream, as a share of the "
        f"stream's variance there, on {sum(map(sequence_count, batches)):,} sequences. All else is dense; a "
        "conversion loses less, because its layers are refitted." + "".join(f" {reason}." for reason in left_out),
        tables,
        pictures,
        highlights,
    )


def cost(inventory: Inventory, options: ReportOptions, label: Label, progress: Progress) -> Section:
    """Return what attention and feed-forward blocks cost, dense and converted."""
    model, sites, notes = inventory.model, inventory.attention, ""
    converted = any(is_converted(site.module) for site in sites)
    given = {} if converted else {part: getattr(options, part) for part in ("dk", "dv") if getattr(options, part)}
    if not converted and not given:
        part = "dv" if any(site.no_dk for site in sites) else "dk"
        given[part] = max(1, min(site.key_value_width for site in sites) // 3)
    dff = options.dff
    costs = analysis.part_costs(model, LENGTH, **given)
    try:
        blocks = inventory.blocks
        if dff is None and not converted:
            dff = max(1, min(block.width for block in blocks) // 2)
        costs += [block_cost(model, block, dff, LENGTH) for block in blocks]
    except UnsupportedModelError as error:
        notes += f" Feed-forward blocks were not counted: {error}."
    by_part = {part: [cost for cost in costs if cost.part == part] for part in PARTS}
    parts = [{"part": PARTS[part], **_sum_costs(of_part)} for part, of_part in by_part.items() if of_part]
    rows = [
        {"part": PARTS[part], "layer": label(one.name), "module": one.name, "width": one.width, **_sum_costs([one])}
        for part, of_part in by_part.items()
        for one in of_part
    ]
    tables = {
        "layers": Table("Where the parameters and operations of all layers are", parts),
        "modules": Table("Each attention module and feed-forward block", rows),
    }
    total = _sum_costs(costs)
    shares = ", ".join(f"{part['part']} {100 * part[DENSE] / total[DENSE]:.0f} %" for part in parts)
    highlights = [f"Operations of all dense layers at T = {LENGTH}: {shares}."]
    form = _describe_widths(given if dff is None else {**given, "dff": dff})
    if total[CONVERTED] != total[DENSE]:
        operations = total[CONVERTED] / total[DENSE]
        parameters = total["parameters, converted"] / total["parameters, dense"]
        highlights.append(
            f"Layers {form} have {100 * operations:.0f} % of the operations of dense layers, and "
            f"{100 * parameters:.0f} % of their parameters."
        )
    try:
        latencies = _measure_latencies(model, given, options, progress)
    except CollabCompressError as error:
        latencies, notes = [], f"{notes} Latency was not measured: {error}."
    if latencies:
        rows = [{"layer": label(latency.name), **asdict(latency)} for latency in latencies]
        tables["latency"] = Table("Latency of attention modules, batch of one", rows)
        longest = max(latency.length for latency in latencies)
        timed = [latency for latency in latencies if latency.length == longest]
        steady = [latency.ratio for latency in timed if latency.is_steady]
        if 2 * len(steady) > len(timed):
            time = f"takes {median(steady):.2f} of dense time at T = {longest}, measured here"
        else:
            time = f"was timed while other programs ran: rounds at T = {longest} differ too much to compare"
        highlights.append(f"Attention {_describe_widths(given)} {time}.")
    return Section(
        "What a layer costs",
        f"Dense layers, and layers {form}; other parts cost the same in both forms. "
        "Latencies are of whole attention modules on this machine, dense and converted in turns, "
        f"medians of {options.rounds} rounds of one thread (Collaborate, section 3.4 and Table 1).{notes}",
        tables,
        highlights=highlights,
    )


def _describe_widths(widths: Mapping[str, int]) -> str:
    return f"with {', '.join(f'{part} = {width}' for part, width in widths.items())}" if widths else "as converted"


def _sum_costs(costs: Sequence[PartCost]) -> dict[str, Any]:
    """Return the columns of a table of costs."""
    return {
        DENSE: sum(cost.macs_before for cost in costs) / 1e6,
        CONVERTED: sum(cost.macs_after for cost in costs) / 1e6,
        "parameters, dense": sum(cost.parameters_before for cost in costs),
        "parameters, converted": sum(cost.parameters_after for cost in costs),
        "cache, dense [B/token]": sum(cost.cache_before for cost in costs),
        "cache, converted [B/token]": sum(cost.cache_after for cost in costs),
    }


def _measure_latencies(
    model: PreTrainedModel, widths: Mapping[str, Any], options: ReportOptions, progress: Progress
) -> list[Latency]:
    """Time the model and a copy in the other form: a dense one is converted to the chosen widths, others expanded."""
    copied = sharing_copy(model)
    if widths:
        solver = Solver(sweeps=1 if "dk" in widths else None)
        compress(copied, Compression(**widths, solver=solver), calibration=None)
        dense, converted = model, copied
    else:
        expand(copied)
        dense, converted = copied, model
    longest = getattr(model.config, "max_position_embeddings", None) or inf
    lengths = [length for length in options.lengths if length <= longest]
    return analysis.module_latency(
        dense, converted, lengths, rounds=options.rounds, seed=options.seed, progress=progress("latency")
    )
