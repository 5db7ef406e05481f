"""Weigh the heads by their inputs' moments, so that the error minimised is the error of the scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from collab_compress.factorization.factors import Factors
from collab_compress.factorization.head_tensor import HeadTensor
from collab_compress.factorization.moments import Moments


@dataclass(frozen=True)
class Weighting:
    r"""The change of basis that turns score error into Frobenius error.

    With $S_Q^\top S_Q$ and $S_K^\top S_K$ the damped moments of the two inputs,

    $$\sum_i \|S_Q (T_i - \hat T_i) S_K^\top\|_F^2 = E_{x,y} \sum_i \big(x^\top (T_i - \hat T_i)\, y\big)^2$$

    up to the damping, for independent x and y. Decomposing the heads $(S_Q Q_i, S_K K_i)$ and mapping the
    factors back by the inverses minimises it.

    Args:
        query: $S_Q$, upper triangular (Dq, Dq), or None for the identity.
        key: $S_K$, upper triangular (Dk, Dk), or None for the identity.
    """

    query: Tensor | None
    key: Tensor | None

    @classmethod
    def of(
        cls,
        query: Moments | None,
        key: Moments | None,
        *,
        damping: float,
        centre: bool = True,
        centre_query: bool | None = None,
    ) -> Weighting:
        r"""Build the weighting from the moments of the query and key inputs.

        Args:
            query: moments of the inputs of the query projection, width Dq, or None for no weighting.
            key: moments of the inputs of the key projection, width Dk, or None for no weighting.
            damping: multiple of the mean diagonal added to the diagonal. Directions the sample never
                visits otherwise get no weight at all.
            centre: weigh by covariances. Softmax ignores what is constant over the keys, and what is
                constant over the queries goes into the content bias.
            centre_query: the same for queries alone; as `centre` if not given.

        Raises:
            ValueError: a moment matrix is singular even after damping, or too large.
        """
        centre_query = centre if centre_query is None else centre_query
        return cls(
            None if query is None else _root("query", query, damping, centre_query),
            None if key is None else _root("key", key, damping, centre),
        )

    @property
    def identity(self) -> bool:
        """Whether neither side is weighted."""
        return self.query is None and self.key is None

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


def _root(side: str, moments: Moments, damping: float, centre: bool) -> Tensor:
    matrix = moments.covariance() if centre else (moments.second + moments.second.mT) / 2
    damped = matrix.clone()
    damped.diagonal().add_(damping * matrix.diagonal().mean())
    if not bool(torch.isfinite(damped).all()):
        raise ValueError(f"the moments of the {side} inputs are not finite with damping {damping}; lower it")
    root: Tensor
    root, info = torch.linalg.cholesky_ex(damped, upper=True)
    if info.item() != 0:
        kind = "covariance" if centre else "second moment"
        raise ValueError(
            f"the {kind} of the {side} inputs is singular: got damping {damping} over {moments.count:g} "
            "inputs; expected a positive definite matrix: raise the damping or give inputs that vary"
        )
    return root
