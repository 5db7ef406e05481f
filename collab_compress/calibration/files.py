"""Read tables and texts from files and data sets, by line or by column."""

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isnan
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from collab_compress.errors import CalibrationError, DataError, install, one_line

Text: TypeAlias = str | tuple[str, str]
"""A text or a text pair."""

SEPARATORS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = (".jsonl", ".ndjson")
TABLES = ".csv, .tsv or .jsonl"
LONGEST_NAME = 255  # characters of a path that messages show in full
MOST_CHARACTERS = 2**28  # of texts that are read, and of one line of a file


def split_columns(source: str | Path) -> tuple[str, list[str]]:
    """Split `FILE:column` or `FILE:first,second` into the file and its columns.

    A source that exists under its full name, or has no colon, has no columns.

    Example:
        >>> split_columns("reviews.csv:text"), split_columns("mnli.tsv:premise,hypothesis")
        (('reviews.csv', ['text']), ('mnli.tsv', ['premise', 'hypothesis']))
    """
    name, _, columns = str(source).rpartition(":")
    if not name or os.path.exists(source) or any(separator in columns for separator in "/\\"):
        return str(source), []
    return name, [column.strip() for column in columns.split(",")]


def read_texts(source: str | Path) -> tuple[list[Text], list[str]]:
    """Read texts or text pairs of a file or a data set, by the rule of `texts_of`.

    Args:
        source: a file with one text a line, or two with a tab between them; `FILE:column`, or `FILE:first,second` for
            pairs, of a csv, tsv or jsonl file; `NAME:column` or `NAME:configuration:column` of the training split of
            a data set, on the hub or in a folder that `datasets` reads.

    Returns:
        The texts, and a sentence for each thing left out.

    Raises:
        CalibrationError: the source cannot be read, is not UTF-8, has no text, or lacks the columns.
    """
    try:
        return texts_of(_read_rows(source), str(source))
    except DataError as error:
        raise CalibrationError(str(error)) from error


def texts_of(rows: Iterable[Any], source: str, most: int | None = None) -> tuple[list[Text], list[str]]:
    """Return the texts and text pairs of rows from anywhere, without rows that lack a text.

    A text that is blank or missing (None, NaN) is left out, and so is a pair without one of its texts. Reading ends
    after 268 million characters.

    Args:
        rows: texts, or pairs of them.
        source: of the rows, for messages.
        most: number of texts to read; None for all.

    Returns:
        The texts as they are, and a sentence for each thing left out.

    Raises:
        CalibrationError: a row is something else, or there is no text.

    Example:
        >>> texts_of(["one", "", ("a source", "a target")], "the list")
        (['one', ('a source', 'a target')], ['1 of 3 texts are blank, or lack one text of a pair, and are left out'])
    """
    texts: list[Text] = []
    count = characters = 0
    notes = []
    for row in rows:
        if characters > MOST_CHARACTERS:
            notes.append(f"only the first {count:,} texts of {source} are read: {characters:,} characters")
            break
        parts = _parts(row, source, count)
        count += 1
        if all(part and part.strip() for part in parts):
            texts.append(parts[0] if len(parts) == 1 else (parts[0], parts[1]))
            characters += sum(map(len, parts))
            if len(texts) == most:  # the rows may have no end
                break
    if not texts:
        blank = f"; all {count:,} are blank, or lack one text of a pair" if count else ""
        raise CalibrationError(f"{source} has no texts{blank}; pass at least one")
    if len(texts) < count:
        notes.append(
            f"{count - len(texts):,} of {count:,} texts are blank, or lack one text of a pair, and are left out"
        )
    return texts, notes


def _parts(row: Any, source: str, place: int) -> tuple[str, ...]:
    """Return the text or the two texts of a row, "" for a missing one."""
    row = row.tolist() if isinstance(row, np.ndarray) else row
    values = tuple(row) if isinstance(row, tuple | list) and len(row) == 2 else (row,)
    parts = ["" if value is None or (isinstance(value, float) and isnan(value)) else value for value in values]
    wrong = next((part for part in parts if not isinstance(part, str)), None)
    if wrong is not None:
        raise CalibrationError(
            f"{source}: item {place} is or holds a {type(wrong).__name__}; expected a text, or a pair of texts"
        )
    return tuple(map(str, parts))  # NumPy strings are a subclass


def _read_rows(source: str | Path) -> Iterator[Any]:
    """Return an iterator over the texts or pairs of a file or a data set, blank and missing ones among them."""
    name, columns = split_columns(source)
    path = Path(name)
    suffix = path.suffix.lower()
    if len(columns) > 2:
        raise CalibrationError(f"{source} names {len(columns)} columns; expected one of texts, or two of pairs")
    if os.path.exists(path) and not (os.path.isfile(path) or (columns and os.path.isdir(path))):
        raise CalibrationError(f"cannot read calibration texts from {path}: expected a file")  # a pipe may never end
    if columns and not os.path.isfile(path) and suffix not in (*SEPARATORS, *JSON_LINES, ".txt"):
        return _select(_load_data_set(name, columns), name, columns)
    if suffix in JSON_LINES or suffix == ".csv" or (suffix in SEPARATORS and columns):
        return _select((row for _, row in read_table(path)), name, columns)
    if columns:
        raise CalibrationError(f"{path} has no columns to choose from; expected a {TABLES} file")
    return _texts_by_line(path)


def read_table(path: str | Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Read the rows of a .csv, .tsv or .jsonl file; the columns of the first two are those of the first line.

    Values of a .csv may stand in double quotes; in a .tsv quotes are text, as in GLUE's files. Blank lines are left
    out. A value that a line lacks is None.

    Yields:
        The number of the line that a row ends at, and column → value.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or a line of it is malformed.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (*SEPARATORS, *JSON_LINES):
        raise DataError(f"{path} is no table; expected a {TABLES} file")
    return _parse_json_lines(path) if suffix in JSON_LINES else _parse_table(path, SEPARATORS[suffix])


def _read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, with their ends."""
    number = 0
    try:
        with path.open("rb") as file:
            while raw := file.readline(MOST_CHARACTERS + 1):
                number += 1
                if len(raw) > MOST_CHARACTERS:
                    raise DataError(f"{path}, line {number}: more than {MOST_CHARACTERS:,} bytes; divide it")
                if b"\0" in raw:
                    raise DataError(f"{path}, line {number}: NUL characters, as in UTF-16; expected UTF-8")
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                yield from io.StringIO(text, newline="")  # a line may end with \r alone
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 ({error.reason}, byte {error.start + 1})") from error
    except (OSError, ValueError) as error:
        name = str(path) if len(str(path)) <= LONGEST_NAME else f"{str(path)[:60]}…"
        reason = getattr(error, "strerror", None) or error
        advice = "; if it is a text, pass a list of texts" if " " in str(path) and not os.path.exists(path) else ""
        raise DataError(f"cannot read {name}: {reason}{advice}") from error


def _texts_by_line(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_read_lines(path), 1):
        parts = tuple(line.rstrip("\r\n").split("\t"))
        if len(parts) > 2:
            raise DataError(
                f"{path}, line {number}: {len(parts)} columns, {line.strip()[:40]!r}; expected one text a line, or "
                f"two with a tab between them; name columns of a {TABLES} file as {path.name}:COLUMN"
            )
        yield parts if len(parts) == 2 else parts[0]


def _parse_table(path: Path, separator: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    quoting: Any = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
    table = csv.DictReader(_read_lines(path), delimiter=separator, quoting=quoting, strict=True)
    try:
        with _long_fields():
            repeated = [name for name, count in Counter(table.fieldnames or ()).items() if count > 1]
        if repeated:
            raise DataError(f"{path} has several columns {repeated[0]!r}; expected one of each name")
        while True:
            with _long_fields():
                row = next(table, None)
            if row is None:
                return
            if None in row:
                raise DataError(
                    f"{path}, line {table.line_num}: more columns than the first line names; quote texts that hold "
                    "the separator, and leave out separators at the ends of lines"
                )
            yield table.line_num, row
    except csv.Error as error:
        raise DataError(
            f"{path}, line {table.line_num + 1}: {error}, in the row that begins here; double quotes enclose values"
        ) from error


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let the csv module read long fields: its limit is that of the process, so it changes for one row at a time."""
    limit = csv.field_size_limit(MOST_CHARACTERS)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _parse_json_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(_read_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: {error}; expected one JSON object a line") from error
        if not isinstance(row, Mapping):
            raise DataError(f"{path}, line {number}: a {type(row).__name__}; expected one JSON object a line")
        yield number, row


def _load_data_set(name: str, columns: Sequence[str]) -> Any:
    try:
        from datasets import load_dataset  # of the extra `data`
    except ImportError as error:
        raise CalibrationError(
            f"{name} is no file, and data sets need the package datasets: {install('data')}"
        ) from error
    repository, _, configuration = name.partition(":")
    try:
        rows = load_dataset(repository, configuration or None, split="train")
    except Exception as error:  # of many kinds: no network, no such name, a file of another kind
        raise CalibrationError(
            f"{name} is no file, and as a data set it cannot be loaded: {one_line(error)}"
        ) from error
    _check_columns(name, columns, rows.column_names)
    return rows.select_columns(list(columns))


def _check_columns(name: str, columns: Sequence[str], present: Sequence[str]) -> None:
    if not columns or not set(columns) <= set(present):
        raise CalibrationError(
            f"{name} has the columns {', '.join(map(str, present)) or 'none'}; say which holds the texts, as in "
            f"{name}:{present[0] if present else 'text'}, or two with a comma between them for pairs"
        )


def _select(rows: Iterable[Mapping[str, Any]], name: str, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the values of one column, or the pairs of two."""
    for number, row in enumerate(rows):
        if number == 0:
            _check_columns(name, columns, list(row))
        values = tuple(row.get(column) for column in columns)
        yield values if len(values) == 2 else values[0]
