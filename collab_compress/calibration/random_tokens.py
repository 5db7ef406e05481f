"""Random tokens in place of texts: between the special tokens of a tokenizer, frequent ones more often."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.calibration.batches import shuffled
from collab_compress.calibration.encode import (
    ordinary_tokens,
    pad,
    pair_separator,
    special_tokens,
    start_token,
    usable_length,
)
from collab_compress.calibration.gather import Batch
from collab_compress.errors import CalibrationError

SHORTEST, LONGEST = 8, 128  # tokens of a random sequence when no length is given
VARIED, EQUAL = 384, 128  # random sequences of varied and of equal length: 16,000 and 8,000 tokens
RANK_SHIFT = 2.7  # Mandelbrot's for English
PLACEHOLDER = re.compile(r"[\[<].+[\]>]")  # [unused7], <extra_id_3>, <0x0A>
MOST_TOKENS = 10**9  # in memory at once


def sequence_default(length: int | None) -> int:
    """Return how many random sequences are drawn if no number is given."""
    return VARIED if length is None else EQUAL


def random_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sequences: int | None, length: int | None, seed: int
) -> list[Batch]:
    """Draw token ids between the special tokens of the tokenizer, frequent ones more often (`likelihoods`).

    Without a length, sequences have 8 to 128 tokens, as often 8 to 16 as 64 to 128, and half of those of an
    encoder that knows pairs are pairs. Targets start with the decoder's start token and the tokenizer's prefix (a
    language code).
    """
    sequences = sequences or sequence_default(length)
    longest = usable_length(length or LONGEST, model, tokenizer) or LONGEST
    ids = ordinary_tokens(model, tokenizer)
    prefix, suffix = special_tokens(tokenizer, ids)
    if longest <= len(prefix) + len(suffix):
        raise CalibrationError(f"no room for random tokens in sequences of {longest}; pass a larger length")
    check_size(sequences * longest, f"{sequences} random sequences of up to {longest} tokens")
    generator = torch.Generator().manual_seed(seed)
    shortest = min(SHORTEST, longest) if length is None else longest
    shortest = max(shortest, len(prefix) + len(suffix) + 1)
    uniform = torch.rand(sequences, generator=generator, dtype=torch.float64, device="cpu").sort().values
    lengths = (shortest * ((longest + 1) / shortest) ** uniform).long().clamp(shortest, longest)  # ascending
    between = pair_separator(model, tokenizer) if length is None else None

    def draw(ids: list[int]) -> list[Tensor]:
        tokens, probabilities = torch.tensor(ids, device="cpu"), likelihoods(tokenizer, ids)
        drawn = torch.multinomial(probabilities, int(lengths.sum()), replacement=True, generator=generator)
        return list(torch.split(tokens[drawn], lengths.tolist()))

    rows = [
        _with_special(row, prefix, between if number % 2 else None, suffix) for number, row in enumerate(draw(ids))
    ]
    columns = {"input_ids": [row for row, _ in rows]}
    if between is not None and "token_type_ids" in tokenizer.model_input_names:
        columns["token_type_ids"] = [types for _, types in rows]
    batches = pad(columns, "attention_mask", tokenizer)
    if model.config.is_encoder_decoder:
        ids = ordinary_tokens(model, tokenizer, target=True)
        prefix, suffix = special_tokens(tokenizer, ids, target=True)
        start = torch.tensor([start_token(model.config, suffix), *prefix], device="cpu")[:longest]
        targets = draw(ids)
        for target in targets:
            target[: len(start)] = start[: len(target)]
        decoder_batches = pad({"decoder_input_ids": targets}, "decoder_attention_mask", tokenizer)
        batches = [{**batch, **target} for batch, target in zip(batches, decoder_batches, strict=True)]
    return shuffled(batches, seed)


def likelihoods(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Tensor:
    """Estimate the probabilities (N,) of tokens, ascending ids, in texts from the vocabulary alone, in float64.

    Vocabularies list tokens nearly by frequency, which falls as 1 / (rank + 2.7) (Zipf; Mandelbrot, "An
    informational theory of the statistical structure of language", 1953). Half of the weight goes to tokens of
    two characters or more; the other half is uniform over all, single characters included, which are in
    alphabetical order.
    """
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens(list(ids))]
    is_word = torch.tensor(
        [len(re.sub(r"\W|_", "", token)) > 1 and not PLACEHOLDER.fullmatch(token) for token in tokens], device="cpu"
    )
    uniform = torch.full((len(tokens),), 1 / len(tokens), dtype=torch.float64, device="cpu")
    if not bool(is_word.any()):
        return uniform
    zipf = torch.where(is_word, 1 / (is_word.cumsum(0) + RANK_SHIFT), 0.0).double()
    return (uniform + zipf / zipf.sum()) / 2


def check_size(tokens: int, what: str) -> None:
    """Refuse more tokens than fit into memory."""
    if tokens > MOST_TOKENS:
        raise CalibrationError(
            f"{what} are {tokens:.1e} numbers; at most {MOST_TOKENS:.0e} fit, so pass fewer sequences"
        )


def _with_special(
    drawn: Tensor, prefix: Sequence[int], between: Sequence[int] | None, suffix: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Overwrite drawn tokens with special tokens where those belong, and return the token type ids too."""
    ids, types = drawn.clone(), torch.zeros_like(drawn)
    ids[: len(prefix)] = torch.tensor(prefix, dtype=ids.dtype, device="cpu")
    ids[len(ids) - len(suffix) :] = torch.tensor(suffix, dtype=ids.dtype, device="cpu")
    free = len(ids) - len(prefix) - len(suffix) - len(between or ())
    if between is not None and free > 1:
        middle = len(prefix) + free // 2
        ids[middle : middle + len(between)] = torch.tensor(between, dtype=ids.dtype, device="cpu")
        types[middle + len(between) :] = 1
    return ids, types
