"""Facts about a vocabulary: special tokens, their places, and which tokens are common."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

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
