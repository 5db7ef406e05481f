"""What scores are made of, dense or collaborative alike: heads, content biases, and where their inputs arrive."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, KINDS, DenseSite, Kind, find_attention
from collab_compress.conversion.expand import read_factors
from collab_compress.factorization import Factors, HeadTensor


@dataclass(frozen=True)
class ScoreParts:
    """The parts of the scores of one attention module, in float64 on the CPU, without the scale.

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


def score_parts(model: PreTrainedModel, kinds: Collection[Kind] = KINDS) -> list[ScoreParts]:
    """List what the scores of every attention module are made of.

    Args:
        model: stock or edited.
        kinds: which kinds of attention.

    Raises:
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.
    """
    factors, found = read_factors(model), []
    for site in find_attention(model, FAMILIES, kinds=kinds):
        query, key = site.part(site.family.query), site.part(site.family.key)
        dense = DenseSite(**vars(site), query=query, key=key)
        found.append(_collaborative(dense, factors[site.name]) if site.name in factors else _dense(dense))
    return found


def _dense(site: DenseSite) -> ScoreParts:
    tensor = HeadTensor(_exact(site.query_heads()), _exact(site.key_heads()))
    bias = site.query_bias()
    content = None if bias is None else torch.einsum("hkd,hd->hk", tensor.key, _exact(bias))
    return ScoreParts(site, tensor, content, None)


def _collaborative(site: DenseSite, factors: Factors) -> ScoreParts:
    query, mixing, key = (_exact(factor) for factor in (factors.query, factors.mixing, factors.key))
    tensor = HeadTensor(query * mixing[:, None], key.expand(len(mixing), -1, -1))  # (H, D, R) each
    content = None if factors.content_bias is None else _exact(factors.content_bias)
    return ScoreParts(site, tensor, content, mixing)


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().double().cpu()
