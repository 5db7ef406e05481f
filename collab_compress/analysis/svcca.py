"""Singular vector canonical correlation analysis: how much of one head's space is a linear function of another's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from collab_compress.analysis.covariance import JointCovariance, mean_over_pairs
from collab_compress.errors import HeadError


@dataclass(frozen=True)
class SVCCA:
    """Canonical correlations of pairs of representations; n rows against m columns, all with all if n = m.

    Args:
        rows: names of the representations along the rows.
        coefficients: (n, m, w), between 0 and 1, descending; 0 beyond the number of directions of the narrower one
            and below the threshold.
        directions: how many coefficients each pair has that count, (n, m).
        within: whether rows and columns are the same representations.
    """

    rows: tuple[str, ...]
    coefficients: Tensor
    directions: Tensor
    within: bool

    @property
    def similarity(self) -> Tensor:
        """Mean coefficient of each pair, (n, m); 0 where one of the two never varies."""
        return self.coefficients.sum(-1) / self.directions.clamp(min=1)

    @property
    def mean(self) -> float:
        """Mean similarity over pairs: i < j, or all where rows and columns differ.

        Raises:
            HeadError: there is no pair.
        """
        return mean_over_pairs(self.similarity) if self.within else float(self.similarity.mean())

    @property
    def curve(self) -> Tensor:
        """Mean over pairs of the first, second, … coefficient, (k,); "Inter-Head Diversity", Figs. 2–4.

        Pairs with fewer coefficients than others count with zeros at the end.

        Raises:
            HeadError: there is no pair.
        """
        size = len(self.rows)
        if self.within and size < 2:
            raise HeadError("a single head has no pairs to average over; compare heads where there are several")
        if self.within:
            rows, columns = torch.triu_indices(size, size, 1)
            chosen, directions = self.coefficients[rows, columns], self.directions[rows, columns]
        else:
            chosen, directions = self.coefficients.flatten(0, 1), self.directions.flatten()
        return chosen.mean(0)[: int(directions.max())]


def svcca(responses: JointCovariance, variance: float = 0.99, threshold: float = 0.0) -> SVCCA:
    r"""Return SVCCA of all pairs of representations, computed from their covariance.

    The singular value decomposition of the centred $X_i$ (N×d) keeps the directions with the most variance that
    together hold the share `variance` of it; the canonical correlations of what is left are

    $$\rho_{ij} = \operatorname{sv}\big(\Lambda_i^{-1/2} V_i^\top C_{ij} V_j \Lambda_j^{-1/2}\big), \quad
      C_{ii} \approx V_i \Lambda_i V_i^\top$$

    Raghu et al., "SVCCA", 2017; equation 3 of "Analyzing and Controlling Inter-Head Diversity in Multi-Head
    Attention". It does not change under rotations, scalings and shifts, nor, with `variance=1`, under any invertible
    affine map. With fewer than about ten tokens a direction all coefficients come out too high, and with no more
    tokens than directions they are 1.

    Args:
        responses: covariance from `head_covariances` or `JointCovariance.of`.
        variance: share of each representation's variance to keep, above 0, up to 1. Directions whose variance is no
            more than rounding are never kept.
        threshold: least coefficient that counts in means and curves ("top SVCCA coefficients with a threshold such
            that covers all meaningful subspaces", section 3.2, which does not give it). All count at 0.

    Returns:
        All coefficients; `similarity`, `mean` and `curve` sum them up. A representation that never varies has no
        directions, and similarity 0, with itself too; so has a pair that shares none above the threshold.

    Raises:
        HeadError: the share or the threshold is not in range.
    """
    if not 0 < variance <= 1:
        raise HeadError(f"share of variance to keep is {variance}; expected above 0, up to 1")
    if not 0 <= threshold < 1:
        raise HeadError(f"threshold of coefficients is {threshold}; expected from 0 to below 1")
    whitening, kept = _whitening(responses, variance)
    rows, columns = responses.rows, responses.columns
    directions = torch.minimum(kept[rows.start : rows.stop, None], kept[None, columns.start :])
    coefficients = whitening.new_zeros(len(rows), len(columns), whitening.shape[1])
    for place, row in enumerate(rows):
        others = columns if responses.leading else columns[place:]
        cross = whitening[row].mT @ responses.cross(row, others) @ whitening[others.start :]
        coefficients[place, len(columns) - len(others) :] = torch.linalg.svdvals(cross)
    if not responses.leading:
        coefficients = torch.maximum(coefficients, coefficients.transpose(0, 1))  # the lower half is still 0
    counted = torch.arange(whitening.shape[1]) < directions[..., None]
    counted &= coefficients >= threshold
    return SVCCA(
        tuple(responses.labels[row] for row in rows),
        coefficients.clamp(0, 1) * counted,
        counted.sum(-1),
        not responses.leading,
    )


def _whitening(responses: JointCovariance, variance: float) -> tuple[Tensor, Tensor]:
    """Return whitening matrices (n, w, w), 0 in columns that are not kept, and numbers of kept directions (n,)."""
    values, vectors = torch.linalg.eigh(responses.own())  # ascending
    values, vectors = values.flip(1).clamp(min=0), vectors.flip(2)
    total = values.sum(1, keepdim=True)
    before = values.cumsum(1) - values  # what the directions ahead of each one hold
    floor = torch.maximum(responses.floor()[:, None], values[:, :1] * torch.finfo(values.dtype).eps * values.shape[1])
    kept = (before < (variance * total) * (1 - 1e-12)) & (values > floor)
    scale = torch.where(kept, values.clamp(min=torch.finfo(values.dtype).tiny).rsqrt(), 0.0)
    return vectors * scale[:, None], kept.sum(1)
