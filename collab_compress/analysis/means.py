"""Means over the tokens of a stream, by module."""

from collections.abc import Callable

import torch
from torch import Tensor

from collab_compress.analysis.stream import Shown, Use, by_name, real_vectors
from collab_compress.errors import HeadError
from collab_compress.heads import Part


class Means:
    """Averages a measure of the heads of each module over real positions; an `Observer`.

    Args:
        part: what is measured.
        measure: from vectors (N, H, w) in float64, sums over positions of one or more matrices (H, H).
    """

    def __init__(self, part: Part, measure: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        self.part, self._measure = part, measure
        self._sums: dict[Use, list[Tensor]] = {}
        self._counts: dict[Use, int] = {}

    def take(self, shown: Shown) -> None:
        """Add one more batch."""
        for use, reading in shown:
            vectors = real_vectors(reading, self.part)  # (N, H, w)
            new = [each.cpu() for each in self._measure(vectors.double())]
            old = self._sums.get(use, [torch.zeros_like(each) for each in new])
            self._sums[use] = [before + each for before, each in zip(old, new, strict=True)]
            self._counts[use] = self._counts.get(use, 0) + len(vectors)

    def means(self) -> dict[str, tuple[Tensor, ...]]:
        """Divide by the number of positions.

        Raises:
            HeadError: a module saw no real token, or the sums are not finite.
        """
        for use, totals in self._sums.items():
            if not self._counts[use]:
                raise HeadError(f"{use.name} saw no token that is no padding; pass batches with real tokens")
            if not all(bool(total.isfinite().all()) for total in totals):
                raise HeadError(
                    f"{use.name}: what its heads compute is not finite; look for NaN or infinity in weights"
                )
        return by_name({use: tuple(t / self._counts[use] for t in totals) for use, totals in self._sums.items()})
