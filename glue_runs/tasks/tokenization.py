"""Encode a task's texts for a Trainer, with a model's tokenizer or one trained on these texts.

Rows keep their length, and are padded when they are batched: by `DataCollatorWithPadding` for classification, by
`DataCollatorForSeq2Seq`, which pads labels too, for translation and language modelling. For masked language modelling
`DataCollatorForLanguageModeling` masks other tokens in each batch.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from collab_compress.errors import DataError

from .catalogue import NO_LABEL
from .load import progress_bars

PAD, UNKNOWN, START, END = SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
MASK = "<mask>"
TOKENIZER_KINDS = ("bpe", "unigram", "word")
MAX_VOCAB_SIZE = 10_000_000
Data = TypeVar("Data", Dataset, DatasetDict)


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int | None = 8000,
    kind: str = "bpe",
    *,
    start: bool = False,
    mask: bool = False,
    lowercase: bool = False,
    progress: bool = False,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of words, or of subwords that never cross spaces or punctuation and can be decoded again.

    Special tokens are `<pad>`, `<unk>`, `<s>` and `</s>`, numbered 0 to 3. Every encoded text ends in `</s>`, as an
    encoder–decoder needs; language modelling sets its own ends. The same texts give the same tokenizer, except for
    "unigram", where the `tokenizers` library sums scores in an order that differs from run to run, so a few subwords
    may differ. Distributed processes should load a saved tokenizer.

    Args:
        texts: training data; texts of both languages for a shared vocabulary.
        vocab_size: largest number of tokens, including special ones; None for all words of "word".
        kind: "bpe" (byte-pair encoding of characters), "unigram", or "word" (text between spaces).
        start: whether every encoded text, and the first of a pair, also starts with `<s>`, as a classifier that reads
            the first position needs.
        mask: whether there is a fifth special token, `<mask>`, for masked language modelling.
        lowercase: whether texts are lowercased.

    Raises:
        DataError: the kind is unknown, the vocabulary is too small, or there is no text.
    """
    if kind not in TOKENIZER_KINDS:
        raise DataError(f"unknown kind of tokenizer {kind!r}; expected one of {', '.join(TOKENIZER_KINDS)}")
    if vocab_size is None and kind != "word":
        raise DataError(f"a tokenizer of kind {kind!r} needs a vocab_size")
    special = [*SPECIAL, MASK] if mask else [*SPECIAL]
    if vocab_size is not None and not len(special) < vocab_size <= MAX_VOCAB_SIZE:
        raise DataError(
            f"vocab_size is {vocab_size}; expected more than the {len(special)} special tokens, up to "
            f"{MAX_VOCAB_SIZE:,}"
        )
    tokenizer, trainer = _make_untrained(kind, vocab_size, special, progress)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), *([normalizers.Lowercase()] * lowercase)])
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "word":
        tokenizer = _renumber(tokenizer, special)
    if tokenizer.get_vocab_size() <= len(special):
        raise DataError("no text to train a tokenizer on")
    first = f"{START} " if start else ""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first}$A {END}",
        pair=f"{first}$A {END} $B:1 {END}:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (START, END)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=START,
        eos_token=END,
        mask_token=MASK if mask else None,
        clean_up_tokenization_spaces=False,
        split_special_tokens=kind != "word",  # "</s>" in a text is text; in PTB, "<unk>" is the unknown word
    )


def _make_untrained(kind: str, vocab_size: int | None, special: list[str], progress: bool) -> tuple[Tokenizer, Any]:
    """Return a tokenizer without a vocabulary, and its trainer."""
    options: dict[str, Any] = {
        "vocab_size": 2**31 - 1 if vocab_size is None else vocab_size,
        "special_tokens": special,
        "show_progress": progress,
    }
    if kind == "word":
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        trainer: Any = trainers.WordLevelTrainer(**options)
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    elif kind == "bpe":
        tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
        trainer = trainers.BpeTrainer(**options)
    else:
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(unk_token=UNKNOWN, **options)
    if kind != "word":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")]
        )
        tokenizer.decoder = decoders.Metaspace()
    return tokenizer, trainer


def _renumber(words: Tokenizer, special: list[str]) -> Tokenizer:
    """Remove the second number that training gives to words written like special tokens, such as PTB's `<unk>`."""
    vocabulary = words.get_vocab(with_added_tokens=False)
    ordinary = [word for word in sorted(vocabulary, key=vocabulary.__getitem__) if word not in special]
    numbers = {word: number for number, word in enumerate([*special, *ordinary])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=UNKNOWN))
    tokenizer.normalizer, tokenizer.pre_tokenizer = words.normalizer, words.pre_tokenizer
    tokenizer.add_special_tokens(special)
    return tokenizer


def encode_classification(
    data: Data, tokenizer: PreTrainedTokenizerBase, *, max_length: int = 128, progress: bool = False
) -> Data:
    """Encode texts, or pairs of texts, with their labels.

    Args:
        data: columns text, text_pair for pairs, and label; a data set or one for each split.
        max_length: tokens of a row; longer texts are truncated, of a pair the longer one first.

    Returns:
        Columns input_ids, attention_mask, what else the tokenizer returns, and labels if there are any.

    Raises:
        DataError: columns are missing, or the length is impossible.
    """
    _check_length(max_length, tokenizer, 1 + tokenizer.num_special_tokens_to_add(pair=True))

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        texts = [batch[name] for name in ("text", "text_pair") if name in batch]
        labels = {"labels": batch["label"]} if "label" in batch else {}
        return {**tokenizer(*texts, truncation=True, max_length=max_length), **labels}

    return _encode(data, encode, ("text", "label"), progress=progress)


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
        max_source_length: tokens of a source sentence; longer ones are truncated.
        max_target_length: tokens of a target sentence.

    Returns:
        Columns input_ids, attention_mask and labels.

    Raises:
        DataError: columns are missing, or a length is impossible.
    """
    for length in (max_source_length, max_target_length):
        _check_length(length, tokenizer, 1 + tokenizer.num_special_tokens_to_add())

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        cut = {"truncation": True, "max_length": max_source_length, "return_token_type_ids": False}
        targets = tokenizer(text_target=batch["target"], truncation=True, max_length=max_target_length)
        return {**tokenizer(batch["source"], **cut), "labels": targets["input_ids"]}

    return _encode(data, encode, ("source", "target"), progress=progress)


def encode_language_model(
    data: Data, tokenizer: PreTrainedTokenizerBase, *, length: int = 128, progress: bool = False
) -> Data:
    """Encode texts for a model that predicts each next token.

    Every text ends in the tokenizer's end token. All texts, concatenated after a start token, are cut into blocks; a
    block starts with the last token of the previous one. So every token after the start, ends of texts included, is
    predicted exactly once whatever the length, and the perplexity is over all of them. The last block may be shorter.
    A model's own loss shifts the labels.

    Args:
        data: column text; a data set or one for each split.
        tokenizer: the model's; has an end token, which also starts where it has no start token.
        length: tokens of a block.

    Returns:
        Columns input_ids and labels.

    Raises:
        DataError: columns are missing, the tokenizer has no end token, or the length is impossible.
    """
    _check_length(length, tokenizer, 2)
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError("the tokenizer has no end token (eos), which language modelling needs after each text")
    start = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        encoded: Any = tokenizer(batch["text"], add_special_tokens=False, verbose=False)
        for text in encoded["input_ids"]:
            text.append(end)
        return {"input_ids": encoded["input_ids"]}

    def group(rows: Dataset) -> Dataset:
        blocks = _cut_blocks(np.append([start], _concatenate(rows)), length, length - 1)
        return Dataset.from_dict({"input_ids": blocks, "labels": blocks}, split=rows.split)

    return _encode(data, encode, ("text",), group, progress=progress)


def encode_masked_language_model(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int = 128,
    seed: int | None = None,
    progress: bool = False,
) -> Data:
    """Encode texts for a model that predicts masked tokens.

    All texts, each with the tokenizer's special tokens, are concatenated and cut into blocks; the last may be
    shorter. With a seed they are masked here, once, as `DataCollatorForLanguageModeling` does it, so that every
    evaluation scores the same tokens: 15 % are to be predicted, of which 80 % are masked, 10 % are replaced by
    another token, and 10 % stay. Special tokens, and with them unknown words, are never masked.

    Args:
        data: column text; a data set or one for each split.
        tokenizer: the model's; has a mask token.
        length: tokens of a block.
        seed: of the masks; if not given, blocks are not masked, for a collator to do it.

    Returns:
        Columns input_ids and, with a seed, labels, −100 where nothing is to be predicted.

    Raises:
        DataError: columns are missing, the tokenizer has no mask token, or the length is impossible.
    """
    _check_length(length, tokenizer, 1)
    if tokenizer.mask_token_id is None:
        raise DataError("the tokenizer has no mask token, which masked language modelling needs")

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": tokenizer(batch["text"], verbose=False)["input_ids"]}

    def group(rows: Dataset) -> Dataset:
        columns: dict[str, Any] = {"input_ids": _cut_blocks(_concatenate(rows), length, length)}
        if seed is not None:
            mask = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=seed)
            masked = [mask([{"input_ids": block}]) for block in columns["input_ids"]]
            columns = {name: [row[name][0].numpy() for row in masked] for name in ("input_ids", "labels")}
        return Dataset.from_dict(columns, split=rows.split)

    return _encode(data, encode, ("text",), group, progress=progress)


def _encode(
    data: Data,
    encode: Callable[[dict[str, Any]], dict[str, Any]],
    columns: Sequence[str],
    group: Callable[[Dataset], Dataset] | None = None,
    *,
    progress: bool,
) -> Data:
    """Replace the columns of a data set, or of each split, by those of `encode`, batch by batch; then group rows."""
    if isinstance(data, DatasetDict):
        parts = {split: _encode(part, encode, columns, group, progress=progress) for split, part in data.items()}
        return DatasetDict(parts)
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
        # The state of the tokenizer names the cache of data sets on disk, and its first use changes it.
        encode(data[:1])
        rows = data.map(encode, batched=True, remove_columns=data.column_names)
    return rows if group is None else group(rows)


def _check_length(length: int, tokenizer: PreTrainedTokenizerBase, least: int) -> None:
    """Raise if rows would have fewer than `least` tokens, or more than the model takes."""
    most = tokenizer.model_max_length
    if not least <= length <= most:
        limit = f"{least} to {most:,}" if most < 1e9 else f"at least {least}"
        raise DataError(f"max_length is {length} tokens; expected {limit}")


def _concatenate(rows: Dataset) -> np.ndarray:
    """Return the tokens of all rows, one after another."""
    texts = rows.with_format("numpy")["input_ids"][:]
    tokens = np.concatenate(texts, dtype=np.int32, casting="unsafe")  # an empty text is of floats
    if not len(tokens):
        raise DataError(f"the tokenizer returns no token for the {len(rows)} rows; expected text in some of them")
    return tokens


def _cut_blocks(tokens: np.ndarray, length: int, step: int) -> list[np.ndarray]:
    """Return blocks that start `step` tokens apart."""
    return [tokens[first : first + length] for first in range(0, max(len(tokens) - length + step, 1), step)]
