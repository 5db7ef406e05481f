r"""Points of the solver, the least squares that move them, and the exact line search between them.

Least squares for a projection always give a combination of the heads' own channels, $\tilde W_Q = F_Q Z_Q$ with
$F_Q = [Q_1 \dots Q_H]$. So the solver holds coefficients $Z$, and their products with the channels' Gram matrix,
$P_Q = F_Q^\top \tilde W_Q = (F_Q^\top F_Q) Z_Q$: one product with the tensor for each projection and iteration.

Along a line the squared error is a polynomial of degree six, whose lowest point is computed exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Self

import numpy as np
import torch
from torch import Tensor

from collab_compress.factorization.factors import HeadTensor, one_hot

SHIFT = 16.0
# Relative rounding of an entry of a Gram matrix whose products are made in that dtype: in float32 errors of 1e-7
# average out.
GRAM_RTOL = {torch.float32: 1e-9, torch.float64: torch.finfo(torch.float64).eps}
DEAD_NORM_RATIO = 1e-2  # times the median norm of components: a smaller one has been killed by a ridge
MAX_STEP = 100.0


class Channels:
    """The channels of all heads side by side, F_Q (Dq, n) and F_K (Dk, n) of n = H·r, as the solver uses them."""

    def __init__(self, heads: HeadTensor) -> None:
        self.heads = heads
        self.query, self.key, self.dtype = heads.flat_query, heads.flat_key, heads.query.dtype
        self.grams: tuple[Tensor, Tensor] | None = None
        # With many heads and narrow inputs the Gram matrices would be larger than the channels.
        if self.query.shape[1] <= 2 * min(len(self.query), len(self.key)):
            self.grams = self.query.mT @ self.query, self.key.mT @ self.key

    def to(self, dtype: torch.dtype) -> "Channels":
        """Return the channels in another dtype."""
        return Channels(HeadTensor(self.heads.query.to(dtype), self.heads.key.to(dtype)))

    def project_query(self, coefficients: Tensor) -> Tensor:
        r"""Return $F_Q^\top F_Q Z$, (n, R), from Z (n, R)."""
        return self.query.mT @ (self.query @ coefficients) if self.grams is None else self.grams[0] @ coefficients

    def project_key(self, coefficients: Tensor) -> Tensor:
        r"""Return $F_K^\top F_K Z$, (n, R), from Z (n, R)."""
        return self.key.mT @ (self.key @ coefficients) if self.grams is None else self.grams[1] @ coefficients

    def by_head(self, projected: Tensor) -> Tensor:
        """View channels (n, R) as (H, r, R)."""
        return projected.view(self.heads.heads, self.heads.query.shape[2], projected.shape[1])

    def mttkrp(self, mixing: Tensor, projected: Tensor) -> Tensor:
        r"""Return the matricised tensor times Khatri-Rao product for one side, as coefficients (n, R).

        $$\sum_i T_i \tilde W_K \mathrm{diag}(m_i) = F_Q\; \mathrm{stack}_i\big((K_i^\top \tilde W_K) \odot m_i\big)$$

        from M (H, R) and the projections of the other side (n, R).
        """
        return (self.by_head(projected) * mixing[:, None]).flatten(0, 1)

    def mixing_mttkrp(self, projected_query: Tensor, projected_key: Tensor) -> Tensor:
        r"""Return the same product for the head mode, $n_{ir} = \tilde w_{Q,r}^\top T_i \tilde w_{K,r}$, (H, R)."""
        return self.by_head(projected_query * projected_key).sum(1)


@dataclass(frozen=True)
class Step:
    """Three factors, or a step in them, with both projections onto the heads.

    Everything is linear in the factors, so sums of steps need no product with the tensor.
    """

    query: Tensor  # Z of queries, (n, R)
    mixing: Tensor  # M, (H, R)
    key: Tensor  # Z of keys, (n, R)
    projected_query: Tensor  # P of queries, (n, R)
    projected_key: Tensor  # P of keys, (n, R)

    @classmethod
    def of(cls, channels: Channels, query: Tensor, mixing: Tensor, key: Tensor) -> "Step":
        """Compute the projections of coefficients (n, R), (H, R), (n, R)."""
        return Step(query, mixing, key, channels.project_query(query), channels.project_key(key))

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The factors and the projections."""
        return self.query, self.mixing, self.key, self.projected_query, self.projected_key

    @property
    def rank(self) -> int:
        """Number of components R."""
        return self.mixing.shape[1]

    def project_by(self, channels: Channels) -> "Step":
        """Return the same factors with projections by these channels, in their dtype."""
        return Step.of(channels, *(part.to(channels.dtype) for part in self.parts[:3]))

    def plus(self, other: "Step", scale: float | Tensor) -> "Step":
        """Return this plus a multiple of another direction."""
        return Step(*(part + scale * added for part, added in zip(self.parts, other.parts, strict=True)))

    def dot(self, other: "Step") -> Tensor:
        """Return the sum of the three factors' inner products, a scalar."""
        query = (self.query * other.projected_query).sum()
        return query + (self.mixing * other.mixing).sum() + (self.key * other.projected_key).sum()


@dataclass(frozen=True)
class Point(Step):
    """A point with its Gram matrices: of query factor, mixing matrix and key factor, (3, R, R)."""

    grams: Tensor

    @classmethod
    def at(cls, point: Step) -> "Point":
        """Compute the Gram matrices of a point."""
        query, mixing, key = (
            point.query.mT @ point.projected_query,
            point.mixing.mT @ point.mixing,
            point.key.mT @ point.projected_key,
        )
        return cls(*point.parts, torch.stack([query, mixing, key]))

    def relative_error(self, channels: Channels) -> float:
        """Return the error of heads whose squared norm is 1."""
        inner = (channels.mixing_mttkrp(self.projected_query, self.projected_key) * self.mixing).sum()
        squared = self.grams.prod(0).sum()
        return float((1 - 2 * inner + squared).clamp_min(0).sqrt())

    def solve(self, channels: Channels, ridge: float, shift: float = SHIFT, reads: Tensor | None = None) -> Step:
        r"""Return the point after least squares for mixing, query, mixing again, and key.

        With the other two fixed, each factor is the solution of normal equations, a Hadamard product of two Gram
        matrices on the left and a matricised tensor times Khatri-Rao product on the right, as in

        $$Z_Q \big[(\tilde W_K^\top \tilde W_K) \odot (M^\top M) + \rho I\big] = \mathrm{mttkrp}(M, P_K)$$

        The mixing matrix costs next to nothing, and solving it before either projection saves about a third of the
        iterations.

        ρ is the weight `ridge` of the factors' squared norms beside the squared error, and `reads` (H, k) names the
        components that each head reads. NaNs in the result mean that a system was singular in spite of the shift.
        """
        query_gram, _, key_gram = self.grams
        right = channels.mixing_mttkrp(self.projected_query, self.projected_key)
        mixing = solve_mixing(query_gram * key_gram, right, ridge, shift, reads)

        right = channels.mttkrp(mixing, self.projected_key)
        query = solve_normal_equations(key_gram * (mixing.mT @ mixing), right, ridge, shift)
        projected_query = channels.project_query(query)
        query_gram = query.mT @ projected_query

        right = channels.mixing_mttkrp(projected_query, self.projected_key)
        mixing = solve_mixing(query_gram * key_gram, right, ridge, shift, reads)

        right = channels.mttkrp(mixing, projected_query)
        key = solve_normal_equations(query_gram * (mixing.mT @ mixing), right, ridge, shift)
        projected_key = channels.project_key(key)

        # A component's three columns get one length, the gauge in which the ridge is smallest.
        squares = query_gram.diagonal(), mixing.square().sum(0), (key * projected_key).sum(0).clamp_min(0)
        lengths = torch.stack(squares).sqrt()
        of_query, of_mixing, of_key = lengths.prod(0).pow(1 / 3) / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
        return Step(
            query * of_query, mixing * of_mixing, key * of_key, projected_query * of_query, projected_key * of_key
        )

    def widen(self, channels: Channels, count: int) -> "Point":
        r"""Return a point with further components: the singular channels that it fits worst, each for its own head.

        With $u_j$ and $v_j$ the singular vectors of a channel of head i and $\sigma_j$ its singular value, the point
        lacks $\delta_j = u_j^\top (T_i - \hat T_i) v_j = \sigma_j - u_j^\top \hat T_i v_j$ there. A component
        $\delta_j\, u_j \otimes v_j$ of that head alone lowers the squared error by $\delta_j^2$, whatever else is
        added. New components come last, with three columns of one length.
        """
        values = channels.query.square().sum(0)  # singular values
        tiny = torch.finfo(values.dtype).tiny
        fitted = channels.by_head(self.projected_query * self.projected_key) * self.mixing[:, None]
        lacking = values - fitted.sum(-1).flatten() / values.clamp_min(tiny)
        chosen = lacking.abs().argsort(descending=True, stable=True)[:count]
        columns, mixing = one_hot(chosen, values.view(len(self.mixing), -1), count)
        size = lacking[chosen].abs().pow(1 / 3)
        columns *= size / values[chosen].sqrt().clamp_min(tiny)
        mixing *= size * lacking[chosen].sign()
        added = Step.of(channels, columns, mixing, columns)
        pairs = zip(self.parts, added.parts, strict=True)
        return Point.at(Step(*(torch.cat(pair, 1) for pair in pairs)))

    def narrow(self, rank: int) -> "Point":
        """Return a point with the R components of largest norm, without those that a ridge has killed."""
        squares = self.grams.diagonal(dim1=1, dim2=2).prod(0)
        order = squares.argsort(descending=True, stable=True)[:rank]
        alive = squares[order] > DEAD_NORM_RATIO**2 * squares[order].median()
        kept = order[alive].sort().values
        return Point.at(Step(*(part[:, kept] for part in self.parts)))

    def restrict(self, channels: Channels, reads: Tensor) -> "Point":
        """Return the point with the best mixing matrix whose head i reads the components `reads[i]`, (H, k)."""
        query_gram, _, key_gram = self.grams
        right = channels.mixing_mttkrp(self.projected_query, self.projected_key)
        fitted = solve_mixing(query_gram * key_gram, right, 0.0, SHIFT, reads)
        as_before = torch.zeros_like(self.mixing).scatter(1, reads, self.mixing.gather(1, reads))
        mixing = torch.where(fitted.isfinite(), fitted, as_before)  # a singular system gives NaNs
        return Point.at(Step(self.query, mixing, self.key, self.projected_query, self.projected_key))

    def choose_reads(self, count: int, reads: Tensor | None = None) -> Tensor:
        r"""Return the components, (H, count), that each head loses most by not reading, of those it reads.

        With G the Gram matrix of the components that head i reads, $G = (\tilde W_Q^\top \tilde W_Q) \circ
        (\tilde W_K^\top \tilde W_K)$, the squared error grows by $m_{ir}^2 / (G^{-1})_{rr}$ if it no longer reads r,
        once its other entries are fitted again.
        """
        if reads is None:
            reads = torch.arange(self.rank, device=self.mixing.device).expand_as(self.mixing)
        query_gram, _, key_gram = self.grams
        gram = submatrices((query_gram * key_gram).double(), reads)
        scale = gram.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(gram.dtype).tiny).rsqrt()
        gram = gram * scale[:, :, None] * scale[:, None]
        gram.diagonal(dim1=1, dim2=2).add_(1e-12 * self.rank)
        # PyTorch's batched LU (`inv`, `solve`) fails with MKL and several threads (pytorch/pytorch#142815).
        root, info = torch.linalg.cholesky_ex(gram)
        identity = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
        root = torch.where(info[:, None, None] == 0, root, identity)  # a singular one: nothing is fitted again
        inverse = torch.cholesky_inverse(root).diagonal(dim1=1, dim2=2) * scale.square()
        losses = self.mixing.gather(1, reads).square() / inverse
        return reads.gather(1, losses.topk(count, 1).indices).sort(1).values


def submatrices(gram: Tensor, reads: Tensor) -> Tensor:
    """Return the rows and columns `reads` (H, k) of a matrix (R, R) for each head, (H, k, k)."""
    return gram[reads[:, :, None], reads[:, None]]


def solve_mixing(gram: Tensor, right: Tensor, ridge: float, shift: float, reads: Tensor | None) -> Tensor:
    """Solve for the mixing matrix (H, R), zero where a head does not read a component (`reads`, (H, k), or all)."""
    if reads is None:
        return solve_normal_equations(gram, right, ridge, shift)
    rows = right.gather(1, reads).unsqueeze(1)  # (H, 1, k)
    solution = solve_normal_equations(submatrices(gram, reads), rows, ridge, shift)
    return torch.zeros_like(right).scatter(1, reads, solution.squeeze(1))


def solve_normal_equations(gram: Tensor, right: Tensor, ridge: float, shift: float = SHIFT) -> Tensor:
    """Return X (n, R), or (H, n, R), of the normal equations X (gram + ridge·I) = right; solved in float64.

    The positive semidefinite Gram matrix (R, R), or (H, R, R), may be singular: `shift`, in units of R times the
    rounding of one number, is added to the diagonal once it is scaled to 1. The result is NaN where even the shifted
    system has no Cholesky factorization, so that no device is waited for.
    """
    system = gram.to(torch.float64, copy=True)
    diagonal = system.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(ridge)
    # With a unit diagonal, one small shift covers the rounding of components of every size.
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    system *= scale[..., :, None] * scale[..., None, :]
    diagonal.add_(shift * GRAM_RTOL[gram.dtype] * gram.shape[-1])
    root, info = torch.linalg.cholesky_ex(system)
    scale = torch.where(info[..., None] == 0, scale, torch.nan).unsqueeze(-2)  # of columns
    if right.shape[-2] < right.shape[-1]:
        return (torch.cholesky_solve((right * scale).mT, root).mT * scale).to(right.dtype)
    # With many right-hand sides one product costs less than two triangular solves.
    inverse = torch.cholesky_inverse(root).mul_(scale.mT * scale)
    return right @ inverse.to(right.dtype)


@dataclass(frozen=True)
class LineSearch:
    r"""The penalised squared error on the line $x + \alpha p$.

    $$\|T - \hat T(\alpha)\|_F^2 + \rho\,\big(\|\tilde W_Q\|^2 + \|M\|^2 + \|\tilde W_K\|^2\big)$$
    """

    point: Point  # x
    direction: Step  # p
    grams: Tensor  # of each factor the matrices of 1, α, α² in its Gram matrix along the line, (3, 3, R, R)
    squared: Tensor  # coefficients of 1 to α⁶ of the squared error of heads whose squared norm is 1, (7,)
    penalty: Tensor  # of 1 to α⁶ of the ridge's part, (7,)

    @classmethod
    def of(cls, channels: Channels, point: Point, direction: Step, ridge: float) -> Self:
        """Expand the polynomial; two R×R products per projection and none with the tensor."""
        sides = (
            (point.query, direction.query, direction.projected_query),
            (point.mixing, direction.mixing, direction.mixing),
            (point.key, direction.key, direction.projected_key),
        )
        grams = point.grams.new_empty(3, *point.grams.shape)
        for gram, fixed, (factor, step, projected_step) in zip(grams, point.grams, sides, strict=True):
            cross = factor.mT @ projected_step
            gram[0], gram[1], gram[2] = fixed, cross + cross.mT, step.mT @ projected_step
        query, mixing, key = grams
        # ‖T̂‖² and ⟨T, T̂⟩ are sums of products of three factors' parts, of power i, j and k in α.
        norms = torch.stack([(part * mixing).flatten(1) @ key.flatten(1).mT for part in query])  # (3, 3, 3)
        queries = point.projected_query, direction.projected_query
        keys = point.projected_key, direction.projected_key
        heads = [channels.mixing_mttkrp(of_query, of_key).flatten() for of_query in queries for of_key in keys]
        mixings = torch.stack([point.mixing.flatten(), direction.mixing.flatten()])
        inner = (torch.stack(heads) @ mixings.mT).view(2, 2, 2)
        squared = _by_power(norms)
        squared[:4] -= 2 * _by_power(inner)
        squared[0] += 1.0
        penalty = torch.zeros_like(squared)
        penalty[:3] = ridge * grams.diagonal(dim1=2, dim2=3).sum((0, 2))
        return cls(point, direction, grams, squared, penalty)

    def at(self, step: float) -> Point:
        """Return the point at one step length, its Gram matrices taken from the expansion."""
        fixed, linear, quadratic = self.grams.unbind(1)
        return Point(*self.point.plus(self.direction, step).parts, fixed + step * (linear + step * quadratic))


def _by_power(products: Tensor) -> Tensor:
    """Sum coefficients (n, n, n) over i + j + k, the power, in float64."""
    size = len(products)
    sums = products.new_zeros(3 * size - 2, dtype=torch.float64)
    for i in range(size):
        for j in range(size):
            sums[i + j : i + j + size] += products[i, j]
    return sums


def positive_minimiser(coefficients: Sequence[float]) -> float:
    r"""Return the $\alpha \in [0, 100]$ minimising $\sum_k c_k \alpha^k$ for k from 1, given the $c_k$."""
    slope = [power * value for power, value in enumerate(coefficients, 1)]
    if not all(map(isfinite, slope)):
        return 0.0
    least = float(np.finfo(float).eps) * max(map(abs, slope))
    degree = max((power for power, value in enumerate(slope) if abs(value) > least), default=0)
    if degree == 0 or not all(isfinite(value / slope[degree]) for value in slope):
        return 0.0
    roots: list[complex] = np.roots(slope[degree::-1]).tolist()
    steps = [min(root.real, MAX_STEP) for root in roots if root.real > 0 and abs(root.imag) <= 1e-6 * abs(root)]
    reached = [(sum(c * step**power for power, c in enumerate(coefficients, 1)), step) for step in steps]
    value, step = min(reached, default=(0.0, 0.0))
    return step if value < 0 else 0.0
