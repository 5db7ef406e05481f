"""Seeded heads and dense oracles for the factorization tests."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from collab_compress.factorization import Factors, HeadTensor
from collab_compress.factorization.point import Channels, Point, Step

SHAPES = st.tuples(st.integers(1, 4), st.integers(2, 8), st.integers(2, 8), st.integers(1, 4))
"""Heads, width of queries, width of keys, width of a head."""


def draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def make_heads(heads: int, query_width: int, key_width: int, head_width: int, seed: int = 0) -> HeadTensor:
    return HeadTensor(*draw(seed, (heads, query_width, head_width), (heads, key_width, head_width)))


def make_factors(tensor: HeadTensor, rank: int, seed: int = 1) -> Factors:
    rows = (tensor.query.shape[1], tensor.heads, tensor.key.shape[1])
    return Factors(*draw(seed, *((count, rank) for count in rows)))


def factors_of(tensor: HeadTensor, point: Step) -> Factors:
    """Return the factors that the solver's coefficients stand for."""
    return Factors(tensor.flat_query @ point.query, point.mixing, tensor.flat_key @ point.key)


def make_point(tensor: HeadTensor, rank: int, seed: int = 1) -> tuple[Point, Factors]:
    """Return a random point of the solver and its factors."""
    rows = (tensor.full_rank, tensor.heads, tensor.full_rank)
    point = Point.at(Step.of(Channels(tensor), *draw(seed, *((count, rank) for count in rows))))
    return point, factors_of(tensor, point)


def dense_of(factors: Factors) -> Tensor:
    """Return the sum of R outer products, one at a time."""
    total = torch.zeros(len(factors.mixing), len(factors.query), len(factors.key)).double()
    for r in range(factors.rank):
        outer = torch.outer(factors.query[:, r], factors.key[:, r])
        for head in range(len(total)):
            total[head] += factors.mixing[head, r] * outer
    return total


def truncation(tensor: HeadTensor, rank: int, equal: bool = False) -> Factors:
    """Return the largest singular triplets of all heads, or as many of each head."""
    triplets = []
    for head, dense in enumerate(tensor.dense()):
        left, values, right = torch.linalg.svd(dense, full_matrices=False)
        for index, value in enumerate(values.tolist()):
            order = (index, head) if equal else (-value, head)
            triplets.append((order, left[:, index] * value, torch.eye(tensor.heads).double()[head], right[index]))
    _, query, mixing, key = zip(*sorted(triplets, key=lambda triplet: triplet[0])[:rank], strict=True)
    return Factors(torch.stack(query, 1), torch.stack(mixing, 1), torch.stack(key, 1))
