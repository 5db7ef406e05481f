"""Section on the widths that a layer needs: queries and keys, values and outputs, feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from collab_compress.analysis import feed_forward_energy, head_energy, value_energy
from collab_compress.analysis.energy import SHARES
from collab_compress.conversion.feed_forward import narrower_config
from collab_compress.errors import HeadError, UnsupportedModelError
from collab_compress.report.context import ReportContext
from collab_compress.report.section import Cell, Curve, Curves, Panel, Section, Table, curve

HEADS = 72  # drawn at most
DK = {"joined_product": "sum of heads", "shared": "at least", "unshared": "at most"}  # curves that suggest a dk
DV = {"joined": "at least", "narrow": "narrow values"}
WEIGHTS, INPUTS = "bare weights", "weighed by inputs"

Energies: TypeAlias = dict[str, list[Any]]  # weighting, `WEIGHTS` or `INPUTS` → energies of the modules


class _Part(NamedTuple):
    """One part of a layer in the section."""

    reading: str
    table: Table
    pictures: list[Curves]
    highlight: str


def energy(context: ReportContext) -> Section:
    """Return how many dimensions queries and keys, values, and feed-forward blocks need; suggest widths."""
    parts: dict[str, _Part] = {}
    missing: dict[str, str] = {}
    for name, measure in (("scores", _scores), ("values", _values), ("feed-forward blocks", _neurons)):
        try:
            parts[name] = measure(context)
        except (HeadError, UnsupportedModelError) as error:
            missing[name] = str(error)
    if not parts:
        raise HeadError("; ".join(missing.values()))
    return Section(
        "energy",
        "How many dimensions a layer needs",
        "Energy is the sum of squared singular values; a curve shows the share of it that the first components hold. "
        f"Weighed by inputs (of {min(context.options.input_sequences, context.sequences):,} sequences), it is the "
        "energy of the weights' outputs on these inputs, as in a conversion; most directions of the weights never "
        "meet an input. "
        + " ".join(part.reading for part in parts.values())
        + "".join(f" Not shown, {name}: {reason}." for name, reason in missing.items()),
        "Collaborate, Fig. 1; values and feed-forward blocks: this package (docs/method.md)",
        tables=[part.table for part in parts.values()],
        pictures=[picture for part in parts.values() for picture in part.pictures],
        highlights=[part.highlight for part in parts.values()],
    )


def _scores(context: ReportContext) -> _Part:
    """Measure queries and keys."""
    labels = context.labels(site.name for site in context.sites)
    energies, note = _measure(context, head_energy)
    weighting, modules = list(energies.items())[-1]
    least, most = _widths(modules, "shared"), _widths(modules, "unshared")
    single, joined = [], []
    for name, of in energies.items():
        for field, title in (("query", "Q"), ("key", "K"), ("product", "QKᵀ")):
            single.append(_heads_panel(f"{title}, {name}", of, field))
            joined.append(_layers_panel(f"{title}, {name}", labels, of, f"joined_{field}", with_mean=True))
    pictures = [
        _curves(
            "Energy of each head",
            "A curve that rises late is a head that is not low-rank by itself.",
            "Collaborate, Fig. 1, left",
            panels=single,
            x_label="components of the head",
        ),
        _curves(
            "Energy of all heads side by side",
            "Where QKᵀ rises sooner than Q and K, heads together use fewer directions than they have.",
            "Collaborate, Fig. 1, right",
            panels=joined,
            x_label="components of all heads",
        ),
        _curves(
            "What a shared dk captures",
            "A conversion at dk lies between the two; its relative error is the root of the missing share.",
            "this package (docs/analysis.md)",
            panels=[
                _layers_panel("most that dk can capture", labels, modules, "shared"),
                _layers_panel("what dk captures at least", labels, modules, "unshared"),
            ],
            x_label="dk",
            y_label=f"share of energy, {weighting}",
        ),
    ]
    return _Part(
        "The sum of all heads (W_Q W_Kᵀ) needs few components, but that says little of each head. No conversion "
        "captures the share below the dk named “at least”; the dk named “at most” captures it even before heads "
        "share anything." + note,
        _table("dk", DK, energies, labels),
        pictures,
        f"dk for 90, 95, 99 % of the energy of scores in every layer: at least {_listed(least)}, at most "
        f"{_listed(most)} ({weighting}).",
    )


def _values(context: ReportContext) -> _Part:
    """Measure values and outputs."""
    labels = context.labels(site.name for site in context.sites)
    energies, note = _measure(context, value_energy)
    weighting, modules = list(energies.items())[-1]
    narrow = _widths(modules)
    pictures = [
        _curves(
            "Energy of each head's values and outputs",
            "A curve that rises late is a head that needs all of its values.",
            "this package (docs/method.md)",
            panels=[_heads_panel(f"W_V W_O, {name}", of, "heads") for name, of in energies.items()],
            x_label="channels of the head",
        ),
        _curves(
            "What dv captures",
            "The relative error of a conversion at dv is the root of the share missing on the right.",
            "this package (docs/method.md)",
            panels=[
                _layers_panel("most that dv can capture", labels, modules, "joined"),
                _layers_panel("what narrow values capture", labels, modules, "narrow"),
            ],
            x_label="dv",
            y_label=f"share of energy, {weighting}",
        ),
    ]
    return _Part(
        "For values and outputs it is the share of what heads add to the residual stream, and the dv named “narrow "
        "values” captures it." + note,
        _table("dv", DV, energies, labels),
        pictures,
        f"dv for 90, 95, 99 % of the energy of values and outputs in every layer: {_listed(narrow)} ({weighting}).",
    )


def _neurons(context: ReportContext) -> _Part:
    """Measure feed-forward blocks."""
    batches, progress = context.first(context.options.input_sequences), context.progress("neurons")
    blocks = feed_forward_energy(context.model, batches, blocks=context.blocks, progress=progress)
    labels = context.labels(blocks)
    records, curves = [], []
    for label, (name, block) in zip(labels, blocks.items(), strict=True):
        record: dict[str, Cell] = {"layer": label, "block": name, "neurons": int(block.widths[-1])}
        records.append(record | {f"{100 * share:.0f} % [dff]": rank for share, rank in block.ranks().items()})
        curves.append(Curve(f"layer {label}", block.widths.tolist(), block.errors.tolist()))
    picture = Curves(
        "What a block loses at dff",
        "All blocks of a conversion have the same dff, so the highest curve shows how many are enough.",
        "this package (docs/method.md)",
        panels=[Panel("", curves)],
        x_label="dff, neurons kept",
        y_label="relative error of the block's output",
        bottom=0.0,
    )
    widths = _widths(list(blocks.values()))
    widest = max(block.width for block in context.blocks)
    note = _why_no_dff(context)
    return _Part(
        "For a feed-forward block it is the share of the variance of its output that dff of its neurons keep, chosen "
        "and refitted as in a conversion, each block by itself, and measured on sequences that they were not fitted "
        f"to (an eighth); the relative error is the root of the missing share.{note}",
        Table.of("dff", "Suggested --dff for 90, 95 and 99 % of the energy, in sixteenths", records),
        [picture],
        f"dff for 90, 95, 99 % of the energy of the output of every feed-forward block: {_listed(widths)} of "
        f"{widest} neurons ({context.data}).",
    )


def _why_no_dff(context: ReportContext) -> str:
    """Return why no conversion takes a dff, or nothing."""
    width = min(block.width for block in context.blocks)
    try:
        narrower_config(context.model, context.blocks, max(1, width // 2))
    except UnsupportedModelError as error:
        return f" No conversion makes these blocks narrower: {error}."
    return ""


def _measure(context: ReportContext, measure: Callable[..., dict[str, Any]]) -> tuple[Energies, str]:
    """Return energies of bare weights, and weighed by inputs, or a note on why inputs allow no weighing."""
    energies = {WEIGHTS: list(measure(context.model).values())}
    batches = context.first(context.options.input_sequences)
    try:
        energies[INPUTS] = list(measure(context.model, batches, progress=context.progress("energy")).values())
    except HeadError as error:  # as for a single token, whose covariance is 0
        return energies, f" These inputs allow no weighing: {error}."
    return energies, ""


def _widths(modules: Sequence[Any], curve: str = "") -> list[int]:
    """Return the widths that a curve suggests for all modules."""
    return [max(module.rank(share, curve) for module in modules) for share in SHARES]


def _listed(widths: Sequence[int]) -> str:
    return ", ".join(map(str, widths))


def _table(width: str, curves: Mapping[str, str], energies: Energies, labels: Sequence[str]) -> Table:
    """Return the widths that each curve suggests for each module."""
    records = []
    for weighting, modules in energies.items():
        for label, module in zip(labels, modules, strict=True):
            record: dict[str, Cell] = {"layer": label, "energy": weighting}
            for name, title in curves.items():
                for share, rank in module.ranks(name).items():
                    record[f"{title}, {100 * share:.0f} % [{width}]"] = rank
            records.append(record)
    return Table.of(width, f"Suggested --{width} for 90, 95 and 99 % of the energy", records)


def _curves(
    title: str, reading: str, source: str, *, panels: list[Panel], x_label: str, y_label: str = "share of energy"
) -> Curves:
    return Curves(title, reading, source, panels, x_label, y_label, bottom=0.0, top=1.0)


def _heads_panel(title: str, modules: Sequence[Any], field: str) -> Panel:
    """Return the curves of some heads, and the mean of all, from a field (H, d+1)."""
    heads = [head for module in modules for head in getattr(module, field)]
    lines = [curve("", head, weight="faint") for head in heads[:: -(-len(heads) // HEADS)]]
    return Panel(title, [*lines, curve("mean of heads", _mean(heads), weight="bold")])


def _layers_panel(
    title: str, labels: Sequence[str], modules: Sequence[Any], field: str, with_mean: bool = False
) -> Panel:
    """Return the curve of each module from a field."""
    shares = [getattr(module, field) for module in modules]
    lines = [curve(f"layer {label}", share) for label, share in zip(labels, shares, strict=True)]
    return Panel(title, [*lines, curve("mean", _mean(shares), weight="bold")] if with_mean else lines)


def _mean(curves: Sequence[Tensor]) -> Tensor:
    """Return the mean of cumulative shares of different lengths; a curve is 1 beyond its end."""
    padded: Tensor = torch.nn.utils.rnn.pad_sequence(list(curves), padding_value=1.0)
    return padded.mean(1)
