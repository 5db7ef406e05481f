"""Which devices have float64, and which work is done on."""

from math import inf

import torch

WITHOUT_FLOAT64 = ("mps",)


def float64_device(device: torch.device) -> torch.device:
    """Return the device itself, or the CPU if the device has no float64 (Apple's MPS).

    Example:
        >>> float64_device(torch.device("mps"))
        device(type='cpu')
    """
    return device if has_float64(device) else torch.device("cpu")


def work_device(device: torch.device | str | None, weights: torch.Tensor) -> torch.device:
    """Return a device for work in float64: the given one, or by default that of the weights, or the CPU.

    Raises:
        ValueError: the device is unknown or absent, has no float64, or is `meta`.

    Example:
        >>> work_device(None, torch.ones(2))
        device(type='cpu')
    """
    try:
        place = float64_device(weights.device) if device is None else torch.device(device)
        torch.empty(0, dtype=torch.float64, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"cannot work on device {device}: {str(error).partition(chr(10))[0]}") from error
    if "meta" in (place.type, weights.device.type):
        raise ValueError("tensors on the meta device have no values; load the weights first")
    return place


def free_memory(device: torch.device) -> float:
    """Return the bytes that are free on a GPU, those that PyTorch has reserved and does not use included; else ∞.

    Example:
        >>> free_memory(torch.device("cpu"))
        inf
    """
    if device.type != "cuda":
        return inf
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + unused)


def has_float64(device: torch.device) -> bool:
    """Return whether a device supports float64.

    Example:
        >>> has_float64(torch.device("cpu")), has_float64(torch.device("mps"))
        (True, False)
    """
    return device.type not in WITHOUT_FLOAT64
