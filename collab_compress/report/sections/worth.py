"""Cost of layers (Table 1 of Collaborate, T*, measured latency), and worth of heads."""

import statistics
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import takewhile
from math import inf

import torch
from transformers import PreTrainedModel

from collab_compress.analysis import (
    Dominance,
    Latency,
    MapCost,
    ModuleCost,
    PruningPoint,
    dominant_heads,
    feed_forward_costs,
    module_costs,
    module_latency,
    paper_table_1,
    pruning_curve,
    split_rows,
    with_progress,
)
from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.conversion.compress import compress
from collab_compress.conversion.expand import expand
from collab_compress.errors import CollabCompressError, HeadError, UnsupportedModelError
from collab_compress.heads import Tap, head_importance
from collab_compress.options import Compression, Solver
from collab_compress.report.section import (
    Cell,
    Curve,
    Curves,
    Heatmaps,
    Omitted,
    Panel,
    Section,
    Table,
    short,
)
from collab_compress.report.study import Study

LENGTH = 128
TOLERATED = 0.1  # change of the outputs, or of a score, that silencing heads may make
COUNTED = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def cost(study: Study) -> Section | Omitted:
    """Return what attention and feed-forward blocks cost in both forms."""
    widths = _widths(study)
    costs = module_costs(study.model, LENGTH, dk=widths.get("dk"), dv=widths.get("dv"))
    blocks: dict[str, MapCost] = {}
    latencies, note = [], ""
    try:
        blocks = _blocks(study, LENGTH)
    except UnsupportedModelError as error:
        note = f" Feed-forward blocks were not counted: {error}."
    try:
        latencies = _latencies(study, widths)
    except CollabCompressError as error:
        note += f" Latency was not measured: {error}."
    parts = _parts(costs, blocks)
    tables, pictures = [_layers_table(parts)], [_macs(study, widths, bool(blocks))]
    if any(module.scores.width for module in costs):
        records = [_scores_record(study, module) for module in costs]
        tables.append(Table.of("modules", "Queries and keys of each attention module", records))
    if any(module.values.width for module in costs):
        records = [_values_record(study, module) for module in costs]
        tables.append(Table.of("values", "Values and outputs of each attention module", records))
    if blocks:
        records = [_block_record(study, name, block) for name, block in blocks.items()]
        tables.append(Table.of("blocks", "Feed-forward blocks", records))
    if latencies:
        table, picture = _latency(study, latencies)
        tables.append(table)
        pictures.append(picture)
    title = "Table 1 of Collaborate: a whole layer at T = 128, without biases"
    tables.append(Table.of("table-1", title, paper_table_1()))
    requested = " and ".join(f"{name} = {width}" for name, width in widths.items())
    subject = f"dense modules, modules with {requested}" if requested else "converted modules as they are"
    narrower = next((block.width for block in blocks.values() if block.width is not None), None)
    if narrower is not None:
        subject += f", and feed-forward blocks with dff = {narrower}"
    return Section(
        "cost",
        "What a layer costs",
        f"For {subject}; what is not converted costs the same in both forms. Beyond T* tokens converted scores "
        "take more operations than dense ones; narrow values and feed-forward blocks take fewer at any length. "
        "Latencies are of whole attention modules on this machine, dense and converted in turns, medians of "
        f"{study.look.rounds} rounds." + note,
        "Collaborate, section 3.4 and Table 1",
        tables=tuple(tables),
        pictures=tuple(pictures),
        highlights=_cost_highlights(parts, latencies),
        actions=_latency_actions(_ratios(latencies)),
    )


def dominance(study: Study) -> Section | Omitted:
    """Return what the model loses without each head, and without more and more of them."""
    dominant, scored, points, metric = _by_drift(study) if study.score is None else _by_score(study)
    sign = -1 if scored.greater_is_better else 1
    losses = {name: sign * changes for name, changes in scored.changes.items()}  # positive where the model gets worse
    joined = torch.cat(list(losses.values()))
    least, heads = min(0.0, float(joined.min())), len(joined)
    map_of_losses = Heatmaps(
        "What is lost without each head",
        "The strongest cell of a row is its layer's dominant head; heads with faint ones can go.",
        "DropHead, Table 4",
        (study.layer_map("", losses),),
        low=least,
        high=float(joined.max()),
        scale="diverging" if least < 0 else "sequential",
        row_label="layer",
    )
    scores = tuple(point.score for point in points)
    pruning = Curves(
        "Pruning curve",
        "The longer the curve stays flat, the more heads the model can do without.",
        "DropHead, Fig. 3",
        (Panel("", (Curve(metric, tuple(100 * point.share for point in points), scores),)),),
        x_label="% of heads silenced, least important first",
        y_label=metric,
        bottom=min(0.0, *scores),
    )
    changes = scored.mean_change(dominant)
    change = ", ".join(f"{short(mean)} ({kind})" for kind, mean in changes.items())
    half = next(point for point in points if point.share >= 0.5)
    return Section(
        "dominance",
        "What heads are worth",
        _dominance_reading(study, metric),
        "DropHead, Table 4 and Fig. 3",
        tables=(
            _dominant_table(study, scored, dominant),
            Table.of(
                "kinds",
                "Loss of the dominant head, mean over layers",
                [{"attention": kind, "change": mean} for kind, mean in changes.items()],
            ),
            Table.of(
                "pruning",
                "Pruning curve",
                [
                    {
                        "heads silenced [%]": round(100 * point.share),
                        "heads silenced": point.removed,
                        metric: point.score,
                    }
                    for point in points
                ],
            ),
        ),
        pictures=(map_of_losses, pruning),
        highlights=(
            f"Silencing the dominant head of a layer changes the {metric} by {change}, mean over layers.",
            f"Without the {half.removed} least important heads of {heads} the {metric} is {short(half.score)}, with "
            f"all of them {short(scored.baseline)}.",
        ),
        actions=(_pruning_action(points, scored.baseline, heads, metric),),
    )


def _widths(study: Study) -> dict[str, int]:
    """Return the dk and dv to convert a dense model to; none for a converted one."""
    if study.converted:
        return {}
    dk, dv = study.look.dk, study.look.dv
    if dk is None and dv is None:
        dk = max(1, min(site.width for site in study.sites) // 3)
    return {name: width for name, width in (("dk", dk), ("dv", dv)) if width is not None}


def _blocks(study: Study, length: int) -> dict[str, MapCost]:
    """Return the costs of feed-forward blocks at the chosen dff; at half of their width for a dense model.

    Raises:
        HeadError: dff is beyond the width of a block.
        UnsupportedModelError: the model has no such blocks.
    """
    dff = study.look.dff
    if dff is None and not study.converted:
        dff = max(1, min(block.width for block in study.blocks) // 2)
    return feed_forward_costs(study.model, study.blocks, length, dff=dff)


def _latencies(study: Study, widths: Mapping[str, int]) -> list[Latency]:
    dense, converted = _pair(study, widths)
    lengths, inputs = list(study.look.lengths), None
    if study.model.main_input_name == "input_ids":
        longest = getattr(study.model.config, "max_position_embeddings", None) or max(lengths, default=0)
        lengths = [length for length in lengths if length <= longest]
    else:
        (image,) = study.some(1)
        lengths, inputs = [_token_count(study.model, image)], lambda _: image
    return module_latency(
        dense,
        converted,
        lengths,
        inputs=inputs,
        rounds=study.look.rounds,
        seed=study.look.seed,
        progress=study.progress("latency"),
    )


def _token_count(model: PreTrainedModel, batch: Batch) -> int:
    """Return the number of tokens that attention sees of an input."""
    with Tap(model) as tap, evaluation_mode(model):
        run_batch(model, batch)
        outputs = tap.take()[0].outputs
    assert outputs is not None
    return outputs.shape[1]


def _pair(study: Study, widths: Mapping[str, int]) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the model in dense and in converted form; the form that it does not have is made of a copy."""
    other = deepcopy(study.model)
    if study.converted:
        expand(other)
        return other, study.model
    solver = Solver(sweeps=1 if "dk" in widths else None)
    compress(other, Compression(widths.get("dk"), dv=widths.get("dv"), solver=solver), calibration=None)
    return study.model, other


def _scores_record(study: Study, module: ModuleCost) -> dict[str, Cell]:
    dense, converted, limit = module.scores.dense, module.scores.converted, module.scores.break_even_length
    return {
        "layer": study.label(module.name),
        "module": module.name,
        "form": module.form if module.scores.width else "dense",
        "dk": module.scores.width,
        "parameters, dense": dense.parameters,
        "parameters, converted": converted.parameters,
        f"dense at T = {LENGTH} [MMAC]": dense.macs / 1e6,
        f"converted at T = {LENGTH} [MMAC]": converted.macs / 1e6,
        "T* [tokens]": "any" if limit == inf else limit and int(limit),
        "key cache, dense [B/token]": dense.cache_bytes,
        "key cache, converted [B/token]": converted.cache_bytes,
    }


def _values_record(study: Study, module: ModuleCost) -> dict[str, Cell]:
    dense, converted = module.values.dense, module.values.converted
    return {
        "layer": study.label(module.name),
        "module": module.name,
        "dv": module.values.width,
        "parameters, dense": dense.parameters,
        "parameters, converted": converted.parameters,
        f"dense at T = {LENGTH} [MMAC]": dense.macs / 1e6,
        f"converted at T = {LENGTH} [MMAC]": converted.macs / 1e6,
        "value cache, dense [B/token]": dense.cache_bytes,
        "value cache, converted [B/token]": converted.cache_bytes,
    }


def _block_record(study: Study, name: str, block: MapCost) -> dict[str, Cell]:
    return {
        "layer": study.label(name),
        "block": name,
        "dff": block.width,
        "parameters, dense": block.dense.parameters,
        "parameters, converted": block.converted.parameters,
        f"dense at T = {LENGTH} [MMAC]": block.dense.macs / 1e6,
        f"converted at T = {LENGTH} [MMAC]": block.converted.macs / 1e6,
    }


def _parts(costs: list[ModuleCost], blocks: Mapping[str, MapCost]) -> dict[str, list[MapCost]]:
    """Return the costs of all layers by what they are of."""
    parts = {
        "queries and keys": [module.scores for module in costs],
        "values and outputs": [module.values for module in costs],
    }
    return parts | ({"feed-forward blocks": list(blocks.values())} if blocks else {})


def _layers_table(parts: Mapping[str, list[MapCost]]) -> Table:
    """Return where the parameters and the arithmetic of all layers are."""
    macs = {part: _millions(maps) for part, maps in parts.items()}
    whole = sum(dense for dense, _ in macs.values())
    records: list[dict[str, Cell]] = [
        {
            "part": part,
            "parameters, dense": sum(cost.dense.parameters for cost in maps),
            "parameters, converted": sum(cost.converted.parameters for cost in maps),
            f"dense at T = {LENGTH} [MMAC]": macs[part][0],
            "share of dense [%]": 100 * macs[part][0] / whole,
            f"converted at T = {LENGTH} [MMAC]": macs[part][1],
        }
        for part, maps in parts.items()
    ]
    return Table.of("layers", "Where the parameters and operations of all layers are", records)


def _latency(study: Study, latencies: list[Latency]) -> tuple[Table, Curves]:
    """Return the latency of each module, and of all together."""
    records: list[dict[str, Cell]] = []
    sums: dict[int, list[float]] = {}
    for latency in latencies:
        records.append(
            {
                "layer": study.label(latency.name),
                "T [tokens]": latency.length,
                "dense [ms]": latency.dense_ms,
                "converted [ms]": latency.converted_ms,
                "converted / dense": latency.ratio,
                "lower quartile": latency.low,
                "upper quartile": latency.high,
            }
        )
        dense, converted = sums.get(latency.length, (0.0, 0.0))
        sums[latency.length] = [dense + latency.dense_ms, converted + latency.converted_ms]
    lengths = sorted(sums)
    picture = Curves(
        "Latency over length",
        "Time of all attention modules together; fused dense attention can be faster where it does more arithmetic.",
        "measured here, Collaborate, Table 1",
        (_two_curves("all modules", lengths, [sums[length] for length in lengths]),),
        x_label="T, tokens",
        y_label="ms a sequence",
        log=True,
    )
    return Table.of("latency", "Latency of attention modules, batch of one", records), picture


def _macs(study: Study, widths: Mapping[str, int], with_blocks: bool) -> Curves:
    counted: dict[str, list[tuple[float, float]]] = {}
    for length in COUNTED:
        costs = module_costs(study.model, length, dk=widths.get("dk"), dv=widths.get("dv"))
        for part, maps in _parts(costs, _blocks(study, length) if with_blocks else {}).items():
            counted.setdefault(part, []).append(_millions(maps))
    if not any(module.values.width for module in costs):
        del counted["values and outputs"]
    panels = [_two_curves(part, COUNTED, pairs) for part, pairs in counted.items()]
    return Curves(
        "Operations over length",
        "Where the curves cross is T*; right of it the converted form does more arithmetic.",
        "Collaborate, section 3.4; T* is this toolkit's",
        tuple(panels),
        x_label="T, tokens",
        y_label="million multiply-accumulates a sequence",
        log=True,
    )


def _millions(costs: list[MapCost]) -> tuple[float, float]:
    """Return the millions of multiply-accumulates of all modules, dense and converted."""
    return sum(cost.dense.macs for cost in costs) / 1e6, sum(cost.converted.macs for cost in costs) / 1e6


def _two_curves(title: str, lengths: Sequence[int], pairs: Sequence[Sequence[float]]) -> Panel:
    """Return the curves of (dense, converted) numbers at each length."""
    dense, converted = zip(*pairs, strict=True)
    return Panel(title, (Curve("dense", tuple(lengths), dense), Curve("converted", tuple(lengths), converted)))


def _cost_highlights(parts: Mapping[str, list[MapCost]], latencies: list[Latency]) -> tuple[str, ...]:
    lines = []
    macs = {part: _millions(maps) for part, maps in parts.items()}
    dense, converted = (sum(column) for column in zip(*macs.values(), strict=True))
    shares = ", ".join(f"{part} {100 * before / dense:.0f} %" for part, (before, _) in macs.items())
    kept = f"; the converted form has {100 * converted / dense:.0f} % of them" if converted != dense else ""
    lines.append(f"Operations of all dense layers at T = {LENGTH}: {shares}{kept}.")
    for (title, maps), name in zip(parts.items(), ("dk", "dv", "dff"), strict=False):
        widths = [cost.width for cost in maps if cost.width is not None]
        if widths:
            least, most = min(widths), max(widths)
            shortest = min(cost.break_even_length for cost in maps if cost.break_even_length is not None)
            dense = sum(cost.dense.parameters for cost in maps)
            converted = sum(cost.converted.parameters for cost in maps)
            until = "at any length" if shortest == inf else f"up to T* = {shortest:.0f} tokens"
            lines.append(
                f"{title.capitalize()}: {dense:,} parameters dense, {converted:,} at {name} = "
                f"{least if least == most else f'{least} to {most}'}; fewer operations {until}."
            )
    ratios = _ratios(latencies)
    if ratios:
        longest = max(ratios)
        lines.append(
            f"Converted attention takes {ratios[longest]:.2f} of dense time at T = {longest}, measured here."
        )
    return tuple(lines)


def _ratios(latencies: list[Latency]) -> dict[int, float]:
    """Return length → converted over dense time, median over modules."""
    ratios: dict[int, list[float]] = {}
    for latency in latencies:
        ratios.setdefault(latency.length, []).append(latency.ratio)
    return {length: statistics.median(ratios[length]) for length in sorted(ratios)}


def _latency_actions(ratios: Mapping[int, float]) -> tuple[str, ...]:
    """Return the lengths at which conversion is faster, and what to do at the others."""
    if not ratios:
        return ()
    slower = [str(length) for length, ratio in ratios.items() if ratio > 1]
    times = ", ".join(f"{ratio:.2f} at {length} tokens" for length, ratio in ratios.items())
    advice = f"at {', '.join(slower)} use --form per-head, or stay dense" if slower else "it pays at all of these"
    return (f"Time of converted attention over dense attention, without the rest of the model: {times}; {advice}.",)


def _pruning_action(points: Sequence[PruningPoint], baseline: float, heads: int, metric: str) -> str:
    """Return how many heads can be removed before the outputs change by a tenth."""
    room = TOLERATED * (1.0 if metric == "drift" else abs(baseline))
    within = takewhile(lambda point: abs(point.score - baseline) <= room, points)
    count = max((point.removed for point in within), default=0)
    change = "the outputs move (drift)" if metric == "drift" else f"the {metric} changes"
    if not count:
        return f"Remove no heads: without the least important ones {change} by more than a tenth."
    return (
        f"{count} of {heads} heads can be silenced before {change} by more than a tenth: try "
        "collab-prune, and score your task after it."
    )


def _by_drift(study: Study) -> tuple[dict[str, int], Dominance, list[PruningPoint], str]:
    choosing, scoring = split_rows(study.some(study.look.head_sequences))
    if not scoring:
        raise HeadError("heads are chosen on some sequences and scored on others; pass two sequences at least")
    chosen = dominant_heads(study.model, batches=choosing, progress=study.progress("heads one by one"))
    scored = dominant_heads(study.model, batches=scoring, progress=study.progress("heads one by one"))
    points = pruning_curve(study.model, chosen.changes, batches=scoring, progress=study.progress("pruning curve"))
    return chosen.dominant, scored, points, "drift"


def _by_score(study: Study) -> tuple[dict[str, int], Dominance, list[PruningPoint], str]:
    task = study.score
    assert task is not None
    better, progress = task.greater_is_better, study.progress("heads one by one")
    chosen = dominant_heads(study.model, task.choose, greater_is_better=better, progress=progress)
    scored = dominant_heads(study.model, task.score, greater_is_better=better, progress=progress)
    labelled = with_progress(task.batches, study.progress("importance"), "importance")
    importance = head_importance(study.model, labelled)
    points = pruning_curve(study.model, importance, task.score, progress=study.progress("pruning curve"))
    return chosen.dominant, scored, points, task.name


def _dominance_reading(study: Study, metric: str) -> str:
    if study.score is not None:
        return (
            f"Heads are silenced one at a time, and the model is scored without each ({metric}). The dominant head "
            "of a layer is chosen on other rows than those that score it. For the curve heads are silenced together, "
            "the least important first: importance is the mean size of the loss's gradient in a mask on the head, "
            "normalised in each layer (Michel et al., 2019)."
        )
    count = min(study.look.head_sequences, study.sequences)
    return (
        f"Heads are silenced one at a time on {count} sequences. Without labels the score is the drift of the "
        "model's outputs, ‖without − with‖ / ‖with‖ over tokens that are no padding: 0 with all heads, less is "
        "better. Half of the sequences choose heads, the other half measure the drift. For the curve heads are "
        "silenced together, those whose own loss moved the outputs least first."
    )


def _dominant_table(study: Study, scored: Dominance, dominant: Mapping[str, int]) -> Table:
    records: list[dict[str, Cell]] = []
    for name, changes in scored.changes.items():
        head = dominant[name]
        others = torch.cat([changes[:head], changes[head + 1 :]])
        records.append(
            {
                "layer": study.label(name),
                "attention": scored.kinds[name],
                "dominant head": head,
                "change without it": float(changes[head]),
                "mean change without another head": float(others.mean()) if len(others) else None,
            }
        )
    return Table.of("dominant", "Dominant head of each layer", records)
