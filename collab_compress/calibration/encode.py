"""Texts as batches of a model's tokens: what fits into it, the special tokens around texts, padding."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES

from collab_compress.calibration.batches import batch_size, shuffled
from collab_compress.calibration.files import Text
from collab_compress.calibration.gather import Batch, forward_arguments, takes_argument
from collab_compress.errors import CalibrationError, one_line

UNLIMITED = 10**9  # tokenizers without a limit have a larger model_max_length
STRIDE = 128  # tokens that two windows of a question's passage share, as in the example of Transformers
PROBES = 50  # texts tried to find out which special tokens a tokenizer adds


class Encoded(NamedTuple):
    """Batches of texts, and how many of these were too long: divided into passages, or cut."""

    batches: list[Batch]
    divided: int
    cut: int


def text_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text], length: int | None, seed: int
) -> Encoded:
    """Tokenize texts in batches of similar length, in random order.

    A text of more than `length` tokens becomes several passages. A pair is cut, but a question-answering model reads
    the second text in overlapping windows, each after the first text, the question. A tokenizer that is written in
    Python cannot divide texts: they are cut.
    """
    translates = model.config.is_encoder_decoder
    singles = [text for text in texts if isinstance(text, str)]
    pairs = [text for text in texts if not isinstance(text, str)]
    if translates and singles:
        raise CalibrationError(
            f"{singles[0][:60]!r} is no pair; an encoder–decoder reads a source and a target: pass "
            "FILE:source,target, lines with a tab between the two, or a list of pairs"
        )
    _check_room(length, tokenizer.num_special_tokens_to_add(pair=bool(pairs) and not translates))
    encode_some = _source_target_batches if translates else _encoder_batches
    try:
        parts = [encode_some(model, tokenizer, some, length) for some in (singles, pairs) if some]
    except Exception as error:  # tokenizers raises plain exceptions
        raise CalibrationError(f"the texts cannot be encoded: {one_line(error)}") from error
    batches = [batch for part in parts for batch in part.batches]
    return Encoded(shuffled(batches, seed), sum(part.divided for part in parts), sum(part.cut for part in parts))


def _encoder_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text], length: int | None
) -> Encoded:
    """Return batches of texts, or of pairs of texts."""
    rows: dict[str, list[list[int]]] = {}
    divided = cut = 0
    for group, options in _truncations(model, tokenizer, texts, length):
        encoded = encode(tokenizer, group, **options)
        origins = Counter(encoded.pop("overflow_to_sample_mapping", ()))  # text → number of its passages
        divided += sum(count > 1 for count in origins.values())
        if options and not origins and max(map(len, encoded["input_ids"])) == length:
            uncut = encode(tokenizer, group, verbose=False)["input_ids"]
            cut += sum(len(row) > length for row in uncut)
        for name, values in encoded.items():
            rows.setdefault(name, []).extend(values)
    ids = rows["input_ids"]
    order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
    columns = {
        name: [torch.tensor(values[row], dtype=torch.long, device="cpu") for row in order]
        for name, values in rows.items()
        if takes_argument(model, name)
    }
    return Encoded(pad(columns, "attention_mask", tokenizer), divided, cut)


def _truncations(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text], length: int | None
) -> Iterator[tuple[list[Text], dict[str, Any]]]:
    """Yield groups of the texts, each with the options by which its long texts are divided or cut."""
    if length is None:
        yield list(texts), {}
        return
    limit: dict[str, Any] = {"truncation": True, "max_length": length}
    is_single = isinstance(texts[0], str)
    if is_single or not (tokenizer.is_fast and is_one_of(model, MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES)):
        yield list(texts), limit | {"return_overflowing_tokens": is_single and tokenizer.is_fast}
        return
    questions = encode(tokenizer, [text[0] for text in texts], add_special_tokens=False, verbose=False)["input_ids"]
    room = length - tokenizer.num_special_tokens_to_add(pair=True)
    groups: dict[int | None, list[Text]] = {}  # stride, or None where the question leaves no room → pairs
    for text, question in zip(texts, questions, strict=True):
        left = room - len(question)
        groups.setdefault(min(STRIDE, left // 2) if left > 0 else None, []).append(text)
    for stride, group in groups.items():
        if stride is None:
            yield group, limit
        else:
            windows = {"truncation": "only_second", "stride": stride, "return_overflowing_tokens": True}
            yield group, limit | windows


def _source_target_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Any], length: int | None
) -> Encoded:
    """Return batches of sources and targets."""
    pairs = sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))
    sources, targets = (list(side) for side in zip(*pairs, strict=True))
    sides = [
        encode(tokenizer, sources, verbose=False)["input_ids"],
        encode(tokenizer, targets, target=True, verbose=False)["input_ids"],
    ]
    lengths = [max(map(len, rows)) for rows in zip(*sides, strict=True)]
    most = inf if length is None else length
    options: dict[str, Any] = {"padding": True, "truncation": length is not None, "max_length": length}
    slices = batch_slices([int(min(count, most)) for count in lengths])
    batches = [encode_pairs(model, tokenizer, pairs[group], **options) for group in slices]
    return Encoded(batches, divided=0, cut=sum(count > most for count in lengths))


def encode_pairs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Any], **options: Any
) -> Batch:
    """Tokenize pairs for an encoder–decoder; its decoder reads targets shifted to the right, as in training."""
    sources, targets = (list(side) for side in zip(*pairs, strict=True))
    known = forward_arguments(model)
    batch = encode(tokenizer, sources, return_tensors="pt", **options)
    target = encode(tokenizer, targets, True, return_tensors="pt", **options)
    labels, mask = target["input_ids"], target["attention_mask"]
    shift: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None:  # a model without a head
        first = torch.full_like(labels[:, :1], start_token(model.config, labels[0][mask[0] != 0].tolist()))
        shifted = torch.cat([first, labels[:, :-1]], 1)
    else:
        shifted = shift(labels)
    encoded = {name: value for name, value in batch.items() if name in known}
    return encoded | {"decoder_input_ids": shifted, "decoder_attention_mask": mask}


def encode(tokenizer: Any, text: Any, target: bool = False, **options: Any) -> Any:
    """Tokenize texts, cut and padded on the right; targets of a translation as such, if their language is set."""
    names = ("padding_side", "truncation_side", "tgt_lang")
    before = {name: getattr(tokenizer, name) for name in names if hasattr(tokenizer, name)}
    tokenizer.padding_side = tokenizer.truncation_side = "right"  # decoders that generate are set to "left"
    try:
        with suppress(KeyError, ValueError, TypeError):  # the target's language is not set
            if target:
                return tokenizer(text_target=text, **options)
        return tokenizer(text, **options)
    finally:
        for name, value in before.items():  # some tokenizers overwrite tgt_lang
            setattr(tokenizer, name, value)


def batch_slices(lengths: Sequence[int]) -> list[slice]:
    """Divide sequences, in their order, into batches, given the number of tokens of each."""
    starts, longest = [0], 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if index - starts[-1] >= batch_size(longest):
            starts.append(index)
            longest = length
    return [slice(*ends) for ends in pairwise([*starts, len(lengths)])]


def pad(columns: Mapping[str, list[Tensor]], mask_name: str, tokenizer: PreTrainedTokenizerBase) -> list[Batch]:
    """Pad sequences on the right, batch by batch, and add the attention mask; the first column holds token ids."""
    ids_name = next(iter(columns))
    batches = []
    for group in batch_slices([len(row) for row in columns[ids_name]]):
        batch = {}
        for name, column in columns.items():
            fill = (tokenizer.pad_token_id or 0) if name == ids_name else 0
            batch[name] = pad_sequence(column[group], True, fill)
        batch[mask_name] = pad_sequence([torch.ones_like(row) for row in columns[ids_name][group]], True)
        batches.append(batch)
    return batches


def usable_length(length: int | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the length that model and tokenizer can take, at most `length`; None if nothing limits it."""
    limit: Any = tokenizer.model_max_length
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 1:
        raise CalibrationError(f"model_max_length of the tokenizer is {limit!r}; expected a number of tokens")
    config = model.config.get_text_config()
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    tables = [getattr(module, "position_embeddings", None) for module in model.modules()]
    offset = [  # of models whose positions begin after padding's
        table.num_embeddings - table.padding_idx - 1
        for table in tables
        if isinstance(table, nn.Embedding) and table.padding_idx is not None
    ]
    positions = next(filter(None, (*offset, *limits)), inf)
    shortest = min(inf if length is None else length, limit, positions)
    _check_room(shortest, tokenizer.num_special_tokens_to_add())
    return int(shortest) if shortest < UNLIMITED else None


def _check_room(length: float | None, special: int) -> None:
    if length is not None and length <= special:
        raise CalibrationError(
            f"length {length} leaves no room for texts beside the {special} special tokens of each; pass a larger one"
        )


def tokenizer_inside(tokenizer: Any) -> Any:
    """Return the tokenizer that a processor holds, None if it holds none; a tokenizer as it is."""
    return getattr(tokenizer, "tokenizer", None) if isinstance(tokenizer, ProcessorMixin) else tokenizer


def is_one_of(model: PreTrainedModel, classes: Mapping[str, Any]) -> bool:
    """Return whether a model is of a class that Transformers lists for a task, or of a subclass."""
    return any(class_.__name__ in classes.values() for class_ in type(model).__mro__)


def vocabulary_size(model: PreTrainedModel, target: bool = False) -> int | None:
    """Return how many tokens a model knows, or its decoder for a `target`; None if it does not say."""
    config = model.config
    if target and getattr(config, "decoder_vocab_size", None):
        return int(config.decoder_vocab_size)
    try:
        embeddings = None if target else model.get_input_embeddings()
    except NotImplementedError:
        embeddings = None
    if isinstance(embeddings, nn.Embedding):
        return embeddings.num_embeddings
    size: int | None = getattr(config.get_text_config(), "vocab_size", None)
    return size


def ordinary_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: bool = False) -> list[int]:
    """Return the ids, ascending, that both tokenizer and model (or its decoder) know and that are not special."""
    size = min(len(tokenizer), vocabulary_size(model, target) or len(tokenizer))
    special = set(tokenizer.all_special_ids)
    ids = [token for token in range(size) if token not in special]
    if not ids:
        raise CalibrationError(f"the tokenizer's vocabulary of {size} holds special tokens only")
    return ids


def special_tokens(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], target: bool = False
) -> tuple[list[int], list[int]]:
    """Return the ids before and after a text, or the target of a translation, given ids of ordinary tokens."""
    for text in ("a", *(tokenizer.decode([token]) for token in ids[:PROBES])):
        plain = list(encode(tokenizer, text, target, add_special_tokens=False)["input_ids"])
        full = list(encode(tokenizer, text, target, add_special_tokens=True)["input_ids"])
        for start in range(len(full) - len(plain) + 1) if plain else ():
            if full[start : start + len(plain)] == plain:
                return full[:start], full[start + len(plain) :]
    raise CalibrationError("the tokenizer makes no tokens of any text; pass ready batches instead")


def pair_separator(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """Return the special tokens between two texts; None if model or tokenizer does not tell pairs apart."""
    is_causal = any(getattr(module, "is_causal", False) for module in model.modules())
    if model.config.is_encoder_decoder or is_causal or getattr(model.config, "is_decoder", False):
        return None
    ids = ordinary_tokens(model, tokenizer)
    prefix, suffix = special_tokens(tokenizer, ids)
    for text in ("a", *(tokenizer.decode([token]) for token in ids[:PROBES])):
        plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        pair = list(tokenizer(text, text)["input_ids"])
        between = pair[len(prefix) + len(plain) : len(pair) - len(plain) - len(suffix)]
        if plain and [*prefix, *plain, *between, *plain, *suffix] == pair:
            return between or None
    return None


def start_token(config: PretrainedConfig, suffix: Sequence[int]) -> int:
    """Return a decoder's start token; if the config names none, the last token of a target (mBART's language)."""
    start = getattr(config, "decoder_start_token_id", None)
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    tokens = (start, *suffix[-1:], *(getattr(config, name, None) for name in names))
    return next((token for token in tokens if isinstance(token, int)), 0)
