"""Energy of queries, keys and their products, of values and outputs, by components: how many dimensions suffice."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.analysis.stream import Batches, Progress, with_progress
from collab_compress.architectures import FAMILIES, KINDS, DenseSite, Kind, ValueSite, find_attention
from collab_compress.attention.form import plain_weight
from collab_compress.calibration import gather_moments
from collab_compress.conversion.expand import read_factors
from collab_compress.errors import HeadError, UnsupportedModelError
from collab_compress.factorization import Factors, HeadTensor
from collab_compress.factorization.moments import Moments, Weighting, damp
from collab_compress.factorization.narrowing import captured


@dataclass(frozen=True)
class ScoreParts:
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


def score_parts(model: PreTrainedModel, kinds: Collection[Kind] = KINDS) -> list[ScoreParts]:
    """Return the factors of the scores of every attention module.

    Args:
        model: stock or edited.
        kinds: which kinds of attention.

    Raises:
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.
    """
    factors, parts = read_factors(model), []
    for site in find_attention(model, FAMILIES, kinds=kinds):
        if site.family.rotary:
            raise UnsupportedModelError(
                f"{site.name}: a rotary position embedding turns queries and keys after their projection, so Wq·Wkᵀ "
                "is not what the scores use, and nothing can be measured on it; leave this measure out"
            )
        query, key = site.part(site.family.query), site.part(site.family.key)
        dense = DenseSite(**vars(site), query=query, key=key)
        parts.append(_collaborative(dense, factors[site.name]) if site.name in factors else _dense(dense))
    return parts


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


SHARES = (0.9, 0.95, 0.99)


class Ranks:
    """The widths that curves of cumulative energy suggest."""

    curves: ClassVar[dict[str, str]]  # name of a curve → field; the first is the default

    def rank(self, share: float = 0.99, of: str = "") -> int:
        """Return the least number of components, or channels, of all heads together that capture this share.

        Args:
            share: of the energy, above 0, up to 1.
            of: which curve. Of scores `unshared`, the default, which always suffices; `shared`, below which a dk
                never does; `query`, `key`, or `product`, the paper's rule of thumb, which is of the sum of all heads
                and suggests too little, most of all with batches. Of values `narrow`, the default, or `joined`.

        Raises:
            HeadError: the share is not in range, or the curve is unknown.
        """
        of = of or next(iter(self.curves))
        if of not in self.curves:
            raise HeadError(f"unknown curve {of!r}; expected one of {', '.join(self.curves)}")
        if not 0 < share <= 1:
            raise HeadError(f"share of energy is {share}; expected above 0, up to 1")
        curve: Tensor = getattr(self, self.curves[of])
        return int((curve < share - 1e-12).sum())

    def ranks(self, of: str = "") -> dict[float, int]:
        """Return share → suggested width, for 90, 95 and 99 % of the energy."""
        return {share: self.rank(share, of) for share in SHARES}


@dataclass(frozen=True)
class Energy(Ranks):
    r"""Cumulative energy of one module's weights: entry k is what the first k principal components capture, 0 to 1.

    Args:
        query: of each head's $W_Q^{(i)}$, (H, d+1).
        key: of each head's $W_K^{(i)}$, (H, d+1).
        product: of each head's $W_Q^{(i)} W_K^{(i)\top}$, (H, d+1).
        joined_query: of all heads' side by side, $W_Q$.
        joined_key: of $W_K$.
        joined_product: of $W_Q W_K^\top = \sum_i W_Q^{(i)} W_K^{(i)\top}$.
        shared: of all heads' products in the directions of queries, or of keys if that is less, that suit all heads
            best. No conversion captures more: its relative error at dk is at least √(1 − shared[dk]).
        unshared: of all heads' products, components of all heads in one ranking, (H·d+1,). What a conversion starts
            from, before heads share anything: its relative error at dk is at most √(1 − unshared[dk]).
    """

    query: Tensor
    key: Tensor
    product: Tensor
    joined_query: Tensor
    joined_key: Tensor
    joined_product: Tensor
    shared: Tensor
    unshared: Tensor

    curves: ClassVar = {
        "unshared": "unshared",
        "shared": "shared",
        "product": "joined_product",
        "query": "joined_query",
        "key": "joined_key",
    }


def head_energy(
    model: PreTrainedModel,
    batches: Batches | None = None,
    *,
    centre: bool = True,
    damping: float = 1e-3,
    kinds: Collection[Kind] = KINDS,
    progress: Progress = False,
) -> dict[str, Energy]:
    r"""Return the energy that principal components of query and key weights capture, by head and over all heads.

    Figure 1 of "Multi-Head Attention: Collaborate Instead of Concatenate". The energy of a component is its squared
    singular value. With batches it is the energy of the weights' outputs on real inputs, weighted as in a conversion:
    $S_Q W_Q$, $S_K W_K$ and $S_Q W_Q W_K^\top S_K^\top$, where $S^\top S$ is the inputs' covariance plus
    damping. Most directions of the weights never meet an input, so these curves rise faster.

    Args:
        model: stock or converted; in a converted one heads are $\tilde W_Q \operatorname{diag}(m_i)$ and
            $\tilde W_K$, and per-head curves have up to R+1 entries.
        batches: keyword arguments for the model, to weigh by; None for bare weights. Padding does not count.
        centre: weigh by covariances, else by second moments.
        damping: share of the mean variance that is added to every direction.
        kinds: which kinds of attention.
        progress: True for a bar, or a function of how many batches are done and how many there are.

    Returns:
        Module path → curves, in float64; 1 throughout for weights that are zero.

    Raises:
        HeadError: weights or inputs allow no such weighting.
        CalibrationError: the model does not take such batches, or a module saw no token.
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.
    """
    modules = score_parts(model, kinds)
    moments: list[tuple[Moments, ...]] = [()] * len(modules)
    if batches is not None:
        watched = (dict(batch) for batch in with_progress(batches, progress, "batches"))
        moments = gather_moments(model, [parts.site for parts in modules], watched)
    energies = {}
    for parts, inputs in zip(modules, moments, strict=True):
        tensor = parts.tensor
        if inputs:
            query, key = (side.to("cpu", torch.float64) for side in inputs)
            try:
                tensor = Weighting.of(query, key, damping=damping, centre=centre).apply(tensor)
            except ValueError as error:
                raise HeadError(f"{parts.site.name}: {error}") from error
        if not bool(tensor.query.isfinite().all() and tensor.key.isfinite().all()):
            raise HeadError(f"{parts.site.name}: its weights are not finite; the checkpoint is damaged")
        energies[parts.site.name] = tensor_energy(tensor)
    return energies


def tensor_energy(tensor: HeadTensor) -> Energy:
    """Return the energy of query and key projections of heads."""
    single = _product_squares(tensor.query, tensor.key)  # (H, d)
    joined = _product_squares(tensor.flat_query, tensor.flat_key)
    sides = [_unfolded(tensor.query, tensor.key), _unfolded(tensor.key, tensor.query)]
    least = min(map(len, sides))
    return Energy(
        query=_cumulative(_squares(tensor.query)),
        key=_cumulative(_squares(tensor.key)),
        product=_cumulative(single),
        joined_query=_cumulative(_squares(tensor.flat_query)),
        joined_key=_cumulative(_squares(tensor.flat_key)),
        joined_product=_cumulative(joined),
        shared=torch.minimum(*(_cumulative(side)[: least + 1] for side in sides)),
        unshared=_cumulative(single.flatten().sort(descending=True).values),
    )


@dataclass(frozen=True)
class ValueEnergy(Ranks):
    r"""Cumulative energy of what one module's heads add to the residual stream; entry k is the share of the first k.

    Args:
        heads: of each head's $W_V^{(i)} W_O^{(i)}$ alone, (H, d+1).
        narrow: of all heads' together, by the channels that narrow values of equal widths keep, (H·d+1,). A
            conversion at dv captures narrow[dv]: its relative error is √(1 − narrow[dv]), but for damping.
        joined: of all heads' together, by their best common components. No values capture more at that dv, however
            their channels are divided among heads.
    """

    heads: Tensor
    narrow: Tensor
    joined: Tensor

    curves: ClassVar = {"narrow": "narrow", "joined": "joined"}


def value_energy(
    model: PreTrainedModel,
    batches: Batches | None = None,
    *,
    centre: bool = True,
    damping: float = 1e-3,
    kinds: Collection[Kind] = KINDS,
    progress: Progress = False,
) -> dict[str, ValueEnergy]:
    r"""Return how much of what heads add to the residual stream few channels of their values capture.

    Head i adds $o_i W_O^{(i)}$, where $o_i$ are its values, summed by its attention probabilities. Energy is
    $E\|\sum_i o_i W_O^{(i)}\|^2$, weighted as in a conversion (`narrow_values`): with batches by the covariance
    of $o$, else as if inputs were white and heads attended independently of each other. Other arguments and errors
    are those of `head_energy`.

    Args:
        model: stock or edited; where heads are mixed, the mixture counts as part of $W_O$.
        centre: weigh by covariances where the output projection has a bias to take the mean; else by second moments.

    Returns:
        Module path → curves, in float64; of narrow values up to their dv.

    Raises:
        UnsupportedModelError: a projection carries an adapter, is quantized or offloaded.
    """
    sites = []
    for site in find_attention(model, FAMILIES, kinds=kinds):
        value, output = site.part(site.family.value), site.part(site.family.output)
        sites.append(ValueSite(**vars(site), value=getattr(value, "proj", value), output=output))
    moments: list[Moments | None] = [None] * len(sites)
    if batches is not None:
        watched = (dict(batch) for batch in with_progress(batches, progress, "batches"))
        moments = [seen for (seen,) in gather_moments(model, sites, watched)]
    return {site.name: _value_energy(site, seen, centre, damping) for site, seen in zip(sites, moments, strict=True)}


def _value_energy(site: ValueSite, moments: Moments | None, centre: bool, damping: float) -> ValueEnergy:
    form = getattr(site.module, "value_form", None)
    heads, count = site.heads, site.key_value_heads
    sizes = [len(site.value.weight) // count] * count if form is None else list(form.sizes)
    group = heads // count
    output = getattr(site.output, "proj", site.output)
    weight = _exact(plain_weight(site.path(site.family.output), output))
    rows = weight if isinstance(output, Conv1D) else weight.mT  # (dv, D)
    alphas = getattr(site.output, "alphas", None)
    if alphas is not None:
        rows = torch.einsum("ij,icx->jcx", _exact(alphas), rows.unflatten(0, (heads, -1))).flatten(0, 1)
    value = _exact(site.value.weight)
    if not bool(rows.isfinite().all() and value.isfinite().all()):
        raise HeadError(f"{site.name}: its weights are not finite; the checkpoint is damaged")
    if moments is None:
        joint = torch.block_diag(*(head @ head.mT for head in value.split(sizes) for _ in range(group)))
    else:
        seen = moments.to("cpu", torch.float64)
        joint = seen.covariance() if centre and output.bias is not None else seen.second
    try:
        damped = damp(joint, damping)
        alone, together = captured(damped, rows.split([size for size in sizes for _ in range(group)]), group)
    except ValueError as error:
        raise HeadError(f"{site.name}: {error}") from error
    variances, directions = torch.linalg.eigh(damped)
    root = variances.clamp(min=0).sqrt()[:, None] * directions.mT
    single: Tensor = torch.nn.utils.rnn.pad_sequence(list(alone), batch_first=True)
    return ValueEnergy(_cumulative(single), _cumulative(together), _cumulative(_squares(root @ rows)))


def _squares(matrix: Tensor) -> Tensor:
    """Return the squared singular values of (…, m, n), descending."""
    wide = matrix.shape[-1] > matrix.shape[-2]
    gram = matrix @ matrix.mT if wide else matrix.mT @ matrix
    values: Tensor = torch.linalg.eigvalsh(gram)
    return values.flip(-1).clamp(min=0)


def _product_squares(left: Tensor, right: Tensor) -> Tensor:
    """Return the squared singular values of L·Rᵀ, descending, from (…, m, k) and (…, n, k)."""
    if left.shape[-1] >= min(left.shape[-2], right.shape[-2]):
        cores = left @ right.mT
    else:
        cores = torch.linalg.qr(left).R @ torch.linalg.qr(right).R.mT
    values: Tensor = torch.linalg.svdvals(cores)
    return values.square()


def _unfolded(left: Tensor, right: Tensor) -> Tensor:
    """Return the squared singular values of [L_1 R_1ᵀ … L_H R_Hᵀ], descending, from (H, m, d) and (H, n, d)."""
    values: Tensor = torch.linalg.eigvalsh((left @ (right.mT @ right) @ left.mT).sum(0))
    return values.flip(-1).clamp(min=0)


def _cumulative(squares: Tensor) -> Tensor:
    """Return the shares of (…, n) that the first 0, 1, …, n entries hold, (…, n+1); 1 throughout if all are 0."""
    sums = torch.nn.functional.pad(squares.cumsum(-1), (1, 0))
    total = sums[..., -1:]
    return torch.where(total > 0, sums / torch.where(total > 0, total, 1.0), 1.0)
