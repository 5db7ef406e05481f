"""Turn a task's texts into what a Trainer takes, with a model's tokenizer or one that is trained on these texts.

Token ids and labels are of each row's own length. Rows are padded when they are batched: by `DataCollatorWithPadding`
for classification, by `DataCollatorForSeq2Seq`, which pads labels too, for translation and language modelling; where
that is masked, `DataCollatorForLanguageModeling` masks rows anew whenever they are batched.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from collab_compress.errors import DataError
from collab_compress.tasks.catalogue import NO_LABEL
from collab_compress.tasks.load import progress_bars, shared

PAD, UNKNOWN, START, END = SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
MASK = "<mask>"
KINDS = ("bpe", "unigram", "word")
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
    """Train a tokenizer: subwords that never cross spaces or punctuation and join to the text again, or words.

    Special tokens are `<pad>`, `<unk>`, `<s>` and `</s>`, numbered 0 to 3. Every encoded text ends in `</s>`, as an
    encoder–decoder needs; language modelling sets its own ends. The same texts give the same tokenizer, except for
    "unigram", whose scores the `tokenizers` library adds up in an order that differs from run to run: the pieces may
    differ by a few. Processes that work together should load one that was saved.

    Args:
        texts: to train on; those of both languages for a shared vocabulary.
        vocab_size: tokens at most, special ones included; None for all words of "word".
        kind: "bpe" (byte-pair encoding of characters), "unigram", or "word" (what stands between spaces).
        start: whether every encoded text, and the first of a pair, also starts with `<s>`, as a classifier that reads
            the first position needs.
        mask: whether there is a fifth special token, `<mask>`, for masked language modelling.
        lowercase: whether texts are put in lower case.
        progress: whether to show a progress bar.

    Returns:
        The tokenizer; `save_pretrained` and `AutoTokenizer.from_pretrained` save and load it.

    Raises:
        DataError: no such kind, a vocabulary with no room, or no text.
    """
    if kind not in KINDS:
        raise DataError(f"unknown kind of tokenizer {kind!r}; expected one of {', '.join(KINDS)}")
    if vocab_size is None and kind != "word":
        raise DataError(f"a tokenizer of kind {kind!r} needs a vocab_size")
    special = [*SPECIAL, MASK] if mask else [*SPECIAL]
    if vocab_size is not None and vocab_size <= len(special):
        raise DataError(f"vocab_size is {vocab_size}; expected more than the {len(special)} special tokens")
    tokenizer, trainer = _blank(kind, vocab_size, special, progress)
    steps = [normalizers.NFC(), *([normalizers.Lowercase()] if lowercase else [])]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "word":
        tokenizer = _renumbered(tokenizer, special)
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


def encode_classification(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int = 128,
    progress: bool = False,
    num_proc: int | None = None,
) -> Data:
    """Encode texts, or pairs of them, with their labels.

    Args:
        data: columns text, text_pair where there are pairs, and label; a data set or one for each split.
        tokenizer: the model's.
        max_length: tokens of a row; longer ones are cut, of a pair the longer text first.
        progress: whether to show progress bars.
        num_proc: processes that share the work; one if not given.

    Returns:
        Columns input_ids, attention_mask, what else the tokenizer gives, and labels where there are any.

    Raises:
        DataError: columns are missing, or the length cannot be.
    """
    check_length(max_length, tokenizer, 1 + tokenizer.num_special_tokens_to_add(pair=True))
    arguments = {"tokenizer": tokenizer, "max_length": max_length}
    return each_split(
        data, lambda part: map_rows(part, _classification, ("text", "label"), arguments, progress, num_proc)
    )


def encode_translation(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_source_length: int = 128,
    max_target_length: int = 128,
    progress: bool = False,
    num_proc: int | None = None,
) -> Data:
    """Encode sentences, with their translations as labels.

    Args:
        data: columns source and target; a data set or one for each split.
        tokenizer: the model's; takes targets by `text_target`, as Marian's has a vocabulary for each side.
        max_source_length: tokens of a source sentence; longer ones are cut.
        max_target_length: tokens of a target sentence.
        progress: whether to show progress bars.
        num_proc: processes that share the work; one if not given.

    Returns:
        Columns input_ids, attention_mask and labels.

    Raises:
        DataError: columns are missing, or a length cannot be.
    """
    for length in (max_source_length, max_target_length):
        check_length(length, tokenizer, 1 + tokenizer.num_special_tokens_to_add())
    arguments = {"tokenizer": tokenizer, "lengths": (max_source_length, max_target_length)}
    return each_split(
        data, lambda part: map_rows(part, _translation, ("source", "target"), arguments, progress, num_proc)
    )


def encode_language_model(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int = 128,
    lines: bool = False,
    progress: bool = False,
    num_proc: int | None = None,
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
        num_proc: processes that share the work; one if not given.

    Returns:
        Columns input_ids and labels.

    Raises:
        DataError: columns are missing, the tokenizer has no end token, or the length cannot be.
    """
    check_length(length, tokenizer, 2)
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError("the tokenizer has no end token (eos), which language modelling needs after each text")
    start = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    arguments = {"tokenizer": tokenizer, "end": end}
    if lines:
        arguments |= {"start": start, "length": length}
        return each_split(data, lambda part: map_rows(part, _lines, ("text",), arguments, progress, num_proc))
    return each_split(
        data, lambda part: _blocks(map_rows(part, _tokens, ("text",), arguments, progress, num_proc), start, length)
    )


def encode_masked_language_model(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int = 128,
    share: float = 0.15,
    seed: int | None = None,
    progress: bool = False,
    num_proc: int | None = None,
) -> Data:
    """Encode texts for a model that fills in what is masked.

    All texts on end, each with the tokenizer's special tokens, are cut into blocks; the last may be shorter. With a
    seed they are masked here, once, as `DataCollatorForLanguageModeling` does it: what is scored so is scored on the
    same tokens every time. Special tokens, and with them unknown words, are never masked.

    Args:
        data: column text; a data set or one for each split.
        tokenizer: the model's; has a mask token.
        length: tokens of a block.
        share: of tokens that are to be predicted, where there is a seed; of these 80 % are masked, 10 % are another
            token, and 10 % stay.
        seed: of the masks; if not given, the blocks are left for the collator.
        progress: whether to show progress bars.
        num_proc: processes that share the work; one if not given.

    Returns:
        Columns input_ids and, with a seed, labels, −100 where nothing is to be predicted.

    Raises:
        DataError: columns are missing, the tokenizer has no mask token, or the length cannot be.
    """
    check_length(length, tokenizer, 1)
    if tokenizer.mask_token_id is None:
        raise DataError("the tokenizer has no mask token, which masked language modelling needs")

    def encode(part: Dataset) -> Dataset:
        blocks = _cut(
            _stream(map_rows(part, _whole, ("text",), {"tokenizer": tokenizer}, progress, num_proc)), length, length
        )
        if seed is None:
            return _rows(part, input_ids=blocks)
        mask = DataCollatorForLanguageModeling(tokenizer, mlm_probability=share, seed=seed)
        masked = [mask([{"input_ids": block}]) for block in blocks]
        return _rows(part, **{name: [row[name][0].numpy() for row in masked] for name in ("input_ids", "labels")})

    return each_split(data, encode)


def _blank(kind: str, vocab_size: int | None, special: list[str], progress: bool) -> tuple[Tokenizer, Any]:
    """Make a tokenizer with no vocabulary yet, and what trains it."""
    size = 2**31 - 1 if vocab_size is None else vocab_size
    options: dict[str, Any] = {"vocab_size": size, "special_tokens": special, "show_progress": progress}
    if kind == "word":
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return tokenizer, trainers.WordLevelTrainer(**options)
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
        trainer: Any = trainers.BpeTrainer(**options)
    else:
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(unk_token=UNKNOWN, **options)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")]
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer, trainer


def _renumbered(words: Tokenizer, special: list[str]) -> Tokenizer:
    """Number words anew: one written like a special token, as PTB's `<unk>`, has been given a second number."""
    vocabulary = words.get_vocab(with_added_tokens=False)
    ordinary = [word for word in sorted(vocabulary, key=vocabulary.__getitem__) if word not in special]
    numbers = {word: number for number, word in enumerate([*special, *ordinary])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=UNKNOWN))
    tokenizer.normalizer, tokenizer.pre_tokenizer = words.normalizer, words.pre_tokenizer
    tokenizer.add_special_tokens(special)
    return tokenizer


def each_split(data: Data, encode: Callable[[Dataset], Dataset]) -> Data:
    """Encode a data set, or each split of one."""
    if isinstance(data, DatasetDict):
        return DatasetDict({split: encode(part) for split, part in data.items()})
    return encode(data)


def map_rows(
    data: Dataset,
    encode: Callable[..., dict[str, Any]],
    columns: Sequence[str],
    arguments: dict[str, Any],
    progress: bool,
    num_proc: int | None,
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
        return data.map(
            encode,
            batched=True,
            fn_kwargs=arguments,
            remove_columns=data.column_names,
            num_proc=shared(data, num_proc),
        )


def check_length(length: int, tokenizer: PreTrainedTokenizerBase, least: int) -> None:
    """Refuse rows of fewer tokens than `least`, or of more than the model takes."""
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


def _whole(batch: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {"input_ids": tokenizer(batch["text"], verbose=False)["input_ids"]}


def _blocks(data: Dataset, start: int, length: int) -> Dataset:
    """Cut the rows' tokens, put on end, into blocks that share a token with their neighbours."""
    stream = np.concatenate([np.array([start]), _stream(data)])
    blocks = _cut(stream, length, length - 1)
    return _rows(data, input_ids=blocks, labels=blocks)


def _stream(data: Dataset) -> np.ndarray:
    """Concatenate the tokens of the rows."""
    chunks = data.data.column("input_ids").chunks
    stream = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks])
    if not len(stream):
        raise DataError(f"the tokenizer finds no token in the {len(data)} rows; expected text in some of them")
    return stream


def _cut(stream: np.ndarray, length: int, step: int) -> list[np.ndarray]:
    """Cut blocks that start `step` tokens apart."""
    return [stream[first : first + length] for first in range(0, max(len(stream) - length + step, 1), step)]


def _rows(data: Dataset, **columns: list[np.ndarray]) -> Dataset:
    """Make a data set of a split's blocks."""
    return Dataset(pa.table({name: _lists(blocks) for name, blocks in columns.items()}), split=data.split)


def _lists(blocks: list[np.ndarray]) -> pa.ListArray:
    ends = np.cumsum([0, *map(len, blocks)])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(np.concatenate(blocks), pa.int32()))
