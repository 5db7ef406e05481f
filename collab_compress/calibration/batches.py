"""Calibration data: random tokens, noise, texts, a model's own texts, files, or ready batches."""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from numpy import ndarray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from collab_compress.calibration.files import Text, read_folder, read_texts, split_columns
from collab_compress.calibration.gather import Batch, forward_arguments
from collab_compress.calibration.synthetic import (
    BATCH_SIZE,
    EQUAL,
    encode,
    generated_batches,
    noise_for,
    pad,
    reads_images_too,
    sampled,
    start_token,
    synthetic_batches,
    usable_length,
    vocabulary_size,
)
from collab_compress.errors import CalibrationError, one_line
from collab_compress.options import CalibrationOptions

Calibration: TypeAlias = str | Path | Sequence[Text] | Iterable[Mapping[str, Tensor]] | None

_logger = logging.getLogger(__name__)

LENGTH = 64  # tokens beside noise, and positions of a sound
BESIDE = "synthetic+"


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
        calibration: "synthetic" (random tokens; noise for images, clips and sounds), "generated" (texts that a
            decoder or a masked language model writes), "none" or None, a file of texts or a column of a file or a
            data set (`read_texts`), "synthetic+FILE" (both), a folder of images or sounds for models that read
            those, texts or text pairs (a list, a NumPy array, a column of a pandas table or of a `datasets` data
            set), or ready batches (a list, a `DataLoader`). For an encoder–decoder a pair is a source and a target,
            which the decoder reads shifted to the right, as in training.
        model: the model they are for; limits the vocabulary and the length.
        tokenizer: needed unless data are ready batches or none, or the model reads no tokens; or the processor that
            holds it.
        sequences: number of random sequences, 384 by default, or 128 of one length, and of images and sounds; of
            generated texts, 256 by default; of texts, drawn at random, all by default; of ready batches or a stream
            of texts, the first, all by default.
        length: tokens of a random sequence, 8 to 128 by default (`synthetic_batches`); of a generated text, 128 by
            default; where texts are cut, at the model's limit by default; positions of a sound, 64 by default. Ready
            batches are not cut.
        seed: of random tokens, and of the sample and order of texts.

    Returns:
        Batches of keyword arguments for the model; empty for none.

    Raises:
        CalibrationError: no tokenizer, no data, a file that cannot be read, something else than data, or texts for a
            model that does not read any.
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
    if is_none(calibration):
        return [], [], []
    if isinstance(tokenizer, ProcessorMixin):
        tokenizer = getattr(tokenizer, "tokenizer", None)
    columns = getattr(calibration, "column_names", getattr(calibration, "columns", None))
    if columns is not None:
        raise CalibrationError(
            f"got a data set with columns {list(columns)}; pass the one with the texts, as in "
            "calibration=data['text'], or pairs, as in list(zip(data['source'], data['target']))"
        )
    items = None if isinstance(calibration, str | Path) else _items(calibration, sequences)
    if items is not None and not items:
        raise CalibrationError("calibration data is empty; pass at least one batch or text, or None")
    notes: list[str] = []
    given: list[Batch] | None = None
    if items is not None and isinstance(items[0], Mapping):
        batches = items
        ids = [batch["input_ids"] for batch in batches if "input_ids" in batch]
        longest = max((tokens.shape[-1] for tokens in ids if tokens.dim()), default=0)
        if length is not None and longest > length:
            notes.append(
                f"calibration batches have up to {longest} tokens a sequence; length {length} cuts texts only"
            )
    elif model.main_input_name != "input_ids" or reads_images_too(model):
        batches, notes = _media_batches(calibration, model, tokenizer, sequences, length or LENGTH, seed)
    elif tokenizer is None:
        raise CalibrationError(
            "calibration from random tokens or texts needs the model's tokenizer, and there is none: pass "
            "tokenizer=…, ready batches, or calibration 'none' to weigh all directions of the input alike"
        )
    elif items is None and calibration == "generated":
        batches = generated_batches(model, tokenizer, sequences, length, seed)
    elif is_synthetic(calibration):
        batches = synthetic_batches(model, tokenizer, sequences, length, seed)
        limit = usable_length(length, model, tokenizer)
        if length is not None and limit is not None and limit < length:
            notes.append(f"random sequences have {limit} tokens, the most the model takes, and not {length}")
    else:
        texts = (
            [_text(place, item) for place, item in enumerate(items)] if items else read_texts(_source(calibration))
        )
        sample = sampled(texts, sequences, seed)
        if len(sample) < len(texts):
            notes.append(f"calibration uses {len(sample)} of {len(texts)} texts, drawn at random")
        limit = usable_length(length, model, tokenizer)
        batches, cut = _text_batches(model, tokenizer, sample, limit, seed)
        if cut:
            notes.append(f"{cut} of {len(sample)} texts are longer than {limit} tokens and are cut there")
        if items is None and str(calibration).startswith(BESIDE):
            given = batches
            batches = given + synthetic_batches(model, tokenizer, sequences, length, seed)
            batches = sampled(batches, None, seed)
    _check_vocabulary(model, batches)
    if given is None:
        given = [] if is_synthetic(calibration) else batches
    return batches, notes, given


def _check_vocabulary(model: PreTrainedModel, batches: Sequence[Batch]) -> None:
    for name, target in (("input_ids", False), ("decoder_input_ids", True)):
        size = vocabulary_size(model, target)
        ids = [batch[name] for batch in batches if isinstance(batch.get(name), Tensor)]
        largest = max((int(tokens.max()) for tokens in ids if tokens.numel()), default=0)
        if size is not None and largest >= size:
            raise CalibrationError(
                f"the calibration data holds token {largest}, but the model's vocabulary ends at {size - 1}; "
                "the tokenizer is not this model's"
            )


def _media_batches(
    calibration: Any,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    sequences: int | None,
    length: int,
    seed: int,
) -> tuple[list[Batch], list[str]]:
    """Return batches of noise or of a folder's files, with random tokens if the model reads those too; and notes."""
    notes: list[str] = []
    inputs: dict[str, Tensor] = {}
    if is_synthetic(calibration):
        inputs = noise_for(model, sequences or EQUAL, length, seed)
    elif isinstance(calibration, str | Path) and os.path.isdir(os.path.expanduser(calibration)):
        inputs, count = read_folder(Path(calibration).expanduser(), model, sequences, seed)
        if sequences is not None and sequences < count:
            notes.append(f"calibration uses {sequences} of {count} files, drawn at random")
    if not inputs:
        reads = f"{model.main_input_name} and images" if reads_images_too(model) else model.main_input_name
        raise CalibrationError(
            f"{type(model).__name__} reads {reads}, not texts; pass batches of them as its processor makes them"
        )
    count = min(len(part) for part in inputs.values())
    if reads_images_too(model) or model.config.is_encoder_decoder:
        if tokenizer is None:
            raise CalibrationError(
                f"{type(model).__name__} reads tokens beside {', '.join(inputs)}; pass its tokenizer=…, or "
                "ready batches"
            )
        limit = usable_length(length, model, tokenizer) or length
        drawn = synthetic_batches(model, tokenizer, count, limit, seed, source=reads_images_too(model))
        inputs = {**{name: torch.cat([batch[name] for batch in drawn]) for name in drawn[0]}, **inputs}
    starts = range(0, count, BATCH_SIZE)
    return [{name: part[start : start + BATCH_SIZE] for name, part in inputs.items()} for start in starts], notes


def _text_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Text],
    length: int | None,
    seed: int,
) -> tuple[list[Batch], int]:
    """Tokenize texts in batches of similar length, in random order; return how many were cut at `length` too."""
    single = next((text for text in texts if isinstance(text, str)), None)
    translates = model.config.is_encoder_decoder
    if translates and single is not None:
        raise CalibrationError(
            f"{single[:60]!r} is no pair; an encoder–decoder reads a source and a target: pass FILE:source,target, "
            "lines with a tab between the two, or a list of pairs"
        )
    has_pairs = not all(isinstance(text, str) for text in texts)
    special = tokenizer.num_special_tokens_to_add(pair=has_pairs and not translates)
    if length is not None and length <= special:
        raise CalibrationError(
            f"length {length} leaves no room for texts beside the {special} special tokens of each; pass a larger one"
        )
    options: dict[str, Any] = {"truncation": length is not None, "max_length": length}
    texts = sorted(texts, key=lambda text: len(text) if isinstance(text, str) else len(text[0]) + len(text[1]))
    cut = 0
    batches = []
    for start in range(0, len(texts), BATCH_SIZE):
        part = list(texts[start : start + BATCH_SIZE])
        try:
            if translates:
                batch = encode_pairs(model, tokenizer, part, padding=True, **options)
            elif tokenizer.pad_token_id is not None:
                batch = dict(tokenizer(part, **options, padding=True, return_tensors="pt"))
            else:
                encoded = tokenizer(part, **options)
                columns = {name: [torch.tensor(row) for row in rows] for name, rows in encoded.items()}
                (batch,) = pad(columns, "attention_mask", tokenizer)
            widths = [batch[name].shape[1] for name in ("input_ids", "decoder_input_ids") if name in batch]
            if length is not None and max(widths) == length:
                sides = zip(*part, strict=True) if translates else [part]
                rows = [
                    encode(tokenizer, list(side), target=bool(place), verbose=False)["input_ids"]
                    for place, side in enumerate(sides)
                ]
                cut += sum(max(map(len, row)) > length for row in zip(*rows, strict=True))
        except Exception as error:  # tokenizers raises plain exceptions
            raise CalibrationError(f"the texts cannot be encoded: {one_line(error)}") from error
        batches.append(batch)
    return sampled(batches, None, seed), cut


def encode_pairs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Any], **options: Any
) -> Batch:
    """Tokenize sources and targets for an encoder–decoder; its decoder reads targets shifted to the right.

    The first token is the decoder's start token, as in training (`prepare_decoder_input_ids_from_labels`).
    """
    sources, targets = (list(side) for side in zip(*pairs, strict=True))
    known = forward_arguments(model)
    batch = tokenizer(sources, return_tensors="pt", **options)
    target = encode(tokenizer, targets, True, return_tensors="pt", padding_side="right", **options)
    labels, mask = target["input_ids"], target["attention_mask"]
    shift: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None:  # a model without a head
        first = torch.full_like(labels[:, :1], start_token(model.config, labels[0][mask[0] != 0].tolist()))
        shifted = torch.cat([first, labels[:, :-1]], 1)
    else:
        shifted = shift(labels)
    encoded = {name: value for name, value in batch.items() if name in known}
    return encoded | {"decoder_input_ids": shifted, "decoder_attention_mask": mask}


def is_none(calibration: Any) -> bool:
    """Return whether there is no calibration."""
    return calibration is None or (isinstance(calibration, str) and calibration == "none")  # arrays compare otherwise


def is_synthetic(calibration: Any) -> bool:
    """Return whether calibration data are random tokens or noise alone."""
    return isinstance(calibration, str) and calibration == "synthetic"


def text_file(calibration: Any) -> Path | None:
    """Return the file that calibration texts come from, without its columns, or None."""
    if not isinstance(calibration, str | Path) or str(calibration) in ("synthetic", "generated", "none"):
        return None
    return Path(split_columns(_source(calibration))[0])


def _source(calibration: Any) -> str:
    source = os.path.expanduser(str(calibration).removeprefix(BESIDE))
    if not source:
        raise CalibrationError(
            f"calibration {str(calibration)!r} names no file; expected 'synthetic', 'generated', 'none', or a file "
            f"of texts, alone or after {BESIDE!r}"
        )
    return source


def _items(calibration: Any, sequences: int | None) -> list[Any]:
    """Return the texts of calibration data, or batches with up to `sequences` sequences."""
    if isinstance(calibration, bytes | Mapping) or not isinstance(calibration, Iterable):
        raise CalibrationError(
            f"calibration is a {type(calibration).__name__}; expected 'synthetic', 'generated', 'none', a file of "
            "texts, texts, or batches"
        )
    items: list[Any] = []
    count = 0
    is_stream = not hasattr(calibration, "__len__")
    for place, item in enumerate(calibration):
        is_batch = isinstance(item, Mapping)
        if items and is_batch != isinstance(items[0], Mapping):
            raise CalibrationError("calibration mixes batches and texts; pass one or the other")
        items.append(_batch(place, item) if is_batch else item)
        if not is_batch:
            if is_stream and len(items) == sequences:  # it may have no end
                break
            continue
        count += sequence_count(items[-1])
        if sequences is not None and count >= sequences:
            if is_divisible(items[-1]):
                items[-1] = slice_batch(items[-1], slice(sequence_count(items[-1]) - (count - sequences)))
            break
    return items


def _batch(place: int, item: Mapping[str, Any]) -> Batch:
    batch = dict(item)
    ids = batch.get("input_ids", torch.zeros(1))
    if not isinstance(ids, Tensor) or not ids.numel():
        got = "empty" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise CalibrationError(f"calibration batch {place}: input_ids is {got}; expected a tensor of token ids")
    return batch


def _text(place: int, item: Any) -> Text:
    if isinstance(item, str):
        return str(item)  # NumPy strings are a subclass
    item = item.tolist() if isinstance(item, ndarray) else item
    if isinstance(item, tuple | list) and len(item) == 2 and all(isinstance(part, str) for part in item):
        return item[0], item[1]
    raise CalibrationError(
        f"calibration item {place} is a {type(item).__name__}; expected a text, a pair of texts, or a batch"
    )


def sequence_count(batch: Batch) -> int:
    """Return the number of sequences, or images, of a batch."""
    return next((len(value) for value in _tensors(batch)), 0)


def token_count(batch: Batch) -> int:
    """Return about how many tokens a batch has, or how many sequences of other inputs."""
    sizes = (value.numel() for value in _tensors(batch) if not value.is_floating_point())
    return max(sizes, default=sequence_count(batch))


def is_divisible(batch: Batch) -> bool:
    """Return whether the first dimension of all tensors of a batch is its sequences."""
    return len({len(value) for value in _tensors(batch)}) == 1


def slice_batch(batch: Batch, part: slice | Tensor) -> Batch:
    """Return some of the sequences of a batch that `is_divisible`, by a slice or a mask."""
    return {
        name: value[part] if isinstance(value, Tensor) and value.dim() else value for name, value in batch.items()
    }


def evenly_spaced(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Return `count` of the batches, evenly spaced; all if there are no more."""
    count = min(count, len(batches))
    return [batches[place * len(batches) // count] for place in range(count)]


def sample_sequences(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Return about `count` sequences, evenly spaced, in batches of up to 16 where batches can be divided."""
    parts: list[Batch] = []
    for batch in batches:
        size = sequence_count(batch)
        whole = size <= BATCH_SIZE or not is_divisible(batch)
        starts = range(0, size, BATCH_SIZE)
        parts += [batch] if whole else [slice_batch(batch, slice(start, start + BATCH_SIZE)) for start in starts]
    total = max(1, sum(map(sequence_count, parts)))
    return evenly_spaced(parts, max(1, len(parts) * count // total))


def _tensors(batch: Batch) -> list[Tensor]:
    return [value for value in batch.values() if isinstance(value, Tensor) and value.dim()]
