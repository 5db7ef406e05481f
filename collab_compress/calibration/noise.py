"""Noise in place of images, video clips and sounds, beside random tokens where a model reads those too."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.calibration.gather import Batch
from collab_compress.calibration.random_tokens import synthetic_batches
from collab_compress.calibration.tokenization import BATCH_SIZE, check_size, usable_length
from collab_compress.errors import CalibrationError

IMAGES = 128  # images, clips or sounds
POSITIONS = 64  # of a sound, and tokens beside noise
SPECTROGRAM_STD = 0.5  # of what feature extractors return


def noise_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    sequences: int | None = None,
    length: int | None = None,
    seed: int = 0,
) -> list[Batch]:
    """Draw noise for a model of images, clips or sounds, and random tokens if it reads those too.

    Args:
        model: one that `reads_noise`.
        tokenizer: needed where the model reads tokens too.
        sequences: number of images, clips or sounds, 128 by default.
        length: tokens, and positions of a sound that may have any length, 64 by default.
        seed: of noise and tokens.

    Returns:
        Batches of keyword arguments; none if it is unknown what the model reads.
    """
    length = length or POSITIONS
    generator = torch.Generator().manual_seed(seed)
    parts = [getattr(model.config, name, None) for name in ("vision_config", "encoder", "backbone_config")]
    configs: list[Any] = [config for config in (model.config, *parts) if config is not None]
    inputs: dict[str, Tensor] = {}
    if model.main_input_name == "pixel_values" or reads_images_too(model):
        inputs = _draw_pixels(model, configs, sequences or IMAGES, generator)
    elif model.main_input_name in ("input_values", "input_features", "inputs"):
        inputs = _draw_sounds(model, configs, sequences or IMAGES, length, generator)
    count = min((len(part) for part in inputs.values()), default=0)
    if inputs and (reads_images_too(model) or model.config.is_encoder_decoder):
        if tokenizer is None:
            raise CalibrationError(
                f"{type(model).__name__} reads tokens beside {', '.join(inputs)}, and there is no tokenizer; save "
                "its processor beside the model's files, or, in Python, pass tokenizer=… or ready batches"
            )
        limit = usable_length(length, model, tokenizer) or length
        drawn = synthetic_batches(model, tokenizer, count, limit, seed, source=reads_images_too(model))
        inputs = {**{name: torch.cat([batch[name] for batch in drawn]) for name in drawn[0]}, **inputs}
    starts = range(0, count, BATCH_SIZE)
    return [{name: part[start : start + BATCH_SIZE] for name, part in inputs.items()} for start in starts]


def reads_noise(model: PreTrainedModel) -> bool:
    """Return whether a model reads something else than tokens, alone or beside them."""
    return model.main_input_name != "input_ids" or reads_images_too(model)


def reads_images_too(model: PreTrainedModel) -> bool:
    """Return whether a model has a tower for texts and one for images."""
    return model.main_input_name == "input_ids" and all(
        hasattr(model.config, name) for name in ("text_config", "vision_config")
    )


def _noise(count: int, channels: int, sizes: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw noise (N, C, *sizes) with mean 0 and variance 1: a sum of noise on grids of 1, 2, 4, … cells a side.

    The coarse grids keep the means of patches and windows from vanishing.
    """
    check_size(count * channels * prod(sizes), f"{count} images or sounds of noise")
    noise = torch.zeros(count, channels, *sizes)
    for power in range(max(sizes).bit_length()):
        grid = torch.randn(count, channels, *(min(2**power, size) for size in sizes), generator=generator)
        noise += nn.functional.interpolate(grid, tuple(sizes))
    return noise / noise.std()


def _draw_pixels(
    model: PreTrainedModel, configs: Sequence[Any], count: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw images (N, C, height, width), clips (N, frames, C, height, width), or patches and their number."""
    config = next((config for config in configs if hasattr(config, "num_channels")), None)
    if config is not None and hasattr(config, "num_patches"):
        patches, columns = config.num_patches, int(config.num_patches**0.5)
        rows = patches // columns
        sizes = (rows * config.patch_size, columns * config.patch_size)
        images = _noise(count, config.num_channels, sizes, generator)
        cut = nn.functional.unfold(images, config.patch_size, stride=config.patch_size).mT  # (N, patches, C·p²)
        mask = torch.ones(count, patches, dtype=torch.long)
        mask[:, rows * columns :] = 0
        return {
            "pixel_values": nn.functional.pad(cut, (0, 0, 0, patches - rows * columns)),
            "pixel_attention_mask": mask,
            "spatial_shapes": torch.tensor([[rows, columns]] * count),
        }
    if config is not None and getattr(config, "image_size", None) is not None:
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        frames = getattr(config, "num_frames", None)
        clip = (height, width) if frames is None else (frames, height, width)
        pixels = _noise(count, config.num_channels, clip, generator)
        return {"pixel_values": pixels if frames is None else pixels.transpose(1, 2)}
    raise CalibrationError(
        f"the config of {type(model).__name__} does not say image_size and num_channels; pass batches of pixel_values"
    )


def _draw_sounds(
    model: PreTrainedModel, configs: Sequence[Any], count: int, length: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw raw sounds (N, samples), or spectrograms (N, frames, bins) or (N, bins, frames)."""
    sizes: tuple[int, ...]
    for config in configs:
        bins = getattr(config, "num_mel_bins", None)
        if getattr(config, "inputs_to_logits_ratio", None):
            name, sizes, std = "input_values", (length * config.inputs_to_logits_ratio,), 1.0
        elif bins is not None and hasattr(config, "max_length"):  # AST
            name, sizes, std = "input_values", (config.max_length, bins), SPECTROGRAM_STD
        elif hasattr(config, "input_feat_per_channel"):  # Speech2Text, whose features are normalised
            frames = length * 2**config.num_conv_layers
            name, sizes, std = "input_features", (frames, config.input_feat_per_channel), 1.0
        elif bins is not None and hasattr(config, "max_source_positions"):  # Whisper, which halves the frames
            name, sizes, std = "input_features", (bins, 2 * config.max_source_positions), SPECTROGRAM_STD
        else:
            continue
        return {name: std * _noise(count, 1, sizes, generator)[:, 0]}
    raise CalibrationError(
        f"the config of {type(model).__name__} does not say how long its {model.main_input_name} are; pass batches "
        "of them as its processor makes them"
    )
