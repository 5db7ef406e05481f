r"""Least squares for a linear layer, from moments of its inputs and of what is missing from its outputs.

A layer adds $W a + b$ to a sum that should be larger by $e$. Its change

$$\min_{\Delta, \delta}\ \mathbb{E}\,\|e - \Delta a - \delta\|^2 + \lambda\,\|\Delta\|^2$$

has a closed form in the covariances of $a$ and $e$: $\Delta^\top = (C_{aa} + \lambda I)^{-1} C_{ae}$ and
$\delta = \bar e - \Delta \bar a$; without a bias second moments take the place of covariances. The ridge pulls
towards the layer as it is.
"""

from functools import partial
from typing import Self

import torch
from torch import Tensor

from collab_compress.factorization.moments import float64_device

STRIP = 1024  # columns of a symmetric product that are computed together, from the diagonal on


class ResidualMoments:
    """Sums over vectors a (n, N) and residuals e (n, D): of the vectors, and of their products.

    Products are made in float32, or in float64 where the vectors are, of what is left of them less a vector near
    their mean, so that a large mean costs no digits; sums are in float64.
    """

    def __init__(self) -> None:
        self.count = 0
        self.squared = 0.0
        self.place = torch.device("cpu")
        self._near: Tensor | None = None

    def add(self, inputs: Tensor, residuals: Tensor) -> None:
        """Add vectors a (n, N) and residuals e (n, D)."""
        if not len(inputs):
            return
        wide = torch.float64 if inputs.dtype == torch.float64 else torch.float32
        inputs, residuals = inputs.to(wide), residuals.to(wide)
        if self._near is None:
            self._start(inputs, residuals)
        assert self._near is not None
        left = inputs - self._near
        self._inputs += left.to(self.place).sum(0, dtype=torch.float64)
        self._residuals += residuals.to(self.place).sum(0, dtype=torch.float64)
        for start in range(0, left.shape[1], STRIP):
            strip = left[:, start : start + STRIP].mT @ left[:, start:]
            self._products[start : start + STRIP, start:] += strip.to(self.place, torch.float64)
        self._crossed += (left.mT @ residuals).to(self.place)
        self.squared += float(residuals.square().sum())
        self.count += len(inputs)

    def _start(self, inputs: Tensor, residuals: Tensor) -> None:
        width, outputs = inputs.shape[1], residuals.shape[1]
        self._near = inputs.mean(0)
        self.place = float64_device(inputs.device)
        zeros = partial(torch.zeros, dtype=torch.float64, device=self.place)
        self._inputs = zeros(width)
        self._residuals = zeros(outputs)
        self._products = zeros(width, width)
        self._crossed = zeros(width, outputs)

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the means of a (N,) and e (D,), in float64."""
        assert self._near is not None
        return self._near.to(self.place).double() + self._inputs / self.count, self._residuals / self.count

    def moments(self, centred: bool) -> tuple[Tensor, Tensor]:
        """Return E[a aᵀ] (N, N) and E[a eᵀ] (N, D), or covariances if `centred`; in float64."""
        assert self._near is not None
        left, residual = self._inputs / self.count, self._residuals / self.count
        second = self._symmetric_products() / self.count - torch.outer(left, left)
        crossed = self._crossed / self.count - torch.outer(left, residual)
        if not centred:
            mean, _ = self.means()
            second, crossed = second.addr_(mean, mean), crossed.addr_(mean, residual)
        return second, crossed

    def _symmetric_products(self) -> Tensor:
        upper = self._products.triu()
        return upper + upper.triu(1).mT

    def narrowed(self, weight: Tensor, kept: Tensor) -> Self:
        """Return the moments of the layer without some inputs: what those added is missing too.

        Args:
            weight: Wᵀ of the layer, (N, D), in float64.
            kept: inputs that it goes on reading, in ascending order, (n,).
        """
        assert self._near is not None
        reads = torch.zeros(len(weight), dtype=torch.bool, device=kept.device).index_fill(0, kept, True)
        lost = weight[~reads]
        products = self._symmetric_products()
        # What the lost inputs add is mean + vary; the sum over vectors of (a − near)·vary is `added`.
        mean = self._near.to(self.place).double()[~reads] @ lost
        added = products[:, ~reads] @ lost
        vary = self._inputs[~reads] @ lost
        narrowed = type(self)()
        narrowed.count, narrowed.place, narrowed._near = self.count, self.place, self._near[kept]
        narrowed._inputs = self._inputs[kept]
        narrowed._products = products[kept][:, kept]
        narrowed._residuals = self._residuals + vary + self.count * mean
        narrowed._crossed = (self._crossed + added + torch.outer(self._inputs, mean))[kept]
        between = (self._crossed[~reads] * lost).sum() + self._residuals @ mean
        squared = (added[~reads] * lost).sum() + 2 * mean @ vary + self.count * mean @ mean
        narrowed.squared = self.squared + float(2 * between + squared)
        return narrowed

    def squared_error(self, change: Tensor, shift: Tensor | None) -> float:
        """Return E‖e − Δa − δ‖².

        Args:
            change: Δᵀ, (N, D).
            shift: δ, (D,), or None for 0.
        """
        second, crossed = self.moments(centred=False)
        mean, residual = self.means()
        error = self.squared / self.count - 2 * (change * crossed).sum() + (change * (second @ change)).sum()
        if shift is not None:
            error = error + shift @ shift - 2 * shift @ (residual - mean @ change)
        return max(float(error), 0.0)


def fit(moments: ResidualMoments, damping: float, bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return Δᵀ (N, D) and δ (D,), or None for δ where there is no bias.

    Args:
        moments: of the layer's inputs and of what is missing.
        damping: λ, as a share of the mean of the inputs' variances.
        bias: whether the layer has one.

    Raises:
        ValueError: the moments are singular, or not finite.
    """
    second, crossed = moments.moments(centred=bias)
    second.diagonal().add_(damping * second.diagonal().mean())
    root, failed = torch.linalg.cholesky_ex(second)
    if int(failed) or not bool(torch.isfinite(crossed).all()):
        raise ValueError("the inputs' moments are singular; pass a larger damping, or more data")
    change = torch.cholesky_solve(crossed, root)
    mean, residual = moments.means()
    return change, residual - mean @ change if bias else None
