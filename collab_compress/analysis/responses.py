"""Outputs of heads, layers or two models at the same tokens: covariances for CKA and SVCCA, or a sample of tokens."""

from collections.abc import Collection, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis.covariance import JointCovariance, RunningCovariance
from collab_compress.analysis.stream import Batches, Progress, Shown, Use, by_name, observe, read_heads, real_vectors
from collab_compress.architectures import FAMILIES, KINDS, Kind, find_attention
from collab_compress.errors import HeadError
from collab_compress.heads import Part

Unit = Literal["head", "layer"]


def head_covariances(
    model: PreTrainedModel,
    batches: Batches,
    *,
    part: Part = "outputs",
    kinds: Collection[Kind] = KINDS,
    modules: str = "*",
    progress: Progress = False,
) -> dict[str, JointCovariance]:
    """Return the covariance of all heads of each layer, for `svcca` and `cka` between the heads of one layer.

    Memory is (H·d)² numbers a layer for any number of tokens; padding does not count.

    Args:
        model: stock or edited; left in the mode it was in.
        batches: keyword arguments for the model; read once.
        part: what to compare: `outputs`, `queries`, `values` or `keys`.
        kinds: which kinds of attention.
        modules: glob on module paths.
        progress: True for a bar, or a function of how many batches are done and how many there are (or None).

    Returns:
        Module path → covariance, a block a head, labelled `0`, `1`, …. A module that serves several layers (ALBERT)
        has one for each use, `path[0]`, `path[1]`, ….

    Raises:
        HeadError: no batches, fewer than two tokens, keys of a collaborative module, or numbers that are not finite.
        CalibrationError: the model does not take such batches.
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.
    """
    covariances = Covariances(part)
    observe(model, batches, covariances, kinds, modules, progress)
    return covariances.result()


def head_samples(
    model: PreTrainedModel,
    batches: Batches,
    tokens: int = 1000,
    *,
    seed: int = 0,
    part: Part = "outputs",
    kinds: Collection[Kind] = KINDS,
    modules: str = "*",
    progress: Progress = False,
) -> dict[str, Tensor]:
    """Return the outputs of heads at tokens drawn at random, without replacement.

    Other arguments and errors are those of `head_covariances`.

    Args:
        tokens: number of tokens to draw; all if there are fewer.
        seed: of the draw. Layers that see the same tokens draw the same ones.

    Returns:
        Module path → (N, H, d), in the model's dtype, on the CPU; keys as for `head_covariances`.

    Raises:
        HeadError: `tokens` is below 1.
    """
    samples = Samples(tokens, seed, part)
    observe(model, batches, samples, kinds, modules, progress)
    return samples.result()


class Covariances:
    """The `Observer` behind `head_covariances`."""

    def __init__(self, part: Part = "outputs", kinds: Collection[Kind] = KINDS) -> None:
        self.part, self.kinds = part, kinds
        self._running: dict[Use, RunningCovariance] = {}

    def take(self, shown: Shown) -> None:
        """Add one more batch."""
        for use, reading in shown:
            if reading.site.kind in self.kinds:
                vectors = real_vectors(reading, self.part)  # (N, H, d)
                if use not in self._running:
                    self._running[use] = RunningCovariance((vectors.shape[2],) * vectors.shape[1])
                self._running[use].add(vectors.flatten(1))

    def result(self) -> dict[str, JointCovariance]:
        """Return the covariance of each module's heads."""
        labels = {use: tuple(map(str, range(len(found.widths)))) for use, found in self._running.items()}
        return by_name({use: found.result(labels[use], use.name) for use, found in self._running.items()})


class Samples:
    """The `Observer` behind `head_samples`, with the same arguments."""

    def __init__(self, tokens: int, seed: int = 0, part: Part = "outputs") -> None:
        if tokens < 1:
            raise HeadError(f"got {tokens} tokens to draw; expected at least 1")
        self.tokens, self.seed, self.part = tokens, seed, part
        self._draws: dict[Use, tuple[torch.Generator, Tensor, Tensor]] = {}

    def take(self, shown: Shown) -> None:
        """Draw from one more batch."""
        for use, reading in shown:
            found = real_vectors(reading, self.part).cpu()
            new = torch.Generator().manual_seed(self.seed), torch.empty(0), found[:0]
            generator, lots, kept = self._draws.get(use, new)
            lots = torch.cat([lots, torch.rand(len(found), generator=generator)])
            best = lots.argsort()[: self.tokens]
            self._draws[use] = generator, lots[best], torch.cat([kept, found])[best]

    def result(self) -> dict[str, Tensor]:
        """Return what `head_samples` returns."""
        return by_name({use: kept for use, (_, _, kept) in self._draws.items()})


def layer_covariance(
    model: PreTrainedModel,
    batches: Batches,
    *,
    unit: Unit = "layer",
    part: Part = "outputs",
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

    Returns:
        The covariance, labelled with module paths (`path[0]`, `path[1]`, … where one serves several layers), or with
        `path:head`.

    Raises:
        HeadError: layers see different tokens.
    """
    layers = LayerCovariance(unit, part)
    observe(model, batches, layers, kinds, modules, progress)
    return layers.result()


def model_covariances(
    model: PreTrainedModel,
    other: PreTrainedModel,
    batches: Batches,
    *,
    unit: Unit = "head",
    pairs: Mapping[str, str] | None = None,
    part: Part = "outputs",
    kinds: Collection[Kind] = KINDS,
    progress: Progress = False,
) -> dict[str, JointCovariance]:
    """Return the covariance of each layer of one model with one of another, for `svcca` and `cka` between models.

    Both models read the same batches, so they must share a tokenizer. They may differ in heads and widths. Other
    arguments and errors are those of `head_covariances`.

    Args:
        model: stock or edited; its layers are the rows of the results.
        other: the model to compare with; its layers are the columns.
        unit: a block is each `head`, or a `layer` with all its heads.
        pairs: path of a module in `model` → path in `other`; by default modules of the same kind and place.

    Returns:
        Module path in `model` → covariance, whose first `leading` blocks are `model`'s. For a module that serves
        several layers, one for each use, paired in order.

    Raises:
        HeadError: modules cannot be paired, or the models see different tokens.
    """
    paired = _paired(model, other, kinds) if pairs is None else dict(pairs)
    gathered: dict[Use, _Together] = {}

    def consume(shown: list[Shown]) -> None:
        theirs = dict(shown[1])
        for use, reading in shown[0]:
            if use.name in paired:
                match = Use(paired[use.name], use.number)
                if match not in theirs:
                    raise HeadError(f"{use.name} has no counterpart: no {match.name!r} ran in the other model")
                both = real_vectors(reading, part), real_vectors(theirs[match], part)
                gathered.setdefault(use, _Together(unit)).add({use.name: both[0]}, {match.name: both[1]})

    read_heads([model, other], batches, part, consume, kinds=kinds, progress=progress)
    missing = set(paired) - {use.name for use in gathered}
    if missing:
        raise HeadError(f"the model has no attention of these kinds at {', '.join(sorted(missing))}; check the pairs")
    return by_name({use: together.result(use.name) for use, together in gathered.items()})


class LayerCovariance:
    """The `Observer` behind `layer_covariance`."""

    def __init__(self, unit: Unit = "layer", part: Part = "outputs", kinds: Collection[Kind] = KINDS) -> None:
        self.part, self.kinds, self._together = part, kinds, _Together(unit)

    def take(self, shown: Shown) -> None:
        """Add one more batch."""
        readings = {use: reading for use, reading in shown if reading.site.kind in self.kinds}
        self._together.add(by_name({use: real_vectors(reading, self.part) for use, reading in readings.items()}))

    def result(self) -> JointCovariance:
        """Return the covariance of all layers."""
        return self._together.result("the layers")


class _Together:
    """Running covariance of several modules."""

    def __init__(self, unit: Unit) -> None:
        if unit not in get_args(Unit):
            raise HeadError(f"unknown unit {unit!r}; expected one of {', '.join(get_args(Unit))}")
        self.unit = unit
        self.running: RunningCovariance | None = None
        self.labels: list[str] = []
        self.leading = 0

    def add(self, vectors: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None) -> None:
        """Add vectors (N, H, d) of each module, and of those to compare them with."""
        first, second = list(vectors.items()), list((others or {}).items())
        lengths = {name: len(found) for name, found in first + second}
        if len(set(lengths.values())) > 1:
            raise HeadError(
                f"modules see different numbers of tokens ({', '.join(f'{n}: {k}' for n, k in lengths.items())}); "
                "choose modules that read the same ones, as by kinds=('encoder',), and models with one tokenizer"
            )
        if self.running is None:
            widths: list[int] = []
            for name, found in first + second:
                heads, width = found.shape[1:]
                widths += [width] * heads if self.unit == "head" else [heads * width]
                self.labels += [f"{name}:{head}" for head in range(heads)] if self.unit == "head" else [name]
            self.running = RunningCovariance(tuple(widths))
            self.leading = sum(found.shape[1] if self.unit == "head" else 1 for _, found in first) if second else 0
        device = first[0][1].device  # layers of one model may lie on several
        self.running.add(torch.cat([found.flatten(1).to(device) for _, found in first + second], 1))

    def result(self, name: str) -> JointCovariance:
        if self.running is None:
            raise HeadError(f"{name}: no attention module was used")
        return self.running.result(tuple(self.labels), name, self.leading)


def _paired(model: PreTrainedModel, other: PreTrainedModel, kinds: Collection[Kind]) -> dict[str, str]:
    """Pair modules of the same kind and place."""
    ours, theirs = (
        {(site.kind, site.layer): site.name for site in find_attention(each, FAMILIES, kinds=kinds)}
        for each in (model, other)
    )
    if ours.keys() != theirs.keys():
        raise HeadError(
            f"the models have {len(ours)} and {len(theirs)} attention modules, which do not pair by kind and place; "
            "pass pairs={'path in the model': 'path in the other'}"
        )
    return {ours[place]: theirs[place] for place in ours}
