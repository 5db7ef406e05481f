r"""Shared keys for heads with a rotary embedding: a singular value decomposition for each of its frequencies.

Two channels that are rotated together are one complex channel, $q_{ij} = x \cdot a_{ij}$ and
$k_{ij} = y \cdot b_{ij}$ of head i and frequency j, and
the scores of tokens n apart are $\mathrm{Re} \sum_j e^{i\theta_j n} q_{ij} \bar k_{ij}$.
Heads keep their queries and share keys within a frequency, with complex mixing:

$$b_{ij} \approx \sum_p \bar m_{ijp}\, \kappa_{jp}$$

Averaged over distances frequencies do not interfere, so that the error is the sum of theirs, and the best keys of
each are the leading singular vectors of its $b_{ij}$, weighted by the lengths of $a_{ij}$. "RoFormer: Enhanced
Transformer with Rotary Position Embedding" (Su et al., 2021); the sharing is ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from collab_compress.devices import work_device
from collab_compress.factorization.factors import relative
from collab_compress.factorization.moments import Moments, damped_root
from collab_compress.options import Solver

DEFAULT = Solver()


@dataclass(frozen=True)
class RotaryFactors:
    r"""Shared complex keys, each of one frequency.

    Args:
        mixing: m, complex (G, S): one row for each head, or group of heads that share a key.
        key: $\kappa$, complex (Dk, S), columns of length 1.
        frequencies: of each of the S channels, from 0.

    Example:
        >>> query, key = torch.randn(2, 4, 16, 4, dtype=torch.complex64)
        >>> factors = factorize_rotary(query, key, channels=6).factors
        >>> factors.mixing.shape, factors.key.shape, len(factors.frequencies)
        (torch.Size([4, 6]), torch.Size([16, 6]), 6)
    """

    mixing: Tensor
    key: Tensor
    frequencies: tuple[int, ...]


@dataclass(frozen=True)
class RotaryFactorization:
    """Shared keys and how well they fit; the answer is in closed form.

    Args:
        factors: in complex128.
        weight_error: relative error of the weights, unweighted.
        data_error: relative error of the scores under the moments, averaged over distances, or None without moments.

    Example:
        >>> query, key = torch.randn(2, 4, 16, 4, dtype=torch.complex64)
        >>> errors = [factorize_rotary(query, key, count).weight_error for count in (4, 8, 16)]
        >>> errors[0] > errors[1] > errors[2] == 0
        True
    """

    factors: RotaryFactors
    weight_error: float
    data_error: float | None


def factorize_rotary(
    query: Tensor,
    key: Tensor,
    channels: int,
    *,
    query_moments: Moments | None = None,
    key_moments: Moments | None = None,
    head_weights: Tensor | None = None,
    rotated: int | None = None,
    solver: Solver = DEFAULT,
) -> RotaryFactorization:
    """Share the complex key channels of heads with a rotary embedding, which keep their queries.

    Channels are divided among frequencies so that the error is the least.

    Args:
        query: complex (H, Dq, J), J frequencies; where queries have biases they are the last of the Dq rows.
        key: complex (G, Dk, J), with G a divisor of H: keys of heads, or of groups of heads.
        channels: S, from 1 to G·J; at G·J the answer is the keys themselves.
        query_moments: moments of the queries' inputs; Dq wide, or one less where the last row is a bias.
        key_moments: of the keys' inputs.
        head_weights: (H,), all above 0; as for `factorize`.
        rotated: number of frequencies that rotate, the first; None for all. For the others the softmax ignores what
            is constant over keys, so keys are centred there.
        solver: damping of the moments, and device of the work.

    Raises:
        ValueError: shapes do not fit, a value is not finite, or the moments are singular.

    Example:
        >>> query = torch.randn(4, 16, 4, dtype=torch.complex64)  # 4 heads of 4 pairs of channels
        >>> key = torch.randn(2, 16, 4, dtype=torch.complex64)  # of 2 groups of heads
        >>> factorize_rotary(query, key, channels=8).weight_error
        0.0
    """
    device = work_device(solver.device, query)
    query, key = (side.detach().to(device).to(torch.complex128) for side in (query, key))
    heads, groups, frequencies = len(query), len(key), query.shape[-1]
    if heads % groups or key.shape[-1] != frequencies or not 1 <= channels <= groups * frequencies:
        raise ValueError(
            f"got {heads} heads of {frequencies} frequencies, keys {tuple(key.shape)} and {channels} channels; "
            f"expected as many frequencies, keys for all heads or groups, and 1 to {groups * frequencies} channels"
        )
    if not bool(torch.isfinite(torch.view_as_real(query)).all() and torch.isfinite(torch.view_as_real(key)).all()):
        raise ValueError("queries or keys are not finite: got nan or inf, expected finite weights")
    rotated = frequencies if rotated is None else rotated
    query_root = _augmented_root("query", query_moments, query, solver.damping, centre=False)
    key_root = _augmented_root("key", key_moments, key, solver.damping, centre=False)
    centred_root = key_root
    if rotated < frequencies:
        centred_root = _augmented_root("key", key_moments, key, solver.damping, centre=True)
    weights = (query.new_ones(heads) if head_weights is None else head_weights.to(query))[:, None, None]
    weighted_query = query_root @ query * weights
    weighted_key = torch.cat([key_root @ key[..., :rotated], centred_root @ key[..., rotated:]], -1)
    has_data = query_moments is not None or key_moments is not None
    if channels == groups * frequencies:
        eye = torch.eye(groups, dtype=key.dtype, device=device).repeat(1, frequencies)
        labels = tuple(j for j in range(frequencies) for _ in range(groups))
        factors = _normalise(RotaryFactors(eye, key.permute(1, 2, 0).flatten(1), labels))
        return RotaryFactorization(factors, 0.0, 0.0 if has_data else None)
    weighted = _best_keys(weighted_query, weighted_key, channels)
    is_rotated = torch.tensor([frequency < rotated for frequency in weighted.frequencies], device=device)
    keys = torch.where(
        is_rotated,
        torch.linalg.solve_triangular(key_root, weighted.key, upper=True),
        torch.linalg.solve_triangular(centred_root, weighted.key, upper=True),
    )
    factors = _normalise(RotaryFactors(weighted.mixing, keys, weighted.frequencies))
    return RotaryFactorization(
        factors,
        weight_error=rotary_error(query, key, factors),
        data_error=rotary_error(weighted_query, weighted_key, weighted) if has_data else None,
    )


def _best_keys(query: Tensor, key: Tensor, channels: int) -> RotaryFactors:
    """Return the leading singular vectors of the keys of each frequency, weighted by the lengths of their queries."""
    groups, frequencies = len(key), key.shape[-1]
    strength = query.norm(dim=1).square().view(groups, -1, frequencies).sum(1)  # (G, J)
    least = strength.amax(0).clamp_min(torch.finfo(torch.float64).tiny) * 1e-12
    weights = strength.maximum(least).sqrt()
    basis, core = torch.linalg.qr((key * weights[:, None]).permute(2, 1, 0))  # of (J, Dk, G)
    left, values, right = torch.linalg.svd(core)
    left = basis @ left[:, :, : values.shape[1]]
    losses = pad(values.square().flip(1).cumsum(1).flip(1), (0, 1))  # with 0, 1, … channels
    counts = allocate_channels(losses, channels)
    mixing = [
        right[j, :count].mH * values[j, :count] / weights[:, j, None] for j, count in enumerate(counts)
    ]  # (G, n)
    return RotaryFactors(
        torch.cat(mixing, 1),
        torch.cat([left[j, :, :count] for j, count in enumerate(counts)], 1),
        tuple(j for j, count in enumerate(counts) for _ in range(count)),
    )


def _normalise(factors: RotaryFactors) -> RotaryFactors:
    """Return the same products with keys of length 1."""
    lengths = factors.key.norm(dim=0).clamp_min(torch.finfo(torch.float64).tiny)
    return RotaryFactors(factors.mixing * lengths, factors.key / lengths, factors.frequencies)


def rotary_error(query: Tensor, key: Tensor, factors: RotaryFactors) -> float:
    """Return the relative error ‖a (b − κ m*)*‖/‖a b*‖ over heads and frequencies, (H, Dq, J) and (G, Dk, J)."""
    group = len(query) // len(key)
    residual = total = 0.0
    for j in range(query.shape[-1]):
        columns = [column for column, frequency in enumerate(factors.frequencies) if frequency == j]
        lengths = query[..., j].norm(dim=1)  # (H,)
        keys = key[..., j].mT  # (Dk, G)
        lost = keys - factors.key[:, columns] @ factors.mixing[:, columns].mH
        norms = [side.norm(dim=0).repeat_interleave(group) for side in (keys, lost)]
        total += (lengths * norms[0]).square().sum().item()
        residual += (lengths * norms[1]).square().sum().item()
    return relative(residual, total)


def allocate_channels(errors: Sequence[Tensor] | Tensor, channels: int) -> list[int]:
    """Divide channels among frequencies so that the sum of their errors, with 0, 1, … channels each, is the least."""
    best = errors[0].cpu().new_full((channels + 1,), torch.inf)  # least error so far with 0, 1, … channels
    best[0] = 0.0
    choices = []
    for row in errors:
        tried = best.new_full((len(row), channels + 1), torch.inf)
        for count, error in enumerate(row[: channels + 1].tolist()):
            tried[count, count:] = best[: channels + 1 - count] + error
        best, choice = tried.min(0)
        choices.append(choice)
    counts = []
    for choice in reversed(choices):
        counts.append(int(choice[channels]))
        channels -= counts[-1]
    return counts[::-1]


def _augmented_root(side: str, moments: Moments | None, heads: Tensor, damping: float, centre: bool) -> Tensor:
    """Return `damped_root` (D, D) of inputs, with a 1 appended where there is a bias; I without moments."""
    width = heads.shape[1]
    if moments is None:
        return torch.eye(width, dtype=heads.dtype, device=heads.device)
    if moments.width not in (width, width - 1):
        raise ValueError(f"moments of the {side} inputs are {moments.width} wide; expected {width}")
    if moments.width < width:
        mean = torch.cat([moments.mean, moments.mean.new_ones(1)])
        second = pad(moments.second, (0, 1, 0, 1))
        second[-1] = second[:, -1] = mean
        moments = Moments(mean, second, moments.count)
    return damped_root(side, moments, damping, centre, heads.device).to(heads.dtype)
