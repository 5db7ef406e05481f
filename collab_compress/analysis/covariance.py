"""Covariances of what heads, layers or two models compute at the same tokens, and samples of tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis.stream import Batches, Progress, Readings, observe, read_heads, unpadded_vectors
from collab_compress.architectures import KINDS, Kind, find_attention
from collab_compress.errors import HeadError
from collab_compress.heads import Part

Unit = Literal["head", "layer"]
PANEL = 192  # columns in one product: of a symmetric matrix little more than half is computed


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
        precision: machine epsilon of the vectors.
        leading: number of blocks at the beginning, as those of the first of two models, that are compared with the
            other blocks only; 0 to compare all with all.

    Example:
        >>> joint = JointCovariance.of([torch.randn(50, 2), torch.randn(50, 3)])
        >>> joint.matrix.shape, joint.widths, joint.count
        (torch.Size([5, 5]), (2, 3), 50)
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
        """Return the covariance of representations (N, d_i) of the same N tokens in the same order.

        Raises:
            HeadError: they are not matrices of equal length, have fewer than two tokens, or are not finite.
        """
        check_representations(representations)
        running = RunningCovariance("layer")
        running.add([(str(place), x[:, None]) for place, x in enumerate(representations)])
        return replace(running.result("representations"), leading=leading)

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

    def sum_blocks(self, values: Tensor) -> Tensor:
        """Sum (…, C) over the columns of each block, (…, n)."""
        return torch.stack([block.sum(-1) for block in values.split(self.widths, -1)], -1)

    def rounding(self) -> Tensor:
        """Return the variance that rounding alone may give to a direction of each block, (n,)."""
        power = self.sum_blocks(self.matrix.diagonal() + self.mean.square())
        return rounding_variance(power, torch.tensor(self.widths, device="cpu"), self.precision)

    def varies(self) -> Tensor:
        """Return which blocks vary by more than rounding, (n,)."""
        return self.sum_blocks(self.matrix.diagonal()) > self.rounding() * torch.tensor(self.widths, device="cpu")


def check_representations(representations: Sequence[Tensor]) -> None:
    """Raise a HeadError if representations are not matrices (N, d_i) of the same N."""
    first = representations[0] if representations else None
    if first is None or any(x.ndim != 2 or len(x) != len(first) or not x.shape[1] for x in representations):
        shapes = ", ".join(str(tuple(x.shape)) for x in representations)
        raise HeadError(
            f"representations do not fit together: got {shapes}; expected (N, d), d above 0, all of the same N"
        )


def rounding_variance(power: Tensor, width: Tensor | int, precision: float) -> Tensor:
    """Bound the variance of a direction by rounding alone, of vectors of a width, mean square and machine epsilon."""
    single = torch.finfo(torch.float32).eps
    return power * ((4 * precision) ** 2 / width + (16 * min(precision, single)) ** 2)


class RunningCovariance:
    """Mean and covariance of vectors that come in batches, summed in float64 about the mean of the first batch."""

    def __init__(self, unit: Unit = "head") -> None:
        if unit not in get_args(Unit):
            raise HeadError(f"unknown unit {unit!r}; expected one of {', '.join(get_args(Unit))}")
        self.unit = unit
        self.labels: list[str] = []
        self.widths: list[int] = []
        self.count, self.precision = 0, 0.0

    def add(self, modules: Sequence[tuple[str, Tensor]]) -> None:
        """Add one batch: the name of each module and its vectors (N, H, d), of the same tokens."""
        if len({len(vectors) for _, vectors in modules}) > 1:
            lengths = ", ".join(f"{name}: {len(vectors)}" for name, vectors in modules)
            raise HeadError(
                f"modules see different numbers of tokens ({lengths}); choose modules that read the same "
                "ones, as by kinds=('encoder',), and models with one tokenizer"
            )
        if not self.labels:
            for name, vectors in modules:
                heads, width = vectors.shape[1:]
                self.widths += [width] * heads if self.unit == "head" else [heads * width]
                self.labels += [f"{name}:{head}" for head in range(heads)] if self.unit == "head" else [name]
        device = modules[0][1].device  # layers of one model may lie on several
        joined = torch.cat([vectors.detach().flatten(1).to(device) for _, vectors in modules], 1)
        self.precision = max(self.precision, torch.finfo(joined.dtype).eps)
        if not len(joined):
            return
        joined = joined.double()
        if not self.count:
            self._shift = joined.mean(0)
            self._sum = torch.zeros_like(self._shift)
            self._scatter = torch.diag(self._sum)
        joined = joined - self._shift
        for start in range(0, joined.shape[1], PANEL):  # the lower half of a symmetric matrix
            part = slice(start, start + PANEL)
            self._scatter[start:, part].addmm_(joined[:, start:].mT, joined[:, part])
        self._sum += joined.sum(0)
        self.count += len(joined)

    def result(self, name: str) -> JointCovariance:
        """Return mean and covariance of all vectors, on the CPU; error messages call them `name`."""
        if self.count < 2:
            raise HeadError(f"{name}: got {self.count} unpadded tokens; similarity needs at least 2")
        if not bool(self._scatter.isfinite().all() and self._shift.isfinite().all()):
            raise HeadError(f"{name} is not finite; look for NaN or infinity in the weights")
        mean = self._sum / self.count
        lower = self._scatter.tril()
        matrix = (lower + lower.tril(-1).mT - self.count * torch.outer(mean, mean)) / (self.count - 1)
        return JointCovariance(
            labels=tuple(self.labels),
            widths=tuple(self.widths),
            mean=(mean + self._shift).cpu(),
            matrix=matrix.cpu(),
            count=self.count,
            precision=self.precision,
        )


class Covariances:
    """The `Observer` behind `head_covariances` and, with all modules together, `layer_covariance`."""

    part: Part = "outputs"

    def __init__(self, *, unit: Unit = "head", together: bool = False) -> None:
        self.unit, self.together = unit, together
        self.running: dict[str, RunningCovariance] = {}

    def add(self, readings: Readings) -> None:
        """Add the readings of one batch."""
        vectors = [(name, unpadded_vectors(reading, "outputs")) for name, reading in readings]
        groups = {"the layers": vectors} if self.together else {name: [(name, heads)] for name, heads in vectors}
        for name, group in groups.items():
            self.running.setdefault(name, RunningCovariance(self.unit)).add(group)

    def result(self) -> dict[str, JointCovariance]:
        """Return the covariance of each module, or of all together; heads are labelled `module:head`."""
        return {name: running.result(name) for name, running in self.running.items()}


def head_covariances(
    model: PreTrainedModel, batches: Batches, *, modules: str = "*", progress: Progress = False
) -> dict[str, JointCovariance]:
    """Return the covariance of all heads of each layer, for `svcca` and `cka` between the heads of one layer.

    Padding does not count. Memory is (H·d)² numbers a layer for any number of tokens.

    Args:
        model: stock or edited; its mode does not change.
        batches: keyword arguments for the model; read once.
        modules: glob on module paths.
        progress: True for a bar, or a function of the number of finished batches and the total (None if unknown).

    Returns:
        Module path → covariance, a block a head, labelled `0`, `1`, …. A module that serves several layers (ALBERT)
        has one for each use, `path[0]`, `path[1]`, ….

    Raises:
        HeadError: no batches, fewer than two tokens, or numbers that are not finite.
        CalibrationError: the model does not take the batches.
        UnsupportedModelError: the model's family is not known.

    Example:
        >>> covariances = head_covariances(model, [batch])
        >>> covariances["encoder.layer.0.attention.self"].matrix.shape
        torch.Size([24, 24])
    """
    covariances = Covariances()
    observe(model, batches, [covariances], modules=modules, progress=progress)
    joints = covariances.result()
    return {name: replace(joint, labels=tuple(map(str, range(len(joint.labels))))) for name, joint in joints.items()}


def head_samples(
    model: PreTrainedModel,
    batches: Batches,
    tokens: int = 1000,
    *,
    seed: int = 0,
    modules: str = "*",
    progress: Progress = False,
) -> dict[str, Tensor]:
    """Return the outputs of heads at random tokens, drawn without replacement.

    Other arguments and errors are those of `head_covariances`.

    Args:
        tokens: number of tokens, at least 1; all if there are fewer.
        seed: layers that see the same tokens draw the same ones.

    Returns:
        Module path → (N, H, d), in the model's dtype, on the CPU; keys as for `head_covariances`.

    Example:
        >>> head_samples(model, [batch], tokens=5)["encoder.layer.0.attention.self"].shape
        torch.Size([5, 3, 8])
    """
    if tokens < 1:
        raise HeadError(f"got {tokens} tokens to draw; expected at least 1")
    draws: dict[str, tuple[torch.Generator, Tensor, Tensor]] = {}  # generator, lots, vectors
    for (readings,) in read_heads([model], batches, "outputs", modules=modules, progress=progress):
        for name, reading in readings:  # every token gets a random lot, and the lowest are kept
            vectors = unpadded_vectors(reading, "outputs").cpu()
            new = torch.Generator().manual_seed(seed), torch.empty(0, device="cpu"), vectors[:0]
            generator, lots, kept = draws.get(name, new)
            lots = torch.cat([lots, torch.rand(len(vectors), generator=generator, device="cpu")])
            lowest = lots.argsort()[:tokens]
            draws[name] = generator, lots[lowest], torch.cat([kept, vectors])[lowest]
    return {name: kept for name, (_, _, kept) in draws.items()}


def layer_covariance(
    model: PreTrainedModel,
    batches: Batches,
    *,
    unit: Unit = "layer",
    kinds: Collection[Kind] = KINDS,
    modules: str = "*",
    progress: Progress = False,
) -> JointCovariance:
    """Return the covariance of several layers together, for `svcca` and `cka` between layers.

    Memory and time grow with (L·H·d)²: choose layers by `modules` if there are many. Layers must see the same tokens,
    so an encoder's and a decoder's cannot be compared; a decoder's `decoder` and `cross` can. Other arguments and
    errors are those of `head_covariances`.

    Args:
        unit: a block is a `layer` with all its heads, or each `head` of each layer.
        kinds: attention types.

    Returns:
        The covariance, labelled with the keys of `head_covariances`, or with `key:head`.

    Raises:
        HeadError: layers see different tokens.
        UnsupportedModelError: the model has no attention of these types.

    Example:
        >>> layer_covariance(model, [batch]).labels
        ('encoder.layer.0.attention.self', 'encoder.layer.1.attention.self')
    """
    together = Covariances(unit=unit, together=True)
    observe(model, batches, [together], kinds, modules, progress)
    (joint,) = together.result().values()
    return joint


def model_covariances(
    model: PreTrainedModel,
    other: PreTrainedModel,
    batches: Batches,
    *,
    unit: Unit = "head",
    progress: Progress = False,
) -> dict[str, JointCovariance]:
    """Return the covariance of each layer of one model with one of another, for `svcca` and `cka` between models.

    Both models read the same batches, so they must share a tokenizer. They may differ in heads and widths; modules of
    the same type and position are compared. Other arguments and errors are those of `head_covariances`.

    Args:
        model: stock or edited; its layers are the rows of the results.
        other: the model to compare with; its layers are the columns.
        unit: a block is each `head`, or a `layer` with all its heads.

    Returns:
        Module path in `model` → covariance, whose first `leading` blocks are `model`'s. For a module that serves
        several layers, one for each use, paired in order.

    Raises:
        HeadError: the models differ in their number of layers, or see different tokens.

    Example:
        >>> joint = model_covariances(model, model, [batch])["encoder.layer.0.attention.self"]
        >>> joint.matrix.shape, joint.leading
        (torch.Size([48, 48]), 3)
    """
    paths = [{(site.kind, site.layer): site.name for site in find_attention(either)} for either in (model, other)]
    if paths[0].keys() != paths[1].keys():
        raise HeadError(
            f"the models have {len(paths[0])} and {len(paths[1])} attention modules, which do not pair by kind and "
            "place; compare models of the same depth"
        )
    counterparts = {path: paths[1][place] for place, path in paths[0].items()}
    sums: dict[str, RunningCovariance] = {}
    leading: dict[str, int] = {}
    for first, second in read_heads([model, other], batches, "outputs", progress=progress):
        if len(first) != len(second):  # as of one module (ALBERT) that serves several layers
            raise HeadError(
                f"{len(first)} attention modules ran in one model and {len(second)} in the other; compare models of "
                "the same depth"
            )
        others = dict(second)
        for name, reading in first:
            path = reading.site.name
            match = counterparts[path] + name.removeprefix(path)
            if match not in others:
                raise HeadError(f"{name} has no counterpart: no {match!r} ran in the other model")
            vectors = unpadded_vectors(reading, "outputs")
            leading[name] = vectors.shape[1] if unit == "head" else 1
            running = sums.setdefault(name, RunningCovariance(unit))
            running.add([(path, vectors), (counterparts[path], unpadded_vectors(others[match], "outputs"))])
    return {name: replace(running.result(name), leading=leading[name]) for name, running in sums.items()}
