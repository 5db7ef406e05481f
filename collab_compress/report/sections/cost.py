"""Section on the cost of layers: parameters, operations, measured latency."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy

from collab_compress import analysis
from collab_compress.analysis import Latency, MapCost
from collab_compress.calibration import evaluation_mode, run_batch
from collab_compress.conversion.compress import compress
from collab_compress.conversion.expand import expand
from collab_compress.conversion.report import width_range
from collab_compress.errors import CollabCompressError, UnsupportedModelError
from collab_compress.heads import Tap
from collab_compress.options import Compression, Solver
from collab_compress.report.context import ReportContext
from collab_compress.report.section import Cell, Curve, Curves, Panel, Section, Table
from collab_compress.report.sections.widths import PARTS

LENGTH = 128  # tokens for which operations are counted in tables
COUNTED = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # and in curves
TABLES = {
    "dk": ("modules", "Queries and keys of each attention module"),
    "dv": ("values", "Values and outputs of each attention module"),
    "dff": ("blocks", "Feed-forward blocks"),
}
"""Part → name and title of its table."""

CACHES = {"dk": "key", "dv": "value"}
Costs = Mapping[str, Mapping[str, MapCost]]
"""Part, as in `PARTS` → path of the attention module or block → its cost."""


def cost(context: ReportContext) -> Section:
    """Return what attention and feed-forward blocks cost in both forms."""
    options, note = context.options, ""
    widths: dict[str, int] = {}  # at which dense parts are counted
    if not context.converted:
        widths = {name: width for name, width in (("dk", options.dk), ("dv", options.dv)) if width is not None}
        if not widths:
            keeps_scores = any(site.family.keeps_scores for site in context.sites)
            widths["dv" if keeps_scores else "dk"] = max(1, min(site.key_value_width for site in context.sites) // 3)
    of_attention = " and ".join(f"{name} = {width}" for name, width in widths.items())
    subject = f"dense modules, modules with {of_attention}" if of_attention else "converted modules as they are"
    latencies: list[Latency] = []
    try:
        latencies = _latencies(context, widths)
    except CollabCompressError as error:
        note = f" Latency was not measured: {error}."
    with_blocks = True
    try:
        dff = max(1, min(block.width for block in context.blocks) // 2)
        if options.dff is not None or not context.converted:
            widths["dff"] = options.dff or dff
            subject += f", and feed-forward blocks with dff = {widths['dff']}"
    except UnsupportedModelError as error:
        note, with_blocks = f" Feed-forward blocks were not counted: {error}." + note, False
    costs = {length: _costs(context, widths, length, with_blocks) for length in COUNTED}
    tables, pictures = [_parts_table(costs[LENGTH]), *_module_tables(context, costs[LENGTH])], [_operations(costs)]
    highlights = _highlights(costs[LENGTH])
    if latencies:
        table, picture, highlight = _latency(context, latencies)
        tables.append(table)
        pictures.append(picture)
        highlights.append(highlight)
    return Section(
        "cost",
        "What a layer costs",
        f"For {subject}; a part that is not converted costs the same in both forms. Latencies are of whole "
        f"attention modules on this machine, dense and converted in turns, medians of {options.rounds} rounds."
        + note,
        "Collaborate, section 3.4",
        tables,
        pictures,
        highlights,
    )


def _costs(context: ReportContext, widths: Mapping[str, int], length: int, with_blocks: bool) -> Costs:
    modules = analysis.module_costs(context.model, length, dk=widths.get("dk"), dv=widths.get("dv"))
    costs = {
        "dk": {module.name: module.scores for module in modules},
        "dv": {module.name: module.values for module in modules},
    }
    if with_blocks:
        costs["dff"] = analysis.feed_forward_costs(context.model, context.blocks, length, dff=widths.get("dff"))
    return costs


def _mega_macs(costs: Collection[MapCost]) -> tuple[float, float]:
    """Return the millions of multiply-accumulates of all modules, dense and converted."""
    return sum(cost.dense.macs for cost in costs) / 1e6, sum(cost.converted.macs for cost in costs) / 1e6


def _parts_table(parts: Costs) -> Table:
    """Return where the parameters and the operations of all layers are."""
    total = sum(_mega_macs(costs.values())[0] for costs in parts.values())
    records: list[dict[str, Cell]] = []
    for part, costs in parts.items():
        dense, converted = _mega_macs(costs.values())
        records.append(
            {
                "part": PARTS[part],
                "parameters, dense": sum(cost.dense.parameters for cost in costs.values()),
                "parameters, converted": sum(cost.converted.parameters for cost in costs.values()),
                f"dense at T = {LENGTH} [MMAC]": dense,
                "share of dense [%]": 100 * dense / total,
                f"converted at T = {LENGTH} [MMAC]": converted,
            }
        )
    return Table("layers", "Where the parameters and operations of all layers are", records)


def _module_tables(context: ReportContext, parts: Costs) -> list[Table]:
    """Return the costs of each module, of the parts of which any is converted, and of each block."""
    tables = []
    for part, costs in parts.items():
        if part != "dff" and not any(cost.width for cost in costs.values()):
            continue
        records: list[dict[str, Cell]] = []
        for name, cost in costs.items():
            record: dict[str, Cell] = {
                "layer": context.label(name),
                "block" if part == "dff" else "module": name,
                part: cost.width,
                "parameters, dense": cost.dense.parameters,
                "parameters, converted": cost.converted.parameters,
                f"dense at T = {LENGTH} [MMAC]": cost.dense.macs / 1e6,
                f"converted at T = {LENGTH} [MMAC]": cost.converted.macs / 1e6,
            }
            if part in CACHES:
                record[f"{CACHES[part]} cache, dense [B/token]"] = cost.dense.cache_bytes
                record[f"{CACHES[part]} cache, converted [B/token]"] = cost.converted.cache_bytes
            records.append(record)
        tables.append(Table(*TABLES[part], records))
    return tables


def _operations(costs: Mapping[int, Costs]) -> Curves:
    panels = []
    for part, counted in costs[LENGTH].items():
        if part != "dv" or any(cost.width for cost in counted.values()):
            macs = {length: _mega_macs(parts[part].values()) for length, parts in costs.items()}
            panels.append(_two_curves(PARTS[part], macs))
    return Curves(
        "Operations over length",
        "On long inputs most operations are those of the scores, whose number falls with the width of heads alone.",
        "Collaborate, section 3.4",
        panels,
        x_label="T, tokens",
        y_label="million multiply-accumulates a sequence",
        log=True,
    )


def _two_curves(title: str, numbers: Mapping[int, tuple[float, float]]) -> Panel:
    """Return the curves of dense and converted numbers by length."""
    dense, converted = zip(*numbers.values(), strict=True)
    return Panel(title, [Curve("dense", list(numbers), dense), Curve("converted", list(numbers), converted)])


def _latencies(context: ReportContext, widths: Mapping[str, int]) -> list[Latency]:
    """Time the model and a copy in the other form: a converted model is expanded, a dense one converted."""
    model, options = context.model, context.options
    dense, converted = model, model
    if context.converted:
        dense = deepcopy(model)
        expand(dense)
    else:
        converted = deepcopy(model)
        solver = Solver(sweeps=1 if "dk" in widths else None)
        compress(converted, Compression(widths.get("dk"), dv=widths.get("dv"), solver=solver), calibration=None)
    lengths, inputs = list(options.lengths), None
    if model.main_input_name == "input_ids":
        longest = getattr(model.config, "max_position_embeddings", None) or max(lengths, default=0)
        lengths = [length for length in lengths if length <= longest]
    else:
        (image,) = context.first(1)
        with Tap(model) as tap, evaluation_mode(model):
            run_batch(model, image)
            outputs = tap.take()[0].outputs
        assert outputs is not None
        lengths, inputs = [outputs.shape[1]], lambda _: image
    progress = context.progress("latency")
    return analysis.module_latency(
        dense, converted, lengths, inputs=inputs, rounds=options.rounds, seed=options.seed, progress=progress
    )


def _latency(context: ReportContext, latencies: Sequence[Latency]) -> tuple[Table, Curves, str]:
    """Return the latency of each module, that of all together, and a sentence on the longest inputs."""
    records: list[dict[str, Cell]] = []
    by_length: dict[int, list[Latency]] = {}
    for latency in sorted(latencies, key=lambda latency: latency.length):
        by_length.setdefault(latency.length, []).append(latency)
        records.append(
            {
                "layer": context.label(latency.name),
                "T [tokens]": latency.length,
                "dense [ms]": latency.dense_ms,
                "converted [ms]": latency.converted_ms,
                "converted / dense": latency.ratio,
                "lower quartile": latency.low,
                "upper quartile": latency.high,
            }
        )
    sums = {
        length: (sum(module.dense_ms for module in modules), sum(module.converted_ms for module in modules))
        for length, modules in by_length.items()
    }
    picture = Curves(
        "Latency over length",
        "Time of all attention modules together; fused dense attention can be faster where it does more arithmetic.",
        "measured here, Collaborate, Table 1",
        [_two_curves("all modules", sums)],
        x_label="T, tokens",
        y_label="ms a sequence",
        log=True,
    )
    longest = max(by_length)
    ratio = statistics.median(module.ratio for module in by_length[longest])
    highlight = f"Converted attention takes {ratio:.2f} of dense time at T = {longest}, measured here."
    return Table("latency", "Latency of attention modules, batch of one", records), picture, highlight


def _highlights(parts: Costs) -> list[str]:
    macs = {part: _mega_macs(costs.values()) for part, costs in parts.items()}
    dense, converted = (sum(column) for column in zip(*macs.values(), strict=True))
    shares = ", ".join(f"{PARTS[part]} {100 * before / dense:.0f} %" for part, (before, _) in macs.items())
    kept = f"; the converted form has {100 * converted / dense:.0f} % of them" if converted != dense else ""
    lines = [f"Operations of all dense layers at T = {LENGTH}: {shares}{kept}."]
    for part, costs in parts.items():
        if widths := [cost.width for cost in costs.values() if cost.width is not None]:
            before = sum(cost.dense.parameters for cost in costs.values())
            after = sum(cost.converted.parameters for cost in costs.values())
            at = f"{part} = {width_range(widths)}"
            lines.append(f"{PARTS[part].capitalize()}: {before:,} parameters dense, {after:,} at {at}.")
    return lines
