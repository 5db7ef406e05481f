"""The papers' recipe: parafac of tensorly on the dense tensor, from a random start."""

from math import isfinite
from typing import Any

import torch

from collab_compress.factorization.factors import Factors, HeadTensor, Solution

MAX_ITERATIONS = 100
MIN_GAIN = 1e-6


def parafac(tensor: HeadTensor, rank: int, sweeps: int | None = None, seed: int = 0) -> Solution:
    """Decompose the dense tensor as "Multi-Head Attention: Collaborate Instead of Concatenate" does: the yardstick.

    Alternating least squares from a random start, stopped at tolerance 1e-6 or after 100 iterations (`sweeps`). Where
    a system is singular or gives NaNs, the factors are those of the iteration before it, or else the random start's.
    """
    try:
        import tensorly
        from tensorly import decomposition
    except ImportError as error:
        raise ImportError(
            "the parafac solver needs tensorly, which is not installed; expected `pip install tensorly`, "
            'or solver="als", which needs nothing more'
        ) from error
    sweeps = MAX_ITERATIONS if sweeps is None else sweeps
    points: list[Any] = []  # the random start, and the point after each iteration

    def record(point: Any, error: Any) -> bool:
        if not isfinite(error):
            return True  # tensorly stops
        points.append((point.weights, list(point.factors)))  # a copy: tensorly puts new tensors into its own list
        return False

    with tensorly.backend_context("pytorch"):
        try:
            weights, factors = decomposition.parafac(
                tensor.dense(),
                rank,
                n_iter_max=sweeps,
                init="random",
                tol=MIN_GAIN,
                random_state=seed,
                callback=record,
            )
            failed = not all(bool(torch.isfinite(factor).all()) for factor in factors)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            failed = True
    if failed:
        if not points:
            raise ValueError("the random start's error is not finite; the heads' values are too large")
        weights, factors = points[-1]
    mixing, query, key = factors
    swept = len(points) - 1 if points else 0
    return Solution(
        Factors(query, mixing * weights, key),
        swept,
        converged=swept < sweeps and not failed,
        breakdowns=int(failed),
    )
