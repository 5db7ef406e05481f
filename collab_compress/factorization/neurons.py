r"""Choose the neurons of a feed-forward block to keep: backward elimination, as optimal brain surgeon does it.

With $C$ the moments of the activations and $W$ the second layer's weights fitted to them, leaving neuron j out and
fitting the others anew raises the squared error by $\|w_j\|^2 / [C^{-1}]_{jj}$ ("Optimal Brain Surgeon", Hassibi and
Stork, 1993). Blocks of neurons that cost least go one after the other; $C^{-1}$ and $W$ follow by Schur complements.
"""

import torch
from torch import Tensor

from collab_compress.factorization.least_squares import ResidualMoments

BLOCK = 64  # neurons that leave between two rankings


def choice_moments(
    moments: ResidualMoments, weight: Tensor, gain: Tensor, damping: float, bias: bool
) -> tuple[Tensor, Tensor]:
    """Return what neurons are chosen by: E[a aᵀ], damped, (N, N), and E[a tᵀ] with the outputs wanted, (N, D).

    Args:
        moments: of the activations and of what is missing from the outputs.
        weight: Wᵀ of the second layer, (N, D), in float64.
        gain: what outputs are multiplied by before they are added to the residual stream, (D,).
        damping: share of the activations' mean variance that is added to each variance.
        bias: whether the layer has one, which takes the means.
    """
    second, crossed = moments.moments(centred=bias)
    wanted = (crossed + second @ weight) * gain.to(crossed)
    second.diagonal().add_(damping * second.diagonal().mean())
    return second, wanted


def choose_neurons(second: Tensor, crossed: Tensor, count: int, block: int = BLOCK) -> Tensor:
    """Return the places of the neurons to keep, in ascending order, (count,).

    Args:
        second: moments E[a aᵀ] of all N activations, damped, (N, N).
        crossed: E[a tᵀ] with the outputs wanted, (N, D).
        count: how many to keep, up to N.
        block: how many may leave between two rankings.

    Raises:
        ValueError: the moments are singular.
    """
    order = elimination_order(second, crossed, count, block)
    return order[len(order) - count :].sort().values


def elimination_order(second: Tensor, crossed: Tensor, least: int = 0, block: int = BLOCK) -> Tensor:
    """Return the places of all neurons in the order in which they leave, (N,); the last k are the best k to keep.

    Args:
        second: moments E[a aᵀ] of all N activations, damped, (N, N).
        crossed: E[a tᵀ] with the outputs wanted, (N, D).
        least: how many stay in any case; these are the last, in ascending order.
        block: how many may leave between two rankings.

    Raises:
        ValueError: the moments are singular.
    """
    root, failed = torch.linalg.cholesky_ex(second)
    if int(failed):
        raise ValueError("the activations' moments are singular; pass a larger damping, or more data")
    inverse = torch.cholesky_inverse(root)
    weight = inverse @ crossed
    stays = torch.ones(len(second), dtype=torch.bool, device=second.device)
    order = []
    for count in range(len(second), least, -block):
        cost = (weight.square().sum(1) / inverse.diagonal()).where(stays, torch.inf)
        leaving = cost.argsort(stable=True)[: min(block, count - least)]
        rows = inverse[leaving]
        factor = torch.linalg.solve(rows[:, leaving], rows).mT
        weight.addmm_(factor, weight[leaving], alpha=-1)
        inverse.addmm_(factor, rows, alpha=-1)  # rows and columns of those that leave become 0
        stays[leaving] = False
        order.append(leaving)
    return torch.cat([*order, stays.nonzero()[:, 0]])
