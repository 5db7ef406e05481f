"""Alternating least squares on the factored tensor, extrapolated between sweeps."""

from __future__ import annotations

import torch
from torch import Tensor

from .factors import Factors
from .head_tensor import HeadTensor, relative
from .solution import Solution, SolverOptions
from .start import truncation


def als(tensor: HeadTensor, rank: int, options: SolverOptions) -> Solution:
    """Fit factors by extrapolated alternating least squares from the best per-head truncation.

    Args:
        tensor: the heads, in float64.
        rank: R, below H·d.
        options: sweeps, tolerance and progress; the start is deterministic.

    Returns:
        The best factors met and a non-increasing error history.
    """
    point = truncation(tensor, rank)
    norm = tensor.squared_norm().item()
    best = tensor.relative_error(point)
    previous, errors, step = point, [], 0.5
    start = point
    for sweep in range(1, (options.sweeps or 300) + 1):
        swept, error = _sweep(tensor, start, norm)
        if error < best:
            previous, point, best = point, swept, error
            step = min(step * 1.05, 4.0)
        else:
            step, previous = step / 2, point
        start = Factors(*(new + step * (new - old) for new, old in zip(_parts(point), _parts(previous), strict=True)))
        errors.append(best)
        if options.progress is not None:
            options.progress(sweep, best)
    return Solution(point, tuple(errors), converged=False)


def _parts(factors: Factors) -> tuple[Tensor, Tensor, Tensor]:
    return factors.query, factors.mixing, factors.key


def _sweep(tensor: HeadTensor, start: Factors, norm: float) -> tuple[Factors, float]:
    mixing, key = start.mixing, start.key
    projected_key = tensor.project_key(key)
    query = _solve((mixing.mT @ mixing) * (key.mT @ key), tensor.query_mttkrp(mixing, projected_key))
    projected_query = tensor.project_query(query)
    query_gram = query.mT @ query
    key = _solve((mixing.mT @ mixing) * query_gram, tensor.key_mttkrp(mixing, projected_query))
    scale = key.norm(dim=0).clamp_min(1e-300)
    key = key / scale
    projected_key = tensor.project_key(key)
    gram = query_gram * (key.mT @ key)
    products = tensor.mixing_mttkrp(projected_query, projected_key)
    mixing = _solve(gram, products)
    residual = norm - 2 * (products * mixing).sum() + (gram * (mixing.mT @ mixing)).sum()
    return Factors(query, mixing, key), relative(residual.item(), norm)


def _solve(gram: Tensor, right: Tensor) -> Tensor:
    ridge = 1e-12 * gram.diagonal().mean() + 1e-300
    root = torch.linalg.cholesky(gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    return torch.cholesky_solve(right.mT, root).mT
