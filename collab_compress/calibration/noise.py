"""Noise in the shape of what processors make of images, clips and sounds, for models that read those."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import PreTrainedModel

from collab_compress.errors import CalibrationError

MOST = 10**9  # numbers at once, of 4 or 8 bytes
SPREAD = 0.5  # standard deviation of what the feature extractors of spectrograms give


def refuse_too_many(numbers: int, what: str) -> None:
    """Refuse random calibration data that does not fit into memory.

    Raises:
        CalibrationError: it is more than `MOST` numbers.
    """
    if numbers > MOST:
        raise CalibrationError(f"{what} are {numbers:.1e} numbers; {MOST:.0e} fit at most, so pass fewer sequences")


def every_scale(images: int, channels: int, sizes: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw noise (N, C, *sizes) with mean 0 and variance 1: a sum of noise on grids of 1, 2, 4, … cells a side.

    So what patches or windows hold does not average out.
    """
    refuse_too_many(images * channels * prod(sizes), f"{images} images or sounds of noise")
    noise = torch.zeros(images, channels, *sizes)
    for cells in (2**power for power in range(max(sizes).bit_length())):
        grid = torch.randn(images, channels, *(min(cells, size) for size in sizes), generator=generator)
        noise += interpolate(grid, tuple(sizes))
    return noise / noise.std()


def noise_for(model: PreTrainedModel, count: int, length: int, seed: int) -> dict[str, Tensor]:
    """Draw noise for what a model reads beside tokens, of the size that its config says.

    Args:
        model: the model; what it reads is what its `main_input_name` says, and images where it has a vision tower.
        count: how many images, clips or sounds N.
        length: how many positions a sound of any length has.
        seed: of the noise.

    Returns:
        Keyword arguments for the model, each (N, …); empty where it reads nothing but tokens.

    Raises:
        CalibrationError: the config does not say how large they are.
    """
    generator = torch.Generator().manual_seed(seed)
    main = model.main_input_name
    parts = [getattr(model.config, name, None) for name in ("vision_config", "encoder", "backbone_config")]
    configs: list[Any] = [config for config in (model.config, *parts) if config is not None]
    if main == "pixel_values" or reads_two(model):
        return _pixels(model, configs, count, generator)
    if main in ("input_values", "input_features", "inputs"):
        return _sound(model, configs, count, length, generator)
    return {}


def reads_two(model: PreTrainedModel) -> bool:
    """Whether a model has a tower for texts and one for images."""
    return model.main_input_name == "input_ids" and all(
        hasattr(model.config, name) for name in ("text_config", "vision_config")
    )


def _pixels(
    model: PreTrainedModel, configs: Sequence[Any], count: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw images (N, C, height, width), clips (N, frames, C, height, width), or patches and how many there are."""
    config = next((each for each in configs if hasattr(each, "num_channels")), None)
    if config is not None and hasattr(config, "num_patches"):
        patches, side = config.num_patches, int(config.num_patches**0.5)
        rows = patches // side
        images = every_scale(
            count, config.num_channels, (rows * config.patch_size, side * config.patch_size), generator
        )
        cut = torch.nn.functional.unfold(images, config.patch_size, stride=config.patch_size).mT  # (N, patches, C·p²)
        mask = torch.ones(count, patches, dtype=torch.long)
        mask[:, rows * side :] = 0
        return {
            "pixel_values": torch.nn.functional.pad(cut, (0, 0, 0, patches - rows * side)),
            "pixel_attention_mask": mask,
            "spatial_shapes": torch.tensor([[rows, side]] * count),
        }
    if config is not None and getattr(config, "image_size", None) is not None:
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        frames = getattr(config, "num_frames", None)
        sizes = (height, width) if frames is None else (frames, height, width)
        pixels = every_scale(count, config.num_channels, sizes, generator)
        return {"pixel_values": pixels if frames is None else pixels.transpose(1, 2)}
    raise CalibrationError(
        f"the config of {type(model).__name__} does not say image_size and num_channels; pass batches of pixel_values"
    )


def _sound(
    model: PreTrainedModel, configs: Sequence[Any], count: int, length: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw raw sounds (N, samples), or spectrograms (N, frames, bins) or (N, bins, frames)."""
    for config in configs:
        bins = getattr(config, "num_mel_bins", None)
        if getattr(config, "inputs_to_logits_ratio", None):
            samples = length * config.inputs_to_logits_ratio
            return {"input_values": every_scale(count, 1, (samples,), generator)[:, 0]}
        if bins is not None and hasattr(config, "max_length"):  # AST
            sizes = (config.max_length, bins)
            return {"input_values": SPREAD * every_scale(count, 1, sizes, generator)[:, 0]}
        if hasattr(config, "input_feat_per_channel"):  # Speech2Text, whose features are normalised
            sizes = (length * 2**config.num_conv_layers, config.input_feat_per_channel)
            return {"input_features": every_scale(count, 1, sizes, generator)[:, 0]}
        if bins is not None and hasattr(config, "max_source_positions"):  # Whisper, which halves the frames
            sizes = (bins, 2 * config.max_source_positions)
            return {"input_features": SPREAD * every_scale(count, 1, sizes, generator)[:, 0]}
    raise CalibrationError(
        f"the config of {type(model).__name__} does not say how long its {model.main_input_name} are; pass batches "
        "of them as its processor makes them"
    )
