"""Run a model over batches and hand on what its heads show, one batch at a time."""

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
    """Yield `items`, and report each one that is done.

    Args:
        items: what takes time, as batches.
        progress: True for a bar, False for nothing, or a function of how many are done and how many there are (None
            where that is not known).
        label: what the bar says.
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
    """Run every model on each batch, without gradients or dropout, and pass on what their heads showed.

    Args:
        models: stock or edited; left in the mode they were in.
        batches: keyword arguments for the models; read once, one at a time.
        parts: what to read, as for `Tap`.
        consume: called once a batch with what each model showed, in the order in which modules were used.
        kinds: which kinds of attention.
        modules: glob on module paths; only matching modules are passed on.
        progress: as for `with_progress`.

    Raises:
        HeadError: there are no batches, or no module matches.
        CalibrationError: a model does not take such batches.
        UnsupportedModelError: a model's family is not known, or it has no attention of these kinds.
    """
    given = False
    with ExitStack() as stack:
        taps = [stack.enter_context(Tap(model, parts, kinds)) for model in models]
        for model, tap in zip(models, taps, strict=True):
            if not any(fnmatch(site.name, modules) for site in tap.sites):
                raise HeadError(f"no attention module matches {modules!r}; there are {_names(tap)}")
            stack.enter_context(evaluation_mode(model))
        for batch in with_progress(batches, progress, "batches"):
            given = True
            shown = []
            for model, tap in zip(models, taps, strict=True):
                run_batch(model, dict(batch))
                shown.append(_uses(tap.take(), modules))
            consume(shown)
    if not given:
        raise HeadError("no batches to run the model on; pass some, and a list where they are read more than once")


class Observer(Protocol):
    """Takes in what heads show while another measure runs the model."""

    part: Part

    def take(self, shown: Shown) -> None:
        """Take in what one batch showed, in the order in which modules were used."""


def observe(
    model: PreTrainedModel,
    batches: Batches,
    observer: Observer,
    kinds: Collection[Kind],
    modules: str,
    progress: Progress,
) -> None:
    """Run a model on all batches for one observer alone; the rest, and what goes wrong, is as for `read_heads`."""
    read_heads(
        [model], batches, observer.part, lambda shown: observer.take(shown[0]), kinds=kinds, modules=modules,
        progress=progress,
    )  # fmt: skip


def observed(
    model: PreTrainedModel, batches: Batches, observers: Sequence[Observer], kinds: Collection[Kind] = KINDS
) -> Generator[Mapping[str, Tensor], None, None]:
    """Yield batches for another measure, and let observers see what heads did with each, so that one pass serves all.

    It watches the model until it is used up or closed: wrap it in `contextlib.closing`, as that measure may fail.

    Args:
        model: that the other measure runs on each batch before it asks for the next.
        batches: keyword arguments for the model.
        observers: what is to see them too.
        kinds: which kinds of attention.
    """
    with Tap(model, {observer.part for observer in observers}, kinds) as tap:
        for batch in batches:
            yield batch
            shown = _uses(tap.take(), "*")
            for observer in observers:
                observer.take(shown)


def by_name(values: Mapping[Use, _Value]) -> dict[str, _Value]:
    """Key by name: the module's path, with `[0]`, `[1]`, … for the uses of a module that has several."""
    shared = {use.name for use in values if use.number}
    return {f"{use.name}[{use.number}]" if use.name in shared else use.name: value for use, value in values.items()}


def real_vectors(reading: Reading, part: Part) -> Tensor:
    """Pick the vectors of one part that are no padding, (N, H, w).

    Args:
        reading: what a module showed.
        part: `outputs`, `queries`, `values`, `keys`, or `rows` (whose vectors are as long as there are keys).
    """
    vectors: Tensor = getattr(reading, part)
    if part == "rows":
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
    """Averages a measure of the heads of each module over real positions; an `Observer`.

    Args:
        part: what is measured.
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
            new = [each.cpu() for each in self._measure(vectors.double())]
            old = self._sums.get(use, [torch.zeros_like(each) for each in new])
            self._sums[use] = [before + each for before, each in zip(old, new, strict=True)]
            self._counts[use] = self._counts.get(use, 0) + len(vectors)

    def means(self) -> dict[str, tuple[Tensor, ...]]:
        """Divide by the number of positions.

        Raises:
            HeadError: a module saw no real token, or the sums are not finite.
        """
        for use, totals in self._sums.items():
            if not self._counts[use]:
                raise HeadError(f"{use.name} saw no token that is no padding; pass batches with real tokens")
            if not all(bool(total.isfinite().all()) for total in totals):
                raise HeadError(
                    f"{use.name}: what its heads compute is not finite; look for NaN or infinity in weights"
                )
        return by_name({use: tuple(t / self._counts[use] for t in totals) for use, totals in self._sums.items()})
