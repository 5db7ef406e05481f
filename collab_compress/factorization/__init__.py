"""Decompose the query-key products of attention heads into shared projections and a mixing matrix."""

from collab_compress.factorization.decompose import (
    SOLVERS,
    centres_queries,
    factorize,
)
from collab_compress.factorization.factors import Factorization, Factors, Solution, SolverOptions
from collab_compress.factorization.head_tensor import HeadTensor
from collab_compress.factorization.moments import Moments, has_float64

__all__ = [
    "SOLVERS",
    "Factorization",
    "Factors",
    "HeadTensor",
    "Moments",
    "Solution",
    "SolverOptions",
    "centres_queries",
    "factorize",
    "has_float64",
]
