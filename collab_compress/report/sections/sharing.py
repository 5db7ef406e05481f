"""What heads share: the dimensions they need, mixing matrices and alphas, content against context."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collab_compress.analysis import (
    ContentShare,
    Energy,
    ValueEnergy,
    alpha_matrices,
    content_share,
    effective_rank,
    head_energy,
    mixing_matrices,
    skew_symmetry,
    value_energy,
)
from collab_compress.analysis.energy import SHARES, Joined
from collab_compress.conversion.expand import read_factors
from collab_compress.errors import HeadError
from collab_compress.heads import alphas_of
from collab_compress.report.section import (
    Cell,
    Column,
    Curve,
    Curves,
    Heatmaps,
    Omitted,
    Panel,
    Section,
    Table,
    heatmap,
    numbered,
    ragged,
)
from collab_compress.report.study import Study

HEADS = 72  # that are drawn at most
WEIGHED = {"weights": "bare weights", "inputs": "weighed by inputs"}
CURVES: dict[Joined, str] = {"product": "sum of heads", "shared": "at least", "unshared": "at most"}
CUT = 0.98  # share of entries that the scale of colours reaches to; a few are far larger


def energy(study: Study) -> Section | Omitted:
    """Show the energy of queries, keys and their products, and of values and outputs; suggest a dk and a dv."""
    scores, values = _weighed(study, head_energy), _weighed(study, value_energy)
    labels = study.labels(next(iter(scores.found.values())))
    by_weighing = {weighing: list(energies.values()) for weighing, energies in scores.found.items()}
    of_values = {weighing: list(energies.values()) for weighing, energies in values.found.items()}
    weighing, last = list(by_weighing.items())[-1]
    value_weighing, value_last = list(of_values.items())[-1]
    least, most = (
        [max(each.rank(share, curve) for each in last) for share in SHARES] for curve in ("shared", "unshared")
    )
    enough = [max(each.rank(share) for each in value_last) for share in SHARES]
    return Section(
        "energy",
        "How many dimensions attention needs",
        "Energy is the share of squared singular values that the first components hold. Weighed by inputs (of "
        f"{min(study.look.input_sequences, study.sequences):,} sequences), it is that of what the weights make of "
        "their real inputs, as a conversion weighs it; most directions of the weights never meet an input. The sum "
        "of all heads (W_Q W_Kᵀ) needs few components, but that says little of each head. No conversion captures the "
        "share below the dk named “at least”; the dk named “at most” captures it even before heads share anything. "
        "For values and outputs it is the share of what heads add to the residual stream, and the dv named “narrow "
        "values” is what captures it." + (scores.note or values.note),
        "Collaborate, Fig. 1; values: docs/method.md",
        tables=(_suggestions(by_weighing, labels), _value_suggestions(of_values, labels)),
        pictures=(
            _of_heads(by_weighing),
            _of_all(by_weighing, labels),
            _bounds(last, labels, weighing),
            _of_value_heads(of_values),
            _narrow(value_last, labels, value_weighing),
        ),
        highlights=(
            "dk for 90, 95, 99 % of the energy of scores in every layer: at least "
            f"{', '.join(map(str, least))}, at most {', '.join(map(str, most))} ({WEIGHED[weighing]}).",
            "dv for 90, 95, 99 % of the energy of values and outputs in every layer: "
            f"{', '.join(map(str, enough))} ({WEIGHED[value_weighing]}).",
        ),
        actions=()
        if study.converted
        else (
            f"To make attention smaller, begin with collab-compress --dk {most[0]} --dv {enough[0]}: every layer "
            "then keeps 90 % of the energy of its scores and of its values.",
        ),
    )


class _Weighed(NamedTuple):
    """Energies of modules by what they are weighed with, and why one of these is missing."""

    found: dict[str, dict[str, Any]]
    note: str


def _weighed(study: Study, measure: Callable[..., dict[str, Any]]) -> _Weighed:
    """Measure energy of bare weights, and weighed by inputs where these allow it."""
    found = {"weights": measure(study.model)}
    try:
        batches = study.some(study.look.input_sequences)
        found["inputs"] = measure(study.model, batches, progress=study.progress("energy"))
    except HeadError as error:  # as for a single token, whose covariance is 0
        return _Weighed(found, f" These inputs allow no weighing: {error}.")
    return _Weighed(found, "")


def mixing(study: Study) -> Section | Omitted:
    """Show mixing matrices and alphas as heatmaps, with what can be read off them."""
    matrices = mixing_matrices(study.model, order=True) if read_factors(study.model) else {}
    alphas = alpha_matrices(study.model) if alphas_of(study.model) else {}
    if not matrices and not alphas:
        return Omitted("heads of a dense model share no components, and they are not mixed: there is no such matrix")
    tables, pictures, highlights = [], [], []
    if matrices:
        tables.append(_mixing_table(study, matrices))
        pictures.append(_mixing_picture(study, matrices))
        shared = [_users(matrix) for matrix in matrices.values()]
        heads = max(map(len, matrices.values()))
        highlights.append(f"A shared component serves {sum(shared) / len(shared):.1f} of {heads} heads on average.")
    if alphas:
        tables.append(_alpha_table(study, alphas))
        pictures.append(_alpha_picture(study, alphas))
        skew = [skew_symmetry(matrix) for matrix in alphas.values()]
        highlights.append(f"Alphas are skew-symmetric by {sum(skew) / len(skew):.2f} (0 to 1, 0.5 by chance).")
    return Section(
        "mixing",
        "What heads share",
        "A row is a head; an entry says how strong a component of the shared queries and keys is in it, or how much "
        "of another head leaves as this one (alphas). Effective rank is the exponential of the entropy of singular "
        "values. Skew-symmetry is of the entries off the diagonal.",
        "Collaborate, Fig. 2; Rotation, Figs. 3–4",
        tuple(tables), tuple(pictures), tuple(highlights),
    )  # fmt: skip


def content(study: Study) -> Section | Omitted:
    """Show what share of each head's score variance depends on the key alone."""
    found = content_share(study.model, study.some(study.look.input_sequences), progress=study.progress("content"))
    labels = study.labels(found)
    count = min(study.look.input_sequences, study.sequences)
    mean = float(torch.cat([shares.content for shares in found.values()]).mean())
    return Section(
        "content",
        "Content against context",
        f"The variance of a head's scores over the keys that a query sees (in {count:,} sequences), split into what "
        "depends on the key alone (content, v·y) and what depends on query and key (context). What is left of 1 is "
        "twice their covariance, negative where they oppose each other. A conversion moves what all queries share "
        "from context into content, so compare converted models with converted ones.",
        "Collaborate, section 2.2",
        (_shares_table(labels, list(found.values())),),
        tuple(_shares_picture(labels, list(found.values()), name) for name in ("content", "context")),
        (f"Content makes {100 * mean:.1f} % of the variance of scores, mean over heads.",),
    )


def _suggestions(found: dict[str, list[Energy]], labels: Sequence[str]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for weighing, energies in found.items():
        for label, each in zip(labels, energies, strict=True):
            rows.append(
                (label, WEIGHED[weighing], *(rank for curve in CURVES for rank in each.ranks(curve).values()))
            )
    columns = [Column(f"{name}, {100 * share:.0f} %", "dk") for name in CURVES.values() for share in SHARES]
    return Table(
        "dk", "Suggested --dk for 90, 95 and 99 % of the energy", (Column("layer"), Column("energy"), *columns),
        tuple(rows),
    )  # fmt: skip


def _value_suggestions(found: dict[str, list[ValueEnergy]], labels: Sequence[str]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for weighing, energies in found.items():
        for label, each in zip(labels, energies, strict=True):
            rows.append((label, WEIGHED[weighing], *each.ranks("joined").values(), *each.ranks().values()))
    names = ("at least", "narrow values")
    columns = [Column(f"{name}, {100 * share:.0f} %", "dv") for name in names for share in SHARES]
    return Table(
        "dv", "Suggested --dv for 90, 95 and 99 % of the energy", (Column("layer"), Column("energy"), *columns),
        tuple(rows),
    )  # fmt: skip


def _of_heads(found: dict[str, list[Energy]]) -> Curves:
    panels = []
    for weighing, energies in found.items():
        for name, title in (("query", "Q"), ("key", "K"), ("product", "QKᵀ")):
            curves = [head for each in energies for head in getattr(each, name)]
            drawn = curves[:: -(-len(curves) // HEADS)]
            panels.append(
                Panel(
                    f"{title}, {WEIGHED[weighing]}",
                    (
                        *(_curve("", head, "faint") for head in drawn),
                        _curve("mean of heads", _mean(curves), "bold"),
                    ),
                )
            )
    return Curves(
        "Energy of each head",
        "A curve that rises late is a head that is not low-rank by itself.",
        "Collaborate, Fig. 1, left",
        tuple(panels), "components of the head", "share of energy", 0.0, 1.0,
    )  # fmt: skip


def _of_all(found: dict[str, list[Energy]], labels: Sequence[str]) -> Curves:
    panels = []
    for weighing, energies in found.items():
        for name, title in (("joined_query", "Q"), ("joined_key", "K"), ("joined_product", "QKᵀ")):
            curves = [getattr(each, name) for each in energies]
            lines = [_curve(f"layer {label}", curve) for label, curve in zip(labels, curves, strict=True)]
            panels.append(Panel(f"{title}, {WEIGHED[weighing]}", (*lines, _curve("mean", _mean(curves), "bold"))))
    return Curves(
        "Energy of all heads side by side",
        "Where QKᵀ rises sooner than Q and K, heads together use fewer directions than they have.",
        "Collaborate, Fig. 1, right",
        tuple(panels), "components of all heads", "share of energy", 0.0, 1.0,
    )  # fmt: skip


def _bounds(energies: Sequence[Energy], labels: Sequence[str], weighing: str) -> Curves:
    titles = {"shared": "most that dk can capture", "unshared": "what dk captures at least"}
    return Curves(
        "What a shared dk captures",
        "A conversion at dk lies between the two; its relative error is the root of what is missing.",
        "bounds of this toolkit, docs/analysis.md",
        _by_layer(energies, labels, titles), "dk", f"share of energy, {WEIGHED[weighing]}", 0.0, 1.0,
    )  # fmt: skip


def _of_value_heads(found: dict[str, list[ValueEnergy]]) -> Curves:
    panels = []
    for weighing, energies in found.items():
        curves = [head for each in energies for head in each.heads]
        drawn = curves[:: -(-len(curves) // HEADS)]
        lines = (*(_curve("", head, "faint") for head in drawn), _curve("mean of heads", _mean(curves), "bold"))
        panels.append(Panel(f"W_V W_O, {WEIGHED[weighing]}", lines))
    return Curves(
        "Energy of each head's values and outputs",
        "A curve that rises late is a head that needs all of its values.",
        "of this toolkit, docs/method.md",
        tuple(panels), "channels of the head", "share of energy", 0.0, 1.0,
    )  # fmt: skip


def _narrow(energies: Sequence[ValueEnergy], labels: Sequence[str], weighing: str) -> Curves:
    titles = {"joined": "most that dv can capture", "narrow": "what narrow values capture"}
    return Curves(
        "What dv captures",
        "The relative error of a conversion at dv is the root of what is missing on the right.",
        "of this toolkit, docs/method.md",
        _by_layer(energies, labels, titles), "dv", f"share of energy, {WEIGHED[weighing]}", 0.0, 1.0,
    )  # fmt: skip


def _by_layer(
    energies: Sequence[Energy] | Sequence[ValueEnergy], labels: Sequence[str], titles: dict[str, str]
) -> tuple[Panel, ...]:
    """Draw a panel for each of some attributes of the energies, a curve for each layer."""
    return tuple(
        Panel(
            title,
            tuple(
                _curve(f"layer {label}", getattr(each, name)) for label, each in zip(labels, energies, strict=True)
            ),
        )
        for name, title in titles.items()
    )


def _curve(name: str, shares: Tensor, weight: str = "line") -> Curve:
    return Curve(name, tuple(range(len(shares))), shares.tolist(), weight)  # type: ignore[arg-type]


def _mean(curves: Sequence[Tensor]) -> Tensor:
    """Average cumulative shares of different lengths; where one has ended, it holds everything."""
    longest = max(map(len, curves))
    return torch.stack([torch.cat([each, each.new_ones(longest - len(each))]) for each in curves]).mean(0)


def _mixing_table(study: Study, matrices: dict[str, Tensor]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (study.label(name), len(matrix), matrix.shape[1], effective_rank(matrix), _users(matrix))
        for name, matrix in matrices.items()
    ]
    columns = ("layer", "heads", "components R", "effective rank", "heads that use a component")
    return Table("components", "Mixing matrices", tuple(map(Column, columns)), tuple(rows))


def _mixing_picture(study: Study, matrices: dict[str, Tensor]) -> Heatmaps:
    sizes = torch.cat([matrix.abs().flatten() for matrix in matrices.values()])
    reach = float(sizes[sizes > 0].quantile(CUT)) if bool(sizes.any()) else 1.0
    return Heatmaps(
        "Mixing matrices",
        "A column of one strong cell belongs to one head, one with several to several; the largest 2 % are cut off.",
        "Collaborate, Fig. 2",
        tuple(
            heatmap(f"layer {study.label(name)}", matrix, numbered(len(matrix)))
            for name, matrix in matrices.items()
        ),
        -reach, reach, "diverging", "head", "component, strongest first",
    )  # fmt: skip


def _alpha_table(study: Study, alphas: dict[str, Tensor]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (study.label(name), len(matrix), float(matrix.diagonal().mean()), _off(matrix), skew_symmetry(matrix),
         effective_rank(matrix))
        for name, matrix in alphas.items()
    ]  # fmt: skip
    columns = ("layer", "heads", "mean of diagonal", "mean size off diagonal", "skew-symmetry", "effective rank")
    return Table("alphas", "Alphas", tuple(map(Column, columns)), tuple(rows))


def _alpha_picture(study: Study, alphas: dict[str, Tensor]) -> Heatmaps:
    reach = max(float(matrix.abs().max()) for matrix in alphas.values())
    return Heatmaps(
        "Alphas",
        "A strong diagonal keeps heads as they are; what lies off it mixes head j into head i.",
        "Rotation, Figs. 3–4",
        tuple(
            heatmap(f"layer {study.label(name)}", matrix, *[numbered(len(matrix))] * 2)
            for name, matrix in alphas.items()
        ),
        -reach, reach, "diverging", "head i that leaves", "head j that enters",
    )  # fmt: skip


def _users(matrix: Tensor) -> float:
    """How many heads use a component, mean over components that are used: 1 for one head, H for all alike."""
    squares = matrix.square()
    used = squares[:, squares.sum(0) > 0]
    if not used.numel():
        return 0.0
    return float((used.sum(0).square() / used.square().sum(0)).mean())


def _off(matrix: Tensor) -> float | None:
    heads = len(matrix)
    size = matrix.abs().sum() - matrix.diagonal().abs().sum()
    return float(size) / (heads * (heads - 1)) if heads > 1 else None


def _shares_table(labels: list[str], found: list[ContentShare]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (label, *(float(100 * part.mean()) for part in (shares.content, shares.context, shares.overlap)),
         float(100 * shares.content.max()), int(shares.content.argmax()))
        for label, shares in zip(labels, found, strict=True)
    ]  # fmt: skip
    columns = (
        Column("layer"), Column("content", "%"), Column("context", "%"), Column("overlap", "%"),
        Column("largest content", "%"), Column("of head"),
    )  # fmt: skip
    return Table("shares", "Shares of score variance, mean over heads", columns, tuple(rows))


def _shares_picture(labels: list[str], found: list[ContentShare], name: str) -> Heatmaps:
    reading = {
        "content": "Strong cells are heads that look for certain tokens, whoever asks.",
        "context": "Strong cells are heads that look for what suits the token that asks; above 1 content opposes it.",
    }[name]
    shares = [getattr(each, name) for each in found]
    return Heatmaps(
        f"{name.capitalize()} share of each head", reading, "Collaborate, section 2.2",
        (ragged("", shares, labels),), 0.0, max(1.0 if name == "context" else 0.0, *(float(s.max()) for s in shares)),
        row_label="layer", column_label="head",
    )  # fmt: skip
