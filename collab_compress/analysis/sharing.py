"""What heads share: mixing matrices and alphas."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis.energy import score_factors
from collab_compress.errors import HeadError
from collab_compress.heads import alphas_of


def mixing_matrices(model: PreTrainedModel, *, order: bool = False) -> dict[str, Tensor]:
    """Return the mixing matrix M of every attention module: how much each head uses each query/key component.

    Figure 2 of "Multi-Head Attention: Collaborate Instead of Concatenate" ((a): in a dense module each head uses its
    own d components alone). The scale of M is arbitrary, as the projections can undo it: here each component is
    multiplied by the norms of its query and key vectors, and its largest entry is positive.

    Args:
        model: stock or converted.
        order: put the strongest component first, instead of the model's order.

    Returns:
        Module path → (H, R), or (H, H·d) for a dense module, in float64 on the CPU.

    Raises:
        UnsupportedModelError: the model's family is not known, or it has a rotary embedding.
    """
    matrices = {}
    for parts in score_factors(model):
        # a query of T_i is that of the component times its entry in M, so these are the norms times |M|
        strengths = parts.tensor.query.norm(dim=1) * parts.tensor.key.norm(dim=1)  # (H, R or d)
        if parts.mixing is None:
            matrix: Tensor = torch.block_diag(*strengths[:, None])
        else:
            largest = parts.mixing.gather(0, parts.mixing.abs().argmax(0, keepdim=True))  # (1, R)
            matrix = strengths * parts.mixing.sign() * torch.where(largest < 0, -1.0, 1.0)
        if order:
            matrix = matrix[:, matrix.square().sum(0).argsort(descending=True, stable=True)]
        matrices[parts.site.name] = matrix
    return matrices


def alpha_matrices(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the alphas of every attention module whose heads are mixed; row i makes the output of head i.

    Figures 3 and 4 of "Multi-Head Rotation": diagonal where heads are picked, filled where they are mixed.

    Returns:
        Module path → (H, H), in float64 on the CPU.

    Raises:
        HeadError: no heads are mixed.
        UnsupportedModelError: the model's family is not known.
    """
    alphas = alphas_of(model)
    if not alphas:
        raise HeadError(f"{type(model).__name__} has no alphas; mix_heads_(model) adds them")
    return {name: matrix.detach().cpu().double() for name, matrix in alphas.items()}


def effective_rank(matrix: Tensor) -> float:
    r"""Return the effective rank of a matrix: the exponential of the entropy of the singular values' shares.

    $$\exp\Big(-\sum_k p_k \log p_k\Big), \quad p_k = \sigma_k / \sum_l \sigma_l$$

    Roy and Vetterli, "The effective rank: a measure of effective dimensionality", 2007.

    Returns:
        Between 1 and the smaller side, which equal singular values reach; 0 for a zero matrix.

    Raises:
        HeadError: not a matrix.
    """
    if matrix.ndim != 2:
        raise HeadError(f"got {tuple(matrix.shape)}, expected a matrix")
    values = torch.linalg.svdvals(matrix.detach().cpu().double())
    total = values.sum()
    return float(torch.special.entr(values / total).sum().exp()) if total > 0 else 0.0
