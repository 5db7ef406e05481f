"""The H×Dq×Dk tensor of the heads' query-key products, kept factored."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from collab_compress.factorization.factors import Factors


@dataclass(frozen=True)
class HeadTensor:
    r"""The tensor whose slice i is one head's query-key product, never formed.

    $$T_i = Q_i K_i^\top$$

    where $Q_i$ and $K_i$ are the heads' projections; equation 9 of "Multi-Head Attention: Collaborate Instead
    of Concatenate". Each slice has rank d, so a product with T costs D·Hd where the dense tensor
    asks for H·D².

    Args:
        query: $Q_i$, (H, Dq, d).
        key: $K_i$, (H, Dk, d).

    Raises:
        ValueError: the two differ in heads or in per-head width, or are not 3-dimensional.
    """

    query: Tensor
    key: Tensor

    def __post_init__(self) -> None:
        fits = self.query.ndim == 3 and self.key.ndim == 3
        if not fits or self.query.shape[0::2] != self.key.shape[0::2]:
            raise ValueError(
                f"query and key heads do not fit together: got query {tuple(self.query.shape)}, "
                f"key {tuple(self.key.shape)}; expected (H, Dq, d) and (H, Dk, d) with one H and one d"
            )

    @property
    def heads(self) -> int:
        """Number of heads H."""
        return self.query.shape[0]

    @property
    def head_width(self) -> int:
        """Per-head query and key width d."""
        return self.query.shape[2]

    @property
    def full_rank(self) -> int:
        """The rank H·d at which concatenation is exact."""
        return self.heads * self.head_width

    @cached_property
    def flat_query(self) -> Tensor:
        """The heads' query projections side by side, (Dq, H·d)."""
        return self.query.transpose(0, 1).reshape(self.query.shape[1], -1)

    @cached_property
    def flat_key(self) -> Tensor:
        """The heads' key projections side by side, (Dk, H·d)."""
        return self.key.transpose(0, 1).reshape(self.key.shape[1], -1)

    def squared_norm(self) -> Tensor:
        r"""Return $\|T\|_F^2 = \sum_i \langle Q_i^\top Q_i, K_i^\top K_i\rangle$, a scalar."""
        return ((self.query.mT @ self.query) * (self.key.mT @ self.key)).sum()

    def inner(self, factors: Factors) -> Tensor:
        r"""Return $\langle T, \hat T\rangle$, a scalar."""
        projected = (self.flat_query.mT @ factors.query) * (self.flat_key.mT @ factors.key)  # (H·d, R)
        return (projected.view(self.heads, -1, factors.rank).sum(1) * factors.mixing).sum()

    def relative_error(self, factors: Factors) -> float:
        r"""Return $\|T - \hat T\|_F / \|T\|_F$ without forming either; 0 for a zero tensor met by zero factors.

        The squares cancel: in float64 errors below about 1e-7 read as rounding.
        """
        norm = self.squared_norm().item()
        residual = norm - 2 * self.inner(factors).item() + factors.squared_norm().item()
        return relative(residual, norm)

    def residual_transpose_times(self, factors: Factors, vector: Tensor) -> Tensor:
        r"""Return $(T_i - \hat T_i)^\top x$ of every head, (H, Dk), for one vector x, (Dq,)."""
        ours = torch.einsum("hkd,hd->hk", self.key, torch.einsum("hqd,q->hd", self.query, vector))
        theirs = (factors.mixing * (vector @ factors.query)) @ factors.key.mT
        return ours - theirs

    def dense(self) -> Tensor:
        """Form the whole tensor, (H, Dq, Dk): for tests and for solvers that need it."""
        return self.query @ self.key.mT


def by_head(flat: Tensor, heads: int) -> Tensor:
    """Split a projection into heads, (D, H·d) to (H, D, d)."""
    return flat.view(len(flat), heads, -1).transpose(0, 1).contiguous()


def relative(residual: float, norm: float) -> float:
    """Return the relative error of a squared residual against a squared norm, negative rounding clipped."""
    residual = max(residual, 0.0)
    if norm <= 0.0:
        return 0.0 if residual == 0.0 else float("inf")
    return float((residual / norm) ** 0.5)
