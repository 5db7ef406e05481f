"""Covariances of several representations of the same tokens, gathered batch by batch, and means over their pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from collab_compress.errors import HeadError


def mean_over_pairs(matrix: Tensor) -> float:
    """Return the mean of a symmetric matrix of heads against heads over the pairs i < j.

    Equation 6 of "Analyzing and Controlling Inter-Head Diversity in Multi-Head Attention".

    Args:
        matrix: (H, H).

    Raises:
        HeadError: the matrix is not square, or there is a single head, which has no pairs.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise HeadError(f"got {tuple(matrix.shape)}, expected a matrix (H, H) of heads against heads")
    heads = len(matrix)
    if heads < 2:
        raise HeadError("a single head has no pairs to average over; compare heads where there are several")
    rows, columns = torch.triu_indices(heads, heads, 1)
    return float(matrix[rows, columns].mean())


PANEL = 192  # columns in one product: of a symmetric matrix little more than half is computed


@dataclass(frozen=True)
class JointCovariance:
    r"""Mean and covariance of representations side by side, $x = [x_1, …, x_n]$, each a block of its own width.

    Args:
        labels: name of each block.
        widths: width $d_i$ of each block.
        mean: (C,), with C the sum of the widths, in float64.
        matrix: covariance (C, C), divided by the number of tokens less one, in float64.
        count: number of tokens N.
        precision: spacing of floating-point numbers around 1 in what was measured.
        leading: how many blocks come first that are to be compared with the others only, as those of one of two
            models; 0 to compare all with all.
    """

    labels: tuple[str, ...]
    widths: tuple[int, ...]
    mean: Tensor
    matrix: Tensor
    count: int
    precision: float
    leading: int = 0

    @classmethod
    def of(cls, representations: Sequence[Tensor], leading: int = 0) -> JointCovariance:
        """Return the covariance of given representations.

        Args:
            representations: (N, d_i) each, of the same N tokens in the same order.
            leading: as for the class.

        Raises:
            HeadError: they are not matrices of equal length, fewer than two tokens, or not finite.
        """
        if not representations or any(x.ndim != 2 or len(x) != len(representations[0]) for x in representations):
            shapes = ", ".join(str(tuple(x.shape)) for x in representations)
            raise HeadError(f"representations do not fit together: got {shapes}; expected (N, d), all of the same N")
        running = RunningCovariance(tuple(x.shape[1] for x in representations))
        running.add(torch.cat(list(representations), 1))
        return running.result(tuple(map(str, range(len(representations)))), "representations", leading)

    @property
    def rows(self) -> range:
        """Blocks that are compared with `columns`."""
        return range(self.leading or len(self.widths))

    @property
    def columns(self) -> range:
        """Blocks that `rows` are compared with; the same blocks where all are compared with all."""
        return range(self.leading, len(self.widths))

    def cross(self, row: int, columns: Sequence[int]) -> Tensor:
        """Return the covariance of one block with others, (n, w, w), zero-padded to the widest block, w."""
        widest = max(self.widths)
        padded = torch.nn.functional.pad(self.matrix[self._slice(row)], (0, 1, 0, widest - self.widths[row]))
        index = torch.full((len(columns), widest), -1)  # the column of zeros
        for place, column in enumerate(columns):
            block = self._slice(column)
            index[place, : self.widths[column]] = torch.arange(block.start, block.stop)
        return padded[:, index].transpose(0, 1)

    def own(self) -> Tensor:
        """Return the covariance of each block with itself, (n, w, w); 0 for one that varies by rounding only."""
        own = torch.cat([self.cross(block, [block]) for block in range(len(self.widths))])
        varies = own.diagonal(dim1=1, dim2=2).sum(1) > self.floor() * torch.tensor(self.widths)
        return own * varies[:, None, None]

    def floor(self) -> Tensor:
        """Return the variance that rounding alone may give to a direction of each block, (n,)."""
        squares = self.matrix.diagonal() + self.mean.square()
        powers = torch.stack([squares[self._slice(block)].sum() for block in range(len(self.widths))])
        return rounding_variance(powers, torch.tensor(self.widths), self.precision)

    def only(self, blocks: range) -> JointCovariance:
        """Return neighbouring blocks alone, all to be compared with all: the heads of one of several layers."""
        part = slice(sum(self.widths[: blocks.start]), sum(self.widths[: blocks.stop]))
        return replace(
            self,
            labels=self.labels[blocks.start : blocks.stop],
            widths=self.widths[blocks.start : blocks.stop],
            mean=self.mean[part],
            matrix=self.matrix[part, part],
            leading=0,
        )

    def merged(self, sizes: Sequence[int], labels: Sequence[str], leading: int = 0) -> JointCovariance:
        """Join neighbouring blocks into wider ones: heads into layers.

        Args:
            sizes: how many blocks make each new one, in order; all of them together.
            labels: names of the new blocks.
            leading: as for the class, in new blocks.

        Raises:
            HeadError: there are not as many blocks as that.
        """
        if sum(sizes) != len(self.widths) or len(labels) != len(sizes):
            raise HeadError(f"cannot join {len(self.widths)} blocks into {len(labels)} of {list(sizes)}")
        stops = [sum(sizes[: place + 1]) for place in range(len(sizes))]
        widths = tuple(sum(self.widths[stop - size : stop]) for stop, size in zip(stops, sizes, strict=True))
        return replace(self, labels=tuple(labels), widths=widths, leading=leading)

    def _slice(self, block: int) -> slice:
        start = sum(self.widths[:block])
        return slice(start, start + self.widths[block])


def rounding_variance(power: Tensor, width: Tensor | int, precision: float) -> Tensor:
    """Return a bound on the variance that rounding alone gives to a direction.

    Args:
        power: mean squared length of the vectors, mean included.
        width: their width.
        precision: spacing of floating-point numbers around 1 where the vectors were computed.
    """
    single = torch.finfo(torch.float32).eps
    return power * ((4 * precision) ** 2 / width + (16 * min(precision, single)) ** 2)


class RunningCovariance:
    """Mean and covariance of vectors that come in batches, summed in float64 about the mean of the first batch.

    Args:
        widths: widths of the blocks.
    """

    def __init__(self, widths: tuple[int, ...]) -> None:
        self.widths, self.count, self.precision = widths, 0, 0.0

    def add(self, vectors: Tensor) -> None:
        """Add vectors (N, C); C is the sum of the widths."""
        self.precision = max(self.precision, torch.finfo(vectors.dtype).eps)
        vectors = vectors.detach().double()
        if not len(vectors):
            return
        if not self.count:
            self._shift = vectors.mean(0)
            self._sum = torch.zeros_like(self._shift)
            self._scatter = torch.diag(self._sum)
        vectors = vectors - self._shift.to(vectors.device)
        for start in range(0, vectors.shape[1], PANEL):  # the lower half of a symmetric matrix
            product = vectors[:, start:].mT @ vectors[:, start : start + PANEL]
            self._scatter[start:, start : start + PANEL] += product.to(self._scatter.device)
        self._sum += vectors.sum(0).to(self._sum.device)
        self.count += len(vectors)

    def result(self, labels: tuple[str, ...], name: str, leading: int = 0) -> JointCovariance:
        """Return mean and covariance of all vectors, on the CPU.

        Args:
            labels: of the blocks.
            name: what was measured, for messages.
            leading: as for `JointCovariance`.

        Raises:
            HeadError: fewer than two vectors, or they are not finite.
        """
        if self.count < 2:
            raise HeadError(f"{name}: got {self.count} tokens that are no padding; similarity needs two at least")
        if not bool(self._scatter.isfinite().all() and self._shift.isfinite().all()):
            raise HeadError(f"{name} is not finite; look for NaN or infinity in the weights")
        mean = self._sum / self.count
        lower = self._scatter.tril()
        scatter = lower + lower.tril(-1).mT
        matrix = (scatter - self.count * torch.outer(mean, mean)) / (self.count - 1)
        return JointCovariance(
            labels=labels,
            widths=self.widths,
            mean=(mean + self._shift).cpu(),
            matrix=matrix.cpu(),
            count=self.count,
            precision=self.precision,
            leading=leading,
        )
