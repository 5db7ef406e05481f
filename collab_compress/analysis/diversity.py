"""How different the heads of a layer are: distances, discrepancy, and overlap of their attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis.stream import Batches, Means, Progress, observe, unpadded_vectors
from collab_compress.errors import HeadError
from collab_compress.heads import Reading

Measure = Literal["cosine", "difference", "l2"]


@dataclass(frozen=True)
class Discrepancy:
    """Distances between the heads of one layer, (H, H), means over query positions that are no padding.

    Args:
        cosine: cosine + 1, as "Multi-Head Rotation" section 5.3 words it: 2 for heads that point the same way, 0 for
            opposite ones. It grows as heads get more alike.
        l2: Euclidean distance.

    Example:
        >>> cosine, l2 = torch.tensor([[2.0, 0.5], [0.5, 2.0]]), torch.tensor([[0.0, 3.0], [3.0, 0.0]])
        >>> apart = Discrepancy(cosine, l2)
        >>> apart.difference, apart.norm("l2")
        (tensor([[0.0000, 1.5000],
                [1.5000, 0.0000]]), 6.0)
    """

    cosine: Tensor
    l2: Tensor

    @classmethod
    def of(cls, means: Tensor) -> Discrepancy:
        """Return the distances by mean cosines and distances, (2, H, H)."""
        return cls(means[0] + 1, means[1])

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


def discrepancy(model: PreTrainedModel, batches: Batches, *, progress: Progress = False) -> dict[str, Discrepancy]:
    """Return the distances between the outputs of the heads of each layer ("Multi-Head Rotation", section 5.3).

    Arguments, keys and errors are those of `head_covariances`.

    Returns:
        Module path → matrices in float64. A vector of zeros has cosine 0 with every vector, also with itself.

    Example:
        >>> apart = discrepancy(model, [batch])["encoder.layer.0.attention.self"]
        >>> apart.l2.shape, apart.l2.diagonal()
        (torch.Size([3, 3]), tensor([0., 0., 0.], dtype=torch.float64))
    """
    distances = Means("outputs", summed_distances)
    observe(model, batches, [distances], progress=progress)
    return {name: Discrepancy.of(means) for name, means in distances.result().items()}


def summed_distances(reading: Reading) -> tuple[Tensor, int]:
    """Return the sums over positions of cosines and of distances between heads, (2, H, H), and the positions."""
    vectors = unpadded_vectors(reading, "outputs").double()  # (N, H, s)
    norms = vectors.norm(dim=2, keepdim=True)
    units = torch.where(norms > 0, vectors / torch.where(norms > 0, norms, 1.0), 0.0)
    # by differences: through products, heads that nearly agree would lie apart by rounding alone
    distances = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.stack([torch.einsum("nhw,ngw->hg", units, units), distances.sum(0)]), len(vectors)


def bhattacharyya(model: PreTrainedModel, batches: Batches, *, progress: Progress = False) -> dict[str, Tensor]:
    r"""Return the Bhattacharyya coefficients of heads: how much the attention of any two of a layer overlaps.

    $$BC(a, b) = \sum_j \sqrt{p_j^a \, p_j^b}$$

    equation 3 of "Diversified Attention on Transformers", mean over queries that are no padding. `mean_over_pairs` of
    it is the diversity score of Fig. 1, lower for more diverse heads; the paper sums it over layers. Arguments, keys
    and errors are those of `head_covariances`.

    Returns:
        Module path → (H, H) in float64, from 0 for heads that attend to different tokens to 1.

    Example:
        >>> overlap = bhattacharyya(model, [batch])["encoder.layer.0.attention.self"]
        >>> overlap.shape, overlap.diagonal().round(decimals=5)
        (torch.Size([3, 3]), tensor([1., 1., 1.], dtype=torch.float64))
    """
    coefficients = Means("probs", summed_coefficients)
    observe(model, batches, [coefficients], progress=progress)
    return coefficients.result()


def summed_coefficients(reading: Reading) -> tuple[Tensor, int]:
    """Return the sums over queries of the coefficients of heads, (H, H), and the number of queries."""
    roots = unpadded_vectors(reading, "probs").double().sqrt()  # (N, H, S)
    return torch.einsum("nhs,ngs->hg", roots, roots), len(roots)
