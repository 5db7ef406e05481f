"""Shared rotary keys: the error by explicit rotations, exactness, the best keys there are, the allocation."""

import itertools

import pytest
import torch

from collab_compress import Solver
from collab_compress.factorization import Moments, RotaryFactors, factorize_rotary, rotary
from collab_compress.factorization.rotary import allocate_channels, rotary_error


def heads(count, width, frequencies, seed=0, common=2):
    """Return related heads, complex (H, D, J), whose frequencies differ in strength."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.complex128)

    shared = torch.einsum("hp,pdj->hdj", draw(count, common), draw(common, width, frequencies))
    return (shared + 0.4 * draw(count, width, frequencies)) * torch.linspace(2, 0.3, frequencies)


def slow_error(query, key, factors, angles, distances):
    """Relative error of all heads' score matrices in real numbers, each channel pair turned by a 2×2 matrix.

    The mean over distances of ‖Σ_j A_j R(θ_j n) B_jᵀ − Σ_c …‖², with A_j and B_j (D, 2).
    """
    group = len(query) // len(key)

    def pair(column):
        return torch.stack([column.real, column.imag], 1)

    def turned(angle):
        cos, sin = torch.cos(angle), torch.sin(angle)
        return torch.stack([torch.stack([cos, sin]), torch.stack([-sin, cos])])

    lost = total = 0.0
    for distance in distances:
        for head in range(len(query)):
            exact = approximate = torch.zeros(query.shape[1], key.shape[1], dtype=torch.float64)
            for j, angle in enumerate(angles):
                turn = turned(angle * distance)
                exact = exact + pair(query[head, :, j]) @ turn @ pair(key[head // group, :, j]).T
            for index, j in enumerate(factors.frequencies):
                mixed = query[head, :, j] * factors.mixing[head // group, index]
                approximate = approximate + pair(mixed) @ turned(angles[j] * distance) @ pair(factors.key[:, index]).T
            lost, total = lost + float((exact - approximate).square().sum()), total + float(exact.square().sum())
    return (lost / total) ** 0.5


@pytest.mark.parametrize("groups", [4, 2])
def test_the_error_is_that_of_explicit_rotations_averaged_over_distances(groups):
    """Angles are such that frequencies do not interfere: whole turns over all distances."""
    query, key = heads(4, 7, 3), heads(groups, 6, 3, seed=1)
    distances = torch.arange(8, dtype=torch.float64)
    angles = 2 * torch.pi * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) / 8
    result = factorize_rotary(query, key, 4)
    expected = slow_error(query, key, result.factors, angles, distances)
    assert result.weight_error == pytest.approx(expected, rel=1e-6)
    assert rotary_error(query, key, result.factors) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_all_channels_are_exact(groups):
    query, key = heads(4, 9, 3), heads(groups, 9, 3, seed=1)
    result = factorize_rotary(query, key, 3 * groups)
    assert result.weight_error == 0
    assert rotary_error(query, key, result.factors) < 1e-7


@pytest.mark.parametrize("groups", [4, 2])
def test_more_channels_are_better_divided_among_frequencies(groups, monkeypatch):
    query, key = heads(4, 9, 4), heads(groups, 9, 4, seed=1)
    errors = [factorize_rotary(query, key, count).weight_error for count in range(1, 4 * groups)]
    assert all(after < before + 1e-6 for before, after in itertools.pairwise(errors))
    monkeypatch.setattr(rotary, "allocate_channels", lambda errors, channels: [1] * channels)
    equal = factorize_rotary(query, key, 4)
    assert sorted(equal.factors.frequencies) == [0, 1, 2, 3]
    assert errors[3] < equal.weight_error


@pytest.mark.parametrize("groups", [4, 2])
def test_they_are_the_best_keys_there_are(groups, monkeypatch):
    query, key = heads(4, 9, 2), heads(groups, 9, 2, seed=1)
    monkeypatch.setattr(rotary, "allocate_channels", lambda errors, channels: [1] * channels)
    solution = factorize_rotary(query, key, 2)
    weights = query.norm(dim=1).square().view(groups, -1, 2).sum(1).sqrt()  # (G, J)
    weighted = [(key[:, :, j] * weights[:, j, None]).mT for j in range(2)]
    lost = sum(torch.linalg.svdvals(keys)[1:].square().sum().item() for keys in weighted)
    total = sum(keys.norm().item() ** 2 for keys in weighted)
    assert solution.weight_error == pytest.approx((lost / total) ** 0.5, rel=1e-9)
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        other = solution.factors.key + 0.1 * torch.randn(9, 2, generator=generator, dtype=torch.complex128)
        rows = [torch.linalg.lstsq(other[:, j, None], key[:, :, j].mT).solution[0].conj() for j in range(2)]
        assert rotary_error(query, key, RotaryFactors(torch.stack(rows, 1), other, (0, 1))) > solution.weight_error


def test_allocation_is_the_best_of_all():
    generator = torch.Generator().manual_seed(0)
    errors = torch.rand(4, 4, generator=generator).sort(1, descending=True).values
    for channels in range(13):
        counts = allocate_channels(errors, channels)
        assert sum(counts) == channels
        best = min(
            sum(errors[j, count].item() for j, count in enumerate(allocation))
            for allocation in itertools.product(range(4), repeat=4)
            if sum(allocation) == channels
        )
        assert sum(errors[j, count].item() for j, count in enumerate(counts)) == pytest.approx(best)


@pytest.mark.parametrize("groups", [4, 2])
def test_moments_weigh_what_inputs_show(groups):
    """On inputs of few directions the weighted solution has the lower error; biases are the last row."""
    generator = torch.Generator().manual_seed(3)
    query, key = heads(4, 9, 3), heads(groups, 9, 3, seed=1)
    x = torch.randn(500, 8, generator=generator, dtype=torch.float64) * torch.linspace(3, 0.05, 8) + 1
    moments = Moments.of(x)
    weighted = factorize_rotary(query, key, 4, query_moments=moments, key_moments=moments)
    plain = factorize_rotary(query, key, 4)
    extended = torch.cat([x, torch.ones(500, 1, dtype=torch.float64)], 1).to(torch.complex128)
    root = torch.linalg.cholesky(extended.mH @ extended / 500).mH
    errors = []
    for factors in (weighted.factors, plain.factors):
        weighted_factors = RotaryFactors(factors.mixing, root @ factors.key, factors.frequencies)
        errors.append(rotary_error(root @ query, root @ key, weighted_factors))
    assert weighted.data_error == pytest.approx(errors[0], rel=0.05)
    assert errors[0] < errors[1] + 1e-12
    assert groups == 2 or errors[0] < 0.99 * errors[1]


def test_keys_of_unrotated_channels_are_centred():
    """The softmax ignores scores that are constant over keys, so they get no channels."""
    query, key = heads(2, 5, 2), heads(2, 5, 2, seed=1)
    inputs = torch.randn(400, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    far = Moments.of(inputs + 50)
    solution = factorize_rotary(query, key, 2, query_moments=Moments.of(inputs), key_moments=far, rotated=1)
    assert solution.factors.frequencies == (0, 0)  # the rotated channel is far stronger


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 0}, "1 to 6 channels"),
        ({"channels": 7}, "1 to 6 channels"),
        ({"key": heads(3, 5, 3)}, "expected as many frequencies"),
        ({"key": heads(2, 5, 2)}, "expected as many frequencies"),
        ({"query": torch.full((4, 5, 3), torch.nan, dtype=torch.complex128)}, "not finite"),
        ({"query_moments": Moments.of(torch.randn(9, 3))}, "are 3 wide; expected 5"),
    ],
)
def test_bad_input_is_refused(change, message):
    arguments = {"query": heads(4, 5, 3), "key": heads(2, 5, 3), "channels": 2, **change}
    with pytest.raises(ValueError, match=message):
        factorize_rotary(**arguments)


@pytest.mark.parametrize("rotated", [3, 1])
@pytest.mark.parametrize("groups", [4, 2])
def test_head_weights_weigh_the_errors_of_heads(groups, rotated):
    query, key = heads(4, 6, 3), heads(groups, 5, 3, seed=1)
    weights = torch.tensor([0.1, 1.0, 3.0, 0.5])
    result = factorize_rotary(query, key, 5, rotated=rotated, head_weights=weights).factors
    plain = factorize_rotary(query, key, 5, rotated=rotated).factors
    scaled = weights[:, None, None] * query
    assert rotary_error(scaled, key, result) < rotary_error(scaled, key, plain)


def test_a_key_bias_needs_no_damping_where_all_frequencies_are_rotated():
    query, key = heads(2, 5, 3), heads(2, 5, 3, seed=1)
    inputs = torch.randn(40, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moments = Moments(inputs.mean(0), inputs.T @ inputs / 40, 40)
    options = {"query_moments": moments, "key_moments": moments, "solver": Solver(damping=0)}
    found = factorize_rotary(query, key, 4, **options)
    assert 0 < found.data_error < 1
    with pytest.raises(ValueError, match="the covariance of the key inputs is singular"):
        factorize_rotary(query, key, 4, **options, rotated=2)
