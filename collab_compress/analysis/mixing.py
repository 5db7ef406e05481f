"""Mixing matrices and alphas as matrices for heatmaps, and their skew-symmetry and effective rank."""

from collections.abc import Collection

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis.energy import ScoreParts, score_parts
from collab_compress.architectures import KINDS, Kind
from collab_compress.errors import HeadError
from collab_compress.heads import alphas_of


def mixing_matrices(
    model: PreTrainedModel, *, order: bool = False, kinds: Collection[Kind] = KINDS
) -> dict[str, Tensor]:
    """Return the mixing matrix M of every attention module: how much each head uses each query/key component.

    Figure 2 of "Multi-Head Attention: Collaborate Instead of Concatenate". In a dense module each head
    uses its own d components and no other (a). Each component is scaled by the length of its query and key vectors,
    and its largest entry is positive, so that entries tell how strong it is in each head. The parameters themselves
    leave that open: what M gains, the projections can lose.

    Args:
        model: stock or converted.
        order: put the strongest component first, instead of as they lie in the model.
        kinds: which kinds of attention.

    Returns:
        Module path → (H, R), or (H, H·d) for a dense module, in float64 on the CPU.

    Raises:
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.
    """
    matrices = {}
    for parts in score_parts(model, kinds):
        matrix = _strengths(parts)
        if order:
            matrix = matrix[:, matrix.square().sum(0).argsort(descending=True, stable=True)]
        matrices[parts.site.name] = matrix
    return matrices


def alpha_matrices(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the alphas of every attention module whose heads are mixed; row i makes the output of head i.

    Figures 3 and 4 of "Multi-Head Rotation": diagonal where heads are picked, filled where they are mixed.

    Args:
        model: with heads mixed by `mix_heads_`.

    Returns:
        Module path → (H, H), in float64 on the CPU.

    Raises:
        HeadError: no heads are mixed.
        UnsupportedModelError: the model's family is not known.
    """
    alphas = alphas_of(model)
    if not alphas:
        raise HeadError(f"{type(model).__name__} has no alphas; mix_heads_(model) adds them")
    return {name: matrix.detach().double().cpu() for name, matrix in alphas.items()}


def skew_symmetry(matrix: Tensor) -> float:
    r"""Return how close a matrix is to skew-symmetric, its diagonal aside.

    $$\frac{\|A - A^\top\|_F^2}{\|A - A^\top\|_F^2 + \|A + A^\top\|_F^2}$$

    over entries off the diagonal. "Multi-Head Rotation" sees it in trained alphas (Fig. 4).

    Args:
        matrix: (H, H).

    Returns:
        1 for skew-symmetric, 0 for symmetric, and for one without entries off the diagonal; independent entries
        give 0.5 on average.

    Raises:
        HeadError: the matrix is not square.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise HeadError(f"got {tuple(matrix.shape)}, expected a square matrix (H, H)")
    off = matrix.detach().double() - torch.diag(matrix.detach().double().diagonal())
    skew, symmetric = (off - off.mT).square().sum(), (off + off.mT).square().sum()
    total = skew + symmetric
    return float(skew / total) if total > 0 else 0.0


def effective_rank(matrix: Tensor) -> float:
    r"""Return the effective rank: the exponential of the entropy of the singular values' shares.

    $$\exp\Big(-\sum_k p_k \log p_k\Big), \quad p_k = \sigma_k / \sum_l \sigma_l$$

    Roy and Vetterli, "The effective rank: a measure of effective dimensionality", 2007.

    Args:
        matrix: (m, n).

    Returns:
        Between 1 and min(m, n), which equal singular values reach; 0 for a zero matrix.

    Raises:
        HeadError: not a matrix.
    """
    if matrix.ndim != 2:
        raise HeadError(f"got {tuple(matrix.shape)}, expected a matrix")
    values = torch.linalg.svdvals(matrix.detach().double())
    total = values.sum()
    return float(torch.special.entr(values / total).sum().exp()) if total > 0 else 0.0


def _strengths(parts: ScoreParts) -> Tensor:
    """Return mixing entries times the lengths of their components' query and key vectors, (H, R)."""
    # a query of T_i is that of the component times its entry in M
    lengths = parts.tensor.query.norm(dim=1) * parts.tensor.key.norm(dim=1)  # (H, R or d)
    if parts.mixing is None:
        matrix: Tensor = torch.block_diag(*lengths[:, None])
        return matrix
    largest = parts.mixing.gather(0, parts.mixing.abs().argmax(0, keepdim=True))  # (1, R)
    strengths: Tensor = lengths * parts.mixing.sign() * torch.where(largest < 0, -1.0, 1.0)
    return strengths
