r"""Factors of the scores of attention, and their energy: the sum of squared singular values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_compress.architectures import DenseSite, find_attention
from collab_compress.conversion.expand import read_factors
from collab_compress.errors import UnsupportedModelError
from collab_compress.factorization import HeadTensor


@dataclass(frozen=True)
class ScoreFactors:
    """The factors of the scores of one attention module, in float64 on the CPU, without the scale.

    Args:
        site: the module; `site.query` and `site.key` can be hooked.
        tensor: heads T_i, as query (H, D, d) and key (H, D, d); in a collaborative module W̃q·diag(m_i) and W̃k.
        content: content biases v_i (H, D), or None where queries have no bias.
        mixing: M (H, R), or None for a dense module.
    """

    site: DenseSite
    tensor: HeadTensor
    content: Tensor | None
    mixing: Tensor | None


def score_factors(model: PreTrainedModel) -> list[ScoreFactors]:
    """Return the factors of the scores of every attention module of a stock or edited model.

    Raises:
        UnsupportedModelError: the model's family is not known, or it has a rotary embedding.
    """
    factors, parts = read_factors(model), []
    for attention in find_attention(model):
        if attention.family.rotary:
            raise UnsupportedModelError(
                f"{attention.name}: a rotary position embedding rotates queries and keys after their projection, so "
                "the scores do not use Wq·Wkᵀ, and nothing can be measured on it; leave this measure out"
            )
        query, key = attention.part(attention.family.query), attention.part(attention.family.key)
        site = DenseSite(**vars(attention), query=query, key=key)
        if site.name in factors:
            shared = factors[site.name]
            mixing = _exact(shared.mixing)
            tensor = HeadTensor(
                _exact(shared.query) * mixing[:, None], _exact(shared.key).expand(len(mixing), -1, -1)
            )  # (H, D, R) each
            content = None if shared.content_bias is None else _exact(shared.content_bias)
            parts.append(ScoreFactors(site, tensor, content, mixing))
        else:
            tensor = HeadTensor(_exact(site.query_heads()), _exact(site.key_heads()))
            bias = site.query_bias()
            content = None if bias is None else torch.einsum("hkd,hd->hk", tensor.key, _exact(bias))
            parts.append(ScoreFactors(site, tensor, content, None))
    return parts


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
    """
    energies = {}
    for parts in score_factors(model):
        tensor = parts.tensor
        energies[parts.site.name] = Energy(
            heads=_cumulative(_core(tensor.query, tensor.key)),
            query=_cumulative(tensor.flat_query),
            key=_cumulative(tensor.flat_key),
            product=_cumulative(_core(tensor.flat_query, tensor.flat_key)),
        )
    return energies


def _core(left: Tensor, right: Tensor) -> Tensor:
    """Return a small matrix with the singular values of L·Rᵀ, from (…, m, k) and (…, n, k)."""
    core: Tensor = torch.linalg.qr(left).R @ torch.linalg.qr(right).R.mT
    return core


def _cumulative(matrix: Tensor) -> Tensor:
    """Return the shares of energy that the first 0, 1, … components hold; 1 throughout for a zero matrix."""
    sums = nn.functional.pad(torch.linalg.svdvals(matrix).square().cumsum(-1), (1, 0))
    total = sums[..., -1:]
    return torch.where(total > 0, sums / torch.where(total > 0, total, 1.0), 1.0)


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()
