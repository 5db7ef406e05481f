"""Which devices have float64."""

import torch

WITHOUT_FLOAT64 = ("mps",)


def float64_device(device: torch.device) -> torch.device:
    """Return the device itself, or the CPU if the device has no float64 (Apple's MPS)."""
    return device if has_float64(device) else torch.device("cpu")


def has_float64(device: torch.device) -> bool:
    """Return whether a device supports float64."""
    return device.type not in WITHOUT_FLOAT64
