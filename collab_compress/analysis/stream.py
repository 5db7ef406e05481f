"""Run a model over batches and hand on what its attention heads computed, one batch at a time."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from fnmatch import fnmatch
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from collab_compress.architectures import KINDS, Kind
from collab_compress.calibration import as_batch, evaluation_mode, run_batch
from collab_compress.calibration.gather import forward_arguments
from collab_compress.calibration.tokenization import vocabulary_size
from collab_compress.devices import float64_device
from collab_compress.errors import HeadError
from collab_compress.heads import Part, Reading, Tap

Progress: TypeAlias = bool | Callable[[int, int | None], None]
Batches: TypeAlias = Iterable[Mapping[str, Tensor]]

_Item = TypeVar("_Item")


Readings: TypeAlias = list[tuple[str, Reading]]
"""What attention modules computed in one forward pass, in the order in which they ran, by module path.

A module that ran several times, as one that serves several layers (ALBERT), has the names `path[0]`, `path[1]`, ….
"""


def with_progress(items: Iterable[_Item], progress: Progress, label: str) -> Iterator[_Item]:
    """Yield `items` and report each finished one.

    Args:
        items: batches, or other work.
        progress: True for a bar, False for nothing, or a function of the number of finished items and the total
            (None if unknown).
        label: text of the bar.

    Example:
        >>> list(with_progress("ab", lambda done, total: print(done, "of", total), "letters"))
        1 of 2
        2 of 2
        ['a', 'b']
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
    part: Part,
    *,
    kinds: Collection[Kind] = KINDS,
    modules: str = "*",
    progress: Progress = False,
) -> Iterator[list[Readings]]:
    """Run every model on each batch, without gradients or dropout, and yield each model's readings of the batch.

    Arguments and errors are those of `layer_covariance`.
    """
    ran = False
    with ExitStack() as stack:
        taps = [stack.enter_context(Tap(model, part, kinds)) for model in models]
        for model, tap in zip(models, taps, strict=True):
            if not any(fnmatch(site.name, modules) for site in tap.sites):
                paths = ", ".join(site.name for site in tap.sites[:3])
                raise HeadError(f"no attention module matches {modules!r}; there are {paths}, …")
            stack.enter_context(evaluation_mode(model))
        for batch in with_progress(batches, progress, "batches"):
            ran = True
            for model in models:
                run_batch(model, as_batch(batch))
            yield [_named(tap.take(), modules) for tap in taps]
    if not ran:
        raise HeadError("no batches to run the model on; pass some, and a list where they are read more than once")


def random_tokens(model: PreTrainedModel, count: int, length: int, seed: int) -> dict[str, Any]:
    """Return `count` sequences of random tokens without padding, and as many targets for an encoder–decoder.

    Raises:
        HeadError: the model does not read tokens.
    """
    size = vocabulary_size(model)
    if size is None or "input_ids" not in forward_arguments(model):
        raise HeadError(f"{type(model).__name__} reads no tokens; pass inputs=, or leave this measure out")
    generator = torch.Generator().manual_seed(seed)
    batch = {"input_ids": torch.randint(size, (count, length), generator=generator, device="cpu")}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if model.config.is_encoder_decoder:
        targets = vocabulary_size(model, target=True) or size
        batch["decoder_input_ids"] = torch.randint(targets, (count, length), generator=generator, device="cpu")
    return batch


class Observer(Protocol):
    """Sums up readings of heads."""

    part: Part

    def add(self, readings: Readings) -> None:
        """Add the readings of one batch."""


class Means:
    """An `Observer` that averages over the positions of each module.

    Args:
        part: the part of readings that is measured.
        sums: function of a reading to the sum over positions that count, and their number; None where there is
            nothing to measure.
    """

    def __init__(self, part: Part, sums: Callable[[Reading], tuple[Tensor, int] | None]) -> None:
        self.part, self._measure = part, sums
        self._sums: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()

    def add(self, readings: Readings) -> None:
        """Add the readings of one batch."""
        for name, reading in readings:
            if (measured := self._measure(reading)) is not None:
                total, count = measured
                self._sums[name] = self._sums.get(name, 0) + total.cpu()
                self._counts[name] += count

    def result(self) -> dict[str, Tensor]:
        """Return the means of each module, or raise a HeadError where none is defined."""
        for name, total in self._sums.items():
            if not self._counts[name]:
                raise HeadError(
                    f"{name} saw only padding, or single tokens; pass batches of sequences of two or more tokens"
                )
            if not bool(total.isfinite().all()):
                raise HeadError(f"{name}: what its heads compute is not finite; look for NaN or infinity in weights")
        return {name: total / self._counts[name] for name, total in self._sums.items()}


def observe(
    model: PreTrainedModel,
    batches: Batches,
    observers: Iterable[Observer],
    kinds: Collection[Kind] = KINDS,
    modules: str = "*",
    progress: Progress = False,
) -> None:
    """Run a model on all batches for observers of one part of readings; as `read_heads`."""
    observers = list(observers)
    part = observers[0].part
    for (readings,) in read_heads([model], batches, part, kinds=kinds, modules=modules, progress=progress):
        for observer in observers:
            observer.add(readings)


def unpadded_vectors(reading: Reading, part: Part) -> Tensor:
    """Return the vectors of each head without padding, (N, H, w); of `probs`, w is the number of keys.

    They lie on a device that has float64.
    """
    vectors: Tensor = getattr(reading, part)
    if part == "probs":
        vectors = vectors.transpose(1, 2)  # (B, T, H, S)
    vectors, mask = vectors.to(float64_device(vectors.device)), reading.mask_of(part)
    return vectors.flatten(0, 1) if mask is None else vectors[mask.to(vectors.device)]


def _named(readings: Sequence[Reading], modules: str = "*") -> Readings:
    """Return the readings of matching modules, by name."""
    counts = Counter(reading.site.name for reading in readings)
    numbers: dict[str, int] = {}
    named = []
    for reading in readings:
        path = reading.site.name
        number = numbers[path] = numbers.get(path, -1) + 1
        if fnmatch(path, modules):
            named.append((path if counts[path] == 1 else f"{path}[{number}]", reading))
    return named
