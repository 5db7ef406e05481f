r"""Points of the solver: factors as coefficients of the heads' channels, and the least squares that move them.

Least squares for a projection always give a combination of the heads' own channels, $\tilde W_Q = F_Q Z_Q$ with
$F_Q = [Q_1 \dots Q_H]$. So coefficients $Z$ are held, and their products with the channels' Gram matrix,
$P_Q = F_Q^\top \tilde W_Q = (F_Q^\top F_Q) Z_Q$: one product with the tensor for each projection and sweep.
"""

from __future__ import annotations

import torch
from torch import Tensor

from collab_compress.factorization.head_tensor import HeadTensor

SHIFT = 16.0
# Of an entry of a Gram matrix whose products are made in that dtype: in float32 errors of 1e-7 average out.
ROUNDING = {torch.float32: 1e-9, torch.float64: torch.finfo(torch.float64).eps}


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
        # Where heads are many and inputs narrow, the Gram matrices would be the larger ones.
        if query.shape[1] <= 2 * min(len(query), len(key)):
            self.grams = query.mT @ query, key.mT @ key

    @classmethod
    def of(cls, tensor: HeadTensor) -> Channels:
        """Return the channels of heads, as they are."""
        return cls(tensor.flat_query, tensor.flat_key, tensor.heads)

    def to(self, dtype: torch.dtype) -> Channels:
        """Return them in another dtype."""
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
        r"""Matricised tensor times Khatri-Rao product for one side, as coefficients: $P$ with $m_i$ on head i's rows.

        $$\sum_i T_i \tilde W_K \mathrm{diag}(m_i) = F_Q\; \mathrm{stack}_i\big((K_i^\top \tilde W_K) \odot m_i\big)$$

        Args:
            mixing: M, (H, R).
            projected: of the other side, (n, R).

        Returns:
            (n, R).
        """
        return (self.by_head(projected) * mixing[:, None]).flatten(0, 1)

    def mixing_mttkrp(self, projected_query: Tensor, projected_key: Tensor) -> Tensor:
        r"""The same product for the head mode, $n_{ir} = \tilde w_{Q,r}^\top T_i \tilde w_{K,r}$, (H, R)."""
        return self.by_head(projected_query * projected_key).sum(1)


class Direction:
    """Three factors, or a step in them, with both projections onto the heads, in one block of numbers.

    Everything is linear in the factors, so sums of directions need no product with the tensor.

    Args:
        values: Z of queries, Z of keys, M, projected queries, projected keys, M: (4n + 2H, R). The first half times
            the second is the factors' inner product.
        heads: H.
    """

    def __init__(self, values: Tensor, heads: int) -> None:
        self.values, self.heads = values, heads
        channels = len(values) // 4 - heads // 2
        sizes = (channels, channels, heads, channels, channels, heads)
        self.parts = values.split(sizes)
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

    def swept(self, channels: Channels, ridge: float, shift: float = SHIFT, out: Tensor | None = None) -> Direction:
        """Return the point after least squares for mixing, query, mixing again, and key.

        The mixing matrix costs next to nothing, and solving it before either projection saves about a
        third of the sweeps.

        Args:
            channels: of the heads.
            ridge: weight of the factors' squared norms beside the squared error.
            shift: as in `least_squares`; NaNs in the point say that a system was singular even so.
            out: where the values go; into new memory if None.
        """
        swept = Direction(torch.empty_like(self.values) if out is None else out, self.heads)
        query, key, mixing, projected_query, projected_key, mixing_copy = swept.parts
        query_gram, _, key_gram = self.grams
        right = channels.mixing_mttkrp(self.projected_query, self.projected_key)
        least_squares(query_gram * key_gram, right, ridge, shift, out=mixing)
        right = channels.mttkrp(mixing, self.projected_key)
        least_squares(key_gram * (mixing.mT @ mixing), right, ridge, shift, out=query)
        channels.project_query(query, out=projected_query)
        query_gram = query.mT @ projected_query
        right = channels.mixing_mttkrp(projected_query, self.projected_key)
        least_squares(query_gram * key_gram, right, ridge, shift, out=mixing)
        right = channels.mttkrp(mixing, projected_query)
        least_squares(query_gram * (mixing.mT @ mixing), right, ridge, shift, out=key)
        channels.project_key(key, out=projected_key)
        # A component's three columns get one length, the gauge in which the ridge is smallest.
        squares = query_gram.diagonal(), (key * projected_key).sum(0).clamp_min(0), mixing.square().sum(0)
        lengths = torch.stack(squares).sqrt()
        scales = lengths.prod(0).pow(1 / 3) / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
        for part, scale in zip(
            (query, key, mixing, projected_query, projected_key), (*scales, *scales[:2]), strict=True
        ):
            part.mul_(scale)
        mixing_copy.copy_(mixing)
        return swept


def least_squares(
    gram: Tensor, right: Tensor, ridge: float, shift: float = SHIFT, out: Tensor | None = None
) -> Tensor:
    """Return X minimising the quadratic whose normal equations are X (gram + ridge·I) = right; solved in float64.

    Args:
        gram: positive semidefinite, possibly singular, (R, R).
        right: (n, R).
        ridge: added to the diagonal.
        shift: added to the diagonal once it is scaled to 1, in units of R times the rounding of one number.
        out: where X goes; into new memory if None.

    Returns:
        (n, R); all NaN where the system has no Cholesky factorization even so, which needs no wait for a device.
    """
    system = gram.to(torch.float64, copy=True)
    diagonal = system.diagonal()
    diagonal.add_(ridge)
    # With a unit diagonal, rounding of every size of component is covered by one small shift.
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    system *= scale[:, None] * scale
    diagonal.add_(shift * ROUNDING[gram.dtype] * len(gram))
    root, info = torch.linalg.cholesky_ex(system)
    scale = torch.where(info == 0, scale, torch.nan)
    if len(right) < len(gram):
        solution = (torch.cholesky_solve((right * scale).mT, root).mT * scale).to(right.dtype)
        return solution if out is None else out.copy_(solution)
    # Of many right sides a product costs less than two triangular solves.
    inverse = torch.cholesky_inverse(root).mul_(scale[:, None] * scale)
    return torch.matmul(right, inverse.to(right.dtype), out=out)
