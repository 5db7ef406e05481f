"""Section on the widths that a layer needs: queries and keys, values and outputs, feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from collab_compress.analysis import FeedForwardEnergy, feed_forward_energy, head_energy, value_energy
from collab_compress.analysis.energy import SHARES
from collab_compress.conversion.feed_forward import narrower_config
from collab_compress.errors import HeadError, UnsupportedModelError
from collab_compress.report.section import Cell, Curve, Curves, Omitted, Panel, Section, Table, curve
from collab_compress.report.study import Study

HEADS = 72  # drawn at most
DK = {"product": "sum of heads", "shared": "at least", "unshared": "at most"}  # curves that suggest a dk
DV = {"joined": "at least", "narrow": "narrow values"}
WEIGHTS, INPUTS = "bare weights", "weighed by inputs"

Weighed: TypeAlias = dict[str, list[Any]]  # what energies are weighed by → energies of the modules


@dataclass(frozen=True)
class _Part:
    """What one of the widths of a layer adds to the section.

    Args:
        reading: what is measured, and on what.
        table: suggested widths.
        pictures: curves.
        highlight: the width for every layer.
        flag: option to begin a conversion of attention with.
        actions: other advice.
    """

    reading: str
    table: Table
    pictures: tuple[Curves, ...]
    highlight: str
    flag: str = ""
    actions: tuple[str, ...] = ()


def energy(study: Study) -> Section | Omitted:
    """Return how many dimensions queries and keys, values, and feed-forward blocks need; suggest widths."""
    parts: dict[str, _Part] = {}
    missing: dict[str, str] = {}
    for name, measure in (("scores", _scores), ("values", _values), ("feed-forward blocks", _neurons)):
        try:
            parts[name] = measure(study)
        except (HeadError, UnsupportedModelError) as error:
            missing[name] = str(error)
    if not parts:
        return Omitted("; ".join(missing.values()))
    flags = {name: part.flag for name, part in parts.items() if part.flag}
    actions = [action for part in parts.values() for action in part.actions]
    if flags:
        kept = " and of its ".join(flags)
        begin = f"To make attention smaller, begin with collab-compress {' '.join(flags.values())}"
        actions.insert(0, f"{begin}: every layer then keeps 90 % of the energy of its {kept}.")
    return Section(
        "energy",
        "How many dimensions a layer needs",
        "Energy is the share of squared singular values that the first components hold. Weighed by inputs (of "
        f"{min(study.look.input_sequences, study.sequences):,} sequences), it is the energy of the weights' outputs "
        "on real inputs, as in a conversion; most directions of the weights never meet an input. "
        + " ".join(part.reading for part in parts.values())
        + "".join(f" Not shown, {name}: {reason}." for name, reason in missing.items()),
        "Collaborate, Fig. 1; values and feed-forward blocks: docs/method.md",
        tables=tuple(part.table for part in parts.values()),
        pictures=tuple(picture for part in parts.values() for picture in part.pictures),
        highlights=tuple(part.highlight for part in parts.values()),
        actions=() if study.converted else tuple(actions),
    )


def _scores(study: Study) -> _Part:
    """Measure queries and keys."""
    labels = study.labels(site.name for site in study.sites)
    scores, note = _weighed(study, head_energy)
    weighing, last = list(scores.items())[-1]
    least = [max(module.rank(share, "shared") for module in last) for share in SHARES]
    most = [max(module.rank(share, "unshared") for module in last) for share in SHARES]
    alone, joined = [], []
    for weighed, modules in scores.items():
        for name, title in (("query", "Q"), ("key", "K"), ("product", "QKᵀ")):
            alone.append(_heads_panel(f"{title}, {weighed}", modules, name))
            joined.append(_layers_panel(f"{title}, {weighed}", labels, modules, f"joined_{name}", with_mean=True))
    return _Part(
        "The sum of all heads (W_Q W_Kᵀ) needs few components, but that says little of each head. No conversion "
        "captures the share below the dk named “at least”; the dk named “at most” captures it even before heads "
        "share anything." + note,
        _widths("dk", DK, scores, labels),
        (
            _curves(
                "Energy of each head",
                "A curve that rises late is a head that is not low-rank by itself.",
                "Collaborate, Fig. 1, left",
                alone,
                "components of the head",
            ),
            _curves(
                "Energy of all heads side by side",
                "Where QKᵀ rises sooner than Q and K, heads together use fewer directions than they have.",
                "Collaborate, Fig. 1, right",
                joined,
                "components of all heads",
            ),
            _curves(
                "What a shared dk captures",
                "A conversion at dk lies between the two; its relative error is the root of what is missing.",
                "bounds of this toolkit, docs/analysis.md",
                [
                    _layers_panel("most that dk can capture", labels, last, "shared"),
                    _layers_panel("what dk captures at least", labels, last, "unshared"),
                ],
                "dk",
                f"share of energy, {weighing}",
            ),
        ),
        "dk for 90, 95, 99 % of the energy of scores in every layer: at least "
        f"{', '.join(map(str, least))}, at most {', '.join(map(str, most))} ({weighing}).",
        f"--dk {most[0]}",
    )


def _values(study: Study) -> _Part:
    """Measure values and outputs."""
    labels = study.labels(site.name for site in study.sites)
    values, note = _weighed(study, value_energy)
    weighing, last = list(values.items())[-1]
    narrow = [max(module.rank(share) for module in last) for share in SHARES]
    return _Part(
        "For values and outputs it is the share of what heads add to the residual stream, and the dv named “narrow "
        "values” captures it." + note,
        _widths("dv", DV, values, labels),
        (
            _curves(
                "Energy of each head's values and outputs",
                "A curve that rises late is a head that needs all of its values.",
                "of this toolkit, docs/method.md",
                [_heads_panel(f"W_V W_O, {weighed}", modules, "heads") for weighed, modules in values.items()],
                "channels of the head",
            ),
            _curves(
                "What dv captures",
                "The relative error of a conversion at dv is the root of what is missing on the right.",
                "of this toolkit, docs/method.md",
                [
                    _layers_panel("most that dv can capture", labels, last, "joined"),
                    _layers_panel("what narrow values capture", labels, last, "narrow"),
                ],
                "dv",
                f"share of energy, {weighing}",
            ),
        ),
        "dv for 90, 95, 99 % of the energy of values and outputs in every layer: "
        f"{', '.join(map(str, narrow))} ({weighing}).",
        f"--dv {narrow[0]}",
    )


def _neurons(study: Study) -> _Part:
    """Measure feed-forward blocks."""
    batches, progress = study.some(study.look.input_sequences), study.progress("neurons")
    blocks = feed_forward_energy(study.model, batches, blocks=study.blocks, progress=progress)
    labels = study.labels(blocks)
    records = [_neurons_record(*row) for row in zip(labels, *zip(*blocks.items(), strict=True), strict=True)]
    needed = [max(block.rank(share) for block in blocks.values()) for share in SHARES]
    widest = max(block.width for block in study.blocks)
    note, actions = _dff_advice(study, *needed[1:])
    return _Part(
        "For a feed-forward block it is the share of the variance of its output that dff of its neurons keep, chosen "
        "and refitted as in a conversion, each block by itself, and measured on sequences that they were not fitted "
        f"to (an eighth); the relative error is the root of what is missing.{note}",
        Table.of("dff", "Suggested --dff for 90, 95 and 99 % of the energy, in sixteenths", records),
        (
            Curves(
                "What a block loses at dff",
                "All blocks of a conversion have the same dff, so the highest curve says how many are enough.",
                "of this toolkit, docs/method.md",
                (Panel("", tuple(map(_losses, labels, blocks.values()))),),
                "dff, neurons kept",
                "relative error of the block's output",
                bottom=0.0,
            ),
        ),
        "dff for 90, 95, 99 % of the energy of the output of every feed-forward block: "
        f"{', '.join(map(str, needed))} of {widest} neurons ({study.data}).",
        actions=actions,
    )


def _neurons_record(label: str, name: str, block: FeedForwardEnergy) -> dict[str, Cell]:
    record: dict[str, Cell] = {"layer": label, "block": name, "neurons": int(block.widths[-1])}
    return record | {f"{100 * share:.0f} % [dff]": rank for share, rank in block.ranks().items()}


def _losses(label: str, block: FeedForwardEnergy) -> Curve:
    return Curve(f"layer {label}", tuple(block.widths.tolist()), tuple(block.errors.tolist()))


def _dff_advice(study: Study, dff: int, more: int) -> tuple[str, tuple[str, ...]]:
    """Return why no conversion takes a dff, or nothing, and advice to begin with this one where it is a gain.

    Args:
        study: model and data.
        dff: neurons for 95 % of the energy.
        more: neurons for 99 %.
    """
    width = min(block.width for block in study.blocks)
    try:
        narrower_config(study.model, study.blocks, max(1, width // 2))
    except UnsupportedModelError as error:
        return f" No conversion makes these blocks narrower: {error}.", ()
    if dff >= width:
        return "", ()
    texts, path, count, drawn = "texts", "texts.txt", "a thousand sentences or more", "random tokens"
    if study.model.main_input_name != "input_ids":
        texts, path, count, drawn = "inputs", "DIR", "as many as there are", "noise"
    advice = (
        f"To make feed-forward blocks smaller, begin with collab-compress --dff {dff} --calibration {path}: every "
        f"block then keeps 95 % of the energy of its output (99 % with --dff {more}). Calibration needs {texts} like "
        f"those that the model reads, {count}; with {drawn} it loses quality."
    )
    return "", (advice,)


def _weighed(study: Study, measure: Callable[..., dict[str, Any]]) -> tuple[Weighed, str]:
    """Return energies of bare weights, and weighed by inputs, or a note on why inputs allow no weighing."""
    energies = {WEIGHTS: list(measure(study.model).values())}
    batches = study.some(study.look.input_sequences)
    try:
        energies[INPUTS] = list(measure(study.model, batches, progress=study.progress("energy")).values())
    except HeadError as error:  # as for a single token, whose covariance is 0
        return energies, f" These inputs allow no weighing: {error}."
    return energies, ""


def _widths(width: str, curves: Mapping[str, str], energies: Weighed, labels: Sequence[str]) -> Table:
    """Return the widths that each curve suggests for each module."""
    records = []
    for weighing, modules in energies.items():
        for label, module in zip(labels, modules, strict=True):
            record: dict[str, Cell] = {"layer": label, "energy": weighing}
            for name, title in curves.items():
                for share, rank in module.ranks(name).items():
                    record[f"{title}, {100 * share:.0f} % [{width}]"] = rank
            records.append(record)
    return Table.of(width, f"Suggested --{width} for 90, 95 and 99 % of the energy", records)


def _curves(
    title: str, reading: str, source: str, panels: Sequence[Panel], x_label: str, y_label: str = "share of energy"
) -> Curves:
    return Curves(title, reading, source, tuple(panels), x_label, y_label, bottom=0.0, top=1.0)


def _heads_panel(title: str, modules: Sequence[Any], name: str) -> Panel:
    """Return the curves of some heads, and the mean of all, from the field of this name, (H, d+1)."""
    heads = [head for module in modules for head in getattr(module, name)]
    lines = [curve("", head, weight="faint") for head in heads[:: -(-len(heads) // HEADS)]]
    return Panel(title, (*lines, curve("mean of heads", _mean(heads), weight="bold")))


def _layers_panel(
    title: str, labels: Sequence[str], modules: Sequence[Any], name: str, with_mean: bool = False
) -> Panel:
    """Return the curve of each module, the field of this name, and their mean where it is wanted."""
    shares = [getattr(module, name) for module in modules]
    lines = [curve(f"layer {label}", layer) for label, layer in zip(labels, shares, strict=True)]
    return Panel(title, (*lines, curve("mean", _mean(shares), weight="bold")) if with_mean else tuple(lines))


def _mean(curves: Sequence[Tensor]) -> Tensor:
    """Return the mean of cumulative shares of different lengths; a curve is 1 beyond its end."""
    padded: Tensor = torch.nn.utils.rnn.pad_sequence(list(curves), padding_value=1.0)
    return padded.mean(1)
