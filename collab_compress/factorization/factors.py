"""The heads' query-key products as a tensor that is never formed, and the shared factors that approximate it.

Among these are components that are single channels of single heads: the best per-head truncation.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from collab_compress.devices import work_device


def check_weights(name: str, values: Tensor, device: torch.device | str | None) -> Tensor:
    """Return finite floating-point weights in float64 on a device (`work_device`), or raise a ValueError."""
    if not isinstance(values, Tensor):
        raise ValueError(f"{name} is no tensor: got {type(values).__name__}, expected torch.Tensor")
    if not values.is_floating_point():
        raise ValueError(f"{name} is not floating point: got {values.dtype}, expected a floating dtype")
    device = work_device(device, values)
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{name} is not finite: got nan or inf, expected finite weights")
    return values.detach().to(device).to(torch.float64)  # in this order: not every device has float64


@dataclass(frozen=True)
class Factors:
    r"""Shared query and key projections with one mixing vector per head.

    $$\hat T_i = \tilde W_Q \,\mathrm{diag}(m_i)\, \tilde W_K^\top$$

    where $m_i$ is row `i` of `mixing`; equation 11 of "Multi-Head Attention: Collaborate Instead of
    Concatenate" with the heads as the first mode.

    Args:
        query: $\tilde W_Q$, (Dq, R).
        mixing: M, (H, R).
        key: $\tilde W_K$, (Dk, R).
        content_bias: vectors $v_i$ added to the scores as $v_i \cdot y$, (H, Dk), or None.
        key_bias: bias $\beta$ of the shared keys, $y^\top \tilde W_K + \beta$, (R,), or None. It matters only where
            the keys of one softmax are multiplied by different queries (`attention.relative`).

    Raises:
        ValueError: the shapes do not fit together.

    Example:
        >>> factors = Factors(query=torch.randn(16, 6), mixing=torch.randn(4, 6), key=torch.randn(16, 6))
        >>> factors.rank, factors.normalised().mixing.norm(dim=0).round(decimals=3)
        (6, tensor([1., 1., 1., 1., 1., 1.]))
    """

    query: Tensor
    mixing: Tensor
    key: Tensor
    content_bias: Tensor | None = None
    key_bias: Tensor | None = None

    def __post_init__(self) -> None:
        shapes = [tuple(factor.shape) for factor in (self.query, self.mixing, self.key)]
        if {len(shape) for shape in shapes} != {2} or len({shape[1] for shape in shapes}) != 1:
            query, mixing, key = shapes
            raise ValueError(
                f"factors do not fit together: got query {query}, mixing {mixing}, key {key}; "
                "expected (Dq, R), (H, R), (Dk, R) with one R"
            )
        expected = (len(self.mixing), len(self.key))
        if self.content_bias is not None and tuple(self.content_bias.shape) != expected:
            raise ValueError(
                f"content bias does not fit the factors: got {tuple(self.content_bias.shape)}, "
                f"expected (H, Dk) = {expected}"
            )
        if self.key_bias is not None and tuple(self.key_bias.shape) != (self.rank,):
            raise ValueError(f"key bias does not fit the factors: got {tuple(self.key_bias.shape)}, expected (R,)")

    @property
    def rank(self) -> int:
        """Width R of the shared query and key space."""
        return self.mixing.shape[1]

    def squared_norm(self) -> Tensor:
        r"""Return $\sum_i \|\hat T_i\|_F^2$ from the three R×R Gram matrices, a scalar."""
        query, mixing, key = (factor.mT @ factor for factor in (self.query, self.mixing, self.key))
        return (query * mixing * key).sum()

    def normalised(self) -> "Factors":
        """Return the same products with mixing columns of length 1 and query and key columns of equal length."""
        lengths = torch.stack([factor.norm(dim=0) for factor in (self.query, self.mixing, self.key)])
        query, mixing, key = lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
        common = lengths.prod(0).sqrt()
        bias = None if self.key_bias is None else self.key_bias * (common / key)
        return Factors(
            self.query * (common / query), self.mixing / mixing, self.key * (common / key), self.content_bias, bias
        )

    def to(self, dtype: torch.dtype) -> "Factors":
        """Return the factors in another dtype."""
        biases = (None if bias is None else bias.to(dtype) for bias in (self.content_bias, self.key_bias))
        return Factors(self.query.to(dtype), self.mixing.to(dtype), self.key.to(dtype), *biases)


@dataclass(frozen=True)
class HeadTensor:
    r"""The tensor whose slice i is one head's query-key product, never formed.

    $$T_i = Q_i K_i^\top$$

    where $Q_i$ and $K_i$ are the heads' projections; equation 9 of "Multi-Head Attention: Collaborate Instead
    of Concatenate". Each slice has rank d, so a product with T costs D·Hd multiplications where the dense tensor
    needs H·D².

    Args:
        query: $Q_i$, (H, Dq, d).
        key: $K_i$, (H, Dk, d).

    Raises:
        ValueError: the two differ in heads or in per-head width, or are not 3-dimensional.

    Example:
        >>> heads = HeadTensor(torch.randn(4, 16, 2), torch.randn(4, 16, 2))
        >>> heads.heads, heads.head_width, heads.full_rank
        (4, 2, 8)
        >>> torch.allclose(heads.squared_norm(), heads.dense().square().sum(), rtol=1e-4)
        True
    """

    query: Tensor
    key: Tensor

    def __post_init__(self) -> None:
        query, key = tuple(self.query.shape), tuple(self.key.shape)
        if (len(query), len(key)) != (3, 3) or query[0::2] != key[0::2]:
            raise ValueError(
                f"query and key heads do not fit together: got query {query}, key {key}; "
                "expected (H, Dq, d) and (H, Dk, d) with one H and one d"
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
        return self.query.transpose(0, 1).flatten(1)

    @cached_property
    def flat_key(self) -> Tensor:
        """The heads' key projections side by side, (Dk, H·d)."""
        return self.key.transpose(0, 1).flatten(1)

    def squared_norm(self) -> Tensor:
        r"""Return $\|T\|_F^2 = \sum_i \langle Q_i^\top Q_i, K_i^\top K_i\rangle$, a scalar."""
        return ((self.query.mT @ self.query) * (self.key.mT @ self.key)).sum()

    def relative_error(self, factors: Factors) -> float:
        r"""Return $\|T - \hat T\|_F / \|T\|_F$ without forming either; 0 for a zero tensor and zero factors.

        The squares cancel: in float64 errors below about 1e-7 are rounding.
        """
        projected = (self.flat_query.mT @ factors.query) * (self.flat_key.mT @ factors.key)  # (H·d, R)
        inner = (projected.unflatten(0, (self.heads, self.head_width)).sum(1) * factors.mixing).sum()
        norm = self.squared_norm()
        return relative((norm - 2 * inner + factors.squared_norm()).item(), norm.item())

    def dense(self) -> Tensor:
        """Form the whole tensor, (H, Dq, Dk): for tests and for solvers that need it."""
        return self.query @ self.key.mT


def relative(residual: float, norm: float) -> float:
    """Return the relative error of a squared residual against a squared norm, negative rounding clipped."""
    residual = max(residual, 0.0)
    if norm <= 0.0:
        return 0.0 if residual == 0.0 else float("inf")
    return float((residual / norm) ** 0.5)


@dataclass(frozen=True)
class Solution:
    """Factors of a tensor of heads, as a solver returns them.

    Args:
        factors: the best factors met.
        sweeps: passes over the three factors that were made; 0 where the answer is in closed form.
        converged: whether the run ended because it made no more progress, before its number of sweeps.
        breakdowns: number of sweeps that met a system that could not be solved. Each is tried again on a
            slightly different system; a run that cannot go on ends with the best factors so far, not converged.

    Example:
        >>> from collab_compress.factorization.als import als
        >>> query, key = torch.randn(2, 4, 16, 2).double()
        >>> als(HeadTensor(query, key), rank=6, sweeps=5).sweeps
        5
    """

    factors: Factors
    sweeps: int
    converged: bool
    breakdowns: int = 0


@dataclass(frozen=True, kw_only=True)
class Factorization(Solution):
    r"""The factors of a layer's heads, in float64 with the content bias, and how well they fit.

    Args:
        weight_error: relative error $\|T - \hat T\|_F / \|T\|_F$ of the weights, unweighted.
        data_error: relative error under the weighting, or None without moments.

    Example:
        >>> from collab_compress.factorization import factorize
        >>> query, key = torch.randn(2, 4, 16, 2)
        >>> result = factorize(query, key, rank=8)  # all channels
        >>> result.weight_error, result.data_error is None
        (0.0, True)
    """

    weight_error: float
    data_error: float | None


def choose_channels(values: Tensor, count: int, equal: bool = False) -> Tensor:
    """Return the flat indices of the largest singular values (H, r), descending; of all heads alike if `equal`."""
    if equal:  # the i-th of every head before the (i + 1)-th of any
        ranks = torch.arange(values.shape[1], 0, -1, dtype=values.dtype, device=values.device)
        values = ranks.expand_as(values)
    return values.flatten().argsort(descending=True, stable=True)[:count]


def one_hot(channels: Tensor, values: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return coefficients (H·r, R) and mixing (H, R) of components that are one channel each, by flat indices."""
    heads, width = values.shape
    columns = torch.arange(len(channels), device=channels.device)
    coefficients, mixing = values.new_zeros(heads * width, rank), values.new_zeros(heads, rank)
    coefficients[channels, columns] = 1.0
    mixing[channels.div(width, rounding_mode="floor"), columns] = 1.0
    return coefficients, mixing


def singular_channels(tensor: HeadTensor) -> tuple[HeadTensor, Tensor]:
    r"""Return the same heads with singular vectors as channels, $Q_i = U_i S_i^{1/2}$ and $K_i = V_i S_i^{1/2}$.

    There are r = min(Dq, Dk, d) channels a head, with singular values (H, r), descending; from QR of both sides and
    the SVD of a d×d core.
    """
    query_basis, query_core = torch.linalg.qr(tensor.query)
    key_basis, key_core = torch.linalg.qr(tensor.key)
    left, values, right = torch.linalg.svd(query_core @ key_core.mT, full_matrices=False)
    root = values.sqrt()[:, None]
    return HeadTensor(query_basis @ (left * root), key_basis @ (right.mT * root)), values
