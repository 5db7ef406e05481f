"""What every solver takes and gives back."""

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
