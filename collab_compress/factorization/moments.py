"""First and second moments of a module's inputs: what calibration gathers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

WITHOUT_FLOAT64 = ("mps",)


@dataclass(frozen=True)
class Moments:
    r"""Mean and uncentred second moment of the vectors x that enter a projection.

    Args:
        mean: $E[x]$, (D,).
        second: $E[x x^\top]$, (D, D), not centred.
        count: number of vectors behind the two, the weight when pooling.

    Raises:
        ValueError: the shapes do not fit, the count is not positive, or a value is not finite.
    """

    mean: Tensor
    second: Tensor
    count: float

    def __post_init__(self) -> None:
        width = self.mean.shape[-1] if self.mean.ndim else 0
        if self.mean.ndim != 1 or tuple(self.second.shape) != (width, width):
            raise ValueError(
                f"moments do not fit together: got mean {tuple(self.mean.shape)} and "
                f"second {tuple(self.second.shape)}; expected (D,) and (D, D)"
            )
        if not self.count > 0:
            raise ValueError(f"moments need at least one vector: got count {self.count}, expected > 0")
        if not bool(torch.isfinite(self.mean).all() and torch.isfinite(self.second).all()):
            raise ValueError("moments are not finite: got nan or inf; check the calibration inputs")

    @classmethod
    def of(cls, inputs: Tensor) -> Moments:
        """Return the moments of sampled vectors in float64, on their device or, where it has no float64, on the CPU.

        Args:
            inputs: (..., D), every leading position one vector.
        """
        rows = inputs.reshape(-1, inputs.shape[-1]).to(float64_device(inputs.device)).double()
        return cls(rows.mean(0), rows.mT @ rows / len(rows), float(len(rows)))

    @classmethod
    def pool(cls, moments: Iterable[Moments]) -> Moments:
        """Return the moments of several samples taken together, each weighted by its count.

        Args:
            moments: at least one, all of the same width D.

        Raises:
            ValueError: none given, or their widths differ.
        """
        parts = list(moments)
        widths = sorted({part.width for part in parts})
        if len(widths) != 1:
            raise ValueError(f"cannot pool moments: got widths {widths}, expected one common width")
        total = sum(part.count for part in parts)
        mean = torch.stack([part.mean * (part.count / total) for part in parts]).sum(0)
        second = torch.stack([part.second * (part.count / total) for part in parts]).sum(0)
        return cls(mean, second, total)

    @property
    def width(self) -> int:
        """Input width D."""
        return self.mean.shape[0]

    def covariance(self) -> Tensor:
        r"""Return $E[x x^\top] - \mu \mu^\top$, (D, D), symmetrised against rounding."""
        centred = self.second - torch.outer(self.mean, self.mean)
        return (centred + centred.mT) / 2

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Moments:
        """Return the moments on another device or in another dtype; None leaves either as it is."""
        return Moments(
            self.mean.to(device=device, dtype=dtype), self.second.to(device=device, dtype=dtype), self.count
        )


def float64_device(device: torch.device) -> torch.device:
    """Return the device itself, or the CPU where it computes nothing in float64 (Apple's MPS)."""
    return device if has_float64(device) else torch.device("cpu")


def has_float64(device: torch.device) -> bool:
    """Say whether a device computes in float64."""
    return device.type not in WITHOUT_FLOAT64
