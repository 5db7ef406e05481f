"""Read tables and texts from files and data sets, by line or by column."""

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
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
DOCUMENTS = (".txt", ".md")
LONGEST_NAME = 255  # characters of a path that messages show in full
LONGEST_VALUE = 2**28  # characters of a value in a table


def split_columns(source: str | Path) -> tuple[str, list[str]]:
    """Split `FILE:column` or `FILE:first,second` into the file and its columns; a file's full name has none."""
    name, _, columns = str(source).rpartition(":")
    if not name or os.path.exists(source) or any(separator in columns for separator in "/\\"):
        return str(source), []
    return name, [column.strip() for column in columns.split(",")]


def read_texts(source: str | Path) -> tuple[list[Text], list[str]]:
    """Read texts or text pairs of a file or a data set, and return what `texts_of` does.

    The source is a file with one text a line, or two with a tab between them; a folder, each of whose .txt and .md
    files is one text, in subfolders too; `FILE:column`, or `FILE:first,second` for pairs, of a csv, tsv or jsonl
    file; `NAME:column` or `NAME:configuration:column` of the training split of a data set, on the hub or in a folder
    that `datasets` reads.
    """
    try:
        if os.path.isdir(source):
            return _read_folder(Path(source))
        return texts_of(_read_rows(source), str(source))
    except DataError as error:
        raise CalibrationError(str(error)) from error


def _read_folder(folder: Path) -> tuple[list[Text], list[str]]:
    """Read each document of a folder and its subfolders as one text; hidden files are left out."""
    names = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    files = [folder / name for name in names if not any(part.startswith(".") for part in name.parts)]
    documents = [path for path in files if path.suffix.lower() in DOCUMENTS]
    if not documents:
        raise DataError(f"{folder} holds no .txt or .md files, of which each is one text; pass a folder that does")
    texts, notes = texts_of(("".join(_read_lines(path)) for path in documents), str(folder))
    if others := len(files) - len(documents):
        notes.append(f"{others:,} of {len(files):,} files in {folder} are neither .txt nor .md, and are left out")
    return texts, notes


def texts_of(rows: Iterable[Any], source: str, most: int | None = None) -> tuple[list[Text], list[str]]:
    """Return up to `most` texts and pairs of rows that lack no text, and a sentence on rows that do."""
    count = 0

    def whole() -> Iterator[Text]:
        nonlocal count
        for row in rows:
            parts = _parts(row, source, count)
            count += 1
            if all(part.strip() for part in parts):
                yield parts[0] if len(parts) == 1 else (parts[0], parts[1])

    texts = list(islice(whole(), most))  # rows may have no end
    if not texts:
        blank = f"; all {count:,} are blank, or lack one text of a pair" if count else ""
        raise CalibrationError(f"{source} has no texts{blank}; pass at least one")
    left_out = f"{count - len(texts):,} of {count:,} texts are blank, or lack one text of a pair, and are left out"
    return texts, [left_out] if len(texts) < count else []


def _parts(row: Any, source: str, number: int) -> tuple[str, ...]:
    """Return the text or the two texts of a row, "" for a missing one (None, NaN)."""
    row = row.tolist() if isinstance(row, np.ndarray) else row
    values = tuple(row) if isinstance(row, tuple | list) and len(row) == 2 else (row,)
    parts = ["" if value is None or (isinstance(value, float) and isnan(value)) else value for value in values]
    wrong = next((part for part in parts if not isinstance(part, str)), None)
    if wrong is not None:
        raise CalibrationError(
            f"{source}: item {number} is or holds a {type(wrong).__name__}; expected a text, or a pair of texts"
        )
    return tuple(map(str, parts))  # NumPy strings are a subclass


def _read_rows(source: str | Path) -> Iterator[Any]:
    """Return an iterator over the texts or pairs of a file or a data set, blank and missing ones among them."""
    name, columns = split_columns(source)
    path = Path(name)
    suffix = path.suffix.lower()
    if len(columns) > 2:
        raise CalibrationError(f"{source} names {len(columns)} columns; expected one of texts, or two of pairs")
    if columns and not os.path.isfile(path) and suffix not in (*SEPARATORS, *JSON_LINES, ".txt"):
        return _select(_load_data_set(name, columns), name, columns)
    if suffix in JSON_LINES or suffix == ".csv" or (suffix in SEPARATORS and columns):
        return _select((row for _, row in read_table(path)), name, columns)
    if columns:
        raise CalibrationError(f"{path} has no columns to choose from; expected a {TABLES} file")
    return _texts_by_line(path)


def read_table(path: str | Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Read the rows of a .csv, .tsv or .jsonl file: the number of the line that each ends at, and column → value.

    The first line of a .csv or .tsv names the columns. Values of a .csv may stand in double quotes; in a .tsv quotes
    are text, as in GLUE's files. Blank lines are left out. A value that a line lacks is None.

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
        if path.exists() and not path.is_file():  # a pipe may never end
            raise OSError("expected a file")
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
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
        names = list(table.fieldnames or ())
        if repeated := [name for name in names if names.count(name) > 1]:
            raise DataError(f"{path} has several columns {repeated[0]!r}; expected one of each name")
        while (row := _next_row(table)) is not None:
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


def _next_row(table: Any) -> Any:
    """Read a row with values of any length; the csv module's limit is the process's, and is restored at once."""
    limit = csv.field_size_limit(LONGEST_VALUE)
    try:
        return next(table, None)
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
    return rows.select_columns(list(columns)) if set(columns) <= set(rows.column_names) else rows


def _select(rows: Iterable[Mapping[str, Any]], name: str, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the values of one column, or the pairs of two."""
    for number, row in enumerate(rows):
        if number == 0 and (not columns or not set(columns) <= set(row)):
            raise CalibrationError(
                f"{name} has the columns {', '.join(map(str, row)) or 'none'}; say which holds the texts, as in "
                f"{name}:{next(iter(row), 'text')}, or two with a comma between them for pairs"
            )
        values = tuple(row.get(column) for column in columns)
        yield values if len(values) == 2 else values[0]
