"""Random tokens in the shape of what a model reads: long and short, pairs, between special tokens."""

import re
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.calibration.noise import reads_two, refuse_too_many
from collab_compress.errors import CalibrationError

TRIED = 50  # texts with which to find out which special tokens a tokenizer adds
SHIFT = 2.7  # of ranks, as Mandelbrot has it for English
PLACEHOLDER = re.compile(r"[\[<].+[\]>]")  # [unused7], <extra_id_3>, <0x0A>


def special_tokens(
    tokenizer: PreTrainedTokenizerBase, ordinary: Sequence[int], target: bool = False
) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before and after a text.

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


def separator(
    tokenizer: PreTrainedTokenizerBase, ordinary: Sequence[int], first: Sequence[int], last: Sequence[int]
) -> list[int] | None:
    """Return the special tokens that the tokenizer puts between two texts, or None.

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


def likelihoods(tokenizer: PreTrainedTokenizerBase, ordinary: Sequence[int]) -> Tensor:
    """Guess how often tokens occur in texts, from nothing but the vocabulary.

    WordPiece, BPE and unigram vocabularies list their pieces from the most frequent to the rarest, nearly, and
    frequencies of words fall as 1 / (rank + 2.7) (Zipf; Mandelbrot, "An informational theory of the statistical
    structure of language", 1953). Half of the weight is that of pieces of two characters and more; the other half is
    the same for all tokens, so that each is seen. Single characters lie in the order of an alphabet, so they have no
    more than that, and a vocabulary of nothing else is uniform.

    Args:
        tokenizer: whose vocabulary it is.
        ordinary: ids of the tokens, in ascending order.

    Returns:
        Probabilities (N,), float64, in the order of `ordinary`.
    """
    pieces = [str(piece) for piece in tokenizer.convert_ids_to_tokens(list(ordinary))]
    words = torch.tensor(
        [len(re.sub(r"\W|_", "", piece)) > 1 and not PLACEHOLDER.fullmatch(piece) for piece in pieces]
    )
    uniform = torch.full((len(pieces),), 1 / len(pieces), dtype=torch.float64)
    if not bool(words.any()):
        return uniform
    common = torch.where(words, 1 / (words.cumsum(0) + SHIFT), 0.0).double()
    return (uniform + common / common.sum()) / 2


Batch: TypeAlias = dict[str, Tensor]

BATCH_SIZE = 16
SHORTEST, LONGEST = 8, 128  # tokens of a random sequence, where no length is given
VARIED, EQUAL = 384, 128  # random sequences, where lengths vary and where not: 16,000 and 8,000 tokens
UNLIMITED = 10**9  # what Transformers gives as the limit of tokenizers that have none is larger

_Item = TypeVar("_Item")


def fitting(length: int | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the length that model and tokenizer can take, at most `length`; None where none of them has a limit.

    Raises:
        CalibrationError: the tokenizer's limit is no number, or no token fits beside the special ones.
    """
    limit: Any = tokenizer.model_max_length
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 1:
        raise CalibrationError(f"model_max_length of the tokenizer is {limit!r}; expected a number of tokens")
    shortest = min(inf if length is None else length, limit, _positions(model))
    if shortest <= tokenizer.num_special_tokens_to_add():
        raise CalibrationError(
            f"length {shortest} leaves no room for texts beside the special tokens of each; pass a larger one"
        )
    return int(shortest) if shortest < UNLIMITED else None


def _positions(model: PreTrainedModel) -> float:
    """How many positions the model has: fewer than rows in its table where those up to padding's are left out."""
    tables = (getattr(module, "position_embeddings", None) for module in model.modules())
    for table in tables:
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            return table.num_embeddings - table.padding_idx - 1
    config = model.config.get_text_config()
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next(filter(None, limits), inf)


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
    """Draw token ids from the non-special vocabulary, between the special tokens that the tokenizer adds.

    Tokens that seem to be common are drawn more often, as in texts (`likelihoods`).

    Without a length sequences are short and long, 8 to 128 tokens, as likely from 8 to 16 as from 64 to 128; for an
    encoder whose tokenizer tells pairs of texts apart, half of them are pairs. What models read is so, and the start
    of a sequence, where attention often goes, gets its share of the vectors.

    A decoder of an encoder–decoder starts with its start token and what the tokenizer puts before a target: a
    language code, in NLLB, M2M100 and mBART-50. Without `source` there are tokens for the decoder only.
    """
    longest = fitting(length or LONGEST, model, tokenizer) or LONGEST
    ids = ordinary_tokens(model, tokenizer)
    first, last = special_tokens(tokenizer, ids)
    generator = torch.Generator().manual_seed(seed)
    shortest = min(SHORTEST, longest) if length is None else longest
    if longest <= len(first) + len(last):
        raise CalibrationError(f"no room for random tokens in sequences of {longest}; pass a larger length")
    count = sequences or (VARIED if length is None else EQUAL)
    refuse_too_many(count * longest, f"{count} random sequences of up to {longest} tokens")
    lengths = _lengths(count, max(shortest, len(first) + len(last) + 1), longest, generator)
    pairs = length is None and not model.config.is_encoder_decoder and not is_causal(model)
    between = separator(tokenizer, ids, first, last) if pairs else None
    ordinary, likely = torch.tensor(ids), likelihoods(tokenizer, ids)

    def draw() -> list[Tensor]:
        places = torch.multinomial(likely, int(lengths.sum()), replacement=True, generator=generator)
        return list(torch.split(ordinary[places], lengths.tolist()))

    rows = [_row(tokens, first, between if place % 2 else None, last) for place, tokens in enumerate(draw())]
    columns = {"input_ids": [ids for ids, _ in rows]}
    if between is not None and "token_type_ids" in tokenizer.model_input_names:
        columns["token_type_ids"] = [types for _, types in rows]
    batches = _padded(columns, "attention_mask", tokenizer)
    if not source:
        batches = [{} for _ in batches]
    if model.config.is_encoder_decoder:
        first, last = special_tokens(tokenizer, ids, target=True)
        begin = torch.tensor([_start_token(model.config, last), *first])[:longest]
        targets = draw()
        for target in targets:
            target[: len(begin)] = begin[: len(target)]
        decoded = _padded({"decoder_input_ids": targets}, "decoder_attention_mask", tokenizer)
        batches = [{**source, **target} for source, target in zip(batches, decoded, strict=True)]
    return sampled(batches, len(batches), seed)


def ordinary_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """List the tokens of both the tokenizer and the model that are not special, in ascending order.

    Raises:
        CalibrationError: there are none.
    """
    size = min(len(tokenizer), getattr(model.config.get_text_config(), "vocab_size", len(tokenizer)))
    special = set(tokenizer.all_special_ids)
    ids = [token for token in range(size) if token not in special]
    if not ids:
        raise CalibrationError(f"the tokenizer's vocabulary of {size} holds special tokens only")
    return ids


def is_causal(model: PreTrainedModel) -> bool:
    """Whether tokens of the model see only those before them."""
    return any(getattr(module, "is_causal", False) for module in model.modules()) or bool(
        getattr(model.config, "is_decoder", False)
    )


def _lengths(count: int, shortest: int, longest: int, generator: torch.Generator) -> Tensor:
    """Draw lengths in ascending order, each power of two as likely as the next."""
    spread = torch.rand(count, generator=generator, dtype=torch.float64).sort().values
    return (shortest * ((longest + 1) / shortest) ** spread).long().clamp(shortest, longest)


def _row(
    drawn: Tensor, first: Sequence[int], between: Sequence[int] | None, last: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Overwrite drawn tokens with special tokens where they belong, and return the token type ids."""
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


def sampled(items: Sequence[_Item], count: int, seed: int) -> list[_Item]:
    """Draw at most `count` items in random order."""
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))
    return [items[place] for place in order[:count].tolist()]
