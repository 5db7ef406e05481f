"""What the model is run on to learn which directions of its inputs matter: random tokens, texts, or batches."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.errors import CalibrationError

Batch: TypeAlias = dict[str, Tensor]
Text: TypeAlias = str | tuple[str, str]
Calibration: TypeAlias = str | Path | Sequence[Text] | Iterable[Mapping[str, Tensor]] | None

_Item = TypeVar("_Item")

SEQUENCES = 128
LENGTH = 64
BATCH_SIZE = 16


def calibration_batches(
    calibration: Calibration,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    sequences: int = SEQUENCES,
    length: int = LENGTH,
    seed: int = 0,
) -> list[Batch]:
    """Turn any accepted form of calibration data into batches for `model`.

    Args:
        calibration: "synthetic" (random tokens, or noise for images), "none" or None, the path of a text file with
            one text a line, a sequence of texts or text pairs (a column of a `datasets` data set is one), or ready
            batches.
        model: the model they are for; bounds the vocabulary and the length.
        tokenizer: needed for everything but ready batches, images and none.
        sequences: number of random sequences; of more texts than that a random sample is used.
        length: tokens in a random sequence; texts are cut there.
        seed: seed of the random tokens, and of the sample and order of texts.

    Returns:
        Batches of keyword arguments for the model; empty for none.

    Raises:
        CalibrationError: no tokenizer, no data, a file that cannot be read, something that is no data, or texts for
            a model that does not read any.
    """
    if calibration is None or calibration == "none":
        return []
    if hasattr(calibration, "column_names"):
        raise CalibrationError(
            f"got a data set with columns {calibration.column_names}; pass the one with the texts, as in "
            "calibration=data['text']"
        )
    if not isinstance(calibration, str | Path) and _holds_batches(calibration):
        batches = [dict(batch) for batch in cast("Iterable[Mapping[str, Tensor]]", calibration)]
    elif model.main_input_name != "input_ids":
        batches = _noise(calibration, model, sequences, seed)
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
        batches = synthetic_batches(model, tokenizer, sequences, _fitting(length, model, tokenizer), seed)
    else:
        texts = (
            read_texts(Path(calibration))
            if isinstance(calibration, str | Path)
            else list(cast("Sequence[Text]", calibration))
        )
        batches = text_batches(tokenizer, _sample(texts, sequences, seed), _fitting(length, model, tokenizer), seed)
    size = getattr(model.config, "vocab_size", None)
    largest = max((int(batch["input_ids"].max()) for batch in batches if "input_ids" in batch), default=0)
    if size is not None and largest >= size:
        raise CalibrationError(
            f"the calibration data holds token {largest}, but the model's vocabulary ends at {size - 1}; "
            "the tokenizer is not this model's"
        )
    if not batches:
        raise CalibrationError("calibration data is empty; pass at least one batch or text, or None")
    return batches


def _noise(calibration: Any, model: PreTrainedModel, sequences: int, seed: int) -> list[Batch]:
    """Draw images of noise, or say what to pass instead."""
    if calibration != "synthetic" or model.main_input_name != "pixel_values":
        raise CalibrationError(
            f"{type(model).__name__} reads {model.main_input_name}, not texts; pass batches of them as its processor "
            "makes them"
        )
    return image_batches(model, sequences, seed)


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
    """Draw token ids uniformly from the non-special vocabulary, with the tokenizer's special tokens at the ends."""
    size = min(len(tokenizer), getattr(model.config, "vocab_size", len(tokenizer)))
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([token for token in range(size) if token not in special])
    ends: list[int] = tokenizer("")["input_ids"]
    first = ends[:1] if ends and ends[0] in (tokenizer.cls_token_id, tokenizer.bos_token_id) else []
    last = ends[len(first) :]
    drawn = length - len(first) - len(last)
    if drawn < 1 or not len(ordinary):
        raise CalibrationError(f"no room for random tokens in sequences of {length}, vocabulary of {size}")
    generator = torch.Generator().manual_seed(seed)
    middle = ordinary[torch.randint(len(ordinary), (sequences, drawn), generator=generator)]
    ids = torch.cat([torch.tensor([first] * sequences).long(), middle, torch.tensor([last] * sequences).long()], 1)
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(BATCH_SIZE)]
    if model.config.is_encoder_decoder:
        targets = ordinary[torch.randint(len(ordinary), (sequences, length), generator=generator)]
        targets[:, 0] = _start_token(model.config)
        for batch, part in zip(batches, targets.split(BATCH_SIZE), strict=True):
            batch["decoder_input_ids"], batch["decoder_attention_mask"] = part, torch.ones_like(part)
    return batches


def _start_token(config: Any) -> int:
    """The token that decoders begin with; where a language code would be it (mBART), the one before that."""
    names = ("decoder_start_token_id", "eos_token_id", "bos_token_id", "pad_token_id")
    return next((token for token in (getattr(config, name, None) for name in names) if isinstance(token, int)), 0)


def text_batches(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text], length: int, seed: int) -> list[Batch]:
    """Tokenize texts or text pairs, similar lengths together, padded within each batch; batches in random order."""
    texts = sorted(texts, key=lambda text: len(text) if isinstance(text, str) else len(text[0]) + len(text[1]))
    batches = []
    for start in range(0, len(texts), BATCH_SIZE):
        part = list(texts[start : start + BATCH_SIZE])
        try:
            encoded = tokenizer(part, truncation=True, max_length=length, padding=True, return_tensors="pt")
        except (ValueError, TypeError) as error:
            raise CalibrationError(f"the tokenizer cannot batch the texts: {error}") from error
        batches.append(dict(encoded))
    return _sample(batches, len(batches), seed)


def _sample(items: Sequence[_Item], count: int, seed: int) -> list[_Item]:
    """Draw at most `count` items in random order."""
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))
    return [items[place] for place in order[:count].tolist()]


def read_texts(path: Path) -> list[Text]:
    """Read one text a line; blank lines are left out.

    Raises:
        CalibrationError: the file is missing, not UTF-8, or has no text.
    """
    try:
        texts: list[Text] = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"cannot read calibration texts from {path}: {error}") from error
    if not texts:
        raise CalibrationError(f"{path} has no text; expected one text a line")
    return texts


def _holds_batches(calibration: Any) -> bool:
    if isinstance(calibration, Sequence):
        kinds = {isinstance(item, Mapping) for item in calibration}
        if len(kinds) == 2:
            raise CalibrationError("calibration mixes batches and texts; pass one or the other")
        return kinds == {True}
    if not isinstance(calibration, Iterable):
        raise CalibrationError(
            f"calibration is a {type(calibration).__name__}; expected 'synthetic', 'none', a file of texts, texts, "
            "or batches"
        )
    return True


def _fitting(length: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Shorten sequences to what model and tokenizer can take."""
    positions = getattr(model.config, "max_position_embeddings", None) or length
    return min(length, int(positions), int(tokenizer.model_max_length))
