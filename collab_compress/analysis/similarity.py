"""How similar or different heads, layers or models are.

SVCCA and centred kernel alignment (CKA) compare any two of these; distances, discrepancy and the overlap of attention
compare the heads of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_compress.analysis.covariance import JointCovariance, mean_over_pairs
from collab_compress.analysis.stream import Batches, position_means, unpadded_vectors
from collab_compress.errors import HeadError
from collab_compress.heads import HeadRecord

Measure = Literal["cosine", "difference", "l2"]


@dataclass(frozen=True)
class SVCCA:
    """Canonical correlations of pairs of representations; n rows against m columns.

    Args:
        labels: names of the representations along the rows.
        coefficients: (n, m, w), between 0 and 1, descending; 0 beyond the number of directions of the narrower one.
        directions: number of coefficients of each pair that count, (n, m).
        within: whether rows and columns are the same representations.
    """

    labels: tuple[str, ...]
    coefficients: Tensor
    directions: Tensor
    within: bool

    @property
    def similarity(self) -> Tensor:
        """Mean coefficient of each pair, (n, m); 0 where one of the two never varies."""
        return self.coefficients.sum(-1) / self.directions.clamp(min=1)

    @property
    def mean(self) -> float:
        """Mean similarity over pairs: i < j, or all where rows and columns differ; a HeadError if there is none."""
        return mean_over_pairs(self.similarity) if self.within else float(self.similarity.mean())

    @property
    def curve(self) -> Tensor:
        """Mean over pairs of the first, second, … coefficient, 0 where a pair has fewer, (k,).

        "Inter-Head Diversity", Figs. 2–4.
        """
        pairs = torch.ones_like(self.directions, dtype=torch.bool)
        if self.within:
            pairs = pairs.triu(1)
        if not pairs.any():
            raise HeadError("a single head has no pairs to average over; compare heads where there are several")
        return self.coefficients[pairs].mean(0)[: int(self.directions[pairs].max())]


def svcca(
    responses: JointCovariance | Tensor,
    other: Tensor | None = None,
    *,
    variance: float = 0.99,
) -> SVCCA:
    r"""Return SVCCA (singular vector canonical correlation analysis) of all pairs of representations.

    The singular value decomposition of the centred $X_i$ (N×d) keeps the directions with the most variance that
    together hold the share `variance` of it. The canonical correlations of these are, by the covariance C,

    $$\rho_{ij} = \operatorname{sv}\big(\Lambda_i^{-1/2} V_i^\top C_{ij} V_j \Lambda_j^{-1/2}\big), \quad
      C_{ii} \approx V_i \Lambda_i V_i^\top$$

    Raghu et al., "SVCCA", 2017; equation 3 of "Analyzing and Controlling Inter-Head Diversity in Multi-Head
    Attention". It does not change under rotations, scalings and shifts, nor, with `variance=1`, under any invertible
    affine map. With fewer than about ten tokens a direction all coefficients come out too high, and with no more
    tokens than directions they are 1.

    Args:
        responses: covariance from `head_covariances` or `JointCovariance.of`; or the first of two matrices of
            features (N, d).
        other: the second, of the same N tokens; the result is then of one pair.
        variance: share of each representation's variance to keep, above 0, up to 1. Directions whose variance is no
            more than rounding are never kept.

    Returns:
        All coefficients; `similarity`, `mean` and `curve` sum them up. A representation that never varies has no
        directions and similarity 0, also with itself.

    Raises:
        HeadError: the share is not in range; `responses` is neither; or two matrices do not fit together.

    Example:
        >>> from collab_compress.analysis import head_covariances
        >>> heads = head_covariances(model, [batch])["encoder.layer.0.attention.self"]
        >>> svcca(heads).similarity.shape
        torch.Size([3, 3])
        >>> x = torch.randn(100, 4)
        >>> round(svcca(x, x @ torch.randn(4, 4), variance=1).mean, 6)  # the same for any invertible map
        1.0
    """
    responses = _to_covariance(responses, other)
    if not 0 < variance <= 1:
        raise HeadError(f"share of variance to keep is {variance}; expected above 0, up to 1")
    slices, whitening = responses.slices, _compute_whitening(responses, variance)
    rows, columns, within = responses.rows, responses.columns, not responses.leading
    coefficients = torch.zeros(len(rows), len(columns), max(responses.widths), dtype=torch.float64, device="cpu")
    directions = torch.zeros(len(rows), len(columns), dtype=torch.long, device="cpu")
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            if within and j < i:  # symmetric
                coefficients[i, j], directions[i, j] = coefficients[j, i], directions[j, i]
                continue
            cross = responses.matrix[slices[row], slices[column]]
            values = torch.linalg.svdvals(whitening[row].mT @ cross @ whitening[column])
            coefficients[i, j, : len(values)], directions[i, j] = values.clamp(max=1), len(values)
    return SVCCA(tuple(responses.labels[row] for row in rows), coefficients, directions, within)


def _compute_whitening(responses: JointCovariance, variance: float) -> list[Tensor]:
    """Return a whitening matrix (d, k) of each block, of its k kept directions."""
    matrices = []
    for block, floor in zip(responses.slices, responses.floors, strict=True):
        values, vectors = torch.linalg.eigh(responses.matrix[block, block])  # ascending
        values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
        before = values.cumsum(0) - values  # variance of the directions ahead of each one
        kept = (before < variance * values.sum() * (1 - 1e-12)) & (values > floor)
        matrices.append(vectors[:, kept] * values[kept].rsqrt())
    return matrices


def cka(responses: JointCovariance | Tensor, other: Tensor | None = None) -> Tensor:
    r"""Return linear CKA of all pairs of representations, computed from their covariance.

    $$\mathrm{CKA}(i, j) = \frac{\|C_{ij}\|_F^2}{\|C_{ii}\|_F \, \|C_{jj}\|_F}$$

    equals equation 5 of "Analyzing and Controlling Inter-Head Diversity in Multi-Head Attention" (Kornblith et al.,
    2019) with $K_i = X_i X_i^\top$. It is invariant under rotations, isotropic scalings and shifts. For independent
    representations it is not 0 but about $\sqrt{d_i d_j} / N$ (d directions of equal variance), so use many more
    tokens than directions.

    Args:
        responses: covariance from `head_covariances` or `JointCovariance.of`; or the first of two matrices of
            features (N, d).
        other: the second, of the same N tokens.

    Returns:
        (n, m) in float64, between 0 and 1, (1, 1) of two matrices; 0 for a representation that never varies, also
        with itself.

    Raises:
        HeadError: `responses` is neither, or two matrices do not fit together.

    Example:
        >>> x = torch.randn(100, 4)
        >>> cka(x, 2 * x + 1)
        tensor([[1.0000]], dtype=torch.float64)
        >>> bool(cka(x, torch.randn(100, 4)) < 0.2)
        True
    """
    responses = _to_covariance(responses, other)
    squares = responses.sum_blocks(responses.sum_blocks(responses.matrix.square()).mT)  # (n, n)
    norms = squares.diagonal().sqrt() * (responses.variances > responses.floors)
    rows, columns = responses.rows, responses.columns
    products = norms[: rows.stop, None] * norms[columns.start :]
    return torch.where(products > 0, squares[: rows.stop, columns.start :] / products, 0.0)


def _to_covariance(responses: JointCovariance | Tensor, other: Tensor | None) -> JointCovariance:
    """Return the covariance of what similarities compare, or raise a HeadError."""
    if isinstance(responses, Tensor) and isinstance(other, Tensor):
        return JointCovariance.of([responses, other], leading=1)
    if not isinstance(responses, JointCovariance) or other is not None:
        raise HeadError(
            f"cannot compare {type(responses).__name__} and {type(other).__name__}; expected one JointCovariance, or "
            "two tensors (N, d) of the same N tokens"
        )
    return responses


@dataclass(frozen=True)
class Discrepancy:
    """Distances between the heads of one layer, (H, H), means over query positions that are no padding.

    Args:
        cosine: cosine + 1, as "Multi-Head Rotation" section 5.3 words it: 2 for heads that point the same way, 0 for
            opposite ones. It grows as heads become more similar.
        l2: Euclidean distance.
    """

    cosine: Tensor
    l2: Tensor

    @property
    def difference(self) -> Tensor:
        """1 − cosine, which grows as heads move apart; what Fig. 6 of the paper calls cosine difference."""
        return 2 - self.cosine

    def norm(self, measure: Measure) -> float:
        """Return the L₁,₁ norm by `cosine`, `difference` or `l2`: the layer's discrepancy, diagonal included."""
        if measure not in get_args(Measure):
            raise HeadError(f"unknown measure {measure!r}; expected one of {', '.join(get_args(Measure))}")
        matrix: Tensor = getattr(self, measure)
        return float(matrix.abs().sum())


def discrepancy(model: PreTrainedModel, batches: Batches) -> dict[str, Discrepancy]:
    """Return the distances between the outputs of the heads of each layer ("Multi-Head Rotation", section 5.3).

    Arguments, keys and errors are those of `head_covariances`.

    Returns:
        Module path → matrices in float64. A vector of zeros has cosine 0 with every vector, also with itself.

    Example:
        >>> apart = discrepancy(model, [batch])["encoder.layer.0.attention.self"]
        >>> apart.l2.shape, apart.l2.diagonal()
        (torch.Size([3, 3]), tensor([0., 0., 0.], dtype=torch.float64))
    """
    means = position_means(model, batches, "outputs", {"distances": _sum_distances})["distances"]
    return {name: Discrepancy(cosine + 1, l2) for name, (cosine, l2) in means.items()}


def _sum_distances(reading: HeadRecord) -> tuple[Tensor, int]:
    """Return the sums over positions of cosines and of distances between heads, (2, H, H), and the positions."""
    vectors = unpadded_vectors(reading, "outputs").double()  # (N, H, s)
    units = nn.functional.normalize(vectors, dim=2, eps=torch.finfo(vectors.dtype).tiny)
    # by differences: through products, heads that nearly agree would lie apart by rounding alone
    distances = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.stack([torch.einsum("nhw,ngw->hg", units, units), distances.sum(0)]), len(vectors)


def bhattacharyya(model: PreTrainedModel, batches: Batches) -> dict[str, Tensor]:
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
    return position_means(model, batches, "probs", {"overlap": _sum_coefficients})["overlap"]


def _sum_coefficients(reading: HeadRecord) -> tuple[Tensor, int]:
    """Return the sums over queries of the coefficients of heads, (H, H), and the number of queries."""
    roots = unpadded_vectors(reading, "probs").double().sqrt()  # (N, H, S)
    return torch.einsum("nhs,ngs->hg", roots, roots), len(roots)
