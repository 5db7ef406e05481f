"""Keep tensors in memory as long as they have room there, and in files otherwise."""

import os
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Self
from weakref import finalize

import torch
from torch import Tensor

ROOM = 2 * 2**30  # bytes


class Room:
    """Room for tensors: `size` bytes of memory, and a temporary folder for those beyond it.

    Used as a context manager, which deletes the folder.
    """

    def __init__(self, size: int = ROOM) -> None:
        self.size, self.taken, self._files = size, 0, 0
        self._folder = TemporaryDirectory(prefix="collab-compress-", ignore_cleanup_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor, on its device if it is in memory, on the CPU if it is in a file."""
        if self.taken + tensor.nbytes <= self.size:
            kept = tensor.clone()
            self.taken += tensor.nbytes
            finalize(kept, self._give_back, tensor.nbytes)
            return kept
        self._files += 1
        path = os.path.join(self._folder.name, str(self._files))
        mapped = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype)
        with suppress(OSError):  # systems that keep a mapped file until the folder goes
            os.unlink(path)
        return mapped.view(tensor.shape).copy_(tensor)

    def _give_back(self, size: int) -> None:
        self.taken -= size
