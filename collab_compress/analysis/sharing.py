"""What heads share: the factors of their scores and the energy of these, mixing matrices, alphas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_compress.architectures import DenseSite, find_attention
from collab_compress.conversion.expand import read_factors
from collab_compress.errors import HeadError, UnsupportedModelError
from collab_compress.factorization import HeadTensor
from collab_compress.heads import alphas_of


def score_factors(model: PreTrainedModel) -> dict[str, tuple[HeadTensor, Tensor | None]]:
    """Return the query and key (H, D, d) of each module's heads, W̃q·diag(m_i) and W̃k if converted, and M (H, R)."""
    shared = read_factors(model)
    factors: dict[str, tuple[HeadTensor, Tensor | None]] = {}
    for site in find_attention(model):
        if site.family.rotary:
            raise UnsupportedModelError(
                f"{site.name}: a rotary position embedding rotates queries and keys after their projection, so "
                "the scores do not use Wq·Wkᵀ, and nothing can be measured on it; leave this measure out"
            )
        if site.name in shared:
            of_module = shared[site.name]
            mixing = _to_float64(of_module.mixing)
            key = _to_float64(of_module.key).expand(len(mixing), -1, -1)
            factors[site.name] = HeadTensor(_to_float64(of_module.query) * mixing[:, None], key), mixing  # (H, D, R)
        else:
            dense = DenseSite(**vars(site), query=site.part(site.paths.query), key=site.part(site.paths.key))
            factors[site.name] = HeadTensor(_to_float64(dense.query_heads()), _to_float64(dense.key_heads())), None
    return factors


@dataclass(frozen=True)
class Energy:
    r"""Cumulative energy of one module's queries and keys: entry k is the share of the first k components.

    Args:
        heads: of each head's $W_Q^{(i)} W_K^{(i)\top}$, (H, d+1).
        query: of all heads' $W_Q$, side by side.
        key: of $W_K$.
        product: of $W_Q W_K^\top = \sum_i W_Q^{(i)} W_K^{(i)\top}$.
    """

    heads: Tensor
    query: Tensor
    key: Tensor
    product: Tensor


def head_energy(model: PreTrainedModel) -> dict[str, Energy]:
    r"""Return the energy that principal components of query and key weights capture, by head and over all heads.

    Figure 1 of "Multi-Head Attention: Collaborate Instead of Concatenate".

    Args:
        model: stock or converted; in a converted one heads are $\tilde W_Q \operatorname{diag}(m_i)$ and
            $\tilde W_K$, and curves of heads have up to R+1 entries.

    Returns:
        Module path → curves, in float64; 1 throughout for weights that are zero.

    Raises:
        UnsupportedModelError: the model's family is not known, or it has a rotary embedding.

    Example:
        >>> energy = head_energy(model)["encoder.layer.0.attention.self"]
        >>> energy.heads[:, 4] < 1  # half of a head's components do not hold all its energy
        tensor([True, True, True])
    """
    return {
        name: Energy(
            heads=_cumulate_energy(_reduce_product(tensor.query, tensor.key)),
            query=_cumulate_energy(tensor.flat_query),
            key=_cumulate_energy(tensor.flat_key),
            product=_cumulate_energy(_reduce_product(tensor.flat_query, tensor.flat_key)),
        )
        for name, (tensor, _) in score_factors(model).items()
    }


def _reduce_product(left: Tensor, right: Tensor) -> Tensor:
    """Return a small matrix with the singular values of L·Rᵀ, from (…, m, k) and (…, n, k)."""
    core: Tensor = torch.linalg.qr(left).R @ torch.linalg.qr(right).R.mT
    return core


def _cumulate_energy(matrix: Tensor) -> Tensor:
    """Return the shares of energy that the first 0, 1, … components hold; 1 throughout for a zero matrix."""
    sums = nn.functional.pad(torch.linalg.svdvals(matrix).square().cumsum(-1), (1, 0))
    total = sums[..., -1:]
    return torch.where(total > 0, sums / total, 1.0)


def _to_float64(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


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

    Example:
        >>> mixing_matrices(model)["encoder.layer.0.attention.self"].shape
        torch.Size([3, 24])
    """
    matrices = {}
    for name, (tensor, mixing) in score_factors(model).items():
        # a query of T_i is that of the component times its entry in M, so these are the norms times |M|
        strengths = tensor.query.norm(dim=1) * tensor.key.norm(dim=1)  # (H, R or d)
        if mixing is None:
            matrix: Tensor = torch.block_diag(*strengths[:, None])
        else:
            largest = mixing.gather(0, mixing.abs().argmax(0, keepdim=True))  # (1, R)
            matrix = strengths * mixing.sign() * torch.where(largest < 0, -1.0, 1.0)
        if order:
            matrix = matrix[:, matrix.square().sum(0).argsort(descending=True, stable=True)]
        matrices[name] = matrix
    return matrices


def alpha_matrices(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the alphas of every attention module whose heads are mixed; row i makes the output of head i.

    Figures 3 and 4 of "Multi-Head Rotation": diagonal where heads are picked, filled where they are mixed.

    Returns:
        Module path → (H, H), in float64 on the CPU.

    Raises:
        HeadError: no heads are mixed.

    Example:
        >>> from collab_compress.heads import mix_heads_
        >>> mix_heads_(model)
        >>> alpha_matrices(model)["encoder.layer.0.attention.self"]
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]], dtype=torch.float64)
    """
    alphas = alphas_of(model)
    if not alphas:
        raise HeadError(f"{type(model).__name__} has no alphas; mix_heads_(model) adds them")
    return {name: _to_float64(matrix) for name, matrix in alphas.items()}
