"""Sections on what heads share: energy, mixing matrices and alphas, content against context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeAlias

import torch
from torch import Tensor

from collab_compress.analysis import (
    alpha_matrices,
    content_share,
    effective_rank,
    head_energy,
    mixing_matrices,
    skew_symmetry,
    value_energy,
)
from collab_compress.analysis.energy import SHARES
from collab_compress.conversion.expand import read_factors
from collab_compress.errors import HeadError
from collab_compress.heads import alphas_of
from collab_compress.report.section import Cell, Curves, Heatmaps, Omitted, Panel, Section, Table, curve
from collab_compress.report.study import Study

HEADS = 72  # drawn at most
DK = {"product": "sum of heads", "shared": "at least", "unshared": "at most"}  # curves that suggest a dk
DV = {"joined": "at least", "narrow": "narrow values"}
WEIGHTS, INPUTS = "bare weights", "weighed by inputs"
CUT = 0.98  # quantile of entries at which the colour scale ends; a few entries are far larger

Weighed: TypeAlias = dict[str, list[Any]]  # what energies are weighed by → energies of the modules


def energy(study: Study) -> Section | Omitted:
    """Return the energy of queries, keys and their products, and of values and outputs; suggest a dk and a dv."""
    labels = study.labels(site.name for site in study.sites)
    scores, note = _weighed(study, head_energy)
    values, value_note = _weighed(study, value_energy)
    (weighing, last), (value_weighing, value_last) = list(scores.items())[-1], list(values.items())[-1]
    least = [max(module.rank(share, "shared") for module in last) for share in SHARES]
    most = [max(module.rank(share, "unshared") for module in last) for share in SHARES]
    narrow = [max(module.rank(share) for module in value_last) for share in SHARES]
    alone, joined = [], []
    for weighed, modules in scores.items():
        for name, title in (("query", "Q"), ("key", "K"), ("product", "QKᵀ")):
            alone.append(_heads_panel(f"{title}, {weighed}", modules, name))
            joined.append(_layers_panel(f"{title}, {weighed}", labels, modules, f"joined_{name}", with_mean=True))
    action = (
        f"To make attention smaller, begin with collab-compress --dk {most[0]} --dv {narrow[0]}: every layer "
        "then keeps 90 % of the energy of its scores and of its values."
    )
    return Section(
        "energy",
        "How many dimensions attention needs",
        "Energy is the share of squared singular values that the first components hold. Weighed by inputs (of "
        f"{min(study.look.input_sequences, study.sequences):,} sequences), it is the energy of the weights' outputs "
        "on real inputs, as in a conversion; most directions of the weights never meet an input. The sum of all "
        "heads (W_Q W_Kᵀ) needs few components, but that says little of each head. No conversion captures the share "
        "below the dk named “at least”; the dk named “at most” captures it even before heads share anything. For "
        "values and outputs it is the share of what heads add to the residual stream, and the dv named “narrow "
        "values” captures it." + (note or value_note),
        "Collaborate, Fig. 1; values: docs/method.md",
        tables=(_widths("dk", DK, scores, labels), _widths("dv", DV, values, labels)),
        pictures=(
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
                    _layers_panel("most that dv can capture", labels, value_last, "joined"),
                    _layers_panel("what narrow values capture", labels, value_last, "narrow"),
                ],
                "dv",
                f"share of energy, {value_weighing}",
            ),
        ),
        highlights=(
            "dk for 90, 95, 99 % of the energy of scores in every layer: at least "
            f"{', '.join(map(str, least))}, at most {', '.join(map(str, most))} ({weighing}).",
            "dv for 90, 95, 99 % of the energy of values and outputs in every layer: "
            f"{', '.join(map(str, narrow))} ({value_weighing}).",
        ),
        actions=() if study.converted else (action,),
    )


def mixing(study: Study) -> Section | Omitted:
    """Return mixing matrices and alphas, and what they say in numbers."""
    matrices = mixing_matrices(study.model, order=True) if read_factors(study.model) else {}
    alphas = alpha_matrices(study.model) if alphas_of(study.model) else {}
    if not matrices and not alphas:
        return Omitted("heads of a dense model share no components, and they are not mixed: there is no such matrix")
    tables, pictures, highlights = [], [], []
    if matrices:
        users = {name: _users(matrix) for name, matrix in matrices.items()}
        records: list[dict[str, Cell]] = [
            {
                "layer": study.label(name),
                "heads": len(matrix),
                "components R": matrix.shape[1],
                "effective rank": effective_rank(matrix),
                "heads that use a component": users[name],
            }
            for name, matrix in matrices.items()
        ]
        sizes = torch.cat([matrix.abs().flatten() for matrix in matrices.values()])
        reach = float(sizes[sizes > 0].quantile(CUT)) if bool(sizes.any()) else 1.0
        tables.append(Table.of("components", "Mixing matrices", records))
        pictures.append(
            Heatmaps(
                "Mixing matrices",
                "A column of one strong cell belongs to one head, one with several to several; the largest 2 % are "
                "cut off.",
                "Collaborate, Fig. 2",
                study.head_maps(matrices),
                low=-reach,
                high=reach,
                scale="diverging",
                column_label="component, strongest first",
            )
        )
        heads = max(map(len, matrices.values()))
        highlights.append(f"A shared component serves {fmean(users.values()):.1f} of {heads} heads on average.")
    if alphas:
        skew = {name: skew_symmetry(matrix) for name, matrix in alphas.items()}
        reach = max(float(matrix.abs().max()) for matrix in alphas.values())
        tables.append(_alpha_table(study, alphas, skew))
        pictures.append(
            Heatmaps(
                "Alphas",
                "A strong diagonal keeps heads as they are; cells off it mix head j into head i.",
                "Rotation, Figs. 3–4",
                study.head_maps(alphas),
                low=-reach,
                high=reach,
                scale="diverging",
                row_label="head i that leaves",
                column_label="head j that enters",
            )
        )
        highlights.append(f"Alphas are skew-symmetric by {fmean(skew.values()):.2f} (0 to 1, 0.5 by chance).")
    return Section(
        "mixing",
        "What heads share",
        "A row is a head; an entry says how strong a component of the shared queries and keys is in it, or how much "
        "of another head leaves as this one (alphas). Effective rank is the exponential of the entropy of singular "
        "values. Skew-symmetry is of the entries off the diagonal.",
        "Collaborate, Fig. 2; Rotation, Figs. 3–4",
        tables=tuple(tables),
        pictures=tuple(pictures),
        highlights=tuple(highlights),
    )


def content(study: Study) -> Section | Omitted:
    """Return what share of each head's score variance depends on the key alone."""
    shares = content_share(study.model, study.some(study.look.input_sequences), progress=study.progress("content"))
    contents = {name: module.content for name, module in shares.items()}
    contexts = {name: module.context for name, module in shares.items()}
    records: list[dict[str, Cell]] = [
        {
            "layer": study.label(name),
            "content [%]": float(100 * module.content.mean()),
            "context [%]": float(100 * module.context.mean()),
            "overlap [%]": float(100 * module.overlap.mean()),
            "largest content [%]": float(100 * module.content.max()),
            "of head": int(module.content.argmax()),
        }
        for name, module in shares.items()
    ]
    mean = float(torch.cat(list(contents.values())).mean())
    return Section(
        "content",
        "Content against context",
        f"The variance of a head's scores over the keys that a query sees (in "
        f"{min(study.look.input_sequences, study.sequences):,} sequences), split into what "
        "depends on the key alone (content, v·y) and what depends on query and key (context). The rest is twice "
        "their covariance, negative where they oppose each other. A conversion moves what all queries share from "
        "context into content, so compare converted models with converted ones.",
        "Collaborate, section 2.2",
        tables=(Table.of("shares", "Shares of score variance, mean over heads", records),),
        pictures=(
            Heatmaps(
                "Content share of each head",
                "Strong cells are heads that look for certain tokens, whatever the query.",
                "Collaborate, section 2.2",
                (study.layer_map("", contents),),
                high=max(0.0, *(float(share.max()) for share in contents.values())),
                row_label="layer",
            ),
            Heatmaps(
                "Context share of each head",
                "Strong cells are heads that look for what suits the query; above 1 content opposes it.",
                "Collaborate, section 2.2",
                (study.layer_map("", contexts),),
                high=max(1.0, *(float(share.max()) for share in contexts.values())),
                row_label="layer",
            ),
        ),
        highlights=(f"Content makes {100 * mean:.1f} % of the variance of scores, mean over heads.",),
    )


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


def _alpha_table(study: Study, alphas: Mapping[str, Tensor], skew: Mapping[str, float]) -> Table:
    records: list[dict[str, Cell]] = []
    for name, matrix in alphas.items():
        heads = len(matrix)
        off_diagonal = float(matrix.abs().sum() - matrix.diagonal().abs().sum())
        records.append(
            {
                "layer": study.label(name),
                "heads": heads,
                "mean of diagonal": float(matrix.diagonal().mean()),
                "mean size off diagonal": off_diagonal / (heads * (heads - 1)) if heads > 1 else None,
                "skew-symmetry": skew[name],
                "effective rank": effective_rank(matrix),
            }
        )
    return Table.of("alphas", "Alphas", records)


def _users(matrix: Tensor) -> float:
    """Return how many heads use a component, mean over used components: 1 for one head, H for all alike."""
    squares = matrix.square()
    used = squares[:, squares.sum(0) > 0]
    if not used.numel():
        return 0.0
    return float((used.sum(0).square() / used.square().sum(0)).mean())
