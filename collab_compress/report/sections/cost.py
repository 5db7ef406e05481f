"""Section on the cost of layers: parameters, operations, measured latency."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from transformers import PreTrainedModel

from collab_compress import analysis
from collab_compress.analysis import Latency, MapCost, ModuleCost
from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.conversion.compress import compress
from collab_compress.conversion.expand import expand
from collab_compress.conversion.report import width_range
from collab_compress.errors import CollabCompressError, UnsupportedModelError
from collab_compress.heads import Tap
from collab_compress.options import Compression, Solver
from collab_compress.report.context import ReportContext
from collab_compress.report.section import Cell, Curve, Curves, Panel, Section, Table

LENGTH = 128  # tokens for which operations are counted in tables
COUNTED = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # and in curves
WIDTHS = {"queries and keys": "dk", "values and outputs": "dv", "feed-forward blocks": "dff"}


def cost(context: ReportContext) -> Section:
    """Return what attention and feed-forward blocks cost in both forms."""
    options, note = context.options, ""
    widths: dict[str, Any] = {"dk": options.dk, "dv": options.dv}  # at which dense modules are counted
    widths = {name: width for name, width in widths.items() if width is not None and not context.converted}
    if not widths and not context.converted:
        keeps_scores = any(site.family.keeps_scores for site in context.sites)
        widths["dv" if keeps_scores else "dk"] = max(1, min(site.key_value_width for site in context.sites) // 3)
    modules = analysis.module_costs(context.model, LENGTH, **widths)
    blocks: dict[str, MapCost] = {}
    try:
        blocks = _block_costs(context, LENGTH)
    except UnsupportedModelError as error:
        note = f" Feed-forward blocks were not counted: {error}."
    latencies: list[Latency] = []
    try:
        latencies = _latencies(context, widths)
    except CollabCompressError as error:
        note += f" Latency was not measured: {error}."
    parts = _parts(modules, blocks)
    tables = [_parts_table(parts), *_module_tables(context, modules, blocks)]
    pictures = [_operations(context, widths, with_blocks=bool(blocks))]
    if latencies:
        table, picture = _latency(context, latencies)
        tables.append(table)
        pictures.append(picture)
    requested = " and ".join(f"{name} = {width}" for name, width in widths.items())
    subject = f"dense modules, modules with {requested}" if requested else "converted modules as they are"
    narrower = next((block.width for block in blocks.values() if block.width is not None), None)
    if narrower is not None:
        subject += f", and feed-forward blocks with dff = {narrower}"
    ratios = _ratios(latencies)
    return Section(
        "cost",
        "What a layer costs",
        f"For {subject}; a part that is not converted costs the same in both forms. Latencies are of whole "
        f"attention modules on this machine, dense and converted in turns, medians of {options.rounds} rounds."
        + note,
        "Collaborate, section 3.4",
        tables,
        pictures,
        highlights=_highlights(parts, ratios),
    )


def _parts(modules: Sequence[ModuleCost], blocks: Mapping[str, MapCost]) -> dict[str, list[MapCost]]:
    """Return the costs of all layers by the part of a layer."""
    parts = {
        "queries and keys": [module.scores for module in modules],
        "values and outputs": [module.values for module in modules],
        "feed-forward blocks": list(blocks.values()),
    }
    return {part: costs for part, costs in parts.items() if costs}


def _module_tables(
    context: ReportContext, modules: Sequence[ModuleCost], blocks: Mapping[str, MapCost]
) -> Iterator[Table]:
    """Yield the costs of each module, of the parts of which any is converted."""
    records: list[dict[str, Cell]]
    if any(module.scores.width for module in modules):
        records = []
        for module in modules:
            record: dict[str, Cell] = {"layer": context.label(module.name), "module": module.name}
            record |= {"dk": module.scores.width, **_cost_cells(module.scores)}
            records.append(record | _cache_cells("key", module.scores))
        yield Table.of("modules", "Queries and keys of each attention module", records)
    if any(module.values.width for module in modules):
        records = []
        for module in modules:
            record = {"layer": context.label(module.name), "module": module.name, "dv": module.values.width}
            records.append(record | _cost_cells(module.values) | _cache_cells("value", module.values))
        yield Table.of("values", "Values and outputs of each attention module", records)
    if blocks:
        records = []
        for name, block in blocks.items():
            record = {"layer": context.label(name), "block": name, "dff": block.width}
            records.append(record | _cost_cells(block))
        yield Table.of("blocks", "Feed-forward blocks", records)


def _cost_cells(cost: MapCost) -> dict[str, Cell]:
    return {
        "parameters, dense": cost.dense.parameters,
        "parameters, converted": cost.converted.parameters,
        f"dense at T = {LENGTH} [MMAC]": cost.dense.macs / 1e6,
        f"converted at T = {LENGTH} [MMAC]": cost.converted.macs / 1e6,
    }


def _cache_cells(of: str, cost: MapCost) -> dict[str, Cell]:
    return {
        f"{of} cache, dense [B/token]": cost.dense.cache_bytes,
        f"{of} cache, converted [B/token]": cost.converted.cache_bytes,
    }


def _block_costs(context: ReportContext, length: int) -> dict[str, MapCost]:
    """Return the costs of feed-forward blocks at the chosen dff; at half of their width for a dense model.

    Raises:
        HeadError: dff is beyond the width of a block.
        UnsupportedModelError: the model has no feed-forward blocks.
    """
    dff = context.options.dff
    if dff is None and not context.converted:
        dff = max(1, min(block.width for block in context.blocks) // 2)
    return analysis.feed_forward_costs(context.model, context.blocks, length, dff=dff)


def _mega_macs(costs: Sequence[MapCost]) -> tuple[float, float]:
    """Return the millions of multiply-accumulates of all modules, dense and converted."""
    return sum(cost.dense.macs for cost in costs) / 1e6, sum(cost.converted.macs for cost in costs) / 1e6


def _parts_table(parts: Mapping[str, list[MapCost]]) -> Table:
    """Return where the parameters and the operations of all layers are."""
    total = sum(_mega_macs(costs)[0] for costs in parts.values())
    records: list[dict[str, Cell]] = []
    for part, costs in parts.items():
        dense, converted = _mega_macs(costs)
        records.append(
            {
                "part": part,
                "parameters, dense": sum(cost.dense.parameters for cost in costs),
                "parameters, converted": sum(cost.converted.parameters for cost in costs),
                f"dense at T = {LENGTH} [MMAC]": dense,
                "share of dense [%]": 100 * dense / total,
                f"converted at T = {LENGTH} [MMAC]": converted,
            }
        )
    return Table.of("layers", "Where the parameters and operations of all layers are", records)


def _operations(context: ReportContext, widths: Mapping[str, Any], with_blocks: bool) -> Curves:
    counted: dict[str, list[tuple[float, float]]] = {}
    for length in COUNTED:
        modules = analysis.module_costs(context.model, length, **widths)
        parts = _parts(modules, _block_costs(context, length) if with_blocks else {})
        if not any(module.values.width for module in modules):
            del parts["values and outputs"]
        for part, costs in parts.items():
            counted.setdefault(part, []).append(_mega_macs(costs))
    return Curves(
        "Operations over length",
        "On long inputs most operations are those of the scores, whose number falls with the width of heads alone.",
        "Collaborate, section 3.4",
        [_two_curves(part, COUNTED, pairs) for part, pairs in counted.items()],
        x_label="T, tokens",
        y_label="million multiply-accumulates a sequence",
        log=True,
    )


def _two_curves(title: str, lengths: Sequence[int], pairs: Sequence[Sequence[float]]) -> Panel:
    """Return the curves of (dense, converted) numbers at each length."""
    dense, converted = zip(*pairs, strict=True)
    return Panel(title, [Curve("dense", lengths, dense), Curve("converted", lengths, converted)])


def _latencies(context: ReportContext, widths: Mapping[str, int]) -> list[Latency]:
    """Time the model and a copy in the other form: a converted model is expanded, a dense one converted."""
    model, options = context.model, context.options
    other = deepcopy(model)
    if context.converted:
        expand(other)
        dense, converted = other, model
    else:
        solver = Solver(sweeps=1 if "dk" in widths else None)
        compress(other, Compression(widths.get("dk"), dv=widths.get("dv"), solver=solver), calibration=None)
        dense, converted = model, other
    lengths, inputs = list(options.lengths), None
    if model.main_input_name == "input_ids":
        longest = getattr(model.config, "max_position_embeddings", None) or max(lengths, default=0)
        lengths = [length for length in lengths if length <= longest]
    else:
        (image,) = context.first(1)
        lengths, inputs = [_token_count(model, image)], lambda _: image
    return analysis.module_latency(
        dense,
        converted,
        lengths,
        inputs=inputs,
        rounds=options.rounds,
        seed=options.seed,
        progress=context.progress("latency"),
    )


def _token_count(model: PreTrainedModel, batch: Batch) -> int:
    """Return the number of tokens that attention sees of an input."""
    with Tap(model) as tap, evaluation_mode(model):
        run_batch(model, batch)
        outputs = tap.take()[0].outputs
    assert outputs is not None
    return outputs.shape[1]


def _latency(context: ReportContext, latencies: list[Latency]) -> tuple[Table, Curves]:
    """Return the latency of each module, and of all together."""
    records: list[dict[str, Cell]] = []
    sums: dict[int, tuple[float, float]] = {}
    for latency in latencies:
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
        dense, converted = sums.get(latency.length, (0.0, 0.0))
        sums[latency.length] = dense + latency.dense_ms, converted + latency.converted_ms
    lengths = sorted(sums)
    picture = Curves(
        "Latency over length",
        "Time of all attention modules together; fused dense attention can be faster where it does more arithmetic.",
        "measured here, Collaborate, Table 1",
        [_two_curves("all modules", lengths, [sums[length] for length in lengths])],
        x_label="T, tokens",
        y_label="ms a sequence",
        log=True,
    )
    return Table.of("latency", "Latency of attention modules, batch of one", records), picture


def _ratios(latencies: Sequence[Latency]) -> dict[int, float]:
    """Return length → converted over dense time, median over modules."""
    ratios: dict[int, list[float]] = {}
    for latency in latencies:
        ratios.setdefault(latency.length, []).append(latency.ratio)
    return {length: statistics.median(ratios[length]) for length in sorted(ratios)}


def _highlights(parts: Mapping[str, list[MapCost]], ratios: Mapping[int, float]) -> list[str]:
    macs = {part: _mega_macs(costs) for part, costs in parts.items()}
    dense, converted = (sum(column) for column in zip(*macs.values(), strict=True))
    shares = ", ".join(f"{part} {100 * before / dense:.0f} %" for part, (before, _) in macs.items())
    kept = f"; the converted form has {100 * converted / dense:.0f} % of them" if converted != dense else ""
    lines = [f"Operations of all dense layers at T = {LENGTH}: {shares}{kept}."]
    for part, costs in parts.items():
        widths = [cost.width for cost in costs if cost.width is not None]
        if not widths:
            continue
        before = sum(cost.dense.parameters for cost in costs)
        after = sum(cost.converted.parameters for cost in costs)
        lines.append(
            f"{part.capitalize()}: {before:,} parameters dense, {after:,} at {WIDTHS[part]} = {width_range(widths)}."
        )
    if ratios:
        longest = max(ratios)
        lines.append(
            f"Converted attention takes {ratios[longest]:.2f} of dense time at T = {longest}, measured here."
        )
    return lines
