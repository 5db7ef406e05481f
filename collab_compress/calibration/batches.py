"""What models are run on to calibrate them: random tokens, noise, texts, files, or ready batches."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from collab_compress.calibration.folders import folder_inputs
from collab_compress.calibration.noise import noise_for, reads_two
from collab_compress.errors import CalibrationError

TRIED = 50  # texts with which to find out which special tokens a tokenizer adds
UNLIMITED = 10**9  # what Transformers gives as the limit of tokenizers that have none is larger


def special_tokens(
    tokenizer: PreTrainedTokenizerBase, ordinary: Sequence[int], target: bool = False
) -> tuple[list[int], list[int]]:
    """Find out which tokens the tokenizer puts before and behind a text, by letting it encode one.

    Args:
        tokenizer: what encodes.
        ordinary: some tokens that are not special, to make a text of.
        target: whether the text is one to be translated into; as a source where the target's language is not set.

    Raises:
        CalibrationError: the tokenizer makes no tokens of any text tried.
    """
    for text in ("a", *(tokenizer.decode([token]) for token in ordinary[:TRIED])):
        plain, whole = (_encoded(tokenizer, text, target, add_special_tokens=special) for special in (False, True))
        for start in range(len(whole) - len(plain) + 1) if plain else ():
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
    raise CalibrationError("the tokenizer makes no tokens of any text; pass ready batches instead")


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str, target: bool = False, **options: bool) -> list[int]:
    """Encode one text, as a target where the tokenizer knows how."""
    language = getattr(tokenizer, "tgt_lang", None)
    if target:
        try:
            return list(tokenizer(text_target=text, **options)["input_ids"])
        except (KeyError, ValueError, TypeError):  # the target's language is not set
            pass
        finally:
            if hasattr(tokenizer, "tgt_lang"):
                tokenizer.tgt_lang = language  # some set it on the way
    return list(tokenizer(text, **options)["input_ids"])


def fitting(length: int | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Shorten sequences to what model and tokenizer can take; None where neither knows a limit."""
    limits = [inf if length is None else length, tokenizer.model_max_length, _positions(model)]
    return int(min(limits)) if min(limits) < UNLIMITED else None


def _positions(model: PreTrainedModel) -> float:
    """How many positions the model has: fewer than rows in its table where those up to padding's are left out."""
    tables = (getattr(module, "position_embeddings", None) for module in model.modules())
    for table in tables:
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            return table.num_embeddings - table.padding_idx - 1
    config = model.config.get_text_config()
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next(filter(None, limits), inf)


Batch: TypeAlias = dict[str, Tensor]

BATCH_SIZE = 16


def batches_beside_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    inputs: dict[str, Tensor],
    length: int,
    seed: int,
) -> list[Batch]:
    """Cut images, clips or sounds into batches, with random tokens for what else the model reads.

    Args:
        model: the model they are for.
        tokenizer: its tokenizer, if it reads tokens too.
        inputs: keyword arguments of the model, each (N, …).
        length: tokens in a random sequence.
        seed: of the tokens.

    Raises:
        CalibrationError: tokens are needed, and there is no tokenizer.
    """
    sequences = min((len(part) for part in inputs.values()), default=0)
    tokens: dict[str, Tensor] = {}
    if reads_two(model) or model.config.is_encoder_decoder:
        if tokenizer is None:
            raise CalibrationError(
                f"{type(model).__name__} reads tokens beside {', '.join(inputs)}; pass its tokenizer=…, or "
                "ready batches"
            )
        limit = fitting(length, model, tokenizer) or length
        drawn = synthetic_batches(model, tokenizer, sequences, limit, seed, source=reads_two(model))
        tokens = {name: torch.cat([batch[name] for batch in drawn]) for name in drawn[0]}
    whole = {**tokens, **inputs}
    places = range(0, sequences, BATCH_SIZE)
    return [{name: part[start : start + BATCH_SIZE] for name, part in whole.items()} for start in places]


def synthetic_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: int | None = None,
    length: int | None = None,
    seed: int = 0,
    source: bool = True,
) -> list[Batch]:
    """Draw token ids uniformly from the non-special vocabulary, between the special tokens that the tokenizer adds.

    Without a length sequences are short and long, 8 to 128 tokens, as likely from 8 to 16 as from 64 to 128; for an
    encoder whose tokenizer tells pairs of texts apart, half of them are pairs. What models read is so, and the start
    of a sequence, where attention often goes, gets its share of the vectors.

    A decoder of an encoder–decoder starts with its start token and what the tokenizer puts before a target: a
    language code, in NLLB, M2M100 and mBART-50. Without `source` there are tokens for the decoder only.
    """
    size = min(len(tokenizer), getattr(model.config.get_text_config(), "vocab_size", len(tokenizer)))
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([token for token in range(size) if token not in special])
    if not len(ordinary):
        raise CalibrationError(f"the tokenizer's vocabulary of {size} holds special tokens only")
    first, last = special_tokens(tokenizer, ordinary.tolist())
    generator = torch.Generator().manual_seed(seed)
    longest = fitting(length or LONGEST, model, tokenizer) or LONGEST
    shortest = min(SHORTEST, longest) if length is None else longest
    if longest <= len(first) + len(last):
        raise CalibrationError(f"no room for random tokens in sequences of {longest}; pass a larger length")
    count = sequences or (VARIED if length is None else EQUAL)
    lengths = _lengths(count, max(shortest, len(first) + len(last) + 1), longest, generator)
    pairs = length is None and not model.config.is_encoder_decoder and not is_causal(model)
    between = separator(tokenizer, ordinary.tolist(), first, last) if pairs else None
    drawn = [ordinary[torch.randint(len(ordinary), (number,), generator=generator)] for number in lengths.tolist()]
    rows = [_row(tokens, first, between if place % 2 else None, last) for place, tokens in enumerate(drawn)]
    columns = {"input_ids": [ids for ids, _ in rows]}
    if between is not None and "token_type_ids" in tokenizer.model_input_names:
        columns["token_type_ids"] = [types for _, types in rows]
    batches = _padded(columns, "attention_mask", tokenizer)
    if not source:
        batches = [{} for _ in batches]
    if model.config.is_encoder_decoder:
        first, last = special_tokens(tokenizer, ordinary.tolist(), target=True)
        begin = torch.tensor([_start_token(model.config, last), *first])[:longest]
        targets = [
            ordinary[torch.randint(len(ordinary), (number,), generator=generator)] for number in lengths.tolist()
        ]
        for target in targets:
            target[: len(begin)] = begin[: len(target)]
        decoded = _padded({"decoder_input_ids": targets}, "decoder_attention_mask", tokenizer)
        batches = [{**source, **target} for source, target in zip(batches, decoded, strict=True)]
    return _sample(batches, len(batches), seed)


def is_causal(model: PreTrainedModel) -> bool:
    """Whether tokens of the model see only those before them."""
    return any(getattr(module, "is_causal", False) for module in model.modules()) or bool(
        getattr(model.config, "is_decoder", False)
    )


def separator(
    tokenizer: PreTrainedTokenizerBase, ordinary: Sequence[int], first: Sequence[int], last: Sequence[int]
) -> list[int] | None:
    """Find out which tokens the tokenizer puts between two texts, or None where it puts none.

    Args:
        tokenizer: what encodes.
        ordinary: some tokens that are not special, to make a text of.
        first: what it puts before a text.
        last: what it puts behind it.
    """
    for text in ("a", *(tokenizer.decode([token]) for token in ordinary[:TRIED])):
        plain, whole = _encoded(tokenizer, text, add_special_tokens=False), list(tokenizer(text, text)["input_ids"])
        inner = whole[len(first) + len(plain) : len(whole) - len(plain) - len(last)]
        if plain and [*first, *plain, *inner, *plain, *last] == whole:
            return inner or None
    return None


def _lengths(count: int, shortest: int, longest: int, generator: torch.Generator) -> Tensor:
    """Draw lengths in ascending order, each power of two as likely as the next."""
    spread = torch.rand(count, generator=generator, dtype=torch.float64).sort().values
    return (shortest * ((longest + 1) / shortest) ** spread).long().clamp(shortest, longest)


def _row(
    drawn: Tensor, first: Sequence[int], between: Sequence[int] | None, last: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Put special tokens in their places, over tokens drawn; and say to which of two texts each token belongs."""
    ids, types = drawn.clone(), torch.zeros_like(drawn)
    ids[: len(first)] = torch.tensor(first, dtype=ids.dtype)
    ids[len(ids) - len(last) :] = torch.tensor(last, dtype=ids.dtype)
    free = len(ids) - len(first) - len(last) - len(between or ())
    if between is not None and free > 1:
        middle = len(first) + free // 2
        ids[middle : middle + len(between)] = torch.tensor(between, dtype=ids.dtype)
        types[middle + len(between) :] = 1
    return ids, types


def _padded(columns: Mapping[str, list[Tensor]], mask: str, tokenizer: PreTrainedTokenizerBase) -> list[Batch]:
    """Make batches of rows that lie side by side, filled up behind, with a mask of what is real."""
    ids = next(iter(columns))
    pad = {ids: tokenizer.pad_token_id or 0}
    batches = []
    for start in range(0, len(columns[ids]), BATCH_SIZE):
        parts = {name: rows[start : start + BATCH_SIZE] for name, rows in columns.items()}
        batch = {name: pad_sequence(part, True, pad.get(name, 0)) for name, part in parts.items()}
        batch[mask] = pad_sequence([torch.ones_like(row) for row in parts[ids]], True)
        batches.append(batch)
    return batches


def _start_token(config: Any, last: Sequence[int]) -> int:
    """The token that decoders begin with; or, if the config names none, a target's last one (mBART's language)."""
    start = getattr(config, "decoder_start_token_id", None)
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    tokens = (start, *last[-1:], *(getattr(config, name, None) for name in names))
    return next((token for token in tokens if isinstance(token, int)), 0)


__all__ = ["BATCH_SIZE", "Batch", "Calibration", "calibration_batches", "noted_batches", "read_texts"]

Text: TypeAlias = str | tuple[str, str]
Calibration: TypeAlias = str | Path | Sequence[Text] | Iterable[Mapping[str, Tensor]] | None

_Item = TypeVar("_Item")
_logger = logging.getLogger(__name__)

SHORTEST, LONGEST = 8, 128  # tokens of a random sequence, where no length is given
VARIED, EQUAL = 192, 128  # random sequences, where lengths vary and where not: 8,000 tokens both
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
        calibration: "synthetic" (random tokens; noise for images, clips and sounds), "none" or None, the path of a
            text file as `read_texts` takes it, "synthetic+PATH" for random tokens beside the texts of a file, that of
            a folder of images or sounds for models that read those, a sequence of texts or text pairs (a column of a
            `datasets` data set is one), or ready batches.
        model: the model they are for; bounds the vocabulary and the length.
        tokenizer: needed for everything but ready batches, none, and models that read no tokens; or the processor
            that holds it.
        sequences: number of random sequences, 192 if not given, or 128 of one length; of more texts than that a
            random sample is used, and all of them if not given.
        length: tokens in a random sequence; 8 to 128 if not given, as `synthetic_batches` draws them. Texts are cut
            there, or else at the model's limit. Positions of a sound, 64 if not given.
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
    if calibration is None or calibration == "none":
        return [], []
    if isinstance(tokenizer, ProcessorMixin):  # of images or sounds too
        tokenizer = getattr(tokenizer, "tokenizer", None)
    notes: list[str] = []
    if hasattr(calibration, "column_names"):
        raise CalibrationError(
            f"got a data set with columns {calibration.column_names}; pass the one with the texts, as in "
            "calibration=data['text']"
        )
    items = None if isinstance(calibration, str | Path) else _items(calibration)
    if items is not None and any(isinstance(item, Mapping) for item in items):
        batches = [_batch(place, item) for place, item in enumerate(items)]
    elif model.main_input_name != "input_ids" or reads_two(model):
        batches, notes = _unlike_texts(calibration, model, tokenizer, sequences, length or LENGTH, seed)
    elif tokenizer is None:
        raise CalibrationError(
            "calibration from random tokens or texts needs the model's tokenizer, and there is none: pass "
            "tokenizer=…, ready batches, or calibration 'none' to weigh all directions of the input alike"
        )
    elif model.config.is_encoder_decoder and calibration != "synthetic":
        raise CalibrationError(
            f"{type(model).__name__} reads a source and a target, and texts are only one of them; pass batches with "
            "input_ids and decoder_input_ids, or calibration 'synthetic'"
        )
    elif calibration == "synthetic":
        batches = synthetic_batches(model, tokenizer, sequences, length, seed)
    else:
        file = text_file(calibration)
        texts = [_text(place, item) for place, item in enumerate(items or [])] if file is None else read_texts(file)
        sample = _sample(texts, len(texts) if sequences is None else sequences, seed)
        if len(sample) < len(texts):
            notes.append(f"calibration uses {len(sample)} of {len(texts)} texts, drawn at random")
        limit = fitting(length, model, tokenizer)
        batches, cut = text_batches(tokenizer, sample, limit, seed)
        if cut:
            notes.append(f"{cut} of {len(sample)} texts are longer than {limit} tokens and are cut there")
        if file is not None and str(calibration).startswith(BESIDE):  # printing texts would take a while
            batches += synthetic_batches(model, tokenizer, sequences, length, seed)
            batches = _sample(batches, len(batches), seed)
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    largest = max((int(batch["input_ids"].max()) for batch in batches if "input_ids" in batch), default=0)
    if size is not None and largest >= size:
        raise CalibrationError(
            f"the calibration data holds token {largest}, but the model's vocabulary ends at {size - 1}; "
            "the tokenizer is not this model's"
        )
    if not batches:
        raise CalibrationError("calibration data is empty; pass at least one batch or text, or None")
    return batches, notes


def _unlike_texts(
    calibration: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, sequences: int | None,
    length: int, seed: int,
) -> tuple[list[Batch], list[str]]:  # fmt: skip
    """Make batches of noise or of a folder for a model that reads more than texts; or say what to pass instead."""
    notes: list[str] = []
    inputs: dict[str, Tensor] = {}
    if calibration == "synthetic":
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
    options = {"truncation": length is not None, "max_length": length, "padding": True, "return_tensors": "pt"}
    cut = 0
    texts = sorted(texts, key=lambda text: len(text) if isinstance(text, str) else len(text[0]) + len(text[1]))
    batches = []
    for start in range(0, len(texts), BATCH_SIZE):
        part = list(texts[start : start + BATCH_SIZE])
        try:
            encoded = tokenizer(part, **options)
            if length is not None and encoded["input_ids"].shape[1] == length:
                cut += sum(len(tokens) > length for tokens in tokenizer(part, verbose=False)["input_ids"])
        except (ValueError, TypeError) as error:
            raise CalibrationError(f"the tokenizer cannot batch the texts: {error}") from error
        batches.append(dict(encoded))
    return _sample(batches, len(batches), seed), cut


def _sample(items: Sequence[_Item], count: int, seed: int) -> list[_Item]:
    """Draw at most `count` items in random order."""
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))
    return [items[place] for place in order[:count].tolist()]


def text_file(calibration: Any) -> Path | None:
    """Say which file of texts a calibration names, if it names one."""
    if not isinstance(calibration, str | Path) or str(calibration) in ("synthetic", "none"):
        return None
    return Path(str(calibration).removeprefix(BESIDE))


def read_texts(path: Path) -> list[Text]:
    """Read one text a line, or a pair of texts with a tab between them; blank lines are left out.

    Raises:
        CalibrationError: the file is missing, not UTF-8, has no text, or has a line of more than two.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"cannot read calibration texts from {path}: {error}") from error
    if not lines:
        raise CalibrationError(f"{path} has no text; expected one text a line")
    texts: list[Text] = []
    for line in lines:
        first, *rest = (part.strip() for part in line.split("\t"))
        if len(rest) > 1:
            raise CalibrationError(
                f"{path} has a line of {len(rest) + 1} columns, {line[:40]!r}; expected one text a line, or two with "
                "a tab between them"
            )
        texts.append((first, rest[0]) if rest else first)
    return texts


def _items(calibration: Any) -> list[Any]:
    """List the texts or batches of a calibration that is no name and no file."""
    if isinstance(calibration, bytes | Mapping) or not isinstance(calibration, Iterable):
        raise CalibrationError(
            f"calibration is a {type(calibration).__name__}; expected 'synthetic', 'none', a file of texts, texts, "
            "or batches"
        )
    items = list(calibration)
    if len({isinstance(item, Mapping) for item in items}) == 2:
        raise CalibrationError("calibration mixes batches and texts; pass one or the other")
    return items


def _batch(place: int, item: Mapping[str, Any]) -> Batch:
    """Check that a batch can be one."""
    batch = dict(item)
    ids = batch.get("input_ids", torch.zeros(1))
    if not isinstance(ids, Tensor) or not ids.numel():
        got = "empty" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise CalibrationError(f"calibration batch {place}: input_ids is {got}; expected a tensor of token ids")
    return batch


def _text(place: int, item: Any) -> Text:
    """Check that a text, or a pair of texts, is one."""
    if isinstance(item, str):
        return item
    if isinstance(item, tuple | list) and len(item) == 2 and all(isinstance(part, str) for part in item):
        return item[0], item[1]
    raise CalibrationError(
        f"calibration item {place} is a {type(item).__name__}; expected a text, a pair of texts, or a batch"
    )
