"""Keep tensors in memory as long as they have room there, and in files otherwise."""

import os
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Self
from weakref import finalize

import torch
from torch import Tensor

from collab_compress.errors import CalibrationError, one_line

ROOM = 2 * 2**30  # bytes


class Room:
    """Room for tensors: `size` bytes of memory, and a temporary folder for those beyond it.

    Used as a context manager, which deletes the folder.
    """

    def __init__(self, size: int = ROOM) -> None:
        self.size, self.taken, self._files = size, 0, 0
        self._folder: TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor, on its device if it is in memory, on the CPU if it is in a file.

        Raises:
            CalibrationError: it cannot be written.
        """
        if self.taken + tensor.nbytes <= self.size:
            kept = tensor.clone()
            self.taken += tensor.nbytes
            finalize(kept, self._give_back, tensor.nbytes)
            return kept
        try:
            return self._in_file(tensor)
        except OSError as error:
            raise CalibrationError(
                f"hidden states of calibration data cannot be written to temporary files ({one_line(error)}); "
                "pass fewer sequences, or set TMPDIR to a folder with more room"
            ) from error

    def _in_file(self, tensor: Tensor) -> Tensor:
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="collab-compress-", ignore_cleanup_errors=True)
        self._files += 1
        path = os.path.join(self._folder.name, str(self._files))
        # Written, not only mapped: a disk that is full raises an error here, and ends the process in a mapped file.
        with open(path, "wb") as file:
            file.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        mapped = torch.from_file(path, shared=False, size=tensor.numel(), dtype=tensor.dtype)
        with suppress(OSError):  # systems that keep a mapped file until the folder goes
            os.unlink(path)
        return mapped.view(tensor.shape)

    def _give_back(self, size: int) -> None:
        self.taken -= size
