r"""Least squares for a linear layer, from moments of its inputs and of what is missing from its outputs.

A layer adds $W a + b$ to a sum that should be larger by $e$. Its change

$$\min_{\Delta, \delta}\ \mathbb{E}\,\|e - \Delta a - \delta\|^2 + \lambda\,\|\Delta\|^2$$

has a closed form in the covariances of $a$ and $e$: $\Delta^\top = (C_{aa} + \lambda I)^{-1} C_{ae}$ and
$\delta = \bar e - \Delta \bar a$; without a bias second moments take the place of covariances. The ridge pulls
towards the layer as it is.
"""

from functools import partial

import torch
from torch import Tensor

from collab_compress.factorization.moments import float64_device


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
        self._products += (left.mT @ left).to(self.place)
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
        second = self._products / self.count - torch.outer(left, left)
        crossed = self._crossed / self.count - torch.outer(left, residual)
        if not centred:
            mean, _ = self.means()
            second, crossed = second.addr_(mean, mean), crossed.addr_(mean, residual)
        return second, crossed

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


def fit(
    moments: ResidualMoments,
    damping: float,
    bias: bool,
    weight: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return Δᵀ (N, D) and δ (D,), or None for δ where there is no bias.

    Args:
        moments: of the layer's inputs and of what is missing.
        damping: λ, as a share of the mean of the inputs' variances.
        bias: whether the layer has one.
        weight: Wᵀ of the layer, (N, D), in float64; needed with `kept`.
        kept: inputs that the layer goes on reading, in ascending order; Δ takes the weights of all others away, and
            makes up for them. All if not given.

    Raises:
        ValueError: the moments are singular, or not finite.
    """
    second, crossed = moments.moments(centred=bias)
    removed = None
    ridge = damping * second.diagonal().mean()
    if weight is not None and kept is not None:
        removed = weight.clone()
        removed[kept] = 0
        crossed = (crossed + second @ removed)[kept]
        second = second[kept][:, kept]
    second.diagonal().add_(ridge)
    root, failed = torch.linalg.cholesky_ex(second)
    if int(failed) or not bool(torch.isfinite(crossed).all()):
        raise ValueError("the inputs' moments are singular; pass a larger damping, or more data")
    change = torch.cholesky_solve(crossed, root)
    if removed is not None and kept is not None:
        change = removed.neg_().index_copy_(0, kept, change)
    mean, residual = moments.means()
    return change, residual - mean @ change if bias else None
