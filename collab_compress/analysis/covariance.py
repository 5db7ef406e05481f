"""Covariances of several representations of the same tokens, gathered batch by batch, and means over their pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collab_compress.errors import HeadError


def mean_over_pairs(matrix: Tensor) -> float:
    """Average a symmetric matrix of heads against heads over the pairs i < j.

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


CHUNK = 4096  # tokens in one product, which wait for each other: few large products are fastest
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
        """Measure representations that are at hand.

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
        """Blocks that `rows` are compared with; the same ones where all are compared with all."""
        return range(self.leading, len(self.widths))

    def cross(self, row: int, columns: Sequence[int]) -> Tensor:
        """Covariance of one block with others, (n, w, w): zeros fill up blocks narrower than the widest, w."""
        widest = max(self.widths)
        padded = torch.nn.functional.pad(self.matrix[self._slice(row)], (0, 1, 0, widest - self.widths[row]))
        index = torch.full((len(columns), widest), -1)  # the column of zeros
        for place, column in enumerate(columns):
            block = self._slice(column)
            index[place, : self.widths[column]] = torch.arange(block.start, block.stop)
        return padded[:, index].transpose(0, 1)

    def own(self) -> Tensor:
        """Covariance of each block with itself, (n, w, w); 0 for a block that varies by no more than rounding."""
        own = torch.cat([self.cross(block, [block]) for block in range(len(self.widths))])
        varies = own.diagonal(dim1=1, dim2=2).sum(1) > self.floor() * torch.tensor(self.widths)
        return own * varies[:, None, None]

    def floor(self) -> Tensor:
        """Variance a direction of each block may have by rounding alone, (n,)."""
        squares = self.matrix.diagonal() + self.mean.square()
        powers = torch.stack([squares[self._slice(block)].sum() for block in range(len(self.widths))])
        return rounding_variance(powers, torch.tensor(self.widths), self.precision)

    def only(self, blocks: range) -> JointCovariance:
        """Pick blocks that lie beside each other, all to be compared with all: the heads of one of several layers."""
        part = slice(sum(self.widths[: blocks.start]), sum(self.widths[: blocks.stop]))
        return JointCovariance(
            self.labels[blocks.start : blocks.stop], self.widths[blocks.start : blocks.stop], self.mean[part],
            self.matrix[part, part], self.count, self.precision,
        )  # fmt: skip

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
        return JointCovariance(tuple(labels), widths, self.mean, self.matrix, self.count, self.precision, leading)

    def _slice(self, block: int) -> slice:
        start = sum(self.widths[:block])
        return slice(start, start + self.widths[block])


def rounding_variance(power: Tensor, width: Tensor | int, precision: float) -> Tensor:
    """Bound the variance that rounding alone gives to a direction.

    Args:
        power: mean squared length of the vectors, mean included.
        width: their width.
        precision: spacing of floating-point numbers around 1 where the vectors were computed. Here they are turned in
            float32 at least.
    """
    single = torch.finfo(torch.float32).eps
    return power * ((4 * precision) ** 2 / width + (16 * min(precision, single)) ** 2)


class RunningCovariance:
    """Mean and covariance of vectors that come in batches, of which few are kept, and none for long.

    Products are taken in the vectors' own precision (at least float32) and summed in float64. First each block is
    turned into the principal axes of the first vectors, so that directions of little variance keep their precision
    beside those of much; at the end it is turned back.

    Args:
        widths: widths of the blocks.
    """

    def __init__(self, widths: tuple[int, ...]) -> None:
        self.widths, self.count, self.precision = widths, 0, 0.0
        self._waiting: list[Tensor] = []

    def add(self, vectors: Tensor) -> None:
        """Take in more vectors, (N, C); C is the sum of the widths."""
        self.precision = max(self.precision, torch.finfo(vectors.dtype).eps)
        self._waiting.append(vectors.detach().to(torch.promote_types(vectors.dtype, torch.float32)))
        if sum(map(len, self._waiting)) >= CHUNK:
            self._take()

    def result(self, labels: tuple[str, ...], name: str, leading: int = 0) -> JointCovariance:
        """Give mean and covariance of all that was added, on the CPU.

        Args:
            labels: of the blocks.
            name: what was measured, for messages.
            leading: as for `JointCovariance`.

        Raises:
            HeadError: fewer than two vectors, or they are not finite.
        """
        self._take()
        if self.count < 2:
            raise HeadError(f"{name}: got {self.count} tokens that are no padding; similarity needs two at least")
        if not bool(self._scatter.isfinite().all() and self._shift.isfinite().all()):
            raise HeadError(f"{name} is not finite; look for NaN or infinity in the weights")
        mean = self._sum / self.count
        lower = self._scatter.tril()
        matrix = (lower + lower.tril(-1).mT - self.count * torch.outer(mean, mean)) / (self.count - 1)
        mean = self._turn_back(mean[:, None])[:, 0] + self._shift
        matrix = self._turn_back(self._turn_back(matrix).mT)
        return JointCovariance(
            labels, self.widths, mean.cpu(), ((matrix + matrix.mT) / 2).cpu(), self.count, self.precision, leading
        )

    def _take(self) -> None:
        """Add up what waits."""
        waiting, self._waiting = torch.cat(self._waiting) if self._waiting else torch.empty(0), []
        if len(waiting) and not self.count:
            self._start(waiting)
        for chunk in waiting.split(CHUNK):
            if len(chunk):
                parts = (chunk - self._shift.to(chunk)).split(self.widths, 1)
                turned = torch.cat([part @ axes.to(part) for part, axes in zip(parts, self._axes, strict=True)], 1)
                for start in range(0, turned.shape[1], PANEL):
                    stop = start + PANEL
                    self._scatter[start:, start:stop] += turned[:, start:].mT @ turned[:, start:stop]
                self._sum += turned.sum(0)
                self.count += len(chunk)

    def _start(self, vectors: Tensor) -> None:
        first = vectors[:CHUNK].double()
        self._shift = first.mean(0)
        self._sum = torch.zeros_like(self._shift)
        self._scatter = torch.diag(self._sum)
        parts = torch.nan_to_num(first - self._shift, 0.0, 0.0, 0.0).split(self.widths, 1)
        self._axes = [torch.linalg.eigh(part.mT @ part).eigenvectors for part in parts]

    def _turn_back(self, matrix: Tensor) -> Tensor:
        """Undo the turn of the rows, (C, …)."""
        parts = matrix.split(self.widths)
        return torch.cat([axes @ part for part, axes in zip(parts, self._axes, strict=True)])
