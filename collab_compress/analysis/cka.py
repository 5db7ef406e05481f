"""Centred kernel alignment (CKA) of all pairs of heads, from covariances, a sample or minibatches, and the HSIC it is
made of, with either kernel, ordinary or unbiased.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis.covariance import JointCovariance, rounding_variance
from collab_compress.analysis.stream import Batches, Progress, Shown, Use, by_name, read_heads, real_vectors
from collab_compress.architectures import KINDS, Kind
from collab_compress.errors import HeadError
from collab_compress.heads import Part

Kernel = Literal["linear", "rbf"]
ROWS = 256  # rows of the kernels that are in memory at a time
PROBES = 1000  # tokens whose distances the bandwidth is taken from


def check(kernel: str, bandwidth: float | None) -> None:
    """Refuse a kernel that is not known.

    Raises:
        HeadError: unknown kernel, or a bandwidth that is not positive.
    """
    if kernel not in get_args(Kernel):
        raise HeadError(f"unknown kernel {kernel!r}; expected one of {', '.join(get_args(Kernel))}")
    if bandwidth is not None and not bandwidth > 0:
        raise HeadError(f"bandwidth is {bandwidth}; expected above 0, or None for the median distance")


def centre(tokens: Tensor) -> Tensor:
    """Take the mean off each head, (H, N, d) in float64 on the CPU; 0 for heads that vary by no more than rounding.

    Raises:
        HeadError: they are not (N, H, d), fewer than four, or not finite.
    """
    if tokens.ndim != 3 or len(tokens) < 4:
        raise HeadError(f"got tokens {tuple(tokens.shape)}; expected (N, H, d) with N at least 4")
    heads = tokens.detach().double().cpu().transpose(0, 1)
    if not bool(heads.isfinite().all()):
        raise HeadError("what heads compute is not finite; look for NaN or infinity in the weights")
    centred = heads - heads.mean(1, keepdim=True)
    power, width = heads.square().sum(2).mean(1), heads.shape[2]
    noise = width * rounding_variance(power, width, torch.finfo(tokens.dtype).eps)
    return centred * (centred.square().sum(2).mean(1) > noise)[:, None, None]


def bandwidths(centred: Tensor, kernel: Kernel, bandwidth: float | None) -> Tensor | None:
    """σ of each head, (H, 1, 1), or None for the linear kernel."""
    if kernel == "linear":
        return None
    if bandwidth is not None:
        return torch.full((len(centred), 1, 1), bandwidth, dtype=torch.float64)
    medians = torch.stack([torch.nn.functional.pdist(head).median() for head in centred[:, :PROBES]])
    return torch.where(medians > 0, medians, 1.0)[:, None, None]


def hsic_of_pairs(centred: Tensor, widths: Tensor | None, unbiased: bool) -> Tensor:
    """Measure the dependence of all pairs of heads, but for a common factor in the ordinary estimate.

    Takes O(H·N) memory: rows of all kernels are computed in blocks, and only their products and sums are kept.

    Args:
        centred: vectors (H, N, d).
        widths: σ of each head, (H, 1, 1), or None for the linear kernel.
        unbiased: HSIC₁ (Song et al., 2012) in place of tr(K C L C).

    Returns:
        (H, H).
    """
    count = centred.shape[1]
    joint = centred.new_zeros(len(centred), len(centred))
    sums = []
    for start in range(0, count, ROWS):
        block = centred[:, start : start + ROWS]
        if widths is None:
            kernels = block @ centred.mT  # (H, rows, N)
        else:
            # less 1, which changes nothing, so that a head that never varies gives 0 exactly
            kernels = torch.expm1(-(torch.cdist(block, centred) / widths).square() / 2)
        if unbiased:
            kernels.diagonal(start, 1, 2).zero_()
        sums.append(kernels.sum(2))
        joint += torch.einsum("hrn,grn->hg", kernels, kernels)
    rows = torch.cat(sums, 1)  # (H, N)
    totals = rows.sum(1)
    if not unbiased:
        return joint - 2 / count * rows @ rows.mT + torch.outer(totals, totals) / count**2
    middle = torch.outer(totals, totals) / ((count - 1) * (count - 2))
    return (joint + middle - 2 / (count - 2) * rows @ rows.mT) / (count * (count - 3))


POOL = 16  # minibatches that are drawn from the same tokens


def cka(responses: JointCovariance) -> Tensor:
    r"""Compare representations by CKA with the linear kernel, all pairs at once, from their covariance alone.

    $$\mathrm{CKA}(i, j) = \frac{\|C_{ij}\|_F^2}{\|C_{ii}\|_F \, \|C_{jj}\|_F}$$

    equals equation 5 of "Analyzing and Controlling Inter-Head Diversity in Multi-Head Attention" (Kornblith et al.,
    2019) with $K_i = X_i X_i^\top$. It does not change under rotations, isotropic scalings and shifts. For
    independent representations it is not 0 but about $\sqrt{d_i d_j} / N$ (d directions of equal variance), so give
    many more tokens than directions, or take `minibatch_cka`, which has no such bias.

    Args:
        responses: as `head_covariances` gives, or `JointCovariance.of`.

    Returns:
        (n, m) in float64, between 0 and 1; 0 for a representation that never varies, with itself too.
    """
    own = responses.own().square().sum((1, 2)).sqrt()  # (n,)
    squares = torch.stack([responses.cross(row, responses.columns).square().sum((1, 2)) for row in responses.rows])
    return _ratio(squares, own[responses.rows.start : responses.rows.stop], own[responses.columns.start :])


def sample_cka(
    tokens: Tensor | Sequence[Tensor],
    kernel: Kernel = "rbf",
    *,
    bandwidth: float | None = None,
    unbiased: bool = False,
) -> Tensor:
    r"""Compare heads by CKA on some tokens, with either kernel.

    The radial kernel is $\kappa(y, z) = \exp(-\|y - z\|^2 / 2 \sigma^2)$. It takes O(H d N²) operations and
    O(H N) memory, so N is to be a sample of a few thousand tokens.

    Args:
        tokens: (N, H, d), as `head_samples` gives, or several representations (N, d_i) of the same tokens, as of
            layers or models; N at least 4.
        kernel: `rbf` or `linear`.
        bandwidth: σ; each head's median distance between two tokens if not given. Distances beyond 1000 tokens are
            not looked at for that.
        unbiased: estimate the dependence by HSIC₁ (Song et al., "Feature Selection via Dependence Maximization",
            2012). The ordinary estimate (equation 4 of "Inter-Head Diversity") is of order 1/N too high,
            and more so the narrower the kernel: independent heads do not come out at 0.

    Returns:
        (H, H) in float64, heads or representations against each other; 0 for one that never varies. The ordinary
        estimate is between 0 and 1; the unbiased one may lie a little outside.

    Raises:
        HeadError: too few tokens or not the same number, an unknown kernel, or a bandwidth that is not positive.
    """
    check(kernel, bandwidth)
    centred = centre(tokens if isinstance(tokens, Tensor) else _side_by_side(tokens))
    dependence = hsic_of_pairs(centred, bandwidths(centred, kernel, bandwidth), unbiased)
    own = dependence.diagonal().clamp(min=0).sqrt()
    return _ratio(dependence, own, own)


def minibatch_cka(
    model: PreTrainedModel,
    batches: Batches,
    kernel: Kernel = "linear",
    *,
    bandwidth: float | None = None,
    tokens: int = 256,
    seed: int | None = 0,
    part: Part = "outputs",
    kinds: Collection[Kind] = KINDS,
    modules: str = "*",
    progress: Progress = False,
) -> dict[str, Tensor]:
    r"""Compare the heads of each layer by CKA without bias, over any number of tokens in bounded memory.

    $$\mathrm{CKA} = \frac{\overline{\mathrm{HSIC}_1(K_i, K_j)}}
      {\sqrt{\overline{\mathrm{HSIC}_1(K_i, K_i)}\;\overline{\mathrm{HSIC}_1(K_j, K_j)}}}$$

    with means over minibatches of tokens: Nguyen et al., "Do Wide and Deep Networks Learn the Same Things?", 2021,
    with HSIC₁ of Song et al., 2012. It is unbiased for independent tokens, and those of one sequence are not: heads
    that attend widely answer much the same at all of them. So minibatches are drawn at random from 16 minibatches'
    worth of tokens, which should be of many sequences.

    Args:
        model: stock or edited; left in the mode it was in.
        batches: keyword arguments for the model, in random order. Their tokens are regrouped into minibatches; those
            that are left over at the end do not count, unless there are fewer than one minibatch holds.
        kernel: `linear`, or `rbf` as in `sample_cka`.
        bandwidth: σ; each head's median distance in the first minibatch if not given.
        tokens: tokens in a minibatch, at least 4.
        seed: of the draw; None takes tokens in order.
        part: what to compare: `outputs`, `queries`, `values` or `keys`.
        kinds: which kinds of attention.
        modules: glob on module paths.
        progress: True for a bar, or a function of how many batches are done and how many there are.

    Returns:
        Module path → (H, H) in float64, possibly a little outside 0 to 1; 0 for a head that never varies. A module
        that serves several layers has one for each use, `path[0]`, `path[1]`, ….

    Raises:
        HeadError: too few tokens, an unknown kernel, or a bandwidth that is not positive.
        CalibrationError: the model does not take such batches.
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.
    """
    check(kernel, bandwidth)
    if tokens < 4:
        raise HeadError(f"got minibatches of {tokens} tokens; HSIC₁ needs 4 at least")
    pools: dict[Use, Tensor] = {}
    widths: dict[Use, Tensor | None] = {}
    sums: dict[Use, Tensor] = {}

    def take(use: Use, pool: Tensor) -> Tensor:
        """Use up full minibatches, or all of a pool that is less than one, and give what is left."""
        if seed is not None:
            pool = pool[torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed)).to(pool.device)]
        *full, left = pool.tensor_split(list(range(tokens, len(pool) + 1, tokens)))
        for minibatch in full or [left]:
            centred = centre(minibatch)
            if use not in sums:
                widths[use] = bandwidths(centred, kernel, bandwidth)
                sums[use] = torch.zeros(minibatch.shape[1], minibatch.shape[1], dtype=torch.float64)
            sums[use] += hsic_of_pairs(centred, widths[use], unbiased=True)
        return left

    def consume(shown: list[Shown]) -> None:
        for use, reading in shown[0]:
            found = real_vectors(reading, part)
            pools[use] = torch.cat([pools[use], found]) if use in pools else found
            if len(pools[use]) >= POOL * tokens:
                pools[use] = take(use, pools[use])

    read_heads([model], batches, part, consume, kinds=kinds, modules=modules, progress=progress)
    for use, pool in pools.items():
        if len(pool) >= tokens or use not in sums:
            if len(pool) < 4:
                raise HeadError(f"{use.name} saw {len(pool)} tokens that are no padding; HSIC₁ needs 4 at least")
            take(use, pool)
    roots = {use: total.diagonal().clamp(min=0).sqrt() for use, total in sums.items()}
    return by_name({use: _ratio(total, roots[use], roots[use]) for use, total in sums.items()})


def _side_by_side(representations: Sequence[Tensor]) -> Tensor:
    """Stack matrices (N, d_i) as heads (N, n, d); the zeros that fill narrower ones up change no kernel."""
    if len({(x.ndim, len(x)) for x in representations}) != 1 or representations[0].ndim != 2:
        shapes = ", ".join(str(tuple(x.shape)) for x in representations)
        raise HeadError(f"representations do not fit together: got {shapes}; expected (N, d), all of the same N")
    width = max(x.shape[1] for x in representations)
    return torch.stack([torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in representations], 1)


def _ratio(squares: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Divide (n, m) by (n,) and (m,), 0 where one of these is."""
    both = rows[:, None] * columns
    return torch.where(both > 0, squares / torch.where(both > 0, both, 1.0), 0.0)
