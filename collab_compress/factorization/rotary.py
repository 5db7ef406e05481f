r"""Shared channels for heads with a rotary embedding: a decomposition for each of its frequencies.

Two channels that are rotated together are one complex channel, $q_{ij} = x \cdot a_{ij}$ and
$k_{ij} = y \cdot b_{ij}$ of head i and frequency j, and
the scores of tokens n apart are $\mathrm{Re} \sum_j e^{i\theta_j n} q_{ij} \bar k_{ij}$.
A channel may be shared by heads within its frequency, with complex mixing:

$$a_{ij} b_{ij}^* \approx \sum_p m_{ijp}\, \chi_{jp} \kappa_{jp}^*$$

Averaged over distances frequencies do not interfere, so that the error is the sum of theirs. "RoFormer: Enhanced
Transformer with Rotary Position Embedding" (Su et al., 2021); the sharing is ours.

Channels that are not rotated can all be shared with one another, as in models without a rotary embedding. Where each
head has a key of its own, they are decomposed together by the solver of those models, as real channels: a complex one
holds two of them, and its mixing holds the real factor of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from collab_compress.devices import float64_device
from collab_compress.factorization.als import als
from collab_compress.factorization.factors import Factors, HeadTensor, SolverOptions, balanced, relative
from collab_compress.factorization.moments import Moments, cholesky

Check: TypeAlias = Callable[[], None]
SWEEPS = 100
FAST_SWEEPS = 25
ROUGH_SWEEPS = 20  # to estimate how many channels a frequency is worth
ROUGH_WIDTHS = 8  # widths at which that is done for unrotated channels, with interpolation in between
RIDGE = 1e-2  # fades out over the first 80 % of the sweeps, relative to the mean of the system's diagonal
SHIFT = 1e-12


@dataclass(frozen=True)
class RotaryFactors:
    r"""Shared complex channels, each of one frequency.

    Args:
        query: $\chi$, complex (Dq, S), or None where each head keeps its queries.
        mixing: m, complex (G, S): one row a head, or a group of heads that share a key. Queries are multiplied by it;
            where heads share unrotated queries, the real parts by its real part and the imaginary ones by its
            imaginary part.
        key: $\kappa$, complex (Dk, S).
        frequencies: of each of the S channels, from 0.
        rotated: number of frequencies that rotate, the first.
    """

    query: Tensor | None
    mixing: Tensor
    key: Tensor
    frequencies: tuple[int, ...]
    rotated: int


@dataclass(frozen=True)
class RotaryFactorization:
    """Shared channels and how well they fit.

    Args:
        factors: in complex128.
        weight_error: relative error of the weights, unweighted.
        data_error: relative error of the scores under the moments, averaged over distances, or None without moments.
        sweeps: passes of the solver over its factors; 0 where the answer is in closed form.
        converged: always True.
        breakdowns: always 0: a system is shifted before it is solved.
    """

    factors: RotaryFactors
    weight_error: float
    data_error: float | None
    sweeps: int = 0
    converged: bool = True
    breakdowns: int = 0


def factorize_rotary(
    query: Tensor,
    key: Tensor,
    channels: int,
    *,
    query_moments: Moments | None = None,
    key_moments: Moments | None = None,
    damping: float = 1e-3,
    sweeps: int | None = None,
    rotated: int | None = None,
    device: torch.device | str | None = None,
    check: Check | None = None,
    head_weights: Tensor | None = None,
) -> RotaryFactorization:
    """Share the complex channels of heads with a rotary embedding.

    Where each head has a key of its own, heads share queries and keys. Where groups of heads share a key already,
    groups share keys, and queries stay as they are: for each frequency a singular value decomposition of the keys,
    each weighted by the queries of its group. Channels are divided among frequencies so that the error is the least.

    Args:
        query: complex (H, Dq, J), J frequencies; where queries have biases they are the last of the Dq rows.
        key: complex (G, Dk, J), with G a divisor of H.
        channels: S, from 1 to G·J; at G·J the answer is the keys themselves.
        query_moments: moments of the queries' inputs; Dq wide, or one less where the last row is a bias.
        key_moments: of the keys' inputs.
        damping: multiple of the moments' mean diagonal added to their diagonal.
        sweeps: passes of the solver; None for its default.
        rotated: number of frequencies that rotate, the first; None for all. For the others the softmax ignores what
            is constant over keys, so keys are centred there.
        device: device of the work, with float64; None for the device of `query`, or the CPU.
        check: called before every sweep; an exception that it raises ends the work.
        head_weights: (H,), all above 0; as for `factorize`.

    Raises:
        ValueError: shapes do not fit, a value is not finite, or the moments are singular.
    """
    place = float64_device(query.device) if device is None else torch.device(device)
    query, key = (side.detach().to(place).to(torch.complex128) for side in (query, key))
    heads, groups, frequencies = len(query), len(key), query.shape[-1]
    if heads % groups or key.shape[-1] != frequencies or not 1 <= channels <= groups * frequencies:
        raise ValueError(
            f"got {heads} heads of {frequencies} frequencies, keys {tuple(key.shape)} and {channels} channels; "
            f"expected as many frequencies, keys for all heads or groups, and 1 to {groups * frequencies} channels"
        )
    if not bool(torch.isfinite(torch.view_as_real(query)).all() and torch.isfinite(torch.view_as_real(key)).all()):
        raise ValueError("queries or keys are not finite: got nan or inf, expected finite weights")
    rotated = frequencies if rotated is None else rotated
    query_root = _augmented_root("query", query_moments, query.shape[1], damping, place)
    key_roots = [
        _augmented_root("key", key_moments, key.shape[1], damping, place, centre=centre) for centre in (False, True)
    ]
    weights = (torch.ones(heads) if head_weights is None else head_weights).to(query)[:, None]
    weighted_query = _weighted(query_root, query) * weights[:, None]
    weighted_key = torch.cat(
        [_weighted(root, keys) for root, keys in zip(key_roots, key.tensor_split([rotated], -1), strict=True)], -1
    )
    has_data = query_moments is not None or key_moments is not None
    if channels == groups * frequencies:
        factors = _joined(_heads_own(query, key, range(frequencies), rotated), rotated)
        data_error = 0.0 if has_data else None
        return RotaryFactorization(_balanced(factors), 0.0, data_error)
    if heads != groups:
        parts = [_grouped_keys(weighted_query, weighted_key)]
    else:
        parts = []
        if rotated:
            parts.append(_rotated(weighted_query[..., :rotated], weighted_key[..., :rotated], sweeps, check))
        if rotated < frequencies:
            parts.append(_unrotated(weighted_query, weighted_key, rotated, sweeps, check))
    counts = allocated([errors for part in parts for errors in part.errors], channels)
    solved: list[_Channels] = []
    used_sweeps = 0
    for part in parts:
        part_counts, counts = counts[: len(part.errors)], counts[len(part.errors) :]
        part_channels, part_sweeps = part.solve(part_counts)
        solved += part_channels
        used_sweeps = max(used_sweeps, part_sweeps)
    weighted = _joined(solved, rotated)
    still = torch.tensor([frequency >= rotated for frequency in weighted.frequencies], device=place)
    keys = [_unweighted(root, weighted.key) for root in key_roots]
    factors = replace(
        weighted,
        query=None if weighted.query is None else _unweighted(query_root, weighted.query),
        mixing=weighted.mixing if weighted.query is None else weighted.mixing / weights,
        key=torch.where(still, keys[1], keys[0]),
    )
    return RotaryFactorization(
        _balanced(factors),
        weight_error=rotary_error(query, key, factors),
        data_error=rotary_error(weighted_query, weighted_key, weighted) if has_data else None,
        sweeps=used_sweeps,
    )


def rotary_error(query: Tensor, key: Tensor, factors: RotaryFactors) -> float:
    """Return the relative error ‖a b* − Σ m χ κ*‖/‖a b*‖ over heads and frequencies, (H, Dq, J) and (G, Dk, J)."""
    group = len(query) // len(key)
    residual = total = 0.0
    separate = query.shape[-1]  # frequencies whose errors add up; the others have one error together
    if factors.query is not None and factors.rotated < separate:
        separate = factors.rotated
        heads = _real_heads(query[..., separate:], key[..., separate:])
        total = 2 * heads.squared_norm().item()  # of |z|² rotation leaves a half in the real part, on average
        residual = heads.relative_error(_real_factors(factors)) ** 2 * total
    for j in range(separate):
        columns = [column for column, frequency in enumerate(factors.frequencies) if frequency == j]
        mixing = factors.mixing[:, columns].repeat_interleave(group, 0)  # (H, n)
        kappa = factors.key[:, columns]
        a, b = query[..., j].mT, key[..., j].mT.repeat_interleave(group, 1)  # (D, H)
        norms = (a.norm(dim=0) * b.norm(dim=0)).square()
        total += norms.sum().item()
        if factors.query is None:
            residual += (a.norm(dim=0) * (b - kappa @ mixing.mH).norm(dim=0)).square().sum().item()
            continue
        gram, right = _normal_equations(a, b, factors.query[:, columns], kappa)
        inner = (mixing.conj() * right.mT).sum(1).real
        squared = ((mixing @ gram.mT) * mixing.conj()).sum(1).real
        residual += (norms - 2 * inner + squared).clamp_min(0).sum().item()
    return relative(residual, total)


def allocated(errors: Sequence[Tensor] | Tensor, channels: int) -> list[int]:
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


def _augmented_root(
    side: str, moments: Moments | None, width: int, damping: float, place: torch.device, centre: bool = False
) -> Tensor | None:
    """Return S with SᵀS = E[xxᵀ] or the covariance, damped, (D, D), for x with a 1 appended where there is a bias."""
    if moments is None:
        return None
    if moments.width not in (width, width - 1):
        raise ValueError(f"moments of the {side} inputs are {moments.width} wide; expected {width}")
    mean, second = moments.mean.to(place).double(), moments.second.to(place).double()
    if moments.width < width:
        mean, second = torch.cat([mean, mean.new_ones(1)]), pad(second, (0, 1, 0, 1))
        second[-1] = second[:, -1] = mean
    damped = (second + second.mT) / 2 - (torch.outer(mean, mean) if centre else 0)
    damped.diagonal().add_(damping * second.diagonal().mean())
    message = f"the second moment of the {side} inputs is singular; raise the damping, or give more data"
    return cholesky(damped, message, upper=True).to(torch.complex128)


def _weighted(root: Tensor | None, channels: Tensor) -> Tensor:
    return channels if root is None else root @ channels


def _unweighted(root: Tensor | None, channels: Tensor) -> Tensor:
    if root is not None:
        channels = torch.linalg.solve_triangular(root, channels, upper=True)
    return channels


class _Channels(NamedTuple):
    """Complex channels χ (Dq, n) or None, m (G, n) and κ (Dk, n), and the frequency of each."""

    query: Tensor | None
    mixing: Tensor
    key: Tensor
    frequencies: list[int]


class _Part(NamedTuple):
    """Frequencies that are solved together."""

    errors: Sequence[Tensor]  # of each frequency with 0, 1, … channels, or of all where they share channels
    solve: Callable[[Sequence[int]], tuple[list[_Channels], int]]  # a count for each of the errors → channels, sweeps


def _heads_own(query: Tensor, key: Tensor, frequencies: Sequence[int], rotated: int) -> list[_Channels]:
    """Return the heads' own channels of some frequencies, which are exact."""
    shared = len(query) == len(key)
    eye = torch.eye(len(key), dtype=key.dtype, device=key.device)
    both = torch.complex(eye.real, eye.real)  # unrotated channels are two real ones
    return [
        _Channels(
            query[:, :, j].mT if shared else None,
            both if shared and j >= rotated else eye,
            key[:, :, j].mT,
            [j] * len(key),
        )
        for j in frequencies
    ]


def _joined(parts: Sequence[_Channels], rotated: int) -> RotaryFactors:
    """Join the channels of all frequencies."""
    queries = [part.query for part in parts if part.query is not None]
    return RotaryFactors(
        torch.cat(queries, 1) if queries else None,
        torch.cat([part.mixing for part in parts], 1),
        torch.cat([part.key for part in parts], 1),
        tuple(frequency for part in parts for frequency in part.frequencies),
        rotated,
    )


def _balanced(factors: RotaryFactors) -> RotaryFactors:
    """Return the same products with mixing columns of length 1, or keys of length 1 if queries are not shared."""
    if factors.query is None:
        lengths = factors.key.norm(dim=0).clamp_min(torch.finfo(torch.float64).tiny)
        return replace(factors, mixing=factors.mixing * lengths, key=factors.key / lengths)
    query, mixing, key = balanced(factors.query, factors.mixing, factors.key)
    return replace(factors, query=query, mixing=mixing, key=key)


def _grouped_keys(query: Tensor, key: Tensor) -> _Part:
    """Prepare keys that groups of heads share: a truncated singular value decomposition for each frequency."""
    groups, frequencies = len(key), key.shape[-1]
    strength = query.norm(dim=1).square().view(groups, -1, frequencies).sum(1)  # (G, J)
    least = strength.amax(0).clamp_min(torch.finfo(torch.float64).tiny) * 1e-12
    weights = strength.maximum(least).sqrt()
    basis, core = torch.linalg.qr((key * weights[:, None]).permute(2, 1, 0))  # of (J, Dk, G)
    left, values, right = torch.linalg.svd(core)
    left = basis @ left[:, :, : values.shape[1]]
    tails = values.square().flip(1).cumsum(1).flip(1)

    def solve(counts: Sequence[int]) -> tuple[list[_Channels], int]:
        solved = []
        for j, count in enumerate(counts):
            mixing = right[j, :count].mH * values[j, :count] / weights[:, j, None]  # (G, n)
            solved.append(_Channels(None, mixing, left[j, :, :count], [j] * count))
        return solved, 0

    return _Part(list(pad(tails, (0, 1))), solve)


def _rotated(query: Tensor, key: Tensor, sweeps: int | None, check: Check | None) -> _Part:
    """Prepare queries and keys that heads share: a CP of rank-one slices for each frequency."""
    sweeps = SWEEPS if sweeps is None else sweeps
    heads, frequencies = len(query), query.shape[-1]
    query_basis, query_core = torch.linalg.qr(query.permute(2, 1, 0))  # (J, D, r), (J, r, H)
    key_basis, key_core = torch.linalg.qr(key.permute(2, 1, 0))
    norm = (query_core.norm(dim=1) * key_core.norm(dim=1)).square().sum(1)
    errors = [norm]
    for count in range(1, heads):
        *_, error = decomposed(query_core, key_core, count, min(sweeps, ROUGH_SWEEPS), check)
        errors.append(error.minimum(errors[-1]))
    errors.append(torch.zeros_like(norm))

    def solve(counts: Sequence[int]) -> tuple[list[_Channels], int]:
        solved = _heads_own(query, key, range(frequencies), rotated=frequencies)
        for count in sorted(set(counts) - {heads}):  # frequencies with equally many channels are solved together
            places = [j for j in range(frequencies) if counts[j] == count]
            chi, mixing, kappa, _ = decomposed(query_core[places], key_core[places], count, sweeps, check)
            for place, j in enumerate(places):
                solved[j] = _Channels(
                    query_basis[j] @ chi[place], mixing[place], key_basis[j] @ kappa[place], [j] * count
                )
        return solved, sweeps

    return _Part(list(torch.stack(errors, 1)), solve)


def _unrotated(query: Tensor, key: Tensor, rotated: int, sweeps: int | None, check: Check | None) -> _Part:
    """Prepare queries and keys that heads share where nothing is rotated: one CP of all real channels."""
    heads = _real_heads(query[..., rotated:], key[..., rotated:])
    frequencies = query.shape[-1] - rotated
    full = len(query) * frequencies  # complex channels
    progress = None if check is None else lambda *_: check()
    norm = 2 * heads.squared_norm().item()  # as in `rotary_error`
    errors = {0: norm, full: 0.0}
    for step in range(1, ROUGH_WIDTHS):
        count = round(full * step / ROUGH_WIDTHS)
        if count not in errors:
            rough = als(heads, 2 * count, SolverOptions(sweeps=ROUGH_SWEEPS, progress=progress)).factors
            errors[count] = heads.relative_error(rough) ** 2 * norm
    widths = sorted(errors)
    interpolated = np.interp(range(full + 1), widths, [errors[width] for width in widths])

    def solve(counts: Sequence[int]) -> tuple[list[_Channels], int]:
        (count,) = counts
        exact = _heads_own(query, key, range(rotated, rotated + frequencies), rotated)
        if count == full:
            return exact, 0
        if count == 0:
            return [], 0
        solution = als(heads, 2 * count, SolverOptions(sweeps=sweeps, progress=progress))
        sides = (solution.factors.query, solution.factors.mixing, solution.factors.key)
        chi, mixing, kappa = (torch.complex(side[:, :count], side[:, count:]) for side in sides)
        # The channels may take any of their frequencies.
        labels = [rotated + i % frequencies for i in range(count)]
        return [_Channels(chi, mixing, kappa, labels)], solution.sweeps

    return _Part([torch.from_numpy(interpolated).cummin(0).values], solve)


def _real_heads(query: Tensor, key: Tensor) -> HeadTensor:
    """Return unrotated heads, complex (H, D, U), as heads of 2U real channels."""
    return HeadTensor(*(torch.cat([side.real, side.imag], -1) for side in (query, key)))


def _real_factors(factors: RotaryFactors) -> Factors:
    """Return the unrotated channels of shared heads as real factors."""
    assert factors.query is not None
    still = [column for column, frequency in enumerate(factors.frequencies) if frequency >= factors.rotated]
    channels = (side[:, still] for side in (factors.query, factors.mixing, factors.key))
    return Factors(*(torch.cat([side.real, side.imag], 1) for side in channels))


def decomposed(
    query: Tensor, key: Tensor, count: int, sweeps: int, check: Check | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Decompose rank-one slices $\alpha_h \beta_h^*$ into shared channels, by alternating least squares.

    From two starts, of which the better is kept: the leading singular vectors of both sides, and the strongest heads.

    Args:
        query: α of each head as columns, complex (J, r, H).
        key: β, (J, s, H).
        count: channels n.
        sweeps: passes.
        check: called before every pass.

    Returns:
        χ (J, r, n), m (J, H, n), κ (J, s, n), and the squared error of each problem (J,).
    """
    sizes = (query.norm(dim=1) * key.norm(dim=1)).square()  # (J, H)
    if count == 0:
        return query[:, :, :0], query.mT[:, :, :0], key[:, :, :0], sizes.sum(1)
    total = sizes.sum(1).clamp_min(torch.finfo(torch.float64).tiny)
    unit = total[:, None, None] ** 0.25
    query, key = query / unit, key / unit
    strongest = sizes.argsort(1, descending=True)[:, None, :count]
    starts = (
        [side.gather(2, strongest.expand(-1, side.shape[1], -1)) for side in (query, key)],
        [pad(torch.linalg.svd(side).U, (0, count - side.shape[1])) for side in (query, key)],  # cut off or zero
    )
    first, second = (_swept(query, key, chi, kappa, sweeps=sweeps, check=check) for chi, kappa in starts)
    better = second[3] < first[3]
    chi, mixing, kappa = (
        torch.where(better[:, None, None], two, one) for one, two in zip(first[:3], second[:3], strict=True)
    )
    error = torch.where(better, second[3], first[3]) * total
    return chi * unit, mixing, kappa * unit, error


def _swept(
    query: Tensor, key: Tensor, chi: Tensor, kappa: Tensor, *, sweeps: int, check: Check | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the sweeps from one start; the slices of each problem have norm 1 in all."""
    for sweep in range(sweeps):
        if check is not None:
            check()
        ridge = max(RIDGE * (1 - sweep / (0.8 * sweeps)), 0.0) + SHIFT
        mixing = _mixed(*_normal_equations(query, key, chi, kappa), ridge)
        chi = _side(query, key, kappa, mixing, ridge)
        mixing = _mixed(*_normal_equations(query, key, chi, kappa), ridge)
        kappa = _side(key, query, chi, mixing.conj(), ridge)
        chi_norm, kappa_norm = (side.norm(dim=1, keepdim=True).clamp_min(1e-150) for side in (chi, kappa))
        common = (chi_norm * kappa_norm).sqrt()
        chi, kappa = chi * (common / chi_norm), kappa * (common / kappa_norm)
    gram, right = _normal_equations(query, key, chi, kappa)
    mixing = _mixed(gram, right, SHIFT)
    inner = (mixing.conj() * right.mT).sum((1, 2)).real
    squared = ((mixing @ gram.mT) * mixing.conj()).sum((1, 2)).real
    return chi, mixing, kappa, (1 - 2 * inner + squared).clamp_min(0)


def _normal_equations(query: Tensor, key: Tensor, chi: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Gram matrix (…, n, n) of χκ* and its products with the heads' slices (…, n, H)."""
    gram = (chi.mH @ chi) * (kappa.mH @ kappa).conj()
    return gram, (chi.mH @ query) * (kappa.mH @ key).conj()


def _mixed(gram: Tensor, right: Tensor, ridge: float) -> Tensor:
    """Return the least-squares mixing (J, H, n)."""
    mixing: Tensor = torch.linalg.solve(_shifted(gram, ridge), right).mT
    return mixing


def _side(query: Tensor, key: Tensor, kappa: Tensor, mixing: Tensor, ridge: float) -> Tensor:
    """Return the least-squares χ (J, r, n), or κ where the sides are exchanged and the mixing is conjugate."""
    right = query @ ((key.mH @ kappa) * mixing.conj())  # (J, r, n)
    gram = (kappa.mH @ kappa) * (mixing.mT @ mixing.conj())
    side: Tensor = torch.linalg.solve(_shifted(gram, ridge).mT, right.mT).mT
    return side


def _shifted(gram: Tensor, ridge: float) -> Tensor:
    size = gram.diagonal(dim1=1, dim2=2).real.mean(1).clamp_min(1e-150)
    return gram + ridge * torch.diag_embed(size[:, None].expand(gram.shape[:2])).to(gram.dtype)
