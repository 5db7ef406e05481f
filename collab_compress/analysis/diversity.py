"""How different the heads of a layer are: distances, discrepancy, and overlap of their attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis.stream import (
    Batches,
    Progress,
    Readings,
    observe,
    unpadded_vectors,
)
from collab_compress.errors import HeadError
from collab_compress.heads import Part

Measure = Literal["cosine", "difference", "l2"]


@dataclass(frozen=True)
class Discrepancy:
    """Distances between the heads of one layer, (H, H), means over query positions that are no padding.

    Args:
        cosine: cosine + 1, as "Multi-Head Rotation" section 5.3 words it: 2 for heads that point the same way, 0 for
            opposite ones. It grows as heads get more alike.
        l2: Euclidean distance.
    """

    cosine: Tensor
    l2: Tensor

    @property
    def difference(self) -> Tensor:
        """1 − cosine, which grows as heads move apart; what Fig. 6 of the paper calls cosine difference."""
        return 2 - self.cosine

    def norm(self, measure: Measure) -> float:
        """Return the L₁,₁ norm by `cosine`, `difference` or `l2`: the layer's discrepancy, diagonal included.

        Raises:
            HeadError: the measure is unknown.
        """
        if measure not in get_args(Measure):
            raise HeadError(f"unknown measure {measure!r}; expected one of {', '.join(get_args(Measure))}")
        matrix: Tensor = getattr(self, measure)
        return float(matrix.abs().sum())


def percent_growth(norm: float, baseline: float) -> float | None:
    """Return by how many percent a layer's discrepancy exceeds that of a baseline model; None where that is 0.

    Figures 6 and 7 of "Multi-Head Rotation".
    """
    return 100 * (norm / baseline - 1) if baseline else None


class _Means:
    """An `Observer` that averages matrices (H, H) of each module over positions that are no padding.

    Args:
        part: what to measure.
        measure: from vectors (N, H, w) in float64, the sum over positions of matrices, (…, H, H).
    """

    def __init__(self, part: Part, measure: Callable[[Tensor], Tensor]) -> None:
        self.part, self._measure = part, measure
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, readings: Readings) -> None:
        """Add the readings of one batch."""
        for name, reading in readings:
            vectors = unpadded_vectors(reading, self.part)
            sums = self._measure(vectors.double()).cpu()
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums
            self._counts[name] = self._counts.get(name, 0) + len(vectors)

    def means(self) -> dict[str, Tensor]:
        """Return the means of each module."""
        for name, sums in self._sums.items():
            if not self._counts[name]:
                raise HeadError(f"{name} saw only padding; pass batches with unpadded tokens")
            if not bool(sums.isfinite().all()):
                raise HeadError(f"{name}: what its heads compute is not finite; look for NaN or infinity in weights")
        return {name: sums / self._counts[name] for name, sums in self._sums.items()}


class Discrepancies(_Means):
    """The `Observer` behind `discrepancy`."""

    def __init__(self) -> None:
        super().__init__("outputs", _distances)

    def result(self) -> dict[str, Discrepancy]:
        """Return the matrices of each module."""
        return {name: Discrepancy(cosine + 1, l2) for name, (cosine, l2) in self.means().items()}


class Coefficients(_Means):
    """The `Observer` behind `bhattacharyya`."""

    def __init__(self) -> None:
        super().__init__("probs", _coefficients)

    def result(self) -> dict[str, Tensor]:
        """Return the matrix of each module."""
        return self.means()


def discrepancy(model: PreTrainedModel, batches: Batches, *, progress: Progress = False) -> dict[str, Discrepancy]:
    """Return the distances between the outputs of the heads of each layer ("Multi-Head Rotation", section 5.3).

    Arguments, keys and errors are those of `head_covariances`.

    Returns:
        Module path → matrices in float64. A vector of zeros has cosine 0 with every vector, also with itself.
    """
    return observe(model, batches, Discrepancies(), progress=progress).result()


def _distances(vectors: Tensor) -> Tensor:
    """Return sums over positions of cosines and distances, (2, H, H), from vectors (N, H, w)."""
    norms = vectors.norm(dim=2, keepdim=True)
    units = torch.where(norms > 0, vectors / torch.where(norms > 0, norms, 1.0), 0.0)
    # by differences: through products, heads that nearly agree would lie apart by rounding alone
    distances = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.stack([torch.einsum("nhw,ngw->hg", units, units), distances.sum(0)])


def bhattacharyya(model: PreTrainedModel, batches: Batches, *, progress: Progress = False) -> dict[str, Tensor]:
    r"""Return the Bhattacharyya coefficients of heads: how much the attention of any two of a layer overlaps.

    $$BC(a, b) = \sum_j \sqrt{p_j^a \, p_j^b}$$

    equation 3 of "Diversified Attention on Transformers", mean over queries that are no padding. `mean_over_pairs` of
    it is the diversity score of Fig. 1, lower for more diverse heads; the paper sums it over layers. Arguments, keys
    and errors are those of `head_covariances`.

    Returns:
        Module path → (H, H) in float64, from 0 for heads that attend to different tokens to 1.
    """
    return observe(model, batches, Coefficients(), progress=progress).result()


def _coefficients(probs: Tensor) -> Tensor:
    """Return sums over queries of coefficients, (H, H), from attention probabilities (N, H, S)."""
    roots = probs.sqrt()
    return torch.einsum("nhs,ngs->hg", roots, roots)
