"""Read calibration texts: one a line of a file, or columns of csv, tsv and jsonl files and of data sets."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from collab_compress.errors import CalibrationError, one_line

__all__ = ["Text", "read_texts", "split_columns"]

Text: TypeAlias = str | tuple[str, str]

TABLES = {".csv": ",", ".tsv": "\t"}  # what separates their columns
JSON_LINES = (".jsonl", ".ndjson")


def split_columns(source: str | Path) -> tuple[str, list[str]]:
    """Split `FILE:column` or `FILE:first,second` into the file and its columns.

    A source that exists under its whole name, or has no colon, has no columns.
    """
    name, _, columns = str(source).rpartition(":")
    if not name or Path(source).exists() or any(separator in columns for separator in "/\\"):
        return str(source), []
    return name, [column.strip() for column in columns.split(",")]


def read_texts(source: str | Path) -> list[Text]:
    """Read texts, or pairs of texts; blank ones are left out.

    Args:
        source: a file of one text a line, or of two with a tab between them; `FILE:column`, or `FILE:first,second`
            for pairs, with a csv, tsv or jsonl file; `NAME:column` or `NAME:configuration:column` with a data set on
            the hub or a folder that `datasets` reads, of which the training split is taken.

    Raises:
        CalibrationError: the source cannot be read, is not UTF-8, has no text, or lacks the columns.
    """
    name, columns = split_columns(source)
    path = Path(name)
    kind = path.suffix.lower()
    if len(columns) > 2:
        raise CalibrationError(f"{source} names {len(columns)} columns; expected one of texts, or two of pairs")
    if columns and not path.is_file() and kind not in (*TABLES, *JSON_LINES, ".txt"):
        return _chosen(_data_set(name, columns), name, columns)
    content = _content(path)
    if kind in JSON_LINES:
        return _chosen(_json_rows(path, content), name, columns)
    if kind == ".csv" or (kind in TABLES and columns):
        return _chosen(_table_rows(path, content, TABLES[kind]), name, columns)
    if columns:
        raise CalibrationError(f"{path} has no columns to choose from; expected a .csv, .tsv or .jsonl file")
    return _lines(path, content)


def _content(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise CalibrationError(f"cannot read calibration texts from {path}: expected a file")
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"cannot read calibration texts from {path}: {error}") from error
    if "\0" in content:
        raise CalibrationError(f"{path} holds NUL characters, as UTF-16 does; expected texts in UTF-8")
    return content


def _lines(path: Path, content: str) -> list[Text]:
    """Return one text a line, or a pair where a tab stands between two."""
    texts: list[Text] = []
    for line in content.split("\n"):
        first, *rest = (part.strip() for part in line.strip().split("\t"))
        if len(rest) > 1:
            raise CalibrationError(
                f"{path} has a line of {len(rest) + 1} columns, {line.strip()[:40]!r}; expected one text a line, or "
                f"two with a tab between them; name columns of a .csv, .tsv or .jsonl file as {path.name}:COLUMN"
            )
        if rest:
            texts.append((first, rest[0]))
        elif first:
            texts.append(first)
    if not texts:
        raise CalibrationError(f"{path} has no text; expected one text a line")
    return texts


def _table_rows(path: Path, content: str, separator: str) -> list[Mapping[str, Any]]:
    """Return the rows of a table under its first line; GLUE's tsv files quote nothing."""
    lines = io.StringIO(content, newline="")
    try:
        if separator == "\t":
            return list(csv.DictReader(lines, delimiter=separator, quoting=csv.QUOTE_NONE))
        return list(csv.DictReader(lines, delimiter=separator))
    except csv.Error as error:
        raise CalibrationError(f"cannot read calibration texts from {path}: {error}") from error


def _json_rows(path: Path, content: str) -> list[Mapping[str, Any]]:
    rows = []
    for place, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise CalibrationError(f"{path}, line {place}: {error}; expected one JSON object a line") from error
        if not isinstance(row, Mapping):
            raise CalibrationError(f"{path}, line {place}: a {type(row).__name__}; expected one JSON object a line")
        rows.append(row)
    return rows


def _data_set(name: str, columns: Sequence[str]) -> Any:
    """Return the training split of a data set on the hub, or in a folder."""
    try:
        from datasets import load_dataset  # of the extra `data`
    except ImportError as error:
        raise CalibrationError(
            f"{name} is no file, and data sets take the package datasets: pip install 'collab-compress[data]'"
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


def _check_columns(name: str, columns: Sequence[str], present: Iterable[str]) -> None:
    present = list(present)
    if not columns or not set(columns) <= set(present):
        raise CalibrationError(
            f"{name} has the columns {', '.join(map(str, present)) or 'none'}; say which holds the texts, as in "
            f"{name}:{present[0] if present else 'text'}, or two with a comma between for pairs"
        )


def _chosen(rows: Iterable[Mapping[str, Any]], name: str, columns: Sequence[str]) -> list[Text]:
    """Return the texts of one column, or the pairs of two; rows that lack one are left out."""
    texts: list[Text] = []
    checked = False
    for row in rows:
        if not checked:
            _check_columns(name, columns, [key for key in row if key is not None])
            checked = True
        parts = [row.get(column) for column in columns]
        wrong = next((part for part in parts if part is not None and not isinstance(part, str)), None)
        if wrong is not None:
            raise CalibrationError(
                f"{name}:{','.join(columns)} holds values of type {type(wrong).__name__}; expected texts"
            )
        found = [part.strip() for part in parts if part and part.strip()]
        if len(found) == len(columns):
            texts.append(found[0] if len(found) == 1 else (found[0], found[1]))
    if not texts:
        raise CalibrationError(f"{name} has no texts in {', '.join(columns) or 'it'}")
    return texts
