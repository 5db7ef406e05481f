"""Layouts of data sets in text files; errors name file and line."""

import gzip
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

from collab_compress.errors import DataError

Place: TypeAlias = tuple[Path, int]
"""A file, and a line of it counted from 1."""


def malformed(place: Place, what: str) -> DataError:
    """Return the error for a line of a file."""
    return DataError(f"{place[0]}, line {place[1]}: {what}")


def read_lines(path: Path, encoding: str = "utf-8") -> Iterator[tuple[Place, str]]:
    r"""Yield the place of each line of a file, plain or .gz, and the line without its end, \n or \r\n."""
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


logger = logging.getLogger("collab_compress.glue_runs")  # held with the warnings of the library
Row: TypeAlias = dict[str, Any]
Placed: TypeAlias = tuple[Place, Row]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Base class of layouts.

    `files` maps a split to its parts, read one after another. A part is a path in the task's folder, plain or with
    .gz added, or several paths separated by `|`, of which the first that exists is read.
    """

    files: Mapping[str, tuple[str, ...]]
    optional: tuple[str, ...] = ()  # splits that may be missing
    unlabelled: tuple[str, ...] = ()  # splits that may lack labels; these become −1
    numbered: bool = False  # whether labels are numbers of classes, from 0; otherwise they are names
    encoding: str = "utf-8"

    def candidates(self, part: str, languages: tuple[str, str] | None) -> list[tuple[str, ...]]:
        """List the possible files of a part of a split, each a tuple of files that belong together."""
        return [(name,) for name in part.split("|")]

    def rows(self, paths: Sequence[Path], unlabelled: bool) -> Iterator[Placed]:
        """Read the rows of a part; the label is None for rows of unlabelled splits."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Table(Layout):
    """Rows of columns, split at tabs; quotes are text, and blank lines are left out."""

    text: str  # column with the text
    label: str
    pair: str | None = None  # column with the second text
    columns: tuple[str, ...] = ()  # where the first line does not name them; in unlabelled splits it always does
    broken: bool = False  # whether rows with another number of columns are left out instead of raising

    def rows(self, paths: Sequence[Path], unlabelled: bool) -> Iterator[Placed]:
        """Read the rows of a file."""
        records = ((place, line.split("\t")) for place, line in read_lines(paths[0], self.encoding) if line)
        columns = list(self.columns)
        if not columns or unlabelled:
            place, columns = next(records, ((paths[0], 1), []))
            needed = [self.text, *([self.pair] if self.pair else []), *([] if unlabelled else [self.label])]
            if missing := [name for name in needed if name not in columns]:
                names = ", ".join(columns) or "an empty file"
                raise malformed(place, f"no column {missing[0]!r}; expected {', '.join(needed)}, got {names}")
        broken = 0
        for place, record in records:
            if len(record) != len(columns):
                if self.broken:
                    broken += 1
                    continue
                raise malformed(place, f"{len(record)} columns; expected {len(columns)}: {', '.join(columns)}")
            row = dict(zip(columns, record, strict=True))
            pair = {"text_pair": row[self.pair]} if self.pair else {}
            yield place, {"text": row[self.text], **pair, "label": row.get(self.label)}
        if broken:
            logger.warning("%s: left out %d lines that do not have %d columns", paths[0], broken, len(columns))


@dataclass(frozen=True, kw_only=True)
class LabelFirst(Layout):
    """A label, a space and a text on each line, as in TREC; of a label `COARSE:fine` the coarse part counts."""

    def rows(self, paths: Sequence[Path], unlabelled: bool) -> Iterator[Placed]:
        """Read the lines of a file; blank ones are left out."""
        for place, line in read_lines(paths[0], self.encoding):
            if not line:
                continue
            label, space, text = line.partition(" ")
            if not space or not text:
                raise malformed(place, f"got {line!r}; expected a label, a space and a text")
            yield place, {"text": text, "label": label.partition(":")[0]}


@dataclass(frozen=True, kw_only=True)
class Parallel(Layout):
    """A file for each language, line for line; `{lang}` in file names is the language."""

    def candidates(self, part: str, languages: tuple[str, str] | None) -> list[tuple[str, ...]]:
        """List pairs of a source and a target file."""
        if languages is None:
            raise DataError("parallel files need a source and a target language; pass source=… and target=…")
        if fixed := [name for name in part.split("|") if "{lang}" not in name]:
            raise DataError(f"file name {fixed[0]!r} is that of both languages; put {{lang}} where they differ")
        return [tuple(name.replace("{lang}", lang) for lang in languages) for name in part.split("|")]

    def rows(self, paths: Sequence[Path], unlabelled: bool) -> Iterator[Placed]:
        """Read two files side by side."""
        sources, targets = (read_lines(path, self.encoding) for path in paths)
        for source, target in zip_longest(sources, targets):
            if source is None or target is None:
                other = paths[source is not None].name
                raise malformed((source or target)[0], f"no counterpart in {other}; both must match line by line")
            yield source[0], {"source": source[1], "target": target[1]}


@dataclass(frozen=True, kw_only=True)
class Text(Layout):
    """A text a line."""

    strip: bool = False  # whether white space at the ends of a line is removed

    def rows(self, paths: Sequence[Path], unlabelled: bool) -> Iterator[Placed]:
        """Read the lines of a file."""
        for place, line in read_lines(paths[0], self.encoding):
            yield place, {"text": line.strip() if self.strip else line}
