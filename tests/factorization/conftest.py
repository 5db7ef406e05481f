"""Seeded heads and dense oracles for the factorization tests."""

from collections.abc import Callable

import pytest
import torch

from collab_compress.factorization import Factors, HeadTensor
from collab_compress.factorization.point import Channels, Point, Step


@pytest.fixture(scope="session")
def make_heads() -> Callable[..., HeadTensor]:
    def make(heads: int, query_width: int, key_width: int, head_width: int, seed: int = 0) -> HeadTensor:
        generator = torch.Generator().manual_seed(seed)
        query = torch.randn(heads, query_width, head_width, generator=generator, dtype=torch.float64)
        key = torch.randn(heads, key_width, head_width, generator=generator, dtype=torch.float64)
        return HeadTensor(query, key)

    return make


@pytest.fixture(scope="session")
def make_factors() -> Callable[..., Factors]:
    def make(tensor: HeadTensor, rank: int, seed: int = 1) -> Factors:
        generator = torch.Generator().manual_seed(seed)
        rows = (tensor.query.shape[1], tensor.heads, tensor.key.shape[1])
        return Factors(*(torch.randn(n, rank, generator=generator, dtype=torch.float64) for n in rows))

    return make


@pytest.fixture(scope="session")
def factors_of() -> Callable[[HeadTensor, Step], Factors]:
    def factors(tensor: HeadTensor, point: Step) -> Factors:
        """Return the factors that the solver's coefficients stand for."""
        return Factors(tensor.flat_query @ point.query, point.mixing, tensor.flat_key @ point.key)

    return factors


@pytest.fixture(scope="session")
def make_point(factors_of) -> Callable[..., tuple[Point, Factors]]:
    def make(tensor: HeadTensor, rank: int, seed: int = 1) -> tuple[Point, Factors]:
        """Return a random point of the solver and its factors."""
        generator = torch.Generator().manual_seed(seed)
        rows = (tensor.full_rank, tensor.heads, tensor.full_rank)
        drawn = (torch.randn(n, rank, generator=generator, dtype=torch.float64) for n in rows)
        point = Point.at(Step.of(Channels(tensor), *drawn))
        return point, factors_of(tensor, point)

    return make


@pytest.fixture(scope="session")
def dense_of() -> Callable[[Factors], torch.Tensor]:
    def dense(factors: Factors) -> torch.Tensor:
        """Return the sum of R outer products, one at a time."""
        total = torch.zeros(factors.mixing.shape[0], factors.query.shape[0], factors.key.shape[0])
        total = total.double()
        for r in range(factors.mixing.shape[1]):
            outer = torch.outer(factors.query[:, r], factors.key[:, r])
            for head in range(factors.mixing.shape[0]):
                total[head] += factors.mixing[head, r] * outer
        return total

    return dense


@pytest.fixture(scope="session")
def truncation() -> Callable[..., Factors]:
    def truncated(tensor: HeadTensor, rank: int, equal: bool = False) -> Factors:
        """Return the largest singular triplets of all heads, or as many of each head."""
        triplets = []
        for head, dense in enumerate(tensor.dense()):
            left, values, right = torch.linalg.svd(dense, full_matrices=False)
            for index, value in enumerate(values.tolist()):
                order = (index, head) if equal else (-value, head)
                triplets.append((order, left[:, index] * value, torch.eye(tensor.heads).double()[head], right[index]))
        _, query, mixing, key = zip(*sorted(triplets, key=lambda triplet: triplet[0])[:rank], strict=True)
        return Factors(torch.stack(query, 1), torch.stack(mixing, 1), torch.stack(key, 1))

    return truncated
