"""From the heads of an attention layer to the factors of its collaborative form."""

from dataclasses import replace

import torch
from torch import Tensor

from collab_compress.factorization.als import als
from collab_compress.factorization.factors import Factorization, Factors, HeadTensor, check_weights
from collab_compress.factorization.moments import Moments, Weighting, check_moments
from collab_compress.factorization.parafac import parafac
from collab_compress.options import Solver

DEFAULT = Solver()


def factorize(
    query: Tensor,
    key: Tensor,
    rank: int,
    *,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    query_moments: Moments | None = None,
    key_moments: Moments | None = None,
    head_weights: Tensor | None = None,
    reads: int | None = None,
    solver: Solver = DEFAULT,
) -> Factorization:
    r"""Factor the heads' query-key products into shared projections and a mixing matrix.

    $$T_i = Q_i K_i^\top \approx \tilde W_Q \,\mathrm{diag}(m_i)\, \tilde W_K^\top$$

    as in section 3.3 of "Multi-Head Attention: Collaborate Instead of Concatenate", equations 9 to 11. With
    moments the error of the scores on such inputs is minimised instead of the error of the weights
    (`moments.Weighting`). The content bias $v_i = K_i b_i$ is kept exactly; with centred query moments it also
    takes the residual's part at the mean query, $(T_i - \hat T_i)^\top \mu_Q$. Keys are weighed
    by their covariance. Without a query bias there is no content bias, and queries are weighed by second moments,
    which leaves the mean query's part to the factors.

    A bias $c_i$ of keys multiplies queries alone. Where the keys of one softmax meet different queries, as in
    `attention.relative`, it is passed and approximated by a bias $\beta$ of the shared keys, by least squares of
    $Q_i c_i - \tilde W_Q \,\mathrm{diag}(m_i)\, \beta$ over all heads, weighted alike. Elsewhere the softmax
    ignores it.

    Args:
        query: $Q_i$, (H, Dq, d), any floating dtype.
        key: $K_i$, (H, Dk, d).
        rank: R, from 1 to H·d; at H·d the factors are the heads side by side.
        query_bias: $b_i$, (H, d), or None.
        key_bias: $c_i$, (H, d), or None where the softmax ignores it.
        query_moments: moments of the query projection's inputs, width Dq, or None for no weighting there.
        key_moments: moments of the key projection's inputs, width Dk, or None for no weighting there.
        head_weights: $w_i > 0$, (H,): the error that is minimised is $\sum_i w_i^2 \|T_i - \hat T_i\|^2$, weighted
            where moments are given. None weighs all heads alike.
        reads: number k of channels that each head reads, for "als": its row of the mixing matrix has at most k
            entries that are not zero. None for all R; at H·d channels, d are exact.
        solver: method, most sweeps, seed, damping of the moments, and device of the work and the result.

    Returns:
        The factors, in float64, with their errors.

    Raises:
        ValueError: a shape does not fit, a value is not finite or too large, the rank is out of range, the solver
            lets each head read all channels, the moments are singular, or a singular value decomposition fails.

    Example:
        >>> query, key = torch.randn(2, 4, 16, 8)  # of 4 heads, each 8 wide, of inputs 16 wide
        >>> result = factorize(query, key, rank=16, reads=8)
        >>> result.factors.query.shape, result.factors.mixing.shape, result.factors.key.shape
        (torch.Size([16, 16]), torch.Size([4, 16]), torch.Size([16, 16]))
    """
    tensor = HeadTensor(check_weights("query", query, solver.device), check_weights("key", key, solver.device))
    device, heads, width = tensor.query.device, tensor.heads, tensor.head_width
    if not 1 <= rank <= tensor.full_rank:
        raise ValueError(
            f"rank is out of range: got {rank}, expected 1 to H·d = {heads}·{width} = {tensor.full_rank}"
        )
    if reads is not None and (reads < 1 or solver.method != "als"):
        raise ValueError(
            f"reads is out of range: got {reads} with solver {solver.method!r}, expected 1 or more, with 'als'"
        )
    content_bias = None
    if query_bias is not None:
        query_bias = _check_shape("query_bias", query_bias, (heads, width), device)
        content_bias = torch.einsum("hkd,hd->hk", tensor.key, query_bias)
    if key_bias is not None:
        key_bias = _check_shape("key_bias", key_bias, (heads, width), device)
    if head_weights is not None:
        head_weights = _check_shape("head_weights", head_weights, (heads,), device)
        if not bool((head_weights > 0).all()):
            raise ValueError(f"head_weights do not fit the heads: got {head_weights.tolist()}, expected all above 0")
    check_moments("query_moments", query_moments, tensor.query.shape[1])
    check_moments("key_moments", key_moments, tensor.key.shape[1])
    has_data = query_moments is not None or key_moments is not None

    if rank == tensor.full_rank and (reads is None or reads >= width):  # the heads side by side are exact
        mixing = torch.eye(heads, dtype=torch.float64, device=device).repeat_interleave(width, 1)
        return Factorization(
            factors=Factors(
                tensor.flat_query.clone(),
                mixing,
                tensor.flat_key.clone(),
                content_bias,
                None if key_bias is None else key_bias.flatten(),
            ),
            sweeps=0,
            converged=True,
            weight_error=0.0,
            data_error=0.0 if has_data else None,
        )

    weighting = Weighting.of(
        query_moments, key_moments, damping=solver.damping, centre_query=query_bias is not None, device=device
    )
    weighted = weighting.apply(tensor)
    if head_weights is not None:
        weighted = HeadTensor(weighted.query * head_weights[:, None, None], weighted.key)
    try:
        if solver.method == "parafac":
            solution = parafac(weighted, rank, solver.sweeps, solver.seed)
        else:
            solution = als(weighted, rank, solver.sweeps, reads)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise ValueError(f"the singular value decomposition of the heads failed: {error}") from error
    factors = solution.factors
    if head_weights is not None:
        factors = replace(factors, mixing=factors.mixing / head_weights[:, None])
    factors = weighting.undo(factors).normalised()
    if not all(bool(torch.isfinite(part).all()) for part in (factors.query, factors.mixing, factors.key)):
        raise ValueError("the factors are not finite; the moments are too close to singular: raise the damping")

    if content_bias is not None and query_moments is not None:  # (T_i - T̂_i)ᵀ μ
        mean = query_moments.mean.to(device).double()
        exact = torch.einsum("hkd,hd->hk", tensor.key, torch.einsum("hqd,q->hd", tensor.query, mean))
        content_bias = content_bias + exact - (factors.mixing * (mean @ factors.query)) @ factors.key.mT
    if key_bias is not None:
        scores = weighting.apply(tensor).query @ key_bias[..., None]  # S_Q·Q_i·c_i, (H, Dq, 1)
        shared = factors.query if weighting.query is None else weighting.query @ factors.query
        key_bias = _fit_key_bias(shared, factors.mixing, scores.squeeze(-1), head_weights)
    return Factorization(
        factors=replace(factors, content_bias=content_bias, key_bias=key_bias),
        sweeps=solution.sweeps,
        converged=solution.converged,
        breakdowns=solution.breakdowns,
        weight_error=tensor.relative_error(factors),
        data_error=weighted.relative_error(solution.factors) if has_data else None,
    )


def _fit_key_bias(query: Tensor, mixing: Tensor, wanted: Tensor, head_weights: Tensor | None) -> Tensor:
    """Return the β (R,) with the least Σ w_i² ‖wanted_i − query · (m_i ∘ β)‖²; query (D, R), wanted (H, D)."""
    weighted = mixing if head_weights is None else mixing * head_weights[:, None].square()
    products = (weighted.mT @ mixing) * (query.mT @ query)
    solution: Tensor = torch.linalg.pinv(products, rtol=1e-10, hermitian=True) @ (weighted * (wanted @ query)).sum(0)
    return solution


def _check_shape(name: str, values: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return weights in float64 on a device, or raise a ValueError unless they have this shape."""
    values = check_weights(name, values, device)
    if values.shape != shape:
        raise ValueError(f"{name} do not fit the heads: got {tuple(values.shape)}, expected {shape}")
    return values
