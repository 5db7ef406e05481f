"""What a model is calibrated on: data by name, files, texts or batches, resolved once to sources of batches.

A conversion reads them with a part held back (`read_calibration`).
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.calibration.batches import (
    Item,
    draw_sequences,
    in_parts,
    is_divisible,
    sample_sequences,
    sequence_count,
    shuffled,
    slice_batch,
    split_each,
)
from collab_compress.calibration.builtin import builtin_texts, why_not_english
from collab_compress.calibration.encode import (
    Encoded,
    pair_separator,
    text_batches,
    tokenizer_inside,
    usable_length,
    vocabulary_size,
)
from collab_compress.calibration.files import Text, read_texts, split_columns, texts_of
from collab_compress.calibration.gather import Batch, batch_masks
from collab_compress.calibration.generated import generated_batches
from collab_compress.calibration.random_tokens import random_batches, sequence_default
from collab_compress.calibration.stacks import find_stacks
from collab_compress.errors import CalibrationError, check_type
from collab_compress.options import CalibrationOptions

Data: TypeAlias = str | Path | Sequence[Text] | Iterable[Mapping[str, Tensor]]
"""Calibration data of one kind."""

Calibration: TypeAlias = Data | tuple[Data, ...] | None
"""Calibration data; a tuple is several kinds together."""

_logger = logging.getLogger(__name__)

NAMES = ("auto", "builtin", "synthetic", "generated", "none")
EXPECTED = ", ".join(map(repr, NAMES))
DEFAULT_LENGTH = 128  # tokens, if nothing says how long inputs are
SAMPLE_SEQUENCES = 256  # sequences that widths and layers are chosen by
LENGTH_QUANTILE = 0.9  # share of the calibration sequences that are no longer than the length that counts


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
        calibration: "builtin" (English texts that come with the package; for a model with a head also pairs of them
            and random tokens), "synthetic" (random tokens), "auto" (builtin for a model that reads English, else
            synthetic), "generated" (texts that a decoder or a masked language model writes), "none" or None, a file
            of texts, a folder of documents, or a column of a file or a data set (`read_texts`), texts or text pairs
            (a list, a NumPy array, a column of a pandas table or of a `datasets` data set), or ready batches (a list,
            a `DataLoader`), which are all that a model of images or sounds can be calibrated on. A text that is
            longer than `length` becomes several passages; a pair is cut, but for a question-answering model its
            second text is read in overlapping windows, each after the question. For an encoder–decoder a pair is a
            source and a target, which the decoder reads shifted to the right, as in training. A tuple is several of
            these together, as ("builtin", "docs.txt"): all sequences of all of them, in random order.
        model: the model they are for; limits the vocabulary and the length.
        tokenizer: needed unless data are ready batches or none; or the processor that holds it.
        sequences: number of random sequences, 384 by default, or 128 of one length; of generated texts, 256 by
            default; of texts or their passages, drawn at random, all by default; of built-in texts and random
            sequences together; of ready batches or a stream of texts, the first, all by default. Of several sources,
            that of each.
        length: tokens of a random sequence, 8 to 128 by default; of a generated text, 128 by default; of a text or a
            passage at most, the model's limit by default. Ready batches are not cut.
        seed: of random tokens, and of the sample and order of texts.

    Returns:
        Batches of keyword arguments for the model; empty for none.

    Raises:
        CalibrationError: no tokenizer, no data, a file that cannot be read, something else than data, or no ready
            batches for a model of images or sounds.

    Example:
        >>> calibration_batches([batch], model, sequences=1)  # ready batches, cut to one sequence
        [{'input_ids': tensor([[...]]), 'attention_mask': tensor([[1, 1, 1, 1, 1, 1]])}]
    """
    options, notes = CalibrationOptions(sequences=sequences, length=length), list[str]()
    sources = resolve(calibration, model, tokenizer, options, seed)
    batches = mixed(model, [source.batches(notes) for source in sources], seed, notes)
    for note in dict.fromkeys(notes):
        _logger.warning(note)
    return batches


@dataclass(frozen=True, eq=False)
class SplitData:
    """Calibration data as a conversion takes them, in parts of up to 16 sequences (`in_parts`)."""

    used: Sequence[Batch]
    held_back: Sequence[Batch]  # to measure errors on
    sample: Sequence[Batch]  # about 256 sequences of `used`, to choose widths and layers by
    notes: Sequence[str]  # on data that were left out
    refit: bool  # by default: not to random tokens alone
    length: int  # tokens for which costs count
    real_used: Sequence[Batch]  # those of `used` that are no random tokens
    real_held_back: Sequence[Batch]


def read_calibration(
    model: PreTrainedModel,
    calibration: Calibration,
    tokenizer: PreTrainedTokenizerBase | None,
    options: CalibrationOptions | None,
    seed: int,
) -> SplitData:
    """Read calibration data for `model`, and hold an eighth back."""
    options = CalibrationOptions() if options is None else options
    check_type("calibration_options", options, CalibrationOptions, CalibrationError)
    notes: list[str] = []
    sources = resolve(calibration, model, tokenizer, options, seed)
    parts = [source.batches(notes) for source in sources]
    batches = mixed(model, parts, seed, notes)
    real = [batch for source, part in zip(sources, parts, strict=True) if not source.is_random for batch in part]
    length = typical_length(options, model, real)
    is_random = [[source.is_random] * len(part) for source, part in zip(sources, parts, strict=True)]
    groups: tuple[list[Batch], list[Batch]] = [], []
    real_groups: tuple[list[Batch], list[Batch]] = [], []
    for pair, random in zip(split_each(batches), in_random_order(is_random, seed), strict=True):
        for group, real_group, part in zip(groups, real_groups, map(in_parts, pair), strict=True):
            group += part
            real_group += [] if random else part
    sample = sample_sequences(groups[0], SAMPLE_SEQUENCES)
    return SplitData(*groups, sample, list(dict.fromkeys(notes)), bool(real), length, *real_groups)


def typical_length(options: CalibrationOptions, model: PreTrainedModel, batches: Sequence[Batch] = ()) -> int:
    """Return for how many tokens costs count: `length`, or what nine in ten sequences do not exceed, or 128."""
    masks = [batch_masks(model, batch)["encoder"].query for batch in batches]  # refuses those of other shapes
    lengths = [mask.sum(1).float().cpu() for mask in masks if mask is not None]
    if options.length is None and lengths:
        return max(1, int(torch.cat(lengths).quantile(LENGTH_QUANTILE, interpolation="lower")))
    if options.length is None and batches and model.main_input_name != "input_ids":
        stacks = find_stacks(model, batches[0])
        return stacks[0].shape[-2] if stacks else DEFAULT_LENGTH
    return options.length or DEFAULT_LENGTH


@dataclass(frozen=True, eq=False)
class Source:
    """Calibration data of one kind: in words for reports and cards, and how their batches are made.

    `batches` adds a sentence for each thing left out to the list that it is given.
    """

    words: str
    batches: Callable[[list[str]], list[Batch]]
    is_random: bool = False


def resolve(
    calibration: Calibration,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    options: CalibrationOptions,
    seed: int = 0,
) -> list[Source]:
    """Return what a model is calibrated on, nothing for "none" and None; files are read when batches are made."""
    tokenizer = tokenizer_inside(tokenizer)
    if tokenizer is not None:
        check_type("tokenizer", tokenizer, PreTrainedTokenizerBase, CalibrationError)
    sources: list[Source] = []
    for data in () if is_none(calibration) else kinds_of(calibration):
        is_name = isinstance(data, str | Path)
        first, items = ("", iter(())) if is_name else _peeked(data)
        if isinstance(first, Mapping):
            sources.append(_ready(items, options.sequences))
            continue
        maker = _Maker(model, _checked_tokenizer(model, tokenizer), options, seed)
        rows = data if hasattr(data, "__len__") else items
        sources += maker.named(str(data)) if is_name else [Source("texts", partial(maker.texts, rows))]
    return sources


def _checked_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer, or refuse to make batches for a model that reads more than tokens or has none."""
    if not reads_tokens_alone(model):
        inputs = "images besides tokens" if model.main_input_name == "input_ids" else model.main_input_name
        raise CalibrationError(
            f"{type(model).__name__} reads {inputs}; pass batches of your processor: "
            "calibration=[dict(processor(…, return_tensors='pt'))], or 'none'"
        )
    if tokenizer is None:
        raise CalibrationError(
            "calibration from random tokens or texts needs the model's tokenizer, and there is none: pass "
            "tokenizer=…, ready batches, or calibration 'none' to weigh all directions of the input alike"
        )
    return tokenizer


def reads_tokens_alone(model: PreTrainedModel) -> bool:
    """Return whether tokens are all that a model reads: no images or sounds, alone or with them."""
    has_towers = all(hasattr(model.config, name) for name in ("text_config", "vision_config"))
    return model.main_input_name == "input_ids" and not has_towers


class _Maker(NamedTuple):
    """Makes batches of tokens for one model."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    options: CalibrationOptions
    seed: int

    def named(self, name: str) -> list[Source]:
        """Return the sources that a name stands for, or the texts of a file or a data set."""
        if name in ("auto", "builtin"):
            reason = why_not_english(self.tokenizer)
            if self.model.config.is_encoder_decoder:
                reason = f"{type(self.model).__name__} reads a source and a target"
            if reason is None:
                return self.builtin()
            if name == "builtin":
                raise CalibrationError(f"the built-in texts are English, and {reason}; pass texts, or 'synthetic'")
            note = f"calibration uses random tokens, not the built-in texts: {reason}; pass texts of your own"
            return [self.random(self.options.sequences, note)]
        if name == "synthetic":
            return [self.random(self.options.sequences)]
        if name == "generated":
            return [Source("texts of its own", self.generated)]
        path = _path(name)
        file = split_columns(path)[0]
        words = f"texts ({Path(file).name if os.path.isfile(file) else name})"
        return [Source(words, partial(self.texts, path))]

    def builtin(self) -> list[Source]:
        """Return the built-in texts, and for a model with a head random tokens.

        The hidden states of a model without a head are its outputs, as embeddings are made: it reads all texts, one
        by one. A classifier of pairs needs the others too.
        """
        count, random = self.options.sequences, 0
        if self.model.base_model is self.model:
            texts = shuffled(builtin_texts(pairs=False), self.seed, count)
        else:
            texts = builtin_texts(pairs=pair_separator(self.model, self.tokenizer) is not None, more=False)
            random = sequence_default(self.options.length)
            if count is not None:  # the same mixture, and more random tokens where there are too few texts
                random = max(count - len(texts), round(count * random / (len(texts) + random)))
                texts = shuffled(texts, self.seed, count - random)
        builtin = Source("the texts that come with collab_compress", lambda _: self.encoded(texts).batches)
        return [builtin, self.random(random)] if random else [builtin]

    def random(self, count: int | None, *notes: str) -> Source:
        """Return random tokens, and what to say of them."""
        length, limit = self.options.length, self.limit()
        if length is not None and limit is not None and limit < length:
            notes += (f"random sequences have {limit} tokens, the most the model takes, and not {length}",)

        def make(all_notes: list[str]) -> list[Batch]:
            all_notes += notes
            return random_batches(self.model, self.tokenizer, count, length, self.seed)

        return Source("random tokens", make, is_random=True)

    def texts(self, rows: Any, notes: list[str]) -> list[Batch]:
        """Make batches of rows, or of a file or a data set by its name."""
        most = self.options.sequences
        if isinstance(rows, str):
            texts, left_out = read_texts(rows)
        else:  # a stream may have no end
            texts, left_out = texts_of(rows, "calibration", None if hasattr(rows, "__len__") else most)
        sample = shuffled(texts, self.seed, most)
        encoded = self.encoded(sample)
        notes += left_out
        if len(sample) < len(texts):
            notes.append(f"calibration uses {len(sample)} of {len(texts)} texts, drawn at random")
        for count, fate in ((encoded.divided, "read in passages of that length"), (encoded.cut, "cut there")):
            if count:
                notes.append(f"{count} of {len(sample)} texts are longer than {self.limit()} tokens and are {fate}")
        return encoded.batches

    def generated(self, _: list[str]) -> list[Batch]:
        """Make batches of texts that the model writes."""
        count, length = self.options.sequences, self.options.length
        return generated_batches(self.model, self.tokenizer, count, length, self.seed)

    def encoded(self, texts: list[Text]) -> Encoded:
        """Return batches of texts, or of as many of their passages as `sequences` says, drawn at random."""
        encoded = text_batches(self.model, self.tokenizer, texts, self.limit(), self.seed)
        most = self.options.sequences
        return encoded if most is None else encoded._replace(batches=draw_sequences(encoded.batches, most, self.seed))

    def limit(self) -> int | None:
        """Return how many tokens a sequence may have; None if nothing limits it."""
        return usable_length(self.options.length, self.model, self.tokenizer)


def mixed(model: PreTrainedModel, parts: Sequence[list[Batch]], seed: int, notes: list[str]) -> list[Batch]:
    """Return the batches of several sources in random order, those of one as they are.

    Tokens that the model does not know are refused; token types that it does not know are left out.
    """
    batches = in_random_order(parts, seed)
    for name, target in (("input_ids", False), ("decoder_input_ids", True)):
        size, largest = vocabulary_size(model, target), _largest(batches, name)
        if size is not None and largest >= size:
            raise CalibrationError(
                f"the calibration data holds token {largest}, but the model's vocabulary ends at {size - 1}; "
                "the tokenizer is not this model's"
            )
    types, largest = token_type_count(model), _largest(batches, "token_type_ids")
    if types is None or largest < types:
        return batches
    notes.append(
        f"the calibration data holds token types up to {largest}, and {type(model).__name__} has {types}, counted "
        "from 0 (type_vocab_size); token_type_ids are left out"
    )
    return [{name: value for name, value in batch.items() if name != "token_type_ids"} for batch in batches]


def token_type_count(model: PreTrainedModel) -> int | None:
    """Return how many token types a model has embeddings of; None if it has no such embeddings."""
    tables = [module for path, module in model.named_modules() if path.endswith("token_type_embeddings")]
    return min((table.num_embeddings for table in tables if isinstance(table, nn.Embedding)), default=None)


def in_random_order(parts: Sequence[Sequence[Item]], seed: int) -> list[Item]:
    """Return the items of several sources in random order, those of one as they are."""
    items = list(chain.from_iterable(parts))
    return shuffled(items, seed) if len(parts) > 1 else items


def is_none(calibration: object) -> bool:
    """Return whether there is no calibration."""
    only = calibration[0] if isinstance(calibration, tuple) and len(calibration) == 1 else calibration
    return only is None or (isinstance(only, str) and only == "none")


def kinds_of(calibration: Calibration, name: str = "calibration") -> tuple[Any, ...]:
    """Return the kinds of data in a tuple, which must be whole data each, or the only kind."""
    if not isinstance(calibration, tuple):
        return (calibration,)
    if not calibration:
        raise CalibrationError(f"{name} is an empty tuple; pass at least one source")
    for data in calibration:
        if (len(calibration) > 1 and is_none(data)) or isinstance(data, tuple | Mapping):
            got = repr(data) if data is None or isinstance(data, str) else f"a {type(data).__name__}"
            raise CalibrationError(
                f"{name} is a tuple, which is several sources of data together, and one of them is {got}; expected "
                "names, files, or lists; pass texts, pairs and batches in a list"
            )
    return calibration


def text_files(calibration: Calibration) -> list[Path]:
    """Return the files that calibration texts come from, without their columns."""
    kinds = [data for data in kinds_of(calibration) if isinstance(data, str | Path)]
    return [Path(split_columns(_path(data))[0]) for data in kinds if str(data) not in NAMES]


def _path(data: str | Path) -> str:
    path = os.path.expanduser(str(data))
    if not path:
        raise CalibrationError(f"calibration '' names no file; expected {EXPECTED}, or a file of texts")
    return path


def _peeked(data: Any) -> tuple[Any, Iterator[Any]]:
    """Return the first of some items, and an iterator over all of them."""
    columns = getattr(data, "column_names", getattr(data, "columns", None))
    if columns is not None:
        raise CalibrationError(
            f"got a data set with columns {list(columns)}; pass the one with the texts, as in "
            "calibration=data['text'], or pairs, as in list(zip(data['source'], data['target']))"
        )
    if isinstance(data, bytes | Mapping) or not isinstance(data, Iterable):
        raise CalibrationError(
            f"calibration is a {type(data).__name__}; expected {EXPECTED}, a file of texts, texts, or batches"
        )
    items = iter(data)
    for first in items:
        return first, chain([first], items)
    raise CalibrationError("calibration data is empty; pass at least one batch or text, or None")


def _ready(items: Iterator[Any], sequences: int | None) -> Source:
    """Check ready batches for what every model needs, and return copies with up to `sequences` sequences."""
    batches: list[Batch] = []
    count = 0
    for number, item in enumerate(items):
        batches.append(_checked(number, item))
        count += sequence_count(batches[-1])
        if sequences is not None and count >= sequences:
            if is_divisible(batches[-1]):
                batches[-1] = slice_batch(batches[-1], slice(sequence_count(batches[-1]) - (count - sequences)))
            break
    return Source("batches", lambda _: batches)


def _checked(number: int, item: Any) -> Batch:
    if not isinstance(item, Mapping):
        raise CalibrationError(
            f"calibration item {number} is a {type(item).__name__} among batches; pass batches only"
        )
    batch = dict(item)
    ids = batch.get("input_ids", torch.zeros(1, device="cpu"))
    if not isinstance(ids, Tensor) or not ids.numel():
        got = "empty" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise CalibrationError(f"calibration batch {number}: input_ids is {got}; expected a tensor of token ids")
    for name, value in batch.items():
        if isinstance(value, Tensor) and (value.is_meta or value.layout != torch.strided):
            kind = "on the meta device, without values" if value.is_meta else f"of layout {value.layout}"
            raise CalibrationError(f"calibration batch {number}: {name} is {kind}; expected a dense tensor of values")
        if isinstance(value, Tensor) and name.endswith("mask") and value.dim() == 2 and not bool((value >= 0).all()):
            raise CalibrationError(
                f"calibration batch {number}: {name} holds negative numbers or NaN; expected 1 at tokens, and 0 at "
                "padding"
            )
    return batch


def _largest(batches: Sequence[Batch], name: str) -> int:
    """Return the largest number in an argument of batches; -1 without any."""
    values = [batch[name] for batch in batches if isinstance(batch.get(name), Tensor)]
    return max((int(numbers.max()) for numbers in values if numbers.numel()), default=-1)
