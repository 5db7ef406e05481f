r"""Points of the solver, the least squares that move them, and the exact line search between them.

Least squares for a projection always give a combination of the heads' own channels, $\tilde W_Q = F_Q Z_Q$ with
$F_Q = [Q_1 \dots Q_H]$. So the solver holds coefficients $Z$, and their products with the channels' Gram matrix,
$P_Q = F_Q^\top \tilde W_Q = (F_Q^\top F_Q) Z_Q$: one product with the tensor for each projection and sweep.

Along a line the squared error is a polynomial of degree six, whose lowest point is computed exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from collab_compress.factorization.factors import HeadTensor
from collab_compress.factorization.truncation import one_hot

SHIFT = 16.0
# Relative rounding of an entry of a Gram matrix whose products are made in that dtype: in float32 errors of 1e-7
# average out.
ROUNDING = {torch.float32: 1e-9, torch.float64: torch.finfo(torch.float64).eps}
DEAD = 1e-2  # times the median norm of components: a smaller one has been killed by a ridge
LONGEST_STEP = 100.0


class Channels:
    r"""The channels of all heads side by side, as the solver uses them.

    Args:
        query: $F_Q$, (Dq, n) with n = H·r.
        key: $F_K$, (Dk, n).
        heads: H.
    """

    def __init__(self, query: Tensor, key: Tensor, heads: int) -> None:
        self.query, self.key, self.heads, self.dtype = query, key, heads, query.dtype
        self.grams: tuple[Tensor, Tensor] | None = None
        # With many heads and narrow inputs the Gram matrices would be larger than the channels.
        if query.shape[1] <= 2 * min(len(query), len(key)):
            self.grams = query.mT @ query, key.mT @ key

    @classmethod
    def of(cls, tensor: HeadTensor) -> Channels:
        """Return the channels of heads, as they are."""
        return cls(tensor.flat_query, tensor.flat_key, tensor.heads)

    def to(self, dtype: torch.dtype) -> Channels:
        """Return the channels in another dtype."""
        return Channels(self.query.to(dtype), self.key.to(dtype), self.heads)

    def project_query(self, coefficients: Tensor, out: Tensor | None = None) -> Tensor:
        r"""Return $F_Q^\top F_Q Z$, (n, R), from Z (n, R)."""
        if self.grams is None:
            return torch.matmul(self.query.mT, self.query @ coefficients, out=out)
        return torch.matmul(self.grams[0], coefficients, out=out)

    def project_key(self, coefficients: Tensor, out: Tensor | None = None) -> Tensor:
        r"""Return $F_K^\top F_K Z$, (n, R), from Z (n, R)."""
        if self.grams is None:
            return torch.matmul(self.key.mT, self.key @ coefficients, out=out)
        return torch.matmul(self.grams[1], coefficients, out=out)

    def by_head(self, projected: Tensor) -> Tensor:
        """View channels (n, R) as (H, r, R)."""
        return projected.view(self.heads, len(projected) // self.heads, projected.shape[1])

    def mttkrp(self, mixing: Tensor, projected: Tensor) -> Tensor:
        r"""Return the matricised tensor times Khatri-Rao product for one side, as coefficients (n, R).

        $$\sum_i T_i \tilde W_K \mathrm{diag}(m_i) = F_Q\; \mathrm{stack}_i\big((K_i^\top \tilde W_K) \odot m_i\big)$$

        from M (H, R) and the projections of the other side (n, R).
        """
        return (self.by_head(projected) * mixing[:, None]).flatten(0, 1)

    def mixing_mttkrp(self, projected_query: Tensor, projected_key: Tensor) -> Tensor:
        r"""Return the same product for the head mode, $n_{ir} = \tilde w_{Q,r}^\top T_i \tilde w_{K,r}$, (H, R)."""
        return self.by_head(projected_query * projected_key).sum(1)


class Direction:
    """Three factors, or a step in them, with both projections onto the heads, in one tensor.

    Everything is linear in the factors, so sums of directions need no product with the tensor.

    Args:
        values: Z of queries, Z of keys, M, projected queries, projected keys, M: (4n + 2H, R). The first half times
            the second is the factors' inner product.
        heads: H.
    """

    def __init__(self, values: Tensor, heads: int) -> None:
        self.values, self.heads = values, heads
        channels = len(values) // 4 - heads // 2
        self.parts = values.split((channels, channels, heads) * 2)
        self.query, self.key, self.mixing, self.projected_query, self.projected_key, _ = self.parts

    @classmethod
    def of(cls, channels: Channels, query: Tensor, mixing: Tensor, key: Tensor) -> Direction:
        """Compute the projections of coefficients (n, R), (H, R), (n, R)."""
        projected = channels.project_query(query), channels.project_key(key)
        return cls(torch.cat([query, key, mixing, *projected, mixing]), channels.heads)

    def seen_by(self, channels: Channels) -> Direction:
        """Return the same factors with projections by these channels, in their dtype."""
        query, mixing, key = (part.to(channels.dtype) for part in (self.query, self.mixing, self.key))
        return Direction.of(channels, query, mixing, key)

    def plus(self, other: Direction, scale: float | Tensor, out: Tensor | None = None) -> Direction:
        """Return this plus a multiple of another direction."""
        if isinstance(scale, Tensor):
            values = torch.addcmul(self.values, other.values, scale, out=out)
        else:
            values = torch.add(self.values, other.values, alpha=scale, out=out)
        return Direction(values, self.heads)

    def dot(self, other: Direction) -> Tensor:
        """Return the sum of the three factors' inner products, a scalar."""
        factors, projections = self.values.chunk(2)[0], other.values.chunk(2)[1]
        return torch.dot(factors.flatten(), projections.flatten())


class Iterate(Direction):
    """A point with its three R×R Gram matrices.

    Args:
        values: as for `Direction`.
        heads: H.
        grams: of query factor, mixing matrix and key factor, (3, R, R).
    """

    def __init__(self, values: Tensor, heads: int, grams: Tensor) -> None:
        super().__init__(values, heads)
        self.grams = grams

    @classmethod
    def at(cls, point: Direction) -> Iterate:
        """Compute the Gram matrices of a point."""
        pairs = ((point.query, point.projected_query), (point.mixing,) * 2, (point.key, point.projected_key))
        return cls(point.values, point.heads, torch.stack([left.mT @ right for left, right in pairs]))

    def relative_error(self, channels: Channels) -> float:
        """Return the error of heads whose squared norm is 1."""
        inner = (channels.mixing_mttkrp(self.projected_query, self.projected_key) * self.mixing).sum()
        squared = self.grams.prod(0).sum()
        return float((1 - 2 * inner + squared).clamp_min(0).sqrt())

    def swept(
        self,
        channels: Channels,
        ridge: float,
        shift: float = SHIFT,
        out: Tensor | None = None,
        reads: Tensor | None = None,
    ) -> Direction:
        """Return the point after least squares for mixing, query, mixing again, and key.

        The mixing matrix costs next to nothing, and solving it before either projection saves about a
        third of the sweeps.

        Args:
            channels: of the heads.
            ridge: weight of the factors' squared norms beside the squared error.
            shift: as in `solve_normal_equations`; NaNs in the result mean that a system was singular all the same.
            out: memory for the values.
            reads: components that each head reads, (H, k); None for all.
        """
        swept = Direction(torch.empty_like(self.values) if out is None else out, self.heads)
        query, key, mixing, projected_query, projected_key, mixing_copy = swept.parts
        query_gram, _, key_gram = self.grams
        right = channels.mixing_mttkrp(self.projected_query, self.projected_key)
        solve_mixing(query_gram * key_gram, right, ridge, shift, mixing, reads)
        right = channels.mttkrp(mixing, self.projected_key)
        solve_normal_equations(key_gram * (mixing.mT @ mixing), right, ridge, shift, out=query)
        channels.project_query(query, out=projected_query)
        query_gram = query.mT @ projected_query
        right = channels.mixing_mttkrp(projected_query, self.projected_key)
        solve_mixing(query_gram * key_gram, right, ridge, shift, mixing, reads)
        right = channels.mttkrp(mixing, projected_query)
        solve_normal_equations(query_gram * (mixing.mT @ mixing), right, ridge, shift, out=key)
        channels.project_key(key, out=projected_key)
        # A component's three columns get one length, the gauge in which the ridge is smallest.
        squares = query_gram.diagonal(), (key * projected_key).sum(0).clamp_min(0), mixing.square().sum(0)
        lengths = torch.stack(squares).sqrt()
        scales = lengths.prod(0).pow(1 / 3) / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
        for part, scale in zip(swept.parts[:5], (*scales, *scales[:2]), strict=True):
            part.mul_(scale)
        mixing_copy.copy_(mixing)
        return swept

    def widened(self, channels: Channels, count: int) -> Iterate:
        r"""Return a point with further components: the singular channels that it fits worst, each for its own head.

        With $u_j$ and $v_j$ the singular vectors of a channel of head i and $\sigma_j$ its singular value, the point
        lacks $\delta_j = u_j^\top (T_i - \hat T_i) v_j = \sigma_j - u_j^\top \hat T_i v_j$ there. A component
        $\delta_j\, u_j \otimes v_j$ of that head alone lowers the squared error by $\delta_j^2$, whatever else is
        added. New components come last, with three columns of one length.
        """
        values = channels.query.square().sum(0)
        tiny = torch.finfo(values.dtype).tiny
        fitted = channels.by_head(self.projected_query * self.projected_key) * self.mixing[:, None]
        lacking = values - fitted.sum(-1).flatten() / values.clamp_min(tiny)
        chosen = lacking.abs().argsort(descending=True, stable=True)[:count]
        columns, mixing = one_hot(chosen, values.view(channels.heads, -1), count)
        size = lacking[chosen].abs().pow(1 / 3)
        columns *= size / values[chosen].sqrt().clamp_min(tiny)
        mixing *= size * lacking[chosen].sign()
        added = Direction.of(channels, columns, mixing, columns)
        return Iterate.at(Direction(torch.cat([self.values, added.values], 1), self.heads))

    def narrowed(self, rank: int) -> Iterate:
        """Return a point with the R components of largest norm, without those that a ridge has killed."""
        squares = self.grams.diagonal(dim1=1, dim2=2).prod(0)
        order = squares.argsort(descending=True, stable=True)[:rank]
        alive = squares[order] > DEAD**2 * squares[order].median()
        return Iterate.at(Direction(self.values[:, order[alive].sort().values], self.heads))

    def read_by(self, channels: Channels, reads: Tensor) -> Iterate:
        """Return the point with the best mixing matrix whose head i reads the components `reads[i]`, (H, k)."""
        point = Direction(self.values.clone(), self.heads)
        query_gram, _, key_gram = self.grams
        right = channels.mixing_mttkrp(self.projected_query, self.projected_key)
        solve_mixing(query_gram * key_gram, right, 0.0, SHIFT, point.mixing, reads)
        as_before = torch.zeros_like(self.mixing).scatter(1, reads, self.mixing.gather(1, reads))
        point.mixing.copy_(torch.where(point.mixing.isfinite(), point.mixing, as_before))  # of a singular system
        point.parts[-1].copy_(point.mixing)
        return Iterate.at(point)

    def strongest_reads(self, count: int, reads: Tensor | None = None) -> Tensor:
        r"""Return the components, (H, count), that each head loses most by not reading, of those it reads.

        With G the Gram matrix of the components that head i reads, $G = (\tilde W_Q^\top \tilde W_Q) \circ
        (\tilde W_K^\top \tilde W_K)$, the squared error grows by $m_{ir}^2 / (G^{-1})_{rr}$ if it no longer reads r,
        once its other entries are fitted again.
        """
        rank = self.mixing.shape[1]
        if reads is None:
            reads = torch.arange(rank, device=self.mixing.device).expand(self.heads, rank)
        query_gram, _, key_gram = self.grams
        gram = submatrices((query_gram * key_gram).double(), reads)
        scale = gram.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(gram.dtype).tiny).rsqrt()
        gram = gram * scale[:, :, None] * scale[:, None]
        gram.diagonal(dim1=1, dim2=2).add_(1e-12 * rank)
        inverse = torch.linalg.inv(gram).diagonal(dim1=1, dim2=2) * scale.square()
        losses = self.mixing.gather(1, reads).square() / inverse
        return reads.gather(1, losses.topk(count, 1).indices).sort(1).values


def submatrices(gram: Tensor, reads: Tensor) -> Tensor:
    """Return the rows and columns `reads` (H, k) of a matrix (R, R) for each head, (H, k, k)."""
    return gram[reads[:, :, None], reads[:, None]]


def solve_mixing(
    gram: Tensor, right: Tensor, ridge: float, shift: float, out: Tensor, reads: Tensor | None = None
) -> None:
    """Solve for the mixing matrix (H, R), written to `out`: zero where a head does not read a component.

    Args:
        gram: of the components, (R, R).
        right: (H, R).
        ridge: as for `solve_normal_equations`.
        shift: likewise.
        out: memory for the mixing matrix.
        reads: components that each head reads, (H, k); None for all.
    """
    if reads is None:
        solve_normal_equations(gram, right, ridge, shift, out=out)
        return
    rows = right.gather(1, reads).unsqueeze(1)  # (H, 1, k)
    solution = solve_normal_equations(submatrices(gram, reads), rows, ridge, shift)
    out.zero_().scatter_(1, reads, solution.squeeze(1))


def solve_normal_equations(
    gram: Tensor, right: Tensor, ridge: float, shift: float = SHIFT, out: Tensor | None = None
) -> Tensor:
    """Return X minimising the quadratic whose normal equations are X (gram + ridge·I) = right; solved in float64.

    Args:
        gram: positive semidefinite, possibly singular, (R, R), or several, (H, R, R).
        right: (n, R), or (H, n, R).
        ridge: added to the diagonal.
        shift: added to the diagonal once it is scaled to 1, in units of R times the rounding of one number.
        out: memory for X; None for new memory.

    Returns:
        As `right`; all NaN where even the shifted system has no Cholesky factorization, so that no device is waited
        for.
    """
    system = gram.to(torch.float64, copy=True)
    diagonal = system.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(ridge)
    # With a unit diagonal, one small shift covers the rounding of components of every size.
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    system *= scale[..., :, None] * scale[..., None, :]
    diagonal.add_(shift * ROUNDING[gram.dtype] * gram.shape[-1])
    root, info = torch.linalg.cholesky_ex(system)
    scale = torch.where(info[..., None] == 0, scale, torch.nan).unsqueeze(-2)  # of columns
    if right.shape[-2] < right.shape[-1]:
        solution = (torch.cholesky_solve((right * scale).mT, root).mT * scale).to(right.dtype)
        return solution if out is None else out.copy_(solution)
    # With many right-hand sides one product costs less than two triangular solves.
    inverse = torch.cholesky_inverse(root).mul_(scale.mT * scale)
    return torch.matmul(right, inverse.to(right.dtype), out=out)


@dataclass(frozen=True)
class Line:
    r"""The penalised squared error on the line $x + \alpha p$.

    $$\|T - \hat T(\alpha)\|_F^2 + \rho\,\big(\|\tilde W_Q\|^2 + \|M\|^2 + \|\tilde W_K\|^2\big)$$

    Args:
        point: x.
        direction: p.
        grams: per factor the matrices of $1, \alpha, \alpha^2$ in its Gram matrix along the line, (3, 3, R, R).
        squared: coefficients of $1$ to $\alpha^6$ of the squared error of heads whose squared norm is 1, (7,).
        penalty: of $1$ to $\alpha^6$ of the ridge's part, (7,).
        out: memory for the next point's values; None for new memory.
    """

    point: Iterate
    direction: Direction
    grams: Tensor
    squared: Tensor
    penalty: Tensor
    out: Tensor | None = None

    @classmethod
    def of(
        cls, channels: Channels, point: Iterate, direction: Direction, ridge: float, out: Tensor | None = None
    ) -> Line:
        """Expand the polynomial; two R×R products per projection and none with the tensor."""
        rank = point.grams.shape[-1]
        grams = point.grams.new_empty(3, 3, rank, rank)
        grams[:, 0] = point.grams
        sides = (
            (point.query, direction.query, direction.projected_query),
            (point.mixing, direction.mixing, direction.mixing),
            (point.key, direction.key, direction.projected_key),
        )
        for gram, (factor, step, projected_step) in zip(grams, sides, strict=True):
            cross = factor.mT @ projected_step
            torch.add(cross, cross.mT, out=gram[1])
            torch.matmul(step.mT, projected_step, out=gram[2])
        query, mixing, key = grams
        products = grams.new_zeros(5, rank, rank)
        for power in range(3):
            products[power : power + 3].addcmul_(query[power : power + 1], mixing)
        squared = _diagonal_sums(products.flatten(1) @ key.flatten(1).mT)
        cross = channels.mixing_mttkrp(point.projected_query, direction.projected_key)
        inner = torch.stack(
            [
                channels.mixing_mttkrp(point.projected_query, point.projected_key),
                cross + channels.mixing_mttkrp(direction.projected_query, point.projected_key),
                channels.mixing_mttkrp(direction.projected_query, direction.projected_key),
            ]
        )
        heads = torch.stack([point.mixing, direction.mixing])
        squared[:4] -= 2 * _diagonal_sums(inner.flatten(1) @ heads.flatten(1).mT)
        squared[0] += 1.0
        penalty = torch.zeros_like(squared)
        penalty[:3] = ridge * grams.diagonal(dim1=2, dim2=3).sum((0, 2))
        return cls(point, direction, grams, squared, penalty, out)

    def at(self, step: float) -> Iterate:
        """Return the point at one step length, its Gram matrices taken from the expansion."""
        grams = torch.add(self.grams[:, 1], self.grams[:, 2], alpha=step)
        grams = torch.add(self.grams[:, 0], grams, alpha=step)
        return Iterate(self.point.plus(self.direction, step, self.out).values, self.point.heads, grams)


def _diagonal_sums(table: Tensor) -> Tensor:
    """Sum a table of coefficients over i + j = n: the product of two polynomials, in float64."""
    rows, columns = table.shape
    sums = table.new_zeros(rows + columns - 1, dtype=torch.float64)
    for j in range(columns):
        sums[j : j + rows] += table[:, j]
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
    steps = [min(root.real, LONGEST_STEP) for root in roots if root.real > 0 and abs(root.imag) <= 1e-6 * abs(root)]
    reached = [(sum(c * step**power for power, c in enumerate(coefficients, 1)), step) for step in steps]
    value, step = min(reached, default=(0.0, 0.0))
    return step if value < 0 else 0.0
