"""Train a tokenizer on a task's own texts, for models that start from nothing."""

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from collab_compress.errors import DataError

PAD, UNKNOWN, START, END = SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
KINDS = ("bpe", "unigram", "word")


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int | None = 8000,
    kind: str = "bpe",
    *,
    start: bool = False,
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
    if vocab_size is not None and vocab_size <= len(SPECIAL):
        raise DataError(f"vocab_size is {vocab_size}; expected more than the {len(SPECIAL)} special tokens")
    tokenizer, trainer = _blank(kind, vocab_size, progress)
    steps = [normalizers.NFC(), *([normalizers.Lowercase()] if lowercase else [])]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "word":
        tokenizer = _renumbered(tokenizer)
    if tokenizer.get_vocab_size() <= len(SPECIAL):
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
        clean_up_tokenization_spaces=False,
        split_special_tokens=kind != "word",  # "</s>" in a text is text; in PTB, "<unk>" is the unknown word
    )


def _blank(kind: str, vocab_size: int | None, progress: bool) -> tuple[Tokenizer, Any]:
    """Make a tokenizer with no vocabulary yet, and what trains it."""
    size = 2**31 - 1 if vocab_size is None else vocab_size
    options: dict[str, Any] = {"vocab_size": size, "special_tokens": list(SPECIAL), "show_progress": progress}
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


def _renumbered(words: Tokenizer) -> Tokenizer:
    """Number words anew: one written like a special token, as PTB's `<unk>`, has been given a second number."""
    vocabulary = words.get_vocab(with_added_tokens=False)
    ordinary = [word for word in sorted(vocabulary, key=vocabulary.__getitem__) if word not in SPECIAL]
    numbers = {word: number for number, word in enumerate([*SPECIAL, *ordinary])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=UNKNOWN))
    tokenizer.normalizer, tokenizer.pre_tokenizer = words.normalizer, words.pre_tokenizer
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer
