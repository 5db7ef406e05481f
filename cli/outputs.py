"""Where commands write: every place is checked before the work, and a user's text file is edited in place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import BinaryIO

from collab_compress.checkpoint.directory import refuse_place
from collab_compress.errors import CheckpointError, CollabCompressError


def check_outputs(outputs: Mapping[str, Path | None], *inputs: Path | None) -> None:
    """Refuse outputs that exist, that cannot be written, or that lie in an input or in one another.

    Args:
        outputs: option → the path it names, if it is given.
        inputs: files and directories that the command reads.

    Raises:
        CheckpointError: something is there, it lies in an input, or nothing can be written there.
        CollabCompressError: two outputs are the same, or one lies in the other.
    """
    refuse_nested(outputs)
    for path in outputs.values():
        if path is not None:
            refuse_place(path, *(read for read in inputs if read is not None))


def refuse_nested(outputs: Mapping[str, Path | None]) -> None:
    """Refuse outputs that are the same or lie in one another.

    Raises:
        CollabCompressError: two of them do.
    """
    places = {option: Path(os.path.realpath(path)) for option, path in outputs.items() if path is not None}
    for (inner, path), (outer, directory) in permutations(places.items(), 2):
        if path == directory:
            raise CollabCompressError(f"{inner} and {outer} are both {outputs[outer]}; choose two places")
        if path.is_relative_to(directory):
            raise CollabCompressError(f"{inner} {outputs[inner]} lies in {outer} {outputs[outer]}; choose two places")


def check_editable(path: Path) -> None:
    """Refuse a text file that cannot be edited in place.

    Raises:
        CheckpointError: it is no regular file, or it is write-protected.
    """
    if not path.is_file():
        raise CheckpointError(f"cannot edit {path}: expected a file that exists")
    if not path.stat().st_mode & 0o222 or not os.access(path, os.W_OK):
        raise CheckpointError(f"cannot edit {path}: it is write-protected")


def edit(path: Path, text: str) -> None:
    """Replace the text of a file in place, so that its mode, its owner and its hard links stay.

    Raises:
        CheckpointError: it cannot be written; it then holds what it held before.
    """
    check_editable(path)
    try:
        with path.open("r+b") as file:
            before = file.read()
            try:
                _fill(file, text.encode())
            except BaseException:
                _fill(file, before)
                raise
    except OSError as error:
        raise CheckpointError(f"cannot edit {path}: {error.strerror}") from error


def _fill(file: BinaryIO, content: bytes) -> None:
    file.seek(0)
    file.write(content)
    file.flush()
    file.truncate(len(content))
