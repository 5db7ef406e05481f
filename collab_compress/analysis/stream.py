"""Run a model over batches and pass on the readings of its heads, one batch at a time."""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from fnmatch import fnmatch
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from collab_compress.architectures import KINDS, Kind
from collab_compress.calibration import evaluation_mode, run_batch
from collab_compress.errors import HeadError
from collab_compress.heads import Part, Reading, Tap

Progress: TypeAlias = bool | Callable[[int, int | None], None]
Batches: TypeAlias = Iterable[Mapping[str, Tensor]]

_Item = TypeVar("_Item")
_Value = TypeVar("_Value")


class Use(NamedTuple):
    """One use of an attention module in a forward pass: a module that serves several layers (ALBERT) has several.

    Args:
        name: path of the module in the model.
        number: which use it is, from 0.
    """

    name: str
    number: int


Shown: TypeAlias = list[tuple[Use, Reading]]


def with_progress(items: Iterable[_Item], progress: Progress, label: str) -> Iterator[_Item]:
    """Yield `items`, and report each finished one.

    Args:
        items: batches, or other work.
        progress: True for a bar, False for nothing, or a function of the number of finished items and the total
            (None if unknown).
        label: text of the bar.
    """
    total = len(items) if isinstance(items, Sized) else None
    if progress is True:
        yield from tqdm(items, desc=label, total=total)
        return
    for done, item in enumerate(items, 1):
        yield item
        if callable(progress):
            progress(done, total)


def read_heads(
    models: Sequence[PreTrainedModel],
    batches: Batches,
    parts: Part | Collection[Part],
    consume: Callable[[list[Shown]], None],
    *,
    kinds: Collection[Kind] = KINDS,
    modules: str = "*",
    progress: Progress = False,
) -> None:
    """Run every model on each batch, without gradients or dropout, and pass on the readings of their heads.

    Args:
        models: stock or edited; their mode does not change.
        batches: keyword arguments for the models; read once, one at a time.
        parts: what to read, as for `Tap`.
        consume: called once a batch with the readings of each model, in the order in which modules ran.
        kinds: which kinds of attention.
        modules: glob on module paths; only matching modules are passed on.
        progress: as for `with_progress`.

    Raises:
        HeadError: there are no batches, or no module matches.
        CalibrationError: a model does not take such batches.
        UnsupportedModelError: a model's family is not known, or it has no attention of these kinds.
    """
    ran = False
    with ExitStack() as stack:
        taps = [stack.enter_context(Tap(model, parts, kinds)) for model in models]
        for model, tap in zip(models, taps, strict=True):
            if not any(fnmatch(site.name, modules) for site in tap.sites):
                raise HeadError(f"no attention module matches {modules!r}; there are {_names(tap)}")
            stack.enter_context(evaluation_mode(model))
        for batch in with_progress(batches, progress, "batches"):
            ran = True
            shown = []
            for model, tap in zip(models, taps, strict=True):
                run_batch(model, dict(batch))
                shown.append(_uses(tap.take(), modules))
            consume(shown)
    if not ran:
        raise HeadError("no batches to run the model on; pass some, and a list where they are read more than once")


class Observer(Protocol):
    """Collects readings of heads while another measure runs the model."""

    part: Part

    def take(self, shown: Shown) -> None:
        """Add the readings of one batch, in the order in which modules ran."""


def observe(
    model: PreTrainedModel,
    batches: Batches,
    observer: Observer,
    kinds: Collection[Kind],
    modules: str,
    progress: Progress,
) -> None:
    """Run a model on all batches for one observer; other arguments and errors are those of `read_heads`."""

    def consume(shown: list[Shown]) -> None:
        observer.take(shown[0])

    read_heads([model], batches, observer.part, consume, kinds=kinds, modules=modules, progress=progress)


def observed(
    model: PreTrainedModel, batches: Batches, observers: Sequence[Observer], kinds: Collection[Kind] = KINDS
) -> Generator[Mapping[str, Tensor], None, None]:
    """Yield batches for another measure and pass the readings of each to observers, so that one pass serves all.

    The model has hooks until the generator ends: wrap it in `contextlib.closing`, as the other measure may fail.

    Args:
        model: runs on each batch, in the other measure, before the next is requested.
        batches: keyword arguments for the model.
        observers: get the readings.
        kinds: which kinds of attention.
    """
    with Tap(model, {observer.part for observer in observers}, kinds) as tap:
        for batch in batches:
            yield batch
            shown = _uses(tap.take(), "*")
            for observer in observers:
                observer.take(shown)


def by_name(values: Mapping[Use, _Value]) -> dict[str, _Value]:
    """Return values by name: the module's path, with `[0]`, `[1]`, … for a module with several uses."""
    shared = {use.name for use in values if use.number}
    return {f"{use.name}[{use.number}]" if use.name in shared else use.name: value for use, value in values.items()}


def real_vectors(reading: Reading, part: Part) -> Tensor:
    """Return the vectors of one part without padding, (N, H, w).

    Args:
        reading: of a module.
        part: `outputs`, `queries`, `values`, `keys`, or `probs` (whose vectors are as long as there are keys).
    """
    vectors: Tensor = getattr(reading, part)
    if part == "probs":
        vectors = vectors.transpose(1, 2)  # (B, T, H, S)
    mask = reading.real.key if part in ("values", "keys") else reading.real.query
    return vectors.flatten(0, 1) if mask is None else vectors[mask.to(vectors.device)]


def _uses(readings: Iterable[Reading], modules: str) -> Shown:
    counts: dict[str, int] = {}
    shown = []
    for reading in readings:
        name = reading.site.name
        counts[name] = counts.get(name, -1) + 1
        if fnmatch(name, modules):
            shown.append((Use(name, counts[name]), reading))
    return shown


def _names(tap: Tap) -> str:
    return ", ".join(site.name for site in tap.sites[:3]) + (", …" if len(tap.sites) > 3 else "")


class Means:
    """An `Observer` that averages a measure of each module's heads over positions that are no padding.

    Args:
        part: what to measure.
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
            sums = [matrix.cpu() for matrix in self._measure(vectors.double())]
            previous = self._sums.get(use, [torch.zeros_like(matrix) for matrix in sums])
            self._sums[use] = [old + new for old, new in zip(previous, sums, strict=True)]
            self._counts[use] = self._counts.get(use, 0) + len(vectors)

    def means(self) -> dict[str, tuple[Tensor, ...]]:
        """Return the means.

        Raises:
            HeadError: a module saw no real token, or the sums are not finite.
        """
        for use, totals in self._sums.items():
            if not self._counts[use]:
                raise HeadError(f"{use.name} saw no token that is no padding; pass batches with tokens")
            if not all(bool(total.isfinite().all()) for total in totals):
                raise HeadError(
                    f"{use.name}: what its heads compute is not finite; look for NaN or infinity in weights"
                )
        return by_name({use: tuple(t / self._counts[use] for t in totals) for use, totals in self._sums.items()})
