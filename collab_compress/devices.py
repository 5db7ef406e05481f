"""What devices can do, and which work is done on."""

from contextlib import AbstractContextManager
from math import inf
from typing import Any

import torch

WITHOUT_FLOAT64 = ("mps",)
EMULATED = "this processor only emulates bfloat16, and float32 is faster"


def float64_device(device: torch.device) -> torch.device:
    """Return the device itself, or the CPU if the device has no float64 (Apple's MPS)."""
    return device if has_float64(device) else torch.device("cpu")


def work_device(device: torch.device | str | None, weights: torch.Tensor) -> torch.device:
    """Return a device for work in float64: the given one, or by default that of the weights, or the CPU.

    Raises a ValueError for a device that is unknown or absent, has no float64, or is `meta`.
    """
    try:
        device = float64_device(weights.device) if device is None else torch.device(device)
        torch.empty(0, dtype=torch.float64, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"cannot work on device {device}: {str(error).partition(chr(10))[0]}") from error
    if "meta" in (device.type, weights.device.type):
        raise ValueError("tensors on the meta device have no values; load the weights first")
    return device


def free_memory(device: torch.device) -> float:
    """Return the bytes that are free on a GPU, those that PyTorch has reserved and does not use included; else ∞."""
    if device.type != "cuda":
        return inf
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + unused)


def forked_rng(device: torch.device) -> AbstractContextManager[None]:
    """Restore the random number generators of the CPU, and of a GPU, after a `with` block."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def has_float64(device: torch.device) -> bool:
    """Return whether a device supports float64."""
    return device.type not in WITHOUT_FLOAT64


def emulates_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies in bfloat16 by plain loops, as PyTorch does on x86 without AVX-512."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not in PyTorch 2.6
    is_x86 = device.type == "cpu" and capabilities.get("architecture") == "x86_64"
    return is_x86 and not capabilities.get("avx512_bw")
