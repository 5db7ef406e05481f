"""What heads share: mixing matrices of converted attention, and alphas."""

import torch
from torch import Tensor

from collab_compress.analysis import alpha_matrices, effective_rank, mixing_matrices, skew_symmetry
from collab_compress.heads import alphas_of
from collab_compress.report.section import Cell, Column, Heatmaps, Omitted, Section, Table, heatmap, numbered
from collab_compress.report.study import Study

CUT = 0.98  # share of entries that the scale of colours reaches to; a few are far larger


def mixing(study: Study) -> Section | Omitted:
    """Show mixing matrices and alphas as heatmaps, with what can be read off them."""
    matrices = mixing_matrices(study.model, order=True) if study.converted else {}
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
