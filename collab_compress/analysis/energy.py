r"""Energy: how much of what attention and feed-forward blocks compute their best components or neurons hold.

The energy of a matrix is the sum of its squared singular values; curves of cumulative energy show how many
dimensions suffice. A feed-forward block adds $W_2 a + b$ to the residual stream, where a are the activations of its N
neurons. Backward elimination keeps dff of these, the set S (`eliminate`), whose weights are fitted again:

$$\min_{W_2', b'}\ \mathbb{E}\,\|(W_2 a + b) - (W_2' a_S + b')\|^2 + \lambda\,\|W_2' - W_2\|^2$$
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.analysis.stream import Batches, Progress, with_progress
from collab_compress.architectures import DenseSite, ValueSite, find_attention
from collab_compress.attention.form import plain_weight
from collab_compress.calibration import Batch, as_batch, evaluation_mode, gather_moments, run_batch
from collab_compress.calibration.gather import batch_masks, masks_of, unpadded
from collab_compress.conversion.drift import split_held_back
from collab_compress.conversion.expand import read_factors
from collab_compress.conversion.feed_forward import FeedForward, find_feed_forward
from collab_compress.conversion.fit import DAMPINGS, ROUNDING
from collab_compress.conversion.head_weights import head_weights
from collab_compress.conversion.room import ROOM
from collab_compress.conversion.writers import width_out
from collab_compress.errors import HeadError, UnsupportedModelError
from collab_compress.factorization import HeadTensor
from collab_compress.factorization.least_squares import ResidualMoments, choice_moments, eliminate, fit
from collab_compress.factorization.moments import Moments, Weighting, damp
from collab_compress.factorization.narrowing import captured

SHARES = (0.9, 0.95, 0.99)
GRID = 16  # widths that a feed-forward block is measured at, evenly spaced


class Ranks:
    """The widths that curves of cumulative energy suggest."""

    curves: ClassVar[tuple[str, ...]]  # fields, each a curve of all heads; the first is the default

    def rank(self, share: float = 0.99, of: str = "") -> int:
        """Return the least width at which a curve reaches this share of the energy.

        Args:
            share: above 0, up to 1.
            of: which curve. Of scores `unshared` (default): a dk that is always enough. `shared`: no smaller dk can
                be enough. `joined_product`: the paper's rule of thumb, usually too small, most of all with batches;
                `joined_query`, `joined_key`. Of values `narrow` (default) or `joined`. Of feed-forward blocks
                `energy`.

        Raises:
            HeadError: the share is not in range, or the curve is unknown.
        """
        of = of or self.curves[0]
        if of not in self.curves:
            raise HeadError(f"unknown curve {of!r}; expected one of {', '.join(self.curves)}")
        if not 0 < share <= 1:
            raise HeadError(f"share of energy is {share}; expected above 0, up to 1")
        curve: Tensor = getattr(self, of)
        return int((curve < share - 1e-12).sum())

    def ranks(self, of: str = "") -> dict[float, int]:
        """Return share → suggested width, for 90, 95 and 99 % of the energy."""
        return {share: self.rank(share, of) for share in SHARES}


@dataclass(frozen=True)
class Energy(Ranks):
    r"""Cumulative energy of one module's queries and keys: entry k is the share of the first k components.

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

    curves: ClassVar = ("unshared", "shared", "joined_product", "joined_query", "joined_key")


@dataclass(frozen=True)
class ValueEnergy(Ranks):
    r"""Cumulative energy of what one module's heads add to the residual stream: entry k is the share of the first k.

    Args:
        heads: of each head's $W_V^{(i)} W_O^{(i)}$ alone, (H, d+1).
        narrow: of all heads' together, by the channels that narrow values of equal widths keep, (H·d+1,). A
            conversion at dv captures narrow[dv]: its relative error is √(1 − narrow[dv]), except for damping.
        joined: of all heads' together, by their best common components. No values capture more at that dv, however
            their channels are divided among heads.
    """

    heads: Tensor
    narrow: Tensor
    joined: Tensor

    curves: ClassVar = ("narrow", "joined")


@dataclass(frozen=True)
class FeedForwardEnergy(Ranks):
    """What one feed-forward block keeps of its output with fewer neurons.

    Args:
        widths: numbers of neurons dff, ascending, the last of them all, (W,).
        errors: relative error of the block's output at each width: ‖refitted narrower − dense‖ over the norm of the
            dense output less its mean, (W,).
    """

    widths: Tensor
    errors: Tensor

    curves: ClassVar = ("energy",)

    @property
    def energy(self) -> Tensor:
        """Share of the output's variance that each width and all larger ones keep at least, (W,)."""
        kept: Tensor = (1 - self.errors.square()).clamp(min=0)
        return kept.flip(0).cummin(0).values.flip(0)

    def rank(self, share: float = 0.99, of: str = "") -> int:
        """Return the least measured width that keeps this share of the output's variance, as `Ranks.rank`."""
        return int(self.widths[super().rank(share, of)])


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


def head_energy(
    model: PreTrainedModel,
    batches: Batches | None = None,
    *,
    damping: float = 1e-3,
    progress: Progress = False,
) -> dict[str, Energy]:
    r"""Return the energy that principal components of query and key weights capture, by head and over all heads.

    Figure 1 of "Multi-Head Attention: Collaborate Instead of Concatenate". With batches it is the energy of the
    weights' outputs on their inputs, weighted as in a conversion: $S_Q W_Q$, $S_K W_K$ and
    $S_Q W_Q W_K^\top S_K^\top$, where $S^\top S$ is the inputs' covariance plus damping (of queries without a bias
    their second moment), and queries are multiplied by the weight of their head (`conversion.head_weights`). Most
    directions of the weights never meet an input. Other arguments and errors are those of `head_covariances`.

    Args:
        model: stock or converted; in a converted one heads are $\tilde W_Q \operatorname{diag}(m_i)$ and
            $\tilde W_K$, and per-head curves have up to R+1 entries.
        batches: keyword arguments for the model, to weigh by; None for bare weights. Padding does not count.
        damping: share of the mean variance that is added to every direction.

    Returns:
        Module path → curves, in float64; 1 throughout for weights that are zero.

    Raises:
        HeadError: weights or inputs allow no such weighting.
    """
    modules = score_factors(model)
    sites = [parts.site for parts in modules]
    listed = None if batches is None else list(map(as_batch, batches))  # the model runs on them twice
    moments = _moments_of(model, sites, listed, progress)
    weights = head_weights(model, sites, listed or [])
    energies = {}
    for parts, inputs in zip(modules, moments, strict=True):
        tensor, heads = parts.tensor, weights.get(parts.site.name)
        if inputs:
            centred = parts.content is not None
            try:
                weighting = Weighting.of(*inputs, damping=damping, centre_query=centred, centre_key=True)
                tensor = weighting.apply(tensor)
            except ValueError as error:
                raise HeadError(f"{parts.site.name}: {error}") from error
        if heads is not None:
            tensor = HeadTensor(tensor.query * heads[:, None, None], tensor.key)
        _check_finite(parts.site.name, tensor.query, tensor.key)
        energies[parts.site.name] = tensor_energy(tensor)
    return energies


def tensor_energy(tensor: HeadTensor) -> Energy:
    """Return the energy of query and key projections of heads."""
    single = _product_squares(tensor.query, tensor.key)  # (H, d)
    sides = [_unfolded_squares(tensor.query, tensor.key), _unfolded_squares(tensor.key, tensor.query)]
    least = min(map(len, sides))
    return Energy(
        query=_cumulative(_squares(tensor.query)),
        key=_cumulative(_squares(tensor.key)),
        product=_cumulative(single),
        joined_query=_cumulative(_squares(tensor.flat_query)),
        joined_key=_cumulative(_squares(tensor.flat_key)),
        joined_product=_cumulative(_product_squares(tensor.flat_query, tensor.flat_key)),
        shared=torch.minimum(*(_cumulative(side)[: least + 1] for side in sides)),
        unshared=_cumulative(single.flatten().sort(descending=True).values),
    )


def value_energy(
    model: PreTrainedModel,
    batches: Batches | None = None,
    *,
    damping: float = 1e-3,
    progress: Progress = False,
) -> dict[str, ValueEnergy]:
    r"""Return how much of what heads add to the residual stream few channels of their values capture.

    Head i adds $o_i W_O^{(i)}$, where $o_i$ are its values, summed by its attention probabilities. Energy is
    $E\|\sum_i o_i W_O^{(i)}\|^2$, weighted as in a conversion (`narrow_values`): with batches by the covariance
    of $o$, or by second moments where no bias of the output projection takes the mean; else as if inputs were white
    and heads attended independently of each other. Other arguments and errors are those of `head_energy`.

    Args:
        model: stock or edited; where heads are mixed, the mixture counts as part of $W_O$.

    Returns:
        Module path → curves, in float64; of narrow values up to their dv.

    Raises:
        UnsupportedModelError: a projection carries an adapter, is quantized or offloaded.
    """
    sites = []
    for site in find_attention(model):
        value, output = site.part(site.family.value), site.part(site.family.output)
        sites.append(ValueSite(**vars(site), value=getattr(value, "proj", value), output=output))
    moments = _moments_of(model, sites, batches, progress)
    energies = {}
    for site, inputs in zip(sites, moments, strict=True):
        try:
            energies[site.name] = _value_energy(site, inputs, damping)
        except ValueError as error:
            raise HeadError(f"{site.name}: {error}") from error
    return energies


def _value_energy(site: ValueSite, inputs: tuple[Moments, ...], damping: float) -> ValueEnergy:
    count = site.key_value_heads
    group = site.heads // count
    output = getattr(site.output, "proj", site.output)
    weight = _exact(plain_weight(site.path(site.family.output), output))
    rows = weight if isinstance(output, Conv1D) else weight.mT  # (dv, D)
    alphas = getattr(site.output, "alphas", None)
    if alphas is not None:
        rows = torch.einsum("ij,icx->jcx", _exact(alphas), rows.unflatten(0, (site.heads, -1))).flatten(0, 1)
    value = _exact(site.value.weight)
    _check_finite(site.name, rows, value)
    if inputs:
        joint = inputs[0].covariance() if output.bias is not None else inputs[0].second
    else:
        joint = torch.block_diag(*(head @ head.mT for head in value.chunk(count) for _ in range(group)))
    damped = damp(joint, damping)
    alone, together = captured(damped, rows.chunk(site.heads), group)
    variances, directions = torch.linalg.eigh(damped)
    root = variances.clamp(min=0).sqrt()[:, None] * directions.mT
    return ValueEnergy(_cumulative(torch.stack(alone)), _cumulative(together), _cumulative(_squares(root @ rows)))


def _moments_of(
    model: PreTrainedModel, sites: Sequence[DenseSite | ValueSite], batches: Batches | None, progress: Progress
) -> list[tuple[Moments, ...]]:
    """Return moments of the inputs of each site in float64 on the CPU; nothing without batches."""
    if batches is None:
        return [()] * len(sites)
    watched = map(as_batch, with_progress(batches, progress, "batches"))
    return [
        tuple(side.to("cpu", torch.float64) for side in inputs) for inputs in gather_moments(model, sites, watched)
    ]


def feed_forward_energy(
    model: PreTrainedModel,
    batches: Batches,
    *,
    blocks: Sequence[FeedForward] | None = None,
    damping: float = DAMPINGS[0],
    progress: Progress = False,
) -> dict[str, FeedForwardEnergy]:
    """Return what each feed-forward block loses with fewer neurons, each block by itself, at sixteenths of its width.

    Neurons are chosen as in a conversion, by optimal brain surgeon, in one elimination a block. The weights of the
    kept neurons are fitted to seven eighths of the sequences, and the error is measured on the others.

    Args:
        model: stock or edited.
        batches: keyword arguments for the model, at least two sequences. Padding does not count.
        blocks: its feed-forward blocks, where they are known already.
        damping: share of the activations' mean variance that is added to each variance.
        progress: as for `with_progress`, over blocks.

    Returns:
        Path of the layer that reads the neurons → curve, in float64; no error where the output never varies.

    Raises:
        HeadError: fewer than two sequences, activations that are not finite, or too few of them without damping.
        CalibrationError: the model does not take the batches.
        UnsupportedModelError: the model has no such block, or its family is not known.
    """
    used, held_back = split_held_back(list(map(as_batch, batches)))
    if not (used and held_back):
        raise HeadError("neurons are fitted on some sequences and measured on others; pass two sequences at least")
    blocks = find_feed_forward(model, used[0]) if blocks is None else blocks
    numbers = max((block.width * (block.width + len(block.writer.gain)) for block in blocks), default=1)
    together = max(1, ROOM // (2 * 8 * numbers))  # blocks whose moments fit into memory side by side
    energies = {}
    gathered: list[tuple[ResidualMoments, ResidualMoments]] = []
    for place, block in enumerate(with_progress(blocks, progress, "feed-forward")):
        if not gathered:
            group = blocks[place : place + together]
            moments = [_activation_moments(model, group, side) for side in (used, held_back)]
            gathered = list(zip(*moments, strict=True))
        layer = model.get_submodule(block.down)
        try:
            energies[block.down] = _feed_forward_energy(layer, block, *gathered.pop(0), damping=damping)
        except ValueError as error:
            raise HeadError(f"{block.down}: {error}") from error
    return energies


def _activation_moments(
    model: PreTrainedModel, blocks: Sequence[FeedForward], batches: Sequence[Batch]
) -> list[ResidualMoments]:
    """Return moments of the activations of each block, with a residual of 0."""
    moments = [ResidualMoments() for _ in blocks]
    masks: dict[Any, Any] = {}

    def add(place: int, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        vectors = unpadded(args[0], masks_of(blocks[place].writer.site, masks).query)
        moments[place].add(vectors, vectors.new_zeros(len(vectors), width_out(layer)))

    with ExitStack() as hooks:
        hooks.enter_context(evaluation_mode(model))
        hooks.enter_context(torch.autocast(model.device.type, enabled=False))
        for place, block in enumerate(blocks):
            layer = model.get_submodule(block.down)
            hooks.enter_context(layer.register_forward_pre_hook(partial(add, place)))
        for batch in batches:
            masks.update(batch_masks(model, batch))
            run_batch(model, batch)
    return moments


def _feed_forward_energy(
    layer: Any, block: FeedForward, used: ResidualMoments, held_back: ResidualMoments, damping: float
) -> FeedForwardEnergy:
    """Return the curve of one block, whose second layer this is."""
    bias = layer.bias is not None
    weight = layer.weight.detach() if isinstance(layer, Conv1D) else layer.weight.detach().mT  # (N, D)
    weight = weight.to(used.place, torch.float64)
    widths = sorted({-(-block.width * step // GRID) for step in range(1, GRID + 1)})
    variance = held_back.squared_error(-weight, held_back.means()[0] @ weight)
    if variance <= ROUNDING**2 * held_back.squared_error(-weight, None):
        return FeedForwardEnergy(torch.tensor(widths), torch.zeros(len(widths), dtype=torch.float64))
    order = eliminate(*choice_moments(used, weight, block.writer.gain, damping, bias)).order
    errors = []
    for width in widths:
        kept = order[block.width - width :].sort().values
        fitted = fit(used.narrowed(weight, kept), damping, bias)
        errors.append(held_back.narrowed(weight, kept).squared_error(*fitted))
    return FeedForwardEnergy(torch.tensor(widths), (torch.tensor(errors, dtype=torch.float64) / variance).sqrt())


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


def _check_finite(name: str, *weights: Tensor) -> None:
    if not all(bool(weight.isfinite().all()) for weight in weights):
        raise HeadError(f"{name}: its weights are not finite; the checkpoint is damaged")


def _squares(matrix: Tensor) -> Tensor:
    """Return the squared singular values of (…, m, n), descending."""
    wide = matrix.shape[-1] > matrix.shape[-2]
    return _eigenvalues(matrix @ matrix.mT if wide else matrix.mT @ matrix)


def _unfolded_squares(left: Tensor, right: Tensor) -> Tensor:
    """Return the squared singular values of [L_1 R_1ᵀ … L_H R_Hᵀ], descending, from (H, m, d) and (H, n, d)."""
    return _eigenvalues((left @ (right.mT @ right) @ left.mT).sum(0))


def _eigenvalues(gram: Tensor) -> Tensor:
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


def _cumulative(squares: Tensor) -> Tensor:
    """Return the shares of (…, n) that the first 0, 1, …, n entries hold, (…, n+1); 1 throughout if all are 0."""
    sums = nn.functional.pad(squares.cumsum(-1), (1, 0))
    total = sums[..., -1:]
    return torch.where(total > 0, sums / torch.where(total > 0, total, 1.0), 1.0)
