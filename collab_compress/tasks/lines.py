"""Read text files line by line, so that whatever is wrong in one has a file and a line."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from collab_compress.errors import DataError

Place: TypeAlias = tuple[Path, int]
"""A file, and a line of it counted from 1."""


def malformed(place: Place, what: str) -> DataError:
    """Make the error for something wrong at a line of a file."""
    return DataError(f"{place[0]}, line {place[1]}: {what}")


def read_lines(path: Path, encoding: str = "utf-8") -> Iterator[tuple[Place, str]]:
    r"""Read the lines of a file, gzipped where its name ends in .gz.

    Lines end at \n or \r\n only: other characters that Unicode counts as line ends stay in the text, where parallel
    files would otherwise fall out of step. A byte-order mark is left out.

    Args:
        path: the file.
        encoding: of its text.

    Yields:
        The place of each line, and the line without its end.

    Raises:
        DataError: it cannot be opened, is no whole gzip file, or a line is not in that encoding.
    """
    line = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                text = raw.decode(encoding)
                if line == 1:
                    text = text.removeprefix("\ufeff")
                yield (path, line), text.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise malformed((path, line), f"not {encoding.upper()} ({error.reason}, byte {error.start + 1})") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise malformed((path, line + 1), f"not a whole gzip file ({error})") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
