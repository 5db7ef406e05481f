"""How a tokenizer lays out texts for a model: special tokens at the ends, and how long they may be."""

from collections.abc import Sequence
from math import inf

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

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


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str, target: bool, **options: bool) -> list[int]:
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
    return getattr(model.config, "max_position_embeddings", None) or inf
