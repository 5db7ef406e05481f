"""Sections on what heads share: mixing matrices and alphas, content against context."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import torch
from torch import Tensor

from collab_compress.analysis import (
    alpha_matrices,
    content_share,
    effective_rank,
    mixing_matrices,
    skew_symmetry,
)
from collab_compress.conversion.expand import read_factors
from collab_compress.heads import alphas_of
from collab_compress.report.section import Cell, Heatmaps, Omitted, Section, Table
from collab_compress.report.study import Study

CUT = 0.98  # quantile of entries at which the colour scale ends; a few entries are far larger


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
