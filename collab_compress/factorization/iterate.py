"""A point of the solver: three factors with the products a sweep leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from collab_compress.factorization.factors import Factors
from collab_compress.factorization.head_tensor import HeadTensor, relative

SHIFT = 16.0


@dataclass(frozen=True)
class Direction:
    """Three factors, or a step in them, with both projections onto the heads.

    The projections are linear in the factors, so sums of directions need no product with the tensor.

    Args:
        query: (Dq, R).
        mixing: (H, R).
        key: (Dk, R).
        projected_query: (H, d, R).
        projected_key: (H, d, R).
    """

    query: Tensor
    mixing: Tensor
    key: Tensor
    projected_query: Tensor
    projected_key: Tensor

    def plus(self, other: Direction, scale: float) -> Direction:
        """Return this plus a multiple of another direction."""
        return Direction(
            torch.add(self.query, other.query, alpha=scale),
            torch.add(self.mixing, other.mixing, alpha=scale),
            torch.add(self.key, other.key, alpha=scale),
            torch.add(self.projected_query, other.projected_query, alpha=scale),
            torch.add(self.projected_key, other.projected_key, alpha=scale),
        )

    def dot(self, other: Direction) -> Tensor:
        """Return the sum of the three factors' inner products, a scalar."""
        return (self.query * other.query).sum() + (self.mixing * other.mixing).sum() + (self.key * other.key).sum()


@dataclass(frozen=True)
class Iterate(Direction):
    """A point with its three R×R Gram matrices.

    Args:
        query_gram: of the query factor.
        mixing_gram: of the mixing matrix.
        key_gram: of the key factor.
    """

    query_gram: Tensor
    mixing_gram: Tensor
    key_gram: Tensor

    @classmethod
    def of(cls, tensor: HeadTensor, factors: Factors) -> Iterate:
        """Compute projections and Gram matrices of factors."""
        query, mixing, key = factors.query, factors.mixing, factors.key
        return cls(
            query, mixing, key, tensor.project_query(query), tensor.project_key(key),
            query.mT @ query, mixing.mT @ mixing, key.mT @ key,
        )  # fmt: skip

    def relative_error(self, tensor: HeadTensor, norm: float) -> float:
        """Return the relative error; it falls out of the products at no product with the tensor.

        Args:
            tensor: the heads.
            norm: their squared norm.
        """
        inner = (tensor.mixing_mttkrp(self.projected_query, self.projected_key) * self.mixing).sum()
        squared = (self.query_gram * self.mixing_gram * self.key_gram).sum()
        return relative((norm - 2 * inner + squared).item(), norm)

    def swept(self, tensor: HeadTensor, ridge: float, shift: float = SHIFT) -> Iterate:
        """Return the point after least squares for mixing, query, mixing again, and key.

        The mixing matrix costs next to nothing, and solving it before either projection saves about a
        third of the sweeps.

        Args:
            tensor: the heads.
            ridge: weight of the factors' squared norms beside the squared error.
            shift: as in `least_squares`; NaNs in the point say that a system was singular even so.
        """
        point = self._with_mixing(tensor, ridge, shift)
        right = tensor.query_mttkrp(point.mixing, point.projected_key)
        query = least_squares(point.key_gram * point.mixing_gram, right, ridge, shift)
        point = replace(
            point, query=query, query_gram=query.mT @ query, projected_query=tensor.project_query(query)
        )._with_mixing(tensor, ridge, shift)
        right = tensor.key_mttkrp(point.mixing, point.projected_query)
        key = least_squares(point.query_gram * point.mixing_gram, right, ridge, shift)
        return replace(point, key=key, key_gram=key.mT @ key, projected_key=tensor.project_key(key))._balanced()

    def _with_mixing(self, tensor: HeadTensor, ridge: float, shift: float) -> Iterate:
        right = tensor.mixing_mttkrp(self.projected_query, self.projected_key)
        mixing = least_squares(self.query_gram * self.key_gram, right, ridge, shift)
        return replace(self, mixing=mixing, mixing_gram=mixing.mT @ mixing)

    def _balanced(self) -> Iterate:
        """Give a component's three columns one length, the gauge in which the ridge is smallest."""
        lengths = [gram.diagonal().sqrt() for gram in (self.query_gram, self.mixing_gram, self.key_gram)]
        common = (lengths[0] * lengths[1] * lengths[2]).pow(1 / 3)
        tiny = torch.finfo(common.dtype).tiny
        query, mixing, key = (common / length.clamp_min(tiny) for length in lengths)
        return Iterate(
            self.query * query, self.mixing * mixing, self.key * key,
            self.projected_query * query, self.projected_key * key,
            self.query_gram * torch.outer(query, query),
            self.mixing_gram * torch.outer(mixing, mixing),
            self.key_gram * torch.outer(key, key),
        )  # fmt: skip


def least_squares(gram: Tensor, right: Tensor, ridge: float, shift: float = SHIFT) -> Tensor:
    """Return X minimising the quadratic whose normal equations are X (gram + ridge·I) = right.

    Args:
        gram: positive semidefinite, possibly singular, (R, R).
        right: (n, R).
        ridge: added to the diagonal.
        shift: added to the diagonal once it is scaled to 1, in units of R times the rounding of one number.

    Returns:
        (n, R); all NaN where the system has no Cholesky factorization even so, which needs no wait for a device.
    """
    system = gram.clone()
    diagonal = system.diagonal()
    diagonal.add_(ridge)
    # With a unit diagonal, rounding of every size of component is covered by one small shift.
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    system *= torch.outer(scale, scale)
    system.diagonal().add_(shift * torch.finfo(gram.dtype).eps * len(gram))
    root, info = torch.linalg.cholesky_ex(system)
    found = torch.cholesky_solve((right * scale).mT, root).mT * scale
    return torch.where(info == 0, found, torch.nan)
