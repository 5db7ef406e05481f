"""Run a model over batches and hand on what its attention heads computed, one batch at a time."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import KINDS, Kind, find_attention
from collab_compress.calibration import as_batch, evaluation_mode, run_batch
from collab_compress.calibration.encode import vocabulary_size
from collab_compress.calibration.gather import forward_arguments
from collab_compress.devices import float64_device
from collab_compress.errors import HeadError
from collab_compress.heads import HeadRecord, Part, Recorder

Batches: TypeAlias = Iterable[Mapping[str, Tensor]]
Progress: TypeAlias = Callable[[int, int | None], None]
"""Function of the number of finished items and their total (None if unknown)."""

HeadRecords: TypeAlias = list[tuple[str, HeadRecord]]
"""What attention modules computed in one forward pass, in the order in which they ran, by module path.

A module that ran several times, because it serves several layers (ALBERT), has the names `path[0]`, `path[1]`, ….
"""

Measure: TypeAlias = Callable[[HeadRecord], tuple[Tensor, int] | None]
"""Function of a reading to the sum of a measure over positions, and their number; None if it does not apply."""

_Item = TypeVar("_Item")


def with_progress(items: Iterable[_Item], progress: Progress | None) -> Iterator[_Item]:
    """Yield `items`, and report each finished one.

    Args:
        items: batches, or other work.
        progress: called with the number of finished items and the total (None if unknown); None for no report.

    Example:
        >>> list(with_progress("ab", lambda done, total: print(done, "of", total)))
        1 of 2
        2 of 2
        ['a', 'b']
    """
    total = len(items) if isinstance(items, Sized) else None
    for done, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(done, total)


def read_heads(
    models: Sequence[PreTrainedModel],
    batches: Batches,
    part: Part,
    *,
    kinds: Collection[Kind] = KINDS,
    modules: str = "*",
) -> Iterator[list[HeadRecords]]:
    """Run every model on each batch, without gradients or dropout, and yield each model's readings of the batch."""
    ran = False
    names = {site.name for model in models for site in find_attention(model, modules, kinds)}
    with ExitStack() as stack:
        recorders = [stack.enter_context(Recorder(model, part, kinds)) for model in models]
        for model in models:
            stack.enter_context(evaluation_mode(model))
        for batch in batches:
            ran = True
            for model in models:
                run_batch(model, as_batch(batch))
            yield [_name_records(recorder.take(), names) for recorder in recorders]
    if not ran:
        raise HeadError("no batches to run the model on; pass some, and a list where they are read more than once")


def position_means(
    model: PreTrainedModel, batches: Batches, part: Part, measures: Mapping[str, Measure]
) -> dict[str, dict[str, Tensor]]:
    """Return name of a measure → module path → its mean over positions, in float64."""
    sums: dict[tuple[str, str], Tensor] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for (readings,) in read_heads([model], batches, part):
        for path, reading in readings:
            for name, measure in measures.items():
                if (measured := measure(reading)) is not None:
                    sums[name, path] = sums.get((name, path), 0) + measured[0].cpu()
                    counts[name, path] += measured[1]
    means: dict[str, dict[str, Tensor]] = {name: {} for name in measures}
    for (name, path), total in sums.items():
        if not counts[name, path]:
            raise HeadError(
                f"{path} saw only padding, or single tokens; pass batches of sequences of two or more tokens"
            )
        if not bool(total.isfinite().all()):
            raise HeadError(f"{path}: what its heads compute is not finite; look for NaN or infinity in weights")
        means[name][path] = total / counts[name, path]
    return means


def unpadded_vectors(reading: HeadRecord, part: Part) -> Tensor:
    """Return each head's vectors without padding, (N, H, w), on a device with float64; of `probs`, w is the keys."""
    vectors: Tensor = getattr(reading, part)
    if part == "probs":
        vectors = vectors.transpose(1, 2)  # (B, T, H, S)
    vectors, mask = vectors.to(float64_device(vectors.device)), reading.mask_of(part)
    return vectors.flatten(0, 1) if mask is None else vectors[mask.to(vectors.device)]


def random_tokens(model: PreTrainedModel, count: int, length: int, seed: int) -> dict[str, Any]:
    """Return `count` sequences of random tokens without padding, and as many targets for an encoder–decoder."""
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


def _name_records(readings: Sequence[HeadRecord], names: Collection[str]) -> HeadRecords:
    """Return the readings of modules of these names."""
    counts = Counter(reading.site.name for reading in readings)
    uses: Counter[str] = Counter()
    named = []
    for reading in readings:
        path = reading.site.name
        if path in names:
            named.append((path if counts[path] == 1 else f"{path}[{uses[path]}]", reading))
        uses[path] += 1
    return named
