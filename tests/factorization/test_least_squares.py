"""Least squares from moments, and the choice of neurons, against least squares on the vectors themselves."""

import pytest
import torch

from collab_compress.factorization.least_squares import ResidualMoments, choose_neurons, eliminate, fit


def vectors(count=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64) @ torch.randn(
        6, 6, generator=generator, dtype=torch.float64
    )
    residuals = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return inputs + 3, residuals - 1


def moments_of(inputs, residuals, parts=3):
    moments = ResidualMoments()
    for part in zip(inputs.tensor_split(parts), residuals.tensor_split(parts), strict=True):
        moments.add(*part)
    return moments


def slow_fit(inputs, residuals, damping, bias):
    """Solve the least squares with the ridge as further rows: √λ Δ = 0."""
    rows, width = inputs.shape
    centred = inputs - inputs.mean(0) if bias else inputs
    ridge = (damping * centred.square().mean()) ** 0.5
    stacked = torch.cat([centred / rows**0.5, ridge * torch.eye(width, dtype=torch.float64)])
    right = torch.cat(
        [(residuals - residuals.mean(0) * bias) / rows**0.5, torch.zeros(width, 4, dtype=torch.float64)]
    )
    change = torch.linalg.lstsq(stacked, right).solution
    return change, residuals.mean(0) - inputs.mean(0) @ change if bias else None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("damping", [0.0, 1e-3, 1.0])
def test_fit_is_that_of_the_vectors(bias, damping):
    inputs, residuals = vectors()
    change, shift = fit(moments_of(inputs, residuals), damping, bias)
    expected, expected_shift = slow_fit(inputs, residuals, damping, bias)
    torch.testing.assert_close(change, expected)
    assert (shift is None) == (expected_shift is None)
    if bias:
        torch.testing.assert_close(shift, expected_shift)


@pytest.mark.parametrize("bias", [True, False])
def test_error_is_that_of_the_vectors(bias):
    moments = moments_of(*vectors())
    change, shift = fit(moments, 0.1, bias)
    inputs, residuals = vectors(seed=1)
    remainder = residuals - inputs @ change - (shift if bias else 0)
    error = moments_of(inputs, residuals).squared_error(change, shift)
    assert error == pytest.approx(remainder.square().sum(1).mean().item())


def test_a_large_mean_costs_no_digits():
    inputs, residuals = vectors(200)
    expected, _ = fit(moments_of(inputs, residuals), 1e-3, bias=True)
    far = (inputs + 1e3).float(), residuals.float()
    torch.testing.assert_close(fit(moments_of(*far), 1e-3, bias=True)[0], expected, atol=1e-3, rtol=1e-3)


def test_too_few_vectors_without_damping_are_refused():
    with pytest.raises(ValueError, match="singular"):
        fit(moments_of(*vectors(3), parts=1), 0.0, bias=True)


def test_no_vectors_change_nothing():
    moments = moments_of(*vectors())
    before = moments.squared
    moments.add(torch.zeros(0, 6), torch.zeros(0, 4))
    assert (moments.count, moments.squared) == (50, before)


def problem(neurons=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(neurons, neurons, generator=generator, dtype=torch.float64)
    activations = torch.randn(80, neurons, generator=generator, dtype=torch.float64) @ mixing
    weight = torch.randn(neurons, 4, generator=generator, dtype=torch.float64)
    return activations, activations @ weight


def slow_choice(activations, targets, count):
    """Repeatedly leave out the neuron that costs least when the others are refitted by least squares."""
    kept = list(range(activations.shape[1]))
    while len(kept) > count:
        errors = []
        for index in kept:
            others = activations[:, [other for other in kept if other != index]]
            fitted = others @ torch.linalg.lstsq(others, targets).solution
            errors.append((targets - fitted).square().sum().item())
        kept.pop(errors.index(min(errors)))
    return kept


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block", [1, 2, 3, 64])
def test_the_order_ends_with_the_choice_of_every_count(block, seed):
    activations, targets = problem(seed=seed)
    second, crossed = activations.mT @ activations, activations.mT @ targets
    order, losses = eliminate(second, crossed, block=block)
    assert sorted(order.tolist()) == list(range(9))
    least = (targets - activations @ torch.linalg.lstsq(activations, targets).solution).square().sum()
    for count in [*range(9, 0, -block), 0]:  # the losses between are interpolated
        others = activations[:, order[9 - count :]]
        fitted = others @ torch.linalg.lstsq(others, targets).solution if count else torch.zeros_like(targets)
        torch.testing.assert_close(losses[count], (targets - fitted).square().sum() - least)
    for count in range(1, 10):
        kept = choose_neurons(second, crossed, count, block).tolist()
        assert sorted(order[9 - count :].tolist()) == kept
        if block == 1:
            assert kept == slow_choice(activations, targets, count)


def test_dead_activations_need_damping():
    with pytest.raises(ValueError, match="singular"):
        choose_neurons(torch.zeros(3, 3), torch.zeros(3, 2), 1)


@pytest.mark.parametrize("bias", [True, False])
def test_what_stays_makes_up_for_what_leaves(bias):
    activations, targets = problem()
    activations = activations + 2
    weight = torch.randn(9, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    moments = ResidualMoments()
    kept = [0, 2, 3, 7]
    moments.add(activations[:, kept], targets - activations[:, kept] @ weight[kept])
    change, shift = fit(moments, 0.0, bias)
    remaining = activations[:, kept]
    if bias:
        remaining = torch.cat([remaining, torch.ones(len(remaining), 1)], 1)
    expected = remaining @ torch.linalg.lstsq(remaining, targets).solution
    outputs = activations[:, kept] @ (weight[kept] + change) + (shift if bias else 0)
    torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_a_weight_counts_a_vector_several_times(bias):
    inputs, residuals = vectors()
    weights = torch.arange(len(inputs)) % 4
    moments = ResidualMoments()
    for part in zip(*(tensor.tensor_split(3) for tensor in (inputs, residuals, weights)), strict=True):
        moments.add(*part)
    repeated = moments_of(*(tensor.repeat_interleave(weights, 0) for tensor in (inputs, residuals)))
    torch.testing.assert_close(fit(moments, 0.1, bias), fit(repeated, 0.1, bias))
    torch.testing.assert_close(moments.means(), repeated.means())
    assert moments.count == len(inputs)
    assert moments.mean_square() == pytest.approx(repeated.mean_square())
    change, shift = fit(repeated, 0.1, bias)
    assert moments.squared_error(change, shift) == pytest.approx(repeated.squared_error(change, shift))
