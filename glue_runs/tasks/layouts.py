"""Layouts of data sets in text files; errors name file and line."""

import csv
import gzip
import json
import logging
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias
from xml.sax.saxutils import unescape

from collab_compress.errors import DataError

Place: TypeAlias = tuple[Path, int]
"""A file, and a line of it counted from 1."""


def malformed(place: Place, what: str) -> DataError:
    """Return the error for a line of a file."""
    return DataError(f"{place[0]}, line {place[1]}: {what}")


def read_lines(path: Path, encoding: str = "utf-8") -> Iterator[tuple[Place, str]]:
    r"""Read the lines of a file, gzipped where its name ends in .gz.

    Lines end at \n or \r\n only: at other characters that Unicode counts as line ends, parallel files would fall out
    of step. A byte-order mark is left out.

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


logger = logging.getLogger("collab_compress.glue_runs")  # held with the warnings of the library
Row: TypeAlias = dict[str, Any]
Placed: TypeAlias = tuple[Place, Row]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Base class of layouts.

    Args:
        files: split → its parts, read one after another; a part is a path in the task's folder, plain or with .gz
            added, or several separated by `|`, of which the first that exists is read.
        optional: splits that may be missing.
        unlabelled: splits that may lack labels; these become −1.
        first_label: number of the first class where labels are numbers; None where they are names.
        left_out: labels whose rows are left out.
        encoding: of the text.
    """

    files: Mapping[str, tuple[str, ...]]
    optional: tuple[str, ...] = ()
    unlabelled: tuple[str, ...] = ()
    first_label: int | None = None
    left_out: tuple[str, ...] = ()
    encoding: str = "utf-8"

    def candidates(self, part: str, languages: tuple[str, str] | None) -> list[tuple[str, ...]]:
        """List the possible files of a part of a split, each a tuple of files that belong together."""
        return [(name,) for name in part.split("|")]

    def rows(self, paths: Sequence[Path], unlabelled: bool) -> Iterator[Placed]:
        """Read the rows of a part; the label is None for rows of unlabelled splits."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Table(Layout):
    """Rows of columns, split at a delimiter.

    Args:
        text: columns whose texts, joined by spaces, are the text.
        pair: column with the second text.
        label: column with the label.
        columns: names of the columns where the first line does not name them; in unlabelled splits it always does.
        delimiter: between columns.
        quoted: whether quotes enclose fields; otherwise they are text.
        broken: whether rows with another number of columns are left out instead of raising.
    """

    text: tuple[str, ...]
    label: str
    pair: str | None = None
    columns: tuple[str, ...] = ()
    delimiter: str = "\t"
    quoted: bool = False
    broken: bool = False

    def rows(self, paths: Sequence[Path], unlabelled: bool) -> Iterator[Placed]:
        """Read the rows of a file."""
        records = self._records(paths[0])
        columns = list(self.columns)
        if not columns or unlabelled:
            place, columns = next(records, ((paths[0], 1), []))
            needed = [*self.text, *([self.pair] if self.pair else []), *([] if unlabelled else [self.label])]
            if not columns:
                names = ", ".join(needed)
                raise malformed(place, f"the file is empty; expected a line that names columns: {names}")
            for name in needed:
                if name not in columns:
                    raise malformed(
                        place, f"no column {name!r}; expected {', '.join(needed)}, got {', '.join(columns)}"
                    )
        broken = 0
        for place, record in records:
            if len(record) != len(columns):
                if self.broken:
                    broken += 1
                    continue
                raise malformed(place, f"{len(record)} columns; expected {len(columns)}: {', '.join(columns)}")
            row = dict(zip(columns, record, strict=True))
            texts = {"text": " ".join(row[name] for name in self.text if row[name])}
            if self.pair:
                texts["text_pair"] = row[self.pair]
            yield place, {**texts, "label": row.get(self.label)}
        if broken:
            logger.warning("%s: left out %d lines that do not have %d columns", paths[0], broken, len(columns))

    def _records(self, path: Path) -> Iterator[tuple[Place, list[str]]]:
        """Split the lines of a file into columns; blank lines are left out."""
        lines = read_lines(path, self.encoding)
        if not self.quoted:
            yield from ((place, line.split(self.delimiter)) for place, line in lines if line)
            return
        reader = csv.reader((f"{line}\n" for _, line in lines), delimiter=self.delimiter, strict=True)
        while True:
            place = (path, reader.line_num + 1)
            try:
                record = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise malformed(place, f"cannot be split into columns ({error})") from error
            if record:
                yield place, record


@dataclass(frozen=True, kw_only=True)
class Folders(Layout):
    """A folder for each class, a file for each text, as in IMDB; in order of class, then of number in the name."""

    classes: tuple[str, ...]

    def rows(self, paths: Sequence[Path], unlabelled: bool) -> Iterator[Placed]:
        """Read the texts in the folders of the classes."""
        for number, name in enumerate(self.classes, start=self.first_label or 0):
            folder = paths[0] / name
            files = [path for path in folder.glob("*.txt") if path.is_file()]
            if not files:
                raise DataError(f"{folder} has no texts; expected a file NUMBER_RATING.txt for each")
            for path in sorted(files, key=_number):
                text = "\n".join(line for _, line in read_lines(path, self.encoding))
                yield (path, 1), {"text": text, "label": str(number)}


def _number(path: Path) -> tuple[int, str]:
    number = path.name.partition("_")[0].partition(".")[0]
    return (int(number) if number.isascii() and number.isdigit() else -1, path.name)


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
class JsonLines(Layout):
    """A JSON object on each line, with the columns as keys."""

    text: str
    label: str
    pair: str | None = None

    def rows(self, paths: Sequence[Path], unlabelled: bool) -> Iterator[Placed]:
        """Read the lines of a file; blank ones are left out."""
        names = {"text": self.text, "label": self.label} | ({"text_pair": self.pair} if self.pair else {})
        for place, line in read_lines(paths[0], self.encoding):
            if not line:
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise malformed(place, f"not JSON ({error})") from error
            for name in names.values():
                if not isinstance(record, dict) or not isinstance(record.get(name), str):
                    raise malformed(
                        place, f"no text under {name!r}; expected an object with {', '.join(names.values())}"
                    )
            yield place, {column: record[name] for column, name in names.items()}


SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.IGNORECASE)
ENTITIES = {"&quot;": '"', "&apos;": "'"}


@dataclass(frozen=True, kw_only=True)
class Parallel(Layout):
    """A file for each language, line for line.

    In file names, `{lang}` is the language, `{pair}` both joined by a hyphen (in either order), `{tight}` both joined
    without, and `{side}` src or ref. Of files in markup (.sgm, .xml, train.tags) the sentences are read.
    """

    def candidates(self, part: str, languages: tuple[str, str] | None) -> list[tuple[str, ...]]:
        """List pairs of a source and a target file."""
        if languages is None:
            raise DataError("parallel files need a source and a target language; pass source=… and target=…")
        source, target = languages
        candidates: dict[tuple[str, ...], None] = {}  # an ordered set
        for name in part.split("|"):
            for pair in (f"{source}-{target}", f"{target}-{source}"):
                words = {"pair": pair, "tight": source + target}
                try:
                    source_file = name.format(lang=source, side="src", **words)
                    target_file = name.format(lang=target, side="ref", **words)
                except (KeyError, IndexError, ValueError) as error:
                    raise DataError(
                        f"file name {name!r} has an unknown placeholder; expected {{lang}}, {{side}}, {{pair}} or "
                        "{tight}"
                    ) from error
                if source_file == target_file:
                    raise DataError(f"file name {name!r} is that of both languages; put {{lang}} where they differ")
                candidates[source_file, target_file] = None
        return list(candidates)

    def rows(self, paths: Sequence[Path], unlabelled: bool) -> Iterator[Placed]:
        """Read two files side by side."""
        sources, targets = (read_sentences(path, self.encoding) for path in paths)
        for count, (source, target) in enumerate(zip_longest(sources, targets)):
            if source is None or target is None:
                longer = count + 1 + sum(1 for _ in (targets if source is None else sources))
                lengths = (count, longer) if source is None else (longer, count)
                counts = f"{paths[0].name} has {lengths[0]} sentences and {paths[1].name} has {lengths[1]}"
                place = (source or target)[0]
                raise malformed(place, f"no counterpart: {counts}; parallel files must match line by line")
            yield source[0], {"source": source[1], "target": target[1]}


def read_sentences(path: Path, encoding: str = "utf-8") -> Iterator[tuple[Place, str]]:
    """Read the sentences of a file, in markup or one a line."""
    segments = path.name.removesuffix(".gz").endswith((".sgm", ".xml"))
    tagged = path.name.startswith("train.tags.")
    for place, line in read_lines(path, encoding):
        if segments:
            for sentence in SEGMENT.findall(line):
                yield place, unescape(sentence, ENTITIES).strip()
            if "<seg" in SEGMENT.sub("", line):
                raise malformed(place, "a <seg> does not end on its line")
        elif not tagged:
            yield place, line
        elif not line.startswith("<"):
            yield place, unescape(line, ENTITIES).strip()


@dataclass(frozen=True, kw_only=True)
class Text(Layout):
    """A text a line.

    Args:
        strip: whether white space at the ends of a line is removed.
    """

    strip: bool = False

    def rows(self, paths: Sequence[Path], unlabelled: bool) -> Iterator[Placed]:
        """Read the lines of a file."""
        for place, line in read_lines(paths[0], self.encoding):
            yield place, {"text": line.strip() if self.strip else line}
