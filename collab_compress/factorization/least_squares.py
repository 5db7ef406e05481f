r"""Least squares for a linear layer, and the choice of the inputs that it keeps, from moments.

A layer adds $W a + b$ to a sum that should be larger by $e$. Its change

$$\min_{\Delta, \delta}\ \mathbb{E}\,\|e - \Delta a - \delta\|^2 + \lambda\,\|\Delta\|^2$$

has a closed form in the covariances of $a$ and $e$: $\Delta^\top = (C_{aa} + \lambda I)^{-1} C_{ae}$ and
$\delta = \bar e - \Delta \bar a$; without a bias second moments take the place of covariances. The ridge pulls
towards the layer as it is.

The neurons of a feed-forward block are the inputs of its second layer. With weights fitted to them, leaving neuron j
out and refitting the others raises the squared error by $\|w_j\|^2 / [C_{aa}^{-1}]_{jj}$ ("Optimal Brain Surgeon",
Hassibi and Stork, 1993). Blocks of neurons that cost least are eliminated one after the other; $C_{aa}^{-1}$ and $W$
follow by Schur complements.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from collab_compress.devices import float64_device
from collab_compress.factorization.moments import Moments, cholesky, damped_

STRIP_COLUMNS = 512  # columns of a symmetric product that are computed together, from the diagonal on
BLOCK_NEURONS = 64  # neurons that are eliminated between two rankings


class ResidualMoments:
    """Weighted sums over vectors a (n, N) and residuals e (n, D): of these, and of their products.

    Vectors are taken relative to one near their mean, so that a large mean costs no digits. Products are made in
    float32, or in float64 for such vectors; sums are in float64.
    """

    def __init__(self) -> None:
        self.count = 0
        self.weight = 0.0  # the sum of all weights
        self.squared = 0.0
        self.device = torch.device("cpu")
        empty = torch.empty(0, device=self.device)  # until the first vectors come
        self._near = self._inputs = self._residuals = self._products = self._crossed = empty

    def add(self, inputs: Tensor, residuals: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Add vectors a (n, N), residuals e (n, D) if there are any, and their weights (n,), by default 1."""
        if not len(inputs):
            return
        with torch.autocast(inputs.device.type, enabled=False):
            self._add(inputs, residuals, weights)

    def _add(self, inputs: Tensor, residuals: Tensor | None, weights: Tensor | None) -> None:
        wide = torch.float64 if inputs.dtype == torch.float64 else torch.float32
        inputs = inputs.detach().to(wide)
        residuals = inputs[:, :0] if residuals is None else residuals.detach().to(wide)
        weights = inputs.new_ones(len(inputs)) if weights is None else weights.to(inputs)
        if not self.count:
            self._near = weights @ inputs / weights.sum()
            self.device = float64_device(inputs.device)
            width, outputs = inputs.shape[1], residuals.shape[1]
            zeros = partial(torch.zeros, dtype=torch.float64, device=self.device)
            self._inputs, self._residuals = zeros(width), zeros(outputs)
            self._products, self._crossed = zeros(width, width), zeros(width, outputs)
        root = weights.sqrt()[:, None]
        exact_root = root.to(self.device, torch.float64)
        exact = residuals.to(exact_root) * exact_root
        centred, residuals = (inputs - self._near) * root, residuals * root
        self._inputs += (centred * root).to(self.device).sum(0, dtype=torch.float64)
        self._residuals += (exact * exact_root).sum(0)
        self.weight += float(exact_root.square().sum())
        self.squared += float(exact.square().sum())
        for start in range(0, centred.shape[1], STRIP_COLUMNS):
            strip = centred[:, start : start + STRIP_COLUMNS].mT @ centred[:, start:]
            self._products[start : start + STRIP_COLUMNS, start:] += strip.to(self.device, torch.float64)
        self._crossed += (centred.mT @ residuals).to(self.device)
        self.count += len(inputs)

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the means of a (N,) and e (D,), in float64."""
        return self._near.to(self.device).double() + self._inputs / self.weight, self._residuals / self.weight

    def input_moments(self) -> Moments:
        """Return the moments of the vectors alone."""
        return Moments(self.means()[0], self.moments(centred=False)[0], float(self.count))

    def moments(self, centred: bool) -> tuple[Tensor, Tensor]:
        """Return E[a aᵀ] (N, N) and E[a eᵀ] (N, D), or covariances if `centred`; in float64."""
        inputs, residuals = self._inputs / self.weight, self._residuals / self.weight
        second = (self._symmetric_products() / self.weight).sub_(torch.outer(inputs, inputs))
        crossed = self._crossed / self.weight - torch.outer(inputs, residuals)
        if not centred:
            mean, _ = self.means()
            second, crossed = second.addr_(mean, mean), crossed.addr_(mean, residuals)
        return second, crossed

    def _symmetric_products(self) -> Tensor:
        """Make the products symmetric, of which those below the diagonal are not all added up, and return them."""
        return self._products.triu_().add_(self._products.triu(1).mT)

    def mean_square(self) -> float:
        """Return E‖e‖²."""
        return self.squared / self.weight

    def squared_error(self, change: Tensor, shift: Tensor | None) -> float:
        """Return E‖e − Δa − δ‖² for Δᵀ (N, D) and δ (D,), or None for no bias."""
        second, crossed = self.moments(centred=False)
        mean, residual = self.means()
        error = self.mean_square() - 2 * (change * crossed).sum() + (change * (second @ change)).sum()
        if shift is not None:
            error = error + shift @ shift - 2 * shift @ (residual - mean @ change)
        return max(float(error), 0.0)


def fit(moments: ResidualMoments, damping: float, bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return Δᵀ (N, D) and δ (D,), or None for δ without a bias; λ is as `damped_` adds it."""
    second, crossed = moments.moments(centred=bias)
    message = "the inputs' moments are singular; pass a larger damping, or more data"
    if not bool(torch.isfinite(crossed).all()):
        raise ValueError(message)
    damped_(second, damping)
    change = torch.cholesky_solve(crossed, cholesky(second, message))
    mean, residual = moments.means()
    return change, residual - mean @ change if bias else None


def choice_moments(
    moments: ResidualMoments, weight: Tensor, gain: Tensor, damping: float, bias: bool
) -> tuple[Tensor, Tensor]:
    """Return damped moments E[a aᵀ] (N, N) of the activations, and E[a tᵀ] (N, D) with the outputs wanted.

    `weight` is Wᵀ of the second layer, (N, D), and `gain` (D,) scales its outputs before they are added up.
    """
    second, crossed = moments.moments(centred=bias)
    wanted = (crossed + second @ weight) * gain.to(crossed)
    return damped_(second, damping), wanted


def choose_neurons(second: Tensor, crossed: Tensor, count: int, block: int = BLOCK_NEURONS) -> Tensor:
    """Return the indices of the neurons to keep, in ascending order, (count,); as `eliminate`."""
    order = eliminate(second, crossed, count, block).order
    return order[len(order) - count :].sort().values


class Elimination(NamedTuple):
    """Neurons in the order of their elimination, and what is lost."""

    order: Tensor  # indices of all neurons, (N,); the last k are the best k to keep
    losses: (
        Tensor  # of the squared error with the last k neurons kept and refitted, (N+1,); NaN for fewer than `least`
    )


def eliminate(second: Tensor, crossed: Tensor, least: int = 0, block: int = BLOCK_NEURONS) -> Elimination:
    """Eliminate all but `least` neurons, in blocks, those first without which the squared error rises least.

    Takes damped moments E[a aᵀ] (N, N) of all activations, and E[a tᵀ] (N, D) with the outputs wanted. Losses are
    linear between two rankings.
    """
    root = cholesky(second, "the activations' moments are singular; pass a larger damping, or more data")
    inverse = torch.cholesky_inverse(root, out=root)
    weight = inverse @ crossed
    remaining = torch.ones(len(second), dtype=torch.bool, device=second.device)
    order, losses = [], second.new_full((len(second) + 1,), torch.nan)
    losses[-1] = 0.0
    for count in range(len(second), least, -block):
        cost = (weight.square().sum(1) / inverse.diagonal()).where(remaining, torch.inf)
        leaving = cost.argsort(stable=True)[: min(block, count - least)]
        rows = inverse[leaving]
        factor = torch.linalg.solve(rows[:, leaving], rows).mT
        lost = (weight[leaving] * torch.linalg.solve(rows[:, leaving], weight[leaving])).sum()
        steps = torch.arange(len(leaving), -1, -1, device=lost.device) / len(leaving)
        losses[count - len(leaving) : count + 1] = losses[count] + lost * steps
        weight.addmm_(factor, weight[leaving], alpha=-1)
        inverse.addmm_(factor, rows, alpha=-1)  # rows and columns of eliminated neurons become 0
        remaining[leaving] = False
        order.append(leaving)
    return Elimination(torch.cat([*order, remaining.nonzero()[:, 0]]), losses)
