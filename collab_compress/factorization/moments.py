"""First and second moments of a module's inputs, which calibration gathers, and how they weigh the error."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from collab_compress.devices import float64_device
from collab_compress.factorization.factors import Factors, HeadTensor


@dataclass(frozen=True)
class Moments:
    r"""Mean and uncentred second moment of the vectors x that enter a projection.

    Args:
        mean: $E[x]$, (D,).
        second: $E[x x^\top]$, (D, D), not centred.
        count: number of vectors behind the two.

    Raises:
        ValueError: the shapes do not fit, the count is not positive, or a value is not finite.

    Example:
        >>> moments = Moments.of(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
        >>> moments.mean.tolist(), moments.covariance().tolist(), moments.count
        ([2.0, 0.0], [[1.0, 0.0], [0.0, 0.0]], 2.0)
    """

    mean: Tensor
    second: Tensor
    count: float

    def __post_init__(self) -> None:
        width = self.mean.shape[-1] if self.mean.ndim else 0
        if self.mean.ndim != 1 or tuple(self.second.shape) != (width, width):
            raise ValueError(
                f"moments do not fit together: got mean {tuple(self.mean.shape)} and "
                f"second {tuple(self.second.shape)}; expected (D,) and (D, D)"
            )
        if not self.count > 0:
            raise ValueError(f"moments need at least one vector: got count {self.count}, expected > 0")
        if not bool(torch.isfinite(self.mean).all() and torch.isfinite(self.second).all()):
            raise ValueError("moments are not finite: got nan or inf; check the calibration inputs")

    @classmethod
    def of(cls, inputs: Tensor, weights: Tensor | None = None) -> Self:
        """Return the moments of vectors (..., D), in float64 (on the CPU where their device has none).

        Weights (...) say how often each vector occurs; without them, once.

        Raises:
            ValueError: there is no vector, or a value is not finite.
        """
        if not inputs.ndim or not inputs.shape[-1]:
            raise ValueError(f"moments are of vectors: got shape {tuple(inputs.shape)}, expected (..., D)")
        vectors = inputs.reshape(-1, inputs.shape[-1]).to(float64_device(inputs.device)).double()
        if weights is None:
            return cls(vectors.mean(0), vectors.mT @ vectors / len(vectors), float(len(vectors)))
        counts = weights.reshape(-1).to(vectors)
        total = float(counts.sum())
        return cls(counts @ vectors / total, vectors.mT @ (vectors * counts[:, None]) / total, total)

    def combined(self, other: Self) -> Self:
        """Return the covariance of the sum of two independent vectors, with the average of their means.

        For a score with a term of each vector, and a content bias in each term. The count is that of the first.
        """
        mean = (self.mean + other.mean.to(self.mean)) / 2
        covariance = self.covariance() + other.covariance().to(self.second)
        return type(self)(mean, covariance + torch.outer(mean, mean), self.count)

    @property
    def width(self) -> int:
        """Input width D."""
        return self.mean.shape[0]

    def covariance(self) -> Tensor:
        r"""Return $E[x x^\top] - \mu \mu^\top$, (D, D), symmetrised against rounding."""
        centred = self.second - torch.outer(self.mean, self.mean)
        return (centred + centred.mT) / 2


def check_moments(name: str, moments: Moments | None, width: int) -> None:
    """Raise a ValueError for what are no moments of this width."""
    if not isinstance(moments, Moments | None):
        raise ValueError(f"{name} are no moments: got {type(moments).__name__}, expected Moments.of(inputs)")
    if moments is not None and moments.width != width:
        raise ValueError(f"{name} do not fit the heads: got width {moments.width}, expected {width}")


def cholesky(matrix: Tensor, message: str, upper: bool = False) -> Tensor:
    """Return the triangular root of a positive definite matrix, or raise a ValueError with this message."""
    root: Tensor
    root, info = torch.linalg.cholesky_ex(matrix, upper=upper)
    if int(info) or not bool(root.diagonal().isfinite().all()):  # any other entry that is not finite shows there
        raise ValueError(message)
    return root


@dataclass(frozen=True)
class Weighting:
    r"""The change of basis that turns score error into Frobenius error.

    With $S_Q^\top S_Q$ and $S_K^\top S_K$ the damped moments of the two inputs,

    $$\sum_i \|S_Q (T_i - \hat T_i) S_K^\top\|_F^2 = E_{x,y} \sum_i \big(x^\top (T_i - \hat T_i)\, y\big)^2$$

    up to the damping, for independent x and y. Decomposing the heads $(S_Q Q_i, S_K K_i)$ and mapping the
    factors back by the inverses minimises it.

    Either side may be None for the identity.
    """

    query: Tensor | None  # S_Q, upper triangular (Dq, Dq)
    key: Tensor | None  # S_K, upper triangular (Dk, Dk)

    @classmethod
    def of(
        cls,
        query: Moments | None,
        key: Moments | None,
        *,
        damping: float,
        centre_query: bool,
        device: torch.device | None = None,
    ) -> Self:
        r"""Build the weighting from moments with `damping` of the mean diagonal added, or raise a ValueError.

        Keys are weighed by their covariance, for the softmax ignores what is constant over them; queries are if
        `centre_query`, where what is constant over them goes into the content bias.
        """
        sides = (("query", query, centre_query), ("key", key, True))
        return cls(
            *(
                None if moments is None else damped_root(side, moments, damping, centre, device)
                for side, moments, centre in sides
            )
        )

    def apply(self, tensor: HeadTensor) -> HeadTensor:
        """Return the weighted heads, shapes unchanged."""
        query = tensor.query if self.query is None else self.query @ tensor.query
        key = tensor.key if self.key is None else self.key @ tensor.key
        return HeadTensor(query, key)

    def undo(self, factors: Factors) -> Factors:
        """Return the factors of the original heads from those of the weighted heads, shapes unchanged."""
        query, key = factors.query, factors.key
        if self.query is not None:
            query = torch.linalg.solve_triangular(self.query, query, upper=True)
        if self.key is not None:
            key = torch.linalg.solve_triangular(self.key, key, upper=True)
        return Factors(query, factors.mixing, key)


def damped_root(
    side: str, moments: Moments, damping: float, centre: bool, device: torch.device | None = None
) -> Tensor:
    """Return the upper triangular S with SᵀS the damped second moments (D, D), or the covariance if `centre`."""
    kind = "covariance" if centre else "second moment"
    matrix = moments.covariance() if centre else (moments.second + moments.second.mT) / 2
    damped = damped_(matrix.to(device).double(), damping)
    if not bool(torch.isfinite(damped).all()):
        raise ValueError(f"the moments of the {side} inputs are not finite with damping {damping}; lower it")
    message = (
        f"the {kind} of the {side} inputs is singular: got damping {damping} over {moments.count:g} "
        "inputs; expected a positive definite matrix: raise the damping or give inputs that vary"
    )
    return cholesky(damped, message, upper=True)


def damped_(moments: Tensor, damping: float) -> Tensor:
    """Add λ to the diagonal of moments (n, n), in place: the damping times its mean, or 1 if nothing varies."""
    variance = float(moments.diagonal().mean())
    moments.diagonal().add_(damping * variance if variance > 0 else 1.0)
    return moments
