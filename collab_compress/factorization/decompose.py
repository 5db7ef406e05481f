"""From the heads of an attention layer to the factors of its collaborative form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor

from collab_compress.factorization.als import als
from collab_compress.factorization.factors import (
    Factorization,
    HeadTensor,
    Progress,
    Solution,
    SolverOptions,
    checked_weights,
)
from collab_compress.factorization.moments import Moments, Weighting, check_moments
from collab_compress.factorization.parafac import parafac
from collab_compress.factorization.truncation import concatenation

Solver = Callable[[HeadTensor, int, SolverOptions], Solution]

SOLVERS: dict[str, Solver] = {"als": als, "parafac": parafac}


def factorize(
    query: Tensor,
    key: Tensor,
    rank: int,
    *,
    query_bias: Tensor | None = None,
    query_moments: Moments | None = None,
    key_moments: Moments | None = None,
    solver: str = "als",
    seed: int = 0,
    sweeps: int | None = None,
    tolerance: float | None = None,
    damping: float = 1e-3,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
    reads: int | None = None,
    head_weights: Tensor | None = None,
) -> Factorization:
    r"""Factor the heads' query-key products into shared projections and a mixing matrix.

    $$T_i = Q_i K_i^\top \approx \tilde W_Q \,\mathrm{diag}(m_i)\, \tilde W_K^\top$$

    as in section 3.3 of "Multi-Head Attention: Collaborate Instead of Concatenate", equations 9 to 11. With
    moments the error of the scores on such inputs is minimised instead of the error of the weights
    (`moments.Weighting`). The content bias $v_i = K_i b_i$ is kept exactly; with centred query moments it also
    takes the residual's part at the mean query, $(T_i - \hat T_i)^\top \mu_Q$. Keys are weighed
    by their covariance. Without a query bias there is no content bias, and queries are weighed by second moments,
    which leaves the mean query's part to the factors.

    Args:
        query: $Q_i$, (H, Dq, d), any floating dtype.
        key: $K_i$, (H, Dk, d).
        rank: R, from 1 to H·d; at H·d the factors are the heads side by side.
        query_bias: $b_i$, (H, d), or None.
        query_moments: moments of the query projection's inputs, width Dq, or None for no weighting there.
        key_moments: moments of the key projection's inputs, width Dk, or None for no weighting there.
        solver: a name in `SOLVERS`.
        seed: seed of random starts.
        sweeps: most passes over the three factors; None for the solver's default.
        tolerance: as in `SolverOptions`; None for the solver's default.
        damping: multiple of the moments' mean diagonal added to their diagonal.
        device: device of the work and of the result, with float64; None for the device of `query`, or for the CPU
            where that has no float64.
        progress: called with the sweep's number and the relative error so far.
        reads: number k of channels that each head reads, for "als": its row of the mixing matrix has at most k
            entries that are not zero. None for all R; at H·d channels, d are exact.
        head_weights: $w_i > 0$, (H,): the error that is minimised is $\sum_i w_i^2 \|T_i - \hat T_i\|^2$, weighted
            where moments are given. None weighs all heads alike.

    Returns:
        The factors, in float64, with their errors.

    Raises:
        ValueError: a shape does not fit, a value is not finite or too large, the rank is out of range, the solver
            is unknown or lets each head read all channels, the moments are singular, or a singular value
            decomposition fails.
    """
    if solver not in SOLVERS:
        raise ValueError(f"unknown solver: got {solver!r}, expected one of {', '.join(sorted(SOLVERS))}")
    tensor = HeadTensor(checked_weights("query", query, device), checked_weights("key", key, device))
    bias = None if query_bias is None else checked_weights("query_bias", query_bias, device)
    device = tensor.query.device
    if head_weights is not None:
        head_weights = checked_weights("head_weights", head_weights, device)
    _check_sizes(tensor, rank, bias, (query_moments, key_moments), head_weights)
    if not (damping >= 0 and isfinite(damping)):
        raise ValueError(f"damping is out of range: got {damping}, expected 0 or more, and finite")
    if sweeps is not None and sweeps < 1:
        raise ValueError(f"sweeps is out of range: got {sweeps}, expected 1 or more")
    content_bias = None if bias is None else torch.einsum("hkd,hd->hk", tensor.key, bias)
    has_data = query_moments is not None or key_moments is not None
    if reads is not None and (reads < 1 or solver != "als"):
        raise ValueError(f"reads is out of range: got {reads} with solver {solver!r}, expected 1 or more, with 'als'")
    if rank == tensor.full_rank and (reads is None or reads >= tensor.head_width):
        return Factorization(
            factors=replace(concatenation(tensor), content_bias=content_bias),
            sweeps=0,
            converged=True,
            weight_error=0.0,
            data_error=0.0 if has_data else None,
        )
    if query_moments is not None:
        query_moments = query_moments.to(device, torch.float64)
    if key_moments is not None:
        key_moments = key_moments.to(device, torch.float64)
    centred = bias is not None
    weighting = Weighting.of(query_moments, key_moments, damping=damping, centre_query=centred, centre_key=True)
    weighted = weighting.apply(tensor)
    if head_weights is not None:
        head_weights = head_weights[:, None]
        weighted = HeadTensor(weighted.query * head_weights[:, None], weighted.key)
    try:
        solution = SOLVERS[solver](weighted, rank, SolverOptions(sweeps, tolerance, seed, progress, reads))
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise ValueError(f"the singular value decomposition of the heads failed: {error}") from error
    factors = solution.factors
    if head_weights is not None:
        factors = replace(factors, mixing=factors.mixing / head_weights)
    factors = weighting.undo(factors).normalised()
    if not all(bool(torch.isfinite(part).all()) for part in (factors.query, factors.mixing, factors.key)):
        raise ValueError("the factors are not finite; the moments are too close to singular: raise the damping")
    weight_error = tensor.relative_error(factors)
    if centred and query_moments is not None:
        folded = tensor.residual_transpose_times(factors, query_moments.mean)
        content_bias = folded if content_bias is None else content_bias + folded
    return Factorization(
        factors=replace(factors, content_bias=content_bias),
        sweeps=solution.sweeps,
        converged=solution.converged,
        breakdowns=solution.breakdowns,
        weight_error=weight_error,
        data_error=weighted.relative_error(solution.factors) if has_data else None,
    )


def _check_sizes(
    tensor: HeadTensor,
    rank: int,
    bias: Tensor | None,
    moments: tuple[Moments | None, Moments | None],
    head_weights: Tensor | None,
) -> None:
    heads, width = tensor.heads, tensor.head_width
    if not 1 <= rank <= tensor.full_rank:
        raise ValueError(
            f"rank is out of range: got {rank}, expected 1 to H·d = {heads}·{width} = {tensor.full_rank}"
        )
    if bias is not None and bias.shape != (heads, width):
        raise ValueError(
            f"query_bias does not fit the heads: got {tuple(bias.shape)}, expected (H, d) = {(heads, width)}"
        )
    for side, weights, inputs in zip(("query", "key"), (tensor.query, tensor.key), moments, strict=True):
        check_moments(f"{side}_moments", inputs, weights.shape[1])
    if head_weights is not None and (head_weights.shape != (heads,) or not bool((head_weights > 0).all())):
        raise ValueError(
            f"head_weights do not fit the heads: got {tuple(head_weights.shape)}, expected ({heads},), all above 0"
        )
