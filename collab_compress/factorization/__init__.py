"""Decompose the heads of an attention layer: their scores into shared factors, their values into fewer channels."""

from collab_compress.factorization.decompose import factorize
from collab_compress.factorization.factors import Factorization, Factors, HeadTensor, Solution
from collab_compress.factorization.moments import Moments
from collab_compress.factorization.narrowing import Narrowing, narrow_values
from collab_compress.factorization.rotary import RotaryFactorization, RotaryFactors, factorize_rotary

__all__ = [
    "Factorization",
    "Factors",
    "HeadTensor",
    "Moments",
    "Narrowing",
    "RotaryFactorization",
    "RotaryFactors",
    "Solution",
    "factorize",
    "factorize_rotary",
    "narrow_values",
]
