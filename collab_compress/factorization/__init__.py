"""Decompose the query-key products of attention heads into shared projections and a mixing matrix."""

from .decompose import SOLVERS, Factorization, factorize
from .factors import Factors
from .head_tensor import HeadTensor
from .moments import Moments
from .solution import Solution, SolverOptions

__all__ = [
    "SOLVERS",
    "Factorization",
    "Factors",
    "HeadTensor",
    "Moments",
    "Solution",
    "SolverOptions",
    "factorize",
]
