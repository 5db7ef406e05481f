"""Calibration data of every kind as batches: texts, random tokens, noise, or what the caller has made."""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from collab_compress.calibration.builtin import MOST_UNKNOWN, builtin_texts, reads_single_texts, why_not_builtin
from collab_compress.calibration.files import Text, read_texts, split_columns, texts_of
from collab_compress.calibration.gather import Batch, forward_arguments
from collab_compress.calibration.synthetic import (
    EQUAL,
    VARIED,
    generated_batches,
    noise_batches,
    reads_noise,
    synthetic_batches,
    what_it_reads,
)
from collab_compress.calibration.tokenization import (
    batch_size,
    pair_separator,
    sampled,
    text_batches,
    token_type_count,
    usable_length,
    vocabulary_size,
)
from collab_compress.errors import CalibrationError, check_type
from collab_compress.options import CalibrationOptions

Source: TypeAlias = str | Path | Sequence[Text] | Iterable[Mapping[str, Tensor]]
"""Calibration data of one kind."""

Calibration: TypeAlias = Source | tuple[Source, ...] | None
"""Calibration data; a tuple is several sources together."""

Item = TypeVar("Item")

_logger = logging.getLogger(__name__)

NAMES = ("auto", "builtin", "synthetic", "generated", "none")
EXPECTED = ", ".join(map(repr, NAMES))


def calibration_batches(
    calibration: Calibration,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    sequences: int | None = None,
    length: int | None = None,
    seed: int = 0,
) -> list[Batch]:
    """Make batches for `model` of any kind of calibration data; log a warning for what is left out.

    Args:
        calibration: "builtin" (English texts that come with the package; for a model with a head also pairs of them,
            and random tokens beside), "synthetic" (random tokens; noise for images, clips and sounds), "auto"
            (builtin for a model that reads English, else synthetic), "generated" (texts that a decoder or a masked
            language model writes), "none" or None, a file of texts or a column of a file or a data set
            (`read_texts`), texts or text pairs (a list, a NumPy array, a column of a pandas table or of a `datasets`
            data set), or ready batches (a list, a `DataLoader`). For an encoder–decoder a pair is a source and a
            target, which the decoder reads shifted to the right, as in training. A tuple is several of these
            together, as ("builtin", "docs.txt"): all sequences of all of them, in random order.
        model: the model they are for; limits the vocabulary and the length.
        tokenizer: needed unless data are ready batches or none, or the model reads no tokens; or the processor that
            holds it.
        sequences: number of random sequences, 384 by default, or 128 of one length, and of images and sounds; of
            generated texts, 256 by default; of texts, drawn at random, all by default; of built-in texts and random
            sequences together; of ready batches or a stream of texts, the first, all by default. Of several sources,
            that of each.
        length: tokens of a random sequence, 8 to 128 by default (`synthetic_batches`); of a generated text, 128 by
            default; where texts are cut, at the model's limit by default; positions of a sound, 64 by default. Ready
            batches are not cut.
        seed: of random tokens, and of the sample and order of texts.

    Returns:
        Batches of keyword arguments for the model; empty for none.

    Raises:
        CalibrationError: no tokenizer, no data, a file that cannot be read, something else than data, or texts for a
            model that does not read any.

    Example:
        >>> calibration_batches([batch], model, sequences=1)  # ready batches, cut to one sequence
        [{'input_ids': tensor([[...]]), 'attention_mask': tensor([[1, 1, 1, 1, 1, 1]])}]
    """
    batches, notes, _ = noted_batches(calibration, model, tokenizer, sequences=sequences, length=length, seed=seed)
    for note in notes:
        _logger.warning(note)
    return batches


def noted_batches(
    calibration: Calibration,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    sequences: int | None,
    length: int | None,
    seed: int,
) -> tuple[list[Batch], list[str], list[Batch]]:
    """Return the batches of `calibration_batches`, a sentence for each thing left out, and the batches of texts.

    The last are all batches that are not made from random tokens or noise.
    """
    CalibrationOptions(sequences=sequences, length=length)  # checks both
    if isinstance(tokenizer, ProcessorMixin):
        tokenizer = getattr(tokenizer, "tokenizer", None)
    if tokenizer is not None:
        check_type("tokenizer", tokenizer, PreTrainedTokenizerBase, CalibrationError)
    if is_none(calibration):
        return [], [], []
    batches: list[Batch] = []
    given: list[Batch] = []
    notes: list[str] = []
    sources = sources_of(calibration)
    for source in sources:
        made, made_of_texts, made_notes = _batches(source, model, tokenizer, sequences, length, seed)
        batches += made
        given += made_of_texts
        notes += made_notes
    if len(sources) > 1:
        batches = sampled(batches, None, seed)
    _check_tokens(model, batches)
    return batches, [*dict.fromkeys(notes), *_alike(given, tokenizer)], given


def sources_of(calibration: Calibration, name: str = "calibration") -> tuple[Any, ...]:
    """Return the sources of calibration data, one if they are no tuple.

    Raises:
        CalibrationError: a tuple holds no source, or something that is none.
    """
    if not isinstance(calibration, tuple):
        return (calibration,)
    if not calibration:
        raise CalibrationError(f"{name} is an empty tuple; pass at least one source")
    for source in calibration:
        if (len(calibration) > 1 and is_none(source)) or isinstance(source, tuple | Mapping):
            got = (
                "None"
                if source is None
                else repr(source)
                if isinstance(source, str)
                else f"a {type(source).__name__}"
            )
            raise CalibrationError(
                f"{name} is a tuple, which is several sources of data together, and one of them is {got}; expected "
                "names, files, or lists; pass texts, pairs and batches in a list"
            )
    return calibration


def _batches(
    calibration: Any,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    sequences: int | None,
    length: int | None,
    seed: int,
) -> tuple[list[Batch], list[Batch], list[str]]:
    """Return the batches of one source, those of them that are not random, and a sentence for what is left out."""
    columns = getattr(calibration, "column_names", getattr(calibration, "columns", None))
    if columns is not None:
        raise CalibrationError(
            f"got a data set with columns {list(columns)}; pass the one with the texts, as in "
            "calibration=data['text'], or pairs, as in list(zip(data['source'], data['target']))"
        )
    ready, rows = ([], None) if isinstance(calibration, str | Path) else _items(calibration, sequences)
    if ready:
        return ready, ready, _notes_on_ready(model, ready, length)
    if reads_noise(model):
        if is_named(calibration, "auto", "synthetic"):
            batches = noise_batches(model, tokenizer, sequences, length, seed)
            if batches:
                return batches, [], []
        raise CalibrationError(
            f"{type(model).__name__} reads {what_it_reads(model)}, not texts; pass batches of them as its "
            "processor makes them"
        )
    if tokenizer is None:
        raise CalibrationError(
            "calibration from random tokens or texts needs the model's tokenizer, and there is none: pass "
            "tokenizer=…, ready batches, or calibration 'none' to weigh all directions of the input alike"
        )
    if is_named(calibration, "generated"):
        batches = generated_batches(model, tokenizer, sequences, length, seed)
        return batches, batches, []
    texts, random, notes = _texts(calibration, rows, model, tokenizer, sequences, length, seed)
    limit = usable_length(length, model, tokenizer)
    given: list[Batch] = []
    if texts:
        given, cut = text_batches(model, tokenizer, texts, limit, seed)
        if cut and not is_named(calibration, "auto", "builtin"):
            notes.append(f"{cut} of {len(texts)} texts are longer than {limit} tokens and are cut there")
    batches = given
    if random:
        batches = given + synthetic_batches(model, tokenizer, random, length, seed)
        batches = sampled(batches, None, seed) if given else batches
        if length is not None and limit is not None and limit < length:
            notes.append(f"random sequences have {limit} tokens, the most the model takes, and not {length}")
    types, largest = token_type_count(model), _largest(batches, "token_type_ids")
    if types is not None and largest >= types:
        notes.append(
            f"the tokenizer gives token types up to {largest}, and {type(model).__name__} has {types}, counted from "
            "0; token_type_ids are left out"
        )
        for batch in batches:  # those of texts are among them
            batch.pop("token_type_ids", None)
    return batches, given, notes


def _largest(batches: Sequence[Batch], name: str) -> int:
    """Return the largest number in an argument of batches; -1 without any."""
    values = [batch[name] for batch in batches if isinstance(batch.get(name), Tensor)]
    return max((int(numbers.max()) for numbers in values if numbers.numel()), default=-1)


def _check_tokens(model: PreTrainedModel, batches: Sequence[Batch]) -> None:
    """Refuse tokens and token types that the model has no embeddings of."""
    for name, target in (("input_ids", False), ("decoder_input_ids", True)):
        size, largest = vocabulary_size(model, target), _largest(batches, name)
        if size is not None and largest >= size:
            raise CalibrationError(
                f"the calibration data holds token {largest}, but the model's vocabulary ends at {size - 1}; "
                "the tokenizer is not this model's"
            )
    types, largest = token_type_count(model), _largest(batches, "token_type_ids")
    if types is not None and largest >= types:
        raise CalibrationError(
            f"the calibration data holds token type {largest}, but {type(model).__name__} has {types}, counted from "
            "0 (type_vocab_size); leave token_type_ids out of the batches"
        )


def _texts(
    calibration: Calibration,
    rows: Iterator[Any] | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: int | None,
    length: int | None,
    seed: int,
) -> tuple[list[Text], int, list[str]]:
    """Return the texts of rows, of a file, or that have a name; the number of random sequences beside them; notes."""
    name, notes = str(calibration) if rows is None else "", []
    if name in ("auto", "builtin"):
        reason = why_not_builtin(model, tokenizer)
        if reason is not None and name == "builtin":
            raise CalibrationError(f"the built-in texts are English, and {reason}; pass texts, or 'synthetic'")
        if reason is not None:
            notes.append(f"calibration uses random tokens, not the built-in texts: {reason}; pass texts of your own")
        name = "builtin" if reason is None else "synthetic"
    beside = VARIED if length is None else EQUAL
    if name == "synthetic":
        return [], sequences or beside, notes
    if name == "builtin":
        if reads_single_texts(model):
            return sampled(builtin_texts(pairs=False), sequences, seed), 0, notes
        texts = builtin_texts(pairs=pair_separator(model, tokenizer) is not None, short=False)
        if sequences is not None:  # the same mixture, and more random tokens where there are too few texts
            beside = max(sequences - len(texts), round(sequences * beside / (len(texts) + beside)))
            texts = sampled(texts, sequences - beside, seed)
        return texts, beside, notes
    if rows is None:
        texts, notes = read_texts(_source(name))
    else:  # a stream may have no end
        texts, notes = texts_of(rows, "calibration", None if hasattr(calibration, "__len__") else sequences)
    sample = sampled(texts, sequences, seed)
    if len(sample) < len(texts):
        notes.append(f"calibration uses {len(sample)} of {len(texts)} texts, drawn at random")
    return sample, 0, notes


def is_none(calibration: object) -> bool:
    """Return whether there is no calibration."""
    only = calibration[0] if isinstance(calibration, tuple) and len(calibration) == 1 else calibration
    return only is None or is_named(only, "none")


def is_named(calibration: object, *names: str) -> bool:
    """Return whether calibration data are one of those that have these names."""
    return isinstance(calibration, str) and calibration in names  # arrays compare otherwise


def refuse_noise(model: PreTrainedModel, calibration: Calibration) -> None:
    """Refuse to choose what a model keeps, or say what it loses, on noise that nobody asked for."""
    if reads_noise(model) and any(is_named(source, "auto") for source in sources_of(calibration)):
        raise CalibrationError(
            f"{type(model).__name__} reads {what_it_reads(model)}, and widths, neurons and layers are chosen on "
            "examples, of which the package has none; pass batches from Python, as its processor makes them, or "
            "calibration 'synthetic' for noise, after which a model may be useless"
        )


def resolved(calibration: str, model: PreTrainedModel, tokenizer: Any) -> str:
    """Return "builtin" or "synthetic" for "auto", as `calibration_batches` decides; other data as they are."""
    if calibration != "auto":
        return calibration
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer) if isinstance(tokenizer, ProcessorMixin) else tokenizer
    has_texts = not reads_noise(model) and tokenizer is not None and why_not_builtin(model, tokenizer) is None
    return "builtin" if has_texts else "synthetic"


def text_files(calibration: Calibration) -> list[Path]:
    """Return the files that calibration texts come from, without their columns."""
    sources = [source for source in sources_of(calibration) if isinstance(source, str | Path)]
    return [Path(split_columns(_source(source))[0]) for source in sources if str(source) not in NAMES]


def _source(calibration: Any) -> str:
    source = os.path.expanduser(str(calibration))
    if not source:
        raise CalibrationError(f"calibration '' names no file; expected {EXPECTED}, or a file of texts")
    return source


def _items(calibration: Any, sequences: int | None) -> tuple[list[Batch], Iterator[Any] | None]:
    """Return ready batches with up to `sequences` sequences and None, or no batches and the rows of texts."""
    if isinstance(calibration, bytes | Mapping) or not isinstance(calibration, Iterable):
        raise CalibrationError(
            f"calibration is a {type(calibration).__name__}; expected {EXPECTED}, a file of texts, texts, or batches"
        )
    items = iter(calibration)
    first = list(islice(items, 1))
    if not first:
        raise CalibrationError("calibration data is empty; pass at least one batch or text, or None")
    items = chain(first, items)
    if not isinstance(first[0], Mapping):
        return [], items
    batches: list[Batch] = []
    count = 0
    for place, item in enumerate(items):
        batches.append(_batch(place, item))
        count += sequence_count(batches[-1])
        if sequences is not None and count >= sequences:
            if is_divisible(batches[-1]):
                batches[-1] = slice_batch(batches[-1], slice(sequence_count(batches[-1]) - (count - sequences)))
            break
    return batches, None


def _batch(place: int, item: Any) -> Batch:
    """Return a copy of a ready batch, after checking what every model needs."""
    if not isinstance(item, Mapping):
        raise CalibrationError(
            f"calibration item {place} is a {type(item).__name__} among batches; pass batches only"
        )
    batch = dict(item)
    ids = batch.get("input_ids", torch.zeros(1, device="cpu"))
    if not isinstance(ids, Tensor) or not ids.numel():
        got = "empty" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise CalibrationError(f"calibration batch {place}: input_ids is {got}; expected a tensor of token ids")
    for name, value in batch.items():
        if isinstance(value, Tensor) and (value.is_meta or value.layout != torch.strided):
            kind = "on the meta device, without values" if value.is_meta else f"of layout {value.layout}"
            raise CalibrationError(f"calibration batch {place}: {name} is {kind}; expected a dense tensor of values")
        if isinstance(value, Tensor) and name.endswith("mask") and value.dim() == 2 and not bool((value >= 0).all()):
            raise CalibrationError(
                f"calibration batch {place}: {name} holds negative numbers or NaN; expected 1 at tokens, 0 at padding"
            )
    return batch


def _notes_on_ready(model: PreTrainedModel, batches: Sequence[Batch], length: int | None) -> list[str]:
    """Return warnings of sequences that are padded on the left without positions, or longer than `length`."""
    notes = []
    is_rotary = bool(getattr(model.config.get_text_config(), "rope_parameters", None))  # only distances count
    count = longest = 0
    for batch in batches:
        mask, ids = batch.get("attention_mask"), batch.get("input_ids")
        if isinstance(mask, Tensor) and mask.dim() == 2 and batch.get("position_ids") is None:
            count += int(((mask[:, 0] == 0) & (mask != 0).any(1)).sum())
        if ids is not None and ids.dim():
            longest = max(longest, ids.shape[-1])
    if count and not is_rotary and "position_ids" in forward_arguments(model):
        notes.append(
            f"{count} calibration sequences are padded on the left without position_ids, so positions may count from "
            "the padding; pad them on the right, or pass position_ids"
        )
    if length is not None and longest > length:
        notes.append(f"calibration batches have up to {longest} tokens a sequence; length {length} cuts texts only")
    return notes


def _alike(batches: Sequence[Batch], tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """Return warnings of calibration sequences that say little: alike, of one token, or unknown to the tokenizer."""
    sequences = [sequence for batch in batches for sequence in _unpadded_tokens(batch)]
    notes = []
    distinct = len({sequence for sequence in sequences if len(sequence) > 1})
    if 2 * distinct < len(sequences):
        notes.append(
            f"only {distinct:,} of {len(sequences):,} calibration sequences are distinct and longer than a token, so "
            "drift and errors on them say little about other inputs; pass more varied data"
        )
    special = set(getattr(tokenizer, "all_special_ids", ()))
    unknown = getattr(tokenizer, "unk_token_id", None)
    counts: Counter[int | None] = Counter(chain.from_iterable(sequences))
    total = sum(count for token, count in counts.items() if token == unknown or token not in special)
    if counts[unknown] > MOST_UNKNOWN * total:
        notes.append(
            f"{counts[unknown] / total:.0%} of the tokens of the calibration data are unknown to the tokenizer; pass "
            "texts of a language that it knows"
        )
    return notes


def _unpadded_tokens(batch: Batch) -> list[tuple[int, ...]]:
    """Return the tokens of each sequence of a batch, those of its target after them; none beside images or sounds."""
    if "input_ids" not in batch or "pixel_values" in batch:
        return []
    sides = []
    for name, mask_name in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        ids, mask = batch.get(name), batch.get(mask_name)
        if isinstance(ids, Tensor) and ids.dim() == 2:
            kept = mask != 0 if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids).bool()
            sides.append([row[tokens].tolist() for row, tokens in zip(ids, kept, strict=True)])
    return [tuple(chain.from_iterable(rows)) for rows in zip(*sides, strict=True)]


def sequence_count(batch: Batch) -> int:
    """Return the number of sequences, or images, of a batch.

    Example:
        >>> sequence_count(batch)
        2
    """
    return next((len(value) for value in _tensors(batch)), 0)


def is_divisible(batch: Batch) -> bool:
    """Return whether the first dimension of all tensors of a batch is its sequences."""
    return len({len(value) for value in _tensors(batch)}) == 1


def slice_batch(batch: Batch, part: slice | Tensor) -> Batch:
    """Return some of the sequences of a batch that `is_divisible`, by a slice or a mask.

    Example:
        >>> slice_batch(batch, slice(1))["input_ids"].shape
        torch.Size([1, 6])
    """
    return {
        name: value[part] if isinstance(value, Tensor) and value.dim() else value for name, value in batch.items()
    }


def evenly_spaced(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` of the items, evenly spaced; all if there are no more."""
    count = min(count, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def in_parts(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches in parts of up to 16 sequences and 4,096 tokens, where they can be divided."""
    parts: list[Batch] = []
    for batch in batches:
        count = sequence_count(batch)
        size = batch_size(max((len(ids[0]) for name, ids in batch.items() if _holds_tokens(name, ids)), default=1))
        whole = count <= size or not is_divisible(batch)
        starts = range(0, count, size)
        parts += [batch] if whole else [slice_batch(batch, slice(start, start + size)) for start in starts]
    return parts


def _holds_tokens(name: str, value: Any) -> bool:
    """Return whether an argument holds token ids or their embeddings, (B, T, …)."""
    return isinstance(value, Tensor) and value.dim() > 1 and len(value) > 0 and name.endswith(("ids", "embeds"))


def sample_sequences(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Return about `count` sequences, evenly spaced, in the parts that `in_parts` makes.

    Example:
        >>> len(sample_sequences([batch] * 10, 4))  # batches, of two sequences each
        2
    """
    parts = in_parts(batches)
    total = max(1, sum(map(sequence_count, parts)))
    return evenly_spaced(parts, max(1, len(parts) * count // total))


def _tensors(batch: Batch) -> list[Tensor]:
    return [value for value in batch.values() if isinstance(value, Tensor) and value.dim()]
