"""Turn a task's texts into what a Trainer takes: token ids and labels, of each row's own length.

Rows are padded when they are batched: by `DataCollatorWithPadding` for classification, by `DataCollatorForSeq2Seq`,
which pads labels too, for translation and language modelling.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from collab_compress.errors import DataError
from collab_compress.tasks.load import progress_bars
from collab_compress.tasks.task import NO_LABEL

Data = TypeVar("Data", Dataset, DatasetDict)


def encode_classification(
    data: Data, tokenizer: PreTrainedTokenizerBase, *, max_length: int = 128, progress: bool = False
) -> Data:
    """Encode texts, or pairs of them, with their labels.

    Args:
        data: columns text, text_pair where there are pairs, and label; a data set or one for each split.
        tokenizer: the model's.
        max_length: tokens of a row; longer ones are cut, of a pair the longer text first.
        progress: whether to show progress bars.

    Returns:
        Columns input_ids, attention_mask, what else the tokenizer gives, and labels where there are any.

    Raises:
        DataError: columns are missing, or the length cannot be.
    """
    _check_length(max_length, tokenizer, 1 + tokenizer.num_special_tokens_to_add(pair=True))
    arguments = {"tokenizer": tokenizer, "max_length": max_length}
    return _each(data, lambda part: _map(part, _classification, ("text", "label"), arguments, progress))


def encode_translation(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_source_length: int = 128,
    max_target_length: int = 128,
    progress: bool = False,
) -> Data:
    """Encode sentences, with their translations as labels.

    Args:
        data: columns source and target; a data set or one for each split.
        tokenizer: the model's; takes targets by `text_target`, as Marian's has a vocabulary for each side.
        max_source_length: tokens of a source sentence; longer ones are cut.
        max_target_length: tokens of a target sentence.
        progress: whether to show progress bars.

    Returns:
        Columns input_ids, attention_mask and labels.

    Raises:
        DataError: columns are missing, or a length cannot be.
    """
    for length in (max_source_length, max_target_length):
        _check_length(length, tokenizer, 1 + tokenizer.num_special_tokens_to_add())
    arguments = {"tokenizer": tokenizer, "lengths": (max_source_length, max_target_length)}
    return _each(data, lambda part: _map(part, _translation, ("source", "target"), arguments, progress))


def encode_language_model(
    data: Data, tokenizer: PreTrainedTokenizerBase, *, length: int = 128, lines: bool = False, progress: bool = False
) -> Data:
    """Encode texts for a model that predicts each next token.

    Every text ends in the tokenizer's end token. All of them on end, after a start token, are cut into blocks; a
    block starts with the token that the one before ended with. So every token after the start, ends of texts
    included, is predicted exactly once whatever the length, and the perplexity is over all of them. The last block
    may be shorter. A model's own loss shifts the labels.

    Args:
        data: column text; a data set or one for each split.
        tokenizer: the model's; has an end token, which also starts where it has no start token.
        length: tokens of a block, or of a line.
        lines: whether each text is a row of its own, cut where it is longer; not what perplexity is reported on.
        progress: whether to show progress bars.

    Returns:
        Columns input_ids and labels.

    Raises:
        DataError: columns are missing, the tokenizer has no end token, or the length cannot be.
    """
    _check_length(length, tokenizer, 2)
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError("the tokenizer has no end token (eos), which language modelling needs after each text")
    start = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    arguments = {"tokenizer": tokenizer, "end": end}
    if lines:
        arguments |= {"start": start, "length": length}
        return _each(data, lambda part: _map(part, _lines, ("text",), arguments, progress))
    return _each(data, lambda part: _blocks(_map(part, _tokens, ("text",), arguments, progress), start, length))


def _each(data: Data, encode: Callable[[Dataset], Dataset]) -> Data:
    if isinstance(data, DatasetDict):
        return DatasetDict({split: encode(part) for split, part in data.items()})
    return encode(data)


def _map(
    data: Dataset,
    encode: Callable[..., dict[str, Any]],
    columns: Sequence[str],
    arguments: dict[str, Any],
    progress: bool,
) -> Dataset:
    """Encode a data set batch by batch; only what was encoded stays."""
    for name in columns:
        if name not in data.column_names:
            raise DataError(
                f"no column {name!r} to encode; expected {', '.join(columns)}, got {', '.join(data.column_names)}"
            )
    if not len(data):
        raise DataError("no rows to encode")
    if "label" in data.column_names and min(data["label"]) == NO_LABEL:
        data = data.remove_columns("label")
    with progress_bars(progress):
        # A tokenizer changes when it is first used, and what it is names the cache of data sets on disk.
        encode(data[:1], **arguments)
        return data.map(encode, batched=True, fn_kwargs=arguments, remove_columns=data.column_names)


def _check_length(length: int, tokenizer: PreTrainedTokenizerBase, least: int) -> None:
    most = tokenizer.model_max_length
    if not least <= length <= most:
        raise DataError(f"length {length}: expected {least} tokens or more{f', {most} at most' * (most < 1e9)}")


def _classification(batch: dict[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, Any]:
    texts = (batch["text"], batch["text_pair"]) if "text_pair" in batch else (batch["text"],)
    labels = {"labels": batch["label"]} if "label" in batch else {}
    return {**tokenizer(*texts, truncation=True, max_length=max_length), **labels}


def _translation(
    batch: dict[str, Any], tokenizer: PreTrainedTokenizerBase, lengths: tuple[int, int]
) -> dict[str, Any]:
    encoded = tokenizer(batch["source"], truncation=True, max_length=lengths[0], return_token_type_ids=False)
    targets = tokenizer(text_target=batch["target"], truncation=True, max_length=lengths[1])
    return {**encoded, "labels": targets["input_ids"]}


def _tokens(batch: dict[str, Any], tokenizer: PreTrainedTokenizerBase, end: int) -> dict[str, Any]:
    return {"input_ids": [[*ids, end] for ids in _ids(batch, tokenizer)]}


def _lines(
    batch: dict[str, Any], tokenizer: PreTrainedTokenizerBase, end: int, start: int, length: int
) -> dict[str, Any]:
    rows = [[start, *ids, end][:length] for ids in _ids(batch, tokenizer)]
    return {"input_ids": rows, "labels": rows}


def _ids(batch: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokenize texts however long, without special tokens."""
    encoded: list[list[int]] = tokenizer(batch["text"], add_special_tokens=False, verbose=False)["input_ids"]
    return encoded


def _blocks(data: Dataset, start: int, length: int) -> Dataset:
    """Cut the rows' tokens, put on end, into blocks that share a token with their neighbours."""
    chunks = [chunk.flatten().to_numpy() for chunk in data.data.column("input_ids").chunks]
    stream = np.concatenate([np.array([start]), *chunks])
    firsts = np.arange(0, max(len(stream) - 1, 0), length - 1)
    blocks = [stream[first : first + length] for first in firsts]
    ends = np.cumsum([0, *map(len, blocks)])
    rows = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(np.concatenate(blocks), pa.int32()))
    return Dataset(pa.table({"input_ids": rows, "labels": rows}), split=data.split)
