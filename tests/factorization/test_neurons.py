"""Which neurons stay, against leaving each out and fitting the others anew."""

import pytest
import torch

from collab_compress.factorization.least_squares import ResidualMoments, fit
from collab_compress.factorization.neurons import choose_neurons, elimination_order


def problem(neurons=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(neurons, neurons, generator=generator, dtype=torch.float64)
    activations = torch.randn(80, neurons, generator=generator, dtype=torch.float64) @ mixing
    weight = torch.randn(neurons, 4, generator=generator, dtype=torch.float64)
    return activations, activations @ weight


def slow_choice(activations, targets, count):
    """Leave out the neuron whose loss, all others fitted anew by least squares, costs least; again and again."""
    kept = list(range(activations.shape[1]))
    while len(kept) > count:
        errors = []
        for place in kept:
            others = activations[:, [other for other in kept if other != place]]
            fitted = others @ torch.linalg.lstsq(others, targets).solution
            errors.append((targets - fitted).square().sum().item())
        kept.pop(errors.index(min(errors)))
    return kept


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 4, 8, 9])
def test_one_after_the_other_as_by_fitting_anew(seed, count):
    activations, targets = problem(seed=seed)
    second, crossed = activations.mT @ activations, activations.mT @ targets
    assert choose_neurons(second, crossed, count, block=1).tolist() == slow_choice(activations, targets, count)


def test_blocks_leave_as_many():
    activations, targets = problem()
    count = 5
    for block in (2, 3, 64):
        kept = choose_neurons(activations.mT @ activations, activations.mT @ targets, count, block)
        assert len(kept) == count
        assert kept.tolist() == sorted(set(kept.tolist()))


@pytest.mark.parametrize("block", [1, 2, 3, 64])
def test_the_order_ends_with_the_choice_of_every_count(block):
    activations, targets = problem()
    second, crossed = activations.mT @ activations, activations.mT @ targets
    order = elimination_order(second, crossed, block=block)
    assert sorted(order.tolist()) == list(range(9))
    for count in range(1, 10):
        kept = choose_neurons(second, crossed, count, block).tolist()
        assert sorted(order[9 - count :].tolist()) == kept
        if block == 1:
            assert kept == slow_choice(activations, targets, count)


def test_a_neuron_that_others_replace_leaves():
    activations, _ = problem()
    activations[:, 3] = activations[:, 5] + 1e-4 * activations[:, 3]
    targets = activations.sum(1, keepdim=True)
    kept = choose_neurons(activations.mT @ activations, activations.mT @ targets, 8, block=1)
    assert len({3, 5} & set(kept.tolist())) == 1


def test_dead_activations_need_damping():
    with pytest.raises(ValueError, match="singular"):
        choose_neurons(torch.zeros(3, 3), torch.zeros(3, 2), 1)


@pytest.mark.parametrize("bias", [True, False])
def test_what_stays_makes_up_for_what_leaves(bias):
    activations, targets = problem()
    activations = activations + 2
    weight = torch.randn(9, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    moments = ResidualMoments()
    moments.add(activations, targets - activations @ weight)
    kept = torch.tensor([0, 2, 3, 7])
    change, shift = fit(moments.narrowed(weight, kept), 0.0, bias)
    left = activations[:, kept]
    if bias:
        left = torch.cat([left, torch.ones(len(left), 1)], 1)
    expected = left @ torch.linalg.lstsq(left, targets).solution
    found = activations[:, kept] @ (weight[kept] + change) + (shift if bias else 0)
    torch.testing.assert_close(found, expected)
