"""Random inputs for calibration, tokens or images, laid out as a tokenizer does: special tokens, and how long."""

from collections.abc import Sequence
from math import inf
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
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


Batch: TypeAlias = dict[str, Tensor]

BATCH_SIZE = 16


def image_batches(model: PreTrainedModel, images: int, seed: int) -> list[Batch]:
    """Draw images of the size in the model's config, with mean 0 and variance 1 as processors make them.

    Each is noise at every scale: a sum of noise on grids of 1, 2, 4, … cells a side, so that what patches hold does
    not average out.

    Raises:
        CalibrationError: the config does not say how large images are.
    """
    size, channels = (getattr(model.config, name, None) for name in ("image_size", "num_channels"))
    if size is None or channels is None:
        raise CalibrationError(
            f"the config of {type(model).__name__} does not say image_size and num_channels; pass batches of "
            "pixel_values"
        )
    height, width = (size, size) if isinstance(size, int) else size
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.zeros(images, channels, height, width)
    for cells in (2**power for power in range(max(height, width).bit_length())):
        grid = torch.randn(images, channels, min(cells, height), min(cells, width), generator=generator)
        pixels += torch.nn.functional.interpolate(grid, (height, width))
    return [{"pixel_values": part} for part in (pixels / pixels.std()).split(BATCH_SIZE)]


def synthetic_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sequences: int, length: int, seed: int
) -> list[Batch]:
    """Draw token ids uniformly from the non-special vocabulary, between the special tokens that the tokenizer adds.

    A decoder of an encoder–decoder starts with its start token and what the tokenizer puts before a target: a
    language code, in NLLB, M2M100 and mBART-50.
    """
    size = min(len(tokenizer), getattr(model.config, "vocab_size", len(tokenizer)))
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([token for token in range(size) if token not in special])
    if not len(ordinary):
        raise CalibrationError(f"the tokenizer's vocabulary of {size} holds special tokens only")
    first, last = special_tokens(tokenizer, ordinary.tolist())
    drawn = length - len(first) - len(last)
    if drawn < 1:
        raise CalibrationError(f"no room for random tokens in sequences of {length}; pass a larger length")
    generator = torch.Generator().manual_seed(seed)
    middle = ordinary[torch.randint(len(ordinary), (sequences, drawn), generator=generator)]
    ids = torch.cat([torch.tensor([first] * sequences).long(), middle, torch.tensor([last] * sequences).long()], 1)
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(BATCH_SIZE)]
    if model.config.is_encoder_decoder:
        first, last = special_tokens(tokenizer, ordinary.tolist(), target=True)
        begin = torch.tensor([_start_token(model.config, last), *first])[:length]
        targets = ordinary[torch.randint(len(ordinary), (sequences, length), generator=generator)]
        targets[:, : len(begin)] = begin
        for batch, part in zip(batches, targets.split(BATCH_SIZE), strict=True):
            batch["decoder_input_ids"], batch["decoder_attention_mask"] = part, torch.ones_like(part)
    return batches


def _start_token(config: Any, last: Sequence[int]) -> int:
    """The token that decoders begin with; or, if the config names none, a target's last one (mBART's language)."""
    start = getattr(config, "decoder_start_token_id", None)
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    tokens = (start, *last[-1:], *(getattr(config, name, None) for name in names))
    return next((token for token in tokens if isinstance(token, int)), 0)
