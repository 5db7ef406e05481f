"""Calibration data made up for a model: random tokens as its tokenizer lays them out, and images of noise."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.calibration.layout import special_tokens
from collab_compress.errors import CalibrationError

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
