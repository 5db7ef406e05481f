"""Covariances of what heads, layers or two models compute at the same tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis.stream import Batches, read_heads, unpadded_vectors
from collab_compress.architectures import KINDS, Kind
from collab_compress.errors import HeadError
from collab_compress.factorization.least_squares import ResidualMoments
from collab_compress.heads import HeadRecord

ROUNDING_VARIANCE = 4e-12  # of the mean square of a representation: variance below it is float32's rounding


def mean_over_pairs(matrix: Tensor) -> float:
    """Return the mean of a symmetric matrix (H, H) of heads against heads over the pairs i < j.

    Equation 6 of "Analyzing and Controlling Inter-Head Diversity in Multi-Head Attention".

    Raises:
        HeadError: the matrix is not square, or there is a single head, which has no pairs.

    Example:
        >>> mean_over_pairs(torch.tensor([[1.0, 0.5, 0.25], [0.5, 1.0, 0.0], [0.25, 0.0, 1.0]]))
        0.25
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise HeadError(f"got {tuple(matrix.shape)}, expected a matrix (H, H) of heads against heads")
    if len(matrix) < 2:
        raise HeadError("a single head has no pairs to average over; compare heads where there are several")
    rows, columns = torch.triu_indices(len(matrix), len(matrix), 1, device="cpu")
    return float(matrix[rows, columns].mean())


@dataclass(frozen=True)
class JointCovariance:
    r"""Mean and covariance of representations side by side, $x = [x_1, …, x_n]$; each is a block.

    Args:
        labels: name of each block.
        widths: width $d_i$ of each block.
        mean: (C,), with C the sum of the widths, in float64.
        matrix: covariance (C, C), divided by the number of tokens less one, in float64.
        count: number of tokens N.
        leading: number of blocks at the beginning, such as those of the first of two models, that are compared only
            with the other blocks; 0 to compare all with all.
    """

    labels: tuple[str, ...]
    widths: tuple[int, ...]
    mean: Tensor
    matrix: Tensor
    count: int
    leading: int = 0

    @classmethod
    def of(cls, representations: Sequence[Tensor], leading: int = 0) -> JointCovariance:
        """Return the covariance of representations (N, d_i) of the same N tokens in the same order.

        Raises:
            HeadError: they are not matrices of equal length, have fewer than two tokens, or are not finite.
        """
        count = len(representations[0]) if representations and representations[0].ndim else 0
        if not representations or any(x.ndim != 2 or len(x) != count or not x.shape[1] for x in representations):
            shapes = ", ".join(str(tuple(x.shape)) for x in representations)
            raise HeadError(
                f"representations do not fit together: got {shapes}; expected (N, d), d above 0, all of the same N"
            )
        running = RunningCovariance(leading)
        running.add([(str(index), x) for index, x in enumerate(representations)])
        return running.result("representations")

    @property
    def layers(self) -> JointCovariance:
        """The covariance of layers, a block each, of which these blocks are the heads, labelled `layer:head`."""
        widths: Counter[tuple[bool, str]] = Counter()
        for index, (label, width) in enumerate(zip(self.labels, self.widths, strict=True)):
            widths[index >= self.leading, label.rpartition(":")[0]] += width
        labels = tuple(layer for _, layer in widths)
        leading = sum(not is_column for is_column, _ in widths)
        return replace(self, labels=labels, widths=tuple(widths.values()), leading=leading)

    @property
    def rows(self) -> range:
        """Blocks that are compared with `columns`."""
        return range(self.leading or len(self.widths))

    @property
    def columns(self) -> range:
        """Blocks that `rows` are compared with; the same blocks where all are compared with all."""
        return range(self.leading, len(self.widths))

    @property
    def slices(self) -> list[slice]:
        """Where each block lies in `mean` and `matrix`."""
        return [slice(stop - width, stop) for stop, width in zip(accumulate(self.widths), self.widths, strict=True)]

    @property
    def variances(self) -> Tensor:
        """Total variance of each block, (n,)."""
        return self.sum_blocks(self.matrix.diagonal())

    @property
    def floors(self) -> Tensor:
        """Variance of each block that counts as rounding, (n,)."""
        return ROUNDING_VARIANCE * (self.variances + self.sum_blocks(self.mean.square()))

    def sum_blocks(self, values: Tensor) -> Tensor:
        """Sum (…, C) over the columns of each block, (…, n)."""
        return torch.stack([block.sum(-1) for block in values.split(self.widths, -1)], -1)


class RunningCovariance:
    """Covariance of blocks, the first `leading` of which are compared with the others, summed up batch by batch."""

    def __init__(self, leading: int = 0) -> None:
        self.leading = leading
        self.moments = ResidualMoments()
        self.labels: tuple[str, ...] = ()  # two models may have equal ones
        self.widths: tuple[int, ...] = ()

    def add(self, blocks: Sequence[tuple[str, Tensor]]) -> None:
        """Add one batch: the label and the vectors (N, d) of each block, of the same tokens."""
        lengths = {len(vectors): label for label, vectors in blocks}
        if len(lengths) > 1:
            counts = ", ".join(f"{label}: {length}" for length, label in lengths.items())
            raise HeadError(
                f"modules see different numbers of tokens ({counts}); choose modules that read the same "
                "ones, as by kinds=('encoder',), and models with one tokenizer"
            )
        self.labels = tuple(label for label, _ in blocks)
        self.widths = tuple(vectors.shape[1] for _, vectors in blocks)
        device = blocks[0][1].device  # layers of one model may lie on several
        self.moments.add(torch.cat([vectors.to(device) for _, vectors in blocks], 1).double())

    def result(self, name: str) -> JointCovariance:
        """Return the covariance of all vectors, on the CPU; error messages call them `name`."""
        count = self.moments.count
        if count < 2:
            raise HeadError(f"{name}: got {count} unpadded tokens; similarity needs at least 2")
        mean, _ = self.moments.means()
        covariance, _ = self.moments.moments(centred=True)
        if not bool(covariance.isfinite().all() and mean.isfinite().all()):
            raise HeadError(f"{name} is not finite; look for NaN or infinity in the weights")
        matrix = covariance.cpu() * (count / (count - 1))
        return JointCovariance(self.labels, self.widths, mean.cpu(), matrix, count, self.leading)


def _heads(reading: HeadRecord, prefix: str = "") -> list[tuple[str, Tensor]]:
    """Return the label and the outputs (N, s) of each head, without padding."""
    vectors = unpadded_vectors(reading, "outputs")
    return [(f"{prefix}{head}", of_head) for head, of_head in enumerate(vectors.unbind(1))]


def head_covariances(model: PreTrainedModel, batches: Batches, *, modules: str = "*") -> dict[str, JointCovariance]:
    """Return the covariance of all heads of each layer, for `svcca` and `cka` between the heads of one layer.

    Padding does not count. Memory is (H·d)² numbers a layer for any number of tokens.

    Args:
        model: stock or edited; its mode does not change.
        batches: keyword arguments for the model; read once. Wrap them in `tqdm` for a progress bar.
        modules: glob on module paths.

    Returns:
        Module path → covariance, a block a head, labelled `0`, `1`, …. A module that serves several layers (ALBERT)
        has one for each use, `path[0]`, `path[1]`, ….

    Raises:
        HeadError: no batches, fewer than two tokens, or numbers that are not finite.
        CalibrationError: the model does not take the batches.
        UnsupportedModelError: the model's family is not known, or no module matches.

    Example:
        >>> covariances = head_covariances(model, [batch])
        >>> covariances["encoder.layer.0.attention.self"].matrix.shape
        torch.Size([24, 24])
    """
    sums: dict[str, RunningCovariance] = {}
    for (readings,) in read_heads([model], batches, "outputs", modules=modules):
        for name, reading in readings:
            sums.setdefault(name, RunningCovariance()).add(_heads(reading))
    return {name: running.result(name) for name, running in sums.items()}


def layer_covariance(
    model: PreTrainedModel, batches: Batches, *, kinds: Collection[Kind] = KINDS, modules: str = "*"
) -> JointCovariance:
    """Return the covariance of all heads of several layers, for `svcca` and `cka` between heads or between layers.

    Memory and time grow with (L·H·d)²: choose layers by `modules` if there are many. Layers must see the same tokens,
    so an encoder's and a decoder's cannot be compared; a decoder's `decoder` and `cross` can. Other arguments and
    errors are those of `head_covariances`.

    Args:
        kinds: attention types.

    Returns:
        The covariance, a block a head, labelled with the keys of `head_covariances` as `key:head`; its `layers` has a
        block a layer.

    Example:
        >>> layer_covariance(model, [batch]).layers.labels
        ('encoder.layer.0.attention.self', 'encoder.layer.1.attention.self')
    """
    running = RunningCovariance()
    for (readings,) in read_heads([model], batches, "outputs", kinds=kinds, modules=modules):
        running.add([block for name, reading in readings for block in _heads(reading, f"{name}:")])
    return running.result("the layers")


def model_covariances(model: PreTrainedModel, other: PreTrainedModel, batches: Batches) -> dict[str, JointCovariance]:
    """Return the covariance of each layer of one model with one of another, for `svcca` and `cka` between models.

    Both models read the same batches, so they must share a tokenizer, and have the same number of layers. They may
    differ in heads and widths. Other arguments and errors are those of `head_covariances`.

    Args:
        model: stock or edited; its heads are the rows of the results.
        other: the model to compare with; its heads are the columns.

    Returns:
        Module path in `model` → covariance, a block a head, whose first `leading` blocks are `model`'s; its `layers`
        has a block for each of the two layers. For a module that serves several layers, one for each use.

    Example:
        >>> joint = model_covariances(model, model, [batch])["encoder.layer.0.attention.self"]
        >>> joint.matrix.shape, joint.leading, joint.layers.widths
        (torch.Size([48, 48]), 3, (24, 24))
    """
    sums: dict[str, RunningCovariance] = {}
    for pair in read_heads([model, other], batches, "outputs"):
        places = [[(reading.site.kind, reading.site.layer) for _, reading in readings] for readings in pair]
        if places[0] != places[1]:
            raise HeadError(
                f"the models ran {len(places[0])} and {len(places[1])} attention modules, which do not pair by kind "
                "and layer; compare models of the same depth"
            )
        for (name, reading), (_, counterpart) in zip(*pair, strict=True):
            heads = _heads(reading, f"{reading.site.name}:")
            blocks = heads + _heads(counterpart, f"{counterpart.site.name}:")
            sums.setdefault(name, RunningCovariance(len(heads))).add(blocks)
    return {name: running.result(name) for name, running in sums.items()}
