"""Texts as batches of a model's tokens: what fits into it, the special tokens around texts, padding."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from math import inf
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.calibration.files import Text
from collab_compress.calibration.gather import Batch, forward_arguments, takes_argument
from collab_compress.errors import CalibrationError, one_line

BATCH_SIZE = 16  # sequences, at most
MAX_TOKENS_PER_BATCH = 4096  # padding counts; a longer sequence is a batch by itself
UNLIMITED = 10**9  # tokenizers without a limit have a larger model_max_length
MOST_NUMBERS = 10**9  # of 4 or 8 bytes, in memory at once
PROBES = 50  # texts tried to find out which special tokens a tokenizer adds

_Item = TypeVar("_Item")
SpecialTokens: TypeAlias = tuple[list[int], list[int]]
"""Ids that a tokenizer puts before and after a text."""


def text_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Text],
    length: int | None,
    seed: int,
) -> tuple[list[Batch], int]:
    """Tokenize texts in batches of similar length, in random order; return how many were cut at `length` too.

    Texts for an encoder–decoder are sources and targets.
    """
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
                lengths = _lengths(tokenizer, part, translates)
                cut += sum(length is not None and count > length for count in lengths)
                batches += [
                    encode_pairs(model, tokenizer, part[group], padding=True, **options)
                    for group in batch_slices([count if length is None else min(count, length) for count in lengths])
                ]
            else:
                columns = {
                    name: [torch.tensor(row, dtype=torch.long, device="cpu") for row in rows]
                    for name, rows in encode(tokenizer, part, **options).items()
                    if takes_argument(model, name)
                }
                if length is not None and max(map(len, columns["input_ids"])) == length:
                    cut += sum(count > length for count in _lengths(tokenizer, part, translates))
                batches += pad(columns, "attention_mask", tokenizer)
        except Exception as error:  # tokenizers raises plain exceptions
            raise CalibrationError(f"the texts cannot be encoded: {one_line(error)}") from error
    return sampled(batches, None, seed), cut


def _lengths(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text], translates: bool) -> list[int]:
    """Return the number of tokens of each text or pair that is not cut; of a source or its target the larger."""
    sides = zip(*texts, strict=True) if translates else [texts]
    rows = [
        encode(tokenizer, list(side), target=bool(place), verbose=False)["input_ids"]
        for place, side in enumerate(sides)
    ]
    return [max(map(len, row)) for row in zip(*rows, strict=True)]


def batch_size(length: int) -> int:
    """Return how many sequences of `length` tokens a batch holds."""
    return max(1, min(BATCH_SIZE, MAX_TOKENS_PER_BATCH // max(1, length)))


def batch_slices(lengths: Sequence[int]) -> list[slice]:
    """Divide sequences, in their order, into batches, given the number of tokens of each."""
    starts, longest = [0], 0
    for place, length in enumerate(lengths):
        longest = max(longest, length)
        if place - starts[-1] >= batch_size(longest):
            starts.append(place)
            longest = length
    return [slice(*ends) for ends in pairwise([*starts, len(lengths)])]


def encode_pairs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Any], **options: Any
) -> Batch:
    """Tokenize sources and targets for an encoder–decoder; its decoder reads targets shifted to the right.

    The first token is the decoder's start token, as in training (`prepare_decoder_input_ids_from_labels`).
    """
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
    """Tokenize a text or a list of texts, cut and padded on the right whatever the tokenizer is set to.

    Targets of a translation are tokenized as such, if their language is set.
    """
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
    """Return the length that model and tokenizer can take, at most `length`; None if nothing limits it.

    Raises:
        CalibrationError: the tokenizer's limit is no number, or leaves no room beside the special tokens.
    """
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
    if shortest <= tokenizer.num_special_tokens_to_add():
        raise CalibrationError(
            f"length {shortest} leaves no room for texts beside the special tokens of each; pass a larger one"
        )
    return int(shortest) if shortest < UNLIMITED else None


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


def token_type_count(model: PreTrainedModel) -> int | None:
    """Return how many token types a model has embeddings of; None if it has no such embeddings."""
    tables = [module for path, module in model.named_modules() if path.endswith("token_type_embeddings")]
    return min((table.num_embeddings for table in tables if isinstance(table, nn.Embedding)), default=None)


def ordinary_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: bool = False) -> list[int]:
    """Return the ids, ascending, that both tokenizer and model (or its decoder) know and that are not special.

    Raises:
        CalibrationError: there are none.
    """
    size = min(len(tokenizer), vocabulary_size(model, target) or len(tokenizer))
    special = set(tokenizer.all_special_ids)
    ids = [token for token in range(size) if token not in special]
    if not ids:
        raise CalibrationError(f"the tokenizer's vocabulary of {size} holds special tokens only")
    return ids


def special_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], target: bool = False) -> SpecialTokens:
    """Return the special tokens around a text, or around the target of a translation if its language is set."""
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


def sampled(items: Sequence[_Item], count: int | None, seed: int) -> list[_Item]:
    """Draw at most `count` items, or all for None, in random order."""
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed), device="cpu")
    return [items[place] for place in order[:count].tolist()]


def check_size(numbers: int, what: str) -> None:
    """Refuse more numbers than fit into memory."""
    if numbers > MOST_NUMBERS:
        raise CalibrationError(
            f"{what} are {numbers:.1e} numbers; at most {MOST_NUMBERS:.0e} fit, so pass fewer sequences"
        )
