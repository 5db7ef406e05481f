"""What attention costs (Table 1 of Collaborate, T*, measured latency), and what its heads are worth."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from math import isinf

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis import (
    Dominance,
    Latency,
    ModuleCost,
    PruningPoint,
    dominant_heads,
    module_costs,
    module_latency,
    paper_table_1,
    pruning_curve,
    split_rows,
    with_progress,
)
from collab_compress.architectures import FAMILIES, find_attention
from collab_compress.attention import is_converted
from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.conversion.compress import compress
from collab_compress.conversion.expand import expand
from collab_compress.errors import CollabCompressError
from collab_compress.heads import Tap, head_importance
from collab_compress.options import Compression, Solver
from collab_compress.report.section import (
    Cell,
    Column,
    Curve,
    Curves,
    Heatmaps,
    Omitted,
    Panel,
    Picture,
    Section,
    Table,
    ragged,
    short,
)
from collab_compress.report.study import Study

LENGTH = 128
TOLERATED = 0.1  # change of the outputs, or of a score, that removing heads may make
COUNTED = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def cost(study: Study) -> Section | Omitted:
    """Show what attention costs in both forms."""
    widths = _widths(study)
    costs = module_costs(study.model, LENGTH, dk=widths.get("dk"), dv=widths.get("dv"))
    try:
        timed, untimed = _latencies(study, widths), ""
    except CollabCompressError as error:
        timed, untimed = [], f" Latency was not measured: {error}."
    scores, values = any(each.converted for each in costs), any(each.converted_values for each in costs)
    tables = [
        *([_modules(study, costs)] if scores else []), *([_values(study, costs)] if values else []),
        *([_latency_table(study, timed)] if timed else []), _paper(),
    ]  # fmt: skip
    pictures: list[Picture] = [_macs(study, widths), *([_latency_picture(timed)] if timed else [])]
    asked = " and ".join(f"{name} = {width}" for name, width in widths.items())
    what = f"dense modules, and what {asked} would make of them" if asked else "converted modules as they are"
    return Section(
        "cost",
        "What attention costs",
        f"Of {what}; maps that are not converted cost the same in both forms. Beyond T* tokens converted scores take "
        "more operations than dense ones; narrow values take fewer at any length. Latencies are of whole attention "
        f"modules on this machine, dense and converted in turns, medians of {study.look.rounds} rounds." + untimed,
        "Collaborate, section 3.4 and Table 1",
        tuple(tables), tuple(pictures), _highlights(costs, timed), _faster(timed),
    )  # fmt: skip


def _widths(study: Study) -> dict[str, int]:
    """Say what is to be made of a dense model; nothing of a converted one, which is looked at as it is."""
    if study.converted:
        return {}
    dk, dv = study.look.dk, study.look.dv
    if dk is None and dv is None:
        dk = max(1, min(site.width for site in study.sites) // 3)
    return {name: width for name, width in (("dk", dk), ("dv", dv)) if width is not None}


def dominance(study: Study) -> Section | Omitted:
    """Show what the model loses without each head, and without more and more of them."""
    found, chosen, points, words = _by_drift(study) if study.score is None else _by_score(study)
    cost = _costs(found)
    labels = study.labels(found.changes)
    worst = max(float(values.max()) for values in cost.values())
    best = min(0.0, *(float(values.min()) for values in cost.values()))
    pictures = (
        Heatmaps(
            "What is lost without each head",
            "The strongest cell of a row is its layer's dominant one; heads with faint ones can go.",
            "DropHead, Table 4",
            (ragged("", list(cost.values()), labels),), best, worst,
            "diverging" if best < 0 else "sequential", "layer", "head",
        ),
        Curves(
            "Pruning curve",
            "The longer the curve stays flat, the more heads the model can do without.",
            "DropHead, Fig. 3",
            (Panel("", (Curve(words, tuple(100 * p.share for p in points), tuple(p.score for p in points)),)),),
            "% of heads silenced, least important first", words,
            min(0.0, *(p.score for p in points)),
        ),
    )  # fmt: skip
    kinds = ", ".join(f"{short(change)} ({kind})" for kind, change in found.mean_change(chosen).items())
    half = next(point for point in points if point.share >= 0.5)
    return Section(
        "dominance",
        "What heads are worth",
        _reading(study, words),
        "DropHead, Table 4 and Fig. 3",
        (_dominant(found, chosen, labels), _kinds(found, chosen), _pruning(points, words)),
        pictures,
        (
            f"Silencing the dominant head of a layer changes the {words} by {kinds}, mean over layers.",
            f"Without the {half.removed} least important heads of {_heads(found)} the {words} is "
            f"{short(half.score)}, with all of them {short(found.baseline)}.",
        ),
        (_removable(points, found, words),),
    )


def _latencies(study: Study, widths: Mapping[str, int]) -> list[Latency]:
    dense, converted = _pair(study, widths)
    told, inputs = study.progress("latency"), None
    if study.model.main_input_name == "input_ids":
        most = getattr(study.model.config, "max_position_embeddings", None) or max(study.look.lengths, default=0)
        lengths = [length for length in study.look.lengths if length <= most]
    else:
        (image,) = study.some(1)
        lengths, inputs = [_length(study.model, image)], lambda _: image
    return module_latency(
        dense, converted, lengths, inputs=inputs, rounds=study.look.rounds, seed=study.look.seed, progress=told
    )


def _length(model: PreTrainedModel, batch: Batch) -> int:
    """Count the tokens that an input becomes."""
    with Tap(model) as tap, evaluation_mode(model):
        run_batch(model, batch)
        outputs = tap.take()[0].outputs
    assert outputs is not None
    return outputs.shape[1]


def _pair(study: Study, widths: Mapping[str, int]) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Give the model in dense and in converted form; what is not at hand is made, in a form that is timed alike."""
    other = study.baseline
    if other is not None and _converted(other) != study.converted and _shapes(other) == _shapes(study.model):
        return (other, study.model) if study.converted else (study.model, other)
    made = deepcopy(study.model)
    if study.converted:
        expand(made)
        return made, study.model
    compress(
        made,
        Compression(widths.get("dk"), dv=widths.get("dv"), solver=Solver(sweeps=1 if "dk" in widths else None)),
        calibration=None,
    )
    return study.model, made


def _converted(model: PreTrainedModel) -> bool:
    return any(is_converted(site.module) for site in find_attention(model, FAMILIES))


def _shapes(model: PreTrainedModel) -> list[tuple[object, ...]]:
    """Describe the attention modules of a model in what its two forms have in common."""
    values = [(site, site.part(site.family.value)) for site in find_attention(model, FAMILIES)]
    return [(site.name, site.heads, site.head_width, value.weight.shape[1]) for site, value in values]


def _modules(study: Study, costs: list[ModuleCost]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for each in costs:
        ours, theirs = each.dense, each.converted or each.dense
        limit: Cell = None
        if each.break_even_length is not None:
            limit = "any" if isinf(each.break_even_length) else int(each.break_even_length)
        rows.append((
            study.label(each.name), each.name, each.form if each.converted else "dense", each.dk, ours.parameters,
            theirs.parameters, ours.macs / 1e6, theirs.macs / 1e6, limit, ours.cache_bytes, theirs.cache_bytes,
        ))  # fmt: skip
    columns = (
        Column("layer"), Column("module"), Column("form"), Column("dk"), Column("parameters, dense"),
        Column("parameters, converted"), Column(f"dense at T = {LENGTH}", "MMAC"),
        Column(f"converted at T = {LENGTH}", "MMAC"), Column("T*", "tokens"), Column("key cache, dense", "B/token"),
        Column("key cache, converted", "B/token"),
    )  # fmt: skip
    return Table("modules", "Queries and keys of each attention module", columns, tuple(rows))


def _values(study: Study, costs: list[ModuleCost]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for each in costs:
        ours, theirs = each.dense_values, each.converted_values or each.dense_values
        rows.append((
            study.label(each.name), each.name, each.dv, ours.parameters, theirs.parameters, ours.macs / 1e6,
            theirs.macs / 1e6, ours.cache_bytes, theirs.cache_bytes,
        ))  # fmt: skip
    columns = (
        Column("layer"), Column("module"), Column("dv"), Column("parameters, dense"),
        Column("parameters, converted"), Column(f"dense at T = {LENGTH}", "MMAC"),
        Column(f"converted at T = {LENGTH}", "MMAC"), Column("value cache, dense", "B/token"),
        Column("value cache, converted", "B/token"),
    )  # fmt: skip
    return Table("values", "Values and outputs of each attention module", columns, tuple(rows))


def _latency_table(study: Study, timed: list[Latency]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (study.label(each.name), each.length, each.dense_ms, each.converted_ms, each.ratio, each.low, each.high)
        for each in timed
    ]
    columns = (
        Column("layer"), Column("T", "tokens"), Column("dense", "ms"), Column("converted", "ms"),
        Column("converted / dense"), Column("lower quartile"), Column("upper quartile"),
    )  # fmt: skip
    return Table("latency", "Latency of attention modules, batch of one", columns, tuple(rows))


def _paper() -> Table:
    rows: list[tuple[Cell, ...]] = []
    for row in paper_table_1():
        computed = (
            row.dense.parameters / 1e6, row.collaborative.parameters / 1e6, row.dense.macs / 1e8,
            row.collaborative.macs / 1e8,
        )  # fmt: skip
        rows += [(row.width, row.dk, "computed", *computed), (row.width, row.dk, "printed", *row.printed)]
    columns = (
        Column("D"), Column("dk"), Column("from"), Column("parameters, dense", "10⁶"),
        Column("parameters, converted", "10⁶"), Column("dense", "10⁸ MAC"), Column("converted", "10⁸ MAC"),
    )  # fmt: skip
    return Table("table-1", "Table 1 of Collaborate: a whole layer at T = 128, without biases", columns, tuple(rows))


def _macs(study: Study, widths: Mapping[str, int]) -> Curves:
    at = [module_costs(study.model, length, dk=widths.get("dk"), dv=widths.get("dv")) for length in COUNTED]
    dense = [sum(each.dense.macs for each in costs) / 1e6 for costs in at]
    converted = [sum((each.converted or each.dense).macs for each in costs) / 1e6 for costs in at]
    panels = [_both("queries and keys", COUNTED, dense, converted)]
    if any(each.converted_values for each in at[0]):
        dense = [sum(each.dense_values.macs for each in costs) / 1e6 for costs in at]
        converted = [sum((each.converted_values or each.dense_values).macs for each in costs) / 1e6 for costs in at]
        panels.append(_both("values and outputs", COUNTED, dense, converted))
    return Curves(
        "Operations over length",
        "Where the curves cross is T*; right of it the converted form does more arithmetic.",
        "Collaborate, section 3.4; T* is this toolkit's",
        tuple(panels),
        "T, tokens", "million multiply-accumulates a sequence", log=True,
    )  # fmt: skip


def _latency_picture(timed: list[Latency]) -> Curves:
    lengths = sorted({each.length for each in timed})
    dense = [sum(each.dense_ms for each in timed if each.length == length) for length in lengths]
    converted = [sum(each.converted_ms for each in timed if each.length == length) for length in lengths]
    return Curves(
        "Latency over length",
        "Time of all attention modules together; fused dense attention can be faster where it does more arithmetic.",
        "measured here, Collaborate, Table 1",
        (_both("all modules", lengths, dense, converted),),
        "T, tokens", "ms a sequence", log=True,
    )  # fmt: skip


def _both(title: str, lengths: Sequence[int], dense: Sequence[float], converted: Sequence[float]) -> Panel:
    x = tuple(map(float, lengths))
    return Panel(title, (Curve("dense", x, tuple(dense)), Curve("converted", x, tuple(converted))))


def _highlights(costs: list[ModuleCost], timed: list[Latency]) -> tuple[str, ...]:
    lines = []
    if any(each.converted for each in costs):
        shortest = min(each.break_even_length for each in costs if each.break_even_length is not None)
        until = "at any length" if isinf(shortest) else f"up to T* = {shortest:.0f} tokens"
        dense = sum(each.dense.parameters for each in costs)
        converted = sum((each.converted or each.dense).parameters for each in costs)
        dk = _range(each.dk for each in costs)
        lines.append(
            f"Queries and keys: {dense:,} parameters dense, {converted:,} at dk = {dk}; fewer operations {until}."
        )
    if any(each.converted_values for each in costs):
        dense = sum(each.dense_values.parameters for each in costs)
        converted = sum((each.converted_values or each.dense_values).parameters for each in costs)
        dv = _range(each.dv for each in costs)
        lines.append(
            f"Values and outputs: {dense:,} parameters dense, {converted:,} at dv = {dv}; fewer operations at any "
            "length."
        )
    if not timed:
        return tuple(lines)
    longest = max(each.length for each in timed)
    ratios = sorted(each.ratio for each in timed if each.length == longest)
    return (
        *lines,
        f"Converted attention takes {ratios[len(ratios) // 2]:.2f} of dense time at T = {longest}, measured here.",
    )


def _faster(timed: list[Latency]) -> tuple[str, ...]:
    """Say at which of the timed lengths conversion is faster, and what to do at the others."""
    ratios = {
        length: statistics.median(each.ratio for each in timed if each.length == length)
        for length in sorted({each.length for each in timed})
    }
    if not ratios:
        return ()
    slower = [str(length) for length, ratio in ratios.items() if ratio > 1]
    said = ", ".join(f"{ratio:.2f} at {length} tokens" for length, ratio in ratios.items())
    advice = f"at {', '.join(slower)} use --form per-head, or stay dense" if slower else "it pays at all of these"
    return (f"Time of converted attention beside dense attention, the rest of the model apart: {said}; {advice}.",)


def _removable(points: Sequence[PruningPoint], found: Dominance, words: str) -> str:
    """Say how many heads could be removed before the outputs change by a tenth."""
    room = TOLERATED * max(1.0, abs(found.baseline)) if words == "drift" else TOLERATED * abs(found.baseline)
    kept = [point.removed for point in points if abs(point.score - found.baseline) <= room]
    count = max(kept, default=0)
    change = "the outputs move" if words == "drift" else f"the {words} changes"
    if not count:
        return f"Remove no heads: without the least important ones {change} by more than a tenth ({words})."
    return (
        f"{count} of {_heads(found)} heads can be silenced before {change} by more than a tenth ({words}): try "
        "collab-prune, and score your task after it."
    )


def _range(widths: Iterable[int | None]) -> str:
    """Say which widths there are."""
    found = sorted({width for width in widths if width is not None})
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _by_drift(study: Study) -> tuple[Dominance, dict[str, int], list[PruningPoint], str]:
    choosing, scoring = split_rows(study.some(study.look.head_sequences))
    chosen, found = (
        dominant_heads(study.model, batches=batches, progress=study.progress("heads one by one"))
        for batches in (choosing, scoring)
    )
    points = pruning_curve(study.model, chosen.changes, batches=scoring, progress=study.progress("pruning curve"))
    return found, chosen.dominant, points, "drift"


def _by_score(study: Study) -> tuple[Dominance, dict[str, int], list[PruningPoint], str]:
    task = study.score
    assert task is not None
    chosen, found = (
        dominant_heads(
            study.model, score, greater_is_better=task.greater_is_better, progress=study.progress("heads one by one")
        )
        for score in (task.choose, task.score)
    )
    labelled = with_progress(task.batches, study.progress("importance"), "importance")
    importance = head_importance(study.model, labelled)
    points = pruning_curve(study.model, importance, task.score, progress=study.progress("pruning curve"))
    return found, chosen.dominant, points, task.name


def _reading(study: Study, words: str) -> str:
    if study.score is not None:
        return (
            f"Heads are silenced one at a time, and the model is scored without each ({words}). The dominant head "
            "of a layer is chosen on other rows than those that score it. For the curve heads are silenced together, "
            "the least important first: importance is the mean size of the loss's gradient in a mask on the head, "
            "normalised in each layer (Michel et al., 2019)."
        )
    count = min(study.look.head_sequences, study.sequences)
    return (
        f"Heads are silenced one at a time on {count} sequences. Without labels the score is the drift of the "
        "model's outputs, ‖without − with‖ / ‖with‖ over real tokens: 0 with all heads, less is better. Half of the "
        "sequences choose heads, the other half measure the drift. For the curve heads are silenced together, those "
        "whose own loss moved the outputs least first."
    )


def _costs(found: Dominance) -> dict[str, Tensor]:
    """What each head's loss costs: positive where the model gets worse."""
    sign = -1 if found.greater_is_better else 1
    return {name: sign * changes for name, changes in found.changes.items()}


def _heads(found: Dominance) -> int:
    return sum(map(len, found.changes.values()))


def _dominant(found: Dominance, chosen: Mapping[str, int], labels: list[str]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for label, (name, changes) in zip(labels, found.changes.items(), strict=True):
        head = chosen[name]
        others = torch.cat([changes[:head], changes[head + 1 :]])
        rows.append((
            label, found.kinds[name], head, float(changes[head]), float(others.mean()) if len(others) else None,
        ))  # fmt: skip
    columns = ("layer", "attention", "dominant head", "change without it", "mean change without another head")
    return Table("dominant", "Dominant head of each layer", tuple(map(Column, columns)), tuple(rows))


def _kinds(found: Dominance, chosen: Mapping[str, int]) -> Table:
    rows = tuple(found.mean_change(chosen).items())
    return Table(
        "kinds", "Loss of the dominant head, mean over layers", (Column("attention"), Column("change")), rows
    )


def _pruning(points: list[PruningPoint], words: str) -> Table:
    rows = tuple((round(100 * point.share), point.removed, point.score) for point in points)
    return Table(
        "pruning", "Pruning curve", (Column("heads silenced", "%"), Column("heads silenced"), Column(words)), rows
    )
