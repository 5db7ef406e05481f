r"""Shared channels for heads that a rotary embedding turns: a decomposition for each of its frequencies.

Two channels that are turned together are one complex channel, $q_{ij} = x \cdot a_{ij}$ and
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
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from collab_compress.factorization.als import als
from collab_compress.factorization.factors import Factors, SolverOptions
from collab_compress.factorization.head_tensor import HeadTensor, relative
from collab_compress.factorization.moments import Moments, float64_device

Check = Callable[[], None]
SWEEPS = 100
FAST_SWEEPS = 25
ROUGH_SWEEPS = 20  # to see how many channels a frequency is worth
ROUGH_WIDTHS = 8  # at which the error of unrotated channels is computed for that, and interpolated between
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
        rotated: how many frequencies rotate, the first.
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
        converged: whether the solver came to rest, which a closed form always does.
        per_head_error: what the minimised error is where each head, or group of heads that share keys, keeps its own
            strongest channels, as many in all.
        exact: whether nothing is lost.
        breakdowns: always 0: a system is shifted before it is solved.
    """

    factors: RotaryFactors
    weight_error: float
    data_error: float | None
    sweeps: int
    converged: bool
    per_head_error: float
    exact: bool
    breakdowns: int = 0
    sizes: None = None


def factorize_rotary(
    query: Tensor,
    key: Tensor,
    channels: int,
    *,
    query_moments: Moments | None = None,
    key_moments: Moments | None = None,
    damping: float = 1e-3,
    sweeps: int | None = None,
    turned: int | None = None,
    equal: bool = False,
    device: torch.device | str | None = None,
    check: Check | None = None,
    head_weights: Tensor | None = None,
) -> RotaryFactorization:
    """Share the complex channels of heads that a rotary embedding turns.

    Where each head has a key of its own, heads share queries and keys. Where groups of heads share a key already,
    groups share keys, and queries stay as they are: for each frequency a singular value decomposition of the keys,
    each weighed by the queries of its group.

    How many channels a frequency gets is what lowers the error of all most, unless `equal` asks for one number.

    Args:
        query: complex (H, Dq, J), J frequencies; where queries have biases they are the last of the Dq rows.
        key: complex (G, Dk, J), with G a divisor of H.
        channels: S, from 1 to G·J; at G·J the answer is the keys themselves.
        query_moments: moments of the queries' inputs; Dq wide, or one less where the last row is a bias.
        key_moments: of the keys' inputs.
        damping: multiple of the moments' mean diagonal added to their diagonal.
        sweeps: passes of the solver; None for its own number.
        turned: how many frequencies turn, the first; all if not given. Of the others the softmax ignores what is
            constant over keys, so keys are centred there.
        equal: whether all frequencies get equally many channels, as far as S allows.
        device: where to work; it must have float64. None for where `query` is, or the CPU.
        check: called before every sweep; what it raises ends the work.
        head_weights: (H,), all above 0; as for `factorize`.

    Raises:
        ValueError: shapes do not fit, a value is not finite, or the moments are singular.
    """
    place = float64_device(query.device) if device is None else torch.device(device)
    query, key = (each.detach().to(place).to(torch.complex128) for each in (query, key))
    heads, groups, frequencies = len(query), len(key), query.shape[-1]
    if heads % groups or key.shape[-1] != frequencies or not 1 <= channels <= groups * frequencies:
        raise ValueError(
            f"got {heads} heads of {frequencies} frequencies, keys {tuple(key.shape)} and {channels} channels; "
            f"expected as many frequencies, keys for all heads or groups, and 1 to {groups * frequencies} channels"
        )
    if not bool(torch.isfinite(torch.view_as_real(query)).all() and torch.isfinite(torch.view_as_real(key)).all()):
        raise ValueError("queries or keys are not finite: got nan or inf, expected finite weights")
    turned = frequencies if turned is None else turned
    query_root = _root("query", query_moments, query.shape[1], damping, place)
    key_roots = [_root("key", key_moments, key.shape[1], damping, place, each) for each in (False, True)]
    weights = (torch.ones(heads) if head_weights is None else head_weights).to(query)[:, None]
    weighed_query = _weighed(query_root, query) * weights[:, None]
    weighed_key = torch.cat(
        [_weighed(root, part) for root, part in zip(key_roots, key.tensor_split([turned], -1), strict=True)], -1
    )
    shared = heads == groups
    exact = channels == groups * frequencies
    if exact:
        counts = [groups] * frequencies
        found = solved = _joined([_own(query, key, j, turned) for j in range(frequencies)], counts, turned)
    else:
        if not shared:
            parts: list[_Part] = [_Keys(weighed_query, weighed_key)]
        elif turned == frequencies:
            parts = [_Shared(weighed_query, weighed_key, sweeps, check)]
        else:
            parts = [_Unrotated(weighed_query[..., turned:], weighed_key[..., turned:], sweeps, check)]
            if turned:
                parts.insert(0, _Shared(weighed_query[..., :turned], weighed_key[..., :turned], sweeps, check))
        solved, used_sweeps = _solved(parts, channels, frequencies, turned, equal)
        still = torch.tensor([frequency >= turned for frequency in solved.frequencies], device=place)
        keys = [_unweighed(root, solved.key) for root in key_roots]
        found = replace(
            solved,
            query=None if solved.query is None else _unweighed(query_root, solved.query),
            mixing=solved.mixing if solved.query is None else solved.mixing / weights,
            key=torch.where(still, keys[1], keys[0]),
        )
    weighted = query_moments is not None or key_moments is not None
    sizes = _strengths(weighed_query, weighed_key).view(groups, -1, frequencies).sum(1)  # (G, J)
    kept = sizes.flatten().sort(descending=True).values
    return RotaryFactorization(
        factors=_balanced(found),
        weight_error=0.0 if exact else rotary_error(query, key, found),
        data_error=None if not weighted else 0.0 if exact else rotary_error(weighed_query, weighed_key, solved),
        sweeps=0 if exact else used_sweeps,
        converged=True,
        per_head_error=relative(kept[channels:].sum().item(), kept.sum().item()),
        exact=exact,
    )


def rotary_error(query: Tensor, key: Tensor, factors: RotaryFactors) -> float:
    """Relative error of all heads' slices, ‖a b* − Σ m χ κ*‖/‖a b*‖, over heads and frequencies; shapes as above."""
    group = len(query) // len(key)
    lost = total = 0.0
    apart = query.shape[-1]  # frequencies whose errors add up; the others are one
    if factors.query is not None and factors.rotated < apart:
        apart = factors.rotated
        heads = _real_heads(query[..., apart:], key[..., apart:])
        total = 2 * heads.squared_norm().item()  # of |z|² rotation leaves a half in the real part, on average
        real = _real_factors(factors)
        lost = total if real.query.shape[1] == 0 else heads.relative_error(real) ** 2 * total
    for j in range(apart):
        own = [place for place, frequency in enumerate(factors.frequencies) if frequency == j]
        mixing = factors.mixing[:, own].repeat_interleave(group, 0)  # (H, n)
        kappa = factors.key[:, own]
        for head in range(len(query)):
            a, b = query[head, :, j], key[head // group, :, j]
            norm = float((a.norm() * b.norm()) ** 2)
            total += norm
            if factors.query is None:
                lost += float((a.norm() * (b - kappa @ mixing[head].conj()).norm()) ** 2)
                continue
            chi = factors.query[:, own] * mixing[head]
            inner = ((chi.mH @ a) * (kappa.mH @ b).conj()).sum().real
            squared = ((chi.mH @ chi) * (kappa.mH @ kappa).conj()).sum().real
            lost += max(norm - 2 * float(inner) + float(squared), 0.0)
    return relative(lost, total)


def allocated(errors: Sequence[Tensor] | Tensor, channels: int) -> list[int]:
    """Share out channels among frequencies so that the sum of their errors is the least possible.

    Args:
        errors: of each frequency with 0, 1, … channels, (n+1,) each.
        channels: how many there are, at most as many as all frequencies take.

    Returns:
        How many each frequency gets.
    """
    best = errors[0].cpu().new_full((channels + 1,), torch.inf)  # of the frequencies so far, with so many channels
    best[0] = 0.0
    taken = []
    for row in (each.cpu() for each in errors):
        tried = best.new_full((len(row), channels + 1), torch.inf)
        for count in range(min(len(row), channels + 1)):
            tried[count, count:] = best[: channels + 1 - count] + row[count]
        best, choice = tried.min(0)
        taken.append(choice)
    counts, left = [], channels
    for choice in reversed(taken):
        counts.append(int(choice[left]))
        left -= counts[-1]
    return counts[::-1]


def _equal(channels: int, frequencies: int) -> list[int]:
    return [channels // frequencies + (j < channels % frequencies) for j in range(frequencies)]


def _root(
    side: str, moments: Moments | None, width: int, damping: float, place: torch.device, centre: bool = False
) -> Tensor | None:
    """S with SᵀS = E[xxᵀ] + damping, (D, D) upper triangular, for x with a 1 appended where there is a bias.

    With `centre` the covariance takes the place of second moments.
    """
    if moments is None:
        return None
    mean, second = (each.to(place).double() for each in (moments.mean, moments.second))
    if moments.width not in (width, width - 1):
        raise ValueError(f"moments of the {side} inputs are {moments.width} wide; expected {width}")
    if moments.width < width:
        one = second.new_ones(1, 1)
        second = torch.cat([torch.cat([second, mean[:, None]], 1), torch.cat([mean[None], one], 1)])
        mean = torch.cat([mean, one[0]])
    size = damping * second.diagonal().mean()
    damped = (second + second.mT) / 2 - (torch.outer(mean, mean) if centre else 0)
    damped.diagonal().add_(size)
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(damped, upper=True)
    if int(failed) or not bool(torch.isfinite(root).all()):
        raise ValueError(f"the second moment of the {side} inputs is singular; raise the damping, or give more data")
    return root.to(torch.complex128)


def _unweighed(root: Tensor | None, channels: Tensor) -> Tensor:
    if root is None:
        return channels
    solved: Tensor = torch.linalg.solve_triangular(root, channels, upper=True)
    return solved


def _weighed(root: Tensor | None, channels: Tensor) -> Tensor:
    weighed: Tensor = channels if root is None else root @ channels
    return weighed


def _strengths(query: Tensor, key: Tensor) -> Tensor:
    """‖a‖²‖b‖² of each head and frequency, (H, J)."""
    norms = key.norm(dim=1).square().repeat_interleave(len(query) // len(key), 0)
    strengths: Tensor = query.norm(dim=1).square() * norms
    return strengths


Channels = tuple[Tensor | None, Tensor, Tensor]
"""χ (Dq, n) or None, m (G, n) and κ (Dk, n) of one frequency."""


def _own(query: Tensor, key: Tensor, j: int, rotated: int) -> Channels:
    """Return the heads' own channels of one frequency, which are exact."""
    shared = len(query) == len(key)
    mixing = torch.eye(len(key), dtype=key.dtype, device=key.device)
    if shared and j >= rotated:
        mixing = torch.complex(mixing.real, mixing.real)
    return (query[:, :, j].mT if shared else None), mixing, key[:, :, j].mT


def _real_heads(query: Tensor, key: Tensor) -> HeadTensor:
    """Return unrotated heads, complex (H, D, U), as heads of 2U real channels."""
    return HeadTensor(*(torch.cat([side.real, side.imag], -1) for side in (query, key)))


def _real_factors(factors: RotaryFactors) -> Factors:
    """Return the unrotated channels of shared heads as real factors."""
    assert factors.query is not None
    still = [place for place, frequency in enumerate(factors.frequencies) if frequency >= factors.rotated]
    chosen = (side[:, still] for side in (factors.query, factors.mixing, factors.key))
    return Factors(*(torch.cat([side.real, side.imag], 1) for side in chosen))


class _Part(Protocol):
    """Solves some of the frequencies."""

    sweeps: int

    def errors(self) -> Tensor | list[Tensor]:
        """Return the errors of each frequency with 0, 1, … channels."""
        ...

    def channels(self, counts: Sequence[int]) -> list[Channels]:
        """Return as many channels of each frequency."""
        ...


def _solved(
    parts: Sequence[_Part], channels: int, frequencies: int, rotated: int, equal: bool
) -> tuple[RotaryFactors, int]:
    """Share out channels among frequencies, solve all of them, and return the sweeps that it took."""
    errors = [list(part.errors()) for part in parts]
    joined = sum(map(len, errors)) < frequencies  # unrotated ones count as one
    if equal:
        counts = _equal(channels, frequencies)
        if joined:
            counts = [*counts[:rotated], sum(counts[rotated:])]
    else:
        counts = allocated([row for rows in errors for row in rows], channels)
    solved: list[Channels] = []
    for part, rows in zip(parts, errors, strict=True):
        solved += part.channels(counts[len(solved) : len(solved) + len(rows)])
    factors = _joined(solved, counts, rotated)
    if joined:  # which of their places they take does not matter
        still = frequencies - rotated
        order = [*factors.frequencies[: channels - counts[-1]], *(rotated + i % still for i in range(counts[-1]))]
        factors = replace(factors, frequencies=tuple(order))
    return factors, max(part.sweeps for part in parts)


def _joined(parts: Sequence[Channels], counts: Sequence[int], rotated: int) -> RotaryFactors:
    """Join the channels of all frequencies."""
    queries = [query for query, _, _ in parts if query is not None]
    return RotaryFactors(
        torch.cat(queries, 1) if queries else None,
        torch.cat([mixing for _, mixing, _ in parts], 1),
        torch.cat([key for _, _, key in parts], 1),
        tuple(j for j, count in enumerate(counts) for _ in range(count)),
        rotated,
    )


def _balanced(factors: RotaryFactors) -> RotaryFactors:
    """Return the same products with mixing columns of length 1, or keys of length 1 if queries are not shared."""
    tiny = torch.finfo(torch.float64).tiny
    query, mixing, key = factors.query, factors.mixing, factors.key
    if query is None:
        lengths = key.norm(dim=0).clamp_min(tiny)
        return replace(factors, mixing=mixing * lengths, key=key / lengths)
    sides = [each.norm(dim=0).clamp_min(tiny) for each in (query, mixing, key)]
    common = (sides[0] * sides[1] * sides[2]).sqrt()
    query, mixing, key = query * (common / sides[0]), mixing / sides[1], key * (common / sides[2])
    return replace(factors, query=query, mixing=mixing, key=key)


class _Keys:
    """Keys that groups of heads share: a truncated singular value decomposition for each frequency."""

    sweeps = 0

    def __init__(self, query: Tensor, key: Tensor) -> None:
        groups = len(key)
        strength = query.norm(dim=1).square().view(groups, -1, query.shape[-1]).sum(1)  # (G, J)
        least = strength.amax(0).clamp_min(torch.finfo(torch.float64).tiny) * 1e-12
        self.weights = strength.maximum(least).sqrt()
        weighed = (key * self.weights[:, None]).permute(2, 1, 0)  # (J, Dk, G)
        basis, core = torch.linalg.qr(weighed)
        left, self.values, self.right = torch.linalg.svd(core)
        self.left = basis @ left[:, :, : self.values.shape[1]]

    def errors(self) -> Tensor:
        """Errors of each frequency with 0 to G channels, (J, G+1)."""
        squares = self.values.square()
        left = squares.flip(1).cumsum(1).flip(1)
        return torch.cat([left, left.new_zeros(len(left), 1)], 1)

    def channels(self, counts: Sequence[int]) -> list[Channels]:
        """Return factors with the given number of channels of each frequency."""
        kept = [self.right[j, :count].mH * self.values[j, :count] for j, count in enumerate(counts)]  # (G, n) each
        return [
            (None, mixing / self.weights[:, j, None], self.left[j, :, : mixing.shape[1]])
            for j, mixing in enumerate(kept)
        ]


class _Shared:
    """Queries and keys that heads share: a CP of rank-one slices for each frequency, all frequencies at once."""

    def __init__(self, query: Tensor, key: Tensor, sweeps: int | None, check: Check | None) -> None:
        self.sweeps, self.check = SWEEPS if sweeps is None else sweeps, check
        self.query_basis, self.query = torch.linalg.qr(query.permute(2, 1, 0))  # (J, D, r), (J, r, H)
        self.key_basis, self.key = torch.linalg.qr(key.permute(2, 1, 0))

    def errors(self) -> Tensor:
        """Errors of each frequency with 0 to H channels, (J, H+1), never rising."""
        heads, none = self.query.shape[2], self._norms()
        rough = [none]
        for count in range(1, heads):
            error = decomposed(self.query, self.key, count, min(self.sweeps, ROUGH_SWEEPS), self.check)[-1]
            rough.append(error.minimum(rough[-1]))
        return torch.stack([*rough, torch.zeros_like(none)], 1)

    def _norms(self) -> Tensor:
        norms: Tensor = (self.query.norm(dim=1) * self.key.norm(dim=1)).square().sum(1)
        return norms

    def channels(self, counts: Sequence[int]) -> list[Channels]:
        """Return factors of each frequency; those with equal numbers of channels are solved together."""
        heads = self.query.shape[2]
        found: dict[int, Channels] = {}
        for count in sorted(set(counts)):
            places = [j for j, own in enumerate(counts) if own == count]
            if count == heads:
                eye = torch.eye(heads, dtype=self.query.dtype, device=self.query.device)
                solved = self.query[places], eye.expand(len(places), -1, -1), self.key[places]
            else:
                solved = decomposed(self.query[places], self.key[places], count, self.sweeps, self.check)[:3]
            chi, mixing, kappa = solved
            for place, j in enumerate(places):
                found[j] = self.query_basis[j] @ chi[place], mixing[place], self.key_basis[j] @ kappa[place]
        return [found[j] for j in range(len(counts))]


class _Unrotated:
    """Queries and keys that heads share where nothing is rotated: one CP of all real channels."""

    def __init__(self, query: Tensor, key: Tensor, sweeps: int | None, check: Check | None) -> None:
        self.heads, self.check, self.sweeps = _real_heads(query, key), check, 0
        self.asked = sweeps
        self.full = len(query) * query.shape[-1]  # complex channels

    def errors(self) -> list[Tensor]:
        """Return the errors with 0 to all channels, interpolated between some widths and never rising."""
        norm = 2 * self.heads.squared_norm().item()  # as in `rotary_error`
        counts = sorted({round(self.full * step / ROUGH_WIDTHS) for step in range(1, ROUGH_WIDTHS)} - {0, self.full})
        known = {0: norm, self.full: 0.0}
        for count in counts:
            known[count] = self.heads.relative_error(self._fitted(count, ROUGH_SWEEPS)) ** 2 * norm
        places = sorted(known)
        errors = np.interp(range(self.full + 1), places, [known[place] for place in places])
        return [torch.from_numpy(errors).cummin(0).values]

    def _fitted(self, count: int, sweeps: int | None) -> Factors:
        solution = als(self.heads, 2 * count, SolverOptions(sweeps=sweeps, progress=self._progress))
        self.sweeps = len(solution.errors)
        return solution.factors

    def _own(self) -> Channels:
        """Return the heads' own channels, which are exact."""
        half, heads = self.heads.query.shape[2] // 2, self.heads.heads
        chi, kappa = (
            torch.complex(side[..., :half], side[..., half:]).transpose(0, 1).flatten(1)
            for side in (self.heads.query, self.heads.key)
        )
        owner = torch.eye(heads, dtype=torch.float64, device=chi.device).repeat_interleave(half, 1)
        return chi, torch.complex(owner, owner), kappa

    def _progress(self, _: int, __: float) -> None:
        if self.check is not None:
            self.check()

    def channels(self, counts: Sequence[int]) -> list[Channels]:
        """Return as many complex channels, each two real ones."""
        (count,) = counts
        if count == self.full:
            return [self._own()]
        if count == 0:
            empty = [part.new_zeros(len(part), 0) for part in (self.heads.flat_query, self.heads.flat_key)]
            mixing = empty[0].new_zeros(self.heads.heads, 0)
            sides = [empty[0], mixing, empty[1]]
        else:
            factors = self._fitted(count, self.asked)
            sides = [factors.query, factors.mixing, factors.key]
        chi, mixing, kappa = (torch.complex(side[:, :count], side[:, count:]) for side in sides)
        return [(chi, mixing, kappa)]


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
    if count == 0:
        empty = query[:, :, :0], query.mT[:, :, :0], key[:, :, :0]
        return *empty, (query.norm(dim=1) * key.norm(dim=1)).square().sum(1)
    sizes = (query.norm(dim=1) * key.norm(dim=1)).square()  # (J, H)
    total = sizes.sum(1).clamp_min(torch.finfo(torch.float64).tiny)
    unit = total[:, None, None] ** 0.25
    query, key = query / unit, key / unit
    strongest = sizes.argsort(1, descending=True)[:, None, :count]
    starts = [
        [each.gather(2, strongest.expand(-1, each.shape[1], -1)) for each in (query, key)],
        [_filled(torch.linalg.svd(each)[0][:, :, :count], count) for each in (query, key)],
    ]
    found = [_swept(query, key, chi, kappa, sweeps, check) for chi, kappa in starts]
    better = found[1][3] < found[0][3]
    chi, mixing, kappa = (
        torch.where(better[:, None, None], two, one) for one, two in zip(found[0][:3], found[1][:3], strict=True)
    )
    error = torch.where(better, found[1][3], found[0][3]) * total
    return chi * unit, mixing, kappa * unit, error


def _filled(columns: Tensor, count: int) -> Tensor:
    return torch.nn.functional.pad(columns, (0, count - columns.shape[2]))


def _swept(
    query: Tensor, key: Tensor, chi: Tensor, kappa: Tensor, sweeps: int, check: Check | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the sweeps from one start; the slices of each problem have norm 1 in all."""
    for sweep in range(sweeps):
        if check is not None:
            check()
        ridge = max(RIDGE * (1 - sweep / (0.8 * sweeps)), 0.0) + SHIFT
        mixing = _mixed(query, key, chi, kappa, ridge)
        chi = _side(query, key, kappa, mixing, ridge)
        mixing = _mixed(query, key, chi, kappa, ridge)
        kappa = _side(key, query, chi, mixing.conj(), ridge)
        lengths = [each.norm(dim=1, keepdim=True).clamp_min(1e-150) for each in (chi, kappa)]
        common = (lengths[0] * lengths[1]).sqrt()
        chi, kappa = chi * (common / lengths[0]), kappa * (common / lengths[1])
    mixing = _mixed(query, key, chi, kappa, SHIFT)
    right = (chi.mH @ query) * (kappa.mH @ key).conj()  # (J, n, H)
    gram = (chi.mH @ chi) * (kappa.mH @ kappa).conj()
    inner = (mixing.conj() * right.mT).sum((1, 2)).real
    squared = ((mixing @ gram.mT) * mixing.conj()).sum((1, 2)).real
    return chi, mixing, kappa, (1 - 2 * inner + squared).clamp_min(0)


def _mixed(query: Tensor, key: Tensor, chi: Tensor, kappa: Tensor, ridge: float) -> Tensor:
    """Least-squares mixing (J, H, n)."""
    right = (chi.mH @ query) * (kappa.mH @ key).conj()  # (J, n, H)
    gram = (chi.mH @ chi) * (kappa.mH @ kappa).conj()
    mixing: Tensor = torch.linalg.solve(_shifted(gram, ridge), right).mT
    return mixing


def _side(query: Tensor, key: Tensor, kappa: Tensor, mixing: Tensor, ridge: float) -> Tensor:
    """Least-squares χ (J, r, n), or κ where the sides are exchanged and the mixing is conjugate."""
    right = query @ ((key.mH @ kappa) * mixing.conj())  # (J, r, n)
    gram = (kappa.mH @ kappa) * (mixing.mT @ mixing.conj())
    side: Tensor = torch.linalg.solve(_shifted(gram, ridge).mT, right.mT).mT
    return side


def _shifted(gram: Tensor, ridge: float) -> Tensor:
    size = gram.diagonal(dim1=1, dim2=2).real.mean(1).clamp_min(1e-150)
    return gram + ridge * torch.diag_embed(size[:, None].expand(gram.shape[:2])).to(gram.dtype)
