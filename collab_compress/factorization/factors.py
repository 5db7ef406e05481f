"""The factors of the collaborative form, shared projections and a mixing vector per head, and what solvers give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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
        content_bias: rows $v_i$ added to the scores as $v_i \cdot y$, (H, Dk), or None for no bias.

    Raises:
        ValueError: the shapes do not fit together.
    """

    query: Tensor
    mixing: Tensor
    key: Tensor
    content_bias: Tensor | None = None

    def __post_init__(self) -> None:
        ranks = {factor.shape[-1] for factor in (self.query, self.mixing, self.key)}
        dims = {factor.ndim for factor in (self.query, self.mixing, self.key)}
        if dims != {2} or len(ranks) != 1:
            raise ValueError(
                "factors do not fit together: got "
                f"query {tuple(self.query.shape)}, mixing {tuple(self.mixing.shape)}, "
                f"key {tuple(self.key.shape)}; expected (Dq, R), (H, R), (Dk, R) with one R"
            )
        expected = (self.mixing.shape[0], self.key.shape[0])
        if self.content_bias is not None and tuple(self.content_bias.shape) != expected:
            raise ValueError(
                f"content bias does not fit the factors: got {tuple(self.content_bias.shape)}, "
                f"expected (H, Dk) = {expected}"
            )

    @property
    def rank(self) -> int:
        """Width R of the shared query and key space."""
        return self.mixing.shape[1]

    @property
    def heads(self) -> int:
        """Number of heads H."""
        return self.mixing.shape[0]

    def slice(self, head: int) -> Tensor:
        """Return the approximated query-key product of one head, (Dq, Dk)."""
        return (self.query * self.mixing[head]) @ self.key.mT

    def squared_norm(self) -> Tensor:
        r"""Return $\sum_i \|\hat T_i\|_F^2$ from the three R×R Gram matrices, a scalar."""
        grams = [factor.mT @ factor for factor in (self.query, self.mixing, self.key)]
        return (grams[0] * grams[1] * grams[2]).sum()

    def normalised(self) -> Factors:
        """Return the same products with mixing columns of length 1 and query and key columns of equal length."""
        tiny = torch.finfo(self.mixing.dtype).tiny
        query, mixing, key = (factor.norm(dim=0) for factor in (self.query, self.mixing, self.key))
        common = (query * mixing * key).sqrt()
        return Factors(
            self.query * (common / query.clamp_min(tiny)),
            self.mixing / mixing.clamp_min(tiny),
            self.key * (common / key.clamp_min(tiny)),
            self.content_bias,
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Factors:
        """Return the factors on another device or in another dtype.

        Args:
            device: where to put them; None leaves them where they are.
            dtype: their new dtype; None leaves it as it is.
        """
        bias = self.content_bias
        return Factors(
            self.query.to(device=device, dtype=dtype),
            self.mixing.to(device=device, dtype=dtype),
            self.key.to(device=device, dtype=dtype),
            None if bias is None else bias.to(device=device, dtype=dtype),
        )


Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class SolverOptions:
    """How long a solver may run.

    Args:
        sweeps: most passes over the three factors; None for the solver's own default.
        tolerance: stop once a sweep lowers the error by less than this share of it, on average (parafac: the relative
            error by less than this); None for the solver's own default.
        seed: seed of random starts; solvers that start deterministically ignore it.
        progress: called after every sweep with the sweep's number and the relative error so far.
        equal: whether heads that share no channels are to be equally wide.
    """

    sweeps: int | None = None
    tolerance: float | None = None
    seed: int = 0
    progress: Progress | None = None
    equal: bool = False


@dataclass(frozen=True)
class Solution:
    """Factors of the tensor a solver was given.

    Args:
        factors: the best factors met.
        errors: relative error after every sweep.
        converged: whether the tolerance, rather than the number of sweeps, ended the run.
        breakdowns: how many sweeps met a system that could not be solved as it was. Each is tried again on a
            slightly different system; a run that cannot go on ends with the best factors so far, not converged.
        sizes: channels of each head, which lie side by side, where none is shared; else None.
    """

    factors: Factors
    errors: tuple[float, ...]
    converged: bool
    breakdowns: int = 0
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Factorization:
    r"""The factors of a layer's heads and how well they fit.

    Args:
        factors: $\tilde W_Q$, M, $\tilde W_K$ and the content bias, in float64.
        errors: relative error $\|T - \hat T\|_F / \|T\|_F$ of the minimised problem after every sweep,
            weighted where moments were given; empty if exact.
        weight_error: relative error of the weights, unweighted.
        data_error: relative error under the weighting, or None without moments.
        exact: whether the factors are the heads themselves (rank H·d).
        sweeps: passes over the three factors that were made.
        converged: whether progress, rather than the number of sweeps, ended the run.
        breakdowns: how many sweeps met a system that could not be solved as it was (see `Solution`).
        per_head_error: what the minimised error is where no channel is shared, at the same rank.
        sizes: channels of each head where none is shared, which lie side by side; None where some
            may be. At rank H·d none is.
    """

    factors: Factors
    errors: tuple[float, ...]
    weight_error: float
    data_error: float | None
    exact: bool
    sweeps: int
    converged: bool
    per_head_error: float
    sizes: tuple[int, ...] | None = None
    breakdowns: int = 0
