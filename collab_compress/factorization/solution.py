"""What every solver takes and gives back, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from collab_compress.factorization.factors import Factors

Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class SolverOptions:
    """How long a solver may run.

    Args:
        sweeps: most passes over the three factors; None for the solver's own default.
        tolerance: stop once a sweep lowers the relative error by less than this, on average; None for the
            solver's own default.
        seed: seed of random starts; solvers that start deterministically ignore it.
        progress: called after every sweep with the sweep's number and the relative error so far.
    """

    sweeps: int | None = None
    tolerance: float | None = None
    seed: int = 0
    progress: Progress | None = None


@dataclass(frozen=True)
class Solution:
    """Factors of the tensor a solver was given.

    Args:
        factors: the best factors met.
        errors: relative error after every sweep.
        converged: whether the tolerance, rather than the number of sweeps, ended the run.
        breakdowns: how many sweeps met a system that could not be solved as it was. Each is tried again on a
            slightly different system; a run that cannot go on ends with the best factors so far, not converged.
    """

    factors: Factors
    errors: tuple[float, ...]
    converged: bool
    breakdowns: int = 0


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
        sizes: channels of each head where none is shared, which lie side by side; None where all are.
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
