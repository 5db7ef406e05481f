"""Images or sounds of a folder as batches, by the processor that lies beside the model."""

import array
import sys
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoImageProcessor, PreTrainedModel
from transformers.image_utils import load_image

from collab_compress.errors import CalibrationError, one_line

IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
SOUNDS = (".wav",)


def folder_inputs(
    folder: Path, model: PreTrainedModel, count: int | None, seed: int
) -> tuple[dict[str, Tensor], int]:
    """Read the images or sounds of a folder, and of those in it, as the model's own processor makes them.

    Args:
        folder: where they are; sounds are 16-bit `.wav` files in the processor's sampling rate.
        model: the model; its processor is looked for where it was loaded from.
        count: how many to draw at random, if there are more; all of them if None.
        seed: of the draw.

    Returns:
        Keyword arguments for the model, each with all of them, and how many files there are.

    Raises:
        CalibrationError: there are none, there is no processor, or a file cannot be read.
    """
    sees = model.main_input_name in ("pixel_values", "input_ids")
    suffixes = IMAGES if sees else SOUNDS
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in suffixes)
    for file in files:
        if not file.is_file():  # reading a pipe would wait for ever
            raise CalibrationError(f"cannot read calibration data from {file}: expected a file")
    if not files:
        raise CalibrationError(
            f"{folder} holds no {'images' if sees else 'sounds'} for {type(model).__name__}; expected files that end "
            f"in {', '.join(suffixes)}, or pass batches as its processor makes them"
        )
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = [files[place] for place in order[:count]]
    return (_images(model, chosen) if sees else _sounds(model, chosen)), len(files)


def _processor(model: PreTrainedModel, auto_class: Any) -> Any:
    """Load the processor that lies beside the model; code that it brings along is not run."""
    try:
        return auto_class.from_pretrained(model.name_or_path, trust_remote_code=False)
    except Exception as error:  # of whatever kind Transformers raises for the file at hand
        raise CalibrationError(
            f"{type(model).__name__} has no processor at {model.name_or_path!r} ({one_line(error)}); save it there "
            "with processor.save_pretrained, or pass batches as it makes them"
        ) from error


def _images(model: PreTrainedModel, files: Sequence[Path]) -> dict[str, Tensor]:
    processor = _processor(model, AutoImageProcessor)
    pictures = []
    for file in files:
        try:
            pictures.append(load_image(str(file)))
        except ImportError as error:
            raise CalibrationError("images are read by Pillow: pip install pillow") from error
        except Exception as error:  # Pillow has a class of errors for each format
            raise CalibrationError(f"cannot read the image {file}: {one_line(error)}") from error
    return _processed(model, lambda: processor(pictures, return_tensors="pt"))


def _sounds(model: PreTrainedModel, files: Sequence[Path]) -> dict[str, Tensor]:
    extractor = _processor(model, AutoFeatureExtractor)
    rate = extractor.sampling_rate
    sounds = [read_sound(file, rate) for file in files]
    # Whisper takes features of one length only, which is what its extractor pads to if nothing is said.
    options = {} if hasattr(extractor, "nb_max_frames") else {"padding": True}
    return _processed(model, lambda: extractor(sounds, sampling_rate=rate, return_tensors="pt", **options))


def _processed(model: PreTrainedModel, process: Callable[[], Any]) -> dict[str, Tensor]:
    try:
        return dict(process())
    except Exception as error:
        raise CalibrationError(
            f"the processor of {type(model).__name__} cannot make batches of the files ({one_line(error)}); pass "
            "batches"
        ) from error


def read_sound(file: Path, rate: int) -> Any:
    """Read a 16-bit `.wav` file as floats between -1 and 1, its channels averaged, a NumPy array (samples,).

    Raises:
        CalibrationError: it is none, or has another sampling rate.
    """
    try:
        with wave.open(str(file)) as sound:
            found, channels, width = sound.getframerate(), sound.getnchannels(), sound.getsampwidth()
            frames = sound.readframes(sound.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise CalibrationError(f"cannot read the sound {file}: {error}; expected a 16-bit .wav file") from error
    if width != 2 or found != rate:
        raise CalibrationError(
            f"{file} has {8 * width} bits a sample and {found} samples a second; expected 16 and {rate}; convert it"
        )
    if len(frames) % (width * channels):
        raise CalibrationError(f"{file} ends in the middle of a sample; save it again")
    samples = array.array("h", frames)
    if sys.byteorder == "big":
        samples.byteswap()
    return (torch.tensor(samples, dtype=torch.float32).view(-1, channels).mean(1) / 2**15).numpy()
