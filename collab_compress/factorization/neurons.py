r"""Choose the neurons of a feed-forward block to keep: backward elimination, as optimal brain surgeon does it.

With $C$ the moments of the activations and $W$ the second layer's weights fitted to them, leaving neuron j out and
fitting the others anew raises the squared error by $\|w_j\|^2 / [C^{-1}]_{jj}$ ("Optimal Brain Surgeon", Hassibi and
Stork, 1993). Blocks of neurons that cost least go one after the other; $C^{-1}$ and $W$ follow by Schur complements.
"""

import torch
from torch import Tensor

BLOCK = 64  # neurons that leave between two rankings


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
    root, failed = torch.linalg.cholesky_ex(second)
    if int(failed):
        raise ValueError("the activations' moments are singular; pass a larger damping, or more data")
    inverse = torch.cholesky_inverse(root)
    weight = inverse @ crossed
    kept = torch.arange(len(second), device=second.device)
    while len(kept) > count:
        cost = weight.square().sum(1) / inverse.diagonal()
        order = cost.argsort(stable=True)
        leaving, staying = order.split([min(block, len(kept) - count), max(len(kept) - block, count)])
        staying = staying.sort().values
        factor = torch.linalg.solve(inverse[leaving][:, leaving], inverse[leaving][:, staying]).mT
        weight = weight[staying] - factor @ weight[leaving]
        inverse = inverse[staying][:, staying] - factor @ inverse[leaving][:, staying]
        kept = kept[staying]
    return kept
