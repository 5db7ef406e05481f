"""Losses on heads' vectors, attention probabilities and mixing matrices: pure tensor mathematics.

Vectors are (B, T, H, d), attention probabilities (B, H, T, S), masks (B, T). All losses compute in float32 at least,
whatever the caller's autocast, and raise a ValueError where a shape does not fit. Squares of the inputs, and in
`hsic` their fourth powers, must be finite in that dtype too: otherwise the loss is NaN or wrong.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

__all__ = [
    "agreement",
    "agreement_probs",
    "bhattacharyya",
    "hsic",
    "nuclear_growth",
    "nuclear_norm",
    "orthogonality",
]

# The error of the spectral norm where eigenvalues nearly tie, in machine epsilons, times 4 e: 1.4e-6 in float32.
TIED_EPSILONS = 128
SHORTEST_VECTOR = 1e-4  # of the root mean square length: shorter vectors count as zero; trained models have some
# Keeps the root's slope finite at 0. Adds at most 2 √(ROOT_EPSILON · S) to a coefficient: 1e-5 at 2500 keys.
ROOT_EPSILON = 1e-14
HALF_ROOT_EPSILON = 6e-8  # float16's smallest number: the slope, scaled as in mixed precision, must fit float16 too


def hsic(x: Tensor, mask: Tensor | None = None, unscaled: bool = False) -> Tensor:
    r"""Return the mean Hilbert-Schmidt independence criterion of two heads, over pairs of heads.

    $$\mathrm{HSIC}(K_i, K_j) = \frac{1}{(N - 1)^2} \operatorname{tr}(K_i C K_j C), \quad C = I - \tfrac1N 1 1^\top$$

    equations 4 and 7 of "Analyzing and Controlling Inter-Head Diversity in Multi-Head Attention", without its
    λ, where $K_i = X_i X_i^\top$ is the N×N linear kernel of head i's outputs. No pair is formed:

    $$\sum_{i < j} \operatorname{tr}(K_i C K_j C) =
      \tfrac12 \Big( \|X_{all}^\top C X_{all}\|_F^2 - \sum_i \|X_i^\top C X_i\|_F^2 \Big)$$

    takes O(B T H d · min(B T, H d)) operations. First derivatives only.

    Args:
        x: head outputs, (B, T, H, d), finite.
        mask: True at tokens, False at padding, (B, T) bool, or None.
        unscaled: whether 1/(N − 1)² is left out, so that the value grows with the number of tokens.

    Returns:
        A scalar in float32, or float64 if x is; 0 for one head or fewer than two unpadded tokens.

    Raises:
        ValueError: a shape does not fit.

    Example:
        >>> heads = torch.randn(2, 50, 4, 8)
        >>> same = heads[:, :, :1].expand(2, 50, 4, 8)
        >>> bool(hsic(same) > hsic(heads))
        True
    """
    _check("x", x, "(B, T, H, d)", mask, (0, 1))
    with _no_autocast(x):
        tokens = _full_precision(x).flatten(0, 1)  # (N, H, d)
        weights = tokens.new_ones(tokens.shape[0]) if mask is None else mask.flatten().to(tokens.dtype)
        count = weights.sum()
        mean = torch.einsum("n,nhd->hd", weights, tokens) / count.clamp(min=1)
        centred = (tokens - mean) * weights[:, None, None]
        traces = _ordered_traces(centred) * _per_pair(x.shape[2])
        return traces if unscaled else traces / (count - 1).clamp(min=1).square()


def orthogonality(x: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Return the mean over unpadded positions of the spectral norm of $V^\top V - I$.

    $$\sigma(V_{all}^\top V_{all} - I)$$

    where the columns of $V_{all}$, d×H, are the heads' vectors at one position: equation 8 of "Analyzing and
    Controlling Inter-Head Diversity in Multi-Head Attention", without its λ. More heads than dimensions
    cannot be orthonormal, and the norm is then at least 1. Only the smaller of $V^\top V$ and $V V^\top$ is
    used: they share their non-zero eigenvalues. One head gives $|\|v\|^2 - 1|$.

    Where several eigenvalues are equally far from 1 the gradient is one of the subgradients. Second
    derivatives are not provided.

    Args:
        x: the heads' value (or query, or key) vectors, (B, T, H, d), finite.
        mask: True at tokens, False at padding, (B, T) bool, or None.

    Returns:
        A scalar in float32, or float64 if x is; 0 without unpadded tokens.

    Raises:
        ValueError: a shape does not fit, or there are no heads or channels.

    Example:
        >>> orthogonality(torch.eye(3).expand(2, 5, 3, 3))  # the vectors of 3 heads, orthonormal at each of 5 tokens
        tensor(0.)
    """
    _check("x", x, "(B, T, H, d)", mask, (0, 1))
    heads, width = x.shape[2:]
    if not (heads and width):
        raise ValueError(f"x has no heads or no channels: got {tuple(x.shape)}, expected (B, T, H, d)")
    with _no_autocast(x):
        vectors = _full_precision(x).flatten(0, 1)  # (N, H, d)
        gram = vectors @ vectors.mT if heads <= width else vectors.mT @ vectors  # (N, n, n)
        residual = gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        with torch.no_grad():
            tiny = torch.finfo(gram.dtype).tiny
            scaled = residual / residual.abs().amax((1, 2), keepdim=True).clamp(min=tiny)
            right = _dominant_vectors(scaled)
            left = normalize(scaled @ right, dim=1, eps=tiny)
        # A singular value's derivative is that of lᵀ A r with its two singular vectors held fixed. Unlike
        # |rᵀ A r| this stays right where r mixes eigenvectors of +σ and −σ.
        norms = (left * (residual @ right)).sum((1, 2))
        if heads > width:
            norms = norms.clamp(min=1.0)
        return _masked_mean(norms.view(x.shape[:2]), mask)


def agreement(x: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Return the mean cosine between two heads' vectors, over pairs of heads and unpadded tokens.

    The disagreement regularizer of Li et al. 2018, "Multi-Head Attention with Disagreement Regularization", with
    the sign of a loss: the lower, the more the heads disagree. Without a loop over pairs,

    $$\sum_{a < b} \cos(x_a, x_b) = \tfrac12 \Big( \big\| \sum_h \hat x_h \big\|^2 - \sum_h \|\hat x_h\|^2 \Big)$$

    where $\hat x_h = x_h / \|x_h\|$. A zero vector, such as a dropped head's, has cosine 0 with every other, and
    no gradient. The same holds for vectors shorter than 10⁻⁴ of the root mean square length, whose gradients would
    dominate.

    Args:
        x: head outputs or values, (B, T, H, d), finite.
        mask: True at tokens, False at padding, (B, T) bool, or None.

    Returns:
        A scalar in float32, or float64 if x is; 0 for one head or without unpadded tokens.

    Example:
        >>> round(float(agreement(torch.ones(2, 5, 3, 8))), 4)  # three heads that are the same
        1.0
        >>> float(agreement(torch.eye(3).expand(2, 5, 3, 3)))
        0.0
    """
    _check("x", x, "(B, T, H, d)", mask, (0, 1))
    return _mean_cosine(x, mask)


def agreement_probs(probs: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Return the mean cosine between two heads' attention probabilities, over pairs of heads and unpadded queries.

    `agreement` with the attention weights of one query as the head's vector.

    Args:
        probs: attention weights, (B, H, T, S), finite, 0 at padded keys.
        mask: True at queries, False at padding, (B, T) bool, or None.

    Returns:
        A scalar in float32, or float64 if the probs are; 0 for one head or without unpadded queries.

    Example:
        >>> probs = torch.eye(4)[[0, 1, 2]].view(1, 3, 1, 4)  # of one query, three heads
        >>> float(agreement_probs(probs))
        0.0
    """
    _check("probs", probs, "(B, H, T, S)", mask, (0, 2))
    return _mean_cosine(probs.transpose(1, 2), mask)


def bhattacharyya(probs: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Return the mean Bhattacharyya coefficient of two heads' attention probabilities, over queries and pairs.

    $$BC(a, b) = \sum_j \sqrt{p_j^a \, p_j^b}$$

    equation 3 of "Diversified Attention on Transformers", from 0 for heads that attend to different tokens
    to 1 for heads with the same attention. Without a loop over pairs,

    $$\sum_{a < b} BC(a, b) = \tfrac12 \Big( \big\| \sum_h r_h \big\|^2 - \sum_h \|r_h\|^2 \Big)$$

    where $r_h = \sqrt{p^h}$.

    The paper's algorithm 1 averages each sequence by itself and then over sequences; where sequences are equally long
    both means are one.

    The paper trains with λ = 1 and finds its heads more diverse, but the penalised translation model never reaches
    the BLEU of the plain one.

    Args:
        probs: attention probabilities before dropout, (B, H, T, S), finite, 0 at padded keys; the loss is NaN where
            one is negative, as attention scores may be.
        mask: True at queries, False at padding, (B, T) bool, or None.

    Returns:
        A scalar in float32, or float64 if the probs are; 0 for one head or without unpadded queries.

    Example:
        >>> round(float(bhattacharyya(torch.full((1, 3, 2, 4), 0.25))), 4)  # heads with the same attention
        1.0
    """
    _check("probs", probs, "(B, H, T, S)", mask, (0, 2))
    with _no_autocast(probs):
        shifted = _full_precision(probs) + (HALF_ROOT_EPSILON if probs.dtype == torch.float16 else ROOT_EPSILON)
        return _mean_product(shifted.sqrt().transpose(1, 2), shifted.sum((1, 3)), mask)


def nuclear_norm(alphas: Tensor) -> Tensor:
    r"""Return the sum of the singular values, $\|\alpha\|_*$.

    Its gradient is $U V^\top$, finite for equal singular values, as in the identity, and for zero ones, where
    it is one of the subgradients.

    Args:
        alphas: (…, H, H), row i the weights of head i's mixture.

    Returns:
        One for each matrix, (…), in float32, or float64 if alphas is; NaN where a matrix is not finite.

    Example:
        >>> nuclear_norm(torch.eye(4))
        tensor(4.)
    """
    if alphas.ndim < 2 or alphas.shape[-2] != alphas.shape[-1]:
        raise ValueError(f"alphas have the wrong shape: got {tuple(alphas.shape)}, expected (…, H, H)")
    with _no_autocast(alphas):
        matrices = _full_precision(alphas)
        finite = matrices.isfinite().all(-1).all(-1)
        norms: Tensor = torch.linalg.svdvals(matrices.where(finite[..., None, None], 0)).sum(-1)
        return norms.where(finite, torch.nan)  # svdvals raises, where a Trainer goes on with NaN


def nuclear_growth(alphas: Tensor, growth: float) -> Tensor:
    r"""Return by how much each nuclear norm falls short of a step's growth.

    $$L_{nuc} = \|\alpha(\Theta_0)\|_* + \Delta_r - \|\alpha(\Theta)\|_*$$

    equation 7 of "Multi-Head Rotation", for one matrix; the paper sums it over all of them. $\Theta_0$ is the
    present alphas, detached, as in the authors' code: the value is always $\Delta_r$ and the gradient always raises
    the norm.

    Args:
        alphas: (…, H, H).
        growth: $\Delta_r$.

    Returns:
        One for each matrix, (…), in float32, or float64 if alphas is.

    Example:
        >>> alphas = torch.eye(4, requires_grad=True)
        >>> loss = nuclear_growth(alphas, growth=0.5)
        >>> loss.backward()
        >>> loss.item(), alphas.grad.diagonal()
        (0.5, tensor([-1., -1., -1., -1.]))
    """
    norm = nuclear_norm(alphas)
    return norm.detach() + growth - norm


def _ordered_traces(centred: Tensor) -> Tensor:
    """Sum of tr(K_i C K_j C) over ordered pairs of distinct heads; centred vectors (N, H, d)."""
    every = centred.flatten(1)  # (N, H·d)
    # Half of a symmetric product's gradient, doubled: one large product less in the backward pass.
    gram = every.mT @ every.detach() if every.shape[0] >= every.shape[1] else every @ every.detach().mT
    total = gram.square().sum()
    blocks = torch.einsum("nhc,nhd->hcd", centred, centred)
    return 2 * total - total.detach() - blocks.square().sum()


def _dominant_vectors(matrices: Tensor) -> Tensor:
    """Return unit eigenvectors (N, n, 1) of the largest |eigenvalue| of symmetric (N, n, n) with entries up to 1."""
    # Powers of the matrices, four times faster than `eigh` on CPU at n = 12. Where eigenvalues tie this is some
    # combination of their eigenvectors; for the zero matrix it is zero.
    size = matrices.shape[-1]
    tiny = torch.finfo(matrices.dtype).tiny
    power = matrices
    # Whatever the gap, the power 2^k leaves a shortfall of about n / (2 e 2^k) at most. Even powers are
    # positive semi-definite: their trace bounds their norm.
    squarings = math.log2(2 * size / (TIED_EPSILONS * torch.finfo(matrices.dtype).eps))
    for _ in range(math.ceil(squarings / 3)):
        power = torch.linalg.matrix_power(power, 8)
        power = power / power.diagonal(dim1=1, dim2=2).sum(1)[:, None, None].clamp(min=tiny)
    # The basis vector nearest to the dominant eigenspace is the one with the largest entry on the diagonal.
    nearest = power.diagonal(dim1=1, dim2=2).argmax(1)[:, None, None].expand(-1, size, 1)
    return normalize(power.gather(2, nearest), dim=1, eps=tiny)


def _mean_cosine(vectors: Tensor, mask: Tensor | None) -> Tensor:
    """Mean cosine of two heads' vectors (B, T, H, d) over pairs and unpadded positions."""
    with _no_autocast(vectors):
        vectors = _full_precision(vectors)
        squares = vectors.square().sum(-1, keepdim=True)
        nonzero = squares > (SHORTEST_VECTOR**2 * squares.detach().mean()).clamp(min=torch.finfo(vectors.dtype).tiny)
        # The inner `where` keeps inf out of the gradient of the outer one.
        units = vectors * torch.where(nonzero, torch.where(nonzero, squares, 1.0).rsqrt(), 0.0)
        # ‖x̂_h‖² is 1, with gradient 0.
        return _mean_product(units, nonzero.sum((2, 3)), mask)


def _mean_product(vectors: Tensor, squares: Tensor, mask: Tensor | None) -> Tensor:
    r"""Return the mean of $x_a \cdot x_b$, of (B, T, H, d), over pairs and positions; squares $\sum_h \|x_h\|^2$."""
    values = vectors.sum(2).square().sum(-1) - squares  # (B, T)
    return _masked_mean(values, mask) * _per_pair(vectors.shape[2])


def _full_precision(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or in its own dtype if that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _no_autocast(tensor: Tensor) -> torch.autocast:
    """Return a context in which products of such tensors keep their dtype, whatever the caller's autocast."""
    return torch.autocast(tensor.device.type, enabled=False)


def _check(name: str, tensor: Tensor, layout: str, mask: Tensor | None, positions: tuple[int, int]) -> None:
    """Raise a ValueError unless a tensor has four axes, as in `layout`, and the mask fits its axes `positions`."""
    if tensor.ndim != 4:
        raise ValueError(f"{name} has the wrong shape: got {tuple(tensor.shape)}, expected {layout}")
    expected = tuple(tensor.shape[axis] for axis in positions)
    if mask is not None and (tuple(mask.shape) != expected or mask.dtype != torch.bool):
        raise ValueError(
            f"mask does not fit {name} {layout}: got {tuple(mask.shape)} of {mask.dtype}, expected {expected} "
            "of torch.bool, True at tokens, False at padding"
        )


def _masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of values (B, T) over unpadded positions, 0 if there is none."""
    if mask is None:
        return values.sum() / max(values.numel(), 1)
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def _per_pair(heads: int) -> float:
    r"""Return $1 / (H (H - 1))$: makes a sum over ordered pairs of heads their mean; 0 for one head."""
    return 1.0 / (heads * (heads - 1)) if heads > 1 else 0.0
