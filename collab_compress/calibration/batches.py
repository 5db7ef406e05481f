"""Calibration data: random tokens, noise, texts, a model's own texts, files, or ready batches."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
from numpy import ndarray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from collab_compress.calibration.folders import folder_inputs
from collab_compress.calibration.generated import generated_batches
from collab_compress.calibration.noise import noise_for, reads_two
from collab_compress.calibration.random_tokens import (
    BATCH_SIZE,
    EQUAL,
    Batch,
    batches_beside_tokens,
    fitting,
    sampled,
    synthetic_batches,
)
from collab_compress.calibration.texts import Text, read_texts, split_columns
from collab_compress.errors import CalibrationError, one_line

__all__ = ["BATCH_SIZE", "Batch", "Calibration", "calibration_batches", "noted_batches"]

Calibration: TypeAlias = str | Path | Sequence[Text] | Iterable[Mapping[str, Tensor]] | None

_logger = logging.getLogger(__name__)

LENGTH = 64  # tokens beside noise, and positions of it
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
    """Turn any accepted form of calibration data into batches for `model`; what is left out is logged as a warning.

    Args:
        calibration: "synthetic" (random tokens; noise for images, clips and sounds), "generated" (texts that a
            decoder with a language-model head writes itself), "none" or None, a file of texts, or a column of a file
            or a data set, as `read_texts` takes it, "synthetic+FILE" for random tokens beside such texts, a folder
            of images or sounds for models that read those, texts or text pairs (a list, a NumPy array, a column of a
            pandas table or of a `datasets` data set), or ready batches (a list, a `DataLoader`).
        model: the model they are for; bounds the vocabulary and the length.
        tokenizer: needed for everything but ready batches, none, and models that read no tokens; or the processor
            that holds it.
        sequences: number of random sequences, 384 if not given, or 128 of one length, or of generated texts, 256 if
            not given; of more texts than that a
            random sample is used, and of ready batches, and of texts whose number is not known (a stream), the
            first; all of them if not given.
        length: tokens in a random sequence; 8 to 128 if not given, as `synthetic_batches` draws them; of a generated
            text, 128 if not given. Texts are cut
            there, or else at the model's limit; ready batches are not. Positions of a sound, 64 if not given.
        seed: seed of the random tokens, and of the sample and order of texts.

    Returns:
        Batches of keyword arguments for the model; empty for none.

    Raises:
        CalibrationError: no tokenizer, no data, a file that cannot be read, something that is no data, or texts for
            a model that does not read any.
    """
    batches, notes = noted_batches(calibration, model, tokenizer, sequences=sequences, length=length, seed=seed)
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
) -> tuple[list[Batch], list[str]]:
    """Do as `calibration_batches`, and say what was left out instead of logging it.

    Returns:
        The batches, and one sentence for each way in which texts are not used as they are.
    """
    if is_none(calibration):
        return [], []
    if isinstance(tokenizer, ProcessorMixin):  # of images or sounds too
        tokenizer = getattr(tokenizer, "tokenizer", None)
    notes: list[str] = []
    columns = getattr(calibration, "column_names", getattr(calibration, "columns", None))
    if columns is not None:
        raise CalibrationError(
            f"got a data set with columns {list(columns)}; pass the one with the texts, as in "
            "calibration=data['text']"
        )
    items = None if isinstance(calibration, str | Path) else _items(calibration, sequences)
    if items is not None and not items:
        raise CalibrationError("calibration data is empty; pass at least one batch or text, or None")
    if items is not None and isinstance(items[0], Mapping):
        batches = items
        longest = max(
            (batch["input_ids"].shape[-1] for batch in batches if rows_of(batch) and "input_ids" in batch), default=0
        )
        if length is not None and longest > length:
            notes.append(
                f"calibration batches have up to {longest} tokens a sequence; length {length} cuts texts only"
            )
    elif model.main_input_name != "input_ids" or reads_two(model):
        batches, notes = _unlike_texts(calibration, model, tokenizer, sequences, length or LENGTH, seed)
    elif tokenizer is None:
        raise CalibrationError(
            "calibration from random tokens or texts needs the model's tokenizer, and there is none: pass "
            "tokenizer=…, ready batches, or calibration 'none' to weigh all directions of the input alike"
        )
    elif is_generated(calibration):
        batches = generated_batches(model, tokenizer, sequences, length, seed)
    elif model.config.is_encoder_decoder and not is_synthetic(calibration):
        raise CalibrationError(
            f"{type(model).__name__} reads a source and a target, and texts are only one of them; pass batches with "
            "input_ids and decoder_input_ids, or calibration 'synthetic'"
        )
    elif is_synthetic(calibration):
        batches = synthetic_batches(model, tokenizer, sequences, length, seed)
        longest = fitting(length, model, tokenizer)
        if length is not None and longest is not None and longest < length:
            notes.append(f"random sequences have {longest} tokens, the most the model takes, and not {length}")
    else:
        source = _source(calibration)
        if source is None:
            texts = [_text(place, item) for place, item in enumerate(items or [])]
        else:
            texts = read_texts(source)
        sample = sampled(texts, len(texts) if sequences is None else sequences, seed)
        if len(sample) < len(texts):
            notes.append(f"calibration uses {len(sample)} of {len(texts)} texts, drawn at random")
        limit = fitting(length, model, tokenizer)
        batches, cut = text_batches(tokenizer, sample, limit, seed)
        if cut:
            notes.append(f"{cut} of {len(sample)} texts are longer than {limit} tokens and are cut there")
        if source is not None and str(calibration).startswith(BESIDE):  # printing texts would take a while
            batches += synthetic_batches(model, tokenizer, sequences, length, seed)
            batches = sampled(batches, len(batches), seed)
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    largest = max((int(batch["input_ids"].max()) for batch in batches if "input_ids" in batch), default=0)
    if size is not None and largest >= size:
        raise CalibrationError(
            f"the calibration data holds token {largest}, but the model's vocabulary ends at {size - 1}; "
            "the tokenizer is not this model's"
        )
    return batches, notes


def _unlike_texts(
    calibration: Any,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    sequences: int | None,
    length: int,
    seed: int,
) -> tuple[list[Batch], list[str]]:
    """Make batches of noise or of a folder for a model that reads more than texts; or say what to pass instead."""
    notes: list[str] = []
    inputs: dict[str, Tensor] = {}
    if is_synthetic(calibration):
        inputs = noise_for(model, sequences or EQUAL, length, seed)
    elif isinstance(calibration, str | Path) and Path(calibration).is_dir():
        inputs, count = folder_inputs(Path(calibration), model, sequences, seed)
        if sequences is not None and sequences < count:
            notes.append(f"calibration uses {sequences} of {count} files, drawn at random")
    if inputs:
        return batches_beside_tokens(model, tokenizer, inputs, length, seed), notes
    reads = f"{model.main_input_name} and images" if reads_two(model) else model.main_input_name
    raise CalibrationError(
        f"{type(model).__name__} reads {reads}, not texts; pass batches of them as its processor makes them"
    )


def text_batches(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text], length: int | None, seed: int
) -> tuple[list[Batch], int]:
    """Tokenize texts or text pairs, similar lengths together, padded within each batch; batches in random order.

    Texts are cut at `length` tokens, if one is given.

    Returns:
        The batches, and how many texts were cut.
    """
    options = {"truncation": length is not None, "max_length": length}
    pads = tokenizer.pad_token_id is not None
    special = tokenizer.num_special_tokens_to_add(pair=not all(isinstance(text, str) for text in texts))
    if length is not None and length <= special:
        raise CalibrationError(
            f"length {length} leaves no room for texts beside the {special} special tokens of each; pass a larger one"
        )
    cut = 0
    texts = sorted(texts, key=lambda text: len(text) if isinstance(text, str) else len(text[0]) + len(text[1]))
    batches = []
    for start in range(0, len(texts), BATCH_SIZE):
        part = list(texts[start : start + BATCH_SIZE])
        try:
            if pads:
                batch = dict(tokenizer(part, **options, padding=True, return_tensors="pt"))
            else:
                batch = _padded_without_token(tokenizer(part, **options))
            if length is not None and batch["input_ids"].shape[1] == length:
                cut += sum(len(tokens) > length for tokens in tokenizer(part, verbose=False)["input_ids"])
        except Exception as error:  # tokenizers raises plain exceptions
            raise CalibrationError(f"the tokenizer cannot read the texts: {one_line(error)}") from error
        batches.append(batch)
    return sampled(batches, len(batches), seed), cut


def _padded_without_token(encoded: Mapping[str, list[list[int]]]) -> Batch:
    """Pad tokenized texts on the right with token 0, which the attention mask leaves out."""
    columns = {name: [torch.tensor(row) for row in rows] for name, rows in encoded.items()}
    columns["attention_mask"] = [torch.ones_like(row) for row in columns["input_ids"]]
    return {name: pad_sequence(rows, batch_first=True) for name, rows in columns.items()}


def is_none(calibration: Any) -> bool:
    """Whether there is to be no calibration; what is no string may not compare with one (arrays)."""
    return calibration is None or (isinstance(calibration, str) and calibration == "none")


def is_synthetic(calibration: Any) -> bool:
    """Whether a calibration is random tokens or noise, and nothing beside."""
    return isinstance(calibration, str) and calibration == "synthetic"


def is_generated(calibration: Any) -> bool:
    """Whether a calibration is texts that the model writes itself."""
    return isinstance(calibration, str) and calibration == "generated"


def text_file(calibration: Any) -> Path | None:
    """Return the file of texts that a calibration names, without its columns, or None."""
    source = _source(calibration)
    return None if source is None else Path(split_columns(source)[0])


def _source(calibration: Any) -> str | None:
    """Return what `read_texts` takes of a calibration, or None where it names no texts."""
    if not isinstance(calibration, str | Path) or str(calibration) in ("synthetic", "generated", "none"):
        return None
    return str(calibration).removeprefix(BESIDE)


def _items(calibration: Any, sequences: int | None) -> list[Any]:
    """List the texts of a calibration, or its batches until they hold as many sequences as asked for."""
    if isinstance(calibration, bytes | Mapping) or not isinstance(calibration, Iterable):
        raise CalibrationError(
            f"calibration is a {type(calibration).__name__}; expected 'synthetic', 'generated', 'none', a file of "
            "texts, texts, or batches"
        )
    items: list[Any] = []
    count = 0
    stream = not hasattr(calibration, "__len__")
    for place, item in enumerate(calibration):
        batch = isinstance(item, Mapping)
        if items and batch != isinstance(items[0], Mapping):
            raise CalibrationError("calibration mixes batches and texts; pass one or the other")
        items.append(_batch(place, item) if batch else item)
        if stream and not batch and len(items) == sequences:  # it may have no end
            break
        count += rows_of(items[-1]) if batch else 0
        if batch and sequences is not None and count >= sequences:
            if divisible(items[-1]):
                items[-1] = rows(items[-1], slice(rows_of(items[-1]) - (count - sequences)))
            break
    return items


def first_batches(calibration: Any, count: int) -> tuple[Any, bool]:
    """Read at most `count` batches of a calibration that is ready batches; any other stays as it is.

    Returns:
        The calibration, and whether it is ready batches.
    """
    if calibration is None or isinstance(calibration, str | Path | Mapping) or not isinstance(calibration, Iterable):
        return calibration, False
    items = iter(calibration)
    first = list(islice(items, 1))
    if first and isinstance(first[0], Mapping):
        return first + list(islice(items, count - 1)), True
    return (first + list(items) if items is calibration else calibration), False


def rows_of(batch: Batch) -> int:
    """Count the sequences, or images, of a batch."""
    return next((len(value) for value in _tensors(batch)), 0)


def positions_of(batch: Batch) -> int:
    """Return about how many vectors a model makes of a batch: its tokens, or the sequences of other inputs."""
    return max((value.numel() for value in _tensors(batch) if not value.is_floating_point()), default=rows_of(batch))


def divisible(batch: Batch) -> bool:
    """Whether all tensors of a batch have a row for each of its sequences."""
    return len({len(value) for value in _tensors(batch)}) == 1


def rows(batch: Batch, part: slice) -> Batch:
    """Return some of the sequences of a batch that is `divisible`."""
    return {
        name: value[part] if isinstance(value, Tensor) and value.dim() else value for name, value in batch.items()
    }


def _tensors(batch: Batch) -> list[Tensor]:
    return [value for value in batch.values() if isinstance(value, Tensor) and value.dim()]


def _batch(place: int, item: Mapping[str, Any]) -> Batch:
    """Check the token ids of a ready batch."""
    batch = dict(item)
    ids = batch.get("input_ids", torch.zeros(1))
    if not isinstance(ids, Tensor) or not ids.numel():
        got = "empty" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise CalibrationError(f"calibration batch {place}: input_ids is {got}; expected a tensor of token ids")
    return batch


def _text(place: int, item: Any) -> Text:
    """Check that a text, or a pair of texts, is one."""
    if isinstance(item, str):
        return str(item)  # NumPy's strings are of a class of their own
    item = item.tolist() if isinstance(item, ndarray) else item
    if isinstance(item, tuple | list) and len(item) == 2 and all(isinstance(part, str) for part in item):
        return item[0], item[1]
    raise CalibrationError(
        f"calibration item {place} is a {type(item).__name__}; expected a text, a pair of texts, or a batch"
    )
